"""Hidden states on disk: shards of packed samples, written whole, read memory-mapped.

A shard holds its samples side by side, N tokens of which L are label rows (the next token was produced by the target):
aux [N, n_aux, d]; last [L, d] (before the final norm), log_normalizer float32 [L] and top1 int32 [L] (log-sum-exp and argmax of the
target's logits over its whole vocabulary) of the label rows alone, since no other row teaches; input_ids int32 [N], supervised
uint8 [N]. Which sample lies where is in the shard's own header and, for all shards, in `index.parquet`.

States of type float8_e4m3fn have one float32 scale per row and layer beside them: aux_scale [N, n_aux], last_scale [L].
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from headstart import files
from headstart.artifact import Artifact
from headstart.engines.base import States
from headstart.errors import GateError
from headstart.target.head import TargetHead
from headstart.types import Sample, Split

INDEX = "index.parquet"
HEADER = "headstart"
FLOAT8 = torch.float8_e4m3fn
LOGIT_BYTES = 64 << 20  # of logits over the whole vocabulary held at once
_LABEL_ROWS = ("last", "last_scale", "log_normalizer", "top1")


@dataclass(frozen=True)
class Entry:
    """Where one sample lies."""

    id: str
    conversation: str
    source: str
    split: Split
    shard: str
    start: int
    length: int
    first_label: int
    labels: int


@dataclass(frozen=True)
class Stored:
    """One sample as read back; shapes as in the module's docstring, with N and L the sample's own."""

    aux: Tensor
    last: Tensor
    log_normalizer: Tensor
    top1: Tensor
    input_ids: Tensor
    supervised: Tensor
    aux_scale: Tensor | None = None
    last_scale: Tensor | None = None


def plan_shards(samples: Sequence[Sample], shard_tokens: int) -> list[list[Sample]]:
    """Samples cut into shards of at most `shard_tokens` (a longer sample stands alone); the same every time."""
    shards: list[list[Sample]] = []
    filled = shard_tokens
    for sample in samples:
        if filled + len(sample.input_ids) > shard_tokens:
            shards.append([])
            filled = 0
        shards[-1].append(sample)
        filled += len(sample.input_ids)
    return shards


def shard_name(number: int) -> str:
    return f"shard-{number:05d}.safetensors"


def label_rows(supervised: np.ndarray) -> np.ndarray:
    """bool [tokens]: rows whose next token was produced by the target, so whose distribution teaches."""
    return np.append(supervised[1:], False)


@dataclass(frozen=True)
class Labelled:
    """A captured sample with what its L label rows teach: log_normalizer float32 [L], top1 int32 [L]; last: [L, d]."""

    sample: Sample
    states: States
    last: Tensor
    log_normalizer: Tensor
    top1: Tensor


def label(pairs: Sequence[tuple[Sample, States]], head: TargetHead) -> list[Labelled]:
    """The pairs with their labels."""
    if not pairs:
        return []
    last = [states.last[torch.from_numpy(label_rows(sample.supervised))] for sample, states in pairs]
    sizes = [len(rows) for rows in last]
    labels = (values.split(sizes) for values in normalizer_and_top1(torch.cat(last), head))
    return [Labelled(*pair, *rest) for pair, *rest in zip(pairs, last, *labels, strict=True)]


def write_shard(
    path: Path, items: Sequence[Labelled], dropped: dict[str, str], dtype: torch.dtype | None = None
) -> None:
    """Write one shard whole or not at all, states as `dtype` (their own when None). `dropped` maps ids of samples left out to the
    reason."""
    entries, start, first = [], 0, 0
    for item in items:
        sample, span = item.sample, (start, len(item.sample.input_ids), first, len(item.last))
        entries.append(Entry(sample.id, sample.conversation, sample.source, sample.split, path.name, *span))
        start, first = start + span[1], first + span[3]
    # One key: safetensors writes several in an order that changes, and equal shards must have equal bytes.
    header = {HEADER: json.dumps({"entries": [asdict(entry) for entry in entries], "dropped": dropped})}
    with files.replacing(path) as temporary:
        save_file(_columns(items, dtype), temporary, metadata=header)


def read_header(path: Path) -> tuple[list[Entry], dict[str, str]] | None:
    """Entries and dropped samples of a shard, or None when the file is missing or was cut short."""
    try:
        with safe_open(path, framework="pt") as shard:
            header = shard.metadata() or {}
    except (OSError, SafetensorError):
        return None
    if HEADER not in header:
        return None
    content = json.loads(header[HEADER])
    return [Entry(**entry) for entry in content["entries"]], content["dropped"]


def write_index(path: Path, entries: Iterable[Entry]) -> None:
    pq.write_table(pa.Table.from_pylist([asdict(entry) for entry in entries]), path)


class StateStore:
    """The captured states of a run, opened."""

    def __init__(self, folder: Path, facts: dict[str, Any]) -> None:
        self.folder = folder
        self.facts = facts
        self.entries = [Entry(**row) for row in pq.read_table(folder / INDEX).to_pylist()]
        self._shards: dict[str, Any] = {}

    @classmethod
    def open(cls, states: Artifact) -> StateStore:
        return cls(states.path, states.facts)

    def head(self) -> TargetHead:
        return TargetHead.read(self.folder)

    def of(self, split: Split) -> list[Entry]:
        return [entry for entry in self.entries if entry.split == split]

    def supervised(self, entry: Entry) -> np.ndarray:
        """bool [tokens], without touching the states."""
        return self._slice(entry, "supervised").numpy().astype(bool)

    def read(self, entry: Entry) -> Stored:
        """Raises GateError when the file does not hold what the index says."""
        held = self._shard(entry).keys()
        parts = {name: self._slice(entry, name) for name in Stored.__dataclass_fields__ if name in held}
        if len(parts["aux"]) != entry.length or len(parts["last"]) != entry.labels:
            raise GateError(f"{entry.shard} is too short for sample {entry.id}", do="headstart capture again")
        return Stored(**parts)

    def _slice(self, entry: Entry, name: str) -> Tensor:
        start, count = (entry.first_label, entry.labels) if name in _LABEL_ROWS else (entry.start, entry.length)
        return self._shard(entry).get_slice(name)[start : start + count]

    def _shard(self, entry: Entry) -> Any:
        if entry.shard not in self._shards:
            self._shards[entry.shard] = safe_open(self.folder / entry.shard, framework="pt")
        return self._shards[entry.shard]


def narrow(states: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """States [..., d] in a storage type; for float8 with their scales, float32 [...]: each row's largest value becomes 448."""
    if dtype != FLOAT8:
        return states.to(dtype), None
    scale = (states.float().abs().amax(-1) / torch.finfo(FLOAT8).max).clamp_min(torch.finfo(torch.float32).tiny)
    return (states.float() / scale[..., None]).to(FLOAT8), scale


def widen(stored: Tensor, scale: Tensor | None) -> Tensor:
    """Stored states back in float32."""
    return stored.float() if scale is None else stored.float() * scale[..., None]


def _columns(items: Sequence[Labelled], dtype: torch.dtype | None) -> dict[str, Tensor]:
    if not items:  # every sample of the shard was dropped; its header says why
        return {"input_ids": torch.zeros(0, dtype=torch.int32)}
    aux, last = torch.cat([item.states.aux for item in items]).cpu(), torch.cat([item.last for item in items]).cpu()
    stored = {name: narrow(states, dtype or states.dtype) for name, states in (("aux", aux), ("last", last))}
    ids, supervised = (np.concatenate([getattr(i.sample, name) for i in items]) for name in ("input_ids", "supervised"))
    return {
        **{name: states.contiguous() for name, (states, _) in stored.items()},
        **{f"{name}_scale": scale for name, (_, scale) in stored.items() if scale is not None},
        "log_normalizer": torch.cat([item.log_normalizer for item in items]),
        "top1": torch.cat([item.top1 for item in items]),
        "input_ids": torch.from_numpy(ids.astype(np.int32)),
        "supervised": torch.from_numpy(supervised.astype(np.uint8)),
    }


def normalizer_and_top1(last: Tensor, head: TargetHead) -> tuple[Tensor, Tensor]:
    """log_normalizer [L] and top1 [L] of label rows.

    The normaliser comes from a float32 head, as the teacher of the training does: from bfloat16 logits the probabilities of
    one row would sum to anything between 0.92 and 1.07. The most likely token is the one the engine itself would choose.
    """
    wide = head.to(dtype=torch.float32)
    log_normalizer, top1 = torch.zeros(len(last)), torch.zeros(len(last), dtype=torch.int32)
    for rows in torch.arange(len(last)).split(max(1, LOGIT_BYTES // (4 * len(wide.lm_head)))):
        states = last[rows].to(head.lm_head.device)
        logits = wide.logits(states.float())
        log_normalizer[rows] = logits.logsumexp(-1).cpu()
        own = logits if head.lm_head.dtype == torch.float32 else head.logits(states)
        top1[rows] = own.argmax(-1).int().cpu()
    return log_normalizer, top1
