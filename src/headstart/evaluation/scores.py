"""From answers to what `scores.json` holds: one row per prompt set, temperature and draft, and a table for people."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from headstart.errors import GateError
from headstart.evaluation import speed
from headstart.evaluation.acceptance import summarise
from headstart.evaluation.bench import NO_DRAFT, Answer
from headstart.events import times

ALL = "all"  # the row over all prompt sets together
_HEADINGS = ("prompts", "T", "draft", "tau", "95 % interval", "lossless", "tokens", "modelled", "measured")

PROMPTS = pa.schema(
    [
        ("set", pa.string()),
        ("place", pa.string()),
        ("id", pa.string()),
        ("temperature", pa.float64()),
        ("draft", pa.string()),
        ("prompt_tokens", pa.int64()),
        ("tokens", pa.int64()),
        ("finish", pa.string()),
        ("steps", pa.int64()),
        ("tau", pa.float64()),
        ("identical", pa.bool_()),
        ("seconds", pa.float64()),
        ("ids", pa.list_(pa.int32())),
        ("accepted", pa.list_(pa.int32())),
        ("drafted", pa.list_(pa.int32())),
    ]
)


def score_rows(answers: Sequence[Answer], draft_tokens: int, seed: int) -> list[dict[str, Any]]:
    """Rows by prompt set (with `all` where there are several), temperature and draft, in the order of `answers`.

    Raises:
        GateError: no answer of a row had a verify step.
    """
    sets = list(dict.fromkeys(answer.set for answer in answers))
    rows = []
    for name in [*sets, ALL] if len(sets) > 1 else sets:
        for temperature in dict.fromkeys(answer.temperature for answer in answers):
            group = [answer for answer in answers if name in (answer.set, ALL) and answer.temperature == temperature]
            rows += _score_group(group, {"set": name, "temperature": temperature}, draft_tokens, seed)
    return rows


def _score_group(group: list[Answer], head: dict[str, Any], draft_tokens: int, seed: int) -> list[dict[str, Any]]:
    plain = [answer for answer in group if answer.draft == NO_DRAFT]
    rows = []
    for draft in dict.fromkeys(answer.draft for answer in group):
        own = [answer for answer in group if answer.draft == draft]
        row = {**head, "draft": draft, "prompts": len(own), "tokens": sum(len(answer.ids) for answer in own)}
        rows.append(row | (_plain_row(own) if draft == NO_DRAFT else _draft_row(plain, own, draft_tokens, seed)))
    return rows


def _plain_row(own: list[Answer]) -> dict[str, Any]:
    """Without a draft every step emits one token, by definition."""
    costs = speed.total(answer.costs for answer in own)
    return {
        "tau": 1.0,
        "interval": [1.0, 1.0],
        "accepted_per_step": 0.0,
        "per_position": {"conditional": [], "unconditional": []},
        "steps": costs.plain.steps,
        "emitted": costs.plain.steps,
        "lossless": None,
        "mismatches": [],
        "costs": {"plain_step_seconds": costs.plain.mean if costs.plain.steps else None},
        "modelled_speedup": 1.0,
        "measured_speedup": 1.0,
    }


def _draft_row(plain: list[Answer], own: list[Answer], draft_tokens: int, seed: int) -> dict[str, Any]:
    if not any(answer.log.steps for answer in own):
        raise GateError(
            f"no answer to the prompts of {own[0].set} was longer than one token, so no draft was judged",
            do="look at the answers' end tokens and the chat template, or take other prompts",
        )
    found = summarise([answer.log for answer in own], draft_tokens, seed=seed)
    times = [speed.total(answer.costs for answer in part) for part in (plain, own)]
    costs = speed.compare(times[0], times[1], found.tau, draft_tokens)
    judged = [answer for answer in own if answer.identical is not None]
    return {
        **found.as_json(),
        "lossless": [sum(bool(answer.identical) for answer in judged), len(judged)] if judged else None,
        "mismatches": [_mismatch(answer) for answer in judged if answer.mismatch],
        "modelled_speedup": costs.pop("modelled_speedup"),
        "measured_speedup": costs.pop("measured_speedup"),
        "costs": costs,
    }


def _mismatch(answer: Answer) -> dict[str, Any]:
    assert answer.mismatch is not None
    return {"set": answer.set, "prompt": answer.id, **asdict(answer.mismatch)}


def write_prompts(path: Path, answers: Sequence[Answer]) -> None:
    """Write `prompts.parquet`: one row per prompt, temperature and draft, with its verify steps. tau: null
    for an answer that ended with its prefill."""
    pq.write_table(pa.Table.from_pylist([_prompt_row(answer) for answer in answers], schema=PROMPTS), path)


def _prompt_row(answer: Answer) -> dict[str, Any]:
    steps = answer.costs.plain.steps if answer.draft == NO_DRAFT else answer.log.steps
    return {
        **{name: getattr(answer, name) for name in PROMPTS.names if hasattr(answer, name)},
        "tokens": len(answer.ids),
        "steps": steps,
        "tau": (len(answer.ids) - 1) / steps if steps else None,
        "seconds": answer.costs.whole.seconds,
        "accepted": answer.log.accepted,
        "drafted": answer.log.drafted,
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as aligned text."""
    lines = [_HEADINGS, *(_cells(row) for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(_HEADINGS))]
    return "\n".join(
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    interval = row["interval"] and f"{row['interval'][0]:.3f} to {row['interval'][1]:.3f}"
    return (
        f"{row['set']} ({row['prompts']})",
        f"{row['temperature']:g}",
        row["draft"],
        f"{row['tau']:.3f}",
        interval or "one prompt",
        f"{row['lossless'][0]}/{row['lossless'][1]}" if row["lossless"] else "-",
        f"{row['tokens']:,}",
        times(row["modelled_speedup"]),
        times(row["measured_speedup"]),
    )


def mismatch_lines(rows: Sequence[dict[str, Any]]) -> list[str]:
    """One sentence for each prompt whose speculative answer was not the target's own."""
    found = [(row["draft"], item) for row in rows if row["set"] != ALL for item in row["mismatches"]]
    return [
        f"not identical: {item['set']} {item['prompt']} with the {draft} draft, at answer token {item['position']}: "
        f"{item['found']} instead of {item['expected']}; top-2 gap {item['gap']:.2g}, rounding {item['noise']:.2g}"
        + (" (a tie within rounding)" if item["tie"] else " (NOT explained by rounding)")
        for draft, item in found
    ]


def offline_lines(offline: dict[str, Any]) -> list[str]:
    """One sentence for each draft measured on held-out states."""
    return [
        f"offline, {draft} draft: tau {found['walk']['tau']:.3f} on the steps of decoding, "
        f"{found['all_starts']['tau']:.3f} over all starts of {found['samples']} held-out samples"
        for draft, found in offline.items()
        if found["samples"]
    ]
