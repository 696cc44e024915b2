"""What both recipes of `recipe.py` learn from, are measured with and are told as."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headstart import artifact, rundir
from headstart.config import Run
from headstart.data.store import Entry, StateStore
from headstart.data.vocab import DraftVocab
from headstart.drafts.eagle3 import Eagle3
from headstart.products import own_products, use_fast_products
from headstart.target.head import TargetHead
from headstart.target.source import resolve
from headstart.training.batches import Packer, epoch_order, learnable
from headstart.training.step import Objective, StepStats, teacher_for


@dataclass(frozen=True)
class Material:
    """What both learn from and are measured on."""

    root: Path
    run: Run
    store: StateStore
    head: TargetHead
    vocabulary: Tensor

    @classmethod
    def open(cls, root: Path) -> Material:
        run = rundir.recorded(root)
        store = StateStore.open(artifact.open_artifact(root / "states", "states"))
        head = store.head()
        vocabulary = DraftVocab.read(root / "vocab", head.vocab_size).draft_to_target
        return cls(root, run, store, head, torch.from_numpy(vocabulary))

    @cached_property
    def training(self) -> list[Entry]:
        return learnable(self.store, self.store.of("train"), self.run.train.mask)

    @cached_property
    def held_out(self) -> list[Entry]:
        return learnable(self.store, self.store.of("validation"), "exact")

    @cached_property
    def draft(self) -> artifact.Artifact:
        return artifact.open_artifact(self.root / "draft", "draft")

    @property
    def folder(self) -> Path:
        """The target's."""
        return resolve(self.run.target.model, self.run.target.revision)


@dataclass
class Trained:
    """A training that is over. wall: seconds; of ours, of the whole stage. curve: held-out measurements, each with the seconds of
    optimiser steps before it. training_loss: (seconds, loss) of each step, as the recipe itself defines its loss."""

    name: str
    steps: int
    tokens: int
    step_seconds: float
    wall: float
    settings: dict[str, Any]
    curve: list[dict[str, Any]]
    training_loss: list[tuple[float, float]]


def measure(draft: Eagle3, material: Material) -> dict[str, Any]:
    """A draft on the held-out states, as the `train` stage measures its own."""
    settings = material.run.train.model_copy(update={"loss": "kl"})
    packer = Packer(material.store, material.head, material.run.draft.ttt_steps)
    objective = Objective(draft, settings)
    rows = material.head.lm_head[draft.draft_to_target].float()
    total = StepStats.none(packer.steps)
    with torch.no_grad():
        for indices in epoch_order(material.held_out, settings.batch_tokens, 0, 0):
            batch = packer.move(packer.pack([material.held_out[i] for i in indices], "exact"))
            teacher = teacher_for(batch, material.head, rows, draft.draft_to_target)
            _, stats = objective(batch, teacher, None, alpha=True)
            assert stats is not None
            total += stats
    return total.summary()


def point(seconds: float, step: int, summary: dict[str, Any]) -> dict[str, Any]:
    return {"seconds": seconds, "step": step, **{name: summary[name] for name in ("loss", "accuracy", "tau")}}


@contextmanager
def our_products() -> Iterator[None]:
    """While this lasts, float32 products are computed as our stages do, whatever was asked for before."""
    with own_products():  # gives back what was asked for
        use_fast_products(torch.device("cpu"))
        yield


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
