"""How many bytes stored states take (the layout is that of `data/store.py`). No torch: `doctor` asks before anything is loaded."""

from __future__ import annotations

IDS = 5  # of a token: input_ids int32, supervised uint8
LABEL = 8  # of a label row: log_normalizer float32, top1 int32
SCALE = 4  # of a state of one-byte numbers


def bytes_per_token(aux: int, width: int, itemsize: int, labels: float = 1.0) -> float:
    """Of a stored token: `aux` states of `width` numbers of `itemsize` bytes and, on a share `labels` of the tokens, the last
    state with its labels."""
    state = width * itemsize + (SCALE if itemsize == 1 else 0)
    return (aux + labels) * state + IDS + LABEL * labels
