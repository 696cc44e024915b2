"""What became of every row that was read: kept, or dropped for a reason, with the first rows of each reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from headstart.data import media, readers, sources
from headstart.errors import UserError

DUPLICATE = "duplicate"
CONTAMINATED = "contaminated"
TOO_LONG = "too long"
TEMPLATE = "template"
IMAGES = "the target reads no images"
# Rows that nothing is wrong with: `data.max_drop` is about data that cannot be read or used, not about choices.
CHOICES = frozenset({readers.CONTINUATION, DUPLICATE, CONTAMINATED, TOO_LONG})
SHOWN = 5  # rows named for each reason
WIDTH = 100  # characters of what was found in a row

_HINTS = {
    sources.UNKNOWN_ROLE: 'say what it is: -s \'data.role_aliases={{"{detail}" = "assistant"}}\'',
    TOO_LONG: "raise data.max_length or data.max_prompt_tokens",
    TEMPLATE: "look at the target's chat template: it refused these conversations",
    DUPLICATE: "give other data.sources",
    CONTAMINATED: "give data.sources that are not in data.decontaminate",
    sources.NOTHING: "data.answers = 'keep' needs answers; 'regenerate' needs only prompts",
    IMAGES: "take a target whose chat template marks the places of images, or rows of text",
    media.MISSING: "paths are relative to the file that names them: put the images there, or a link to them",
    media.REMOTE: "download the images and name the files",
    sources.NO_MESSAGES: "rows need conversations, messages, or prompt",
}


@dataclass
class Reason:
    """How often one reason occurred in one source, its first rows, and what was found there."""

    count: int = 0
    rows: list[int | str] = field(default_factory=list)
    details: Counter[str] = field(default_factory=Counter)

    def add(self, place: str, detail: str) -> None:
        self.count += 1
        if place and len(self.rows) < SHOWN:
            self.rows.append(int(place) if place.isdigit() else place)
        if detail:
            self.details[detail if len(detail) <= WIDTH else f"{detail[: WIDTH - 3]}..."] += 1

    def summary(self) -> dict[str, Any]:
        return {"count": self.count, "rows": self.rows, "details": dict(self.details.most_common(SHOWN))}


@dataclass
class SourceTally:
    """Rows read of one source, the shapes seen, and the reasons of those dropped."""

    read: int = 0
    shapes: Counter[str] = field(default_factory=Counter)
    dropped: dict[str, Reason] = field(default_factory=dict)

    def drop(self, reason: str, place: str, detail: str = "") -> None:
        self.dropped.setdefault(reason, Reason()).add(place, detail)

    @property
    def left(self) -> int:
        """Rows not dropped so far."""
        return self.read - sum(reason.count for reason in self.dropped.values())


class Tally:
    """Counts over all sources."""

    def __init__(self) -> None:
        self.sources: dict[str, SourceTally] = {}

    def of(self, source: str) -> SourceTally:
        return self.sources.setdefault(source, SourceTally())

    @property
    def read(self) -> int:
        return sum(tally.read for tally in self.sources.values())

    @property
    def left(self) -> int:
        return sum(tally.left for tally in self.sources.values())

    def dropped(self) -> dict[str, int]:
        """Rows dropped over all sources by reason, the most frequent first."""
        total: Counter[str] = Counter()
        for tally in self.sources.values():
            total.update({reason: found.count for reason, found in tally.dropped.items()})
        return dict(total.most_common())

    def check(self, max_drop: float) -> None:
        """Stop when too much cannot be used, or nothing is left.

        Raises:
            UserError: names the reasons, rows and what to do.
        """
        dropped = self.dropped()
        bad = {reason: count for reason, count in dropped.items() if reason not in CHOICES}
        if self.left == 0:
            raise UserError(f"kept 0 of {self.read:,} rows{self._blame(dropped)}", do=self._hint(dropped))
        if sum(bad.values()) > max_drop * self.read:
            share = 100 * sum(bad.values()) / self.read
            raise UserError(
                f"{sum(bad.values()):,} of {self.read:,} rows ({share:.3g} %) cannot be used{self._blame(bad)}",
                looked_for=f"at most {100 * max_drop:g} % of the rows (data.max_drop)",
                do=self._hint(bad),
            )

    def table(self) -> Iterator[str]:
        """Lines for a person: sources first, then what was dropped and where."""
        yield f"  {'source':<28} {'rows':>8} {'usable':>8}  read as"
        for name, tally in self.sources.items():
            yield f"  {_tail(name, 28):<28} {tally.read:>8,} {tally.left:>8,}  {', '.join(tally.shapes) or '-'}"
        if dropped := self.dropped():
            yield f"  {'dropped':<28} {'rows':>8}  first rows"
            for reason, count in dropped.items():
                yield f"  {reason:<28} {count:>8,}  {self._where(reason)}"

    def _reasons(self, reason: str) -> Iterator[tuple[str, Reason]]:
        for name, tally in self.sources.items():
            if reason in tally.dropped:
                yield name, tally.dropped[reason]

    def _details(self, reason: str) -> Counter[str]:
        total: Counter[str] = Counter()
        for _, found in self._reasons(reason):
            total.update(found.details)
        return total

    def _where(self, reason: str) -> str:
        several = len(self.sources) > 1
        places = [
            f"{_tail(name, 28) + ' ' if several else ''}{', '.join(map(str, found.rows))}"
            for name, found in self._reasons(reason)
            if found.rows
        ]
        details = ", ".join(detail for detail, _ in self._details(reason).most_common(2))
        return "; ".join(places) + (f" ({details})" if details else "")

    def _blame(self, dropped: dict[str, int]) -> str:
        if not dropped:
            return ": there were none"
        if len(dropped) == 1:
            reason = next(iter(dropped))
            where = self._where(reason)
            return f", all {self._said(reason)}" + (f": rows {where}" if where else "")
        return ": " + "; ".join(f"{count:,} {self._said(reason)}" for reason, count in dropped.items())

    def _said(self, reason: str) -> str:
        """The reason; for unknown roles, each with its share of the rows."""
        if reason != sources.UNKNOWN_ROLE:
            return reason
        common = self._details(reason).most_common(3)
        return f"{reason} ({', '.join(f'{name!r} in {100 * n / self.read:.3g} % of the rows' for name, n in common)})"

    def _hint(self, dropped: dict[str, int]) -> str:
        reason = next(iter(dropped), "")
        detail = next(iter(self._details(reason)), "NAME")
        hint = _HINTS.get(reason, "mend these rows").format(detail=detail)
        return hint if reason in CHOICES or not reason else f"{hint}; or accept the loss with data.max_drop"


def _tail(text: str, width: int) -> str:
    return text if len(text) <= width else "..." + text[3 - width :]
