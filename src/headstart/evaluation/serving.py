"""The serving check: what a serving engine's own counters say, beside what our decoder says of the same prompts.

One definition for both sides (see `acceptance`): the engine also counts accepted drafts past the end of an answer, so
its tau is taken from the tokens that its answers hold and the verify steps that it counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from headstart.engines.vllm.records import Counters, Served, ServedAnswer
from headstart.errors import GateError
from headstart.evaluation.acceptance import LEVEL, RESAMPLES, AcceptanceLog, bootstrap_interval

NO_FAULT = "none"  # the kind of a replay in which nothing is wrong
NEGLIGIBLE = 0.02  # relative difference of two taus that no one needs to act on
EXACT = 0.003  # share of the steps by which two measurements of the same thing may differ
# Lead of a first choice over the second, in logits, below which rounding may turn it. bfloat16 and float16 keep 8 and
# 11 bits, and logits of 16 to 32 are common: two steps there. float32: what different kernels were seen to differ by.
TIES = {"bfloat16": 0.25, "float16": 0.03, "float32": 1e-3}

Pair = tuple[int, int]  # tokens that verify steps emitted, and those steps, of one prompt


@dataclass(frozen=True)
class Reference:
    """Our own decoder on the same prompts. how: `decoder` (step by step) or `walk` (replayed states of the answers)."""

    how: str
    answers: tuple[tuple[int, ...], ...]
    logs: tuple[AcceptanceLog, ...]


@dataclass(frozen=True)
class Cause:
    """A fault under which our decoder gives what the engine measured. step_for_step: prompts with equal steps, of all."""

    kind: str
    says: str
    tau: float
    interval: tuple[float, float] | None
    step_for_step: tuple[int, int]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def section(plain: Served, drafted: Served, reference: Reference, draft_tokens: int, seed: int) -> dict[str, Any]:
    """The `serving` part of scores.json, without mismatches and causes.

    Raises:
        GateError: vLLM counted no draft, so nothing was served with it.
    """
    counters = Counters.total([answer.counters for answer in drafted.answers if answer.counters])
    if not counters.drafts:
        raise GateError(
            "vLLM counted no verify step, so the draft was not used",
            looked_for="vllm:spec_decode_num_drafts above 0 after answers of several tokens",
            do="look at the engine's log, and at evaluate.prompts",
        )
    found = _engine(drafted) | {"draft_tokens": draft_tokens, "prompts": len(drafted.answers)}
    pairs = steps_of(drafted.answers)
    return {
        **found,
        "counters": asdict(counters),
        "tau": _tau(pairs),
        "interval": _interval(pairs, seed),
        "tau_by_counters": 1 + counters.accepted / counters.drafts,
        "per_position": _per_position(counters),
        "identical": [_same(plain, drafted), len(plain.answers)],
        "speed": _speed(plain, drafted),
        "reference": _reference(reference, plain, seed),
        "agreement": agreement(plain, drafted, reference, seed),
    }


def steps_of(answers: Sequence[ServedAnswer]) -> list[Pair]:
    """Emitted tokens and verify steps by prompt. The first token comes from the prefill; a step without drafts, which
    the engine does not count, emits one token."""
    return [_pair(answer) for answer in answers]


def agreement(plain: Served, drafted: Served, reference: Reference, seed: int) -> dict[str, Any]:
    """Whether the engine's tau is the reference's.

    Both read the same prompts, so beside the interval over prompts there is a sharper test: the difference of tau over
    the prompts that both answer alike, with its own interval. Rounding moves single steps either way; a fault moves
    them all one way.
    """
    served, own = steps_of(drafted.answers), _pairs(reference.logs)
    pairs = list(zip(drafted.answers, reference.answers, served, own, strict=True))
    alike = [(ours, theirs) for answer, ids, ours, theirs in pairs if answer.ids == ids and ours[1] and theirs[1]]
    inside = _inside(_tau(served), _interval(own, seed))
    found = _difference(alike, seed)
    return {"verdict": _verdict(inside, served, own, found), "inside_interval": inside, **found}


def mismatches(plain: Served, drafted: Served) -> list[tuple[int, int]]:
    """(prompt, position of the first difference) of every answer that the draft changed."""
    pairs = enumerate(zip(plain.answers, drafted.answers, strict=True))
    return [(index, _parting(one.ids, other.ids)) for index, (one, other) in pairs if one.ids != other.ids]


def judge(plain: ServedAnswer, drafted: ServedAnswer, position: int, gap: float | None, dtype: str) -> dict[str, Any]:
    """A mismatch with its meaning, as `decode.Mismatch` has it.

    gap: lead of the target's first choice over its second, in logits, at `position`; None when it was not measured.
    """
    noise = TIES.get(dtype, TIES["float32"])
    places = {"position": position, "expected": _at(plain.ids, position), "found": _at(drafted.ids, position)}
    return {**places, "gap": gap, "noise": noise, "tie": gap is not None and gap <= noise}


def other_prompts(measured: Sequence[Sequence[int]], plain: Served) -> dict[str, Any] | None:
    """Whether vLLM's own chat template makes other prompts of the messages than were measured; None when it does not.

    Such a difference (another template, a beginning-of-sequence token) is not in the numbers here, where ids are sent;
    it is in those of everyone who sends messages.
    """
    pairs = [(tuple(ids), made) for ids, made in zip(measured, plain.chat_ids, strict=False)]
    wrong = [(ids, made) for ids, made in pairs if ids != made]
    if not wrong:
        return None
    ids, made = wrong[0]
    at = _parting(ids, made)
    return {"prompts": [len(wrong), len(pairs)], "token": at, "measured": _at(ids, at), "vllm": _at(made, at)}


def likely(
    answers: Sequence[ServedAnswer], found: Sequence[tuple[str, str, Sequence[AcceptanceLog]]], seed: int
) -> tuple[Cause, ...]:
    """The faults that explain what the engine measured, best first.

    found: kind, words and verify steps (by prompt, of the engine's own answers) under each fault. A fault is named when
    the engine's tau lies in its interval, and no other one fits the steps of the single prompts clearly better.
    """
    served = steps_of(answers)
    tau, scored = _tau(served), []
    for kind, says, logs in found:
        own = _pairs(logs)
        interval = _interval(own, seed)
        if _inside(tau, interval) or abs(_tau(own) / tau - 1) <= NEGLIGIBLE:
            scored.append((_distance(served, own), Cause(kind, says, _tau(own), interval, _equal(served, own))))
    best = min((distance for distance, _ in scored), default=0.0)
    return tuple(cause for distance, cause in sorted(scored, key=lambda one: one[0]) if distance <= 2 * best + EXACT)


def _engine(served: Served) -> dict[str, Any]:
    return {"engine": "vllm", "version": served.version, "rung": served.rung, "why": served.why}


def _pair(answer: ServedAnswer) -> Pair:
    assert answer.counters is not None
    emitted, counted = len(answer.ids) - 1, answer.counters
    return emitted, counted.drafts + max(0, emitted - counted.drafts - counted.accepted)


def _pairs(logs: Sequence[AcceptanceLog]) -> list[Pair]:
    return [(log.emitted, log.steps) for log in logs]


def _tau(pairs: Sequence[Pair]) -> float:
    steps = sum(count for _, count in pairs)
    return sum(emitted for emitted, _ in pairs) / steps if steps else float("nan")


def _interval(pairs: Sequence[Pair], seed: int) -> tuple[float, float] | None:
    return bootstrap_interval([emitted for emitted, _ in pairs], [steps for _, steps in pairs], seed=seed)


def _inside(tau: float, interval: tuple[float, float] | None) -> bool | None:
    return None if interval is None else interval[0] <= tau <= interval[1]


def _per_position(counters: Counters) -> dict[str, list[float | None]]:
    reached = (counters.drafts, *counters.per_position)
    own = [now / before if before else None for before, now in zip(reached, counters.per_position, strict=False)]
    return {"conditional": own, "unconditional": [count / counters.drafts for count in counters.per_position]}


def _speed(plain: Served, drafted: Served) -> dict[str, float]:
    """Tokens per second, prefill counted, one request at a time."""
    rates = [
        sum(len(answer.ids) for answer in run.answers) / sum(answer.seconds for answer in run.answers)
        for run in (plain, drafted)
    ]
    return {"plain": rates[0], "drafted": rates[1], "speedup": rates[1] / rates[0]}


def _reference(reference: Reference, plain: Served, seed: int) -> dict[str, Any]:
    pairs = _pairs(reference.logs)
    alike = sum(answer.ids == ids for answer, ids in zip(plain.answers, reference.answers, strict=True))
    return {
        "how": reference.how,
        "tau": _tau(pairs),
        "interval": _interval(pairs, seed),
        "same_answers": [alike, len(pairs)],
    }


def _difference(alike: Sequence[tuple[Pair, Pair]], seed: int) -> dict[str, Any]:
    """Of tau, over prompts that both answered alike: its value, its bootstrap interval, and how many agree exactly."""
    equal = [sum(ours[1] == theirs[1] for ours, theirs in alike), len(alike)]
    if not alike:
        return {"difference": None, "difference_interval": None, "step_for_step": equal}
    rows = np.array([(*ours, *theirs) for ours, theirs in alike], dtype=np.float64)
    value = _gap(rows.sum(0)[None])[0]
    interval = None
    if len(rows) > 1:
        share = np.full(len(rows), 1 / len(rows))
        drawn = np.random.default_rng(seed).multinomial(len(rows), share, size=RESAMPLES)
        low, high = np.quantile(_gap(drawn @ rows), [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
        interval = [float(low), float(high)]
    return {"difference": float(value), "difference_interval": interval, "step_for_step": equal}


def _gap(totals: np.ndarray) -> np.ndarray:
    return totals[:, 0] / totals[:, 1] - totals[:, 2] / totals[:, 3]


def _verdict(inside: bool | None, served: Sequence[Pair], own: Sequence[Pair], found: dict[str, Any]) -> str:
    if abs(_tau(served) / _tau(own) - 1) <= NEGLIGIBLE:
        return "agrees"
    apart, interval = found["difference"], found["difference_interval"]
    one_sided = interval is None or not interval[0] <= 0 <= interval[1]
    if inside is False or (apart is not None and one_sided and abs(apart) > NEGLIGIBLE * _tau(own)):
        return "differs"
    return "agrees" if inside else "unknown"


def _distance(served: Sequence[Pair], own: Sequence[Pair]) -> float:
    """How far the steps of single prompts lie apart, relative to all steps."""
    apart = sum(abs(ours[1] - theirs[1]) for ours, theirs in zip(served, own, strict=True))
    return apart / max(1, sum(ours[1] for ours in served))


def _equal(served: Sequence[Pair], own: Sequence[Pair]) -> tuple[int, int]:
    return sum(ours[1] == theirs[1] for ours, theirs in zip(served, own, strict=True)), len(served)


def _same(plain: Served, drafted: Served) -> int:
    return sum(one.ids == other.ids for one, other in zip(plain.answers, drafted.answers, strict=True))


def _parting(one: Sequence[int], other: Sequence[int]) -> int:
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def _at(ids: Sequence[int], position: int) -> int | None:
    return ids[position] if position < len(ids) else None
