"""The errors a person can cause, and how they are shown: what was wrong, what was expected, what to do."""

from __future__ import annotations

import errno

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # no more can be written: the disk, the quota or the file is full
MAKE_ROOM = "make room there, or lift the limit (quota, ulimit -f); the same command continues"


class HeadstartError(Exception):
    """Base of every error that is shown as short lines instead of a traceback."""

    exit_code = 2

    def __init__(self, what: str, *, looked_for: str | None = None, do: str | None = None) -> None:
        super().__init__(what)
        self.what = what
        self.looked_for = looked_for
        self.do = do

    def __reduce__(self):
        return _rebuild, (type(self), self.what, self.looked_for, self.do)

    def __str__(self) -> str:
        lines = [self.what]
        if self.looked_for:
            lines.append(f"  looked for: {self.looked_for}")
        if self.do:
            lines.append(f"  do: {self.do}")
        return "\n".join(lines)


class UserError(HeadstartError):
    """Something the user gave (a setting, a file, a model) cannot be used. Exit code 2."""


class GateError(HeadstartError):
    """A number that would have been silently wrong was stopped. Exit code 2."""


class Stopped(HeadstartError):
    """SIGTERM came, and what was done is saved. Exit code 143, which is what shells give a process that SIGTERM ended."""

    exit_code = 143


class StageFailed(HeadstartError):
    """A stage of a run ended with an error of these; names the stage, and has that error's exit code."""


def cannot_write(folder: object, error: OSError, do: str = "set `directory` to a writable place") -> UserError:
    return UserError(f"cannot write into {folder}: {error.strerror}", do=MAKE_ROOM if error.errno in FULL else do)


def install(extras: str) -> str:
    """What to do when an optional dependency is missing; extras: of pyproject.toml, e.g. `train,report`."""
    return f"in the folder of headstart's sources: pip install -e '.[{extras}]'"


def first_line(error: BaseException) -> str:
    """What another library's error says, for one line of ours; a heading that only announces the next line takes that along."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    count = 2 if lines and lines[0].endswith(":") else 1
    text = " ".join(lines[:count])
    told = count == 2 or type(error) is Exception or isinstance(error, (OSError, ValueError, RuntimeError, ImportError))
    return text if text and told else ": ".join(part for part in (type(error).__name__, text) if part)


def _rebuild(kind: type[HeadstartError], what: str, looked_for: str | None, do: str | None) -> HeadstartError:
    return kind(what, looked_for=looked_for, do=do)
