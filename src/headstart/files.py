"""Small file habits used everywhere: durable writes, canonical JSON, checksums."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

from headstart.errors import UserError

CHUNK = 1 << 20
WHOLE_UP_TO = 64 << 20  # bytes of a file up to which its fingerprint is of all of it
SAMPLE = 1 << 16  # bytes looked at in the start, middle and end of a large file


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path to write to; `path` holds either its old content or all of the new one, also after a kill.

    A write that fails, on a full disk say, leaves no temporary file behind.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")  # two processes may write at once; the last one wins
    try:
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def write_bytes(path: Path, data: bytes) -> None:
    """Write `data` durably (see `replacing`)."""
    with replacing(path) as temporary:
        temporary.write_bytes(data)


def copy(source: Path, path: Path) -> None:
    """Copy a file's content durably (see `replacing`)."""
    with replacing(path) as temporary:
        shutil.copyfile(source, temporary)


def write_text(path: Path, text: str) -> None:
    write_bytes(path, printable(text).encode())


def printable(text: str) -> str:
    """`text` with lone surrogates, which no encoding can hold, as their escapes."""
    return text.encode("utf-8", "backslashreplace").decode()


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def sync_folder(folder: Path) -> None:
    """Make renames inside `folder` survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sha256_file(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def fingerprint(path: Path) -> dict[str, Any]:
    """Size and SHA-256 of a file; of one above WHOLE_UP_TO bytes only three samples are read, since it may be huge."""
    found = path.stat()
    return dict(_fingerprint(path, found.st_size, found.st_mtime_ns, found.st_ino))


@lru_cache(maxsize=1024)  # a run asks for its status before every stage
def _fingerprint(path: Path, size: int, modified: int, inode: int) -> dict[str, Any]:
    del modified, inode  # only there to tell versions of the file apart
    if size <= WHOLE_UP_TO:
        return {"bytes": size, "sha256": sha256_file(path)}
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for start in (0, size // 2, size - SAMPLE):
            file.seek(start)
            digest.update(file.read(SAMPLE))
    return {"bytes": size, "sampled": digest.hexdigest()}


def home(name: str | Path) -> Path:
    """The path of that name, with `~` and `~user` in its beginning replaced. Raises UserError when there is no such user."""
    path = Path(name)
    try:
        return path.expanduser()
    except RuntimeError:
        user = path.parts[0].removeprefix("~")
        what = f"there is no user {user}, and so no {name}" if user else f"there is no home folder for {name}"
        raise UserError(what, do="correct the name, or give the whole path") from None


def matching(name: str) -> list[Path]:
    """The files that a name stands for: one file, or those of a glob (`~` and `**` work), in order; none is an empty list."""
    path = home(name)
    start, pattern = Path(path.anchor), str(path.relative_to(path.anchor))
    try:
        if path.is_dir():  # also "", "." and "/", which are no globs
            return []
        return [path] if path.is_file() else [found for found in sorted(start.glob(pattern)) if found.is_file()]
    except (OSError, ValueError):  # too long for a name, or no valid glob
        return []


def canonical(value: Any) -> str:
    """One spelling per value, so that equal settings have equal hashes."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, default=str)


def sha256_json(value: Any) -> str:
    return hashlib.sha256(canonical(value).encode()).hexdigest()
