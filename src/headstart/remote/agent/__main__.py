"""Starts the agent: without arguments to answer requests, as `supervise ROOT LOCK` to do a run's job."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from .answers import Agent
from .supervisor import Supervisor


def main(arguments: list[str]) -> None:
    if arguments[:1] == ["supervise"]:
        Supervisor(Path(arguments[1]), int(arguments[2])).work()
        return
    try:
        Agent(sys.stdin.buffer.raw, sys.stdout.buffer).serve()  # type: ignore[attr-defined]
    except BrokenPipeError:
        os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
