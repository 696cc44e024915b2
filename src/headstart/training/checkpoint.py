"""Checkpoints of a training in progress: all that the next step depends on, written whole or not at all.

They hold whole tensors, so a training continues on another number of processes than it was interrupted on.
"""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from pickle import UnpicklingError
from typing import Annotated, Any

import torch
from pydantic import Field, TypeAdapter
from torch import Tensor

from headstart import files
from headstart.drafts.checkpoint import load_tensors, save_tensors
from headstart.errors import UserError
from headstart.training.average import PREFIX

BEST = "best.safetensors"  # beside the checkpoints: the draft with the best acceptance length so far
_WEIGHTS, _OPTIMIZER, _STATE = "draft.safetensors", "optimizer.pt", "state.json"
_DAMAGED = (
    *(UserError, OSError, EOFError, UnpicklingError),
    *(ValueError, LookupError, TypeError, AttributeError, RuntimeError),
)
_Count = Annotated[int, Field(ge=0)]


@dataclass
class Progress:
    """Where a training stands. `step`: optimiser steps done; `curves`: one record per step or validation, oldest first."""

    step: _Count = 0
    epoch: _Count = 0
    batch: _Count = 0
    best_tau: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    best_step: Annotated[int, Field(ge=-1)] = -1
    curves: list[dict[str, Any]] = field(default_factory=list)


_PROGRESS = TypeAdapter(Progress)


@dataclass(frozen=True)
class Snapshot:
    """weights: whole tensors by name, averaged ones as `ema.NAME`. optimizer: state dictionary with whole tensors."""

    weights: dict[str, Tensor]
    optimizer: dict[str, Any]
    progress: Progress


def save(folder: Path, snapshot: Snapshot, keep: int) -> None:
    """Write `step-NNNNNN`, then drop all but the newest `keep`. A kill at any moment leaves the older ones valid."""
    final = folder / f"step-{snapshot.progress.step:06d}"
    work = folder / f".{final.name}.tmp"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    try:
        _write(work, snapshot, folder.parent / BEST)
    except BaseException:  # a full disk, say
        shutil.rmtree(work, ignore_errors=True)
        raise
    shutil.rmtree(final, ignore_errors=True)
    work.rename(final)
    files.sync_folder(folder)
    for old in steps(folder)[:-keep]:
        shutil.rmtree(old)


def load(folder: Path, fits: Callable[[Snapshot], bool]) -> Snapshot | None:
    """The newest checkpoint that is whole and `fits` the training, its best draft put back in place; None without one."""
    for found in reversed(steps(folder)):
        snapshot = _read(found)
        if snapshot is None or not fits(snapshot):
            shutil.rmtree(found)  # damaged, by a power cut say: the one before it is as good
            continue
        if (found / BEST).exists():
            files.copy(found / BEST, folder.parent / BEST)
        return snapshot
    return None


def layout(tensors: Mapping[str, Tensor]) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """What two sets of weights must share for one to stand for the other."""
    return {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}


def _write(work: Path, snapshot: Snapshot, best: Path) -> None:
    save_tensors(work / _WEIGHTS, snapshot.weights)
    buffer = io.BytesIO()  # written through `files`, so that a full disk is told as one
    torch.save(snapshot.optimizer, buffer)
    files.write_bytes(work / _OPTIMIZER, buffer.getvalue())
    if best.exists():
        files.copy(best, work / BEST)
    files.write_json(work / _STATE, asdict(snapshot.progress))


def _read(found: Path) -> Snapshot | None:
    """A checkpoint; None when it is damaged."""
    try:
        weights = load_tensors(found / _WEIGHTS)
        optimizer = torch.load(found / _OPTIMIZER, weights_only=True, map_location="cpu")
        progress = _read_progress(found)
        best = load_tensors(found / BEST) if progress.best_step >= 0 or (found / BEST).exists() else None
    except _DAMAGED:
        return None
    plain = {name: tensor for name, tensor in weights.items() if not name.startswith(PREFIX)}
    if best is not None and layout(best) != layout(plain):
        return None
    return Snapshot(weights, optimizer, progress)


def _read_progress(found: Path) -> Progress:
    """Raises ValueError, TypeError or KeyError for what `save` cannot have written."""
    raw = files.read_json(found / _STATE)
    _PROGRESS.validate_json(json.dumps(raw), strict=True)
    progress = Progress(**raw)
    trained = [record["step"] for record in progress.curves if record["kind"] == "train"]
    if set(raw) != set(asdict(Progress())) or found.name != f"step-{progress.step:06d}":
        raise ValueError(f"{found / _STATE} is of another step, or not whole")
    if trained != list(range(1, progress.step + 1)) or progress.best_step > progress.step:
        raise ValueError(f"{found / _STATE} has curves of other steps")
    if not all(isinstance(record["tau"], float) for record in progress.curves if record["kind"] == "validation"):
        raise ValueError(f"{found / _STATE} has a validation without a result")
    return progress


def steps(folder: Path) -> list[Path]:
    """Whole checkpoints, oldest first."""
    return sorted(path for path in folder.glob("step-*") if (path / _STATE).exists())
