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
    """Per row, without gradient. loss, alpha: float32 [M] (alpha nan where it was not asked for and the loss did not need it).
    choice: int64 [M], the draft vocabulary id of the largest logit."""

    loss: Tensor
    alpha: Tensor
    choice: Tensor


class _Kept(NamedTuple):
    """The target on the draft vocabulary, for some label rows: p renormalised [n, Vd], its mass [n] and negative entropy [n]."""

    p: Tensor
    mass: Tensor
    negentropy: Tensor

    def rows(self, index: Tensor) -> _Kept:
        return _Kept(self.p[index], self.mass[index], self.negentropy[index])


def fused_divergence(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    scale: Tensor,
    teacher: Teacher,
    kind: Loss = "kl",
    *,
    alpha: bool = True,
) -> tuple[Tensor, RowStats]:
    """Sum over rows of scale * loss, differentiable in `hidden` and `weight`.

    hidden: [M, d] after the draft's final norm. weight: [Vd, d] draft head. labels: int64 [M] into the teacher's rows.
    scale: float32 [M]; rows with 0 have no loss but have statistics. alpha: whether to measure it where the loss does not need it.
    """
    total, *stats = _Fused.apply(hidden, weight, labels, scale, teacher, kind, alpha)
    return total, RowStats(*stats)


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, labels, scale, teacher: Teacher, kind: Loss, wants_alpha: bool):
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.zeros_like(hidden) if wants_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if wants_weight else None
        loss, alpha = (torch.zeros(len(hidden), device=hidden.device) for _ in range(2))
        choice = torch.zeros(len(hidden), dtype=torch.int64, device=hidden.device)
        for span, rows in _by_label(labels, max(1, CHUNK_BYTES // (4 * len(weight)))):
            kept = _kept(teacher.log_probs(span)).rows(labels[rows] - span.start)
            logits = (hidden[rows] @ weight.T).float()
            loss[rows], alpha[rows], choice[rows], grad = _divergence(logits, kept, kind, wants_alpha)
            # The scale of a row goes to the narrow side of each product: no pass over [rows, Vd] for it.
            if grad_hidden is not None:
                grad_hidden[rows] = (grad.to(weight.dtype) @ weight) * scale[rows, None]
            if grad_weight is not None:
                grad_weight.addmm_(grad.T, hidden[rows].float() * scale[rows, None])
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
        return grad_hidden, grad_weight, None, None, None, None, None


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


def _kept(log_p: Tensor) -> _Kept:
    log_mass = log_p.logsumexp(-1)
    log_kept = log_p - log_mass[:, None]
    p = log_kept.exp()
    return _Kept(p, log_mass.exp(), torch.einsum("nv,nv->n", p, log_kept.clamp_min(torch.finfo(p.dtype).min)))


def _divergence(logits: Tensor, kept: _Kept, kind: Loss, wants_alpha: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Loss [n], alpha [n], choice [n] and d loss / d logits [n, Vd] of each row, in as few passes over [n, Vd] as it takes."""
    choice = logits.argmax(-1)
    top = logits.gather(1, choice[:, None])[:, 0]
    q = logits.softmax(-1)
    log_z = top - q.gather(1, choice[:, None])[:, 0].log()
    kl = kept.negentropy - torch.einsum("nv,nv->n", kept.p, logits) + log_z
    if kind == "kl" and not wants_alpha:
        return kl, torch.full_like(kl, torch.nan), choice, q.sub_(kept.p)
    p = kept.p * kept.mass[:, None]
    alpha = torch.minimum(p, q).sum(-1)
    if kind == "kl":
        return kl, alpha, choice, q.sub_(kept.p)
    if kind == "tv":
        return 1 - alpha, alpha, choice, _tv_slope(p, q)
    share = torch.exp(-3 * alpha)
    slope = share[:, None] * (q - kept.p) + (1 - share)[:, None] * _tv_slope(p, q)
    return share * kl + (1 - share) * (1 - alpha), alpha, choice, slope


def _tv_slope(p: Tensor, q: Tensor) -> Tensor:
    """d(1 - sum min(p, q)) / d logits: q * (g - sum q g), g = -1 where q < p."""
    below = -(q < p).to(q.dtype)
    return q * (below - (q * below).sum(-1, keepdim=True))
