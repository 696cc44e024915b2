"""vLLM's raw EAGLE-3 format, and what each version from 0.11 to 0.32 makes of such a folder.

Its class is `LlamaForCausalLMEagle3`, or `Eagle3DeepseekV2ForCausalLM` for a draft with MLA. Layer ids in it are our boundary
indices. The first layer is named as the official EAGLE-3 code names it, which vLLM and SGLang both read; a draft of several
layers uses vLLM's own numbering. Facts per version: read in vLLM's source (`llama_eagle3.py`, `deepseek_eagle3.py`,
`config/speculative.py`, the model runners).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from headstart import files
from headstart.drafts.eagle3 import Eagle3
from headstart.drafts.shape import DraftShape
from headstart.formats import common, fields, reading, tensors
from headstart.formats.common import LAYER_IDS, Config, ExportFacts
from headstart.formats.tensors import OFFSETS
from headstart.target.spellings import LATENT

ARCHITECTURE = "LlamaForCausalLMEagle3"
LATENT_ARCHITECTURE = "Eagle3DeepseekV2ForCausalLM"
Version = tuple[int, ...]

_OLDEST, _NEWEST = (0, 11), (0, 32)
VERSIONS = tuple(f"0.{minor}" for minor in range(_OLDEST[1], _NEWEST[1] + 1))

# Until 0.21 the target's model_type had to contain one of these; since when each is known.
_TARGETS: dict[str, Version] = {
    **dict.fromkeys(("llama", "qwen", "minicpm", "gpt_oss"), (0, 11)),
    **dict.fromkeys(("hunyuan_vl", "hunyuan_v1_dense", "afmoe"), (0, 16)),
    "nemotron_h": (0, 17),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "kimi_k2", "kimi_k25"), (0, 18)),
    **dict.fromkeys(("minimax_m2", "gemma4"), (0, 19, 1)),
    "laguna": (0, 21),
}
_FREE_TARGETS: Version = (0, 22)
_FLEXIBLE: Version = (0, 22)  # any number of states, fc_norm, norm_output
_NORM_BEFORE_FC: Version = (0, 18)
_LATENT: Version = (0, 18)
_NESTED_IDS: Version = (0, 22)  # ids inside eagle_config are read too (0.16 does not; between them not looked at)
_RUNNER_V2: Version = (0, 29)  # the default since; reads another key there
_NO_FULL_MAP: Version = (0, 30)

_OFFICIAL, _NUMBERED = "midlayer", "layers.0"  # the first layer's name

# What a version takes for a field that is not there (Transformers' Llama defaults, then vLLM's own).
_FALLBACKS = {
    "hidden_size": "4096",
    "intermediate_size": "11008",
    "num_hidden_layers": "32",
    "num_attention_heads": "32",
    "vocab_size": "32000",
    "rms_norm_eps": "1e-6",
    "max_position_embeddings": "2048",
    "num_key_value_heads": "num_attention_heads",
    "head_dim": "hidden_size / num_attention_heads",
    "draft_vocab_size": "vocab_size",
    "norm_before_residual": "false",
}
_LATENT_FALLBACKS = {
    **{name: value for name, value in _FALLBACKS.items() if name not in ("num_key_value_heads", "head_dim")},
    **dict.fromkeys(LATENT.values(), "DeepSeek-V2's"),
}


def write(folder: Path, draft: Eagle3, facts: ExportFacts) -> None:
    """Write `config.json` and `model.safetensors`. Raises UserError when nothing could load them."""
    common.check_writable(draft, facts)
    tensors.write(folder, tensors.outward(draft, _first_layer(draft.shape), embed=facts.embed_tokens))
    files.write_json(folder / common.CONFIG, config_of(draft, facts))


def read(folder: Path) -> tuple[DraftShape, dict[str, Tensor]]:
    """The shape, and the tensors under our names (see `tensors.inward`). Raises UserError when it is not whole."""
    shape = reading.shape_of(fields.read_config(folder), folder)
    official = any(name.startswith(f"{_OFFICIAL}.") for name in tensors.names_in(folder))
    return shape, tensors.inward(folder, shape, _OFFICIAL if official else _NUMBERED)


def config_of(draft: Eagle3, facts: ExportFacts) -> Config:
    """The content of config.json."""
    shape, sizes, dtype = draft.shape, draft.shape.latent, draft.fc.weight.dtype
    latent = common.latent_config(shape, sizes, facts, dtype) if sizes else None
    config = {
        "architectures": [LATENT_ARCHITECTURE if latent else ARCHITECTURE],
        **(latent or common.llama_config(shape, facts, dtype)),
        **common.draft_fields(shape),
        **state_fields(shape),
        "target_model_type": facts.target_type,
    }
    return {**config, "torch_dtype": config["dtype"]}


def state_fields(shape: DraftShape) -> Config:
    """Which states of the target, wherever a version looks: the id list alone does not set their number."""
    ids = list(shape.aux_layers)
    return {
        "eagle_config": {"use_aux_hidden_state": True, "layer_ids": ids, LAYER_IDS: ids},
        "num_aux_hidden_states": len(ids),
        "fc_norm": shape.fc_norm,
        "norm_output": shape.norm_output,
    }


def check(config: Config, version: str, names: Collection[str] = ()) -> list[str]:
    """Why a vLLM version would not load the draft, or load it as another one; empty when all is well.

    config: of the raw format, written by anyone. names: of the tensors, when they are known. Needs no vLLM.
    """
    parsed = _parse(version)
    if not _OLDEST <= parsed[:2] <= _NEWEST:
        return [f"vLLM {version} is not in the table, which has {VERSIONS[0]} to {VERSIONS[-1]}"]
    return [said for rule in _RULES for said in rule(config, parsed, names)]


def _first_layer(shape: DraftShape) -> str:
    return _OFFICIAL if shape.num_layers == 1 else _NUMBERED


def _parse(version: str) -> Version:
    match = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", version)
    return tuple(int(part) for part in match.groups() if part is not None) if match else ()


def _fields(config: Config, version: Version, names: Collection[str]) -> Iterator[str]:
    latent = config.get("architectures") == [LATENT_ARCHITECTURE]
    if not latent and config.get("architectures") != [ARCHITECTURE]:
        yield f"architectures is {config.get('architectures')!r}, not [{ARCHITECTURE!r}]"
    for name in common.nulls(config):
        yield f"{name} is null"
    for name, fallback in (_LATENT_FALLBACKS if latent else _FALLBACKS).items():
        if name not in config:
            yield f"{name} is missing: the engine takes {fallback}"
    if "rope_theta" not in config and "rope_theta" not in (config.get("rope_parameters") or {}):
        yield "rope_theta is missing: the engine takes 10000"


def _layer_ids(config: Config, version: Version, names: Collection[str]) -> Iterator[str]:
    eagle = config.get("eagle_config") or {}
    ids = config.get(LAYER_IDS) or eagle.get(LAYER_IDS) or eagle.get("layer_ids") or []
    inner = [LAYER_IDS, "layer_ids"] if version >= _RUNNER_V2 else [LAYER_IDS]
    nested = version >= _NESTED_IDS and all(eagle.get(name) for name in inner)
    if not config.get(LAYER_IDS) and not nested:
        place = "at the top level" if ids else ""
        yield f"{LAYER_IDS} is missing{' ' if place else ''}{place}: the engine takes 2, n//2, n-3"
    if list(ids) != sorted(set(ids)):
        yield f"{LAYER_IDS} = {ids}: states arrive in rising order, each once; fc would get them in other places"


def _number_of_states(config: Config, version: Version, names: Collection[str]) -> Iterator[str]:
    eagle = config.get("eagle_config") or {}
    ids = config.get(LAYER_IDS) or eagle.get(LAYER_IDS) or eagle.get("layer_ids")
    count = len(ids) if ids else config.get("num_aux_hidden_states") or 3
    if version < _FLEXIBLE:
        if count != 3:
            yield f"{count} aux hidden states: needs 0.22 or newer, older versions build fc for 3"
        return
    built = config.get("num_aux_hidden_states") or len(eagle.get(LAYER_IDS) or ()) or 3
    if built != count:
        yield f"fc is built for {built} aux hidden states, the ids are {count}: set num_aux_hidden_states"


def _norms(config: Config, version: Version, names: Collection[str]) -> Iterator[str]:
    if version < _FLEXIBLE and config.get("fc_norm"):
        yield "fc_norm: needs 0.22 or newer, older versions do not know its weights"
    if version < _FLEXIBLE and config.get("norm_output"):
        yield "norm_output: needs 0.22 or newer, older versions feed the output without the norm and say nothing"
    if version < _NORM_BEFORE_FC and config.get("norm_before_fc"):
        yield "norm_before_fc: needs 0.18 or newer"


def _attention(config: Config, version: Version, names: Collection[str]) -> Iterator[str]:
    if config.get("architectures") != [LATENT_ARCHITECTURE]:
        return
    if version < _LATENT:
        yield "a draft with MLA: needs 0.18 or newer"
    if config.get("model_type") != "deepseek_v2":
        yield f"model_type is {config.get('model_type')!r}, not 'deepseek_v2': taken for a next-token layer, or not for MLA"


def _window(config: Config, version: Version, names: Collection[str]) -> Iterator[str]:
    if fault := common.window_fault(config):
        yield fault
    elif config.get("architectures") == [LATENT_ARCHITECTURE] and config.get(common.LAYER_TYPES):
        yield f"{common.LAYER_TYPES} beside MLA: not looked at, so without a window"


def _widths(config: Config, version: Version, names: Collection[str]) -> Iterator[str]:
    hidden, target = config.get("hidden_size"), config.get("target_hidden_size")
    if hidden and target and hidden != target:
        yield f"hidden_size {hidden} is not target_hidden_size {target}: the embedding must be as wide as the draft"


def _vocabulary(config: Config, version: Version, names: Collection[str]) -> Iterator[str]:
    full = config.get("draft_vocab_size") in (None, config.get("vocab_size"))
    if full and OFFSETS in names and version >= _NO_FULL_MAP:
        yield f"{OFFSETS} with a full vocabulary: unknown to 0.30 and newer, leave it out"
    if not full and names and OFFSETS not in names:
        yield f"{OFFSETS} is missing: every draft id would be taken for the target id of the same number"


def _target(config: Config, version: Version, names: Collection[str]) -> Iterator[str]:
    kind: Any = config.get("target_model_type")
    listed = any(name in kind and version >= since for name, since in _TARGETS.items()) if kind else True
    if version < _FREE_TARGETS and not listed:
        yield f"targets of type {kind}: refused by this version, 0.22 and newer take every type"


_RULES = (_fields, _attention, _window, _layer_ids, _number_of_states, _norms, _widths, _vocabulary, _target)
