"""The records that cross stage and engine boundaries. Imports neither torch nor transformers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

Message = dict[str, Any]  # {"role": ..., "content": ...} and what a template may use beside them
Split = Literal["train", "validation"]
Finish = Literal["stop", "length", "given"]  # `given`: the answer came with the data


@dataclass(frozen=True)
class Conversation:
    """One conversation as read from a source, before any answer of the target."""

    id: str
    source: str
    row: int
    split: Split
    messages: tuple[Message, ...]


@dataclass(frozen=True)
class Prompt:
    """What the target reads: ids of the rendered template up to the point where it starts to answer."""

    id: str
    ids: tuple[int, ...]


@dataclass(frozen=True)
class Completion:
    """What the target produced, ids as sampled, the end-of-turn id included when it came."""

    id: str
    ids: tuple[int, ...]
    finish: Finish


@dataclass(frozen=True)
class Sampling:
    """How to sample; `temperature` 0 is greedy. `end_ids` end an answer and belong to it."""

    max_new_tokens: int
    temperature: float
    top_p: float
    seed: int
    end_ids: tuple[int, ...]


@dataclass(frozen=True)
class Sample:
    """One sequence to learn from.

    input_ids: int32 [tokens]. supervised: bool [tokens], True where the token was produced by the target (`l_t`).
    """

    id: str
    conversation: str
    source: str
    split: Split
    input_ids: np.ndarray
    supervised: np.ndarray
    finish: Finish
