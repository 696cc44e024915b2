"""What to change where a run does not fit, each with what it would need then."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from headstart.doctor.sizes import BYTES
from headstart.estimate.estimate import WORKING, Stage, Subject, disk_needed, estimate
from headstart.estimate.hardware import Hardware
from headstart.events import size
from headstart.target.layers import suggest_boundaries

USABLE = 0.9  # of a device's memory, as vLLM's gpu_memory_utilization


def advice(subject: Subject, machine: Hardware, stages: list[Stage]) -> list[str]:
    """One line for each change that brings a stage that does not fit closer; none where all fit."""
    lines = []
    needed, free = disk_needed(stages), machine.disk
    if free is not None and needed > free:
        lines.append(f"disk: {size(round(needed))} needed, {size(round(free))} free")
        lines += [f"  {line}" for line in _smaller(subject, machine, free)]
    for stage in stages:
        if stage.memory > USABLE * machine.memory:
            lines.append(
                f"{stage.verb}: {size(round(stage.memory))} of memory on a device, {size(round(machine.memory))} there"
            )
            lines.append(f"  {_lighter(stage, subject, machine)}")
    return lines


def _smaller(subject: Subject, machine: Hardware, free: float) -> Iterator[str]:
    """Changes of the states, which are nearly all of the disk."""
    layers, aux = subject.shape, subject.shape.aux_layers
    for dtype in ("bfloat16", "float8"):
        if subject.itemsize > BYTES[dtype]:
            yield _would(f"capture.dtype = {dtype}", _with(subject, "capture", dtype=dtype), machine, free)
    if len(aux) > 2 and subject.anatomy.num_layers:
        fewer = suggest_boundaries(subject.anatomy.num_layers)[1:]
        shape = replace(layers, aux_layers=fewer)
        yield _would(f"capture.aux_layers = {list(fewer)}", replace(subject, shape=shape), machine, free)
    fixed = disk_needed(estimate(_scaled(subject, 0.0), machine))
    whole = disk_needed(estimate(subject, machine))
    if free > fixed and whole > fixed:
        share = 0.95 * (free - fixed) / (whole - fixed)
        number = int(subject.work.conversations * share)
        yield _would(f"data.max_conversations = {number}", _scaled(subject, share), machine, free)


def _would(what: str, changed: Subject, machine: Hardware, free: float) -> str:
    needed = disk_needed(estimate(changed, machine))
    return f"{what}: {size(round(needed))}{'' if needed <= free else ', still too much alone'}"


def _lighter(stage: Stage, subject: Subject, machine: Hardware) -> str:
    if stage.verb == "train":
        return "train.micro_tokens and train.recompute make less of what is kept for the backward pass, with the same result"
    count = 1
    while subject.weights / count + WORKING > USABLE * machine.memory and count < 1024:
        count *= 2
    enough = count <= max(machine.gpus, 1)
    return f"target.tensor_parallel = {count}" + (
        "" if enough else f", of the {machine.gpus} GPUs there; or a quantised target"
    )


def _with(subject: Subject, section: str, **values: Any) -> Subject:
    part = getattr(subject.run, section).model_copy(update=values)
    return replace(subject, run=subject.run.model_copy(update={section: part}))


def _scaled(subject: Subject, share: float) -> Subject:
    work = subject.work
    parts = {name: round(getattr(work, name) * share) for name in ("conversations", "prompt_tokens", "answer_tokens")}
    return replace(subject, work=replace(work, **parts))
