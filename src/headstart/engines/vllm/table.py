"""The shipped table of releases as JSON: architectures once, then what each release changes. `unpack` undoes `pack`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from headstart.engines.vllm.arch import Arch

DEFAULTS = {field.name: field.default for field in fields(Arch)}
Packed = list[list[Any]]  # [version, digest, {architecture: facts, None when it is gone}], against the one before


@dataclass(frozen=True)
class Row:
    """A release in the table. digest: of its model sources (`Registry.digest`)."""

    version: str
    digest: str
    archs: Mapping[str, Arch]


def pack(rows: Iterable[Row]) -> Packed:
    """Releases in rising order, each as the difference from the one before it."""
    packed, before = [], {}
    for row in rows:
        archs = row.archs
        now = {name: _facts(arch) for name, arch in archs.items()}
        change: dict[str, Any] = {name: facts for name, facts in now.items() if before.get(name) != facts}
        change |= {name: None for name in before if name not in now}
        packed.append([row.version, row.digest, change])
        before = now
    return packed


def unpack(packed: Packed) -> list[Row]:
    rows: list[Row] = []
    now: dict[str, Arch] = {}
    for version, digest, change in packed:
        now = {name: arch for name, arch in now.items() if change.get(name, arch) is not None}
        now |= {name: _arch(name, facts) for name, facts in change.items() if facts is not None}
        rows.append(Row(version, digest, now))
    return rows


def _facts(arch: Arch) -> dict[str, Any]:
    facts = {name: value for name, value in asdict(arch).items() if value != DEFAULTS[name]}
    del facts["name"]
    return facts | ({"registered": list(arch.registered)} if arch.registered else {})


def _arch(name: str, facts: Mapping[str, Any]) -> Arch:
    return Arch(name, **{**facts, "registered": tuple(facts.get("registered", ()))})
