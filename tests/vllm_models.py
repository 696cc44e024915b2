"""Tiny random models of the architectures that vLLM serves, each saved as a folder that vLLM and Transformers open.

`models()` maps short names to them; `save_model(name, folder)` writes one: config.json, safetensors, tokenizer, and for some
wrappers what prepares images. They are listed in `vllm_text`, `vllm_wrappers`, and, where Transformers has no such class, in
`vllm_dressed` and `vllm_dressed_wrappers`. Nothing here imports vLLM.

Sizes are the smallest that still tell layers, heads and groups apart: 4 layers, width 128, 4 heads of 32 (the smallest that
vLLM's CPU attention takes), 2 key/value heads. Norm gains are random, so that a forgotten or doubled norm changes every number.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from fixtures_text import make_tokenizer

VOCAB = 512
SEED = 20
WIDTH, HEADS, HEAD_DIM, LAYERS = 128, 4, 32, 4
FIRST_TOKEN = 400  # ids from here on are free for the special tokens of a wrapper
BARE = "bare"  # folder within a model's own that holds the text model whose weights it carries
# The CPU build's rotary_embedding kernel is wrong for the three-dimensional queries of MLA: the plain PyTorch one is taken.
MLA_CURE = {"compilation_config": {"mode": 0, "custom_ops": ["all", "-rotary_embedding"]}}
NO_IMAGES = {"limit_mm_per_prompt": {"image": 0, "video": 0}}


@dataclass(frozen=True)
class Model:
    """One architecture. layers_path: where vLLM 0.32 keeps its layers. traits: what makes it worth testing.

    options: arguments that a bare `vllm.LLM` needs for it. cannot: what vLLM 0.32 says when it fails on a CPU in float32.
    tolerance: share of the largest number in a state; float32 by other kernels in another order explains the usual one;
    note says what a larger one comes from.
    """

    architecture: str
    layers_path: str
    make: Callable[[Path], None]
    traits: tuple[str, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)
    cannot: str = ""
    tolerance: float = 5e-5
    note: str = ""

    @property
    def multimodal(self) -> bool:
        return "wrapper" in self.traits


def save_model(name: str, folder: Path) -> Path:
    """Write the model called `name` into `folder`, tokenizer included; the same bytes on every call."""
    folder.mkdir(parents=True, exist_ok=True)
    model = models()[name]
    save_tokenizer(folder)
    model.make(folder)
    config = json.loads((folder / "config.json").read_text())
    config["architectures"] = [model.architecture]  # Transformers' class may be called otherwise (PhimoeForCausalLM)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    return folder


def models() -> dict[str, Model]:
    """All models, text first."""
    from vllm_dressed import DRESSED
    from vllm_dressed_wrappers import DRESSED_WRAPPERS
    from vllm_text import TEXT
    from vllm_wrappers import WRAPPERS

    return TEXT | DRESSED | WRAPPERS | DRESSED_WRAPPERS


def save_tokenizer(folder: Path, tokens: tuple[str, ...] = ()) -> Any:
    """The tests' tokenizer and a wrapper's own special tokens, numbered from FIRST_TOKEN in their order."""
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(list(tokens), special_tokens=True)
    tokenizer.save_pretrained(folder)
    return tokenizer


def sizes(**changes: Any) -> dict[str, Any]:
    """The common sizes in the common spelling."""
    return {
        "vocab_size": VOCAB,
        "hidden_size": WIDTH,
        "intermediate_size": 192,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.08,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    } | changes


def build(config: Any, auto: Any = None) -> Any:
    """A model with random weights, norm gains and biases, float32, the same on every call."""
    torch.manual_seed(SEED)
    model = (auto or transformers.AutoModelForCausalLM).from_config(config, dtype=torch.float32).eval()
    shake(model)
    return model


@torch.no_grad()
def shake(model: nn.Module) -> None:
    """Move norm gains and all biases away from one and zero."""
    for name, parameter in model.named_parameters():
        owner = model.get_submodule(name.rpartition(".")[0])
        if "norm" in type(owner).__name__.lower() or (name.endswith("bias") and parameter.ndim == 1):
            parameter.add_((torch.rand_like(parameter) - 0.5) * 0.4)
