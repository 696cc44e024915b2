"""One packed batch through the draft: loss, and what was accepted at each TTT step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headstart.config import Train
from headstart.drafts.eagle3 import Eagle3
from headstart.drafts.losses import Teacher, fused_divergence
from headstart.drafts.ttt import unroll
from headstart.target.head import TargetHead
from headstart.training.batches import Batch


@dataclass
class StepStats:
    """Sums over live rows, one entry per TTT step.

    reached: chains of which this step exists; joint: those whose drafts were all accepted up to and with this step.
    """

    rows: Tensor
    loss: Tensor
    alpha: Tensor
    accepted: Tensor
    reached: Tensor
    joint: Tensor

    def __add__(self, other: StepStats) -> StepStats:
        return StepStats(*(getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__))

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


def teacher_for(batch: Batch, head: TargetHead, rows: Tensor, vocabulary: Tensor) -> Teacher:
    """The target's side of the loss; `rows` are its head's rows of the draft vocabulary `vocabulary`."""
    bias = None if head.lm_bias is None else head.lm_bias[vocabulary].to(rows)
    return Teacher(batch.teacher, rows, batch.log_normalizer, head.softcap, head.scale, bias)


def forward(
    draft: Eagle3, batch: Batch, teacher: Teacher, settings: Train, *, alpha: bool = False
) -> tuple[Tensor, StepStats]:
    """The loss sum_i decay^i * mean over live rows of step i (differentiable), and the statistics (not).

    alpha: measure it too, where the loss does not need it.
    """
    steps = batch.plan.steps
    outs = unroll(draft, batch.aux, batch.tokens, batch.plan)
    labels = torch.cat([step.labels for step in steps])
    weights = [
        step.live.float() * (settings.step_decay**i / max(int(step.live.sum()), 1)) for i, step in enumerate(steps)
    ]
    weight = draft.lm_head.weight if torch.is_grad_enabled() else draft.lm_head.weight.detach()
    total, stats = fused_divergence(
        draft.norm(torch.cat(outs)),
        weight,
        labels,
        torch.cat(weights),
        teacher,
        settings.loss,
        alpha=alpha,
    )
    accepted = draft.draft_to_target[stats.choice] == batch.top1[labels]
    return total, _statistics(batch, stats.loss, stats.alpha, accepted)


def _statistics(batch: Batch, loss: Tensor, alpha: Tensor, accepted: Tensor) -> StepStats:
    steps, sums = batch.plan.steps, []
    sizes = [len(step.rows) for step in steps]
    chain = reach = torch.ones(len(batch.plan.context), dtype=torch.bool, device=loss.device)
    for step, row_loss, row_alpha, hit in zip(steps, *(x.split(sizes) for x in (loss, alpha, accepted)), strict=True):
        live = step.live
        reach = reach[step.parent] & live
        chain = chain[step.parent] & reach & hit
        row = (live.sum(), row_loss[live].sum(), row_alpha[live].sum(), hit[live].sum(), reach.sum(), chain.sum())
        sums.append(torch.stack([value.double() for value in row]).cpu())
    return StepStats(*torch.stack(sums).T)


def _rounded(values: Tensor) -> list[float]:
    return [round(float(value), 6) for value in values]
