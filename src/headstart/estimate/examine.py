"""`headstart estimate`: settings, target, work and machine brought together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from headstart import pipeline, preflight
from headstart.config import Run
from headstart.doctor import machine, subject
from headstart.drafts.shape import DraftShape
from headstart.engines.weights import parse_device, pick_device
from headstart.errors import UserError
from headstart.estimate import advice, counting, hardware
from headstart.estimate.estimate import Stage, Subject, disk_needed, estimate
from headstart.estimate.hardware import Hardware
from headstart.estimate.target import TargetCost, cost_of
from headstart.events import Events, size

LONGEST = 60.0  # seconds of loading after which a target is not measured unasked


@dataclass(frozen=True)
class Estimate:
    """shape: the draft's; counted: what the work rests on; measured: the machine's rates were, and not given."""

    name: str
    target: TargetCost
    shape: DraftShape
    counted: counting.Counted
    machine: Hardware
    measured: bool
    stages: list[Stage]
    advice: list[str]

    @property
    def fits(self) -> bool:
        return not self.advice

    @property
    def disk(self) -> float:
        return disk_needed(self.stages)

    @property
    def seconds(self) -> float:
        return sum(stage.seconds for stage in self.stages)

    def as_json(self) -> dict[str, Any]:
        """Plain data; bytes, seconds, tokens."""
        work = self.counted.work
        return {
            "target": self.name,
            "weights": self.target.weights,
            "parameters": {"total": self.target.total, "active": self.target.active},
            "work": {**asdict(work), "told": self.counted.told},
            "machine": {**asdict(self.machine), "measured": self.measured},
            "stages": [asdict(stage) for stage in self.stages],
            "disk": self.disk,
            "seconds": self.seconds,
            "fits": self.fits,
            "advice": self.advice,
        }


def examine(
    file: str, settings: Sequence[str], given: str | None, events: Events, answer_tokens: float | None = None
) -> Estimate:
    """Everything about the run in `file`. given: the figures of `--hardware`; None: this machine is measured.

    Raises:
        UserError: settings, sources or figures that cannot be used, or, where this machine is meant, a target that does not run
            on it: what `headstart run` would refuse there.
    """
    found = subject.open_subject(file, settings)
    if found.run is None:
        raise UserError(f"{file} is no run", looked_for="a run's TOML file", do="headstart doctor takes a model alone")
    run = _here(found.run) if given is None else _there(found.run, int(hardware.figures(given)["gpus"]))
    asked = preflight.Subject(run, found.anatomy)
    preflight.check_settings(asked, pipeline.BY_VERB)
    cost = cost_of(found, gpu=run.target.device != "cpu", dtype=run.target.dtype)
    if given is None:
        _refuse_too_large(found.name, cost, run)
        preflight.check_machine(asked, pipeline.BY_VERB)
    shape = preflight.draft_shape(asked)
    counted = counting.count(found.run, counting.template_of(run), events, answer_tokens)
    if given is None:
        at = _measured(run, shape, counted, cost, events)
    else:
        at = hardware.parse(given, hardware.Load(cost, run.target.tensor_parallel, run.regenerate.batch_size))
    whole = Subject(run, found.anatomy, shape, cost.weights, counted.work)
    stages = estimate(whole, at)
    return Estimate(found.name, cost, shape, counted, at, given is None, stages, advice.advice(whole, at, stages))


def _measured(run: Run, shape: DraftShape, counted: counting.Counted, cost: TargetCost, events: Events) -> Hardware:
    from headstart.estimate import measure  # noqa: PLC0415 (opens an engine; figures need none)

    if not counted.prompts:
        raise UserError(
            "there is nothing to measure with: no prompt could be turned into token ids",
            looked_for=f"the tokenizer and chat template of {run.target.model}, and prompts without images",
            do=f"give figures of the machine: --hardware {hardware.EXAMPLE}",
        )
    found = machine.gpus()
    memory = found[0].total if found and run.target.device != "cpu" else machine.memory_available() or 0
    events.say(f"measuring with {run.target.model} ({size(cost.weights)} of weights), about a minute")
    room = machine.room(Path(run.directory))
    task = measure.Task(run, shape, counted.work, counted.prompts, cost.weights)
    return measure.measure(task, 0 if run.target.device == "cpu" else len(found), memory, room)


def _here(run: Run) -> Run:
    return _on(run, "cpu" if pick_device(run.target.device).type == "cpu" else "cuda")


def _there(run: Run, gpus: int) -> Run:
    """As on a machine with so many GPUs. Raises UserError where it has not the device that is named."""
    named = parse_device("cpu" if run.target.device == "auto" else run.target.device)
    if named.type == "cuda" and (named.index or 0) >= gpus:
        raise UserError(
            f"target.device = {run.target.device!r}, and the machine of --hardware has {gpus or 'no'} GPU{'s' * (gpus > 1)}",
            do="give the figures of another machine, or leave target.device out",
        )
    return _on(run, "cuda" if gpus else "cpu")


def _on(run: Run, device: str) -> Run:
    """The run as if its device had been named: `auto` is another type of numbers on each machine."""
    named = run.target.device if run.target.device != "auto" else device
    return run.model_copy(update={"target": run.target.model_copy(update={"device": named})})


def _refuse_too_large(name: str, cost: TargetCost, run: Run) -> None:
    """Before anything is loaded: what would take minutes, or memory that is not there."""
    found = machine.gpus() if run.target.device != "cpu" else ()
    free = sum(gpu.free for gpu in found[: run.target.tensor_parallel]) if found else machine.memory_available() or 0
    do = f"give figures of the machine it will run on: --hardware {hardware.EXAMPLE}"
    if cost.weights > free:
        raise UserError(f"{name} does not fit here: {size(cost.weights)} of weights, {size(free)} of memory", do=do)
    if cost.weights > LONGEST * hardware.LOADING:
        raise UserError(f"{name} would load for more than a minute: {size(cost.weights)} of weights", do=do)
