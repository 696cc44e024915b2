"""Run in a process of its own: `headstart run` in forked children that share the slow imports, each killed as told.

Reads one JSON line per attempt from stdin: `arguments` of the command; `point`: SIGKILL at that kill point (see
killing.py); or `stage` and `delay`: SIGKILL that many seconds after the stage is announced in the event log of `root`.
Answers each with a JSON line: `code` (None when killed), `points` met by a child that was not.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from headstart import cli, events, pipeline
from killing import Killer

MANY = 10**9
LOG = "output.txt"


def attempt(plan: dict[str, Any]) -> dict[str, Any]:
    root = Path(plan["root"])
    seen = started(root, plan.get("stage"))
    child = os.fork()
    if child == 0:
        work(plan["arguments"], root, plan.get("point"))
    if "delay" in plan:
        kill_later(child, root, plan["stage"], seen, plan["delay"])
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return {"code": None}
    points = root / "points"  # not there when the child ended with a traceback, which is in its output
    return {"code": os.WEXITSTATUS(status), "points": int(points.read_text()) if points.exists() else 0}


def work(arguments: list[str], root: Path, point: int | None) -> None:
    """In the child: the command, its output in a file."""
    code = 1
    try:
        output = os.open(root / LOG, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.argv = ["headstart", *arguments]
        killer = Killer(MANY if point is None else point)
        killer.arm()
        try:
            cli.main()
        except SystemExit as end:
            code = int(end.code or 0)
        (root / "points").write_text(str(MANY - killer.left))
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def started(root: Path, stage: str | None) -> int:
    log = events.read(root / "events.jsonl")
    return sum(event["event"] == "stage-start" and event["stage"] == stage for event in log)


def kill_later(child: int, root: Path, stage: str, seen: int, delay: float) -> None:
    while started(root, stage) == seen:
        time.sleep(0.002)
        if os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            return
    time.sleep(delay)
    os.kill(child, signal.SIGKILL)


if __name__ == "__main__":
    for stage in pipeline.STAGES:
        importlib.import_module(f"headstart.stages.{stage.verb}")
    importlib.import_module("headstart.engines.transformers")
    importlib.import_module("transformers.models.llama.modeling_llama")
    for line in sys.stdin:
        sys.stdout.write(json.dumps(attempt(json.loads(line))) + "\n")
        sys.stdout.flush()
