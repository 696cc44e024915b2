"""Reading the sources of a run: rows that can be used become candidates, all others are tallied with their reason."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from headstart import files
from headstart.config import Data
from headstart.data import contamination, pool, readers, sources
from headstart.data import tally as drops
from headstart.data.content import text_of
from headstart.errors import UserError
from headstart.events import Events
from headstart.types import Message


@dataclass(frozen=True)
class Candidate:
    """A conversation that came through so far.

    own_id: the id in the source, or the content's hash. id: the same, made unique over all sources.
    place: its row as a person looks it up.
    """

    id: str
    own_id: str
    source: str
    row: int
    place: str
    messages: tuple[Message, ...]


class Reading:
    """The sources, read row by row.

    Raises:
        UserError: a source or an evaluation set is missing or cannot be read, or a role alias names no role.
    """

    def __init__(self, data: Data) -> None:
        self.tally = drops.Tally()
        self.candidates: list[Candidate] = []
        self.sources: Sequence[readers.Source] = [_find_training(name) for name in dict.fromkeys(data.sources)]
        self.contaminated: Counter[str] = Counter(dict.fromkeys(data.decontaminate, 0))
        self.reservoir = pool.Reservoir(data.seed)
        self._roles = sources.role_names(data.role_aliases)
        self._evaluations = contamination.Evaluations.read(data.decontaminate, self._roles)
        self._data = data
        self._seen: set[bytes] = set()
        self._ids: set[str] = set()

    def read_all(self, events: Events) -> None:
        """Read every source to its end."""
        for source in self.sources:
            if source.size == 0:
                events.say(f"  reading {source.name}")
                self._read(source, lambda _: None)
                continue
            with events.progress(f"reading {source.name}", source.size / 1e6, "MB") as bar:
                self._read(source, lambda read, bar=bar: bar.advance(read / 1e6))

    def _read(self, source: readers.Source, tell: readers.Tell) -> None:
        tally = self.tally.of(source.name)
        for record in source.records(tell):
            tally.read += 1
            try:
                self._take(source.name, record)
            except sources.Unusable as bad:
                tally.drop(bad.reason, record.place, bad.detail)

    def _take(self, source: str, record: readers.Record) -> None:
        """Make a candidate of one record. Raises Unusable."""
        if record.problem:
            raise sources.Unusable(record.problem)
        shape, everything = sources.read_row(record.value, self._roles, record.folder)
        self.tally.of(source).shapes[shape] += 1
        messages = self._usable_part(everything)
        self._refuse_contaminated(everything)
        self._refuse_duplicate(messages)
        own_id, name = self._names(record.value.get("id"), messages)
        self.candidates.append(Candidate(name, own_id, source, record.row, record.place, messages))
        for message in everything:
            self.reservoir.offer(name, text_of(message))

    def _usable_part(self, messages: Sequence[Message]) -> tuple[Message, ...]:
        cut = sources.to_learn if self._data.answers == "keep" else sources.to_answer
        return cut(messages, self._data.max_turns)

    def _refuse_contaminated(self, messages: Sequence[Message]) -> None:
        if owner := self._evaluations.hit(messages):
            self.contaminated[owner] += 1
            raise sources.Unusable(drops.CONTAMINATED, owner)

    def _refuse_duplicate(self, messages: Sequence[Message]) -> None:
        keep = self._data.answers == "keep"
        content = contamination.whole(messages) if keep else contamination.first_prompt(messages)
        if content in self._seen:
            raise sources.Unusable(drops.DUPLICATE)
        self._seen.add(content)

    def _names(self, given: Any, messages: Sequence[Message]) -> tuple[str, str]:
        """The row's own id, or its content's hash; and the same with that hash behind it where it is taken."""
        content = hashlib.blake2b(files.canonical(messages).encode(), digest_size=8).hexdigest()
        own_id = content if given is None or given == "" else files.printable(str(given))
        name = f"{own_id}~{content}" if own_id in self._ids else own_id
        self._ids.add(name)
        return own_id, name


def _find_training(name: str) -> readers.Source:
    source = readers.find(name)
    if isinstance(source, readers.ShippedSource) and source.shipped.use == "evaluate":
        raise UserError(f"{name} is an evaluation set, never to be trained on", do="take it out of data.sources")
    return source
