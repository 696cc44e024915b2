"""The pieces of a draft: norms, rotary positions, attention projections, decoder layers. Plain torch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class DraftShape:
    """All that fixes a draft's tensors and their meaning.

    `aux_layers` are boundary indices. `norm_before_residual`: the first layer's residual is the normed hidden (speculators)
    instead of the plain one (official code). `fc_norm`, `norm_output`: EAGLE-3.1.
    """

    hidden_size: int
    target_hidden_size: int
    aux_layers: tuple[int, ...]
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    target_vocab_size: int
    draft_vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    max_positions: int
    norm_before_residual: bool
    fc_norm: bool
    norm_output: bool


class RMSNorm(nn.Module):
    """`x / rms(x) * weight` over the last axis, computed in the type of `weight`, returned in that of x."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x.to(self.weight.dtype), (x.shape[-1],), self.weight, self.eps).to(x.dtype)


def rotate(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Rotary embedding in the half-split layout of Llama. x: [n, heads, head_dim]; positions: [n]."""
    half = x.shape[-1] // 2
    exponents = torch.arange(half, device=x.device, dtype=torch.float32) / half
    angles = positions.float()[:, None] * theta**-exponents
    cos, sin = angles.cos()[:, None, :].to(x.dtype), angles.sin()[:, None, :].to(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Attention(nn.Module):
    """Projections only: who sees whom is decided by `drafts.attention` (training) or `Eagle3.extend` (decoding)."""

    def __init__(self, shape: DraftShape, input_size: int) -> None:
        super().__init__()
        self.shape = shape
        queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        self.q_proj = nn.Linear(input_size, queries, bias=False)
        self.k_proj = nn.Linear(input_size, keys, bias=False)
        self.v_proj = nn.Linear(input_size, keys, bias=False)
        self.o_proj = nn.Linear(queries, shape.hidden_size, bias=False)

    def queries(self, x: Tensor, positions: Tensor) -> Tensor:
        """[n, input] -> rotated queries [n, heads, head_dim]."""
        split = self.q_proj(x).view(len(x), self.shape.num_heads, self.shape.head_dim)
        return rotate(split, positions, self.shape.rope_theta)

    def keys_values(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """[n, input] -> rotated keys and plain values, each [n, kv_heads, head_dim]."""
        size = (len(x), self.shape.num_kv_heads, self.shape.head_dim)
        return rotate(self.k_proj(x).view(size), positions, self.shape.rope_theta), self.v_proj(x).view(size)


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: DraftShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    """A Llama-style layer. The first one also reads the embedding: its attention input is [norm(e), norm(h)], 2d wide."""

    def __init__(self, shape: DraftShape, *, first: bool) -> None:
        super().__init__()
        width, eps = shape.hidden_size, shape.rms_norm_eps
        self.norm_before_residual = shape.norm_before_residual
        self.hidden_norm = RMSNorm(width, eps) if first else None
        self.input_layernorm = RMSNorm(shape.target_hidden_size if first else width, eps)
        self.self_attn = Attention(shape, width + shape.target_hidden_size if first else width)
        self.post_attention_layernorm = RMSNorm(width, eps)
        self.mlp = MLP(shape)

    def inputs(self, embeds: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """What attention reads, and the residual it is added to. `embeds` matter to the first layer only."""
        if self.hidden_norm is None:
            return self.input_layernorm(hidden), hidden
        normed = self.hidden_norm(hidden)
        residual = normed if self.norm_before_residual else hidden
        return torch.cat((self.input_layernorm(embeds), normed), dim=-1), residual

    def finish(self, residual: Tensor, attended: Tensor) -> Tensor:
        """Residual [n, d] and attention result [n, heads, head_dim] -> the layer's output [n, d]."""
        hidden = residual + self.self_attn.o_proj(attended.flatten(1))
        return hidden + self.mlp(self.post_attention_layernorm(hidden))
