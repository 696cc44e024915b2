"""Whether the aux layers exist, and how other systems number the same tensors.

We count boundaries b: decoder layers already applied. Conventions read in: vLLM 0.16 and 0.32 (interfaces.py), the
official EAGLE code, SGLang, SpecForge, TorchSpec, Automodel, ModelOpt, DFlash. Mixing them raises no error and gives
an acceptance length near 1.0.
"""

from __future__ import annotations

from collections.abc import Sequence

from headstart.doctor.checks import Check
from headstart.errors import UserError
from headstart.target.anatomy import Anatomy
from headstart.target.layers import check_boundaries

# How far a system's id is from b, and who counts so.
SYSTEMS: dict[str, int] = {
    "vLLM, EAGLE official, SGLang by default": 0,
    "SGLang with explicit ids, SpecForge, TorchSpec, Automodel, ModelOpt, DFlash": -1,
}


def translate(boundaries: Sequence[int]) -> dict[str, list[int]]:
    """The ids of the same tensors in each system's own counting; those it cannot name are left out."""
    return {system: [number for b in boundaries if (number := b + shift) >= 0] for system, shift in SYSTEMS.items()}


def check_aux(anatomy: Anatomy, asked: Sequence[int] | None) -> Check:
    """The boundaries of a capture: those asked for, or the default when None."""
    name, layers = "aux layers", anatomy.num_layers
    if layers is None:
        return Check(name, "stop", "the number of layers is unknown", "check the configuration")
    try:
        chosen = check_boundaries(asked, layers)
    except UserError as error:
        return Check(name, "stop", error.what, error.do)
    return Check(name, *_told(anatomy, chosen, layers))


def _told(anatomy: Anatomy, chosen: tuple[int, ...], layers: int):
    ids = "; ".join(f"{', '.join(map(str, numbers))} in {system}" for system, numbers in translate(chosen).items())
    finding = f"{chosen} + {layers}, counted as decoder layers already applied: {ids}"
    if 0 in chosen and anatomy.mla:  # there is no residual yet: vLLM 0.32, deepseek_v2.py
        return "warn", finding, "leave boundary 0 out: DeepSeek's class in vLLM has no such state"
    return "go", finding, None
