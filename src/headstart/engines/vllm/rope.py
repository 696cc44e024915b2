"""The base of the rotary embedding: what a live vLLM has read must be what config.json says.

Under Transformers 4 the default of the configuration's class wins over `rope_parameters`, the only place where Transformers 5
writes it (vLLM 0.16.0, transformers_utils/config.py, `patch_rope_parameters`; run). The engine then starts, and all it says is
consistent and wrong: no check of states against the engine's own logits can tell.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headstart.errors import GateError

if TYPE_CHECKING:
    from headstart.target.anatomy import Anatomy


def live_theta(config: Any) -> float | None:
    """Of vLLM's text configuration, in the worker; None where each kind of layer has its own."""
    parameters = getattr(config, "rope_parameters", None)
    return parameters.get("rope_theta") if isinstance(parameters, dict) else getattr(config, "rope_theta", None)


def check_rope(anatomy: Anatomy, facts: dict[str, Any]) -> None:
    """Hold the base that the host reports in `facts` against the one that stands in `rope_parameters`.

    Raises:
        GateError: they differ.
    """
    live, written = facts["model"].get("rope_theta"), anatomy.rope_theta
    named = anatomy.evidence.get("rope_theta", "")
    if not named.endswith("rope_parameters.rope_theta") or None in (live, written) or live == written:
        return
    raise GateError(
        f"vLLM {facts['version']} with Transformers {facts['transformers']} reads RoPE base {live:g}, "
        f"config.json says {written:g}",
        looked_for=f"the value of {named}",
        do=f'copy the folder and write "rope_theta": {written} beside rope_parameters in its config.json',
    )
