"""What a started vLLM must have said of itself before its numbers are used."""

from __future__ import annotations

from typing import Any

from headstart.engines.vllm.arguments import Plan
from headstart.engines.vllm.variables import SHIM
from headstart.errors import GateError

SAME_STATE = {"float32": 1e-4}  # relative difference of two readings of one forward pass
SAME_STATE_HALF = 1e-2


def check_plugin(plan: Plan, facts: dict[str, Any]) -> None:
    """vLLM swallows the failure of a plugin: each worker must say that ours is there. Raises GateError when one does not."""
    wanted = plan.environment.get(SHIM)
    for worker in facts["workers"]:
        if wanted and wanted not in worker["plugin"]["shims"]:
            raise GateError(
                f"the plugin of headstart did not load in vLLM's worker {worker['rank']} (process {worker['pid']})",
                looked_for=f"{wanted} with the EAGLE-3 interface; it says {worker['plugin']}",
                do="look for VLLM_PLUGINS in the environment: it must name headstart, or be absent",
            )


def check_layers(plan: Plan, facts: dict[str, Any]) -> None:
    """What the workers found out about the live model must allow the rung, and vLLM's own capture must agree with it.

    A model whose layers cannot be read from outside (several lanes of residual stream) has vLLM's own word alone.

    Raises:
        GateError: they contradict each other, or the layers cannot be read where the rung reads them.
    """
    if plan.rung is None:
        return
    found = facts["self_check"]
    if found["rule"] is None and plan.rung.name in ("shim", "hooks"):
        raise GateError(f"the layers of {facts['model']['architecture']} cannot be read: {found['refused']}")
    seen = found.get("boundaries", {})
    unseen = [boundary for boundary in _compared(plan, found) if str(boundary) not in seen]
    if unseen:
        raise GateError(f"the self-check compared nothing at the boundaries {unseen}, and so proves nothing of them")
    tolerance = SAME_STATE.get(facts["dtype"], SAME_STATE_HALF)
    wrong = {b: difference for b, difference in seen.items() if not difference <= tolerance}
    if wrong:
        shown = ", ".join(f"{boundary}: {difference:.2g}" for boundary, difference in wrong.items())
        raise GateError(
            f"vLLM's own capture is not what passes its layers (relative difference by boundary: {shown})",
            looked_for=f"at most {tolerance} in {facts['dtype']}",
            do="this vLLM captures this model wrongly: another version, or target.engine = 'transformers'",
        )


def _compared(plan: Plan, found: dict[str, Any]) -> list[int]:
    """The boundaries that vLLM keeps itself, of a model whose layers can be read to compare."""
    kept = plan.capture is not None and plan.capture["rung"] == "cache" and found["rule"] is not None
    return list(plan.capture["boundaries"]) if plan.capture and kept else []
