"""The one check before anything is captured: logits rebuilt from the last state must be the engine's own.

It finds a wrong layer, a missing or doubled norm, a wrong head, a wrong wrapper path and a wrong dtype; where it fails, the states
at the neighbouring boundaries say which.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from headstart.engines.base import Engine, Refused, States
from headstart.errors import GateError, UserError
from headstart.target.head import TargetHead
from headstart.types import Sample

# Difference of a probability that rounding explains at 99 of 100 tokens, by compute type; a wrong state fails at nearly all.
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.1, "float16": 0.03}
TOP = 20  # vLLM gives no more unasked, and the rest of a row hardly has mass of its own
LEAST_AGREEMENT = {"float32": 0.999, "bfloat16": 0.97, "float16": 0.99}


@dataclass(frozen=True)
class Identity:
    """max_dp: largest |p rebuilt - p engine| of any token, high_dp: of 99 % of them; argmax_agreement: share of rows with
    the same most likely token. top: how many of the engine's most likely tokens were compared in each row."""

    probes: int
    tokens: int
    max_dp: float
    high_dp: float
    argmax_agreement: float
    top: int

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def check_identity(
    engine: Engine, head: TargetHead, probes: Sequence[Sample], boundaries: Sequence[int], batch_tokens: int
) -> Identity:
    """Compare rebuilt and own probabilities of the engine's most likely tokens over the probe samples.

    Raises:
        GateError: they differ by more than rounding, or the engine refuses a probe; says what the captured state is
            instead, when that can be told.
    """
    found = {states.id: states for states in map(_given, engine.capture(probes, boundaries, batch_tokens))}
    top = min(TOP, head.vocab_size)
    worst, agreed = [], 0
    for probe in probes:
        own = engine.top_log_probs(probe.input_ids.tolist(), top)
        rebuilt = head.logits(found[probe.id].last.to(head.lm_head.device)).log_softmax(-1).to(own.values.device)
        worst.append((rebuilt.gather(-1, own.ids).exp() - own.values.exp()).abs().max(-1).values)
        agreed += int((rebuilt.argmax(-1) == own.ids[:, 0]).sum())
    differences = torch.cat(worst)
    high = float(differences.quantile(0.99))
    result = Identity(len(probes), len(differences), float(differences.max()), high, agreed / len(differences), top)
    dtype = engine.info.dtype
    if not high <= TOLERANCE[dtype] or result.argmax_agreement < LEAST_AGREEMENT[dtype]:
        raise GateError(
            f"logits rebuilt from the captured last state are not the target's own: "
            f"|dp| {high:.3g}, argmax agreement {100 * result.argmax_agreement:.1f} %",
            looked_for=f"|dp| <= {TOLERANCE[dtype]} in {dtype}; the captured state is "
            f"{_diagnosis(engine, head, probes[0], batch_tokens)}",
            do="nothing was captured; check target.layers_path and that this model's final norm and head are known",
        )
    return result


def _given(answer: States | Refused) -> States:
    if isinstance(answer, Refused):
        raise GateError(f"the engine refused the probe {answer.id}: {answer.why}")
    return answer


def _diagnosis(engine: Engine, head: TargetHead, probe: Sample, batch_tokens: int) -> str:
    layers = engine.info.num_layers
    try:
        return what_is(_given(next(iter(engine.capture([probe], (layers - 1, layers), batch_tokens)))), head)
    except UserError:
        return "unknown: this engine captures no other boundary"


def what_is(states: States, head: TargetHead) -> str:
    """What `states.last` really is, given aux states at boundaries n-1 and n of the same tokens."""
    before, final = states.aux[:, 0], states.aux[:, 1]
    names = {"pre-norm final": final, "one layer early": before, "post-norm": head.norm(final)}
    for name, candidate in names.items():
        if _close(states.last, candidate):
            return name
    return "none of: the last layer's output, the layer before it, the normed output"


def _close(one: Tensor, other: Tensor) -> bool:
    scale = other.float().abs().max().clamp_min(1e-6)
    return bool(((one.float() - other.float()).abs().max() / scale) < 1e-3)
