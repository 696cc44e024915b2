"""Which quantisation a checkpoint has, and where that is written: the places differ as much as the words. No torch.

Order as in vLLM 0.32 (config/model.py, model_executor/model_loader/weight_utils.py): the text part, the top, any other
part, and then a file beside config.json.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

Config = Mapping[str, Any]

KEYS = ("quantization_config", "compression_config")
_NAMES = ("quant_method", "quant_algo", "format", "fmt", "quant_type")
_BITS = ("bits", "w_bit", "wbits", "num_bits")
_SKIPPED = ("ignore", "modules_to_not_convert", "exclude_modules", "ignored_layers")
# Bits of one weight where only the method's name says it.
_BITS_OF = {
    "mxfp4": 4,
    "nvfp4": 4,
    "w4a16": 4,
    "w4a8": 4,
    "int4": 4,
    "fp4": 4,
    "fp8": 8,
    "mxfp8": 8,
    "w8a8": 8,
    "int8": 8,
}


def locate(top: Config, text: Config, prefix: str, beside: Config, file: str) -> tuple[Config, str]:
    """The quantisation's own configuration and where it sits; ({}, "none") when there is none.

    prefix: path of the text part with a dot, "" at the top. beside: what the quantisation file `file` says.
    """
    for place, config in (*_parts(text, prefix), *_parts(top, ""), (file, beside)):
        if config:
            return config, place
    return {}, "none"


def method(config: Config) -> str | None:
    """Its kind in its own words; None for an empty configuration."""
    words = [config[key] for key in _NAMES if config.get(key)]
    return " ".join(dict.fromkeys(map(str, words))) or ("unknown" if config else None)


def bits(config: Config) -> int | None:
    """Bits of one weight, as said by a number or by the method's name; None when neither says it."""
    for part in (config, *_weights(config)):
        for key in _BITS:
            if isinstance(part.get(key), int):
                return part[key]
    words = [str(config[key]).lower() for key in _NAMES if config.get(key)]
    return next((number for word in words for name, number in _BITS_OF.items() if word.startswith(name)), None)


def skips(config: Config, part: str) -> bool:
    """Whether modules whose names hold `part` are left as they were."""
    names = (name for key in _SKIPPED if isinstance(config.get(key), list) for name in config[key])
    return any(part in str(name) for name in names)


def _parts(config: Config, prefix: str, depth: int = 4) -> Iterator[tuple[str, Config]]:
    for key in KEYS:
        if isinstance(config.get(key), Mapping):
            yield f"{prefix}{key}", config[key]
    for key, value in config.items():
        if isinstance(value, Mapping) and key not in KEYS and depth:
            yield from _parts(value, f"{prefix}{key}.", depth - 1)


def _weights(config: Config) -> Iterator[Config]:
    """What compressed-tensors and ModelOpt say of the weights, by group of layers."""
    groups = config.get("config_groups")
    for group in groups.values() if isinstance(groups, Mapping) else ():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if isinstance(weights, Mapping):
            yield weights
