"""Measuring drafts on a target that we cannot decode step by step: it answers greedily in its own engine, the states of
its answers are captured, and the drafts are replayed over them. Exact for greedy decoding (see `reference_walk`); what
is not measured here is time, and whether the served answers stay the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from headstart.drafts.eagle3 import Eagle3
from headstart.engines.base import Engine, Refused, States
from headstart.errors import GateError
from headstart.evaluation.acceptance import AcceptanceLog
from headstart.evaluation.bench import NO_DRAFT, Answer
from headstart.evaluation.decode import Limits
from headstart.evaluation.offline import reference_walk
from headstart.evaluation.prompts import EvalPrompt
from headstart.evaluation.speed import Costs
from headstart.types import Completion, Sample, Sampling

_ROOM = 4  # free GPU memory, in sizes of the drafts, from which they are replayed there
TOGETHER = 32  # prompts answered, captured and logged together; a killed run loses at most these


@dataclass(frozen=True)
class Replay:
    """The engine that answers, and the drafts to be compared; all read the same aux layers."""

    engine: Engine
    drafts: Mapping[str, Eagle3]
    limits: Limits
    draft_tokens: int
    batch_tokens: int

    def measure(self, prompts: Sequence[EvalPrompt]) -> Iterator[list[Answer]]:
        """The answers to each prompt, in order: the target's own, then with each draft.

        Raises:
            GateError: the engine did not answer a prompt, or gave no states of its answer.
        """
        completions = self._answer(prompts)
        sequences = {prompt.key: (*prompt.ids, *completions[prompt.key].ids) for prompt in prompts}
        aux_layers = next(iter(self.drafts.values())).shape.aux_layers
        logs: dict[str, dict[str, AcceptanceLog]] = {}
        for states in capture_sequences(self.engine, sequences, aux_layers, self.batch_tokens):
            answer = completions[states.id].ids
            logs[states.id] = {
                name: reference_walk(draft, states.aux, states.ids, len(states.ids) - len(answer), self.draft_tokens)
                for name, draft in self.drafts.items()
            }
        for prompt in prompts:
            found = {NO_DRAFT: AcceptanceLog.of([], []), **logs[prompt.key]}
            yield [_answered(prompt, name, completions[prompt.key], log) for name, log in found.items()]

    def _answer(self, prompts: Sequence[EvalPrompt]) -> dict[str, Completion]:
        asked = [prompt.as_prompt() for prompt in prompts]
        ends = tuple(sorted(self.limits.end_ids))
        sampling = Sampling(self.limits.max_new_tokens, temperature=0.0, top_p=1.0, seed=0, end_ids=ends)
        completions = {}
        for completion in self.engine.generate(asked, sampling):
            if isinstance(completion, Refused):
                raise GateError(f"the engine did not answer a prompt: {completion.why}")
            completions[completion.id] = completion
        return completions


def capture_sequences(
    engine: Engine, sequences: Mapping[str, tuple[int, ...]], boundaries: Sequence[int], batch_tokens: int
) -> Iterator[States]:
    """States of token sequences, in any order. Raises GateError when the engine left one out, or read other tokens."""
    samples = [_sample(name, ids) for name, ids in sequences.items()]
    left = dict(sequences)
    for states in engine.capture(samples, boundaries, batch_tokens):
        if isinstance(states, Refused):
            raise GateError(f"the engine gave no states of an answer: {states.why}")
        if states.ids != left.pop(states.id):
            raise GateError("the engine captured other tokens than it was given")
        yield states
    if left:
        raise GateError(f"the engine gave no states of {len(left)} of {len(sequences)} answers")


def on_spare_device(drafts: Mapping[str, Eagle3]) -> dict[str, Eagle3]:
    """The drafts on a GPU where one has room for them beside whatever else is there, else on the CPU."""
    weight = sum(tensor.nbytes for draft in drafts.values() for tensor in draft.state_dict().values())
    roomy = torch.cuda.is_available() and torch.cuda.mem_get_info()[0] > _ROOM * weight
    return {name: draft.to("cuda" if roomy else "cpu") for name, draft in drafts.items()}


def off_devices(drafts: Mapping[str, Eagle3]) -> None:
    """Leave the GPU to an engine that is about to take all of it."""
    for draft in drafts.values():
        draft.to("cpu")
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _sample(name: str, ids: tuple[int, ...]) -> Sample:
    tokens = np.array(ids, dtype=np.int32)
    return Sample(name, name, "evaluation", "validation", tokens, np.ones(len(ids), dtype=bool), "given")


def _answered(prompt: EvalPrompt, draft: str, completion: Completion, log: AcceptanceLog) -> Answer:
    return Answer(
        set=prompt.set,
        place=prompt.place,
        id=prompt.id,
        temperature=0.0,
        draft=draft,
        prompt_tokens=len(prompt.ids),
        ids=completion.ids,
        finish=completion.finish,
        log=log,
        costs=Costs(),
    )
