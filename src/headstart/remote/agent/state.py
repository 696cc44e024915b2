"""What is known of a run: whether it lives, how it ended, how far it is."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .common import read_json

TAIL = 16  # lines of the log that a status shows


def condition(root: Path, state: dict[str, Any] | None) -> str:
    """`new`, `running`, `finished`, `refused` (doctor said stop), `stopped`, `failed`, or `died`."""
    if state is None:
        return "new"
    if is_alive(root):
        return "running"
    now: dict[str, Any] = read_json(root / "state.json")  # it may have ended just now
    if now["phase"] != "ended":
        return "died"
    if now["stopped"]:
        return "stopped"
    if now["exit"] == 0:
        return "finished"
    return "refused" if (now["step"], now["exit"]) == ("doctor", 3) else "failed"


def is_alive(root: Path) -> bool:
    path = root / ".alive"
    if not path.exists():
        return False
    handle = os.open(str(path), os.O_RDWR)
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(handle)
    return False


def take(path: Path, patience: float = 0) -> int | None:
    """A locked handle of the file; None when another process holds it all the while."""
    handle = os.open(str(path), os.O_RDWR | os.O_CREAT, 0o644)
    give_up = time.monotonic() + patience
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return handle
        except BlockingIOError:
            if time.monotonic() >= give_up:
                os.close(handle)
                return None
            time.sleep(0.05)


def progress(events: Path) -> dict[str, Any]:
    """Stages that have ended with their seconds, the one at work, and the newest event, from the event log."""
    ended: dict[str, float] = {}
    stage, last = None, None
    for line in lines_of(events):
        last = line
        if '"stage-start"' in line or '"stage-end"' in line:
            event = parsed(line)
            if event.get("event") == "stage-start":
                stage = event["stage"]
            elif event.get("event") == "stage-end":
                ended[event["stage"]], stage = event["seconds"], None
    return {"stages": ended, "stage": stage, "last": parsed(last or "")}


def lines_of(path: Path) -> Iterator[str]:
    if path.exists():
        with path.open(encoding="utf-8", errors="replace") as file:
            yield from (line for line in file if line.endswith("\n"))


def parsed(line: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def tail(log: Path, start: int) -> tuple[int, list[str]]:
    """Where the whole lines of the log end, and the last of them after `start`."""
    if not log.exists():
        return 0, []
    with log.open("rb") as file:
        begin = max(start, log.stat().st_size - 8192)
        file.seek(begin)
        data = file.read()
    whole = data[: data.rfind(b"\n") + 1]
    return begin + len(whole), whole.decode("utf-8", "replace").splitlines()[-TAIL:]
