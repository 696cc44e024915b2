"""Which conversations are kept and on which side they go: by hash, so that neither depends on the order of rows."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from headstart.types import Split

_CHUNK = re.compile(r"(.+)_\d+")
_MOST_CHUNKS = 20  # mean records per conversation up to which `_N` is taken for the number of a chunk


def rank(seed: int, purpose: str, name: str) -> float:
    """A number in [0, 1) that stands for `name`; another one for every seed and purpose."""
    digest = hashlib.blake2b(f"{seed}\0{purpose}\0{name}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest) >> 11) / 2**53


def groups(ids: Sequence[str]) -> list[str]:
    """The conversation that each record of one source belongs to.

    ShareGPT cuts long conversations into records `ID_0`, `ID_1`, ...: they belong together. Where all ids share one
    stem (`chat_0` to `chat_99`), or stems have too many records on average, the number is part of the name instead.
    """
    stems = [match[1] if (match := _CHUNK.fullmatch(name)) else name for name in ids]
    different = len(set(stems))
    return stems if different > 1 and len(stems) <= _MOST_CHUNKS * different else list(ids)


def shares(available: Mapping[str, int], total: int) -> dict[str, int]:
    """How many of each source make `total`, in proportion to what it has; the largest remainders are rounded up."""
    whole = sum(available.values())
    if total >= whole:
        return dict(available)
    parts = {name: divmod(total * count, whole) for name, count in available.items()}
    quota = {name: part for name, (part, _) in parts.items()}
    by_remainder = sorted(parts, key=lambda name: -parts[name][1])  # a stable sort: ties go to the earlier source
    for name in by_remainder[: total - sum(quota.values())]:
        quota[name] += 1
    return quota


def choose(ids: Sequence[str], sources: Sequence[str], total: int | None, seed: int) -> list[int]:
    """Indices of those to keep, rising: at most `total`, by share of each source, the lowest ranks first."""
    if total is None or total >= len(ids):
        return list(range(len(ids)))
    quota = shares(Counter(sources), total)
    kept: list[int] = []
    for index in sorted(range(len(ids)), key=lambda i: (rank(seed, "choose", ids[i]), ids[i])):
        if quota[sources[index]] > 0:
            quota[sources[index]] -= 1
            kept.append(index)
    return sorted(kept)


def sides(names: Iterable[str], fraction: float, seed: int) -> dict[str, Split]:
    """The side of every group: validation where its rank is below `fraction`.

    A group keeps its side when others come or go, except that a single group is trained on, and that with two groups or
    more, and a fraction above 0, neither side stays empty.
    """
    ranks = {name: rank(seed, "split", name) for name in names}
    held = {name for name, value in ranks.items() if value < fraction}
    if len(ranks) == 1:
        held = set()
    if fraction > 0 and len(ranks) > 1:
        held |= {min(ranks, key=lambda name: (ranks[name], name))}
        held -= {max(ranks, key=lambda name: (ranks[name], name))}
    return {name: "validation" if name in held else "train" for name in ranks}
