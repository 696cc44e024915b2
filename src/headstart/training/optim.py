"""The optimiser and its learning rate."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from headstart.config import Train
from headstart.training.distributed import like

# Embedding-like and head matrices are left to AdamW: Muon is made for matrices between hidden states.
NOT_MUON = ("lm_head.weight",)
_ADAMW_STATE, _MUON_STATE = {"step", "exp_avg", "exp_avg_sq"}, {"momentum_buffer"}  # of each parameter


class Optimizer:
    """AdamW for all parameters, or Muon for the hidden matrices and AdamW for the rest (`train.optimizer`)."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], settings: Train) -> None:
        hidden = {name for name, p in parameters.items() if p.ndim == 2 and name not in NOT_MUON}
        chosen = hidden if settings.optimizer == "muon" else set()
        self._parts = [_adamw([p for name, p in parameters.items() if name not in chosen], settings)]
        if chosen:
            self._parts.append(_muon([p for name, p in parameters.items() if name in chosen], settings))
        self._peaks = [[group["lr"] for group in part.param_groups] for part in self._parts]

    def zero_grad(self) -> None:
        for part in self._parts:
            part.zero_grad(set_to_none=True)

    def step(self, fraction: float) -> None:
        """One step at `fraction` of the peak rates."""
        for part, peaks in zip(self._parts, self._peaks, strict=True):
            for group, peak in zip(part.param_groups, peaks, strict=True):
                group["lr"] = peak * fraction
            part.step()

    def state_dict(self) -> dict[str, Any]:
        return {"parts": [part.state_dict() for part in self._parts]}

    def fits(self, state: Any) -> bool:
        """Whether `load_whole` can continue from `state`."""
        saved = state.get("parts") if isinstance(state, dict) else None
        if not isinstance(saved, list) or len(saved) != len(self._parts):
            return False
        return all(_part_fits(part, values) for part, values in zip(self._parts, saved, strict=True))

    def load_whole(self, state: dict[str, Any]) -> None:
        """Continue from a state dictionary of whole tensors, laid out anew as the parameters are."""
        for part, saved in zip(self._parts, state["parts"], strict=True):
            parameters = _parameters(part)
            states = {index: _laid_out(values, parameters[index]) for index, values in saved["state"].items()}
            part.load_state_dict({**part.state_dict(), "state": states})  # rates and the like are those of the settings


def _parameters(part: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [p for group in part.param_groups for p in group["params"]]


def _part_fits(part: torch.optim.Optimizer, saved: Any) -> bool:
    """Whether `saved` has the state of every parameter of `part`, in its shape."""
    parameters = _parameters(part)
    states = saved.get("state") if isinstance(saved, dict) else None
    if not isinstance(states, dict) or set(states) != set(range(len(parameters))):
        return False
    names = _MUON_STATE if isinstance(part, torch.optim.Muon) else _ADAMW_STATE
    return all(_state_fits(states[index], p, names) for index, p in enumerate(parameters))


def _state_fits(values: Any, parameter: nn.Parameter, names: set[str]) -> bool:
    if not isinstance(values, dict) or set(values) != names:
        return False
    shapes = {name: torch.Size() if name == "step" else parameter.shape for name in names}
    return all(isinstance(value, Tensor) and value.shape == shapes[name] for name, value in values.items())


def _laid_out(values: dict[str, Any], parameter: nn.Parameter) -> dict[str, Any]:
    def place(value: Any) -> Any:
        return like(value, parameter) if isinstance(value, Tensor) and value.shape == parameter.shape else value

    return {name: place(value) for name, value in values.items()}


def _adamw(parameters: list[nn.Parameter], settings: Train) -> torch.optim.Optimizer:
    """Weight decay on matrices only."""
    matrices, vectors = ([p for p in parameters if (p.ndim > 1) is wide] for wide in (True, False))
    groups = [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=settings.learning_rate, betas=settings.betas)


def _muon(parameters: list[nn.Parameter], settings: Train) -> torch.optim.Optimizer:
    """torch's own, with the update scaled by sqrt(max(1, rows / columns)) as in Keller Jordan's original."""
    rate, decay = settings.muon_learning_rate, settings.weight_decay
    return torch.optim.Muon(parameters, lr=rate, weight_decay=decay, momentum=0.95, adjust_lr_fn="original")


def schedule(step: int, total: int, settings: Train) -> float:
    """The share of the peak rate at 0-based `step`: a linear rise, then down to min_lr_fraction along the chosen curve."""
    warmup = round(settings.warmup_fraction * total)
    if step < warmup:
        return (step + 1) / warmup
    done = (step - warmup) / max(total - warmup, 1)
    curve = {"constant": 1.0, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}[settings.schedule]
    low = 1.0 if settings.schedule == "constant" else settings.min_lr_fraction
    return low + (1 - low) * curve
