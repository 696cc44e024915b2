"""The EAGLE-3 draft: fuse the target's aux states, build on its own output from then on.

Architecture and names: `eagle3.md` of the design notes, after the official EAGLE code and vLLM's `llama_eagle3.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from headstart.drafts.layers import DecoderLayer, RMSNorm
from headstart.drafts.shape import DraftShape

__all__ = ["DraftCache", "DraftShape", "Eagle3"]


class DraftCache:
    """Keys and values of every layer, each [length, kv_heads, head_dim]."""

    def __init__(self) -> None:
        self.layers: list[tuple[Tensor, Tensor]] = []

    @property
    def length(self) -> int:
        return len(self.layers[0][0]) if self.layers else 0

    def rewind(self, length: int) -> None:
        """Forget everything after the first `length` positions."""
        self.layers = [(keys[:length], values[:length]) for keys, values in self.layers]

    def append(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        if layer == len(self.layers):
            self.layers.append((keys, values))
        else:
            old_keys, old_values = self.layers[layer]
            self.layers[layer] = (torch.cat((old_keys, keys)), torch.cat((old_values, values)))
        return self.layers[layer]


class Eagle3(nn.Module):
    """An EAGLE-3 draft.

    embed: the target's embedding [V, d_target], frozen. `draft_to_target` int64 [Vd] holds absolute target ids.
    """

    embed_tokens: Tensor
    draft_to_target: Tensor

    def __init__(self, shape: DraftShape, embed: Tensor) -> None:
        super().__init__()
        self.shape = shape
        fused = len(shape.aux_layers) * shape.target_hidden_size
        norms = (
            [RMSNorm(shape.target_hidden_size, shape.rms_norm_eps) for _ in shape.aux_layers] if shape.fc_norm else []
        )
        self.fc_norms = nn.ModuleList(norms)
        self.fc = nn.Linear(fused, shape.hidden_size, bias=False)
        self.layers = nn.ModuleList(DecoderLayer(shape, first=index == 0) for index in range(shape.num_layers))
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.lm_head = nn.Linear(shape.hidden_size, shape.draft_vocab_size, bias=False)
        self.register_buffer("embed_tokens", embed, persistent=False)
        self.register_buffer("draft_to_target", torch.arange(shape.draft_vocab_size), persistent=False)

    def fuse(self, aux: Tensor) -> Tensor:
        """Aux states [..., n_aux, d_target] -> the draft's first hidden [..., d]."""
        if self.fc_norms:
            aux = torch.stack([norm(aux[..., i, :]) for i, norm in enumerate(self.fc_norms)], dim=-2)
        return self.fc(aux.flatten(-2))

    def embed(self, ids: Tensor) -> Tensor:
        return functional.embedding(ids, self.embed_tokens)

    def feed(self, out: Tensor) -> Tensor:
        """The hidden that the next step starts from: the output itself, or normed (EAGLE-3.1 `norm_output`)."""
        return self.norm(out) if self.shape.norm_output else out

    def logits(self, out: Tensor) -> Tensor:
        """Outputs [..., d] -> float32 logits [..., Vd]."""
        return self.lm_head(self.norm(out)).float()

    def extend(self, ids: Tensor, hidden: Tensor, cache: DraftCache) -> Tensor:
        """Append positions to one sequence, causally.

        ids: int64 [n], the token *after* the one whose state `hidden` [n, d] is. The rotary position of a row is its index in
        the cache. Returns outputs [n, d].
        """
        start = cache.length
        positions = torch.arange(start, start + len(ids), device=hidden.device)
        embeds = self.embed(ids).to(hidden.dtype)
        for index, layer in enumerate(self._layers()):
            inputs, residual = layer.inputs(embeds, hidden)
            keys, values = cache.append(index, *layer.self_attn.keys_values(inputs, positions))
            attended = _causal(layer.self_attn.queries(inputs, positions), keys, values, self.shape.sliding_window)
            hidden = layer.finish(residual, attended)
        return hidden

    def _layers(self) -> Sequence[DecoderLayer]:
        return [layer for layer in self.layers if isinstance(layer, DecoderLayer)]


def _causal(queries: Tensor, keys: Tensor, values: Tensor, window: int | None = None) -> Tensor:
    """The last len(queries) positions attend to all up to themselves, or to the last `window` of those. [n, heads, head_dim] in
    and out."""
    count, total = len(queries), len(keys)
    mask = torch.ones(count, total, dtype=torch.bool, device=queries.device).tril(total - count)
    if window is not None:
        mask = mask.triu(total - count - window + 1)
    groups = queries.shape[1] // keys.shape[1]
    heads = (x.repeat_interleave(groups, dim=1).transpose(0, 1) for x in (keys, values))
    return functional.scaled_dot_product_attention(queries.transpose(0, 1), *heads, attn_mask=mask).transpose(0, 1)
