"""What a serving run leaves behind: vLLM's answers, how long they took, and what its counters say. Light."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Counters:
    """vLLM's counters of speculative decoding (`vllm:spec_decode_*`, `v1/spec_decode/metrics.py` of 0.32).

    drafts: verify steps. draft_tokens: drafted in them. accepted: of those, also the ones past the end of an answer.
    per_position: accepted, by place in the draft.
    """

    drafts: int
    draft_tokens: int
    accepted: int
    per_position: tuple[int, ...]

    def since(self, earlier: Counters) -> Counters:
        """What was counted after `earlier`; the counters only grow."""
        pairs = zip(self.per_position, earlier.per_position or (0,) * len(self.per_position), strict=True)
        return Counters(
            self.drafts - earlier.drafts,
            self.draft_tokens - earlier.draft_tokens,
            self.accepted - earlier.accepted,
            tuple(now - before for now, before in pairs),
        )

    @classmethod
    def total(cls, parts: Sequence[Counters]) -> Counters:
        places: Iterable[tuple[int, ...]] = zip(*(part.per_position for part in parts), strict=True)
        return cls(
            sum(part.drafts for part in parts),
            sum(part.draft_tokens for part in parts),
            sum(part.accepted for part in parts),
            tuple(sum(place) for place in places),
        )


@dataclass(frozen=True)
class ServedAnswer:
    """One prompt answered greedily; seconds with the prefill. counters: None without a draft."""

    ids: tuple[int, ...]
    seconds: float
    counters: Counters | None


@dataclass(frozen=True)
class Served:
    """All prompts, in the order they were given, one after another in one engine.

    rung, why: how the target can be served with a draft (`ladder`). dtype: vLLM's compute type. chat_ids: what vLLM
    itself makes of the messages of the first prompts, with the chat template it uses.
    """

    version: str
    rung: str
    why: str
    dtype: str
    answers: tuple[ServedAnswer, ...]
    chat_ids: tuple[tuple[int, ...], ...] = ()

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> Served:
        answers = tuple(_answer_of(one) for one in raw["answers"])
        return cls(**raw | {"answers": answers, "chat_ids": tuple(tuple(ids) for ids in raw["chat_ids"])})


def _answer_of(raw: dict[str, Any]) -> ServedAnswer:
    counted = raw["counters"]
    counters = Counters(**counted | {"per_position": tuple(counted["per_position"])}) if counted else None
    return ServedAnswer(tuple(raw["ids"]), raw["seconds"], counters)
