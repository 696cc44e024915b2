"""What a report says of the serving check: a table, a paragraph, and a fault for the verdict."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from headstart.evaluation.serving import NO_FAULT
from headstart.evaluation.serving_words import warnings
from headstart.report.numbers import Numbers
from headstart.report.tables import Row, Table
from headstart.report.verdict import interval

_WARNING = "WARNING: "
_HOW = {"decoder": "the reference decoder, step by step", "walk": "the reference, from the states of the answers"}


def tables(numbers: Numbers) -> list[Table]:
    """The numbers of both sides; no table where nothing was served."""
    found = _section(numbers)
    if found is None:
        return []
    head = ("what", "vLLM", "reference")
    notes = (f"Rung {found['rung']}: {found['why']}.", *(_told(line) for line in warnings(found)))
    title = f"Served by vLLM {found['version']}"
    return [Table("serving", title, head, list(_rows(found)), "", (1, 2), notes)]


def paragraph(numbers: Numbers) -> Iterator[str]:
    """What it means."""
    found = _section(numbers)
    if found is None:
        return
    same, total = found["identical"]
    yield (
        f"vLLM {found['version']} decoded the {total} prompts with the exported draft, K = {found['draft_tokens']}: by "
        f"its own counters {found['counters']['drafts']:,} verify steps, tau {found['tau']:.3f}{interval(found)}. "
        f"{_HOW[found['reference']['how']].capitalize()}, gives {found['reference']['tau']:.3f}"
        f"{interval(found['reference'])}."
    )
    step = found["agreement"]["step_for_step"]
    match found["agreement"]["verdict"]:
        case "agrees":
            yield f"They agree, {step[0]} of {step[1]} prompts step for step: the export is read as it was meant."
        case "differs":
            yield "They do not agree, so vLLM computes another draft than the one that was trained."
        case _:
            yield "One prompt shows no spread, and its answers differ, so whether they agree is not known."
    yield f"{same} of {total} greedy answers are the ones that vLLM gives without the draft."
    yield from (_told(line) for line in warnings(found))
    yield (
        f"One request at a time, vLLM made {found['speed']['plain']:.1f} tokens per second without the draft and "
        f"{found['speed']['drafted']:.1f} with it."
    )


def fault(numbers: Numbers) -> str | None:
    """The sentence that a verdict begins with, when vLLM does not serve what was trained."""
    found = _section(numbers)
    if found is None:
        return None
    unexplained = [item for item in found["mismatches"] if not item["tie"]]
    if unexplained:
        same, total = found["identical"]
        return f"Not lossless in vLLM: {total - same} of {total} greedy answers differ from those without the draft."
    return _differs(found) if found["agreement"]["verdict"] == "differs" else None


def _differs(found: dict[str, Any]) -> str:
    taus = f"tau {found['tau']:.2f}, where {found['reference']['tau']:.2f} is right"
    cause = next(iter(found["causes"]), None)
    if cause is None:
        return f"vLLM does not serve the draft that was trained: {taus}; no known fault explains it."
    if cause["kind"] == NO_FAULT:
        same, total = found["reference"]["same_answers"]
        return f"In vLLM the target itself answers otherwise ({same} of {total} answers alike), so tau is another one."
    return f"vLLM does not serve the draft that was trained: {taus}; it is what the draft gives {cause['says']}."


def _section(numbers: Numbers) -> dict[str, Any] | None:
    return (numbers.scores or {}).get("serving")


def _told(line: str) -> str:
    text = line.removeprefix(_WARNING)
    return f"{text[0].upper()}{text[1:]}." if not text.startswith("vLLM") else f"{text}."


def _rows(found: dict[str, Any]) -> Iterator[Row]:
    reference, counters, places = found["reference"], found["counters"], found["per_position"]["unconditional"]
    yield "tau", f"{found['tau']:.3f}", f"{reference['tau']:.3f}"
    yield "95 % interval", _range(found["interval"]), _range(reference["interval"])
    yield "tau by the counters alone, past the ends of answers", f"{found['tau_by_counters']:.3f}", ""
    yield "verify steps", f"{counters['drafts']:,}", ""
    yield "drafted tokens", f"{counters['draft_tokens']:,}", ""
    yield "accepted of them", f"{counters['accepted']:,}", ""
    yield "accepted by position", ", ".join(f"{100 * share:.1f} %" for share in places), ""
    yield "answers as without the draft", _of(found["identical"]), ""
    yield "answers without the draft alike", "", _of(reference["same_answers"])
    yield "prompts that agree step for step", _of(found["agreement"]["step_for_step"]), ""
    yield "tokens/s without the draft", f"{found['speed']['plain']:.1f}", ""
    yield "tokens/s with it", f"{found['speed']['drafted']:.1f}", ""


def _range(interval: list[float] | None) -> str:
    return f"{interval[0]:.3f} to {interval[1]:.3f}" if interval else "one prompt"


def _of(pair: list[int]) -> str:
    return f"{pair[0]} of {pair[1]}"
