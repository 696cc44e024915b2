"""From stored states to packed batches: which samples together, in which order, and their tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from headstart.data.store import Entry, StateStore, Stored
from headstart.drafts.rows import MaskKind, RowPlan, plan_rows
from headstart.target.head import TargetHead


@dataclass(frozen=True)
class Batch:
    """Samples packed side by side, N tokens. aux: [C, n_aux, d] of the context rows. teacher: the last states after the target's
    final norm [U, d]; log_normalizer float32 [U] and top1 int64 [U] belong to them."""

    tokens: Tensor
    aux: Tensor
    plan: RowPlan
    teacher: Tensor
    log_normalizer: Tensor
    top1: Tensor


def epoch_order(entries: Sequence[Entry], batch_tokens: int, seed: int, epoch: int) -> list[list[int]]:
    """The batches of one epoch as indices into `entries`: shuffled by (seed, epoch), packed up to `batch_tokens`."""
    order = np.random.default_rng((seed, epoch)).permutation(len(entries))
    batches: list[list[int]] = []
    filled = batch_tokens
    for index in order.tolist():
        if filled + entries[index].length > batch_tokens:
            batches.append([])
            filled = 0
        batches[-1].append(index)
        filled += entries[index].length
    return batches


def assemble(
    store: StateStore, entries: Sequence[Entry], head: TargetHead, steps: int, kind: MaskKind, device: str
) -> Batch:
    """Read the samples and pack them; only rows that are needed reach the device."""
    samples = [store.read(entry) for entry in entries]
    plan = plan_rows([sample.supervised.numpy().astype(bool) for sample in samples], steps, kind)
    last = _joined(samples, "last")[plan.teacher]
    return Batch(
        tokens=_joined(samples, "input_ids").long().to(device),
        aux=_joined(samples, "aux")[plan.context].to(device).to(torch.float32),
        plan=plan.to(device),
        teacher=head.norm(last.to(device).to(torch.float32)),
        log_normalizer=_joined(samples, "log_normalizer")[plan.teacher].to(device),
        top1=_joined(samples, "top1")[plan.teacher].long().to(device),
    )


def learnable(store: StateStore, entries: Sequence[Entry], kind: MaskKind) -> list[Entry]:
    """The entries with at least one live row; the others would cost time and teach nothing."""
    found = []
    for entry in entries:
        plan = plan_rows([store.supervised(entry)], 1, kind)
        if len(plan.steps[0].rows):
            found.append(entry)
    return found


def _joined(samples: Sequence[Stored], name: str) -> Tensor:
    return torch.cat([getattr(sample, name) for sample in samples])
