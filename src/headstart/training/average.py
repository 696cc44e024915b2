"""An exponential average of the weights: often a better draft than the weights themselves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from headstart.training.distributed import like

PREFIX = "ema."


class Average:
    """average <- decay * average + (1 - decay) * weights, after every step; starts at the weights. Sharded as they are."""

    def __init__(self, module: nn.Module, decay: float) -> None:
        self.decay = decay
        self.parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self.values = {name: p.detach().clone() for name, p in self.parameters.items()}

    @torch.no_grad()
    def update(self) -> None:
        for name, parameter in self.parameters.items():
            self.values[name].lerp_(parameter.detach(), 1 - self.decay)

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """The module with averaged weights while this lasts."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for name, parameter in self.parameters.items():
            weights = parameter.detach().clone()
            parameter.copy_(self.values[name])
            self.values[name] = weights

    def state(self) -> dict[str, Tensor]:
        return {f"{PREFIX}{name}": value for name, value in self.values.items()}

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        for name, value in self.values.items():
            value.copy_(like(tensors[f"{PREFIX}{name}"], value))
