"""Tables for people: the anatomy of a target, a diagnosis, a census."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from typing import Any

from rich.console import Console, Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from headstart.doctor.doctor import Diagnosis
from headstart.engines.vllm.ladder import Census, Entry
from headstart.events import size
from headstart.target.anatomy import Anatomy

COLORS = {"go": "green", "warn": "yellow", "stop": "red"}
RUNG_COLORS = {"native": "green", "shim": "green", "transformers": "green", "hooks": "yellow", "refused": "red"}
# What a diagnosis repeats of the anatomy; `inspect` shows all of it.
_SHORT = (
    *("architecture", "text_architecture", "wrapper", "layers_path", "num_layers", "hidden_size", "vocab_size"),
    *("num_heads", "num_kv_heads", "head_dim", "mla", "moe", "hybrid", "norm", "tied_head", "quantization"),
)


def anatomy(found: Anatomy) -> Table:
    """All facts, each with its evidence."""
    return _facts(found, {name for name in asdict(found) if name != "evidence"})


def diagnosis(found: Diagnosis) -> Group:
    """The verdict, the main facts, the rungs of the engine, and every check with what to do."""
    verdict = Text.assemble(f"{found.name}: ", (found.verdict, f"bold {COLORS[found.verdict]}"))
    return Group(verdict, "", _facts(found.anatomy, set(_SHORT)), "", _checks(found))


def census(found: Census) -> Group:
    """Every architecture with its rungs, the refused ones with the reason, the totals."""
    working, refused = [], []
    for entry in sorted(found.entries, key=lambda entry: (entry.arch.table, entry.arch.name)):
        (working if entry.capture.works else refused).append(entry)
    table = _table("architecture", "table", "layers", "capture", "serve")
    for entry in working:
        table.add_row(*_census_row(entry))
    why = _table("refused for capture", "table", "why")
    for entry in refused:
        why.add_row(escape(entry.arch.name), entry.arch.table, escape(entry.capture.why))
    return Group(table, "", why, "", *census_lines(found))


def census_lines(found: Census) -> Iterator[str]:
    """The totals, in words."""
    for use in ("capture", "serve"):
        rungs = ", ".join(f"{name} {count}" for name, count in found.totals(use).items())
        yield f"{use}: {rungs} of {len(found.entries)} architectures in vLLM {found.version} ({found.device})"
    works = sum(entry.capture.works for entry in found.decoders)
    yield f"decoder language models that can be captured: {works} of {len(found.decoders)} ({found.share:.1%})"


def census_json(found: Census) -> dict[str, Any]:
    """Plain data: version, device, totals, the share that works, and every architecture."""
    return {
        "version": found.version,
        "device": found.device,
        "totals": {"capture": found.totals("capture"), "serve": found.totals("serve")},
        "decoders": {"count": len(found.decoders), "share": found.share},
        "architectures": [_census_data(entry) for entry in found.entries],
    }


def put(shown: Any) -> None:
    """Print on stdout: as wide as the terminal, 160 columns elsewhere."""
    Console(width=None if sys.stdout.isatty() else 160, soft_wrap=False).print(shown)


def _facts(found: Anatomy, names: Iterable[str]) -> Table:
    table = _table("fact", "value", "evidence")
    table.columns[0].no_wrap = True
    for name, value in asdict(found).items():
        if name in names:
            table.add_row(name, escape(_value(name, value)), f"[dim]{escape(found.evidence.get(name, ''))}[/]")
    return table


def _value(name: str, value: Any) -> str:
    if value is None:
        return "unknown" if name not in _ABSENT else "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {inner}" for key, inner in value.items())
    if name == "weights_bytes":
        return size(value)
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)


_ABSENT = ("softcap", "logit_scale", "rope_scaling", "quantization", "quantization_bits", "text_architecture")


def _checks(found: Diagnosis) -> Table:
    table = _table("check", "", "found", "do")
    table.columns[0].no_wrap = True
    for check in found.checks:
        verdict = f"[{COLORS[check.verdict]}]{check.verdict}[/]"
        table.add_row(check.name, verdict, escape(check.finding), escape(check.do or ""))
    return table


def _census_row(entry: Entry) -> tuple[str, ...]:
    rungs = (f"[{RUNG_COLORS[rung.name]}]{rung.name}[/]" for rung in (entry.capture, entry.serve))
    return (escape(entry.arch.name), entry.arch.table, entry.arch.layers_path or "", *rungs)


def _census_data(entry: Entry) -> dict[str, Any]:
    return {
        "architecture": entry.arch.name,
        "table": entry.arch.table,
        "layers_path": entry.arch.layers_path,
        "capture": {"rung": entry.capture.name, "why": entry.capture.why},
        "serve": {"rung": entry.serve.name, "why": entry.serve.why},
    }


def _table(*columns: str) -> Table:
    table = Table(*columns, box=None, pad_edge=False)
    for column in table.columns:
        column.overflow = "fold"  # a long path is broken, not cut
    return table
