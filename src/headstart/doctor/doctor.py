"""Will each stage work for this target, here, with this engine? In seconds: no weights, no GPU work, no remote code."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from headstart.doctor import environment, machine, resources, sizes
from headstart.doctor.boundaries import check_aux
from headstart.doctor.checks import Check, Verdict, worst
from headstart.doctor.engine import Engine, engine_checks, engine_for, named, placed, release_of
from headstart.doctor.run_checks import run_checks
from headstart.doctor.subject import Subject
from headstart.doctor.target_checks import target_checks
from headstart.engines.vllm.ladder import Device
from headstart.engines.vllm.releases import Release
from headstart.errors import UserError
from headstart.target.anatomy import Anatomy

# The facts that `doctor --json` tells; `inspect --json` tells all.
_TOLD = (
    *("architecture", "wrapper", "layers_path", "num_layers", "hidden_size", "vocab_size"),
    *("head_dim", "norm", "tied_head", "quantization", "evidence"),
)


@dataclass(frozen=True)
class Diagnosis:
    """What was found: the target, the engine with its rungs, and every check."""

    name: str
    anatomy: Anatomy
    engine: Engine
    checks: tuple[Check, ...]

    @property
    def verdict(self) -> Verdict:
        return worst(self.checks)

    def as_json(self) -> dict[str, Any]:
        """Plain data: verdict, anatomy, engine, checks."""
        return {
            "verdict": self.verdict,
            "anatomy": {fact: getattr(self.anatomy, fact) for fact in _TOLD},
            "engine": self.engine.as_json(),
            "checks": [asdict(check) for check in self.checks],
        }


def pick_device(name: str) -> Device | None:
    """The device of that name; None for `auto`. Raises UserError for another name."""
    if name == "auto":
        return None
    if name not in ("cpu", "cuda"):
        raise UserError(f"the device {name!r} is unknown", looked_for="auto, cpu or cuda")
    return "cpu" if name == "cpu" else "cuda"


def examine(subject: Subject, version: str | None = None, device: Device | None = None) -> Diagnosis:
    """Run every check. version: a vLLM to answer for instead of the installed one. device: where it would compute; None: as
    the settings say, else a GPU where one is seen or the engine is none of this machine.

    Raises:
        UserError: an unknown version, or target.python that cannot be run.
    """
    run = subject.run
    release, present = release_of(version, run.target.python if run else None)
    found = machine.gpus()
    place = device or _device(subject, bool(found), release if present else None)
    subject = replace(subject, anatomy=placed(named(subject.anatomy), release, run.target.layers_path if run else None))
    engine = engine_for(subject, release, present, place)
    checks = (
        *target_checks(subject),
        *engine_checks(engine, subject, version),
        check_aux(subject.anatomy, run.capture.aux_layers if run else None),
        *_environment(engine, subject),
        _memory(engine, subject, found),
        *(run_checks(run, subject.anatomy, place) if run else ()),
    )
    return Diagnosis(subject.name, subject.anatomy, engine, checks)


def _device(subject: Subject, gpu: bool, here: Release | None) -> Device:
    """An installed vLLM computes on what it was built for, whatever else is there (`here`)."""
    run = subject.run
    if run is not None and run.target.device != "auto":
        return "cpu" if run.target.device == "cpu" else "cuda"
    if here is not None and (run is None or run.target.engine == "vllm"):
        return "cpu" if here.for_cpus else "cuda"
    return "cuda" if gpu or run is None else "cpu"


def _environment(engine: Engine, subject: Subject) -> Iterator[Check]:
    """Only of an engine that would run here: another's packages are not known."""
    if engine.present or subject.run is not None:
        python = subject.run.target.python if subject.run else None
        yield environment.check(environment.look(python), python or "here")


def _memory(engine: Engine, subject: Subject, found: tuple[machine.Gpu, ...]) -> Check:
    run = subject.run
    weights = _weights(engine, subject)
    if engine.device == "cpu":
        return resources.check_memory(weights, machine.memory_available(), needed=run is not None)
    one = run is not None and run.target.engine == "transformers"
    ranks = 1 if one else run.target.tensor_parallel if run else None
    asked = run.target.device if run is not None and one else "auto"
    instead = None if asked == "auto" else f"target.device = {asked!r}: set it to auto, which takes the CPU here"
    return resources.check_gpus(weights, found, ranks, needed=run is not None, instead=instead)


def _weights(engine: Engine, subject: Subject) -> sizes.Weights:
    """What the weights take once loaded: as stored, or on a CPU in the compute type, where they are not quantised."""
    anatomy, run = subject.anatomy, subject.run
    count = sizes.count_parameters(subject.text, anatomy)
    if engine.device == "cpu" and count is not None and not subject.quant:
        asked = run.target.dtype if run else "auto"
        kind = "float32" if asked == "auto" else asked
        return sizes.Weights(count.total * sizes.BYTES[kind], f"about, in {kind}")
    if anatomy.weights_bytes is not None:
        return sizes.Weights(anatomy.weights_bytes, anatomy.evidence["weights_bytes"])
    about = None if count is None else sizes.weights_bytes(count, subject.quant, itemsize=2)
    return sizes.Weights(about, "about, by the sizes in its configuration, without towers around it")
