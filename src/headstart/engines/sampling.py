"""Choosing the next token of many rows at once: greedy, or sampled with one random number for each row."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from headstart.types import Sampling

_CANDIDATES = 1024  # a nucleus almost always fits in so many tokens; a full sort is 50 times slower


def choose(logits: Tensor, sampling: Sampling, generators: Sequence[torch.Generator]) -> Tensor:
    """Token ids int64 [rows] from logits [rows, V]; each row draws once from its own generator when sampling."""
    if sampling.temperature == 0:
        return logits.argmax(-1)
    draws = torch.cat([torch.rand(1, generator=generator, dtype=torch.float64) for generator in generators])
    probabilities = (logits.double() / sampling.temperature).softmax(-1)
    return sample(probabilities, sampling.top_p, draws.to(logits.device))


def sample(probabilities: Tensor, top_p: float, draws: Tensor) -> Tensor:
    """Inverse-transform sampling: ids [rows] of float64 probabilities [rows, V] at draws [rows] in [0, 1).

    top_p below 1 keeps the smallest set of most likely tokens whose mass reaches it (the nucleus), renormalised.
    """
    if top_p >= 1:
        return _pick(probabilities.cumsum(-1), draws)
    ranked, ids = probabilities.topk(min(_CANDIDATES, probabilities.shape[-1]))
    if bool((ranked.sum(-1) < top_p).any()):
        ranked, ids = probabilities.sort(-1, descending=True)
    before = ranked.cumsum(-1) - ranked
    nucleus = torch.where(before < top_p, ranked, 0.0)
    return ids.gather(-1, _pick(nucleus.cumsum(-1), draws)[:, None])[:, 0]


def _pick(cumulative: Tensor, draws: Tensor) -> Tensor:
    """The first index whose cumulative mass exceeds draw x total; never one of zero mass."""
    points = draws[:, None] * cumulative[:, -1:]
    index = torch.searchsorted(cumulative, points, right=True)[:, 0]
    last = (cumulative < cumulative[:, -1:]).sum(-1)
    return torch.minimum(index, last)
