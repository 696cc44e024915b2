"""Stops for states that would be silently wrong: each names the sample and the reason."""

from __future__ import annotations

from collections.abc import Callable

import torch

from headstart.engines.base import States
from headstart.types import Sample

FEW, LEAST_GREEDY = 4, 0.5


def fault(sample: Sample, states: States) -> str | None:
    """Why the states of a sample cannot be trusted, or None."""
    for gate in _GATES:
        if reason := gate(sample, states):
            return reason
    return None


def strange(sample: Sample, top1: torch.Tensor) -> str | None:
    """Why the states of a greedy answer cannot be its own, or None.

    top1: int [L], the most likely token by the last state of each label row. An answer that was decoded greedily is made of
    those, but for near ties; states of another request, under whatever ids, hardly ever give them. Too few rows say nothing.
    """
    following = sample.input_ids[1:][sample.supervised[1:]]
    hits = int((top1.numpy() == following).sum())
    if len(following) < FEW or hits >= LEAST_GREEDY * len(following):
        return None
    return f"the states are not those of its answer: they make {hits} of {len(following)} tokens the most likely ones"


def _belongs(sample: Sample, states: States) -> str | None:
    wanted = sample.input_ids.tolist()
    if list(states.ids) == wanted:
        return None
    if len(states.ids) != len(wanted):
        return f"computed on {len(states.ids)} tokens, not {len(wanted)}"
    at = next(i for i, (found, want) in enumerate(zip(states.ids, wanted, strict=True)) if found != want)
    return f"belongs to another request: token {at} is {states.ids[at]}, not {wanted[at]}"


def _rows(sample: Sample, states: States) -> str | None:
    for name, tensor in (("aux", states.aux), ("last", states.last)):
        if len(tensor) != len(sample.input_ids):
            return f"{name} has {len(tensor)} rows for {len(sample.input_ids)} tokens"
    return None


def _finite(sample: Sample, states: States) -> str | None:
    del sample
    for name, tensor in (("aux", states.aux), ("last", states.last)):
        bad = (~torch.isfinite(tensor)).flatten(1).any(1).nonzero()
        if len(bad):
            return f"{name} is not finite at token {int(bad[0])}"
    return None


def _alive(sample: Sample, states: States) -> str | None:
    del sample
    for name, tensor in (("aux", states.aux), ("last", states.last)):
        zero = (tensor == 0).flatten(2 if tensor.ndim == 3 else 1).all(-1).nonzero()
        if len(zero):
            return f"{name} is zero at token {int(zero[0, 0])}"
        if len(tensor) > 1 and bool((tensor == tensor[:1]).all()):
            return f"{name} is the same at every token"
    return None


def _distinct(sample: Sample, states: States) -> str | None:
    del sample
    for index in range(states.aux.shape[1] - 1):
        if torch.equal(states.aux[:, index], states.aux[:, index + 1]):
            return f"aux states {index} and {index + 1} are equal: one layer was captured twice"
    return None


_GATES: tuple[Callable[[Sample, States], str | None], ...] = (_belongs, _rows, _finite, _alive, _distinct)
