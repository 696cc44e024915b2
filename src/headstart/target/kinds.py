"""Which decoder layers attend and which do something else: the many ways in which configurations say it. No torch.

Sources: configuration and modelling files of Transformers 5.19 and vLLM 0.32 for the families named below.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

Config = Mapping[str, Any]
Kinds = dict[str, int]

_PATTERN = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}  # Nemotron-H: one block of one kind a letter
_NOT_KEYS_AND_VALUES = ("linear", "lightning", "mamba")  # parts of the names of kinds that keep another state
_NO_ATTENTION = {"mamba": "mamba", "mamba2": "mamba", "falcon_mamba": "mamba"}
_BOTH_IN_ONE = {"falcon_h1": "attention and mamba"}


def layer_kinds(text: Config, layers: int | None) -> tuple[Kinds | None, str]:
    """How many layers there are of each kind, and the key that says so; None where no key does."""
    for key, read in _READERS.items():
        kinds = read(text, text[key], layers) if text.get(key) is not None else None
        if kinds:
            return dict(Counter(kinds)), key
    for table in (_NO_ATTENTION, _BOTH_IN_ONE):
        if layers and (kind := table.get(str(text.get("model_type")))):
            return {kind: layers}, f"known for model_type {text.get('model_type')}"
    return None, "unknown: no layer_types or similar key"


def is_hybrid(kinds: Kinds | None) -> bool:
    """Whether some layers keep a state of another form than attention's keys and values."""
    return any(not attends(kind) and kind not in ("mlp", "moe") for kind in kinds or ())


def attends(kind: str) -> bool:
    """Whether layers of that kind are attention with keys and values, full or windowed, and nothing else."""
    return "attention" in kind and not any(part in kind for part in _NOT_KEYS_AND_VALUES)


def _listed(_: Config, value: Any, __: int | None) -> list[str] | None:
    return [str(kind) for kind in value] if isinstance(value, list) else None


def _repeated(_: Config, value: Any, layers: int | None) -> list[str] | None:
    if not isinstance(value, list) or not value or not layers:
        return None
    return [str(value[index % len(value)]) for index in range(layers)]


def _letters(_: Config, value: Any, __: int | None) -> list[str] | None:
    return [_PATTERN.get(letter, letter) for letter in value] if isinstance(value, str) else None


def _each_nth(_: Config, value: Any, layers: int | None) -> list[str] | None:
    """Qwen3-Next, Bailing 2.5: the last of every `value` layers attends in full."""
    if not isinstance(value, int) or value < 1 or not layers:
        return None
    return ["full_attention" if (index + 1) % value == 0 else "linear_attention" for index in range(layers)]


def _periodic(text: Config, value: Any, layers: int | None) -> list[str] | None:
    """Jamba: every `value`-th layer attends, from attn_layer_offset on."""
    offset = text.get("attn_layer_offset", 0)
    if not isinstance(value, int) or value < 1 or not layers:
        return None
    return ["attention" if index % value == offset else "mamba" for index in range(layers)]


def _indices(other: str) -> Callable[[Config, Any, int | None], list[str] | None]:
    """Layers that attend are listed (from 0), all others are `other`: Bamba, LFM2."""

    def read(_: Config, value: Any, layers: int | None) -> list[str] | None:
        if not isinstance(value, list) or not layers:
            return None
        return ["attention" if index in value else other for index in range(layers)]

    return read


def _numbers(zero: str, one: str) -> Callable[[Config, Any, int | None], list[str] | None]:
    """One number a layer: MiniMax-Text-01 and MiMo-V2."""

    def read(_: Config, value: Any, __: int | None) -> list[str] | None:
        return [one if number else zero for number in value] if isinstance(value, list) else None

    return read


def _kimi_linear(_: Config, value: Any, __: int | None) -> list[str] | None:
    if not isinstance(value, Mapping):
        return None
    full, linear = (len(value.get(key) or ()) for key in ("full_attn_layers", "kda_layers"))
    return ["full_attention"] * full + ["linear_attention"] * linear


_READERS: dict[str, Callable[[Config, Any, int | None], list[str] | None]] = {
    "layer_types": _listed,
    "layers_block_type": _listed,
    "hybrid_override_pattern": _letters,
    "full_attention_interval": _each_nth,
    "layer_group_size": _each_nth,
    "attn_layer_period": _periodic,
    "attn_layer_indices": _indices("mamba"),
    "full_attn_idxs": _indices("conv"),
    "attn_type_list": _numbers("linear_attention", "full_attention"),
    "hybrid_layer_pattern": _numbers("full_attention", "sliding_attention"),
    "linear_attn_config": _kimi_linear,
    "block_types": _repeated,
}
