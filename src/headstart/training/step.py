"""One optimiser step's loss: packed batches through the draft, and what was accepted at each TTT step."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from headstart.config import Train
from headstart.drafts.eagle3 import Eagle3
from headstart.drafts.layers import DecoderLayer
from headstart.drafts.losses import Divergence, Mixture, Teacher, divergence, fused_divergence
from headstart.drafts.ttt import unroll
from headstart.target.head import TargetHead
from headstart.training.batches import Batch


@dataclass
class StepStats:
    """Sums over live rows, one entry per TTT step, float64.

    reached: chains of which this step exists; joint: those whose drafts were all accepted up to and with this step.
    """

    rows: Tensor
    loss: Tensor
    alpha: Tensor
    accepted: Tensor
    reached: Tensor
    joint: Tensor

    @classmethod
    def none(cls, steps: int) -> StepStats:
        return cls(*torch.zeros(len(cls.__dataclass_fields__), steps, dtype=torch.float64))

    def stacked(self) -> Tensor:
        return torch.stack([getattr(self, name) for name in self.__dataclass_fields__])

    def __add__(self, other: StepStats) -> StepStats:
        return StepStats(*(self.stacked() + other.stacked()))

    def summary(self) -> dict[str, Any]:
        """Means per step, and tau: 1 + sum_i P(all drafts up to i accepted), each over the chains that reach step i."""
        per_row = self.rows.clamp_min(1)
        joint = self.joint / self.reached.clamp_min(1)
        alpha = {} if self.alpha.isnan().any() else {"alpha": _rounded(self.alpha / per_row)}
        return alpha | {
            "loss": _rounded(self.loss / per_row),
            "accuracy": _rounded(self.accepted / per_row),
            "joint": _rounded(joint),
            "tau": round(1 + float(joint.sum()), 6),
            "rows": int(self.rows[0]),
        }


def row_scales(live: Sequence[np.ndarray], settings: Train) -> np.ndarray:
    """What a live row of each sample weighs at each TTT step, float32 [samples, T], for one whole optimiser step.

    live: int [T] of each sample, its live rows. The loss is sum_i decay^i * (mean of step i), the mean over rows (`token`) or over
    the samples' own means (`sequence`), of the whole step, whatever parts it is computed in.
    """
    rows = np.stack(live).astype(np.float64)
    decay = settings.step_decay ** np.arange(rows.shape[1])
    if settings.weighting == "token":
        scale = np.broadcast_to(decay / np.maximum(rows.sum(0), 1), rows.shape)
    else:
        scale = decay / (np.maximum((rows > 0).sum(0), 1) * np.maximum(rows, 1))
    return scale.astype(np.float32)


def teacher_for(batch: Batch, head: TargetHead, rows: Tensor, vocabulary: Tensor) -> Teacher:
    """The target's side of the loss; `rows` are its head's rows of the draft vocabulary `vocabulary`."""
    bias = None if head.lm_bias is None else head.lm_bias[vocabulary].to(rows)
    following = batch.tokens[batch.plan.teacher + 1]
    at = torch.searchsorted(vocabulary, following).clamp_max(len(vocabulary) - 1)
    token = torch.where(vocabulary[at] == following, at, -1)
    return Teacher(batch.teacher, rows, batch.log_normalizer, head.softcap, head.scale, bias, token)


class Objective(nn.Module):
    """The draft with its loss: what is replicated or sharded over processes."""

    def __init__(self, draft: Eagle3, settings: Train) -> None:
        super().__init__()
        self.draft = draft
        self.settings = settings
        self.divergence: Divergence = divergence
        self.mixture: Mixture = {settings.loss: 1.0} if isinstance(settings.loss, str) else settings.loss

    def forward(
        self, batch: Batch | None, teacher: Teacher | None, scale: Tensor | None, *, alpha: bool = False
    ) -> tuple[Tensor, StepStats | None]:
        """The loss of one packed batch (differentiable) and its statistics (not).

        scale: float32 [documents, T], see `row_scales`; None: each step's mean over this batch. alpha: measure it too, where the
        loss does not need it. Without a batch, a zero that every parameter has its part in: a process with nothing to learn from
        still takes part in the exchange of gradients.
        """
        if batch is None or teacher is None:
            return sum((p.sum() * 0.0 for p in self.parameters() if p.requires_grad), torch.zeros(())), None
        with self._precision(batch.aux.device.type):
            again = self.settings.recompute and self.training
            outs = unroll(self.draft, batch.aux, batch.tokens, batch.plan, self.settings.attention_backend, remat=again)
            normed = self.draft.norm(torch.cat(outs))
        labels = torch.cat([step.labels for step in batch.plan.steps])
        weight = self.draft.lm_head.weight if torch.is_grad_enabled() else self.draft.lm_head.weight.detach()
        weights = _row_weights(batch, scale, self.settings.step_decay)
        total, stats = fused_divergence(
            normed, weight, labels, weights, teacher, self.mixture, alpha=alpha, of_rows=self.divergence
        )
        accepted = self.draft.draft_to_target[stats.choice] == batch.top1[labels]
        return total, _statistics(batch, stats.loss, stats.alpha, accepted)

    def compile_parts(self, backend: str = "inductor") -> None:
        """What is products and elementwise passes: the layers, and the divergence of rows. Attention has kernels of its own."""
        self.divergence = torch.compile(divergence, dynamic=True, backend=backend)
        for layer in self.draft.layers:
            assert isinstance(layer, DecoderLayer)
            layer.finish = torch.compile(layer.finish, dynamic=True, backend=backend)
            layer.inputs = torch.compile(layer.inputs, dynamic=True, backend=backend)

    def _precision(self, device: str) -> AbstractContextManager:
        if self.settings.dtype == "float32":
            return nullcontext()
        return torch.autocast(device, dtype=getattr(torch, self.settings.dtype))


def forward(draft: Eagle3, batch: Batch, teacher: Teacher, settings: Train, *, alpha: bool = False):
    """Loss and statistics of a batch on its own: the step's means are the batch's."""
    return Objective(draft, settings)(batch, teacher, None, alpha=alpha)


def _row_weights(batch: Batch, scale: Tensor | None, decay: float) -> Tensor:
    weights = []
    for index, step in enumerate(batch.plan.steps):
        live = step.live.float()
        if scale is None:
            weights.append(live * (decay**index / live.sum().clamp_min(1)))
        else:
            weights.append(live * scale[batch.plan.document[step.rows], index])
    return torch.cat(weights)


def _statistics(batch: Batch, loss: Tensor, alpha: Tensor, accepted: Tensor) -> StepStats:
    steps, sums = batch.plan.steps, []
    sizes = [len(step.rows) for step in steps]
    chain = reach = torch.ones(len(batch.plan.context), dtype=torch.bool, device=loss.device)
    for step, row_loss, row_alpha, hit in zip(steps, *(x.split(sizes) for x in (loss, alpha, accepted)), strict=True):
        live = step.live
        reach = reach[step.parent] & live
        chain = chain[step.parent] & reach & hit
        row = (live.sum(), row_loss[live].sum(), row_alpha[live].sum(), hit[live].sum(), reach.sum(), chain.sum())
        sums.append(torch.stack([value.double() for value in row]))
    return StepStats(*torch.stack(sums).T.cpu())


def _rounded(values: Tensor) -> list[float]:
    return [round(float(value), 6) for value in values]
