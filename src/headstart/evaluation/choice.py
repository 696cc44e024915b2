"""How tokens are chosen and drafts judged: greedily, or by speculative sampling."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class Drafted:
    """Drafted tokens as target ids, and the distributions they were drawn from, each float64 [V] (none when greedy)."""

    tokens: tuple[int, ...]
    distributions: tuple[Tensor, ...] = ()


class Choice(Protocol):
    """How tokens are chosen and drafts judged."""

    def pick(self, logits: Tensor) -> tuple[int, Tensor | None]:
        """A token from logits [n], and the distribution it was drawn from: float64 [n] on the CPU, None when greedy."""
        ...

    def verify(self, logits: Tensor, drafted: Drafted) -> tuple[int, int]:
        """Target logits [K+1, V] of the positions of the drafts and one more -> accepted drafts, the target's own
        next token."""
        ...


class Greedy:
    """Temperature 0: a draft is right when it is the target's first choice."""

    def pick(self, logits: Tensor) -> tuple[int, None]:
        return int(logits.argmax()), None

    def verify(self, logits: Tensor, drafted: Drafted) -> tuple[int, int]:
        wanted = logits.argmax(dim=-1).tolist()
        accepted = 0
        while accepted < len(drafted.tokens) and drafted.tokens[accepted] == wanted[accepted]:
            accepted += 1
        return accepted, wanted[accepted]


class Sampled:
    """Speculative sampling (Leviathan et al. 2023, Chen et al. 2023): what comes out has the target's own distribution.

    `seed` may be a string; equal seeds give equal answers.
    """

    def __init__(self, temperature: float, seed: int | str) -> None:
        if temperature <= 0:
            raise ValueError(f"temperature {temperature} must be above 0; use Greedy for 0")
        self.temperature = temperature
        self.random = random.Random(seed)

    def pick(self, logits: Tensor) -> tuple[int, Tensor]:
        distribution = self._distribution(logits)
        return draw(distribution, self.random.random()), distribution

    def verify(self, logits: Tensor, drafted: Drafted) -> tuple[int, int]:
        target = self._distribution(logits)
        for i, (token, proposal) in enumerate(zip(drafted.tokens, drafted.distributions, strict=True)):
            if self.random.random() >= acceptance_probability(target[i], proposal)[token]:
                return i, draw(residual(target[i], proposal), self.random.random())
        return len(drafted.tokens), draw(target[-1], self.random.random())

    def _distribution(self, logits: Tensor) -> Tensor:
        return (logits.cpu().double() / self.temperature).softmax(dim=-1)


def choice_of(temperature: float, seed: int | str) -> Choice:
    return Sampled(temperature, seed) if temperature > 0 else Greedy()


def acceptance_probability(p: Tensor, q: Tensor) -> Tensor:
    """min(1, p / q) for each token, given target and draft distributions [V]; 1 where the draft never goes."""
    return torch.where(q > 0, p / q, torch.ones_like(p)).clamp(max=1)


def residual(p: Tensor, q: Tensor) -> Tensor:
    """The distribution after a rejection: max(p - q, 0), normalised. [V] each.

    With p = q nothing is ever rejected; where rounding alone says otherwise, p itself is the limit.
    """
    left = (p - q).clamp(min=0)
    return left / left.sum() if left.sum() > 0 else p


def draw(distribution: Tensor, uniform: float) -> int:
    """The token whose share of the cumulated distribution [V] holds `uniform` in [0, 1); never one of probability 0."""
    cumulated = distribution.cumsum(dim=0)
    index = int(torch.searchsorted(cumulated, uniform * cumulated[-1], right=True))
    return min(index, int(distribution.nonzero()[-1]))
