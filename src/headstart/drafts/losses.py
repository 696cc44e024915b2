"""Draft head and divergence fused: no [rows, Vd] tensor is kept, gradients are computed on the way forward.

p is the target's distribution, q the draft's over the draft vocabulary Vd. alpha = sum_{v in Vd} min(p_v, q_v) uses p *not*
renormalised on Vd, as serving meets it. Losses of one row:

- kl: KL(p~ || q), p~ = p renormalised on Vd (the official code's and speculators' choice);
- tv: 1 - alpha, the total variation on Vd with the mass outside counted as lost;
- lk: lambda * kl + (1 - lambda) * tv, lambda = exp(-3 * alpha) without gradient, per row (LK losses, hybrid form);
- lk_alpha: -log alpha (LK losses);
- ce: -log q of the token that the sequence goes on with; 0 where it is not in the draft vocabulary.

A mixture is a table of weights, e.g. {kl: 0.9, ce: 0.1}. All of it is float32, whatever the inputs' type: divergence gradients in
bfloat16 were 9-31 % wrong elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Loss = Literal["kl", "tv", "lk", "lk_alpha", "ce"]
Mixture = Mapping[Loss, float]
# Draft logits held at once, by device. On the CPU: what glibc's malloc reuses; above 32 MiB it maps new memory, and zeroes it.
CHUNK_BYTES = {"cpu": 30 << 20, "cuda": 256 << 20}
CHUNK_ELSEWHERE = 64 << 20


@dataclass(frozen=True)
class Teacher:
    """The target's side of the loss, for U label rows.

    hidden: [U, d_target] after the final norm. head: [Vd, d_target], the target's rows of the draft vocabulary.
    log_normalizer: float32 [U], log-sum-exp of the target's logits over its whole vocabulary. softcap: tanh cap or None.
    token: int64 [U], the draft vocabulary id of the token that follows, -1 when it is not in it; only `ce` needs it.
    """

    hidden: Tensor
    head: Tensor
    log_normalizer: Tensor
    softcap: float | None = None
    scale: float = 1.0
    bias: Tensor | None = None
    token: Tensor | None = None

    def log_probs(self, rows: slice | Tensor) -> Tensor:
        """float32 [n, Vd]: log p, not renormalised."""
        logits = _wide_product(self.hidden[rows], self.head.T) * self.scale
        if self.bias is not None:
            logits = logits + self.bias.float() * self.scale
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits - self.log_normalizer[rows][:, None]


class RowStats(NamedTuple):
    """Per row, without gradient. loss, alpha: float32 [M] (alpha nan where it was not asked for and the loss did not need it).
    choice: int64 [M], the draft vocabulary id of the largest logit."""

    loss: Tensor
    alpha: Tensor
    choice: Tensor


class Kept(NamedTuple):
    """The target on the draft vocabulary, for some label rows: p renormalised [n, Vd], its mass [n], negative entropy [n], and the
    id of the token that follows [n] (-1: none)."""

    p: Tensor
    mass: Tensor
    negentropy: Tensor
    token: Tensor

    def rows(self, index: Tensor) -> Kept:
        return Kept(*(values[index] for values in self))


_Found = tuple[Tensor, Tensor, Tensor, Tensor]
Divergence = Callable[[Tensor, Kept, Mixture, bool], _Found]  # see `divergence`


def fused_divergence(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    scale: Tensor,
    teacher: Teacher,
    kind: Loss | Mixture = "kl",
    *,
    alpha: bool = True,
    of_rows: Divergence | None = None,
) -> tuple[Tensor, RowStats]:
    """Sum over rows of scale * loss, differentiable in `hidden` and `weight`.

    hidden: [M, d] after the draft's final norm; its type is that of the products. weight: [Vd, d] draft head. labels: int64 [M]
    into the teacher's rows. scale: float32 [M]; rows with 0 have no loss but have statistics. alpha: whether to measure it where
    the loss does not need it. of_rows: `divergence`, or that compiled.
    """
    mixture: Mixture = {kind: 1.0} if isinstance(kind, str) else kind
    found = partial(of_rows or divergence, mixture=mixture, wants_alpha=alpha)
    with torch.autocast(hidden.device.type, enabled=False):
        total, *stats = _Fused.apply(hidden, weight, labels, scale, teacher, found)
    return total, RowStats(*stats)


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, labels, scale, teacher: Teacher, of_rows: Callable[[Tensor, Kept], _Found]):
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.zeros_like(hidden) if wants_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if wants_weight else None
        head = weight.to(hidden.dtype)
        loss, alpha = (torch.zeros(len(hidden), device=hidden.device) for _ in range(2))
        choice = torch.zeros(len(hidden), dtype=torch.int64, device=hidden.device)
        held = CHUNK_BYTES.get(hidden.device.type, CHUNK_ELSEWHERE)
        for span, rows in _by_label(labels, max(1, held // (4 * len(weight)))):
            kept = _kept(teacher, span).rows(labels[rows] - span.start)
            logits = _wide_product(hidden[rows], head.T)
            loss[rows], alpha[rows], choice[rows], grad = of_rows(logits, kept)
            # The scale of a row goes to the narrow side of each product: no pass over [rows, Vd] for it.
            if grad_hidden is not None:
                grad_hidden[rows] = (grad.to(head.dtype) @ head) * scale[rows, None].to(head.dtype)
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
        return grad_hidden, grad_weight, None, None, None, None


def _wide_product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b in float32, whatever the inputs' type: half-precision logits would be off by more than p and q differ."""
    if a.is_cuda and a.dtype == b.dtype != torch.float32:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()


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


def _kept(teacher: Teacher, span: slice) -> Kept:
    log_p = teacher.log_probs(span)
    log_mass = log_p.logsumexp(-1)
    log_kept = log_p.sub_(log_mass[:, None])
    p = log_kept.exp()
    negentropy = torch.einsum("nv,nv->n", p, log_kept.clamp_min_(torch.finfo(p.dtype).min))
    nothing = torch.full(log_mass.shape, -1, device=p.device)
    return Kept(p, log_mass.exp(), negentropy, nothing if teacher.token is None else teacher.token[span])


class _Drafted(NamedTuple):
    """The draft at some rows: q [n, Vd]; kl and alpha [n] against the target."""

    q: Tensor
    kl: Tensor
    alpha: Tensor


def divergence(logits: Tensor, kept: Kept, mixture: Mixture, wants_alpha: bool) -> _Found:
    """Loss [n], alpha [n], choice [n] and d loss / d logits [n, Vd] of each row, in as few passes over [n, Vd] as it takes."""
    choice = logits.argmax(-1)
    top = logits.gather(1, choice[:, None])[:, 0]
    q = logits.softmax(-1)
    log_z = top - q.gather(1, choice[:, None])[:, 0].log()
    kl = kept.negentropy - torch.einsum("nv,nv->n", kept.p, logits) + log_z
    plain = mixture.keys() == {"kl"}
    p = None if plain and not wants_alpha else kept.p * kept.mass[:, None]
    alpha = torch.full_like(kl, torch.nan) if p is None else torch.minimum(p, q).sum(-1)
    if plain:
        share, slope = mixture["kl"], q.sub_(kept.p)
        return kl * share, alpha, choice, slope if share == 1 else slope.mul_(share)
    assert p is not None
    drafted = _Drafted(q, kl, alpha)
    loss, slope = torch.zeros_like(kl), torch.zeros_like(q)
    for name, share in mixture.items():
        value, gradient = _LOSSES[name](drafted, kept, p)
        loss += share * value
        slope += share * gradient
    return loss, alpha, choice, slope


# Each gives the loss [n] and its slope in the logits [n, Vd], for p not renormalised.
def _kl(drafted: _Drafted, kept: Kept, p: Tensor) -> tuple[Tensor, Tensor]:
    return drafted.kl, drafted.q - kept.p


def _tv(drafted: _Drafted, kept: Kept, p: Tensor) -> tuple[Tensor, Tensor]:
    return 1 - drafted.alpha, _tv_slope(p, drafted.q)


def _lk(drafted: _Drafted, kept: Kept, p: Tensor) -> tuple[Tensor, Tensor]:
    share = torch.exp(-3 * drafted.alpha)
    slope = share[:, None] * (drafted.q - kept.p) + (1 - share)[:, None] * _tv_slope(p, drafted.q)
    return share * drafted.kl + (1 - share) * (1 - drafted.alpha), slope


def _lk_alpha(drafted: _Drafted, kept: Kept, p: Tensor) -> tuple[Tensor, Tensor]:
    alpha = drafted.alpha.clamp_min(torch.finfo(drafted.alpha.dtype).tiny)
    return -alpha.log(), _tv_slope(p, drafted.q) / alpha[:, None]


def _ce(drafted: _Drafted, kept: Kept, p: Tensor) -> tuple[Tensor, Tensor]:
    known = (kept.token >= 0)[:, None]
    at = kept.token.clamp_min(0)[:, None]
    chosen = drafted.q.gather(1, at).clamp_min(torch.finfo(p.dtype).tiny)
    slope = drafted.q.scatter_add(1, at, -torch.ones_like(chosen)) * known
    return -(chosen.log() * known)[:, 0], slope


_LOSSES: dict[Loss, Callable[[_Drafted, Kept, Tensor], tuple[Tensor, Tensor]]] = {
    "kl": _kl,
    "tv": _tv,
    "lk": _lk,
    "lk_alpha": _lk_alpha,
    "ce": _ce,
}


def _tv_slope(p: Tensor, q: Tensor) -> Tensor:
    """d(1 - sum min(p, q)) / d logits: q * (g - sum q g), g = -1 where q < p."""
    below = -(q < p).to(q.dtype)
    return q * (below - (q * below).sum(-1, keepdim=True))
