"""The checkpoint format of speculators 0.9, which vLLM serves as well: `vllm serve FOLDER` finds the target in it.

The decoder's fields lie in `transformer_layer_config`. vLLM hands that block to the draft as it is and adds only fields
that it knows (0.22 drops the norms of EAGLE-3.1, no version hands on the number of states), so these stand inside it
too. speculators leaves a missing tensor as uninitialised memory, the embedding too unless that memory happens to hold a
NaN: `write` writes them all.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

from torch import Tensor

from headstart import files
from headstart.drafts.eagle3 import Eagle3
from headstart.drafts.shape import DraftShape
from headstart.errors import UserError
from headstart.formats import common, fields, reading, tensors, vllm
from headstart.formats.common import Config, ExportFacts

VERSION = "0.9.0"
_FIRST_LAYER = "layers.0"
_LAYER = "transformer_layer_config"
_RESIDUAL = "norm_before_residual"
_NORMS = ("fc_norm", "norm_output")


def write(folder: Path, draft: Eagle3, facts: ExportFacts) -> None:
    """Write `config.json` and `model.safetensors`. Raises UserError when nothing could load them."""
    if not facts.embed_tokens:
        raise UserError(
            "export.embed_tokens=false cannot be had in the speculators format: it would load a random embedding",
            do='keep the embedding, or leave the format out: export.formats=["vllm"]',
        )
    if draft.shape.latent:
        raise UserError(
            "a draft with MLA cannot be had in the speculators format",
            do='leave the format out: export.formats=["vllm"]',
        )
    common.check_writable(draft, facts)
    tensors.write(folder, tensors.outward(draft, _FIRST_LAYER, embed=facts.embed_tokens))
    files.write_json(folder / common.CONFIG, config_of(draft, facts))


def read(folder: Path) -> tuple[DraftShape, dict[str, Tensor]]:
    """The shape, and the tensors under our names (see `tensors.inward`). Raises UserError when it is not whole."""
    config = fields.read_config(folder)
    if config.get("speculators_model_type") != "eagle3":
        raise UserError(
            f"{folder} holds speculators_model_type {config.get('speculators_model_type')!r}",
            looked_for="eagle3, in its config.json",
        )
    if not isinstance(config.get(_RESIDUAL), bool):
        raise UserError(
            f"{folder / common.CONFIG} does not say {_RESIDUAL}",
            looked_for="true or false: vLLM takes true when it is absent, speculators false",
        )
    fields.Fields(config, folder / common.CONFIG).part(_LAYER)
    shape = reading.shape_of(_flat(config), folder)
    return shape, tensors.inward(folder, shape, _FIRST_LAYER)


def check(config: Config, version: str, names: Collection[str] = ()) -> list[str]:
    """Why a vLLM version would not load such a folder, or load it as another draft; empty when all is well."""
    layer = config.get(_LAYER)
    if not isinstance(layer, dict):
        return [f"{_LAYER} is missing"]
    outer = {name: value for name, value in config.items() if name != _LAYER}
    says = [f"{name} is null" for name in common.nulls(outer)]
    alone = [name for name in _NORMS if config.get(name) and not layer.get(name)]
    says += [f"{name} stands outside {_LAYER} alone: not every version hands it on" for name in alone]
    if not (config.get("speculators_config") or {}).get("proposal_methods"):
        says.append("speculators_config.proposal_methods is missing: vLLM refuses the folder")
    if _RESIDUAL not in config:
        says.append(f"{_RESIDUAL} is missing: the engine takes true, speculators false")
    flat = {_RESIDUAL: True, **{name: value for name, value in _flat(config).items() if value is not None}}
    nulls = {name: None for name, value in layer.items() if value is None}
    return says + vllm.check({**flat, **nulls, "architectures": [vllm.ARCHITECTURE]}, version, names)


def config_of(draft: Eagle3, facts: ExportFacts) -> Config:
    """The content of config.json."""
    shape, dtype = draft.shape, draft.fc.weight.dtype
    proposal = {"proposal_type": "greedy", "speculative_tokens": facts.draft_tokens}
    target = {"target_model_type": facts.target_type}
    proposal |= {"verifier_accept_k": 1, "accept_tolerance": 0.0}
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": VERSION,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": proposal["proposal_type"],
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": facts.target, "architectures": list(facts.architectures)},
        },
        **common.draft_fields(shape),
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
        "dtype": str(dtype).removeprefix("torch."),
        _LAYER: {**common.llama_config(shape, facts, dtype), **vllm.state_fields(shape), **target},
    }


def _flat(config: Config) -> dict[str, Any]:
    """One level of fields, as vLLM makes it of the two."""
    layer = config.get(_LAYER)
    outer = {name: value for name, value in config.items() if name not in (_LAYER, "architectures")}
    return {**(layer if isinstance(layer, dict) else {}), **outer}
