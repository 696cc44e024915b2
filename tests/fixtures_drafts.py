"""Tiny random drafts for the targets of `fixtures_models`, and folders they are exported to."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from headstart.drafts.eagle3 import Eagle3
from headstart.drafts.shape import DraftShape, LatentShape
from headstart.formats import speculators, vllm
from headstart.formats.common import ExportFacts

SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "target_hidden_size": 64,
    "aux_layers": (2, 3, 4),
    "num_layers": 1,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "target_vocab_size": 512,
    "draft_vocab_size": 96,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_positions": 512,
    "norm_before_residual": False,
    "fc_norm": False,
    "norm_output": False,
}


FORMATS = {"vllm": vllm, "speculators": speculators}
FACTS = ExportFacts(
    target="owner/target",
    architectures=("LlamaForCausalLM",),
    target_type="llama",
    bos_id=1,
    eos_ids=(2,),
    draft_tokens=3,
    embed_tokens=True,
)
DRAFTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "four aux": {"aux_layers": (1, 2, 4, 6)},
    "one aux": {"aux_layers": (5,)},
    "odd head_dim": {"head_dim": 10, "num_heads": 3, "num_kv_heads": 3},
    "full vocabulary": {"draft_vocab_size": 512},
    "two layers": {"num_layers": 2},
    "eagle 3.1": {"fc_norm": True, "norm_output": True},
    "norm before residual": {"norm_before_residual": True},
    "sliding window": {"sliding_window": 8},
}

_LATENT = {"num_kv_heads": 4, "head_dim": 20}
LATENT_DRAFTS: dict[str, dict[str, Any]] = {  # the raw format alone
    "mla": {**_LATENT, "latent": LatentShape(q_rank=24, kv_rank=32, nope=12, rope=8, value=16)},
    "mla, two layers": {
        **_LATENT,
        "latent": LatentShape(q_rank=24, kv_rank=32, nope=12, rope=8, value=20),
        "num_layers": 2,
    },
}


def random_draft(*, embed: torch.Tensor | None = None, seed: int = 3, **changes: Any) -> Eagle3:
    """A draft with random weights, gains and vocabulary. embed: the target's [V, 64]; random when absent."""
    shape = DraftShape(**{**SHAPE, **changes})
    torch.manual_seed(seed)
    if embed is None:
        embed = torch.randn(shape.target_vocab_size, shape.target_hidden_size)
    draft = Eagle3(shape, embed)
    for parameter in draft.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
        else:
            parameter.data.add_(0.2 * torch.randn_like(parameter))
    kept = torch.randperm(shape.target_vocab_size)[: shape.draft_vocab_size].sort().values
    draft.draft_to_target = kept
    return draft


def read_config(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def change_config(folder: Path, **changes: Any) -> None:
    (folder / "config.json").write_text(json.dumps(read_config(folder) | changes))


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    found = {name: tensor.clone() for name, tensor in load_file(folder / "model.safetensors").items()}
    change(found)
    save_file(found, folder / "model.safetensors")
