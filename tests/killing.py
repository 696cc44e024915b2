"""Run in a process of its own: makes an artifact over and over, each time killed one step later.

`python killing.py WHAT BASE START...`: for N = 0, 1, ... each folder START is copied to BASE/NAME-N, and a forked
child does WHAT (`make`, `read`) there until it reaches its N-th kill point and gets SIGKILL. Ends with the first N that
is not reached. Kill points lie before and after each call that changes a folder, and before, in the middle of and after
each write.
"""

from __future__ import annotations

import io
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from headstart import artifact, files

KIND = "things"
SETTINGS = {"size": 2, "name": "new"}
CHANGES = ("rename", "replace", "mkdir", "unlink", "rmdir")


def make(path: Path, settings: dict[str, Any] | None = None) -> bool:
    """A stage in small: two parts that are kept over a kill, a scratch file, a file written anew each time."""
    settings = settings or SETTINGS
    with artifact.create(path, KIND, settings, {}) as build:
        for number in range(2):
            part = build.file(f"part-{number}.txt")
            if not part.exists():
                files.write_text(part, f"{settings['name']} {number}\n" * 50)
        files.write_text(build.scratch / "state", "half way")
        files.write_json(build.file("deep/end.json"), settings)
        build.counts["parts"] = 2
        return build.resumed


def read(path: Path) -> None:
    artifact.read_manifest(path)


class Killer:
    """Ends this process at its `last`-th kill point."""

    def __init__(self, last: int) -> None:
        self.left = last

    def point(self) -> None:
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        self.left -= 1

    def around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            self.point()
            result = call(*args, **kwargs)
            self.point()
            return result

        return wrapped

    def arm(self) -> None:
        for name in CHANGES:
            setattr(os, name, self.around(getattr(os, name)))
        os.fsync = lambda _: None  # what survives a kill needs no disk
        artifact.versions = dict  # looking them up takes most of the time
        opened = io.open

        def tearing(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            made = opened(file, mode, *args, **kwargs)
            return made if "r" in mode and "+" not in mode else Torn(made, self)

        io.open = tearing  # type: ignore[assignment]


class Torn:
    """A file whose writes reach the disk in two halves."""

    def __init__(self, file: Any, killer: Killer) -> None:
        self._file, self._killer = file, killer

    def write(self, data: Any) -> None:
        for half in (data[: len(data) // 2], data[len(data) // 2 :]):
            self._killer.point()
            self._file.write(half)
            self._file.flush()
        self._killer.point()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> Torn:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def killed(work: Callable[[Path], Any], path: Path, last: int) -> bool:
    """Whether a child doing `work` was killed at point `last`; False when it ended before."""
    child = os.fork()
    if child == 0:
        try:
            Killer(last).arm()
            work(path)
            os._exit(0)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return True
    assert os.WEXITSTATUS(status) == 0, f"the child failed before point {last}"
    return False


def kill_everywhere(start: Path, base: Path, work: Callable[[Path], Any]) -> None:
    number = 0
    while True:
        case = base / f"{start.name}-{number:03d}"
        shutil.copytree(start, case)
        if not killed(work, case / KIND, number):
            return
        number += 1


if __name__ == "__main__":
    for argument in sys.argv[3:]:
        kill_everywhere(Path(argument), Path(sys.argv[2]), {"make": make, "read": read}[sys.argv[1]])
