"""The one thing to know about a run: does the draft keep the answers, is it proven to help, and is it faster here."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from headstart.report.numbers import Headline, Numbers, next_stage

Tone = Literal["good", "bad", "open"]
LITTLE = 0.1  # tokens per step; a gain below it is called so


class Verdict(NamedTuple):
    """tone: how the page colours it; text: one to three sentences."""

    tone: Tone
    text: str


def verdict(numbers: Numbers, served_wrong: str | None = None) -> Verdict:
    """The one thing to know. A draft that changes answers is said first, then whether it is proven to help.

    served_wrong: what the serving check found, said before all else.
    """
    head = numbers.headline
    if head is None or head.trained is None:
        return Verdict("open", _no_scores(numbers))
    tone, text = _judge(head)
    if served_wrong:
        tone, text = "bad", f"{served_wrong} {text}"
    if numbers.status("scores").state != "fresh":
        tone, text = (
            "open",
            f"These scores do not belong to the present settings ({numbers.status('scores').why}). {text}",
        )
    return Verdict(tone, f"{text} {_speed_verdict(head.trained)}".strip())


def missing(numbers: Numbers) -> list[str]:
    """A sentence for every artifact that the report lacks."""
    lines = []
    for status in numbers.statuses:
        if status.folder in numbers.damaged:
            lines.append(f"{status.folder} (made by {status.verb}) cannot be used: {numbers.damaged[status.folder]}.")
        elif status.manifest is None:
            lines.append(f"{status.folder} (made by {status.verb}) is missing: {status.why}.")
    return lines


def _no_scores(numbers: Numbers) -> str:
    stage = next_stage(numbers)
    if stage is None:
        return "No verdict: the scores hold no trained draft."
    return f"No verdict yet: the draft was not measured. The next stage is {stage}."


def _judge(head: Headline) -> tuple[Tone, str]:
    trained = head.trained
    assert trained is not None
    faults = [broken(name, row) for name, row in head.drafts.items() if changed(row)]
    if faults:
        return "bad", " ".join(faults)
    length = f"{trained['tau']:.2f} tokens per step of the target{interval(trained)}"
    if head.untrained is None:
        return (
            "open",
            f"The trained draft yields {length}. Whether training helped is not known: no untrained draft was "
            "measured.",
        )
    against = f"{head.untrained['tau']:.2f}{interval(head.untrained)}"
    match compare(trained, head.untrained):
        case "above":
            little = " That is still little." if trained["tau"] - head.untrained["tau"] < LITTLE else ""
            return "good", f"Training helped: decoding yields {length}; with the draft as it began, {against}.{little}"
        case "below":
            return "bad", f"Training made the draft worse: it yields {length}; before training it was {against}."
        case "unknown":
            return (
                "open",
                f"Not proven: one prompt shows no spread. The trained draft yields {length}, the untrained {against}.",
            )
    return "open", (
        f"Not proven to be better than an untrained draft: it yields {length}, the untrained one {against}, "
        "and the intervals overlap."
    )


def compare(one: dict[str, Any], other: dict[str, Any]) -> Literal["above", "below", "overlap", "unknown"]:
    """Where the interval of `one` lies beside that of `other`. Unknown when either has none."""
    first, second = one["interval"], other["interval"]
    if not first or not second:
        return "unknown"
    if first[0] > second[1]:
        return "above"
    return "below" if first[1] < second[0] else "overlap"


def changed(row: dict[str, Any]) -> bool:
    """Whether a greedy answer was not the target's own."""
    return bool(row["lossless"]) and row["lossless"][0] < row["lossless"][1]


def broken(name: str, row: dict[str, Any]) -> str:
    """How many answers a draft changed, and whether rounding explains it."""
    same, total = row["lossless"]
    first = f"Not lossless: with the {name} draft {total - same} of {total} greedy answers differ from the target's own"
    unexplained = sum(not item["tie"] for item in row["mismatches"])
    if not unexplained:
        return f"{first}, each first at a tie between two tokens that rounding can turn."
    return (
        f"{first}, {unexplained} of them by more than rounding explains. That is a fault of decoding: trust "
        "no other number here."
    )


def _speed_verdict(row: dict[str, Any]) -> str:
    measured = row["measured_speedup"]
    if measured is None:
        return ""
    if measured < 1:
        return f"On this machine decoding with it is slower than without: {measured:.2f} times the speed."
    return f"On this machine it decodes {measured:.2f} times as fast as the target alone."


def interval(row: dict[str, Any]) -> str:
    """The interval of tau in brackets, with a space before it; nothing where there is none."""
    return f" (95 % interval {row['interval'][0]:.2f} to {row['interval'][1]:.2f})" if row["interval"] else ""
