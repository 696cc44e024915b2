"""What is inside a target, read from its config.json alone: no weights, no remote code, no torch.

Every fact carries its evidence: the key it was read from, or the rule it follows from. A fact that the file does not
hold and no rule gives is None, and its evidence says `unknown`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headstart.errors import UserError
from headstart.target import families
from headstart.target.spellings import SPELLINGS, Config, View, find_text, rope, tower_keys

CONFIG, GENERATION = "config.json", "generation_config.json"


@dataclass(frozen=True)
class Anatomy:
    """The text model that drafts are trained for, and what is wrapped around it.

    wrapper: vision, audio or another model is around it. text_path: where its own configuration sits ("" at the top).
    layers_path: where vLLM's class keeps the decoder layers. head_dim: width of one query head (with MLA: both parts).
    rms_norm_eps: epsilon of the norms, also of mean-centred ones. logit_scale multiplies the logits; softcap c bends
    them by c*tanh(x/c). eos_ids: from every place that names some. evidence: by field.
    """

    architecture: str | None
    model_type: str | None
    wrapper: bool
    text_path: str
    layers_path: str
    num_layers: int | None
    hidden_size: int | None
    vocab_size: int | None
    num_heads: int | None
    num_kv_heads: int | None
    head_dim: int | None
    intermediate_size: int | None
    rms_norm_eps: float | None
    norm: families.Norm
    tied_head: bool | None
    softcap: float | None
    logit_scale: float | None
    rope_theta: float | None
    rope_scaling: dict[str, Any] | None
    max_positions: int | None
    mla: bool
    moe: bool
    quantization: str | None
    eos_ids: tuple[int, ...]
    dtype: str | None
    evidence: dict[str, str] = field(default_factory=dict)

    def required(self, name: str) -> Any:
        """A fact that the work at hand cannot do without. Raises UserError when it is unknown."""
        value = getattr(self, name)
        if value is None:
            raise UserError(
                f"the target's {name} is unknown",
                looked_for=f"in its config.json: {', '.join(SPELLINGS.get(name, (name,)))}",
                do="headstart inspect shows what was found",
            )
        return value


def inspect(path: Path) -> Anatomy:
    """Read a model's folder or its config.json (and the generation_config.json beside it).

    Raises:
        UserError: there is no config.json, it is not a JSON object, or no language model is described in it.
    """
    file = path / CONFIG if path.is_dir() else path
    generation = file.with_name(GENERATION)
    return anatomy_of(_read(file), _read(generation) if generation.exists() else {}, str(file))


def anatomy_of(top: Config, generation: Config | None = None, name: str = CONFIG) -> Anatomy:
    """The anatomy of a parsed config.json and generation_config.json. Raises UserError as `inspect` does."""
    text_path, text = find_text(top, name)
    view = View(top, text, text_path)
    found = {fact: view.look(SPELLINGS[fact]) for fact in _SIZES}
    found |= {fact: read(view) for fact, read in _FACTS.items()}
    found["eos_ids"] = _eos_ids(view, generation or {})
    found["num_kv_heads"] = _num_kv_heads(view, found["num_heads"][0])
    found["head_dim"] = _head_dim(view, found["num_heads"][0], found["hidden_size"][0])
    found["text_path"] = text_path, "describes a language model" if text_path else "the top level"
    return Anatomy(
        **{fact: value for fact, (value, _) in found.items()},
        evidence={fact: evidence or "unknown" for fact, (_, evidence) in found.items()},
    )


def _architecture(view: View) -> tuple[str | None, str]:
    names = view.top.get("architectures")
    return (names[0], "architectures") if names else (None, "unknown: no architectures")


def _wrapper(view: View) -> tuple[bool, str]:
    around = tower_keys(view.top) + ([f"the text model is in {view.prefix[:-1]}"] if view.prefix else [])
    return bool(around), ", ".join(around) or "no other model in the configuration"


def _layers_path(view: View) -> tuple[str, str]:
    return families.layers_path(view.top.get("model_type"), _wrapper(view)[0])


def _norm(view: View) -> tuple[families.Norm, str]:
    kind = families.final_norm(view.text.get("model_type"))
    return kind, "unknown until loaded" if kind == "unknown" else f"known for model_type {view.text.get('model_type')}"


def _softcap(view: View) -> tuple[float | None, str]:
    value, evidence = view.look(("final_logit_softcapping",))
    return value, evidence if value is not None else "none"


def _logit_scale(view: View) -> tuple[float | None, str]:
    value, key = families.logit_scale({**view.defaults, **view.text})
    if value is None:
        return None, "none"
    return value, f"{view.prefix}{key}" if key in view.text else f"default of model_type {view.text.get('model_type')}"


def _mla(view: View) -> tuple[bool, str]:
    found = bool(view.text.get("kv_lora_rank"))
    return found, f"{view.prefix}kv_lora_rank" if found else "no kv_lora_rank"


def _moe(view: View) -> tuple[bool, str]:
    value, evidence = view.look(SPELLINGS["experts"])
    many = isinstance(value, int) and value > 1
    return many, f"{evidence} = {value}" if many else "no number of experts above 1"


def _quantization(view: View) -> tuple[str | None, str]:
    config, evidence = view.look(("quantization_config", "compression_config"), also_top=True)
    if not isinstance(config, Mapping):
        return None, "none"
    parts = [config.get(key) for key in ("quant_method", "quant_algo", "format", "fmt")]
    parts += [f"{config[key]} bits" for key in ("bits", "w_bit") if config.get(key)]
    return " ".join(dict.fromkeys(str(part) for part in parts if part)) or "unknown", evidence


def _eos_ids(view: View, generation: Config) -> tuple[tuple[int, ...], str]:
    places = {f"{view.prefix}eos_token_id": view.text, "eos_token_id": view.top, GENERATION: generation}
    found = {place: _ids(config.get("eos_token_id")) for place, config in places.items()}
    named = [place for place, ids in found.items() if ids]
    return tuple(sorted({item for ids in found.values() for item in ids})), ", ".join(named)


def _ids(value: Any) -> list[int]:
    listed = value if isinstance(value, list) else [value]
    return [item for item in listed if isinstance(item, int)]


def _num_kv_heads(view: View, heads: int | None) -> tuple[int | None, str]:
    value, evidence = view.look(SPELLINGS["num_kv_heads"])
    if value is None and view.text.get("multi_query"):
        return 1, f"{view.prefix}multi_query"
    return (value, evidence) if value is not None else (heads, "absent: one for each head")


def _head_dim(view: View, heads: int | None, width: int | None) -> tuple[int | None, str]:
    parts = [part for key in ("qk_nope_head_dim", "qk_rope_head_dim") if isinstance(part := view.text.get(key), int)]
    if _mla(view)[0] and len(parts) == 2:
        return sum(parts), f"{view.prefix}qk_nope_head_dim + qk_rope_head_dim"
    value, evidence = view.look(SPELLINGS["head_dim"])
    if value is None and heads and width and width % heads == 0:
        return width // heads, "hidden_size / heads"
    return value, evidence


_SIZES = ("num_layers", "hidden_size", "vocab_size", "num_heads", "intermediate_size", "rms_norm_eps", "max_positions")
_FACTS: dict[str, Callable[[View], tuple[Any, str]]] = {
    "architecture": _architecture,
    "model_type": lambda view: (view.top.get("model_type"), "model_type" if view.top.get("model_type") else ""),
    "wrapper": _wrapper,
    "layers_path": _layers_path,
    "norm": _norm,
    "tied_head": lambda view: view.look(("tie_word_embeddings",), also_top=True),
    "softcap": _softcap,
    "logit_scale": _logit_scale,
    "rope_theta": lambda view: rope(view)[0],
    "rope_scaling": lambda view: rope(view)[1],
    "mla": _mla,
    "moe": _moe,
    "quantization": _quantization,
    "dtype": lambda view: view.look(("dtype", "torch_dtype"), also_top=True),
}


def _read(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror}", looked_for="the config.json of a model") from None
    except ValueError as error:
        raise UserError(f"{file} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise UserError(f"{file} holds a {type(value).__name__}", looked_for="a JSON object")
    return value
