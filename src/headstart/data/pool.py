"""The pool: how often each token occurs in the sources. It fills draft vocabularies where answers are few."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

MAX_TEXTS = 20_000  # texts counted; they are a sample of equal chances where the sources hold more
MAX_CHARACTERS = 8_000  # of one text, so that a few logs do not outweigh the rest
_BATCH = 256


@dataclass(frozen=True)
class PoolText:
    """One turn of a conversation; `owner` is the conversation's id."""

    owner: str
    text: str


class Reservoir:
    """A sample of at most `limit` texts out of a stream of unknown length, each with an equal chance (algorithm R)."""

    def __init__(self, seed: int, limit: int = MAX_TEXTS) -> None:
        self.seen = 0
        self.texts: list[PoolText] = []
        self._limit = limit
        self._random = random.Random(seed)

    def offer(self, owner: str, text: str) -> None:
        if not text.strip():
            return
        self.seen += 1
        if len(self.texts) < self._limit:
            self.texts.append(PoolText(owner, text[:MAX_CHARACTERS]))
            return
        place = self._random.randrange(self.seen)
        if place < self._limit:
            self.texts[place] = PoolText(owner, text[:MAX_CHARACTERS])


def count_tokens(tokenizer: Any, texts: Sequence[str], tell: Callable[[int], None]) -> np.ndarray:
    """How often each token id occurs, int64 [ids]; `tell` is told how many texts were counted since the last call."""
    counts = np.zeros(1 + max(tokenizer.get_vocab().values()), dtype=np.int64)
    for start in range(0, len(texts), _BATCH):
        batch = list(texts[start : start + _BATCH])
        encoded = tokenizer(batch, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]
        flat = np.fromiter((token for ids in encoded for token in ids), dtype=np.int64)
        counts += np.bincount(flat, minlength=len(counts))
        tell(len(batch))
    return counts
