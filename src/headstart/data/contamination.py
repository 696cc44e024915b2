"""Evaluation prompts that must not be trained on, and the spelling in which texts are compared."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence

from headstart.data import readers, sources
from headstart.data.content import identity
from headstart.errors import UserError
from headstart.types import Message


def normalised(text: str) -> str:
    """Lower case, every run of white space one space."""
    return " ".join(text.lower().split())


def digest(text: str) -> bytes:
    """16 bytes that stand for the normalised text."""
    return hashlib.blake2b(normalised(text).encode(), digest_size=16).digest()


def first_prompt(messages: Sequence[Message]) -> bytes:
    """What makes two conversations the same when the target answers anew: their first user turn, and its images."""
    return digest(identity(next(message for message in messages if message["role"] == "user")))


def whole(messages: Sequence[Message]) -> bytes:
    """What makes two conversations the same when their answers are kept: every role and text."""
    return digest("\n".join(f"{message['role']}\n{identity(message)}" for message in messages))


class Evaluations:
    """The user turns of the evaluation sets, to be compared exactly, normalised."""

    def __init__(self, turns: Mapping[str, Iterable[str]]) -> None:
        self.sets = tuple(turns)
        self._owner: dict[bytes, str] = {}
        for name, texts in turns.items():
            for text in texts:
                self._owner.setdefault(digest(text), name)

    @classmethod
    def read(cls, names: Sequence[str], roles: Mapping[str, str]) -> Evaluations:
        """Read the sets (shipped names or files).

        Raises:
            UserError: a set is missing, or a record of it cannot be read: an unread prompt could be trained on.
        """
        return cls({name: _turns(name, roles) for name in names})

    def hit(self, messages: Sequence[Message]) -> str | None:
        """The first set that shares a user turn with this conversation."""
        for text in sources.user_texts(messages):
            if owner := self._owner.get(digest(text)):
                return owner
        return None


def _turns(name: str, roles: Mapping[str, str]) -> list[str]:
    found: list[str] = []
    for record in readers.find(name).records(lambda _: None):
        try:
            if record.problem:
                raise sources.Unusable(record.problem)
            found += sources.user_texts(sources.read_row(record.value, roles)[1])
        except sources.Unusable as bad:
            why = f"{bad.reason} {bad.detail}".rstrip()
            raise UserError(
                f"row {record.place or '?'} of the evaluation set {name} cannot be read: {why}",
                do="mend it, or take the set out of data.decontaminate",
            ) from None
    return found
