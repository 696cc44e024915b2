"""Plain reference speculative decoding: one sequence, chain drafting, exact verification. Slow, short, and to be
trusted.

Before a verify step the target's cache holds every confirmed token but the last; the draft's cache holds one entry
per token of that cache: (x_{k+1}, fused true states of x_k). So the first draft comes from true features alone, and
each further one adds the draft's own output: the context that the training-time test teaches. After the verify step
both caches go back to what was confirmed, and the draft's own entries are made anew from true features.

The token after the prompt comes from the prefill and belongs to no verify step. K tokens are drafted before every
verify step, also near the end of an answer; `acceptance` says how a step that the end cuts is counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from headstart.drafts.eagle3 import DraftCache, Eagle3
from headstart.engines.base import Session
from headstart.evaluation.acceptance import AcceptanceLog
from headstart.evaluation.choice import Choice, Drafted
from headstart.evaluation.speed import Costs, Stopwatch
from headstart.products import own_products


@dataclass(frozen=True)
class Limits:
    """Where an answer ends: at a token of `end_ids`, which belongs to it, or after `max_new_tokens`."""

    max_new_tokens: int
    end_ids: frozenset[int]


@dataclass(frozen=True)
class Decoded:
    """One answer. `log` has no steps when no draft took part or the first token ended the answer."""

    ids: tuple[int, ...]
    finish: Literal["stop", "length"]
    log: AcceptanceLog
    costs: Costs


class _Answer:
    """The tokens decoded so far; takes no more than the limits allow."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.ids: list[int] = []
        self.finish: Literal["stop", "length"] | None = None

    def take(self, tokens: Sequence[int]) -> int:
        """Append tokens up to the end of the answer; returns how many were taken."""
        for count, token in enumerate(tokens, start=1):
            self.ids.append(token)
            if token in self.limits.end_ids:
                self.finish = "stop"
            elif len(self.ids) == self.limits.max_new_tokens:
                self.finish = "length"
            if self.finish:
                return count
        return len(tokens)

    def decoded(self, log: AcceptanceLog, costs: Costs) -> Decoded:
        assert self.finish is not None
        costs.whole.steps = len(self.ids) - 1
        return Decoded(tuple(self.ids), self.finish, log, costs)


class _Drafter:
    """The draft with its cache: true features of all confirmed tokens, then its own chain on top."""

    def __init__(self, draft: Eagle3, choice: Choice) -> None:
        self.draft, self.choice = draft, choice
        self.cache = DraftCache()
        self.known = 0
        self.out: Tensor | None = None

    def follow(self, aux: Tensor, ids: Sequence[int]) -> None:
        """Append true features: aux states [n, n_aux, d] of n confirmed tokens, and the n tokens after them."""
        self.cache.rewind(self.known)
        weight = self.draft.fc.weight
        hidden = self.draft.fuse(aux.to(weight.device, weight.dtype))
        self.out = self.draft.extend(torch.tensor(ids, device=weight.device), hidden, self.cache)[-1:]
        self.known += len(ids)

    def propose(self, draft_tokens: int) -> Drafted:
        """A chain of `draft_tokens` tokens after the last confirmed one."""
        assert self.out is not None
        out, tokens, distributions = self.out, [], []
        for step in range(draft_tokens):
            if step:
                ids = torch.tensor(tokens[-1:], device=out.device)
                out = self.draft.extend(ids, self.draft.feed(out), self.cache)
            index, distribution = self.choice.pick(self.draft.logits(out)[0])
            tokens.append(int(self.draft.draft_to_target[index]))
            if distribution is not None:
                distributions.append(self._over_target(distribution))
        return Drafted(tuple(tokens), tuple(distributions))

    def _over_target(self, distribution: Tensor) -> Tensor:
        whole = distribution.new_zeros(self.draft.shape.target_vocab_size)
        whole[self.draft.draft_to_target.cpu()] = distribution
        return whole


@torch.no_grad()
def plain_decode(session: Session, prompt: Sequence[int], choice: Choice, limits: Limits) -> Decoded:
    """The target alone, one token per step."""
    _check(prompt, limits)
    session.rewind(0)
    logits, _ = session.extend(prompt)
    costs, answer = Costs(), _Answer(limits)
    watch = _stopwatch(logits.device)
    answer.take([choice.pick(logits[-1])[0]])
    with watch.measure(costs.whole):
        while not answer.finish:
            with watch.measure(costs.plain):
                logits, _ = session.extend(answer.ids[-1:])
            answer.take([choice.pick(logits[-1])[0]])
    return answer.decoded(AcceptanceLog.of([], []), costs)


@torch.no_grad()
def speculative_decode(
    session: Session, draft: Eagle3, prompt: Sequence[int], choice: Choice, limits: Limits, *, draft_tokens: int
) -> Decoded:
    """The target with a draft. Greedy answers are the target's own; sampled ones have its distribution.

    session: of the target, with the draft's `aux_layers` as boundaries. draft_tokens: K, drafted before every verify
    step.
    """
    _check(prompt, limits)
    if draft_tokens < 1:
        raise ValueError(f"draft_tokens {draft_tokens} must be at least 1")
    session.rewind(0)
    logits, aux = session.extend(prompt)
    costs, answer, drafter = Costs(), _Answer(limits), _Drafter(draft, choice)
    watch = _stopwatch(logits.device)
    confirmed = [choice.pick(logits[-1])[0]]
    answer.take(confirmed)
    accepted, drafted = [], []
    with watch.measure(costs.whole):
        if not answer.finish:
            drafter.follow(aux, [*prompt[1:], *confirmed])
        while not answer.finish:
            with watch.measure(costs.draft, draft_tokens):
                if accepted:
                    drafter.follow(aux, confirmed)
                with own_products():  # of one row each
                    chain = drafter.propose(draft_tokens)
            with watch.measure(costs.verify):
                logits, aux = session.extend([answer.ids[-1], *chain.tokens])
            right, own = choice.verify(logits, chain)
            confirmed, aux = [*chain.tokens[:right], own], aux[: right + 1]
            kept = answer.take(confirmed)
            accepted.append(kept - 1)
            drafted.append(draft_tokens if kept == right + 1 else kept - 1)
            session.rewind(len(prompt) + len(answer.ids) - 1)
    return answer.decoded(AcceptanceLog.of(accepted, drafted), costs)


@dataclass(frozen=True)
class Mismatch:
    """Where a greedy speculative answer left the target's own.

    gap: the target's first choice minus its second, in logits. noise: largest change of any logit there when the
    target reads the same tokens K + 1 at a time instead of one by one. tie: the gap lies within what that rounding
    explains.
    """

    position: int
    expected: int | None
    found: int | None
    gap: float
    noise: float
    tie: bool


@torch.no_grad()
def first_mismatch(
    session: Session, prompt: Sequence[int], plain: Sequence[int], speculative: Sequence[int], width: int
) -> Mismatch | None:
    """Where two answers to `prompt` first differ, None when they are identical; `width` is K + 1.

    Rounding differs with the width of a step, so two nearly equal first choices may swap. Such a tie is named, and
    still counts as not identical.
    """
    if tuple(plain) == tuple(speculative):
        return None
    pairs = zip(plain, speculative, strict=False)
    position = next((i for i, (one, other) in enumerate(pairs) if one != other), min(len(plain), len(speculative)))
    single = _replay(session, prompt, plain[:position], 1)
    noise = float((single - _replay(session, prompt, plain[:position], width)).abs().max())
    first, second = single.topk(2).values.tolist()
    return Mismatch(
        position, _at(plain, position), _at(speculative, position), first - second, noise, first - second <= 4 * noise
    )


def _replay(session: Session, prompt: Sequence[int], ids: Sequence[int], width: int) -> Tensor:
    """Logits [V] after prompt and ids, read after the prefill in steps of `width` tokens (the first may be shorter)."""
    session.rewind(0)
    logits, _ = session.extend(prompt)
    start = 0
    for end in range(len(ids) % width, len(ids) + 1, width):
        if end > start:
            logits, _ = session.extend(ids[start:end])
            start = end
    return logits[-1]


def _at(ids: Sequence[int], position: int) -> int | None:
    return ids[position] if position < len(ids) else None


def _check(prompt: Sequence[int], limits: Limits) -> None:
    if not prompt or limits.max_new_tokens < 1:
        raise ValueError("decoding needs a prompt and max_new_tokens of at least 1")


def _stopwatch(device: torch.device) -> Stopwatch:
    return Stopwatch(torch.cuda.synchronize if device.type == "cuda" else _no_wait)


def _no_wait() -> None: ...
