"""Which boundaries a draft may read, as numbers alone. Boundary b: decoder layers already applied (engines/base.py)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from headstart.errors import UserError


def check_boundaries(boundaries: Sequence[int] | None, num_layers: int) -> tuple[int, ...]:
    """The boundaries to capture: those given, or EAGLE-3's default (2, n//2, n-3) when None.

    Raises:
        UserError: none given, one outside 0..n, or not rising; also when the default does not fit a shallow target.
    """
    chosen = default_boundaries(num_layers) if boundaries is None else tuple(boundaries)
    fault = _fault(chosen, num_layers)
    if fault is None:
        return chosen
    origin = "the default aux layers" if boundaries is None else "the aux layers"
    raise UserError(
        f"{origin} {list(chosen)} do not fit a target of {num_layers} layers: {fault}",
        looked_for=f"rising boundary indices from 0 (embeddings) to {num_layers} (last layer, before the final norm)",
        do=f"set capture.aux_layers, for instance to {list(suggest_boundaries(num_layers))}",
    )


def default_boundaries(num_layers: int) -> tuple[int, int, int]:
    """The official choice; it fits targets of 7 layers and more."""
    return 2, num_layers // 2, num_layers - 3


def suggest_boundaries(num_layers: int) -> tuple[int, ...]:
    """A low, a middle and a high boundary that exist and differ, for any depth (fewer than three below 2 layers)."""
    if num_layers >= 7:
        return default_boundaries(num_layers)
    if num_layers < 4:
        return tuple(range(min(num_layers + 1, 3)))
    return 1, num_layers // 2, num_layers - 1


def _fault(chosen: tuple[int, ...], num_layers: int) -> str | None:
    if not chosen:
        return "there is none"
    for index in chosen:
        if not 0 <= index <= num_layers:
            return f"{index} is not a boundary"
    for earlier, later in itertools.pairwise(chosen):
        if later == earlier:
            return f"{later} is repeated"
        if later < earlier:
            return f"{later} comes after {earlier}"
    return None
