"""How much a run has to do, in tokens: counted where its conversations exist, else the most that its settings allow."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headstart.config import Run


@dataclass(frozen=True)
class Work:
    """Tokens of all conversations. exact: counted, and not the most that is possible."""

    conversations: int
    prompt_tokens: int
    answer_tokens: int
    held_out: float
    exact: bool

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.answer_tokens

    @property
    def length(self) -> float:
        return self.tokens / max(self.conversations, 1)

    def steps(self, run: Run) -> int:
        """Optimiser steps of a training; packing leaves a batch 90 % full."""
        training = self.tokens * (1 - self.held_out)
        each = max(math.ceil(training / (0.9 * run.train.batch_tokens)), 1)
        whole = each * run.train.epochs
        return min(whole, run.train.max_steps or whole)


def counted(counts: Mapping[str, Any]) -> Work:
    """From the counts of a finished conversations/ (its manifest)."""
    samples, tokens, answers = counts["samples"], counts["tokens"], counts["supervised_tokens"]
    number = sum(samples.values())
    return Work(number, tokens - answers, answers, samples.get("validation", 0) / max(number, 1), exact=True)


def bounded(
    run: Run, conversations: int, prompt_tokens: float, turns: float = 1.0, answers: float | None = None
) -> Work:
    """Before there are answers: each as long as it may be, unless it is known better.

    conversations: that will be used, without data.max_conversations. Of one of them, prompt_tokens: all that is not an answer, with
    its template; turns: user turns; answers: tokens of its answers together.
    """
    data = run.data
    number = min(conversations, data.max_conversations or conversations)
    prompt = min(prompt_tokens, data.max_length)
    longest = data.max_length - prompt
    if data.answers == "regenerate":
        longest = min(longest, turns * run.regenerate.max_new_tokens)
    each = longest if answers is None else min(answers, longest)
    return Work(number, round(number * prompt), round(number * each), data.validation_fraction, exact=False)
