"""Turns as ids, and the sequences to learn from that they make up."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from headstart.types import Sample

Ids = tuple[int, ...]


@dataclass(frozen=True)
class Turn:
    """What the target read and what it answered, both as ids. `exact`: the template renders the answer as these ids.

    sent: of a prompt with images, the ids that the engine was sent.
    """

    prompt: Ids
    answer: Ids
    exact: bool = True
    sent: Ids | None = None


@dataclass(frozen=True)
class Rendered:
    """One sequence to learn from, of the turns `turns` (indices among the answers of the conversation).

    ids and supervised have equal lengths; supervised marks what the target produced. `on_policy` is False where an
    answer is not what the template itself renders, but what a server would have produced (see `data.templates`).
    """

    ids: Ids
    supervised: tuple[bool, ...]
    on_policy: bool
    turns: tuple[int, ...]


def merge_turns(turns: Sequence[Turn]) -> list[Rendered]:
    """Put turns into as few sequences as their ids allow.

    A turn whose prompt begins with all ids of the sequence before it extends that sequence. Any other begins a new one,
    in which only its own answer is supervised: its history is not what the target produced. Turns without an answer are
    left out.
    """
    merged: list[Rendered] = []
    for index, turn in enumerate(turns):
        if not turn.answer:
            continue
        last = merged[-1] if merged else None
        if last is not None and turn.prompt[: len(last.ids)] == last.ids:
            merged[-1] = _extend(last, turn, index)
        else:
            merged.append(_extend(Rendered((), (), True, ()), turn, index))
    return merged


def cut(sample: Sample, max_length: int) -> Sample | None:
    """At most `max_length` tokens of a sample, ending at a supervised one; None when none is supervised.

    An answer that is cut keeps its remaining tokens supervised, and the sample's finish becomes `length`.
    """
    if len(sample.input_ids) <= max_length:
        return sample if sample.supervised.any() else None
    kept = sample.supervised[:max_length].nonzero()[0]
    if not len(kept):
        return None
    end = int(kept[-1]) + 1
    inside = bool(sample.supervised[end])  # the next token belongs to the same answer
    finish = "length" if inside else sample.finish
    return dataclasses.replace(
        sample, input_ids=sample.input_ids[:end], supervised=sample.supervised[:end], finish=finish
    )


def _extend(before: Rendered, turn: Turn, index: int) -> Rendered:
    unseen = len(turn.prompt) - len(before.ids)
    supervised = before.supervised + (False,) * unseen + (True,) * len(turn.answer)
    return Rendered(turn.prompt + turn.answer, supervised, before.on_policy and turn.exact, (*before.turns, index))
