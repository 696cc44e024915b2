"""What speculation costs and gains: measured step times, and the speed-up they promise.

S = tau / (t_v(K+1) / t_v(1) + K * c), with t_v(w) the time of a target step over w tokens and c = draft step / plain
step. The modelled number leaves out what the decoder does around its steps; the measured one holds everything.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np


@dataclass
class Timing:
    """So many steps, and the seconds they took together."""

    steps: int = 0
    seconds: float = 0.0

    def add(self, steps: int, seconds: float) -> None:
        self.steps += steps
        self.seconds += seconds

    @property
    def mean(self) -> float:
        """Seconds of one step; nan when there was none."""
        return self.seconds / self.steps if self.steps else float("nan")


@dataclass
class Costs:
    """Times of decoding after the prefill: `plain` target steps of one token, `verify` target steps over K + 1
    tokens, `draft` steps (K per verify step; the first of them also reads the tokens confirmed before), and `whole`
    answers with all around."""

    plain: Timing = field(default_factory=Timing)
    verify: Timing = field(default_factory=Timing)
    draft: Timing = field(default_factory=Timing)
    whole: Timing = field(default_factory=Timing)

    def as_json(self) -> dict[str, list[float]]:
        return {
            item.name: [value.steps, value.seconds] for item in fields(self) for value in [getattr(self, item.name)]
        }

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> Costs:
        return cls(**{name: Timing(*value) for name, value in raw.items()})


def total(costs: Iterable[Costs]) -> Costs:
    """The sum over answers; `whole.steps` counts tokens decoded after the prefill."""
    result = Costs()
    for cost in costs:
        for item in fields(Costs):
            part: Timing = getattr(cost, item.name)
            getattr(result, item.name).add(part.steps, part.seconds)
    return result


class Stopwatch:
    """Adds the time of a block to a `Timing`; `wait` makes a device finish its queue before the clock is read."""

    def __init__(self, wait: Callable[[], None]) -> None:
        self.wait = wait

    @contextmanager
    def measure(self, timing: Timing, steps: int = 1) -> Iterator[None]:
        self.wait()
        started = time.perf_counter()
        yield
        self.wait()
        timing.add(steps, time.perf_counter() - started)


def expected_tau(conditional: Sequence[float]) -> float:
    """E[tau] = 1 + sum_k prod_{i<=k} alpha_i, from conditional per-position acceptances."""
    return 1 + float(np.cumprod(np.asarray(conditional, dtype=np.float64)).sum())


def modelled_speedup(tau: float, verify_ratio: float, draft_tokens: int, draft_ratio: float) -> float:
    """S = tau / (verify_ratio + K * draft_ratio); both ratios are to a plain step of the target."""
    return tau / (verify_ratio + draft_tokens * draft_ratio)


def compare(plain: Costs, speculative: Costs, tau: float, draft_tokens: int) -> dict[str, float | None]:
    """Measured costs of speculation against plain decoding of the same prompts, modelled and measured speed-up.

    The measured speed-up compares seconds per token, since sampled answers differ in length. None where nothing was
    timed.
    """
    step = plain.plain.mean
    verify_ratio, draft_ratio = speculative.verify.mean / step, speculative.draft.mean / step
    values = {
        "plain_step_seconds": step,
        "verify_step_seconds": speculative.verify.mean,
        "draft_step_seconds": speculative.draft.mean,
        "verify_ratio": verify_ratio,
        "draft_ratio": draft_ratio,
        "modelled_speedup": modelled_speedup(tau, verify_ratio, draft_tokens, draft_ratio),
        "measured_speedup": plain.whole.mean / speculative.whole.mean,
    }
    return {name: float(value) if np.isfinite(value) else None for name, value in values.items()}
