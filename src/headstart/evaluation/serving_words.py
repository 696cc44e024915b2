"""The `serving` part of scores.json in sentences, for the terminal and the report."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def lines(serving: dict[str, Any]) -> list[str]:
    """What a person should know, one sentence each; warnings after what was measured."""
    reference, speed = serving["reference"], serving["speed"]
    how = "decoding step by step" if reference["how"] == "decoder" else "replaying the target's states"
    told = [
        f"vLLM {serving['version']} ({serving['rung']}), K = {serving['draft_tokens']}: tau {serving['tau']:.3f}"
        f"{_range(serving['interval'])} over {serving['counters']['drafts']:,} verify steps; "
        f"{how} gives {reference['tau']:.3f}{_range(reference['interval'])}",
        f"greedy answers as without the draft: {serving['identical'][0]} of {serving['identical'][1]}; "
        f"{speed['plain']:.1f} tokens/s without, {speed['drafted']:.1f} with it ({speed['speedup']:.2f}x)",
    ]
    return [*told, *warnings(serving)]


def warnings(serving: dict[str, Any]) -> list[str]:
    """What is wrong, and why; empty when vLLM agrees and keeps every answer."""
    found = [_changed(item) for item in serving["mismatches"]]
    if serving["other_prompts"]:
        found.append(_other_prompts(serving["other_prompts"]))
    verdict, step = serving["agreement"]["verdict"], serving["agreement"]["step_for_step"]
    if verdict == "differs":
        found.append(
            f"WARNING: vLLM's tau is not the reference decoder's: {serving['tau']:.3f} against "
            f"{serving['reference']['tau']:.3f}; {step[0]} of {step[1]} prompts agree step for step"
        )
        found += [_because(serving["tau"], cause) for cause in serving["causes"]]
        if not serving["causes"]:
            found.append("no known fault gives that: layer ids, aux order, norm flags, vocabulary and RoPE were tried")
    return found


def _changed(item: dict[str, Any]) -> str:
    if item["gap"] is None:
        reason = "how near a tie it is was not measured"
    else:
        reason = "a tie within rounding" if item["tie"] else "NOT explained by rounding"
        reason = f"top-2 gap {item['gap']:.2g}, {reason}"
    return (
        f"WARNING: not identical in vLLM: {item['set']} {item['prompt']} at answer token {item['position']}: "
        f"{item['found']} instead of {item['expected']}; {reason}"
    )


def _other_prompts(found: dict[str, Any]) -> str:
    differ, total = found["prompts"]
    return (
        f"WARNING: of the same messages vLLM's chat template makes other prompts ({differ} of {total}): token "
        f"{found['token']} is {found['vllm']}, not {found['measured']}; the draft was trained and measured on ours"
    )


def _because(tau: float, cause: dict[str, Any]) -> str:
    same, total = cause["step_for_step"]
    return f"vLLM's {tau:.2f} is what the draft gives {cause['says']} (step for step in {same} of {total} prompts)"


def _range(interval: Sequence[float] | None) -> str:
    return f" ({interval[0]:.3f} to {interval[1]:.3f})" if interval else ""
