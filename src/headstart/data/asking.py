"""Asking an engine many prompts: in which portions, with how much room, and what an answer must be."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

from headstart.config import Run
from headstart.data.answers import AnswerLog
from headstart.engines.base import Engine, Refused
from headstart.errors import GateError
from headstart.events import Progress
from headstart.types import Completion, Prompt, Sampling

PORTIONS = 16  # at a kill, about 1/16 of a round is lost
MOST_BATCHES = 8  # in one portion: enough that the engine refills finished rows most of the time
ROOM_STEPS = 16  # near max_length, answers get room in steps of max_new_tokens / 16, to be decoded together


class Asker:
    """Asks the engine in portions of equal room and similar length, and logs each portion before the next is asked.

    A portion always holds the same prompts, also when a resumed run skips it: batched matrix products round differently
    with other neighbours, and so answers would depend on kills.
    """

    def __init__(self, engine: Engine, run: Run, end_ids: tuple[int, ...], log: AnswerLog, bar: Progress) -> None:
        self._engine, self._end_ids, self._log, self._bar = engine, end_ids, log, bar
        self._settings, self._max_length = run.regenerate, run.data.max_length
        self.tokens, self.prompt_tokens, self.asked, self.seconds = 0, 0, 0, 0.0
        self.refused: dict[str, str] = {}  # prompts that the engine did not take, and why

    def room(self, ids: Sequence[int]) -> int:
        """Tokens that an answer to this prompt may have; 0 when there is no step of room."""
        longest = min(self._settings.max_new_tokens, self._max_length)
        free = self._max_length - len(ids)
        step = max(1, longest // ROOM_STEPS)
        return longest if free >= longest else max(0, free - free % step)

    def answers(self, prompts: Sequence[Prompt]) -> Iterator[Completion]:
        """The answer to every prompt that is not `refused`, logged or new.

        Raises:
            GateError: the engine answers something else.
        """
        for room, portion in _portions(prompts, self.room, self._settings.batch_size):
            missing = [prompt for prompt in portion if self._log.get(prompt) is None]
            if missing:
                answers = self._ask(missing, room)
                self._log.append([(prompt, answers[prompt.id]) for prompt in missing if prompt.id in answers])
            for prompt in portion:
                if (completion := self._log.get(prompt)) is not None:
                    yield completion

    def _ask(self, prompts: Sequence[Prompt], room: int) -> dict[str, Completion]:
        chosen = self._settings
        sampling = Sampling(room, chosen.temperature, chosen.top_p, chosen.seed, self._end_ids)
        found: dict[str, Completion] = {}
        wanted = {prompt.id for prompt in prompts}
        started = time.monotonic()
        counted: dict[str, int] = defaultdict(int)

        def tell(prompt: str, tokens: int) -> None:
            counted[prompt] += tokens
            self._bar.advance(tokens)

        for completion in self._engine.generate(prompts, sampling, tell):
            if isinstance(completion, Refused):
                self.refused[completion.id] = completion.why
                continue
            check(completion, wanted - found.keys(), sampling)
            found[completion.id] = completion
            self.tokens += len(completion.ids)
            self._bar.advance(
                chosen.max_new_tokens - counted[completion.id]
            )  # an answer that ends early frees its rest
        self.seconds += time.monotonic() - started
        if missing := sorted(wanted - found.keys() - self.refused.keys()):
            raise GateError(f"the engine gave no answer to {len(missing)} prompts, first {missing[0]}")
        self.asked += len(found)
        self.prompt_tokens += sum(len(prompt.ids) for prompt in prompts)
        return found


def _portions(
    prompts: Sequence[Prompt], room_of: Callable[[Sequence[int]], int], batch_size: int
) -> Iterator[tuple[int, list[Prompt]]]:
    """Portions of equal room, longest prompts first, so that what does not fit into memory shows at once."""
    size = batch_size * min(MOST_BATCHES, max(1, len(prompts) // (PORTIONS * batch_size)))
    groups: dict[int, list[Prompt]] = defaultdict(list)
    for prompt in sorted(prompts, key=lambda prompt: (-len(prompt.ids), prompt.id)):
        groups[room_of(prompt.ids)].append(prompt)
    for room, group in groups.items():
        for start in range(0, len(group), size):
            yield room, group[start : start + size]


def check(completion: Completion, open_ids: set[str], sampling: Sampling) -> None:
    """Stop what would be a silent fault: a wrong or doubled id, an empty or too long answer, an end that is none."""
    name, ids = completion.id, completion.ids
    if name not in open_ids:
        raise GateError(f"the engine answered {name}, which it was not asked, or not twice")
    if not 0 < len(ids) <= sampling.max_new_tokens:
        raise GateError(f"the engine gave {len(ids)} tokens for {name}", looked_for=f"1 to {sampling.max_new_tokens}")
    ends = [index for index, token in enumerate(ids) if token in sampling.end_ids]
    expected = [len(ids) - 1] if completion.finish == "stop" else []
    if ends != expected:
        raise GateError(
            f"the answer to {name} ended by {completion.finish!r}, but has end ids at {ends} of {len(ids)} tokens",
            looked_for=f"end ids {sampling.end_ids} at {expected or 'no place'}",
        )
