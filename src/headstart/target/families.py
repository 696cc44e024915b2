"""What model families do at their output, by the names their configurations use. Plain dictionaries in, no torch.

Each function returns the value and the key it came from, or (None, "") when the family does nothing of the kind.
Sources: the modelling files of Transformers 5 (`modeling_<family>.py`) and of vLLM.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Fact = tuple[float | None, str]

# Final norm with gain 1 + w.
OFFSET_RMS = frozenset(
    "gemma gemma2 gemma3 gemma3_text recurrent_gemma t5gemma t5gemma2 vaultgemma qwen3_next qwen3_5 qwen3_5_text".split()
)

# The key multiplies the logits in these families, in all others that have it, it divides them (Granite's sense).
_SCALING_MULTIPLIES = frozenset(("hyperclovax",))
_MULTIPLIERS = ("logit_scale", "lm_head_multiplier", "output_multiplier")


def softcap(text: Mapping[str, Any]) -> Fact:
    """c of `c * tanh(logits / c)`."""
    return _number(text, "final_logit_softcapping")


def attention_softcap(text: Mapping[str, Any]) -> Fact:
    """The same inside attention; fused kernels ignore it silently."""
    return _number(text, "attn_logit_softcapping")


def logit_scale(text: Mapping[str, Any]) -> Fact:
    """What the logits are multiplied by."""
    for key in _MULTIPLIERS:
        value, evidence = _number(text, key)
        if value is not None:
            return value, evidence
    return _scaling(text)


def _scaling(text: Mapping[str, Any]) -> Fact:
    value, key = _number(text, "logits_scaling")
    if value:
        multiplies = text.get("model_type") in _SCALING_MULTIPLIES
        return (value, key) if multiplies else (1 / value, key)
    base, width = text.get("dim_model_base"), text.get("hidden_size")
    if base and width:  # MiniCPM divides the states before the head
        return base / width, "dim_model_base"
    return None, ""


def _number(text: Mapping[str, Any], key: str) -> Fact:
    value = text.get(key)
    return (float(value), key) if isinstance(value, (int, float)) and not isinstance(value, bool) else (None, "")
