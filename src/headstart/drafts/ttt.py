"""Training-time test: the draft unrolled on its own outputs, T steps deep, over packed documents.

Each step gives its rows exactly the context they would have when decoding: the true prefix, then the row's own chain. The rotary
position of row t at step i is t + i.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from headstart.drafts import attention
from headstart.drafts.attention import Attend
from headstart.drafts.eagle3 import Eagle3
from headstart.drafts.layers import DecoderLayer
from headstart.drafts.rows import RowPlan, Run, within


class _Chain:
    """Keys and values of one layer: block 0 of the context, then one diagonal block per step."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self.keys, self.values = keys, values
        self.diagonal: list[tuple[Tensor, Tensor]] = []

    def select(self, parent: Tensor) -> None:
        self.diagonal = [(keys[parent], values[parent]) for keys, values in self.diagonal]

    def stacked(self, rows: int) -> tuple[Tensor, Tensor]:
        if not self.diagonal:
            empty = self.keys.new_empty(0, rows, *self.keys.shape[1:])
            return empty, empty
        keys, values = zip(*self.diagonal, strict=True)
        return torch.stack(keys), torch.stack(values)


def unroll(
    draft: Eagle3, aux: Tensor, tokens: Tensor, plan: RowPlan, attend: Attend | str = "auto", *, remat: bool = False
) -> list[Tensor]:
    """Outputs of every TTT step, [R_i, d] each, for the rows of `plan`.

    aux: aux states of the context rows [C, n_aux, d_target]. tokens: int64, the packed input ids. attend: the form of attention, or
    its name (`attention.backend`). remat: compute the inside of each MLP anew in the backward pass instead of keeping it.
    """
    narrow = (
        torch.get_autocast_dtype(aux.device.type)
        if torch.is_autocast_enabled(aux.device.type)
        else draft.fc.weight.dtype
    )
    if isinstance(attend, str):
        attend = attention.backend(aux.device, narrow, attend)
    finish = _finish_again if remat else _finish
    layers = [layer for layer in draft.layers if isinstance(layer, DecoderLayer)]
    hidden, chains = _first(draft, layers, aux, tokens, plan, attend, finish)
    outputs = [hidden]
    for index, step in enumerate(plan.steps[1:], start=1):
        for chain in chains:
            chain.select(step.parent)
        hidden = draft.feed(hidden)[step.parent]
        embeds = draft.embed(tokens[step.inputs]).to(hidden.dtype)
        positions, runs = plan.positions[step.rows] + index, _seen(draft, step.runs, index)
        for layer, chain in zip(layers, chains, strict=True):
            attended, residual = _follow(layer, chain, embeds, hidden, positions, runs, attend)
            hidden = finish(layer, residual, attended)
        outputs.append(hidden)
    return outputs


def _first(
    draft: Eagle3,
    layers: list[DecoderLayer],
    aux: Tensor,
    tokens: Tensor,
    plan: RowPlan,
    attend: Attend,
    finish: Callable[[DecoderLayer, Tensor, Tensor], Tensor],
) -> tuple[Tensor, list[_Chain]]:
    """Step 0. Only the last layer may leave out queries: the layers before it make what the next one's keys are made of."""
    hidden = draft.fuse(aux)
    embeds = draft.embed(tokens[plan.context + 1]).to(hidden.dtype)
    chains = []
    for layer in layers:
        inputs, residual = layer.inputs(embeds, hidden)
        chain = _Chain(*layer.self_attn.keys_values(inputs, plan.positions))
        runs, positions = plan.whole, plan.positions
        if layer is layers[-1]:
            rows = plan.steps[0].rows
            inputs, residual, positions, runs = inputs[rows], residual[rows], positions[rows], plan.steps[0].runs
        queries = layer.self_attn.queries(inputs, positions)
        attended = attend(queries, chain.keys, chain.values, *chain.stacked(len(queries)), _seen(draft, runs, 0))
        hidden = finish(layer, residual, attended)
        chains.append(chain)
    return hidden, chains


def _follow(
    layer: DecoderLayer,
    chain: _Chain,
    embeds: Tensor,
    hidden: Tensor,
    positions: Tensor,
    runs: tuple[Run, ...],
    attend: Attend,
) -> tuple[Tensor, Tensor]:
    """Attention of a later step: its result [R, heads, head_dim] and the residual it is added to."""
    inputs, residual = layer.inputs(embeds, hidden)
    chain.diagonal.append(layer.self_attn.keys_values(inputs, positions))
    queries = layer.self_attn.queries(inputs, positions)
    return attend(queries, chain.keys, chain.values, *chain.stacked(len(queries)), runs), residual


def _seen(draft: Eagle3, runs: tuple[Run, ...], index: int) -> tuple[Run, ...]:
    """Of a sliding window, step `index` has that much behind it on its own chain, whose rows are all in it."""
    window = draft.shape.sliding_window
    return runs if window is None else within(runs, window - index)


def _finish(layer: DecoderLayer, residual: Tensor, attended: Tensor) -> Tensor:
    return layer.finish(residual, attended)


def _finish_again(layer: DecoderLayer, residual: Tensor, attended: Tensor) -> Tensor:
    return cast(Tensor, checkpoint(layer.finish, residual, attended, use_reentrant=False))
