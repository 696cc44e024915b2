"""What can be checked cheaply is checked before anything is written: what a verb would refuse once it is at work."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from headstart import artifact, processes
from headstart.config import Run
from headstart.data.reading import Reading
from headstart.data.templates import Template
from headstart.data.vocab import check_forced, pick_size
from headstart.doctor.machine import memory_available
from headstart.drafts import attention
from headstart.drafts.shape import DraftShape
from headstart.engines.base import Use
from headstart.engines.vllm import served
from headstart.engines.vllm.start import start_of
from headstart.engines.weights import parse_device, pick_device
from headstart.errors import UserError
from headstart.estimate.draft import parameters
from headstart.evaluation.prompts import check_lengths, check_names, load_sets
from headstart.events import size
from headstart.target.anatomy import Anatomy, inspect
from headstart.target.layers import check_boundaries
from headstart.target.source import resolve
from headstart.training.shape import shape_for
from headstart.training.telemetry import check_trackers


@dataclass(frozen=True)
class Subject:
    """What is checked: a run, and what its target's configuration says."""

    run: Run
    target: Anatomy

    @cached_property
    def folder(self) -> Path:
        return resolve(self.run.target.model, self.run.target.revision, weights=False)

    @cached_property
    def template(self) -> Template:
        return Template.load(self.folder, trust_remote_code=self.run.target.trust_remote_code)


Check = Callable[[Subject], object]


def check(run: Run, root: Path, verbs: Sequence[str]) -> None:
    """Compare the settings that these verbs depend on with the target's configuration and this machine; needs no weights.

    Raises:
        UserError: what `check_settings` or `check_machine` refuses, or a target that cannot be had.
    """
    subject = Subject(run, _target(run, root, verbs))
    check_settings(subject, verbs)
    check_machine(subject, verbs)


def check_settings(subject: Subject, verbs: Iterable[str]) -> None:
    """What holds on any machine; a device that is not named counts as the one of this machine.

    Raises:
        UserError: sources or prompt sets that do not exist, sequences longer than the target reads, aux layers or a draft
            vocabulary that it does not have, a draft whose heads do not fit.
    """
    _apply(_SETTINGS, subject, verbs)


def check_machine(subject: Subject, verbs: Iterable[str]) -> None:
    """What holds here.

    Raises:
        UserError: a device, an engine or a compiler that is not here, a tokenizer that cannot be loaded, prompts that cannot be
            read or leave no room for an answer.
    """
    _apply(_MACHINE, subject, verbs)


def draft_shape(subject: Subject) -> DraftShape:
    """The draft that these settings give. Raises UserError for one that the target cannot have."""
    return shape_for(subject.run.draft, subject.target, _boundaries(subject), _vocabulary(subject))


def _apply(checks: Mapping[str, tuple[Check, ...]], subject: Subject, verbs: Iterable[str]) -> None:
    for one in dict.fromkeys(one for verb in verbs for one in checks[verb]):
        one(subject)


def _target(run: Run, root: Path, verbs: Sequence[str]) -> Anatomy:
    """A training alone reads the states, wherever they came from: the target need not be on its machine."""
    if list(verbs) == ["train"]:
        return Anatomy(**artifact.open_artifact(root / "states", "states").facts["target"])
    return inspect(resolve(run.target.model, run.target.revision, weights=False))


# --- settings ---


def _sources(subject: Subject) -> None:
    Reading(subject.run.data)


def _length(subject: Subject) -> None:
    asked, limit = subject.run.data.max_length, subject.target.required("max_positions")
    if asked > limit:
        raise UserError(
            f"data.max_length = {asked} is more than the target can read",
            looked_for=f"at most {limit} ({subject.target.evidence['max_positions']})",
            do=f"set data.max_length to {limit} or less",
        )


def _parallel(subject: Subject) -> None:
    if subject.run.target.engine != "vllm":
        return
    heads, parts = subject.target.required("num_heads"), subject.run.target.tensor_parallel
    if heads % parts:
        raise UserError(
            f"target.tensor_parallel = {parts} does not divide the target's {heads} attention heads",
            looked_for="a number that divides them, since each part of the weights holds whole heads",
        )


def _vocabulary(subject: Subject) -> int:
    return pick_size(subject.run.vocab.size, subject.target.required("vocab_size"))


def _boundaries(subject: Subject) -> tuple[int, ...]:
    return check_boundaries(subject.run.capture.aux_layers, subject.target.required("num_layers"))


def _attention(subject: Subject) -> None:
    named = subject.run.target.device
    device = pick_device(named) if named == "auto" else parse_device(named)
    attention.backend(device, name=subject.run.train.attention_backend)


def _prompt_sets(subject: Subject) -> None:
    prompts, data = subject.run.evaluate.prompts, subject.run.data
    check_names(prompts)
    if trained := sorted({*prompts} & {*data.sources} - {*data.decontaminate}):
        raise UserError(
            f"{trained[0]} is in data.sources and in evaluate.prompts: a draft looks better than it is on what it was trained on",
            do="add it to data.decontaminate, which keeps its prompts out of training, or measure on others",
        )


# --- this machine ---


def _template(subject: Subject) -> Template:
    return subject.template


def _forced(subject: Subject) -> None:
    template, total = subject.template, subject.target.required("vocab_size")
    check_forced({*template.end_ids, *template.structure_ids}, _vocabulary(subject), total)


def _prompts(subject: Subject) -> None:
    settings = subject.run.evaluate
    sets = load_sets(settings.prompts, settings.max_prompts, subject.template)
    check_lengths(sets, subject.target.required("max_positions"), settings)


def _answers(subject: Subject) -> None:
    if subject.run.data.answers == "regenerate":
        _opens(subject, Use(subject.run.data.max_length, subject.run.regenerate.batch_size))


def _states(subject: Subject) -> None:
    _opens(subject, Use(1, boundaries=_boundaries(subject)))  # how long the samples are is not known yet


def _opens(subject: Subject, use: Use) -> None:
    """As far as can be told without weights."""
    if subject.run.target.engine == "vllm":
        start_of(subject.folder, subject.run.target, use, subject.target)
    else:
        pick_device(subject.run.target.device)


def _trackers(subject: Subject) -> None:
    check_trackers(subject.run.train.trackers)


def _compiler(subject: Subject) -> None:
    """torch.compile makes C++ for a CPU, by CXX or g++ (torch/_inductor/cpp_builder.py)."""
    kind, compiler = pick_device(subject.run.target.device).type, os.environ.get("CXX") or "g++"
    if subject.run.train.compile and kind == "cpu" and shutil.which(compiler) is None:
        raise UserError(
            "train.compile = true needs a C++ compiler on a CPU",
            looked_for=f"{compiler}, in PATH",
            do="install it, set CXX, or leave train.compile out",
        )


def _draft_fits(subject: Subject) -> None:
    """Its float32 weights and their gradients, without which no training begins; what optimiser and step take comes on top."""
    count, here = parameters(draft_shape(subject)).total, _memory(pick_device(subject.run.target.device))
    if 8 * count > here * processes.count():
        raise UserError(
            f"a draft of {count:,} parameters takes more than {size(8 * count)} in training, and there are {size(here)} here",
            do="lower draft.num_layers, draft.num_heads, draft.head_dim, draft.intermediate_size or vocab.size",
        )


def _memory(device: torch.device) -> float:
    """Bytes of a device; of the machine for a CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return memory_available() or math.inf


def _serves(subject: Subject) -> None:
    if subject.run.evaluate.engine == "vllm":
        served.way_of(subject.run.target)


_SETTINGS: dict[str, tuple[Check, ...]] = {
    "prepare": (_sources, _length),
    "regenerate": (_length, _parallel),
    "vocab": (_vocabulary,),
    "capture": (_boundaries, _parallel),
    "train": (_attention, draft_shape),
    "evaluate": (_parallel, _prompt_sets),
    "export": (),
}
_MACHINE: dict[str, tuple[Check, ...]] = {
    "prepare": (_template,),
    "regenerate": (_answers, _template),
    "vocab": (_forced,),
    "capture": (_states,),
    "train": (_trackers, _compiler, _draft_fits),
    "evaluate": (_states, _serves, _prompts),
    "export": (),
}
