"""Hidden states on disk: shards of packed samples, written whole, read memory-mapped.

A shard holds its samples side by side: aux [N, n_aux, d], last [N, d] (before the final norm), log_normalizer float32 [N] and
top1 int32 [N] (log-sum-exp and argmax of the target's logits over its whole vocabulary at label rows, 0 elsewhere),
input_ids int32 [N], supervised uint8 [N]. Which sample lies where is in the shard's own header and, for all shards,
in `index.parquet`.
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


@dataclass(frozen=True)
class Stored:
    """One sample as read back; shapes as in the module's docstring, with N the sample's tokens."""

    aux: Tensor
    last: Tensor
    log_normalizer: Tensor
    top1: Tensor
    input_ids: Tensor
    supervised: Tensor


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


def write_shard(path: Path, pairs: Sequence[tuple[Sample, States]], head: TargetHead, dropped: dict[str, str]) -> None:
    """Write one shard whole or not at all. `dropped` maps ids of samples left out to the reason."""
    name, start = path.name, 0
    entries = []
    for sample, _ in pairs:
        length = len(sample.input_ids)
        entries.append(Entry(sample.id, sample.conversation, sample.source, sample.split, name, start, length))
        start += length
    # One key: safetensors writes several in an order that changes, and equal shards must have equal bytes.
    header = {HEADER: json.dumps({"entries": [asdict(entry) for entry in entries], "dropped": dropped})}
    with files.replacing(path) as temporary:
        save_file(_columns(pairs, head), temporary, metadata=header)


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
        parts = {name: self._slice(entry, name) for name in Stored.__dataclass_fields__}
        if len(parts["aux"]) != entry.length:
            raise GateError(f"{entry.shard} is too short for sample {entry.id}", do="headstart capture again")
        return Stored(**parts)

    def _slice(self, entry: Entry, name: str) -> Tensor:
        if entry.shard not in self._shards:
            self._shards[entry.shard] = safe_open(self.folder / entry.shard, framework="pt")
        return self._shards[entry.shard].get_slice(name)[entry.start : entry.start + entry.length]


def _columns(pairs: Sequence[tuple[Sample, States]], head: TargetHead) -> dict[str, Tensor]:
    if not pairs:  # every sample of the shard was dropped; its header says why
        return {"input_ids": torch.zeros(0, dtype=torch.int32)}
    last = torch.cat([states.last for _, states in pairs]).cpu()
    supervised = np.concatenate([sample.supervised for sample, _ in pairs])
    wanted = torch.from_numpy(np.concatenate([label_rows(sample.supervised) for sample, _ in pairs]))
    log_normalizer, top1 = _labels(last, wanted, head)
    return {
        "aux": torch.cat([states.aux for _, states in pairs]).cpu().contiguous(),
        "last": last.contiguous(),
        "log_normalizer": log_normalizer,
        "top1": top1,
        "input_ids": torch.from_numpy(np.concatenate([sample.input_ids for sample, _ in pairs]).astype(np.int32)),
        "supervised": torch.from_numpy(supervised.astype(np.uint8)),
    }


def _labels(last: Tensor, wanted: Tensor, head: TargetHead) -> tuple[Tensor, Tensor]:
    """log_normalizer and top1 at the wanted rows of `last`, 0 elsewhere.

    The normaliser comes from a float32 head, as the teacher of the training does: from bfloat16 logits the probabilities of
    one row would sum to anything between 0.92 and 1.07. The most likely token is the one the engine itself would choose.
    """
    wide = head.to(dtype=torch.float32)
    log_normalizer, top1 = torch.zeros(len(last)), torch.zeros(len(last), dtype=torch.int32)
    for rows in wanted.nonzero()[:, 0].split(256):
        states = last[rows].to(head.lm_head.device)
        logits = wide.logits(states.float())
        log_normalizer[rows] = logits.logsumexp(-1).cpu()
        own = logits if head.lm_head.dtype == torch.float32 else head.logits(states)
        top1[rows] = own.argmax(-1).int().cpu()
    return log_normalizer, top1
