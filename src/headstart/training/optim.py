"""The optimiser and its learning rate."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn

from headstart.config import Train


def make_optimizer(parameters: Iterable[nn.Parameter], settings: Train) -> torch.optim.AdamW:
    """AdamW; weight decay on matrices only."""
    matrices, vectors = [], []
    for parameter in parameters:
        (matrices if parameter.ndim > 1 else vectors).append(parameter)
    groups = [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=settings.learning_rate, betas=settings.betas)


def learning_rate(step: int, total: int, settings: Train) -> float:
    """The rate of 0-based `step`: a linear rise, then down to min_lr_fraction of the peak along the chosen curve."""
    warmup = round(settings.warmup_fraction * total)
    if step < warmup:
        return settings.learning_rate * (step + 1) / warmup
    done = (step - warmup) / max(total - warmup, 1)
    curve = {"constant": 1.0, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}[settings.schedule]
    low = 1.0 if settings.schedule == "constant" else settings.min_lr_fraction
    return settings.learning_rate * (low + (1 - low) * curve)
