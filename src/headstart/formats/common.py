"""What the `config.json` of the foreign formats has in common: a Llama-like decoder, and what EAGLE-3 adds to it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from headstart import files
from headstart.drafts.eagle3 import Eagle3
from headstart.drafts.shape import DraftShape, LatentShape
from headstart.errors import UserError
from headstart.target.spellings import LATENT

CONFIG = "config.json"
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
LAYER_TYPES, SLIDING = "layer_types", "sliding_attention"
KV_RANK = LATENT["kv_rank"]  # tells a draft with MLA
_LATENT_TYPES = ("deepseek_v2", "deepseek_v3", "kimi_k2")

Config = dict[str, Any]


@dataclass(frozen=True)
class ExportFacts:
    """What an export says beside the draft's own shape.

    target: the hub id or folder by which an engine finds the target. architectures, target_type, bos_id, eos_ids: as
    the target's config.json has them (type and ids of the text model). draft_tokens: drafted before each verify step.
    embed_tokens: whether the target's embedding is written too.
    """

    target: str
    architectures: tuple[str, ...]
    target_type: str
    bos_id: int | None
    eos_ids: tuple[int, ...]
    draft_tokens: int
    embed_tokens: bool


def check_writable(draft: Eagle3, facts: ExportFacts) -> None:
    """Raises UserError for a draft that no engine could load from these formats."""
    shape = draft.shape
    if shape.hidden_size != shape.target_hidden_size:
        raise UserError(
            f"a draft {shape.hidden_size} wide for a target {shape.target_hidden_size} wide cannot be served",
            looked_for="equal widths: engines give the draft the target's embedding",
        )
    if facts.embed_tokens and len(draft.embed_tokens) != shape.target_vocab_size:
        raise UserError(
            f"the target's embedding has {len(draft.embed_tokens)} rows, its head {shape.target_vocab_size}",
            looked_for="one row for each id that the head knows",
            do="set export.embed_tokens=false, so that the engine takes the embedding from the target",
        )


def llama_config(shape: DraftShape, facts: ExportFacts, dtype: torch.dtype) -> Config:
    """The decoder's fields as Transformers 4 and 5 read them; nothing is left to a default, nothing is null."""
    ends: int | list[int] | None = list(facts.eos_ids) or None
    if ends is not None and len(facts.eos_ids) == 1:
        ends = facts.eos_ids[0]
    tokens = {"bos_token_id": facts.bos_id, "eos_token_id": ends}
    return {
        "model_type": "llama",
        "hidden_size": shape.hidden_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.intermediate_size,
        "hidden_act": "silu",
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_theta": shape.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "max_position_embeddings": shape.max_positions,
        "vocab_size": shape.target_vocab_size,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "initializer_range": 0.02,
        "use_cache": True,
        "tie_word_embeddings": False,
        "dtype": str(dtype).removeprefix("torch."),
        **_window_config(shape),
        **{name: value for name, value in tokens.items() if value is not None},
    }


def _window_config(shape: DraftShape) -> Config:
    """vLLM reads the width only where `layer_types` says so (its llama.py, 0.11 to 0.32), and so does speculators 0.9."""
    if shape.sliding_window is None:
        return {}
    return {
        "sliding_window": shape.sliding_window,
        "use_sliding_window": True,
        LAYER_TYPES: [SLIDING] * shape.num_layers,
    }


def latent_config(shape: DraftShape, sizes: LatentShape, facts: ExportFacts, dtype: torch.dtype) -> Config:
    """The fields of a decoder with MLA, as DeepSeek-V2 has them.

    Not as DeepSeek-V3: vLLM takes a draft of that type for the model's own next-token layer.
    """
    plain = llama_config(shape, facts, dtype)
    del plain["head_dim"], plain["mlp_bias"]
    ranks = {foreign: getattr(sizes, name) for name, foreign in LATENT.items()}
    rope = _plain_yarn(shape)
    return {
        **plain,
        "model_type": "deepseek_v2",
        **ranks,
        "rope_parameters": rope,
        "rope_scaling": rope,
    }


def _plain_yarn(shape: DraftShape) -> Config:
    """Plain rotary positions, told as yarn that stretches nothing: older vLLMs lose the rope_theta of any other kind, or fail."""
    return {
        "rope_type": "yarn",
        "rope_theta": shape.rope_theta,
        "factor": 1.0,
        "original_max_position_embeddings": shape.max_positions,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    }


def draft_fields(shape: DraftShape) -> Config:
    """What both formats say of the draft beyond the decoder, under the same names."""
    return {
        "draft_vocab_size": shape.draft_vocab_size,
        "target_hidden_size": shape.target_hidden_size,
        LAYER_IDS: list(shape.aux_layers),
        "norm_before_residual": shape.norm_before_residual,
        "norm_before_fc": False,
        "fc_norm": shape.fc_norm,
        "norm_output": shape.norm_output,
    }


def shape_of(config: Mapping[str, Any], where: Path) -> DraftShape:
    """The shape that a flat config describes; what may be absent gets the value that the engine gives it.

    Raises:
        UserError: a field that has no safe default is missing, or the draft does what ours do not.
    """
    _refuse_unknown(config, where)
    hidden, heads = _number(config, "hidden_size", where), _number(config, "num_attention_heads", where)
    latent = _latent(config, where)
    vocabulary = _number(config, "vocab_size", where)
    theta = (config.get("rope_parameters") or {}).get("rope_theta") or config.get("rope_theta") or 10000.0
    return DraftShape(
        hidden_size=hidden,
        target_hidden_size=config.get("target_hidden_size") or hidden,
        aux_layers=tuple(_layer_ids(config, where)),
        num_layers=_number(config, "num_hidden_layers", where),
        num_heads=heads,
        num_kv_heads=heads if latent else config.get("num_key_value_heads") or heads,
        head_dim=latent.nope + latent.rope if latent else config.get("head_dim") or hidden // heads,
        intermediate_size=_number(config, "intermediate_size", where),
        target_vocab_size=vocabulary,
        draft_vocab_size=config.get("draft_vocab_size") or vocabulary,
        rms_norm_eps=float(_number(config, "rms_norm_eps", where)),
        rope_theta=float(theta),
        max_positions=_number(config, "max_position_embeddings", where),
        norm_before_residual=bool(config.get("norm_before_residual")),
        fc_norm=bool(config.get("fc_norm")),
        norm_output=bool(config.get("norm_output")),
        latent=latent,
        sliding_window=_window(config, where),
    )


def read_config(folder: Path) -> Config:
    try:
        config = files.read_json(folder / CONFIG)
    except (OSError, json.JSONDecodeError) as error:
        raise UserError(f"{folder / CONFIG} cannot be read: {error}") from None
    if not isinstance(config, dict):
        raise UserError(f"{folder / CONFIG} does not hold an object")
    return config


def nulls(config: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Dotted names of fields that are null, at any depth."""
    for key, value in config.items():
        if value is None:
            yield f"{prefix}{key}"
        for inner in value if isinstance(value, list) else [value]:
            if isinstance(inner, Mapping):
                yield from nulls(inner, f"{prefix}{key}.")


def window_fault(config: Mapping[str, Any]) -> str | None:
    """What is wrong with the types of layers and their window; None when nothing is."""
    types, width = config.get(LAYER_TYPES), config.get("sliding_window")
    if types is None:
        return None
    if not isinstance(types, list) or len(types) != config.get("num_hidden_layers"):
        return f"{LAYER_TYPES} is {types!r}, not a list with a type for each layer"
    if types not in ([SLIDING] * len(types), ["full_attention"] * len(types)):
        return f"{LAYER_TYPES} is {types!r}: headstart has drafts whose layers are all alike"
    if types[:1] == [SLIDING] and (not isinstance(width, int) or isinstance(width, bool) or width < 1):
        return f"{LAYER_TYPES} says {SLIDING}, and sliding_window is {width!r}"
    return None


def _window(config: Mapping[str, Any], where: Path) -> int | None:
    if fault := window_fault(config):
        raise UserError(
            f"the draft in {where} cannot be read: {fault}", looked_for="a plain Llama layer, or one with a window"
        )
    return config["sliding_window"] if SLIDING in (config.get(LAYER_TYPES) or ()) else None


def _latent(config: Mapping[str, Any], where: Path) -> LatentShape | None:
    if config.get(KV_RANK) is None:
        return None
    sizes = {name: _number(config, foreign, where) for name, foreign in LATENT.items()}
    if _window(config, where) is not None:
        raise UserError(f"the draft in {where} has MLA and a sliding window, which vLLM does not serve, nor headstart")
    if sizes["value"] > sizes["nope"] + sizes["rope"]:
        raise UserError(f"the draft in {where} has values wider than its keys, which headstart has no draft for")
    return LatentShape(**sizes)


def _refuse_unknown(config: Mapping[str, Any], where: Path) -> None:
    """Settings that change what the draft computes, in ways that `Eagle3` has no switch for."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    eagle = config.get("eagle_config") or {}
    strange = {
        "model_type": config.get("model_type", "llama") not in (_LATENT_TYPES if KV_RANK in config else ("llama",)),
        "index_topk": bool(config.get("index_topk")),
        "hidden_act": config.get("hidden_act", "silu") != "silu",
        "rope_scaling": not (
            rope.get("rope_type", rope.get("type", "default")) == "default" or _stretches_nothing(rope)
        ),
        "attention_bias": bool(config.get("attention_bias")),
        "mlp_bias": bool(config.get("mlp_bias")),
        "norm_before_fc": bool(eagle.get("norm_before_fc", config.get("norm_before_fc"))),
        "eagle_config.use_aux_hidden_state": eagle.get("use_aux_hidden_state", True) is not True,
    }
    for name, present in strange.items():
        if present:
            raise UserError(
                f"the draft in {where} uses {name}, which headstart has no draft for",
                looked_for="a plain Llama layer, or one with plain MLA",
            )


def _stretches_nothing(rope: Mapping[str, Any]) -> bool:
    return rope.get("rope_type") == "yarn" and rope.get("factor") == 1 and rope.get("attention_factor", 1) == 1


def _layer_ids(config: Mapping[str, Any], where: Path) -> list[int]:
    ids = config.get(LAYER_IDS) or (config.get("eagle_config") or {}).get(LAYER_IDS)
    if not ids:
        raise UserError(
            f"{where / CONFIG} does not say which states of the target the draft reads",
            looked_for=LAYER_IDS,
            do="add the ids it was trained with; engines would take 2, n//2, n-3",
        )
    return ids


def _number(config: Mapping[str, Any], name: str, where: Path) -> Any:
    value = config.get(name)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise UserError(f"{where / CONFIG} has {name} = {value!r}", looked_for="a number")
    return value
