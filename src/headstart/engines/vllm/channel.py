"""The host's two pipes and its end: commands that stop coming end it, whatever vLLM is doing. Standard library only."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import Any, NoReturn

WORKERS_WITHIN = 3.0  # seconds for workers to end by themselves
REMOVALS = 5

_ending = threading.Lock()


class Channel:
    """The two pipes. A thread reads the commands, so that their end is noticed whatever vLLM is doing."""

    def __init__(self, commands: int, events: int, scratch: Path) -> None:
        self._events = os.fdopen(events, "w", encoding="utf-8")
        self._commands: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._scratch = scratch
        threading.Thread(target=self._read, args=(commands,), daemon=True).start()

    def tell(self, event: str, **fields: Any) -> None:
        try:
            self._events.write(json.dumps({"event": event, **fields}) + "\n")
            self._events.flush()
        except BrokenPipeError:  # nobody is left to hear it, and this may be noticed before the end of the commands
            end(self._scratch)

    def next(self) -> dict[str, Any]:
        return self._commands.get()

    def _read(self, commands: int) -> None:
        try:
            with os.fdopen(commands, encoding="utf-8") as lines:
                for line in lines:
                    self._commands.put(json.loads(line))
        finally:  # also when whoever writes was killed within a line
            end(self._scratch)


def one_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if len(lines) > 1 and "validation error" in lines[0]:  # pydantic's count of them; the first one follows
        lines = lines[1:]
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"


def end(scratch: Path) -> NoReturn:
    """End this process and the workers it started, leaving nothing in memory.

    Either thread may come here, and the first does it all: one that left halfway would end the process under the other. The
    workers are in our process group. Python's resource tracker is too: it removes shared memory once all others have gone.
    """
    _ending.acquire()  # never released: a second comer waits for the exit
    deadline = time.monotonic() + WORKERS_WITHIN
    for number in (signal.SIGTERM, signal.SIGKILL):
        for worker in workers():
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker, number)
        while workers() and time.monotonic() < deadline:
            time.sleep(0.02)
    for _ in range(REMOVALS):  # the other thread of this process may still be writing a file
        shutil.rmtree(scratch, ignore_errors=True)
        if not scratch.exists():
            break
    os._exit(0)


def workers() -> list[int]:
    """The other processes of our group, but for resource trackers and those that have ended."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            state, _, group = (folder / "stat").read_text().rpartition(")")[2].split()[:3]
            tracker = b"resource_tracker" in (folder / "cmdline").read_bytes()
            if int(group) == os.getpgrp() and state != "Z" and int(folder.name) != os.getpid() and not tracker:
                found.append(int(folder.name))
    return found
