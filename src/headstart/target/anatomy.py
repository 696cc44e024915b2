"""What is inside a target, read from its config.json and the small files beside it: no weights, no remote code, no torch.

Every fact carries its evidence: the key it was read from, or the rule it follows from. A fact that the file does not
hold and no rule gives is None, and its evidence says `unknown`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headstart.errors import UserError
from headstart.target import families, quantization
from headstart.target.beside import ALONE, CONFIG, GENERATION, Beside, read_object
from headstart.target.kinds import is_hybrid, layer_kinds
from headstart.target.spellings import (
    LATENT,
    NUMBER,
    SPELLINGS,
    WHOLE,
    Config,
    View,
    find_text,
    first_name,
    is_a,
    rope,
    tower_keys,
    type_of,
    wrongly,
)
from headstart.target.tokenizer_files import TokenizerFiles


@dataclass(frozen=True, kw_only=True)
class Anatomy:
    """The text model that drafts are trained for, and what is wrapped around it.

    wrapper: vision, audio or another model is around it. text_path: where its own configuration sits ("" at the top).
    text_architecture: the class that part names, where it names one. layers_path: where vLLM's class keeps the decoder
    layers. vocab_size: rows of the embedding; tokenizer_size: ids that the tokenizer knows. head_dim: width of one query
    head (with MLA: both parts). latent_sizes: of MLA, as `drafts.layers.LatentShape` names them. sliding_window: of all
    layers alike. rms_norm_eps: epsilon of
    the norms, also of mean-centred ones. logit_scale multiplies the logits; softcap c bends them by c*tanh(x/c).
    layer_kinds: number of layers by kind; hybrid: some keep another state than attention's keys and values.
    quantization_bits: of one weight. weights_bytes: of all files together. eos_ids: from every place that names some.
    remote_code: the folder ships classes of its own. evidence: by field.
    """

    architecture: str | None
    model_type: str | None
    remote_code: bool = False
    wrapper: bool
    text_path: str
    text_architecture: str | None = None
    layers_path: str
    num_layers: int | None
    hidden_size: int | None
    vocab_size: int | None
    tokenizer_size: int | None = None
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
    latent_sizes: dict[str, int] | None = None
    sliding_window: int | None = None
    moe: bool
    hybrid: bool = False
    layer_kinds: dict[str, int] | None = None
    quantization: str | None
    quantization_bits: int | None = None
    weights_bytes: int | None = None
    eos_ids: tuple[int, ...]
    dtype: str | None
    evidence: dict[str, str] = field(default_factory=dict)

    def required(self, name: str) -> Any:
        """A fact that the work at hand cannot do without. Raises UserError when it is unknown."""
        value = getattr(self, name)
        if value is None:
            raise UserError(
                f"the target's {name} is {self.evidence.get(name, 'unknown')}",
                looked_for=f"in its config.json: {', '.join(SPELLINGS.get(name, (name,)))}",
                do="headstart inspect shows what was found",
            )
        return value


def inspect(path: Path) -> Anatomy:
    """Read a model's folder, its config.json with the files beside it, or a lone JSON file of any other name.

    Raises:
        UserError: there is no config.json, a file is not a JSON object, or no language model is described in it.
    """
    file = path / CONFIG if path.is_dir() else path
    return anatomy_of(read_object(file), Beside.of(file), str(file))


def anatomy_of(top: Config, beside: Beside = ALONE, name: str = CONFIG) -> Anatomy:
    """The anatomy of a parsed config.json and what lies beside it. Raises UserError as `inspect` does."""
    text_path, text = find_text(top, name)
    view = View(top, text, text_path)
    found = {fact: view.look(SPELLINGS[fact], kinds) for fact, kinds in _SIZES.items()}
    found |= {fact: read(view) for fact, read in _FACTS.items()}
    found |= _kinds(view, found["num_layers"][0]) | _around(view, beside)
    found["num_kv_heads"] = _num_kv_heads(view, found["num_heads"][0])
    found["head_dim"] = _head_dim(view, found["num_heads"][0], found["hidden_size"][0])
    found["text_path"] = text_path, "describes a language model" if text_path else "the top level"
    return Anatomy(
        **{fact: value for fact, (value, _) in found.items()},
        evidence={fact: evidence or "unknown" for fact, (_, evidence) in found.items()},
    )


def _around(view: View, beside: Beside) -> dict[str, tuple[Any, str]]:
    """The facts that files beside config.json decide or add to."""
    tokenizer = TokenizerFiles(beside.folder) if beside.folder else None
    config, where = quantization.locate(view.top, view.text, view.prefix, *beside.quantization)
    bits = quantization.bits(config)
    return {
        "quantization": (quantization.method(config), where),
        "quantization_bits": (bits, where if bits or not config else f"unknown: {where} does not say"),
        "weights_bytes": beside.weights_bytes,
        "tokenizer_size": tokenizer.size if tokenizer else (None, "unknown: no folder"),
        "eos_ids": _eos_ids(view, beside.generation, tokenizer.end if tokenizer else (None, "")),
    }


def _kinds(view: View, layers: int | None) -> dict[str, tuple[Any, str]]:
    kinds, evidence = layer_kinds({**view.defaults, **view.text}, layers)
    where = evidence if kinds is None or evidence.startswith("known") else f"{view.prefix}{evidence}"
    hybrid = is_hybrid(kinds)
    return {
        "layer_kinds": (kinds, where),
        "hybrid": (hybrid, where if kinds else "no key of linear-attention or state-space layers"),
    }


def _architecture(view: View) -> tuple[str | None, str]:
    name = first_name(view.top)
    return name, "architectures" if name else "unknown: no architectures"


def _text_architecture(view: View) -> tuple[str | None, str]:
    if not view.prefix:
        return None, "the top level describes the text model itself"
    name = first_name(view.text)
    return name, f"{view.prefix}architectures" if name else f"unknown: no {view.prefix}architectures"


def _remote_code(view: View) -> tuple[bool, str]:
    found = bool(view.top.get("auto_map"))
    return found, "auto_map" if found else "no auto_map"


def _wrapper(view: View) -> tuple[bool, str]:
    around = tower_keys(view.top) + ([f"the text model is in {view.prefix[:-1]}"] if view.prefix else [])
    return bool(around), ", ".join(around) or "no other model in the configuration"


def _layers_path(view: View) -> tuple[str, str]:
    return families.layers_path(type_of(view.top), _wrapper(view)[0])


def _norm(view: View) -> tuple[families.Norm, str]:
    kind = families.final_norm(view.model_type)
    return kind, "unknown until loaded" if kind == "unknown" else f"known for model_type {view.model_type}"


def _softcap(view: View) -> tuple[float | None, str]:
    value, evidence = view.look(("final_logit_softcapping",), NUMBER)
    return value, evidence if value is not None else "none"


def _logit_scale(view: View) -> tuple[float | None, str]:
    value, key = families.logit_scale({**view.defaults, **view.text})
    if value is None:
        return None, "none"
    return value, f"{view.prefix}{key}" if key in view.text else f"default of model_type {view.model_type}"


def _mla(view: View) -> tuple[bool, str]:
    value, name = view.text.get(LATENT["kv_rank"]), f"{view.prefix}{LATENT['kv_rank']}"
    if is_a(value, WHOLE):
        return True, name
    return False, f"no {name}" if value is None else wrongly(name, value, WHOLE)


def _latent_sizes(view: View) -> tuple[dict[str, int] | None, str]:
    if not _mla(view)[0]:
        return None, "no MLA"
    found = {name: view.look((key,), WHOLE) for name, key in LATENT.items()}
    if missing := [evidence for value, evidence in found.values() if value is None]:
        return None, missing[0]
    return {name: value for name, (value, _) in found.items()}, f"{view.prefix}kv_lora_rank and the keys beside it"


def _sliding_window(view: View) -> tuple[int | None, str]:
    """The window that all layers have. A lone `sliding_window` means that in some families, in others of some layers, or off."""
    value, evidence = view.look(("sliding_window",), WHOLE)
    kinds = view.text.get("layer_types")
    alike = set(map(str, kinds)) == {"sliding_attention"} if isinstance(kinds, list) else view.model_type in _WINDOWED
    return (value, evidence) if value is not None and alike else (None, "none that all layers have")


def _moe(view: View) -> tuple[bool, str]:
    value, evidence = view.look(SPELLINGS["experts"], WHOLE)
    many = value is not None and value > 1
    return many, f"{evidence} = {value}" if many else "no number of experts above 1"


def _eos_ids(view: View, generation: Config, tokenizer: tuple[int | None, str]) -> tuple[tuple[int, ...], str]:
    places = {
        f"{view.prefix}eos_token_id": view.text.get("eos_token_id"),
        "eos_token_id": view.top.get("eos_token_id"),
        GENERATION: generation.get("eos_token_id"),
        tokenizer[1]: tokenizer[0],
    }
    found = {place: ids for place, value in places.items() if (ids := _ids(value))}
    return tuple(sorted({item for ids in found.values() for item in ids})), ", ".join(found)


def _ids(value: Any) -> list[int]:
    listed = value if isinstance(value, list) else [value]
    return [item for item in listed if isinstance(item, int) and not isinstance(item, bool)]


def _num_kv_heads(view: View, heads: int | None) -> tuple[int | None, str]:
    value, evidence = view.look(SPELLINGS["num_kv_heads"], WHOLE)
    if value is None and view.text.get("multi_query"):
        return 1, f"{view.prefix}multi_query"
    return (value, evidence) if value is not None else (heads, "absent: one for each head")


def _head_dim(view: View, heads: int | None, width: int | None) -> tuple[int | None, str]:
    parts: list[Any] = [view.text.get(key) for key in ("qk_nope_head_dim", "qk_rope_head_dim")]
    if _mla(view)[0] and all(is_a(part, WHOLE) for part in parts):
        return sum(parts), f"{view.prefix}qk_nope_head_dim + qk_rope_head_dim"
    value, evidence = view.look(SPELLINGS["head_dim"], WHOLE)
    if value is None and heads and width and width % heads == 0:
        return width // heads, "hidden_size / heads"
    return value, evidence


_WINDOWED = ("mistral", "mixtral", "phi3", "phimoe", "starcoder2")
_SIZES = {
    **dict.fromkeys(
        ("num_layers", "hidden_size", "vocab_size", "num_heads", "intermediate_size", "max_positions"), WHOLE
    ),
    "rms_norm_eps": NUMBER,
}
_FACTS: dict[str, Callable[[View], tuple[Any, str]]] = {
    "architecture": _architecture,
    "model_type": lambda view: (type_of(view.top), "model_type" if type_of(view.top) else ""),
    "remote_code": _remote_code,
    "wrapper": _wrapper,
    "text_architecture": _text_architecture,
    "layers_path": _layers_path,
    "norm": _norm,
    "tied_head": lambda view: view.look(("tie_word_embeddings",), (bool,), also_top=True),
    "softcap": _softcap,
    "logit_scale": _logit_scale,
    "rope_theta": lambda view: rope(view)[0],
    "rope_scaling": lambda view: rope(view)[1],
    "mla": _mla,
    "latent_sizes": _latent_sizes,
    "sliding_window": _sliding_window,
    "moe": _moe,
    "dtype": lambda view: view.look(("dtype", "torch_dtype"), (str,), also_top=True),
}
