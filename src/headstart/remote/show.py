"""What a person reads of a run on another machine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from headstart.events import duration, size
from headstart.pipeline import STAGES
from headstart.remote.command import Outcome

_LEFT_OUT = {"time", "event", "stage"}


def lines(outcome: Outcome, host: str) -> Iterator[str]:
    """State, stages, newest event, the log's end, and what was fetched."""
    status = outcome.status
    yield f"{host}: {_state(status)}  ({status['root']}, {size(status['free'])} free)"
    if status["stages"] or status["stage"]:
        yield "  " + "  ".join(_stage(stage.verb, status) for stage in STAGES)
    if status["state"] == "running" and (told := _newest(status["last"])):
        yield f"  {told}"
    if status["state"] != "finished":
        yield from (f"  | {line}" for line in status["tail"])
    if outcome.fetched is not None:
        got = outcome.fetched
        names = ", ".join(got.artifacts) or "no artifact is finished yet"
        yield f"fetched into {got.folder}: {names}; {got.files} files, each with the checksum of its manifest"


def _state(status: dict[str, Any]) -> str:
    state = status["state"]
    if state == "running":
        at = status["stage"] or status["phase"]
        return f"running ({at}) for {duration(status['now'] - status['began'])}"
    if state in ("failed", "refused"):
        return f"{state} in {status['step']}, exit code {status['exit']}"
    if state == "finished":
        return f"finished in {duration(status['ended'] - status['began'])}"
    return state


def _stage(verb: str, status: dict[str, Any]) -> str:
    if verb == status["stage"]:
        return f"{verb} ..."
    seconds = status["stages"].get(verb)
    return f"{verb} -" if seconds is None else f"{verb} {duration(seconds)}"


def _newest(event: dict[str, Any]) -> str:
    """The newest event, e.g. a training step with its numbers."""
    if event.get("event") in (None, "say", "run"):
        return str(event.get("text", ""))
    values = [f"{key} {_number(value)}" for key, value in event.items() if key not in _LEFT_OUT]
    return f"{event['event']}: {'  '.join(values)}" if values else ""


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
