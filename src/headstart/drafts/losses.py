"""Draft head and divergence fused: no [rows, Vd] tensor is kept, gradients are computed on the way forward.

p is the target's distribution, q the draft's over the draft vocabulary Vd. alpha = sum_{v in Vd} min(p_v, q_v) uses p *not*
renormalised on Vd, as serving meets it. Losses of one row:

- kl: KL(p~ || q), p~ = p renormalised on Vd (the official code's and speculators' choice);
- tv: 1 - alpha, the total variation on Vd with the mass outside counted as lost;
- lk: lambda * kl + (1 - lambda) * tv, lambda = exp(-3 * alpha) without gradient, per row (LK losses, hybrid form).

All of it is float32, whatever the inputs' type: divergence gradients in bfloat16 were 9-31 % wrong elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

Loss = Literal["kl", "tv", "lk"]
CHUNK_BYTES = 64 << 20  # of draft logits held at once


@dataclass(frozen=True)
class Teacher:
    """The target's side of the loss, for U label rows.

    hidden: [U, d_target] after the final norm. head: [Vd, d_target], the target's rows of the draft vocabulary.
    log_normalizer: float32 [U], log-sum-exp of the target's logits over its whole vocabulary. softcap: tanh cap or None.
    """

    hidden: Tensor
    head: Tensor
    log_normalizer: Tensor
    softcap: float | None = None
    scale: float = 1.0
    bias: Tensor | None = None

    def log_probs(self, rows: slice | Tensor) -> Tensor:
        """float32 [n, Vd]: log p, not renormalised."""
        logits = functional.linear(self.hidden[rows], self.head, self.bias).float() * self.scale
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits - self.log_normalizer[rows][:, None]


class RowStats(NamedTuple):
    """Per row, without gradient. loss, alpha: float32 [M]. choice: int64 [M], the draft vocabulary id of the largest logit."""

    loss: Tensor
    alpha: Tensor
    choice: Tensor


def fused_divergence(
    hidden: Tensor, weight: Tensor, labels: Tensor, scale: Tensor, teacher: Teacher, kind: Loss = "kl"
) -> tuple[Tensor, RowStats]:
    """Sum over rows of scale * loss, differentiable in `hidden` and `weight`.

    hidden: [M, d] after the draft's final norm. weight: [Vd, d] draft head. labels: int64 [M] into the teacher's rows.
    scale: float32 [M]; rows with 0 have no loss but have statistics.
    """
    total, *stats = _Fused.apply(hidden, weight, labels, scale, teacher, kind)
    return total, RowStats(*stats)


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, labels: Tensor, scale: Tensor, teacher: Teacher, kind: Loss):
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.zeros_like(hidden) if wants_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if wants_weight else None
        loss, alpha = (torch.zeros(len(hidden), device=hidden.device) for _ in range(2))
        choice = torch.zeros(len(hidden), dtype=torch.int64, device=hidden.device)
        for span, rows in _by_label(labels, max(1, CHUNK_BYTES // (4 * len(weight)))):
            log_p = teacher.log_probs(span)[labels[rows] - span.start]
            logits = (hidden[rows] @ weight.T).float()
            choice[rows] = logits.argmax(-1)
            loss[rows], alpha[rows], grad = _divergence(logits, log_p, kind, wants_hidden or wants_weight)
            if grad is None:
                continue
            grad = grad.mul_(scale[rows][:, None])
            if grad_hidden is not None:
                grad_hidden[rows] = grad.to(weight.dtype) @ weight
            if grad_weight is not None:
                grad_weight.addmm_(grad.T, hidden[rows].float())
        ctx.save_for_backward(*(x for x in (grad_hidden, grad_weight) if x is not None))
        ctx.kept = (wants_hidden, wants_weight, weight.dtype)
        ctx.mark_non_differentiable(loss, alpha, choice)
        return (loss * scale).sum(), loss, alpha, choice

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor | None, ...]:
        saved = list(ctx.saved_tensors)
        wants_hidden, wants_weight, dtype = ctx.kept
        grad_hidden = saved.pop(0) * grads[0] if wants_hidden else None
        grad_weight = (saved.pop(0) * grads[0]).to(dtype) if wants_weight else None
        return grad_hidden, grad_weight, None, None, None, None


def _by_label(labels: Tensor, rows_at_once: int) -> Iterator[tuple[slice, Tensor]]:
    """Chunks of rows in label order, so that a teacher row is computed once for all TTT steps that learn from it."""
    order = torch.argsort(labels, stable=True)
    ordered = labels[order]
    begin = 0
    while begin < len(order):
        end = min(begin + rows_at_once, len(order))
        if end < len(order):  # do not cut through the rows of one label, unless they alone fill the chunk
            cut = int(torch.searchsorted(ordered, ordered[end]))
            end = cut if cut > begin else end
        first, last = int(ordered[begin]), int(ordered[end - 1])
        yield slice(first, last + 1), order[begin:end]
        begin = end


def _divergence(logits: Tensor, log_p: Tensor, kind: Loss, wanted: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """Loss [n], alpha [n] and d loss / d logits [n, Vd] of each row."""
    log_q = logits.log_softmax(-1)
    q, p = log_q.exp(), log_p.exp()
    alpha = torch.minimum(p, q).sum(-1)
    if kind == "tv":
        return 1 - alpha, alpha, _tv_slope(p, q) if wanted else None
    log_kept = log_p - log_p.logsumexp(-1, keepdim=True)
    kept = log_kept.exp()
    kl = (kept * (log_kept - log_q)).sum(-1)
    if kind == "kl":
        return kl, alpha, q - kept if wanted else None
    share = torch.exp(-3 * alpha)
    slope = share[:, None] * (q - kept) + (1 - share)[:, None] * _tv_slope(p, q) if wanted else None
    return share * kl + (1 - share) * (1 - alpha), alpha, slope


def _tv_slope(p: Tensor, q: Tensor) -> Tensor:
    """d(1 - sum min(p, q)) / d logits: q * (g - sum q g), g = -1 where q < p."""
    below = -(q < p).to(q.dtype)
    return q * (below - (q * below).sum(-1, keepdim=True))
