"""Attention of a single new token, for CPUs: query heads that share keys are multiplied together.

Transformers copies every key and value for each query head that reads it, and the fused kernel splits its work by query
tokens, of which decoding has one. Four times slower than this with 9 query heads on 3 key heads and 32 rows.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from headstart.products import own_products

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NAME = "headstart_grouped"
LONG = 512  # new tokens from which the fused kernel gains by fast products; below, its blocks are too small


def speed_up_decoding(model: PreTrainedModel) -> None:
    """Let `model` decode with grouped attention where it would use fused attention on the CPU; else leave it alone."""
    if model.device.type != "cpu" or model.config.get_text_config(decoder=True)._attn_implementation != "sdpa":
        return
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    model.set_attn_implementation(NAME)
    head = model.get_output_embeddings()
    if head is not None:
        # Of a slice, the last tokens of several prompts, each row would be a product of its own, with a copy of the head.
        head.register_forward_pre_hook(lambda _, given: (given[0].contiguous(), *given[1:]))


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """query [rows, heads, n, d], key and value [rows, kv heads, tokens, d], mask bool [rows, 1, n, tokens].

    Returns [rows, n, heads, d_v]. More than one new token, or a position bias, goes to the fused kernel.
    """
    rows, heads, new, width = query.shape
    if new != 1 or kwargs.get("position_bias") is not None:
        with own_products() if new < LONG else nullcontext():
            return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    groups = key.shape[1]
    with own_products():
        scores = query.reshape(rows, groups, heads // groups, width) @ key.transpose(-1, -2)
        scores = scores * (width**-0.5 if scaling is None else scaling)
        if attention_mask is not None:
            scores = _masked(scores, attention_mask)
        mixed = scores.softmax(-1, dtype=torch.float32).to(value.dtype) @ value
    return mixed.reshape(rows, 1, heads, value.shape[-1]), None


def _masked(scores: Tensor, mask: Tensor) -> Tensor:
    if mask.dtype == torch.bool:
        return scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    return scores + mask
