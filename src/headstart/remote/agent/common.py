"""Refusals, and small file habits."""

from __future__ import annotations

import errno
import hashlib
import json
import re
import shutil
import sys
from os import getpid
from pathlib import Path
from typing import Any

PROTOCOL = 1
MARKER = b"headstart-agent "
CHUNK = 1 << 20


class Refused(Exception):
    """What a person can mend, told as three lines."""

    def __init__(self, what: str, looked_for: str | None = None, do: str | None = None) -> None:
        super().__init__(what)
        self.told = {"what": what, "looked_for": looked_for, "do": do}


def home(name: str) -> Path:
    try:
        return Path(name).expanduser().absolute()
    except RuntimeError:
        raise Refused(f"there is no user there for {name}", do="correct the name, or give the whole path") from None


def within(base: Path, name: str) -> Path:
    parts = Path(name).parts
    if not parts or ".." in parts or Path(name).is_absolute():
        raise Refused(f"{name!r} is no path inside {base}")
    return base / name


def part_of(path: Path, digest: str) -> Path:
    """Where a file is while it comes: another place for another content, so only what belongs together is continued."""
    key = hashlib.sha256(f"{digest} {path.name}".encode("utf-8", "surrogateescape")).hexdigest()
    return path.with_name(f".{key[:16]}.part")


def entry(path: Path) -> dict[str, Any]:
    """Size and checksum of what a file holds now; it may grow on."""
    size = path.stat().st_size
    return {"bytes": size, "sha256": sha256(path, size)}


def sha256(path: Path, size: int | None = None) -> str:
    """Of the first `size` bytes of a file, or of all of it."""
    digest = hashlib.sha256()
    left = sys.maxsize if size is None else size
    with path.open("rb") as file:
        while left:
            data = file.read(min(CHUNK, left))
            if not data:
                break
            digest.update(data)
            left -= len(data)
    return digest.hexdigest()


def free(path: Path) -> int:
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(str(path)).free


def read_json(path: Path, default: Any = Refused) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        if default is Refused:
            raise Refused(f"{path} cannot be read: {error}") from None
        return default


def write_json(path: Path, value: Any) -> None:
    temporary = path.with_name(f".{path.name}.{getpid()}.tmp")
    try:
        temporary.write_text(json.dumps(value, indent=1), encoding="utf-8")
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def as_refusal(error: OSError, base: Path) -> Refused:
    where = error.filename or base
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        what = f"no space is left on the disk of {where}"
        return Refused(what, do="make room there, or choose another disk: --dir FOLDER; the same command continues")
    what = re.sub(r"^\[Errno \d+\] ", "", str(error)) or type(error).__name__
    return Refused(f"{where} cannot be used: {error.strerror or what}", do="choose another place: --dir FOLDER")


def say(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()
