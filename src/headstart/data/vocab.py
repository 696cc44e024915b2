"""The draft vocabulary: which of the target's tokens a draft can propose, and how much of the text they cover."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from headstart import files
from headstart.errors import GateError, UserError
from headstart.types import Sample

FILE = "vocab.safetensors"
TENSOR = "draft_to_target"
DEFAULT_SIZE = 32000

# How places are given, in this order; `rank` makes it so.
RULE = (
    "every id that can end or structure a turn; then by count among the supervised training tokens, ties and unseen "
    "ids by count in the pool; then the tokenizer's early merges; then the lowest ids"
)


@dataclass(frozen=True)
class DraftVocab:
    """draft_to_target: int64 [Vd], strictly rising ids of the target, which has `target_vocab_size` rows."""

    draft_to_target: np.ndarray
    target_vocab_size: int

    def __post_init__(self) -> None:
        problem = _problem(self.draft_to_target, self.target_vocab_size)
        if problem:
            raise GateError(f"not a draft vocabulary: {problem}")

    @property
    def size(self) -> int:
        return len(self.draft_to_target)

    @property
    def mask(self) -> np.ndarray:
        """bool [V]: whether the draft can propose the id."""
        inside = np.zeros(self.target_vocab_size, dtype=np.bool_)
        inside[self.draft_to_target] = True
        return inside

    def write(self, path: Path) -> None:
        metadata = {"target_vocab_size": str(self.target_vocab_size)}
        files.write_bytes(path, save({TENSOR: self.draft_to_target}, metadata))

    @classmethod
    def read(cls, path: Path, target_vocab_size: int) -> DraftVocab:
        """Read the file `path`, or the one in the artifact folder `path`, and check it.

        Raises:
            UserError: it cannot be read, was made for another target, or is not strictly rising inside its vocabulary.
        """
        do = "run the vocab stage again"
        path = path / FILE if path.is_dir() else path
        try:
            with safe_open(path, framework="numpy") as file:
                made_for = int((file.metadata() or {}).get("target_vocab_size", target_vocab_size))
                ids = file.get_tensor(TENSOR)
        except (OSError, SafetensorError, ValueError) as error:
            raise UserError(f"{path} cannot be read as a draft vocabulary: {error}", do=do) from None
        problem = _problem(ids, target_vocab_size)
        if made_for != target_vocab_size:
            problem = f"it was made for a target of {made_for} tokens, not {target_vocab_size}"
        if problem:
            raise UserError(
                f"{path} does not fit the target: {problem}", looked_for=f"rising ids below {target_vocab_size}", do=do
            )
        return cls(ids, target_vocab_size)


@dataclass(frozen=True)
class Chosen:
    """A draft vocabulary and how its places were filled: forced, answers, pool, merges, rest; they sum to its size."""

    vocab: DraftVocab
    filled: dict[str, int]


@dataclass(frozen=True)
class Coverage:
    """Share of supervised tokens inside the draft vocabulary, overall (None when there are no tokens) and by source."""

    tokens: int
    overall: float | None
    by_source: dict[str, float]


def pick_size(wanted: int | None, target_vocab_size: int) -> int:
    """The draft vocabulary's size; UserError when larger than the target's."""
    if wanted is None:
        return min(DEFAULT_SIZE, target_vocab_size)
    if wanted > target_vocab_size:
        raise UserError(
            f"vocab.size = {wanted} is larger than the target's vocabulary",
            looked_for=f"at most {target_vocab_size}",
            do=f"set vocab.size to {min(DEFAULT_SIZE, target_vocab_size)}, or leave it out",
        )
    return wanted


def count_supervised(samples: Iterable[Sample], target_vocab_size: int) -> np.ndarray:
    """int64 [V]: how often each id is a supervised token. Raises GateError for an id that the target does not have."""
    counts = np.zeros(target_vocab_size, dtype=np.int64)
    for sample in samples:
        ids = sample.input_ids[sample.supervised]
        _check_ids(ids, target_vocab_size, f"sample {sample.id}")
        np.add.at(counts, ids, 1)
    return counts


def spread(ids: np.ndarray, counts: np.ndarray, target_vocab_size: int) -> np.ndarray:
    """int64 [V] out of the pool's ids and counts. Raises GateError for an id that the target does not have."""
    _check_ids(ids, target_vocab_size, "the pool of the prompts")
    pool = np.zeros(target_vocab_size, dtype=np.int64)
    np.add.at(pool, ids, counts)
    return pool


def choose(size: int, seen: np.ndarray, pool: np.ndarray, forced: Iterable[int], merges: Sequence[int]) -> Chosen:
    """The draft vocabulary of `size` ids by `RULE`.

    seen, pool: int64 [V] counts; forced: ids always inside; merges: the tokenizer's early merges, earliest first.

    Raises:
        UserError: more ids are forced than fit, or one lies outside the target's vocabulary.
    """
    always = check_forced(forced, size, len(seen))
    ranked = rank(seen, pool, always, merges)
    chosen = ranked[:size]
    group = np.select(
        [np.isin(chosen, always), seen[chosen] > 0, pool[chosen] > 0, np.isin(chosen, merges)], [0, 1, 2, 3], 4
    )
    names = ("forced", "answers", "pool", "merges", "rest")
    filled: dict[str, int] = dict(zip(names, np.bincount(group, minlength=len(names)).tolist(), strict=True))
    return Chosen(DraftVocab(np.sort(chosen), len(seen)), filled)


def check_forced(forced: Iterable[int], size: int, total: int) -> np.ndarray:
    """int64, rising: the ids that are always inside. Raises UserError as `choose` does."""
    always = np.unique(np.fromiter(forced, dtype=np.int64))
    if len(always) and not (always[0] >= 0 and always[-1] < total):
        raise UserError(
            f"the tokenizer's id {always[-1]} can end or structure a turn, but the target has {total} tokens",
            do="the tokenizer and the target do not belong together",
        )
    if size < len(always):
        raise UserError(
            f"vocab.size = {size} is too small",
            looked_for=f"at least the {len(always)} ids that can end or structure a turn",
            do="raise vocab.size, or leave it out",
        )
    return always


def rank(seen: np.ndarray, pool: np.ndarray, always: np.ndarray, merges: Sequence[int]) -> np.ndarray:
    """int64 [V]: all ids, the first to be inside first."""
    total = len(seen)
    not_forced = np.ones(total, dtype=np.bool_)
    not_forced[always] = False
    late = np.full(total, len(merges), dtype=np.int64)
    early = np.asarray(merges, dtype=np.int64)
    late[early[early < total]] = np.flatnonzero(early < total)
    return np.lexsort((np.arange(total), late, -pool, -seen, not_forced))  # the last key counts first


def measure(samples: Iterable[Sample], vocab: DraftVocab) -> Coverage:
    """Coverage over samples: the bound of greedy acceptance at the first drafted token."""
    inside: dict[str, int] = {}
    total: dict[str, int] = {}
    mask = vocab.mask
    for sample in samples:
        tokens = sample.input_ids[sample.supervised]
        inside[sample.source] = inside.get(sample.source, 0) + int(mask[tokens].sum())
        total[sample.source] = total.get(sample.source, 0) + len(tokens)
    everything = sum(total.values())
    shares = {name: round(inside[name] / total[name], 6) for name in sorted(total) if total[name]}
    return Coverage(everything, round(sum(inside.values()) / everything, 6) if everything else None, shares)


def _check_ids(ids: np.ndarray, target_vocab_size: int, where: str) -> None:
    if len(ids) and not (ids.min() >= 0 and ids.max() < target_vocab_size):
        raise GateError(
            f"{where} holds token id {ids.min() if ids.min() < 0 else ids.max()}",
            looked_for=f"ids below {target_vocab_size}, the target's vocabulary",
            do="the tokenizer and the target do not belong together",
        )


def _problem(ids: np.ndarray, target_vocab_size: int) -> str | None:
    if ids.dtype != np.int64 or ids.ndim != 1 or not len(ids):
        return f"{TENSOR} is {ids.dtype} {list(ids.shape)}, not int64 [size]"
    if not (np.diff(ids) > 0).all():
        return "its ids are not strictly rising"
    if ids[0] < 0 or ids[-1] >= target_vocab_size:
        return f"it holds ids {ids[0]} to {ids[-1]}; the target has {target_vocab_size}"
    return None
