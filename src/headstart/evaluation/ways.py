"""Which temperatures can be measured with which engine."""

from __future__ import annotations

from headstart.config import Run
from headstart.errors import UserError


def check_temperatures(run: Run) -> None:
    """Raises UserError for temperatures that the engines of target and evaluation cannot be measured at."""
    temperatures = run.evaluate.temperatures
    if run.target.engine == "vllm" and any(temperatures):
        raise UserError(
            f"evaluate.temperatures = {list(temperatures)}: drafts of a target that runs in vLLM are measured greedily",
            looked_for="evaluate.temperatures = [0.0]",
        )
    if run.evaluate.engine == "vllm" and 0 not in temperatures:
        raise UserError(
            "evaluate.engine = vllm compares greedy answers, and evaluate.temperatures has no 0",
            do="add 0.0 to evaluate.temperatures",
        )
