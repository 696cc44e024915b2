"""What can be checked cheaply is checked before anything is written: what a verb would refuse once it is at work."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from headstart import artifact
from headstart.config import Run
from headstart.data.reading import Reading
from headstart.data.templates import Template
from headstart.data.vocab import pick_size
from headstart.drafts import attention
from headstart.drafts.shape import DraftShape
from headstart.engines.base import Use
from headstart.engines.vllm import served
from headstart.engines.vllm.start import start_of
from headstart.engines.weights import parse_device, pick_device
from headstart.errors import UserError
from headstart.evaluation.prompts import check_lengths, check_names, load_sets
from headstart.evaluation.ways import check_temperatures
from headstart.target.anatomy import Anatomy, inspect
from headstart.target.layers import check_boundaries
from headstart.target.source import resolve
from headstart.training.shape import shape_for

Check = Callable[[Run, Anatomy], object]


def check(run: Run, root: Path, verbs: Sequence[str]) -> None:
    """Compare the settings that these verbs depend on with the target's configuration and this machine; needs no weights.

    Raises:
        UserError: what `check_settings` or `check_machine` refuses, or a target that cannot be had.
    """
    target = _target(run, root, verbs)
    check_settings(run, target, verbs)
    check_machine(run, target, verbs)


def check_settings(run: Run, target: Anatomy, verbs: Iterable[str]) -> None:
    """What holds on any machine.

    Raises:
        UserError: sources or prompt sets that do not exist, sequences longer than the target reads, aux layers or a draft
            vocabulary that it does not have, a draft whose heads do not fit, temperatures that cannot be measured.
    """
    _apply(_SETTINGS, run, target, verbs)


def check_machine(run: Run, target: Anatomy, verbs: Iterable[str]) -> None:
    """What holds here.

    Raises:
        UserError: a device, an engine or a compiler that is not here, a tokenizer that cannot be loaded, prompts that cannot be
            read or leave no room for an answer.
    """
    _apply(_MACHINE, run, target, verbs)


def draft_shape(run: Run, target: Anatomy) -> DraftShape:
    """The draft that these settings give. Raises UserError for one that the target cannot have."""
    return shape_for(run.draft, target, _boundaries(run, target), _vocabulary(run, target))


def _apply(checks: Mapping[str, tuple[Check, ...]], run: Run, target: Anatomy, verbs: Iterable[str]) -> None:
    for one in dict.fromkeys(one for verb in verbs for one in checks[verb]):
        one(run, target)


def _target(run: Run, root: Path, verbs: Sequence[str]) -> Anatomy:
    """A training alone reads the states, wherever they came from: the target need not be on its machine."""
    if list(verbs) == ["train"]:
        return Anatomy(**artifact.open_artifact(root / "states", "states").facts["target"])
    return inspect(resolve(run.target.model, run.target.revision, weights=False))


# --- settings ---


def _sources(run: Run, target: Anatomy) -> None:
    del target
    Reading(run.data)


def _length(run: Run, target: Anatomy) -> None:
    limit = target.required("max_positions")
    if run.data.max_length > limit:
        raise UserError(
            f"data.max_length = {run.data.max_length} is more than the target can read",
            looked_for=f"at most {limit} ({target.evidence['max_positions']})",
            do=f"set data.max_length to {limit} or less",
        )


def _parallel(run: Run, target: Anatomy) -> None:
    heads, parts = target.required("num_heads"), run.target.tensor_parallel
    if run.target.engine == "vllm" and heads % parts:
        raise UserError(
            f"target.tensor_parallel = {parts} does not divide the target's {heads} attention heads",
            looked_for="a number that divides them, since each part of the weights holds whole heads",
        )


def _vocabulary(run: Run, target: Anatomy) -> int:
    return pick_size(run.vocab.size, target.required("vocab_size"))


def _boundaries(run: Run, target: Anatomy) -> tuple[int, ...]:
    return check_boundaries(run.capture.aux_layers, target.required("num_layers"))


def _attention(run: Run, target: Anatomy) -> None:
    del target
    named = run.target.device
    device = pick_device(named) if named == "auto" else parse_device(named)
    attention.backend(device, name=run.train.attention_backend)


def _evaluation(run: Run, target: Anatomy) -> None:
    del target
    check_names(run.evaluate.prompts)
    check_temperatures(run)


# --- this machine ---


def _template(run: Run, target: Anatomy) -> Template:
    del target
    folder = resolve(run.target.model, run.target.revision, weights=False)
    return Template.load(folder, trust_remote_code=run.target.trust_remote_code)


def _prompts(run: Run, target: Anatomy) -> None:
    sets = load_sets(run.evaluate.prompts, run.evaluate.max_prompts, _template(run, target))
    check_lengths(sets, target.required("max_positions"), run.evaluate)


def _answers(run: Run, target: Anatomy) -> None:
    if run.data.answers == "regenerate":
        _opens(run, target, Use(run.data.max_length, run.regenerate.batch_size))


def _states(run: Run, target: Anatomy) -> None:
    _opens(run, target, Use(1, boundaries=_boundaries(run, target)))  # how long the samples are is not known yet


def _opens(run: Run, target: Anatomy, use: Use) -> None:
    """As far as can be told without weights."""
    if run.target.engine == "vllm":
        start_of(resolve(run.target.model, run.target.revision, weights=False), run.target, use, target)
    else:
        pick_device(run.target.device)


def _trains(run: Run, target: Anatomy) -> None:
    """torch.compile makes C++ for a CPU, by CXX or g++ (torch/_inductor/cpp_builder.py)."""
    del target
    kind, compiler = pick_device(run.target.device).type, os.environ.get("CXX") or "g++"
    if run.train.compile and kind == "cpu" and shutil.which(compiler) is None:
        raise UserError(
            "train.compile = true needs a C++ compiler on a CPU",
            looked_for=f"{compiler}, in PATH",
            do="install it, set CXX, or leave train.compile out",
        )


def _serves(run: Run, target: Anatomy) -> None:
    del target
    if run.evaluate.engine == "vllm":
        served.way_of(run.target)


_SETTINGS: dict[str, tuple[Check, ...]] = {
    "prepare": (_sources, _length),
    "regenerate": (_length, _parallel),
    "vocab": (_vocabulary,),
    "capture": (_boundaries, _parallel),
    "train": (_attention, draft_shape),
    "evaluate": (_parallel, _evaluation),
    "export": (),
}
_MACHINE: dict[str, tuple[Check, ...]] = {
    "prepare": (_template,),
    "regenerate": (_answers, _template),
    "vocab": (_template,),
    "capture": (_states,),
    "train": (_trains,),
    "evaluate": (_states, _serves, _prompts),
    "export": (),
}
