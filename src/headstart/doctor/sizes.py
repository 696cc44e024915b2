"""How large things are: a target's weights, from its configuration alone, and the states of a capture. Plain arithmetic."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from headstart.data.footprint import bytes_per_token
from headstart.events import size
from headstart.target import quantization
from headstart.target.anatomy import Anatomy
from headstart.target.spellings import WHOLE, is_a

Config = Mapping[str, Any]

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8": 1}
_EXPERT_KEYS = ("n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts")
_EXPERT_WIDTH_KEYS = ("moe_intermediate_size", "expert_intermediate_size", "intermediate_size", "ffn_hidden_size")
_SHARED_KEYS = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")


def states_bytes(tokens: int, vectors: int, width: int, itemsize: int) -> int:
    """Bytes of `vectors` states of `tokens` tokens, each `width` numbers of `itemsize` bytes, with their labels: the most that
    they can take."""
    return round(tokens * bytes_per_token(vectors - 1, width, itemsize))


@dataclass(frozen=True)
class Parameters:
    """Numbers of weights of the text model. `outer`: embedding and head, which quantisation leaves alone."""

    outer: int
    attention: int
    mlp: int

    @property
    def total(self) -> int:
        return self.outer + self.attention + self.mlp


@dataclass(frozen=True)
class Weights:
    """bytes: None when unknown. origin: what that is known from, for people."""

    bytes: int | None
    origin: str

    @property
    def told(self) -> str:
        return "weights of unknown size" if self.bytes is None else f"{size(self.bytes)} of weights ({self.origin})"


def count_parameters(text: Config, anatomy: Anatomy) -> Parameters | None:
    """Weights by the sizes in the configuration; None when one is unknown.

    Norms, biases and routers are left out (below 1 %). Layers of linear attention count as if they attended.
    """
    sizes = (anatomy.num_layers, anatomy.hidden_size, anatomy.vocab_size, anatomy.num_heads)
    layers, width, rows, heads = sizes
    if not (layers and width and rows and heads):
        return None
    attention = _mla(text, width, heads) if anatomy.mla else _attention(anatomy, width, heads)
    mlp = _mlps(text, anatomy, width, layers)
    if attention is None or mlp is None:
        return None
    kinds = anatomy.layer_kinds or {}
    attending = layers - kinds.get("moe", 0) - kinds.get("mlp", 0)
    return Parameters(rows * width * (1 if anatomy.tied_head else 2), attending * attention, mlp)


def weights_bytes(count: Parameters, quant: Config, itemsize: int) -> int | None:
    """Bytes of weights as they are stored under the quantisation `quant`, else in `itemsize`; None when unknown."""
    if not quant:
        return count.total * itemsize
    bits = quantization.bits(quant)
    if bits is None:
        return None
    spared = count.outer + (count.attention if quantization.skips(quant, "attn") else 0)
    scales = 16 / 32 if bits == 4 else 0  # one 16-bit scale for 32 weights, or 8 bits for 16
    return int(spared * itemsize + (count.total - spared) * (bits + scales) / 8)


def _attention(anatomy: Anatomy, width: int, heads: int) -> int | None:
    if anatomy.head_dim is None or anatomy.num_kv_heads is None:
        return None
    return width * anatomy.head_dim * (2 * heads + 2 * anatomy.num_kv_heads)


def _mla(text: Config, width: int, heads: int) -> int | None:
    keys = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    if any(not is_a(text.get(key), WHOLE) for key in keys):
        return None
    rank, nope, rope, value = (text[key] for key in keys)
    low = _first(text, ("q_lora_rank",))
    query = width * low + low * heads * (nope + rope) if low else width * heads * (nope + rope)
    return query + width * (rank + rope) + rank * heads * (nope + value) + heads * value * width


def _mlps(text: Config, anatomy: Anatomy, width: int, layers: int) -> int | None:
    dense_width, experts = anatomy.intermediate_size, _first(text, _EXPERT_KEYS)
    if not anatomy.moe or not experts:
        return None if dense_width is None else layers * 3 * width * dense_width
    sparse = (anatomy.layer_kinds or {}).get("moe") or _sparse_layers(text, layers)
    expert_width = _first(text, _EXPERT_WIDTH_KEYS)
    if expert_width is None:
        return None
    shared = _first(text, _SHARED_KEYS) or 0
    dense = 0 if (anatomy.layer_kinds or {}).get("moe") else (layers - sparse) * 3 * width * (dense_width or 0)
    return dense + sparse * (experts + shared) * _matrices(text) * width * expert_width


def _matrices(text: Config) -> int:
    """Gate, up and down; without a gate where the activation is a squared ReLU (Nemotron)."""
    return 2 if text.get("mlp_hidden_act") == "relu2" else 3


def _sparse_layers(text: Config, layers: int) -> int:
    every = _first(text, ("decoder_sparse_step", "moe_layer_freq", "expert_layer_period")) or 1
    named = text.get("mlp_only_layers")
    dense = (len(named) if isinstance(named, list) else 0) + (_first(text, ("first_k_dense_replace",)) or 0)
    return max(0, (layers - dense) // every)


def _first(config: Config, names: Iterable[str]) -> int | None:
    return next((config[name] for name in names if is_a(config.get(name), WHOLE)), None)
