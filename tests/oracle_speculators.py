"""speculators 0.9.0 as an independent implementation: its own code loads a folder and trains it, on the CPU, in fp32.

Install it with `requirements/oracle.txt`. Importing it asks for three packages (openai, datasets, hs_connectors) that
nothing here uses: an empty module stands in for each that is not installed.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

_STANDING_IN = {
    "openai": ("types", "types.chat", "types.completion"),
    "datasets": (),
    "hs_connectors": (),
}


class _Unusable:
    def __init__(self, *args: object, **kwargs: object) -> None:
        raise ImportError("this package is not installed; only its name stands here")


class _Empty(ModuleType):
    """A module whose every public name can be imported, and none used."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__spec__ = importlib.machinery.ModuleSpec(name, None)
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Unusable


def stand_in() -> None:
    for package, parts in _STANDING_IN.items():
        if package not in sys.modules and importlib.util.find_spec(package) is None:
            for name in (package, *(f"{package}.{part}" for part in parts)):
                sys.modules[name] = _Empty(name)


stand_in()

from loguru import logger  # noqa: E402
from speculators import SpeculatorModel  # noqa: E402
from speculators.losses import resolve_loss_config  # noqa: E402
from speculators.models.eagle3 import Eagle3DraftModel  # noqa: E402
from speculators.models.eagle3.data import shift_batch  # noqa: E402
from speculators.train.data import CollateFn  # noqa: E402

logger.disable("speculators")


@dataclass(frozen=True)
class Document:
    """What a data set of theirs holds of one sample of n tokens.

    input_ids: int64 [n]. aux: [n, n_aux, d]. last: [n, d], before the final norm. mask: bool [n], l_t.
    """

    input_ids: Tensor
    aux: Tensor
    last: Tensor
    mask: Tensor


@dataclass(frozen=True)
class Step:
    """One training step: logits of every TTT step [rows, Vd], the loss, its terms by step, gradients by their names."""

    logits: list[Tensor]
    loss: Tensor
    losses: list[Tensor]
    gradients: dict[str, Tensor]


def load_plain(folder: Path) -> nn.Module:
    """As a user of speculators loads any checkpoint."""
    return SpeculatorModel.from_pretrained(folder)


def load(folder: Path) -> nn.Module:
    """Ready to train on a CPU: dense attention (a loaded model has FlexAttention), and a draft head that learns."""
    config = Eagle3DraftModel.config_class.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = "sdpa"
    model = Eagle3DraftModel.from_pretrained(folder, config=config)
    model.lm_head.weight.requires_grad_(True)
    return model.train()


def collate(document: Document) -> dict[str, Tensor]:
    """Their own shift and collation."""
    count, (_, states, width) = len(document.input_ids), document.aux.shape
    sample: dict[str, Any] = {
        "input_ids": document.input_ids,
        "hidden_states": document.aux.flatten(1),
        "verifier_last_hidden_states": document.last,
        "loss_mask": document.mask,
        "lengths": torch.tensor([count]),
        "position_ids": torch.arange(count),
    }
    pack = CollateFn(count - 1, width, states, dtype=torch.float32, preprocess=shift_batch)
    return {name: value for name, value in pack([sample]).items() if isinstance(value, Tensor)}


def train_step(model: nn.Module, document: Document, steps: int, decay: float) -> Step:
    """Forward and backward of one batch that is one document.

    Never pack several: at step i the last i rows of a document are scored against the next one's first labels.
    """
    logits: list[Tensor] = []
    hook = model.lm_head.register_forward_hook(lambda module, args, out: logits.append(out.detach()[0]))
    try:
        loss_config = resolve_loss_config("kl_div", "eager")
        _, loss, metrics = model(
            **collate(document), ttt_steps=steps, ttt_step_loss_decay=decay, loss_config=loss_config
        )
    finally:
        hook.remove()
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return Step(logits, loss.detach(), [metrics[f"loss_{i}_sum"] for i in range(steps)], gradients)
