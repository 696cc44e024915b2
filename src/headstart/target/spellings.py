"""The many names that configurations have for one fact, and finding the text model's own part of one. No torch."""

from __future__ import annotations

import reprlib
from collections.abc import Iterator, Mapping
from typing import Any

from headstart.errors import UserError
from headstart.target.defaults import DEFAULTS

Config = Mapping[str, Any]
WHOLE, NUMBER = (int,), (int, float)

SPELLINGS: dict[str, tuple[str, ...]] = {
    "num_layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "hidden_size": ("hidden_size", "n_embd", "d_model", "dim"),
    "vocab_size": ("vocab_size", "padded_vocab_size"),
    "num_heads": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    "num_kv_heads": ("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num"),
    "head_dim": ("head_dim", "kv_channels", "attention_head_dim"),
    "intermediate_size": ("intermediate_size", "ffn_hidden_size", "n_inner", "ffn_dim", "d_ff"),
    "rms_norm_eps": (
        *("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "layernorm_epsilon"),
        *("norm_eps", "norm_epsilon"),
    ),
    "max_positions": ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "seq_length"),
    "experts": ("n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts"),
    "rope_theta": ("rope_theta", "rotary_emb_base", "rope_base", "rotary_base"),
}

LATENT = {  # MLA, by the names of `drafts.layers.LatentShape`
    "q_rank": "q_lora_rank",
    "kv_rank": "kv_lora_rank",
    "nope": "qk_nope_head_dim",
    "rope": "qk_rope_head_dim",
    "value": "v_head_dim",
}

_TEXT_NAMES = ("text", "llm", "language", "thinker", "decoder")
_TOWER_NAMES = ("vision", "visual", "image", "audio", "speech", "talker", "code2wav", "vit", "token2wav")
_NEEDED = ("num_layers", "hidden_size", "vocab_size")


class View:
    """The text model's part of a configuration: values by any spelling, each with where it came from."""

    def __init__(self, top: Config, text: Config, text_path: str) -> None:
        self.top, self.text = top, text
        self.prefix = f"{text_path}." if text_path else ""
        self.model_type = type_of(text)
        self.defaults = DEFAULTS.get(self.model_type or "", {})

    def look(self, names: tuple[str, ...], kinds: tuple[type, ...], *, also_top: bool = False) -> tuple[Any, str]:
        """The first value of such a kind, and its key; then the default of the family, unless the text model says null."""
        places = [(self.prefix, self.text), *([("", self.top)] if also_top and self.prefix else [])]
        there = [(f"{prefix}{name}", config[name]) for prefix, config in places for name in names if name in config]
        for place, value in there:
            if is_a(value, kinds):
                return value, place
        for name in names:
            if name not in self.text and self.defaults.get(name) is not None:
                return self.defaults[name], f"default of model_type {self.model_type}"
        wrong = next((wrongly(place, value, kinds) for place, value in there if value is not None), None)
        return None, f"unknown: {wrong or 'no ' + ', '.join(names)}"


def is_a(value: Any, kinds: tuple[type, ...]) -> bool:
    """Whether a value can be what it is read as: of one of the kinds, and above 0 where it is a number."""
    if isinstance(value, bool):
        return bool in kinds
    return isinstance(value, kinds) and (value > 0 if isinstance(value, NUMBER) else True)


def wrongly(place: str, value: Any, kinds: tuple[type, ...]) -> str:
    """Says that a value cannot be what it is read as."""
    wanted = {WHOLE: "a whole number above 0", NUMBER: "a number above 0", (bool,): "true or false", (str,): "a name"}
    return f"{place} = {reprlib.repr(value)}, which is not {wanted[kinds]}"


def type_of(config: Config) -> str | None:
    """The model_type of a configuration."""
    found = config.get("model_type")
    return found if isinstance(found, str) and found else None


def first_name(config: Config) -> str | None:
    """The first of its `architectures`."""
    names = config.get("architectures")
    return names[0] if isinstance(names, list) and names and isinstance(names[0], str) else None


def find_text(top: Config, name: str) -> tuple[str, Config]:
    """Path and content of the (sub-)configuration that describes a language model; the path is "" at the top.

    A sub-configuration with such a name or content wins over the top; among several, the most complete one.

    Raises:
        UserError: none describes one.
    """
    found = [(path, config) for path, config in _parts(top) if _describes_text(path, config)]
    if found:
        return max(found, key=lambda item: (_completeness(item[1]), -item[0].count(".")))
    if _completeness(top) >= 2:
        return "", top
    needed = "; ".join("/".join(SPELLINGS[fact]) for fact in _NEEDED)
    raise UserError(
        f"{name} describes no language model",
        looked_for=f"{needed}, at the top or in a part such as text_config or llm_config",
    )


def tower_keys(top: Config) -> list[str]:
    """Parts that describe what a wrapper adds: vision, audio, speech."""
    return [key for key, value in top.items() if isinstance(value, Mapping) and value and _is_tower(key)]


def rope(view: View) -> tuple[tuple[float | None, str], tuple[dict[str, Any] | None, str]]:
    """(theta, evidence), (scaling, evidence) from the old keys or from `rope_parameters`, also when by layer type.

    Of several layer types full attention counts, which is what a draft does. Scaling of type `default` is None.
    """
    parameters, origin = _rope_parameters(view)
    theta, evidence = parameters.get("rope_theta"), f"{origin}.rope_theta"
    if not is_a(theta, NUMBER):
        theta, evidence = view.look(SPELLINGS["rope_theta"], NUMBER)
    old = view.text.get("rope_scaling")
    if not parameters and isinstance(old, Mapping):
        parameters, origin = old, f"{view.prefix}rope_scaling"
    scaling = {key: value for key, value in parameters.items() if key not in ("rope_theta", "partial_rotary_factor")}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default" and not scaling.keys() - {"rope_type", "type"}:
        return (theta, evidence), (None, "none")
    return (theta, evidence), (scaling, origin)


def _rope_parameters(view: View) -> tuple[Config, str]:
    found, origin = view.text.get("rope_parameters"), f"{view.prefix}rope_parameters"
    if not isinstance(found, Mapping):
        return {}, origin
    by_type = {key: value for key, value in found.items() if isinstance(value, Mapping) and "rope_type" in value}
    if not by_type:
        return found, origin
    chosen = "full_attention" if "full_attention" in by_type else next(iter(by_type))
    return by_type[chosen], f"{origin}.{chosen}"


def _parts(config: Config, path: str = "", depth: int = 4) -> Iterator[tuple[str, Config]]:
    """All nested objects by dotted path, outside towers."""
    for key, value in config.items():
        if isinstance(value, Mapping) and depth and not _is_tower(key):
            yield f"{path}{key}", value
            yield from _parts(value, f"{path}{key}.", depth - 1)


def _describes_text(path: str, config: Config) -> bool:
    if _completeness(config) == len(_NEEDED):
        return True
    named = path.rpartition(".")[2].startswith(_TEXT_NAMES)
    return named and (_completeness(config) >= 2 or type_of(config) in DEFAULTS)


def _completeness(config: Config) -> int:
    return sum(any(config.get(name) is not None for name in SPELLINGS[fact]) for fact in _NEEDED)


def _is_tower(key: str) -> bool:
    return key.lower().startswith(_TOWER_NAMES)
