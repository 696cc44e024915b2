"""What an engine does for the stages: generate answers, capture hidden states, and say what it believes.

Boundary index b: the number of decoder layers already applied. b=0 embeddings, b=k the output of layer k-1, b=n the output of
the last layer before the final norm. Every engine translates b to its own convention inside itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from headstart.types import Completion, Prompt, Sample, Sampling

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from headstart.target.head import TargetHead


@dataclass(frozen=True)
class Use:
    """What an engine is opened for; it sizes itself by it.

    longest: tokens of the longest sequence, the answer included. batch_size: sequences decoded together. batch_tokens:
    tokens of one forward pass. boundaries: those that will be captured, rising; None when only answers are wanted.
    media: how many of a kind ("image") one prompt has at most.
    """

    longest: int
    batch_size: int = 64
    batch_tokens: int = 4096
    boundaries: tuple[int, ...] | None = None
    media: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class EngineInfo:
    """Recorded in every manifest that the engine's numbers went into. details: how it captures, and what proved it."""

    name: str
    version: str
    model: str
    dtype: str
    device: str
    layers_path: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Refused:
    """A request that the engine could not serve, and why; the others are not touched by it."""

    id: str
    why: str


@dataclass(frozen=True)
class TopLogProbs:
    """The most likely tokens, best first: ids int64 [tokens, k], values float32 [tokens, k]; row t is about token t+1."""

    ids: torch.Tensor
    values: torch.Tensor


@dataclass(frozen=True)
class States:
    """Hidden states of one sample. aux: [tokens, n_aux, d]; last: [tokens, d] before the final norm; ids: those computed on."""

    id: str
    ids: tuple[int, ...]
    aux: torch.Tensor
    last: torch.Tensor


class Engine(Protocol):
    """Both iterators may yield in any order; each item names what it belongs to."""

    info: EngineInfo
    folder: Path

    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling, tell: Callable[[str, int], None] | None = None
    ) -> Iterator[Completion | Refused]:
        """`tell`, where the engine can, hears the id of a prompt and how many tokens its answer has just grown by."""
        ...

    def capture(
        self, samples: Sequence[Sample], boundaries: Sequence[int], batch_tokens: int
    ) -> Iterator[States | Refused]:
        """Raises UserError for boundaries that the engine was not opened for, where it must know them before."""
        ...

    def top_log_probs(self, ids: Sequence[int], k: int) -> TopLogProbs:
        """The engine's own log-probabilities, from its own forward pass and output head."""
        ...

    def head(self) -> TargetHead:
        """Embedding, final norm and output head of the target, as the engine holds them."""
        ...

    def close(self) -> None: ...


class Session(Protocol):
    """The target with a key/value cache, for decoding step by step (one sequence)."""

    def extend(self, ids: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Append tokens. Returns logits float32 [n, V] and aux states [n, n_aux, d]."""
        ...

    def rewind(self, length: int) -> None:
        """Forget everything after the first `length` tokens."""
        ...


class Decoding(Protocol):
    """An engine that can decode step by step under our control."""

    def session(self, boundaries: Sequence[int]) -> Session: ...
