"""SpecForge 0.2.0 as an independent implementation: its own code computes a training step, on the CPU, in fp32.

It is no dependency: unpack its wheel (`pip download --no-deps specforge==0.2.0`) and put that folder on the path before
this is imported. It wants Triton and torch.compile, which a CPU does not have or need: a stand-in takes Triton's place
while it is imported, its compiled functions stay plain ones, and its Triton kernel of the loss gives way to the plain
formula that stands beside it in `specforge/core/loss.py`.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig

DECAY = 0.8  # `ploss_decay` of its EAGLE-3 strategy; no setting reaches it


@contextmanager
def _triton() -> Iterator[None]:
    """Enough of Triton for a kernel to be defined, none to run it; gone again before PyTorch looks for it."""
    package, language = ModuleType("triton"), ModuleType("triton.language")
    vars(language)["constexpr"] = int
    vars(package).update(jit=lambda kernel: kernel, language=language)
    found = {module.__name__: module for module in (package, language)}
    sys.modules.update(found)
    try:
        yield
    finally:
        for name in found:
            del sys.modules[name]


def _uncompiled(function: Callable[..., Any] | None = None, **_: object) -> Callable[..., Any]:
    return function if function is not None else lambda later: later


with mock.patch.object(torch, "compile", _uncompiled), warnings.catch_warnings():
    warnings.simplefilter("ignore", UserWarning)  # that flash_attn is missing
    with _triton():
        _loss = import_module("specforge.core.loss")
    _eagle3 = import_module("specforge.algorithms.eagle3.model")
    _drafts = import_module("specforge.modeling.draft")
    _heads = import_module("specforge.modeling.target.target_head")
    _strategies = import_module("specforge.training.strategies.base")

vars(_eagle3)["LogSoftmaxLoss"] = SimpleNamespace(apply=vars(_loss)["_compute_loss"])


@dataclass(frozen=True)
class Document:
    """What a data set of theirs holds of one sample of n tokens.

    input_ids: int64 [n]. aux: [n, 3, d]. last: [n, d], *after* the target's final norm. mask: bool [n], l_t; false for the
    last token: the state that its row would learn from is not there, and theirs would learn zeros.
    """

    input_ids: Tensor
    aux: Tensor
    last: Tensor
    mask: Tensor


def load(folder: Path, target: Path, steps: int, *, compact: bool = False) -> Any:
    """Their strategy, ready to train the draft of `folder` (vLLM's raw format, of one layer).

    target: a folder with the target's config and `lm_head.weight`.
    compact: their option for a teacher that is never held over the whole vocabulary.
    """
    config = LlamaConfig.from_pretrained(folder)
    # vLLM's word for feeding the *normed* output back, which SpecForge never does; its own word for norming before the head.
    vars(config)["norm_output"] = True
    draft = _drafts.LlamaForCausalLMEagle3(config, attention_backend="sdpa")
    draft.load_state_dict(load_file(folder / "model.safetensors"))
    draft.freeze_embedding()
    model = _eagle3.OnlineEagle3Model(draft, length=steps, attention_backend="sdpa").train()
    head = _heads.TargetHead(target)
    head.load_state_dict({"fc.weight": load_file(target / "model.safetensors")["lm_head.weight"]})
    head.freeze_weights()
    return _strategies.Eagle3TrainStrategy(model, target_head=head, compact_teacher=compact)


def collate(document: Document) -> Any:
    """A batch of one, as their offline collator makes it; their target head shifts it by one."""
    count = len(document.input_ids)
    batch = {
        "input_ids": document.input_ids,
        "attention_mask": torch.ones(count, dtype=torch.int64),
        "loss_mask": document.mask.to(torch.int64),
        "hidden_state": document.aux.flatten(1),
        "target": document.last,
    }
    tensors = {name: tensor[None] for name, tensor in batch.items()}
    return _strategies.TrainBatch(["only"], "eagle3", tensors, {"target_repr": "hidden_state"})
