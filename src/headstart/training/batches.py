"""From stored states to packed batches: which samples together, in which order, their tensors, and reading them ahead of need."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from headstart.data.store import Entry, StateStore, Stored, widen
from headstart.drafts.rows import MaskKind, RowPlan, live_mask, plan_rows
from headstart.target.head import TargetHead

Item = TypeVar("Item")
Read = TypeVar("Read")


@dataclass(frozen=True)
class Batch:
    """Samples packed side by side, N tokens. aux: float32 [C, n_aux, d] of the context rows. teacher: the last states after the
    target's final norm [U, d]; log_normalizer float32 [U] and top1 int64 [U] belong to them."""

    tokens: Tensor
    aux: Tensor
    plan: RowPlan
    teacher: Tensor
    log_normalizer: Tensor
    top1: Tensor


@dataclass(frozen=True)
class Packed:
    """A batch as read, in main memory and in the stored types; pinned where a GPU will fetch it."""

    tokens: Tensor
    aux: Tensor
    aux_scale: Tensor | None
    last: Tensor
    last_scale: Tensor | None
    plan: RowPlan
    log_normalizer: Tensor
    top1: Tensor
    noise: Tensor | None


@dataclass(frozen=True)
class Packer:
    """Reads samples and packs them; only rows that are needed reach the device. steps: TTT steps T."""

    store: StateStore
    head: TargetHead
    steps: int
    device: str = "cpu"

    def pack(self, entries: Sequence[Entry], kind: MaskKind, noise: float = 0.0, seed: tuple[int, ...] = ()) -> Packed:
        """noise: standard deviation of what is added to the aux states, as a share of each state's own rms; drawn from `seed` and
        the sample's id, so the same whoever computes it."""
        samples = [self.store.read(entry) for entry in entries]
        plan = plan_rows([sample.supervised.numpy().astype(bool) for sample in samples], self.steps, kind)
        labels = torch.cat([sample.supervised for sample in samples]).bool().roll(-1)
        labels[np.cumsum([len(sample.supervised) for sample in samples]) - 1] = False
        teacher = torch.searchsorted(labels.nonzero()[:, 0], plan.teacher)  # `last` holds label rows alone
        added = _noise(samples, [entry.id for entry in entries], noise, seed)[plan.context] if noise else None
        packed = Packed(
            tokens=_joined(samples, "input_ids").long(),
            aux=_joined(samples, "aux")[plan.context],
            aux_scale=_rows(samples, "aux_scale", plan.context),
            last=_joined(samples, "last")[teacher],
            last_scale=_rows(samples, "last_scale", teacher),
            plan=plan,
            log_normalizer=_joined(samples, "log_normalizer")[teacher],
            top1=_joined(samples, "top1")[teacher].long(),
            noise=added,
        )
        return _pinned(packed) if self.device.startswith("cuda") else packed

    def move(self, packed: Packed) -> Batch:
        """To the device and to float32; the teacher through the target's final norm."""
        to = {"device": self.device, "non_blocking": True}
        aux = widen(packed.aux.to(**to), None if packed.aux_scale is None else packed.aux_scale.to(**to))
        if packed.noise is not None:
            aux = aux + packed.noise.to(**to) * aux.square().mean(-1, keepdim=True).sqrt()
        last = widen(packed.last.to(**to), None if packed.last_scale is None else packed.last_scale.to(**to))
        return Batch(
            tokens=packed.tokens.to(**to),
            aux=aux,
            plan=packed.plan.to(self.device),
            teacher=self.head.norm(last),
            log_normalizer=packed.log_normalizer.to(**to),
            top1=packed.top1.to(**to),
        )


def assemble(
    store: StateStore, entries: Sequence[Entry], head: TargetHead, steps: int, kind: MaskKind, device: str
) -> Batch:
    """Read, pack and move some samples at once."""
    packer = Packer(store, head, steps, device)
    return packer.move(packer.pack(entries, kind))


def ahead(items: Iterable[Item], read: Callable[[Item], Read]) -> Iterator[tuple[Item, Read]]:
    """`read` of each item, always one further than asked for, in a thread of its own."""
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="read-ahead") as pool:
        waiting = None
        for item in items:
            coming = (item, pool.submit(read, item))
            if waiting is not None:
                yield waiting[0], waiting[1].result()
            waiting = coming
        if waiting is not None:
            yield waiting[0], waiting[1].result()


def epoch_order(entries: Sequence[Entry], batch_tokens: int, seed: int, epoch: int) -> list[list[int]]:
    """The batches of one epoch as indices into `entries`: shuffled by (seed, epoch), packed up to `batch_tokens`."""
    order = np.random.default_rng((seed, epoch)).permutation(len(entries))
    return pack_up_to(order.tolist(), [entry.length for entry in entries], batch_tokens)


def pack_up_to(indices: Sequence[int], lengths: Sequence[int], most: int) -> list[list[int]]:
    """`indices` in their order, cut into groups of at most `most` tokens; a longer one stands alone."""
    groups: list[list[int]] = []
    filled = most
    for index in indices:
        if filled + lengths[index] > most:
            groups.append([])
            filled = 0
        groups[-1].append(index)
        filled += lengths[index]
    return groups


def live_rows(store: StateStore, entry: Entry, steps: int, kind: MaskKind) -> np.ndarray:
    """How many rows of a sample have a loss at each TTT step, int [T]."""
    return live_mask(store.supervised(entry), steps, kind).sum(1)


def learnable(store: StateStore, entries: Sequence[Entry], kind: MaskKind) -> list[Entry]:
    """The entries with at least one live row; the others would cost time and teach nothing."""
    return [entry for entry in entries if live_rows(store, entry, 1, kind)[0]]


def _noise(samples: Sequence[Stored], ids: Sequence[str], size: float, seed: tuple[int, ...]) -> Tensor:
    parts = []
    for sample, name in zip(samples, ids, strict=True):
        digest = hashlib.sha256(repr((seed, name)).encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))
        parts.append(torch.randn(sample.aux.shape, generator=generator) * size)
    return torch.cat(parts)


def _joined(samples: Sequence[Stored], name: str) -> Tensor:
    return torch.cat([getattr(sample, name) for sample in samples])


def _rows(samples: Sequence[Stored], name: str, rows: Tensor) -> Tensor | None:
    return None if getattr(samples[0], name) is None else _joined(samples, name)[rows]


def _pinned(packed: Packed) -> Packed:
    tensors = {name: value for name, value in vars(packed).items() if isinstance(value, Tensor)}
    return replace(packed, **{name: tensor.pin_memory() for name, tensor in tensors.items()})
