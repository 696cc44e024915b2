"""Small file habits used everywhere: durable writes, canonical JSON, checksums."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import IO, Any

CHUNK = 1 << 20
SAMPLE = 1 << 16  # bytes looked at in the start, middle and end of a large file


def write_bytes(path: Path, data: bytes) -> None:
    """Write `data` so that `path` holds either its old content or all of the new one, also after a kill."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")  # two processes may write at once; the last one wins
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    sync_folder(path.parent)


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


def fingerprint(path: Path, whole_up_to: int = 64 << 20) -> dict[str, Any]:
    """Size and SHA-256 of a file; of one above `whole_up_to` bytes only three samples are read, since it may be huge."""
    size = path.stat().st_size
    if size <= whole_up_to:
        return {"bytes": size, "sha256": sha256_file(path)}
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for start in (0, size // 2, size - SAMPLE):
            file.seek(start)
            digest.update(file.read(SAMPLE))
    return {"bytes": size, "sampled": digest.hexdigest()}


def matching(name: str) -> list[Path]:
    """The files that a name stands for: one file, or those of a glob (`~` and `**` work), in order; none is an empty list."""
    path = Path(name).expanduser()
    start, pattern = Path(path.anchor), str(path.relative_to(path.anchor))
    try:
        return [path] if path.is_file() else [found for found in sorted(start.glob(pattern)) if found.is_file()]
    except (OSError, ValueError):  # too long for a name, or no valid glob
        return []


def canonical(value: Any) -> str:
    """One spelling per value, so that equal settings have equal hashes."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, default=str)


def sha256_json(value: Any) -> str:
    return hashlib.sha256(canonical(value).encode()).hexdigest()


def sync_file(file: IO[Any]) -> None:
    """Bring what was written to `file` onto the disk."""
    file.flush()
    os.fsync(file.fileno())
