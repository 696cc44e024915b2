"""The records that cross stage and engine boundaries. Imports neither torch nor transformers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import numpy as np

# {"role": ..., "content": ...} and what a template may use beside them; the first one has the `tools` that may be called.
Message = dict[str, Any]
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
class Media:
    """An image in a conversation. source: its file, or a `data:` URI that holds it; sha256: of its bytes, hexadecimal."""

    kind: Literal["image"]
    source: str
    sha256: str


@dataclass(frozen=True)
class Prompt:
    """What the target reads: ids of the rendered template up to the point where it starts to answer.

    media: the images whose places the template has marked, in their order; the engine puts them there.
    """

    id: str
    ids: tuple[int, ...]
    media: tuple[Media, ...] = ()


@dataclass(frozen=True)
class Completion:
    """What the target produced, ids as sampled, the end-of-turn id included when it came.

    prompt: of a prompt with media, its ids as the engine read them, every image as many placeholders as it has states.
    """

    id: str
    ids: tuple[int, ...]
    finish: Finish
    prompt: tuple[int, ...] | None = None


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
    media, sent: the images in it, and the ids int32 that an engine turns into input_ids with them; None without images.
    """

    id: str
    conversation: str
    source: str
    split: Split
    input_ids: np.ndarray
    supervised: np.ndarray
    finish: Finish
    media: tuple[Media, ...] = ()
    sent: np.ndarray | None = None
