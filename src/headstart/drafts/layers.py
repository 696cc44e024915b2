"""The pieces of a draft: norms, rotary positions, attention projections, decoder layers. Plain torch."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from headstart.drafts.shape import DraftShape, LatentShape


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
    cos, sin = _turns(x, positions, theta)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def rotate_pairs(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """The same with neighbours turned together, the layout of DeepSeek."""
    cos, sin = _turns(x, positions, theta)
    first, second = x[..., ::2], x[..., 1::2]
    return torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1).flatten(-2)


def _turns(x: Tensor, positions: Tensor, theta: float) -> tuple[Tensor, Tensor]:
    """Cosine and sine of each pair's angle, [n, 1, half of x's width]."""
    half = x.shape[-1] // 2
    exponents = torch.arange(half, device=x.device, dtype=torch.float32) / half
    angles = positions.float()[:, None] * theta**-exponents
    return angles.cos()[:, None, :].to(x.dtype), angles.sin()[:, None, :].to(x.dtype)


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

    def result(self, attended: Tensor) -> Tensor:
        """Attention result [n, heads, head_dim] -> [n, d]."""
        return self.o_proj(attended.flatten(1))


class LatentAttention(nn.Module):
    """MLA, with its keys and values written out so that the same kernels take them. Names as in DeepSeek's checkpoints.

    The scale of the scores is head_dim ** -0.5, as with plain rotary positions (no yarn).
    """

    def __init__(self, shape: DraftShape, sizes: LatentShape, input_size: int) -> None:
        super().__init__()
        self.shape, self.sizes = shape, sizes
        self.q_a_proj = nn.Linear(input_size, sizes.q_rank, bias=False)
        self.q_a_layernorm = RMSNorm(sizes.q_rank, shape.rms_norm_eps)
        self.q_b_proj = nn.Linear(sizes.q_rank, shape.num_heads * shape.head_dim, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(input_size, sizes.kv_rank + sizes.rope, bias=False)
        self.kv_a_layernorm = RMSNorm(sizes.kv_rank, shape.rms_norm_eps)
        self.kv_b_proj = nn.Linear(sizes.kv_rank, shape.num_heads * (sizes.nope + sizes.value), bias=False)
        self.o_proj = nn.Linear(shape.num_heads * sizes.value, shape.hidden_size, bias=False)

    def queries(self, x: Tensor, positions: Tensor) -> Tensor:
        """[n, input] -> queries [n, heads, nope + rope], the rope part rotated."""
        sizes = self.sizes
        whole = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        still, turned = whole.view(len(x), self.shape.num_heads, -1).split((sizes.nope, sizes.rope), dim=-1)
        return torch.cat((still, rotate_pairs(turned, positions, self.shape.rope_theta)), dim=-1)

    def keys_values(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """[n, input] -> keys, and values padded with zeros to their width, each [n, heads, nope + rope]."""
        sizes, heads = self.sizes, self.shape.num_heads
        latent, turned = self.kv_a_proj_with_mqa(x).split((sizes.kv_rank, sizes.rope), dim=-1)
        pairs = self.kv_b_proj(self.kv_a_layernorm(latent)).view(len(x), heads, -1)
        still, values = pairs.split((sizes.nope, sizes.value), dim=-1)
        shared = rotate_pairs(turned[:, None, :], positions, self.shape.rope_theta).expand(-1, heads, -1)
        keys = torch.cat((still, shared), dim=-1)
        return keys, functional.pad(values, (0, self.shape.head_dim - sizes.value))

    def result(self, attended: Tensor) -> Tensor:
        """Attention result [n, heads, nope + rope], zeros where values were padded -> [n, d]."""
        return self.o_proj(attended[..., : self.sizes.value].flatten(1))


def attention_of(shape: DraftShape, input_size: int) -> Attention | LatentAttention:
    return LatentAttention(shape, shape.latent, input_size) if shape.latent else Attention(shape, input_size)


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
    """A Llama-style layer, its attention plain heads or MLA.

    The first one also reads the embedding: its attention input is [norm(e), norm(h)], 2d wide.
    """

    def __init__(self, shape: DraftShape, *, first: bool) -> None:
        super().__init__()
        width, eps = shape.hidden_size, shape.rms_norm_eps
        self.norm_before_residual = shape.norm_before_residual
        self.hidden_norm = RMSNorm(width, eps) if first else None
        self.input_layernorm = RMSNorm(shape.target_hidden_size if first else width, eps)
        self.self_attn = attention_of(shape, width + shape.target_hidden_size if first else width)
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
        hidden = residual + self.self_attn.result(attended)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))
