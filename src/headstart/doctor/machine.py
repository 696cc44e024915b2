"""What this machine has: GPUs, memory, room on a disk. Asks the system, imports nothing heavy."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from headstart import files

_QUERY = ["nvidia-smi", "--query-gpu=name,memory.total,memory.free", "--format=csv,noheader,nounits"]
MIB = 1 << 20


@dataclass(frozen=True)
class Gpu:
    """total, free: bytes."""

    name: str
    total: int
    free: int


def gpus() -> tuple[Gpu, ...]:
    """The GPUs that nvidia-smi shows and CUDA_VISIBLE_DEVICES leaves; none where there is no nvidia-smi."""
    if shutil.which(_QUERY[0]) is None:
        return ()
    try:
        shown = subprocess.run(
            _QUERY, capture_output=True, text=True, timeout=10, check=False, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired):
        return ()
    return _visible(parse_gpus(shown.stdout)) if shown.returncode == 0 else ()


def parse_gpus(text: str) -> tuple[Gpu, ...]:
    """Lines of `name, total MiB, free MiB`; others are left out."""
    rows = ([cell.strip() for cell in line.rsplit(",", 2)] for line in text.splitlines())
    return tuple(Gpu(row[0], int(row[1]) * MIB, int(row[2]) * MIB) for row in rows if _is_gpu(row))


def memory_available() -> int | None:
    """Bytes of main memory that a new program can have; None where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration, ValueError):
        return _all_memory()


def existing(path: Path) -> Path:
    """The nearest folder above `path`, or itself, that is there."""
    path = files.home(path).absolute()
    return path if path.exists() or path == path.parent else existing(path.parent)


def room(path: Path) -> int:
    """Free bytes on the disk that `path` is or would be on."""
    return shutil.disk_usage(existing(path)).free


def writable(path: Path) -> str | None:
    """Why nothing could be written under `path`; None when it could."""
    found = existing(path)
    if not found.is_dir():
        return f"{found} is a file"
    return None if os.access(found, os.W_OK | os.X_OK) else f"{found} cannot be written"


def _is_gpu(row: list[str]) -> bool:
    return len(row) == 3 and row[1].isdecimal() and row[2].isdecimal()


def _visible(found: tuple[Gpu, ...]) -> tuple[Gpu, ...]:
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is None:
        return found
    chosen = [part.strip() for part in named.split(",") if part.strip() not in ("", "-1")]
    if all(part.isdecimal() for part in chosen):
        return tuple(found[int(part)] for part in chosen if int(part) < len(found))
    return found[: len(chosen)]


def _all_memory() -> int | None:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None
