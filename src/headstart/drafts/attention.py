"""Attention of the unrolled training: true features causally, own drafts on the diagonal.

At step i row t sees block 0 (the true features of its document up to t) and, of blocks 1..i, only its own chain. Both parts merge
by their log-sum-exp: L = logaddexp(L0, s_1..s_i), o = o0 * exp(L0 - L) + sum_j v_j * exp(s_j - L), s_j = q.k_j / sqrt(head_dim).
The gradient of block 0 is the flash kernel's own backward, called with the *merged* o and L (as ring attention does); the diagonal
terms are elementwise: P_j = exp(s_j - L), dS_j = P_j * (do.v_j - do.o). No mask is built, but for a sliding window on the CPU, over
pieces about as long as the window.

`dense` is the same thing written out with softmax over one row of scores: the reference for tests, and the form for what no flash
kernel takes (float32 on a GPU). `flash_cuda` calls FlashAttention's kernels for sequences of mixed lengths, one call for all runs.
`flex` is one call of PyTorch's FlexAttention over block 0 and the diagonals side by side, for GPUs.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headstart.drafts.rows import Run
from headstart.errors import UserError

# (queries [R,H,D], keys0 [C,Hk,D], values0 [C,Hk,D], diagonal keys [i,R,Hk,D], diagonal values [i,R,Hk,D], runs) -> [R,H,D]
Attend = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Sequence[Run]], Tensor]


def backend(device: torch.device, dtype: torch.dtype = torch.float32, name: str = "auto") -> Attend:
    """The form of that name (`train.attention_backend`); auto: the fastest exact one for a device and a type of queries.

    Raises:
        UserError: flex, and the device is a CPU.
    """
    if name == "flex" and device.type == "cpu":
        raise UserError(
            "train.attention_backend = 'flex': FlexAttention has no backward pass on a CPU", do="leave it out"
        )
    if name != "auto":
        return {"dense": dense, "flex": flex}[name]
    if device.type == "cpu":
        return flash_cpu
    return flash_cuda if device.type == "cuda" and dtype in (torch.float16, torch.bfloat16) else dense


def dense(q: Tensor, k0: Tensor, v0: Tensor, dk: Tensor, dv: Tensor, runs: Sequence[Run]) -> Tensor:
    """Softmax over the written-out scores of each run. Differentiable by autograd."""
    groups, scale = q.shape[1] // k0.shape[1], q.shape[-1] ** -0.5
    k0, v0 = (x.repeat_interleave(groups, dim=1) for x in (k0, v0))
    dk, dv = (x.repeat_interleave(groups, dim=2) for x in (dk, dv))
    parts = []
    for run in runs:
        count = run.high - run.low
        rows, keys = slice(run.at, run.at + count), slice(run.start, run.high)
        scores = torch.einsum("rhd,chd->rhc", q[rows], k0[keys]) * scale
        scores = scores.masked_fill(~_seen(run, q.device)[:, None, :], float("-inf"))
        own = torch.einsum("rhd,irhd->rhi", q[rows], dk[:, rows]) * scale
        weights = torch.cat((scores, own), dim=-1).softmax(dim=-1, dtype=_wide(q.dtype)).to(q.dtype)
        past, chain = weights.split((scores.shape[-1], own.shape[-1]), dim=-1)
        parts.append(torch.einsum("rhc,chd->rhd", past, v0[keys]) + torch.einsum("rhi,irhd->rhd", chain, dv[:, rows]))
    return torch.cat(parts) if parts else torch.zeros_like(q)


def _seen(run: Run, device: torch.device) -> Tensor:
    """Which of the run's keys each of its rows sees, bool [rows, keys]."""
    before = run.low - run.start
    seen = torch.ones(run.high - run.low, run.high - run.start, dtype=torch.bool, device=device).tril(before)
    return seen if run.reach is None else seen.triu(before - run.reach + 1)


def flash_cpu(q: Tensor, k0: Tensor, v0: Tensor, dk: Tensor, dv: Tensor, runs: Sequence[Run]) -> Tensor:
    """Merged flash attention on the CPU; memory grows with rows (times the width of a sliding window), not with rows times keys."""
    return _MergedFlash.apply(q, k0, v0, dk, dv, tuple(runs))


class _MergedFlash(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q: Tensor, k0: Tensor, v0: Tensor, dk: Tensor, dv: Tensor, runs: tuple[Run, ...]) -> Tensor:
        queries, keys, values = (_by_head(x) for x in (q, k0, v0))
        out, lse = torch.empty_like(queries), queries.new_empty(queries.shape[:3], dtype=_wide(q.dtype))
        for run in runs:
            _forward_run(queries, keys, values, out, lse, run)
        out, lse = _merge_diagonals(queries, dk, dv, out, lse)
        ctx.save_for_backward(q, k0, v0, dk, dv, out, lse)
        ctx.runs = runs
        return _by_row(out)

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k0, v0, dk, dv, out, lse = ctx.saved_tensors
        queries, keys, values, grad = (_by_head(x) for x in (q, k0, v0, grads[0]))
        gq, gk, gv = torch.zeros_like(queries), torch.zeros_like(keys), torch.zeros_like(values)
        for run in ctx.runs:
            _backward_run(grad, (queries, keys, values, out, lse), (gq, gk, gv), run)
        gdk, gdv = _backward_diagonals(grad, queries, dk, dv, out, lse, gq)
        return _by_row(gq), _by_row(gk), _by_row(gv), gdk, gdv, None


def _forward_run(queries: Tensor, keys: Tensor, values: Tensor, out: Tensor, lse: Tensor, run: Run) -> None:
    rows, own, before = _spans_of(run)
    mine = queries[:, :, rows]
    groups = queries.shape[1] // keys.shape[1]
    o, l = _flash(mine, *(_spread(x[:, :, own], groups) for x in (keys, values)), **_own_mask(run, queries))
    if before.stop > before.start:
        found = _flash(_stack(mine, groups), keys[:, :, before], values[:, :, before])
        o, l = _merge(o, l, *(_unstack(x, groups) for x in found))
    out[:, :, rows], lse[:, :, rows] = o, l


def _backward_run(grad: Tensor, saved: tuple[Tensor, ...], into: tuple[Tensor, ...], run: Run) -> None:
    queries, keys, values, out, lse = saved
    gq, gk, gv = into
    rows, own, before = _spans_of(run)
    groups = queries.shape[1] // keys.shape[1]
    mine = tuple(x[:, :, rows] for x in (grad, queries, out, lse))
    pair = tuple(_spread(x[:, :, own], groups) for x in (keys, values))
    q, k, v = _flash_backward(mine, pair, **_own_mask(run, queries))
    gq[:, :, rows] += q
    gk[:, :, own] += _fold(k, groups)
    gv[:, :, own] += _fold(v, groups)
    if before.stop > before.start:
        stacked = tuple(_stack(x, groups) for x in mine)
        q, k, v = _flash_backward(stacked, (keys[:, :, before], values[:, :, before]))
        gq[:, :, rows] += _unstack(q, groups)
        gk[:, :, before] += k
        gv[:, :, before] += v


def _spans_of(run: Run) -> tuple[slice, slice, slice]:
    """Of a run: its queries, its own context rows (seen causally), and its document's rows before them (seen whole; under a reach
    none are, and all count as its own)."""
    middle = run.low if run.reach is None else run.start
    return slice(run.at, run.at + run.high - run.low), slice(middle, run.high), slice(run.start, middle)


def _own_mask(run: Run, like: Tensor) -> dict[str, Any]:
    """What `_flash` takes for a run's own rows: the causal mask, or under a reach what is added to scores."""
    if run.reach is None:
        return {"causal": True}
    seen = _seen(run, like.device)
    return {"mask": torch.zeros(seen.shape, dtype=like.dtype, device=like.device).masked_fill(~seen, float("-inf"))}


def _stack(x: Tensor, groups: int) -> Tensor:
    """[1, heads, n, ...] -> [1, heads / groups, groups * n, ...]: where all see the same keys, query heads that share a key head
    are more rows of one. The kernel then works on larger blocks (1.4 times faster with 3 heads to a key head)."""
    return x.unflatten(1, (-1, groups)).flatten(2, 3)


def _unstack(x: Tensor, groups: int) -> Tensor:
    return x.unflatten(2, (groups, -1)).flatten(1, 2)


def flash_cuda(q: Tensor, k0: Tensor, v0: Tensor, dk: Tensor, dv: Tensor, runs: Sequence[Run]) -> Tensor:
    """Merged flash attention on a GPU, for float16 and bfloat16. No GPU has run it yet; its test runs where there is one."""
    if not runs:
        return torch.zeros_like(q)
    return _MergedVarlen.apply(q, k0, v0, dk, dv, tuple(runs))


class _MergedVarlen(torch.autograd.Function):
    """Each run is one sequence of the kernel: its rows ask, its document up to its end answers. The kernel's causal mask stands at
    the bottom right, which is just what a run that begins inside its document needs. Runs with a reach all have the same one, and
    the others are no longer than it."""

    @staticmethod
    def forward(ctx, q: Tensor, k0: Tensor, v0: Tensor, dk: Tensor, dv: Tensor, runs: tuple[Run, ...]) -> Tensor:
        spans = _Spans.of(runs, q.device)
        keys, values = k0[spans.keys], v0[spans.keys]
        o, l, seed, offset, _ = torch.ops.aten._flash_attention_forward(
            q, keys, values, spans.cu_q, spans.cu_k, spans.max_q, spans.max_k, 0.0, True, False, **spans.window
        )
        out, lse = _merge_diagonals(_by_head(q), dk, dv, _by_head(o), l[None])
        ctx.save_for_backward(q, k0, v0, dk, dv, out, lse, seed, offset)
        ctx.spans = spans
        return _by_row(out)

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k0, v0, dk, dv, out, lse, seed, offset = ctx.saved_tensors
        spans: _Spans = ctx.spans
        keys, values = k0[spans.keys], v0[spans.keys]
        found = torch.ops.aten._flash_attention_backward(
            grads[0].contiguous(), q, keys, values, _by_row(out).contiguous(), lse[0].contiguous(),
            spans.cu_q, spans.cu_k, spans.max_q, spans.max_k, 0.0, True, seed, offset, **spans.window,
        )  # fmt: skip
        gq = _by_head(found[0]).clone()
        gk, gv = (torch.zeros_like(x).index_add_(0, spans.keys, g) for x, g in ((k0, found[1]), (v0, found[2])))
        gdk, gdv = _backward_diagonals(_by_head(grads[0]), _by_head(q), dk, dv, out, lse, gq)
        return _by_row(gq), gk, gv, gdk, gdv, None


class _Spans(NamedTuple):
    """Runs as the kernel wants them. keys: [K] context rows, run after run; cu_q, cu_k: int32 [runs + 1] where each begins.
    window: the kernel's arguments for a reach."""

    keys: Tensor
    cu_q: Tensor
    cu_k: Tensor
    max_q: int
    max_k: int
    window: dict[str, int]

    @classmethod
    def of(cls, runs: Sequence[Run], device: torch.device) -> _Spans:
        asked, seen = [run.high - run.low for run in runs], [run.high - run.start for run in runs]
        keys = torch.cat([torch.arange(run.start, run.high, device=device) for run in runs])
        cu_q, cu_k = (
            torch.tensor([0, *itertools.accumulate(n)], dtype=torch.int32, device=device) for n in (asked, seen)
        )
        reach = max(run.reach or 0 for run in runs)
        window = {"window_size_left": reach - 1, "window_size_right": 0} if reach else {}
        return cls(keys, cu_q, cu_k, max(asked), max(seen), window)


def flex(q: Tensor, k0: Tensor, v0: Tensor, dk: Tensor, dv: Tensor, runs: Sequence[Run]) -> Tensor:
    """FlexAttention: its mask says which block-0 rows a row sees, and of the diagonals its own. It has no backward pass on a CPU;
    no GPU has run it yet, and its test of gradients runs where there is one."""
    from torch.nn.attention.flex_attention import flex_attention  # noqa: PLC0415 (slow to import)

    if not runs:
        return torch.zeros_like(q)
    mask = _block_mask(tuple(runs), len(q), len(k0), len(dk), q.device)
    keys, values = (torch.cat((true, own.flatten(0, 1))) for true, own in ((k0, dk), (v0, dv)))
    found = _on(q.device, flex_attention)(
        _by_head(q), _by_head(keys), _by_head(values), block_mask=mask, enable_gqa=True
    )
    assert isinstance(found, Tensor)
    return _by_row(found)


@functools.lru_cache(maxsize=1)
def _block_mask(runs: tuple[Run, ...], rows: int, context: int, steps: int, device: torch.device) -> Any:
    """The same for all layers of a step."""
    from torch.nn.attention.flex_attention import create_block_mask  # noqa: PLC0415 (slow to import)

    sees = _sees(runs, rows, context, device)
    return _on(device, create_block_mask)(sees, None, None, rows, context + steps * rows, device)


def _on(device: torch.device, function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiled on a GPU: FlexAttention would write out every score, and its mask, without."""
    return _compiled(function) if device.type == "cuda" else function


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=True)


def _sees(runs: Sequence[Run], rows: int, context: int, device: torch.device) -> Callable[..., Tensor]:
    """The mask function: rows of block 0 from `first` to `last`, then of every diagonal block the row itself."""
    first, last = (torch.zeros(rows, dtype=torch.long, device=device) for _ in range(2))
    for run in runs:
        own = torch.arange(run.low, run.high, device=device)
        at = slice(run.at, run.at + len(own))
        last[at] = own
        first[at] = run.start if run.reach is None else (own - run.reach + 1).clamp_min(run.start)

    def sees(batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        true = (key >= first[row]) & (key <= last[row])
        return torch.where(key < context, true, (key - context) % rows == row)

    return sees


def _flash(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, attn_mask=mask)


def _flash_backward(
    asked: tuple[Tensor, ...], seen: tuple[Tensor, ...], *, causal: bool = False, mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values. asked: gradient of the result, queries, result, log-sum-exp; seen: keys, values."""
    grad, q, out, lse = asked
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad.contiguous(), q, *seen, out.contiguous(), lse.contiguous(), 0.0, causal, attn_mask=mask
    )


def _merge(o1: Tensor, l1: Tensor, o2: Tensor, l2: Tensor) -> tuple[Tensor, Tensor]:
    lse = torch.logaddexp(l1, l2)
    w1, w2 = ((part - lse).exp()[..., None].to(o1.dtype) for part in (l1, l2))
    return o1 * w1 + o2 * w2, lse


def _merge_diagonals(queries: Tensor, dk: Tensor, dv: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    groups = queries.shape[1] // dk.shape[2]
    for key, value in zip(dk, dv, strict=True):
        score = _dot(queries, _spread(_by_head(key), groups))
        out, lse = _merge(out, lse, _spread(_by_head(value), groups), score)
    return out, lse


def _backward_diagonals(grad: Tensor, queries: Tensor, dk: Tensor, dv: Tensor, out: Tensor, lse: Tensor, gq: Tensor):
    groups, scale = queries.shape[1] // dk.shape[2], queries.shape[-1] ** -0.5
    gdk, gdv = torch.empty_like(dk), torch.empty_like(dv)
    delta = (grad * out).sum(-1)
    for index, (key, value) in enumerate(zip(dk, dv, strict=True)):
        keys, values = _spread(_by_head(key), groups), _spread(_by_head(value), groups)
        weight = (_dot(queries, keys) - lse).exp().to(grad.dtype)
        slope = (weight * ((grad * values).sum(-1) - delta))[..., None] * scale
        gq += slope * keys
        gdk[index] = _by_row(_fold(slope * queries, groups))
        gdv[index] = _by_row(_fold(weight[..., None] * grad, groups))
    return gdk, gdv


def _dot(queries: Tensor, keys: Tensor) -> Tensor:
    return (queries * keys).sum(-1).to(_wide(queries.dtype)) * queries.shape[-1] ** -0.5


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The type of log-sum-exps: float32 at least."""
    return torch.promote_types(dtype, torch.float32)


def _by_head(x: Tensor) -> Tensor:
    """[n, heads, D] -> [1, heads, n, D]."""
    return x.transpose(0, 1)[None]


def _by_row(x: Tensor) -> Tensor:
    """[1, heads, n, D] -> [n, heads, D]."""
    return x[0].transpose(0, 1)


def _spread(x: Tensor, groups: int) -> Tensor:
    """A copy of each key head for every query head that shares it: [1, heads, n, D] -> [1, heads * groups, n, D]."""
    return x.repeat_interleave(groups, dim=1) if groups > 1 else x


def _fold(x: Tensor, groups: int) -> Tensor:
    """Its gradient, summed over the query heads that share a key head: [1, heads * groups, n, D] -> [1, heads, n, D]."""
    return x.unflatten(1, (-1, groups)).sum(2) if groups > 1 else x
