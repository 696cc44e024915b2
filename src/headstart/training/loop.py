"""The training loop: read a batch, one optimiser step, now and then a validation and a checkpoint."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headstart.config import Train
from headstart.data.store import Entry, StateStore
from headstart.drafts.checkpoint import save_weights, trainable
from headstart.drafts.eagle3 import Eagle3
from headstart.drafts.losses import Teacher
from headstart.drafts.rows import MaskKind
from headstart.errors import GateError, UserError
from headstart.events import Events
from headstart.target.head import TargetHead
from headstart.training import checkpoint
from headstart.training.batches import Batch, assemble, epoch_order, learnable
from headstart.training.checkpoint import BEST, Progress
from headstart.training.optim import Optimizer, schedule
from headstart.training.step import StepStats, forward, teacher_for


@dataclass
class Trainer:
    """One training of `draft` on `store`, in the work folder `folder`, continued from its newest checkpoint."""

    draft: Eagle3
    head: TargetHead
    store: StateStore
    settings: Train
    ttt_steps: int
    folder: Path
    events: Events
    device: str = "cpu"

    def __post_init__(self) -> None:
        kind = self.settings.mask
        self.training = learnable(self.store, self.store.of("train"), kind)
        self.validation = learnable(self.store, self.store.of("validation"), "exact")
        if not self.training:
            raise UserError("no training sample has a row to learn from", looked_for="answers of at least 2 tokens")
        self.head_rows: Tensor = self.head.lm_head[self.draft.draft_to_target].to(self.device, torch.float32)
        self.epochs = self._plan()
        planned = sum(len(batches) for batches in self.epochs)
        self.total = min(planned, self.settings.max_steps or planned)

    def _plan(self) -> list[list[list[int]]]:
        """The batches of every epoch that is begun."""
        epochs: list[list[list[int]]] = []
        limit = self.settings.max_steps or float("inf")
        for epoch in range(self.settings.epochs):
            if sum(map(len, epochs)) >= limit:
                break
            epochs.append(epoch_order(self.training, self.settings.batch_tokens, self.settings.seed, epoch))
        return epochs

    def run(self) -> Progress:
        """Train to the end. Returns the progress with all curves; the best draft is in `folder / BEST`."""
        parameters = trainable(self.draft, freeze_lm_head=self.settings.freeze_lm_head)
        self.draft.requires_grad_(False)
        for parameter in parameters.values():
            parameter.requires_grad_(True)
        optimizer = Optimizer(parameters, self.settings)
        progress = checkpoint.restore(self._checkpoints, self.draft, optimizer)
        if self._validation_due(progress):
            self._validate(progress)
        tokens = self._tokens(0, self.total)
        with self.events.progress("train", tokens, "tok", done=self._tokens(0, progress.step)) as bar:
            while progress.step < self.total:
                record, count = self._step(optimizer, parameters, progress)
                self._after(optimizer, progress, record)
                bar.advance(
                    count,
                    step=f"{progress.step}/{self.total}",
                    loss=record["loss"][0],
                    **{"training tau": record["tau"]},
                )
        return progress

    def _step(self, optimizer: Optimizer, parameters: dict, progress: Progress) -> tuple[dict[str, Any], int]:
        indices = self.epochs[progress.epoch][progress.batch]
        fraction = schedule(progress.step, self.total, self.settings)
        began = time.monotonic()
        batch = self.assemble([self.training[i] for i in indices], self.settings.mask)
        read = time.monotonic() - began
        total, stats = forward(self.draft, batch, self.teacher(batch), self.settings)
        optimizer.zero_grad()
        total.backward()
        norm = torch.nn.utils.clip_grad_norm_(parameters.values(), self.settings.clip)
        if not torch.isfinite(norm):
            names = ", ".join(self.training[i].id for i in indices[:5])
            raise GateError(
                f"the gradient is not finite at step {progress.step}", looked_for=f"finite values; samples {names}, ..."
            )
        optimizer.step(fraction)
        self._advance(progress)
        count = sum(self.training[i].length for i in indices)
        self.events.emit(
            "train-step",
            step=progress.step,
            tokens=count,
            seconds=round(time.monotonic() - began, 4),
            read=round(read, 4),
        )
        return {
            "kind": "train",
            "step": progress.step,
            "lr": fraction * self.settings.learning_rate,
            "grad_norm": round(float(norm), 6),
            **stats.summary(),
        }, count

    def _after(self, optimizer: Optimizer, progress: Progress, record: dict[str, Any]) -> None:
        progress.curves.append(record)
        if progress.step % self.settings.checkpoint_every == 0 or progress.step == self.total:
            checkpoint.save(self._checkpoints, self.draft, optimizer, progress, self.settings.keep_checkpoints)
        if self._validation_due(progress):
            self._validate(progress)

    def _validate(self, progress: Progress) -> None:
        """Measure on held-out conversations; keep the draft when its acceptance length is the best so far."""
        if not self.validation:
            save_weights(self.folder / BEST, self.draft)
            return
        summary = measure(self, self.validation).summary()
        progress.curves.append({"kind": "validation", "step": progress.step, **summary})
        tau = summary["tau"]
        self.events.emit("validation", step=progress.step, **summary)
        self.events.say(
            f"  step {progress.step}: held-out tau {tau:.3f} (simulated from every position, {self.ttt_steps} steps deep)"
        )
        if tau > progress.best_tau:
            progress.best_tau, progress.best_step = tau, progress.step
            save_weights(self.folder / BEST, self.draft)

    def _advance(self, progress: Progress) -> None:
        progress.step += 1
        progress.batch += 1
        if progress.batch == len(self.epochs[progress.epoch]):
            progress.epoch, progress.batch = progress.epoch + 1, 0

    def assemble(self, entries: Sequence[Entry], kind: MaskKind) -> Batch:
        return assemble(self.store, entries, self.head, self.ttt_steps, kind, self.device)

    def teacher(self, batch: Batch) -> Teacher:
        return teacher_for(batch, self.head, self.head_rows, self.draft.draft_to_target)

    def _validation_due(self, progress: Progress) -> bool:
        """Also after a kill between a checkpoint and the validation that follows it."""
        due = progress.step % self.settings.validate_every == 0 or progress.step == self.total
        done = any(record["kind"] == "validation" and record["step"] == progress.step for record in progress.curves)
        return due and not done

    def _tokens(self, begin: int, end: int) -> int:
        batches = [batch for epoch in self.epochs for batch in epoch][begin:end]
        return sum(self.training[i].length for batch in batches for i in batch)

    @property
    def _checkpoints(self) -> Path:
        return self.folder / "checkpoints"


def measure(trainer: Trainer, entries: Sequence[Entry]) -> StepStats:
    """Statistics of the draft as it is over `entries`, exact mask, without gradients."""
    total: StepStats | None = None
    with torch.no_grad():
        for indices in epoch_order(entries, trainer.settings.batch_tokens, 0, 0):
            batch = trainer.assemble([entries[i] for i in indices], "exact")
            _, stats = forward(trainer.draft, batch, trainer.teacher(batch), trainer.settings, alpha=True)
            total = stats if total is None else total + stats
    assert total is not None
    return total
