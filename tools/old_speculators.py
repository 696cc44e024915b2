#!/usr/bin/env python3
"""Fetches the released `custom_worker.py` and generator of old speculators, which tests and docs need as they are.

Each version comes from the package registry by name, once; it stays in the environment's share/ folder. Prints where.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

VERSIONS = ("0.3.0", "0.4.0", "0.4.0.1")


def main() -> int:
    for version in VERSIONS:
        print(f"{version}\t{fetched(version)}")
    return 0


def fetched(version: str) -> Path:
    """The folder that holds `speculators/` of a release, and its dist-info, as installed from its wheel without needs."""
    folder = Path(sys.prefix, "share", "old-speculators", version)
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            _unpack(_wheel(version, Path(scratch)), Path(scratch, "files"))
            _settle(Path(scratch, "files"), folder)
    return folder


def _wheel(version: str, folder: Path) -> Path:
    asked = [f"speculators=={version}", "--no-deps", "--quiet", "--disable-pip-version-check", "--dest", str(folder)]
    subprocess.run([sys.executable, "-m", "pip", "download", *asked], check=True)
    return next(folder.glob("*.whl"))


def _unpack(wheel: Path, folder: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)


def _settle(made: Path, folder: Path) -> None:
    """Another process may have been first; what it left is the same."""
    try:
        made.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise


if __name__ == "__main__":
    raise SystemExit(main())
