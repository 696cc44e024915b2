"""One check of `headstart doctor`: what was found, how bad it is, what to do."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Verdict = Literal["go", "warn", "stop"]


@dataclass(frozen=True)
class Check:
    """`do` says what to do about it; None where nothing has to be done."""

    name: str
    verdict: Verdict
    finding: str
    do: str | None = None


def worst(checks: Iterable[Check]) -> Verdict:
    """The verdict of all together; `go` when there are none."""
    found = {check.verdict for check in checks}
    if "stop" in found:
        return "stop"
    return "warn" if "warn" in found else "go"
