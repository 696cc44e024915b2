"""The training loop: read a batch, one optimiser step, now and then a validation and a checkpoint; on one process or many."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from headstart.config import Train
from headstart.data.store import Entry, StateStore
from headstart.drafts.checkpoint import save_tensors, weights_of
from headstart.drafts.eagle3 import Eagle3
from headstart.errors import GateError, Stopped, UserError
from headstart.events import Events
from headstart.target.head import TargetHead
from headstart.training import checkpoint
from headstart.training.average import Average
from headstart.training.batches import Packed, Packer, ahead, epoch_order, learnable, live_rows, pack_up_to
from headstart.training.checkpoint import BEST, Progress, Snapshot
from headstart.training.distributed import World, gathered, like, share, whole
from headstart.training.optim import Optimizer, schedule
from headstart.training.step import Objective, StepStats, row_scales, teacher_for
from headstart.training.telemetry import Telemetry, peak_flops

Item = TypeVar("Item")


@dataclass(frozen=True)
class _Part:
    """One forward pass of this process: its samples, their row scales [samples, T]; of which step, and whether the step's last."""

    step: int
    entries: list[Entry]
    scale: Tensor
    last: bool


@dataclass
class Trainer:
    """One training of `draft` on `store`, in the work folder `folder`, continued from its newest checkpoint.

    Only the main process of `world` reads and writes `folder`, and tells `events`. logs: where trackers write.
    """

    draft: Eagle3
    head: TargetHead
    store: StateStore
    settings: Train
    ttt_steps: int
    folder: Path
    events: Events
    world: World = field(default_factory=World)
    logs: Path | None = None

    def __post_init__(self) -> None:
        kind = self.settings.mask
        self.training = learnable(self.store, self.store.of("train"), kind)
        self.validation = learnable(self.store, self.store.of("validation"), "exact")
        if not self.training:
            raise UserError("no training sample has a row to learn from", looked_for="answers of at least 2 tokens")
        self.live = [live_rows(self.store, entry, self.ttt_steps, kind) for entry in self.training]
        self.head_rows: Tensor = self.head.lm_head[self.draft.draft_to_target].to(self.world.device, torch.float32)
        self.packer = Packer(self.store, self.head, self.ttt_steps, self.world.device)
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
        """Train to the end. Returns the progress with all curves; the best draft is in `folder / BEST`.

        Raises:
            GateError: a gradient that is not finite.
            Stopped: SIGTERM came; the same command continues.
        """
        self._prepare()
        progress = self._restore()
        if self._validation_due(progress):
            self._validate(progress)
        bar_of = self.events.progress("train", self._tokens(0, self.total), "tok", done=self._tokens(0, progress.step))
        with _sigterm() as stop, self.telemetry, bar_of as bar:
            for parts, waited in _timed(self._steps(progress.step)):
                record, count = self._step(parts, progress, waited)
                self._after(progress, record)
                bar.advance(
                    count,
                    step=f"{progress.step}/{self.total}",
                    loss=record["loss"][0],
                    **{"training tau": record["tau"]},
                )
                if self.world.any(stop.is_set()):
                    self._save(progress)
                    raise Stopped(f"SIGTERM at step {progress.step}", do="the same command continues")
        return progress

    def _prepare(self) -> None:
        """Which parameters learn; the draft as replicated, sharded, compiled; its optimiser."""
        frozen = {"lm_head.weight"} if self.settings.freeze_lm_head else set()
        for name, parameter in self.draft.named_parameters():
            parameter.requires_grad_(name not in frozen)
        self.objective = Objective(self.draft, self.settings)
        if self.settings.compile:
            self.objective.compile_parts()
        self.module = self.world.wrap(self.objective, self.settings.parallel)
        self.parameters = {name: p for name, p in self.draft.named_parameters() if name not in frozen}
        self.optimizer = Optimizer(self.parameters, self.settings)
        self.average = Average(self.draft, self.settings.ema) if self.settings.ema else None
        logs = self.logs if self.world.main else None
        peak = peak_flops(self.world.device)
        self.telemetry = Telemetry(self.events, self.settings, self.draft.shape, logs, self.folder, peak)

    # --- one step ---

    def _steps(self, first: int) -> Iterator[list[tuple[_Part, Packed | None]]]:
        """The steps from `first` on, each as this process's parts of it, read while the step before is computed."""
        gathered: list[tuple[_Part, Packed | None]] = []
        for part, packed in ahead(self._parts(first), self._read):
            gathered.append((part, packed))
            if part.last:
                yield gathered
                gathered = []

    def _parts(self, first: int) -> Iterator[_Part]:
        batches = [batch for epoch in self.epochs for batch in epoch][first : self.total]
        for step, indices in enumerate(batches, start=first):
            lengths = [self.training[i].length for i in indices]
            scales = torch.from_numpy(row_scales([self.live[i] for i in indices], self.settings))
            most = self.settings.micro_tokens or sum(lengths)
            groups = [pack_up_to(mine, lengths, most) for mine in share(lengths, self.world.size)]
            rounds = max(map(len, groups))  # as many for every process: those with less take part with nothing
            for number in range(rounds):
                own = groups[self.world.rank]
                chosen = own[number] if number < len(own) else []
                yield _Part(step, [self.training[indices[i]] for i in chosen], scales[chosen], number == rounds - 1)

    def _read(self, part: _Part) -> Packed | None:
        if not part.entries:
            return None
        return self.packer.pack(part.entries, self.settings.mask, self.settings.noise, (self.settings.seed, part.step))

    def _step(
        self, parts: Sequence[tuple[_Part, Packed | None]], progress: Progress, waited: float
    ) -> tuple[dict[str, Any], int]:
        began = time.monotonic()
        fraction = schedule(progress.step, self.total, self.settings)
        self.optimizer.zero_grad()
        stats = StepStats.none(self.ttt_steps)
        for part, packed in parts:
            stats += self._backward(part, packed)
        stats = StepStats(*self.world.sum(stats.stacked()))
        norm = torch.nn.utils.clip_grad_norm_(self.parameters.values(), self.settings.clip)
        norm = float(whole(norm))
        self._check_finite(norm, parts, progress)
        self.optimizer.step(fraction)
        if self.average:
            self.average.update()
        indices = self.epochs[progress.epoch][progress.batch]
        self._advance(progress)
        count = sum(self.training[i].length for i in indices)
        seconds = waited + time.monotonic() - began
        self.telemetry.step(progress.step, count, seconds, waited, [packed.plan for _, packed in parts if packed])
        return {
            "kind": "train",
            "step": progress.step,
            "lr": fraction * self.settings.learning_rate,
            "grad_norm": round(norm, 6),
            **stats.summary(),
        }, count

    def _backward(self, part: _Part, packed: Packed | None) -> StepStats:
        """Gradients of one part, added to those before; exchanged with the other processes at the step's last part."""
        batch = self.packer.move(packed) if packed else None
        teacher = teacher_for(batch, self.head, self.head_rows, self.draft.draft_to_target) if batch else None
        with self._exchange(part.last):
            total, stats = self.module(batch, teacher, part.scale.to(self.world.device))
            (total * self.world.size).backward()  # what follows is a mean over processes, and a sum is meant
        return stats or StepStats.none(self.ttt_steps)

    def _exchange(self, now: bool):
        if isinstance(self.module, FSDPModule):
            self.module.set_requires_gradient_sync(now)
        return self.module.no_sync() if isinstance(self.module, DistributedDataParallel) and not now else nullcontext()

    def _check_finite(self, norm: float, parts: Sequence[tuple[_Part, Any]], progress: Progress) -> None:
        if math.isfinite(norm):
            return
        names = ", ".join(entry.id for part, _ in parts for entry in part.entries[:5])
        raise GateError(
            f"the gradient is not finite at step {progress.step}", looked_for=f"finite values; samples {names}, ..."
        )

    def _advance(self, progress: Progress) -> None:
        progress.step += 1
        progress.batch += 1
        if progress.batch == len(self.epochs[progress.epoch]):
            progress.epoch, progress.batch = progress.epoch + 1, 0

    # --- between steps ---

    def _after(self, progress: Progress, record: dict[str, Any]) -> None:
        progress.curves.append(record)
        self.telemetry.curve(record)
        if progress.step % self.settings.checkpoint_every == 0 or progress.step == self.total:
            self._save(progress)
        if self._validation_due(progress):
            self._validate(progress)

    def _validate(self, progress: Progress) -> None:
        """Measure on held-out conversations; keep the draft when its acceptance length is the best so far."""
        with self.average.swapped() if self.average else nullcontext():
            if not self.validation:
                self._keep_best()
                return
            summary = measure(self, self.validation).summary()
            progress.curves.append({"kind": "validation", "step": progress.step, **summary})
            self.telemetry.curve(progress.curves[-1])
            tau = summary["tau"]
            self.events.emit("validation", step=progress.step, **summary)
            self.events.say(
                f"  step {progress.step}: held-out tau {tau:.3f} "
                f"(simulated from every position, {self.ttt_steps} steps deep)"
            )
            if tau > progress.best_tau:
                progress.best_tau, progress.best_step = tau, progress.step
                self._keep_best()

    def _keep_best(self) -> None:
        weights = whole(weights_of(self.draft))
        if self.world.main:
            save_tensors(self.folder / BEST, weights)

    def _validation_due(self, progress: Progress) -> bool:
        """Also after a kill between a checkpoint and the validation that follows it."""
        due = progress.step % self.settings.validate_every == 0 or progress.step == self.total
        done = any(record["kind"] == "validation" and record["step"] == progress.step for record in progress.curves)
        return due and not done

    # --- checkpoints ---

    def _save(self, progress: Progress) -> None:
        snapshot = Snapshot(whole(self._weights()), whole(self.optimizer.state_dict()), progress)
        if self.world.main:
            checkpoint.save(self._checkpoints, snapshot, self.settings.keep_checkpoints)

    def _restore(self) -> Progress:
        """Continue from the newest checkpoint, which the main process reads for all."""
        found = self.world.shared(checkpoint.load(self._checkpoints, self._fits) if self.world.main else None)
        if found is None:
            return Progress()
        with torch.no_grad():
            for name, tensor in self.draft.state_dict().items():
                tensor.copy_(like(found.weights[name], tensor))
        if self.average:
            self.average.load(found.weights)
        self.optimizer.load_whole(found.optimizer)
        return replace(found.progress)

    def _weights(self) -> dict[str, Tensor]:
        """What a checkpoint holds of the draft; sharded tensors as they are."""
        return weights_of(self.draft) | (self.average.state() if self.average else {})

    def _fits(self, found: Snapshot) -> bool:
        """Whether a checkpoint is of this training: its tensors, its optimiser, and the batch that follows its steps."""
        places = [(epoch, batch) for epoch, batches in enumerate(self.epochs) for batch in range(len(batches))]
        places = [*places, (len(self.epochs), 0)][: self.total + 1]
        at = found.progress
        return (
            checkpoint.layout(found.weights) == checkpoint.layout(self._weights())
            and self.optimizer.fits(found.optimizer)
            and places[at.step : at.step + 1] == [(at.epoch, at.batch)]
        )

    def _tokens(self, begin: int, end: int) -> int:
        batches = [batch for epoch in self.epochs for batch in epoch][begin:end]
        return sum(self.training[i].length for batch in batches for i in batch)

    @property
    def _checkpoints(self) -> Path:
        return self.folder / "checkpoints"


def measure(trainer: Trainer, entries: Sequence[Entry]) -> StepStats:
    """Statistics of the draft as it is over `entries`, exact mask, without gradients; every process measures its share."""
    world, packer = trainer.world, trainer.packer
    mine = [entries[i] for i in share([entry.length for entry in entries], world.size)[world.rank]]
    most = trainer.settings.micro_tokens or trainer.settings.batch_tokens
    total = StepStats.none(trainer.ttt_steps)
    with torch.no_grad(), gathered(trainer.module), _evaluating(trainer.objective):
        groups = [[mine[i] for i in indices] for indices in epoch_order(mine, most, 0, 0)]
        for _, packed in ahead(groups, lambda group: packer.pack(group, "exact")):
            batch = packer.move(packed)
            teacher = teacher_for(batch, trainer.head, trainer.head_rows, trainer.draft.draft_to_target)
            _, stats = trainer.objective(batch, teacher, None, alpha=True)
            total += stats
    return StepStats(*world.sum(total.stacked()))


def _timed(items: Iterator[Item]) -> Iterator[tuple[Item, float]]:
    """Each item with the seconds it was waited for."""
    began = time.monotonic()
    for item in items:
        yield item, time.monotonic() - began
        began = time.monotonic()


@contextmanager
def _evaluating(module: torch.nn.Module) -> Iterator[None]:
    module.eval()
    try:
        yield
    finally:
        module.train()


@contextmanager
def _sigterm() -> Iterator[threading.Event]:
    """An event that SIGTERM sets while this lasts. Only a main thread can listen; elsewhere it stays unset."""
    came = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield came
        return
    before = signal.signal(signal.SIGTERM, lambda *_: came.set())
    try:
        yield came
    finally:
        signal.signal(signal.SIGTERM, before)
