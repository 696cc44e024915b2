"""Floating-point operations that a training step needs, counted from its rows; a multiply-add is two."""

from __future__ import annotations

from headstart.drafts.rows import RowPlan, Run, within
from headstart.drafts.shape import DraftShape

FORWARD_AND_BOTH_GRADIENTS = 3
FORWARD_AND_ONE_GRADIENT = 2  # nothing behind it learns, or it does not learn itself


def step_flops(shape: DraftShape, plan: RowPlan, *, frozen_head: bool) -> float:
    """Needed for forward and backward of one packed batch: only rows that feed a loss, no masked-out key, each teacher row once.

    `eagle3.md` gives the dense figure; this is what is left of it with response-only rows.
    """
    d, wide = shape.hidden_size, shape.target_hidden_size
    context, label_rows = len(plan.context), len(plan.teacher)
    total = FORWARD_AND_ONE_GRADIENT * 2 * len(shape.aux_layers) * wide * d * context  # fc: its input does not learn
    for index, step in enumerate(plan.steps):
        rows = len(step.rows)
        for layer in range(shape.num_layers):
            last = layer == shape.num_layers - 1
            keyed = context if index == 0 else rows
            asking = keyed if index == 0 and not last else rows
            runs = plan.whole if index == 0 and not last else step.runs
            if shape.sliding_window is not None:
                runs = within(runs, shape.sliding_window - index)
            total += FORWARD_AND_BOTH_GRADIENTS * _layer(shape, layer, keyed, asking)
            total += FORWARD_AND_BOTH_GRADIENTS * _attention(shape, runs, asking * index)
        total += _head(shape, rows, frozen=frozen_head)
    return total + 2 * wide * shape.draft_vocab_size * label_rows  # the teacher: forward alone


def dense_flops(shape: DraftShape, tokens: int, steps: int) -> float:
    """The same with every row at every step: the formula of `eagle3.md`, with causal attention."""
    d, wide, fused = shape.hidden_size, shape.target_hidden_size, len(shape.aux_layers)
    total = FORWARD_AND_ONE_GRADIENT * 2 * fused * wide * d * tokens
    pairs = tokens * (tokens + 1) / 2
    for index in range(steps):
        for layer in range(shape.num_layers):
            total += FORWARD_AND_BOTH_GRADIENTS * _layer(shape, layer, tokens, tokens)
            widths = shape.head_dim + shape.value_dim
            total += FORWARD_AND_BOTH_GRADIENTS * 2 * shape.num_heads * widths * (pairs + index * tokens)
        total += _head(shape, tokens, frozen=False)
    return total + 2 * wide * shape.draft_vocab_size * tokens


def _layer(shape: DraftShape, layer: int, keyed: int, asking: int) -> float:
    """Matrix products of one decoder layer, forward: keys and values of `keyed` rows, all the rest of `asking` rows."""
    d = shape.hidden_size
    keys, queries = shape.attention_weights(d + shape.target_hidden_size if layer == 0 else d)
    return 2 * (keyed * keys + asking * (queries + 3 * d * shape.intermediate_size))


def _attention(shape: DraftShape, runs: tuple[Run, ...], diagonal: int) -> float:
    """Scores and weighted values, forward, over the keys that each query sees."""
    seen = sum(run.pairs for run in runs)
    return 2 * shape.num_heads * (shape.head_dim + shape.value_dim) * (seen + diagonal)


def _head(shape: DraftShape, rows: int, *, frozen: bool) -> float:
    passes = FORWARD_AND_ONE_GRADIENT if frozen else FORWARD_AND_BOTH_GRADIENTS
    return passes * 2 * shape.hidden_size * shape.draft_vocab_size * rows
