"""Decoding one prompt in every way that is compared, and the log that keeps finished prompts over a kill."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from headstart import files
from headstart.drafts.eagle3 import Eagle3
from headstart.engines.base import Session
from headstart.evaluation.acceptance import AcceptanceLog
from headstart.evaluation.choice import choice_of
from headstart.evaluation.decode import Decoded, Limits, Mismatch, first_mismatch, plain_decode, speculative_decode
from headstart.evaluation.prompts import EvalPrompt
from headstart.evaluation.speed import Costs

NO_DRAFT = "none"
_WARM_UP = 8  # tokens decoded and thrown away, so that first calls do not count as steps


@dataclass(frozen=True)
class Answer:
    """One prompt decoded in one way. draft: `none` or a draft's name. identical: to the target's own greedy answer,
    None where that is not asked (sampling, or no draft)."""

    set: str
    place: str
    id: str
    temperature: float
    draft: str
    prompt_tokens: int
    ids: tuple[int, ...]
    finish: str
    log: AcceptanceLog
    costs: Costs
    identical: bool | None = None
    mismatch: Mismatch | None = None

    def as_json(self) -> dict[str, Any]:
        plain = {name: getattr(self, name) for name in _PLAIN}
        log = {"ids": self.ids, "accepted": self.log.accepted.tolist(), "drafted": self.log.drafted.tolist()}
        return {
            **plain,
            **log,
            "costs": self.costs.as_json(),
            "mismatch": asdict(self.mismatch) if self.mismatch else None,
        }

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> Answer:
        return cls(
            **{name: raw[name] for name in _PLAIN},
            ids=tuple(raw["ids"]),
            log=AcceptanceLog.of(raw["accepted"], raw["drafted"]),
            costs=Costs.from_json(raw["costs"]),
            mismatch=Mismatch(**raw["mismatch"]) if raw["mismatch"] else None,
        )


_PLAIN = ("set", "place", "id", "temperature", "draft", "prompt_tokens", "finish", "identical")


@dataclass(frozen=True)
class Bench:
    """The target and the drafts to be compared, ready to decode. All drafts read the same aux layers."""

    session: Session
    drafts: Mapping[str, Eagle3]
    limits: Limits
    draft_tokens: int
    seed: int

    def warm_up(self, prompt: EvalPrompt, temperature: float) -> None:
        short = Limits(min(_WARM_UP, self.limits.max_new_tokens), self.limits.end_ids)
        for name in (NO_DRAFT, *self.drafts):
            self._decode(prompt, temperature, name, short)

    def measure(self, prompt: EvalPrompt, temperature: float) -> Iterator[Answer]:
        """The prompt without a draft, then with each; one after another, so that all meet the same load of the
        machine."""
        plain = self._decode(prompt, temperature, NO_DRAFT, self.limits)
        yield _answer(prompt, temperature, NO_DRAFT, plain)
        for name in self.drafts:
            found = self._decode(prompt, temperature, name, self.limits)
            answer = _answer(prompt, temperature, name, found)
            if temperature == 0:
                mismatch = first_mismatch(self.session, prompt.ids, plain.ids, found.ids, self.draft_tokens + 1)
                answer = replace(answer, identical=mismatch is None, mismatch=mismatch)
            yield answer

    def _decode(self, prompt: EvalPrompt, temperature: float, name: str, limits: Limits) -> Decoded:
        own = f"{prompt.place}/{prompt.ids}"  # not where its file lies: elsewhere the same answers are sampled
        choice = choice_of(temperature, f"{self.seed}/{own}/{temperature}/{name}")
        if name == NO_DRAFT:
            return plain_decode(self.session, prompt.ids, choice, limits)
        draft = self.drafts[name]
        return speculative_decode(self.session, draft, prompt.ids, choice, limits, draft_tokens=self.draft_tokens)


def _answer(prompt: EvalPrompt, temperature: float, draft: str, found: Decoded) -> Answer:
    return Answer(
        set=prompt.set,
        place=prompt.place,
        id=prompt.id,
        temperature=temperature,
        draft=draft,
        prompt_tokens=len(prompt.ids),
        ids=found.ids,
        finish=found.finish,
        log=found.log,
        costs=found.costs,
    )


class AnswerLog:
    """Answers by prompt and temperature, one durable JSON line each; a line that a kill cut short is dropped."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.found: dict[tuple[str, float], list[Answer]] = {}
        if path.exists():
            self._read(path.read_bytes())

    def append(self, key: tuple[str, float], answers: Sequence[Answer]) -> None:
        line = {"key": key, "answers": [answer.as_json() for answer in answers]}
        with self.path.open("ab") as file:
            file.write(json.dumps(line).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        self.found[key] = list(answers)

    def _read(self, data: bytes) -> None:
        """Take whole lines up to the first that cannot be read; what follows it is decoded again."""
        good = 0
        for line in data.splitlines(keepends=True):
            try:
                raw = json.loads(line) if line.endswith(b"\n") else {}
                name, temperature = raw["key"]
                self.found[name, temperature] = [Answer.from_json(answer) for answer in raw["answers"]]
            except (ValueError, KeyError, TypeError):
                break
            good += len(line)
        if good < len(data):
            files.write_bytes(self.path, data[:good])
