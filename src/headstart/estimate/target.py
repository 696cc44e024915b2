"""What the target costs to run, from the sizes in its configuration: FLOP of a token, bytes of its weights. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headstart.doctor import sizes
from headstart.doctor.subject import Subject
from headstart.errors import UserError
from headstart.target.spellings import WHOLE, is_a

_EXPERTS = ("n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts")
_CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "experts_per_token", "top_k_experts", "moe_topk")


@dataclass(frozen=True)
class TargetCost:
    """flops: of one token through layers and head, with only the experts that it uses. total, active: parameters, all and those.

    weights: bytes once loaded; origin: what they are known from. experts, chosen: of one layer; 0 in a dense model.
    """

    flops: float
    total: int
    active: int
    weights: int
    origin: str
    experts: int = 0
    chosen: int = 0

    def read(self, sequences: int) -> float:
        """Bytes of weights that one step over so many sequences reads; of the experts, those that at least one token chose."""
        if not self.experts:
            return float(self.weights)
        met = self.experts * (1 - (1 - self.chosen / self.experts) ** sequences)
        share = self.active / self.total
        return self.weights * (share + (1 - share) * (met - self.chosen) / (self.experts - self.chosen))


def cost_of(subject: Subject, *, gpu: bool, dtype: str = "auto") -> TargetCost:
    """Of a target whose configuration was read. gpu: where it will run; dtype: target.dtype.

    Raises:
        UserError: its sizes are not all known.
    """
    anatomy, text = subject.anatomy, subject.text
    experts, chosen = (_count(text, names) if anatomy.moe else 0 for names in (_EXPERTS, _CHOSEN))
    sparse = 0 < chosen < experts
    whole = sizes.count_parameters(text, anatomy)
    used = sizes.count_parameters(_only(text, chosen), anatomy) if sparse else whole
    if whole is None or used is None:
        raise UserError(
            f"the size of {subject.name} is not known from its configuration",
            looked_for="layers, width, heads, vocabulary and the widths of its MLPs or experts",
            do="headstart inspect shows what is missing; give the whole config.json",
        )
    weights, origin = _weights(subject, whole, gpu, dtype)
    head = (anatomy.hidden_size or 0) * (anatomy.vocab_size or 0)
    flops = 2.0 * (used.attention + used.mlp + head)
    return TargetCost(flops, whole.total, used.total, weights, origin, *((experts, chosen) if sparse else ()))


def _weights(subject: Subject, count: sizes.Parameters, gpu: bool, dtype: str) -> tuple[int, str]:
    stored = subject.anatomy.weights_bytes
    if stored is not None and (gpu or subject.quant):
        return stored, subject.anatomy.evidence["weights_bytes"]
    itemsize = sizes.BYTES[dtype if dtype != "auto" else ("bfloat16" if gpu else "float32")]
    about = sizes.weights_bytes(count, subject.quant, itemsize)
    return count.total * itemsize if about is None else about, "about, by the sizes in its configuration"


def _only(text: Mapping[str, Any], chosen: int) -> dict[str, Any]:
    """The configuration of a model that has only as many experts as a token uses."""
    return {**text, **{key: chosen for key in _EXPERTS if is_a(text.get(key), WHOLE)}}


def _count(text: Mapping[str, Any], names: tuple[str, ...]) -> int:
    return next((text[name] for name in names if is_a(text.get(name), WHOLE)), 0)
