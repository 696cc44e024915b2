"""What the `config.json` of the foreign formats has in common: a Llama-like decoder, and what EAGLE-3 adds to it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from headstart.drafts.eagle3 import Eagle3
from headstart.drafts.shape import DraftShape, LatentShape
from headstart.errors import UserError
from headstart.target.spellings import LATENT

CONFIG = "config.json"
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
LAYER_TYPES, SLIDING = "layer_types", "sliding_attention"
KV_RANK = LATENT["kv_rank"]  # tells a draft with MLA

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
