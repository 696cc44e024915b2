"""Checkpoints of a training in progress: all that the next step depends on, written whole or not at all.

They hold whole tensors, so a training continues on another number of processes than it was interrupted on.
"""

from __future__ import annotations

import io
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor

from headstart import files
from headstart.drafts.checkpoint import load_tensors, save_tensors
from headstart.errors import UserError

BEST = "best.safetensors"  # beside the checkpoints: the draft with the best acceptance length so far
_WEIGHTS, _OPTIMIZER, _STATE = "draft.safetensors", "optimizer.pt", "state.json"


@dataclass
class Progress:
    """Where a training stands. `step`: optimiser steps done; `curves`: one record per step or validation, oldest first."""

    step: int = 0
    epoch: int = 0
    batch: int = 0
    best_tau: float = 0.0
    best_step: int = -1
    curves: list[dict[str, Any]] = field(default_factory=list)


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


def _write(work: Path, snapshot: Snapshot, best: Path) -> None:
    save_tensors(work / _WEIGHTS, snapshot.weights)
    buffer = io.BytesIO()  # written through `files`, so that a full disk is told as one
    torch.save(snapshot.optimizer, buffer)
    files.write_bytes(work / _OPTIMIZER, buffer.getvalue())
    if best.exists():
        shutil.copy(best, work / BEST)
    files.write_json(work / _STATE, asdict(snapshot.progress))


def load(folder: Path) -> Snapshot | None:
    """The newest checkpoint that can be read, its best draft put back in place; None when there is none."""
    for found in reversed(steps(folder)):
        try:
            weights = load_tensors(found / _WEIGHTS)
            optimizer = torch.load(found / _OPTIMIZER, weights_only=True, map_location="cpu")
            progress = Progress(**files.read_json(found / _STATE))
        except (UserError, OSError, ValueError, TypeError, RuntimeError, EOFError, UnpicklingError):
            shutil.rmtree(found)  # damaged, by a power cut say: the one before it is as good
            continue
        if (found / BEST).exists():
            shutil.copy(found / BEST, folder.parent / BEST)
        return Snapshot(weights, optimizer, progress)
    return None


def steps(folder: Path) -> list[Path]:
    """Whole checkpoints, oldest first."""
    return sorted(path for path in folder.glob("step-*") if (path / _STATE).exists())
