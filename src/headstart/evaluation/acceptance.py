"""Acceptance metrics, one definition for offline measurement, the reference decoder and serving engines.

Acceptance length tau is the mean number of tokens emitted per verify step of the target, its own token included;
`accepted` per step is tau - 1. The token that follows the prompt comes from the prefill: it is no verify step.

End of an answer. A step never emits past the end-of-turn token or the last allowed token, so it emits `min(run + 1,
remaining)` tokens, where `run` counts the accepted drafts before the first miss and `remaining` the tokens that the
answer still has. The last token that a step emits counts as the target's own, also when a draft agreed with it: so
tau = 1 + mean(accepted) = 1 + sum of the unconditional per-position acceptances, always. A step that the end cut
inside its accepted run has `drafted == accepted`: positions after its last token got no verdict and enter no
conditional acceptance.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

RESAMPLES = 2000
LEVEL = 0.95


@dataclass(frozen=True)
class AcceptanceLog:
    """The verify steps of one prompt (or sample). accepted, drafted: int64 [steps]."""

    accepted: np.ndarray
    drafted: np.ndarray

    def __post_init__(self) -> None:
        if self.accepted.shape != self.drafted.shape or self.accepted.ndim != 1:
            raise ValueError(f"accepted {self.accepted.shape} and drafted {self.drafted.shape} must be equal, one axis")
        if (self.accepted < 0).any() or (self.accepted > self.drafted).any():
            raise ValueError("accepted must lie in 0..drafted")

    @classmethod
    def of(cls, accepted: ArrayLike, drafted: ArrayLike) -> AcceptanceLog:
        return cls(np.asarray(accepted, dtype=np.int64), np.asarray(drafted, dtype=np.int64))

    @property
    def steps(self) -> int:
        return len(self.accepted)

    @property
    def emitted(self) -> int:
        """Tokens that came from verify steps."""
        return int(self.accepted.sum()) + self.steps


@dataclass(frozen=True)
class Acceptance:
    """What is reported of many prompts.

    interval: 95 % bootstrap percentile interval of tau over prompts, None when fewer than two prompts have steps.
    conditional[i]: share of accepts at draft position i among the steps that accepted all before it and have a
    verdict on it (nan when there is none). unconditional[i]: share of all steps that accepted positions 0..i.
    """

    tau: float
    interval: tuple[float, float] | None
    conditional: tuple[float, ...]
    unconditional: tuple[float, ...]
    steps: int
    emitted: int
    prompts: int

    @property
    def accepted(self) -> float:
        """Accepted drafts per verify step."""
        return self.tau - 1

    def as_json(self) -> dict[str, Any]:
        """Plain values; nan becomes None."""
        return {
            "tau": self.tau,
            "interval": list(self.interval) if self.interval else None,
            "accepted_per_step": self.accepted,
            "per_position": {
                "conditional": [None if math.isnan(value) else value for value in self.conditional],
                "unconditional": list(self.unconditional),
            },
            "steps": self.steps,
            "emitted": self.emitted,
        }


def summarise(logs: Sequence[AcceptanceLog], draft_tokens: int, *, seed: int = 0) -> Acceptance:
    """Metrics over all verify steps of `logs`, one log per prompt; `draft_tokens` is K.

    Raises:
        ValueError: no log has a step, or a step drafted more than K.
    """
    accepted = np.concatenate([log.accepted for log in logs]) if logs else np.zeros(0, np.int64)
    drafted = np.concatenate([log.drafted for log in logs]) if logs else np.zeros(0, np.int64)
    if not len(accepted):
        raise ValueError("no verify step to measure")
    if drafted.max() > draft_tokens:
        raise ValueError(f"a step drafted {drafted.max()} tokens, more than {draft_tokens}")
    conditional, unconditional = per_position(accepted, drafted, draft_tokens)
    return Acceptance(
        tau=1 + float(accepted.mean()),
        interval=bootstrap_interval([log.emitted for log in logs], [log.steps for log in logs], seed=seed),
        conditional=tuple(conditional.tolist()),
        unconditional=tuple(unconditional.tolist()),
        steps=len(accepted),
        emitted=int(accepted.sum()) + len(accepted),
        prompts=len(logs),
    )


def per_position(accepted: np.ndarray, drafted: np.ndarray, draft_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Conditional and unconditional acceptance, each float64 [K], of steps given by int arrays [steps] (see
    `Acceptance`)."""
    positions = np.arange(draft_tokens)
    passed = accepted[:, None] > positions
    judged = (accepted[:, None] >= positions) & (drafted[:, None] > positions)
    counts, verdicts = passed.sum(axis=0), judged.sum(axis=0)
    conditional = np.divide(counts, verdicts, out=np.full(draft_tokens, np.nan), where=verdicts > 0)
    return conditional, counts / len(accepted)


def bootstrap_interval(
    emitted: Sequence[int], steps: Sequence[int], *, seed: int, resamples: int = RESAMPLES, level: float = LEVEL
) -> tuple[float, float] | None:
    """Percentile interval of sum(emitted) / sum(steps) over resampled prompts, both given per prompt.

    Steps of one prompt are not independent, so prompts are drawn, not steps. Prompts without a step are left out:
    they say nothing about tau. None when fewer than two remain, since one prompt shows no spread.
    """
    pairs = np.array([(e, s) for e, s in zip(emitted, steps, strict=True) if s], dtype=np.float64).reshape(-1, 2)
    if len(pairs) < 2:
        return None
    drawn = np.random.default_rng(seed).multinomial(len(pairs), np.full(len(pairs), 1 / len(pairs)), size=resamples)
    totals = drawn @ pairs
    low, high = np.quantile(totals[:, 0] / totals[:, 1], [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def remaining(live: np.ndarray) -> np.ndarray:
    """Tokens of the answer after x_{t+1}, int64 [rows], from `live[:, 0]`: row t has one per following live row,
    itself counted.

    Row t is live at step 0 when x_{t+1} and x_{t+2} both belong to the answer, so a run of r live rows means r more
    tokens.
    """
    rows = np.arange(len(live))
    ends = np.where(live[:, 0], len(live), rows)
    return np.minimum.accumulate(ends[::-1])[::-1] - rows


def all_starts(accept: np.ndarray, live: np.ndarray) -> AcceptanceLog:
    """Every live row of one sample as a verify step of its own: the joint run of accepts, not a product of marginals.

    accept, live: bool [rows, K]. Row t knows x_{t+1}; column i is the draft of x_{t+2+i}, made on the draft's own
    chain given that the drafts before it were right; live where x_{t+1}..x_{t+2+i} all belong to one answer of the
    target.
    """
    return _steps(accept, live, live[:, 0].nonzero()[0])


def walk(accept: np.ndarray, live: np.ndarray) -> AcceptanceLog:
    """The verify steps that greedy speculative decoding takes through one sample; arguments as for `all_starts`.

    It starts at the first live row of each answer (row P - 1 after a prompt of P tokens) and moves on by the tokens
    that the step emitted. On a sample that the target decoded greedily this is step for step what
    `decode.speculative_decode` does.
    """
    every = all_starts(accept, live)
    by_row = dict(zip(live[:, 0].nonzero()[0].tolist(), every.accepted.tolist(), strict=True))
    starts, row = [], 0
    while row < len(live):
        if row in by_row:
            starts.append(row)
        row += by_row.get(row, 0) + 1
    return _steps(accept, live, np.asarray(starts, dtype=np.int64))


def _steps(accept: np.ndarray, live: np.ndarray, starts: np.ndarray) -> AcceptanceLog:
    if accept.shape != live.shape or accept.ndim != 2 or not accept.shape[1]:
        raise ValueError(f"accept {accept.shape} and live {live.shape} must be equal, [rows, K] with K above 0")
    draft_tokens = accept.shape[1]
    left = remaining(live)[starts]
    if not np.array_equal(live[starts], left[:, None] > np.arange(draft_tokens)):
        raise ValueError("live is not the exact mask: a row must be live up to the end of its answer")
    run = np.logical_and.accumulate(accept[starts] & live[starts], axis=1).sum(axis=1)
    accepted = np.minimum(run + 1, left) - 1
    return AcceptanceLog.of(accepted, np.where(accepted < run, accepted, draft_tokens))
