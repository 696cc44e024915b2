"""All sizes of a draft. No torch: doctor and estimate read them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

_STRICT = {"extra": "forbid", "strict": True}  # for `drafts.checkpoint`, which reads a shape from JSON


@dataclass(frozen=True)
class LatentShape:
    """Sizes of multi-head latent attention (MLA, DeepSeek-V2), in numbers per token or per head.

    q_rank, kv_rank: of the low-rank forms that queries, and keys with values, are made from. nope, rope: the parts of a
    query or key head without and with a position; the keys share one rope part. value: width of a value head.
    """

    __pydantic_config__: ClassVar = _STRICT
    q_rank: int
    kv_rank: int
    nope: int
    rope: int
    value: int


@dataclass(frozen=True)
class DraftShape:
    """All that fixes a draft's tensors and their meaning.

    `aux_layers` are boundary indices. `norm_before_residual`: the first layer's residual is the normed hidden (speculators)
    instead of the plain one (official code). `fc_norm`, `norm_output`: EAGLE-3.1. `latent`: attention is MLA; then head_dim is
    nope + rope, and every query head has its own keys. `sliding_window`: the keys that a query sees at most, its own among them.
    """

    __pydantic_config__: ClassVar = _STRICT
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
    latent: LatentShape | None = None
    sliding_window: int | None = None

    @property
    def value_dim(self) -> int:
        """Width of a value head that is not padding."""
        return self.latent.value if self.latent else self.head_dim

    def attention_weights(self, entering: int) -> tuple[int, int]:
        """Matrix weights of one layer's attention with inputs `entering` wide: for keys and values, for queries and result."""
        heads, result = self.num_heads, self.num_heads * self.value_dim * self.hidden_size
        if self.latent is None:
            return entering * 2 * self.num_kv_heads * self.head_dim, entering * heads * self.head_dim + result
        sizes = self.latent
        keys = entering * (sizes.kv_rank + sizes.rope) + sizes.kv_rank * heads * (sizes.nope + sizes.value)
        return keys, sizes.q_rank * (entering + heads * self.head_dim) + result
