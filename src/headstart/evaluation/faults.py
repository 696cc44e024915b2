"""What a serving engine may do wrong with a draft, each fault made on purpose, so that its numbers can be recognised.

A fault changes which states of the target the draft is given, or what the draft computes of them. The reference walk
under the fault tells the acceptance that the engine would then measure.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from headstart.drafts.eagle3 import Eagle3
from headstart.drafts.layers import Attention, DecoderLayer, LatentAttention
from headstart.evaluation.acceptance import AcceptanceLog
from headstart.evaluation.offline import reference_walk
from headstart.evaluation.serving import NO_FAULT
from headstart.target.layers import default_boundaries

_THETAS = (10_000.0, 500_000.0, 1_000_000.0)  # Transformers' default, Llama 3's, Qwen's
_FACTORS = (2.0, 4.0, 8.0)
_FEW = 3  # states whose orders are all tried; of more only the reversed one


@dataclass(frozen=True)
class Fault:
    """One way of being wrong.

    kind: layer ids, aux order, norm flags, vocabulary, rope, weights, or none. says: completes "what the draft gives
    ...". boundaries: the states that each slot of the fusion is given. draft: computes as the faulty engine would.
    """

    kind: str
    says: str
    boundaries: tuple[int, ...]
    draft: Eagle3


@dataclass(frozen=True)
class Replayed:
    """A sequence to replay. ids: a prompt of `prompt_tokens` tokens and the target's greedy answer. aux: its states
    [tokens, boundaries, d] at every boundary that `needed` names, in that order."""

    id: str
    ids: tuple[int, ...]
    prompt_tokens: int
    aux: Tensor


def no_fault(draft: Eagle3) -> Fault:
    """The draft as it should be."""
    return Fault(NO_FAULT, "when all is right", draft.shape.aux_layers, draft)


def candidates(
    draft: Eagle3,
    num_layers: int,
    *,
    thetas: Iterable[float] = (),
    factors: Iterable[float] = (),
    untrained: Eagle3 | None = None,
    lowest: int = 0,
) -> list[Fault]:
    """Every fault that changes something for this draft.

    num_layers: of the target. thetas, factors: further RoPE bases and linear scalings to try, such as the target's own.
    untrained: the draft before training; what an engine gives that loaded no weights is like it. lowest: the first
    boundary that can be captured.
    """
    found = [
        *_other_states(draft, lowest, num_layers),
        *_norm_flags(draft),
        *_vocabularies(draft),
        *_rope(draft, thetas, factors),
    ]
    if untrained is not None:
        found.append(Fault("weights", "before it was trained", draft.shape.aux_layers, untrained))
    return found


def needed(faults: Sequence[Fault]) -> tuple[int, ...]:
    """Boundaries to capture for all of them, rising."""
    return tuple(sorted({boundary for fault in faults for boundary in fault.boundaries}))


def walk_all(
    faults: Sequence[Fault], sequences: Iterable[Replayed], draft_tokens: int
) -> list[dict[str, AcceptanceLog]]:
    """The verify steps under each fault, by the sequence's id; states are let go sequence by sequence."""
    slots = {boundary: index for index, boundary in enumerate(needed(faults))}
    logs: list[dict[str, AcceptanceLog]] = [{} for _ in faults]
    for sequence in sequences:
        for fault, found in zip(faults, logs, strict=True):
            aux = sequence.aux[:, [slots[boundary] for boundary in fault.boundaries]]
            log = reference_walk(fault.draft, aux, sequence.ids, sequence.prompt_tokens, draft_tokens)
            found[sequence.id] = log
    return logs


def _other_states(draft: Eagle3, lowest: int, num_layers: int) -> Iterator[Fault]:
    own = draft.shape.aux_layers
    usual = default_boundaries(num_layers)
    readings = {
        tuple(boundary - 1 for boundary in own): "its layer ids one too low:",
        tuple(boundary + 1 for boundary in own): "its layer ids one too high:",
    }
    if len(own) == len(usual) and list(usual) == sorted(set(usual)):
        readings.setdefault(usual, "the engine's default layer ids")
    for ids, words in readings.items():
        if ids != own and ids[0] >= lowest and ids[-1] <= num_layers:
            yield Fault("layer ids", f"with {words} {_listed(ids)} for {_listed(own)}", ids, draft)
    orders = itertools.permutations(own) if len(own) <= _FEW else [own[::-1]]
    for order in orders:
        if order != own:
            yield Fault("aux order", f"with its aux states in the order {_listed(order)}", order, draft)


def _norm_flags(draft: Eagle3) -> Iterator[Fault]:
    shape = draft.shape
    for name in ("norm_before_residual", "norm_output"):
        value = not getattr(shape, name)
        says = f"with {name} = {str(value).lower()} instead of {str(not value).lower()}"
        yield Fault("norm flags", says, shape.aux_layers, _variant(draft, **{name: value}))
    if shape.fc_norm:
        says = "with fc_norm = false instead of true"
        yield Fault("norm flags", says, shape.aux_layers, _variant(draft, fc_norm=False))


def _vocabularies(draft: Eagle3) -> Iterator[Fault]:
    kept = draft.draft_to_target
    places = torch.arange(len(kept), device=kept.device)
    if torch.equal(kept, places):
        return
    readings = {
        "with its draft ids taken for target ids": places,
        "with its target ids taken for offsets": kept + places,
        "with its offsets taken for target ids": kept - places,
    }
    for says, map_ in readings.items():
        other = _variant(draft)
        other.draft_to_target = map_
        yield Fault("vocabulary", says, draft.shape.aux_layers, other)


def _rope(draft: Eagle3, thetas: Iterable[float], factors: Iterable[float]) -> Iterator[Fault]:
    aux, own = draft.shape.aux_layers, draft.shape.rope_theta
    for theta in sorted({*_THETAS, *thetas} - {own}):
        says = f"with RoPE theta {theta:,.0f} instead of {own:,.0f}"
        yield Fault("rope", says, aux, _variant(draft, rope_theta=theta))
    for factor in sorted({*_FACTORS, *factors} - {1.0}):
        says = f"with RoPE positions scaled down by {factor:g}"
        yield Fault("rope", says, aux, _rescaled(draft, factor))


def _variant(draft: Eagle3, **changes: object) -> Eagle3:
    """The same weights (shared, not copied) under another shape."""
    shape = replace(draft.shape, **changes)  # type: ignore[arg-type]
    with torch.device("meta"):
        other = Eagle3(shape, draft.embed_tokens)
    wanted = other.state_dict()
    other.load_state_dict({name: value for name, value in draft.state_dict().items() if name in wanted}, assign=True)
    other.draft_to_target = draft.draft_to_target
    return other.eval().requires_grad_(False)


def _rescaled(draft: Eagle3, factor: float) -> Eagle3:
    other = _variant(draft)
    for layer in other.layers:
        assert isinstance(layer, DecoderLayer)
        layer.self_attn = _Scaled(layer.self_attn, factor)  # type: ignore[assignment]
    return other


class _Scaled(nn.Module):
    """Attention projections with linear RoPE scaling."""

    def __init__(self, inner: Attention | LatentAttention, factor: float) -> None:
        super().__init__()
        self.inner, self.factor = inner, factor

    def queries(self, x: Tensor, positions: Tensor) -> Tensor:
        return self.inner.queries(x, positions / self.factor)

    def keys_values(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        return self.inner.keys_values(x, positions / self.factor)

    def result(self, attended: Tensor) -> Tensor:
        return self.inner.result(attended)


def _listed(values: Sequence[int]) -> str:
    return ", ".join(map(str, values))
