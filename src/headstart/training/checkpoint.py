"""Checkpoints of a training in progress: all that the next step depends on, written whole or not at all."""

from __future__ import annotations

import io
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch

from headstart import files
from headstart.drafts.checkpoint import fill, load_tensors, save_weights
from headstart.drafts.eagle3 import Eagle3
from headstart.errors import UserError
from headstart.training.optim import Optimizer

BEST = "best.safetensors"  # beside the checkpoints: the draft with the best acceptance length so far
_STATE = "state.json"


@dataclass
class Progress:
    """Where a training stands. `step`: optimiser steps done; `curves`: one record per step or validation, oldest first."""

    step: int = 0
    epoch: int = 0
    batch: int = 0
    best_tau: float = 0.0
    best_step: int = -1
    curves: list[dict[str, Any]] = field(default_factory=list)


def save(folder: Path, draft: Eagle3, optimizer: Optimizer, progress: Progress, keep: int) -> None:
    """Write `step-NNNNNN`, then drop all but the newest `keep`. A kill at any moment leaves the older ones valid."""
    final = folder / f"step-{progress.step:06d}"
    work = folder / f".{final.name}.tmp"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    save_weights(work / "draft.safetensors", draft)
    buffer = io.BytesIO()  # written through `files`, so that a full disk is told as one
    torch.save(optimizer.state_dict(), buffer)
    files.write_bytes(work / "optimizer.pt", buffer.getvalue())
    if (folder.parent / BEST).exists():
        shutil.copy(folder.parent / BEST, work / BEST)
    files.write_json(work / _STATE, asdict(progress))
    shutil.rmtree(final, ignore_errors=True)
    work.rename(final)
    files.sync_folder(folder)
    for old in steps(folder)[:-keep]:
        shutil.rmtree(old)


def restore(folder: Path, draft: Eagle3, optimizer: Optimizer) -> Progress:
    """Load the newest checkpoint that can be read into `draft` and `optimizer`; a fresh `Progress` when there is none."""
    for found in reversed(steps(folder)):
        try:
            weights = load_tensors(found / "draft.safetensors")
            state = torch.load(found / "optimizer.pt", weights_only=True, map_location="cpu")
            progress = Progress(**files.read_json(found / _STATE))
        except (UserError, OSError, ValueError, TypeError, RuntimeError, EOFError, UnpicklingError):
            shutil.rmtree(found)  # damaged, by a power cut say: the one before it is as good
            continue
        fill(draft, weights)
        optimizer.load_state_dict(state)
        if (found / BEST).exists():
            shutil.copy(found / BEST, folder.parent / BEST)
        return progress
    return Progress()


def steps(folder: Path) -> list[Path]:
    """Whole checkpoints, oldest first."""
    return sorted(path for path in folder.glob("step-*") if (path / _STATE).exists())
