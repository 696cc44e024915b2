"""The main counts of each artifact, in words."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from headstart.events import size


def told(folder: str, counts: dict[str, Any]) -> Iterator[str]:
    """What the artifact `folder` holds, in a few short parts."""
    yield from _COUNTS[folder](counts)


def _prompts_counts(counts: dict[str, Any]) -> Iterator[str]:
    yield f"{counts['kept']:,} conversations of {counts['rows']:,} rows"
    yield _splits(counts["splits"])


def _conversations_counts(counts: dict[str, Any]) -> Iterator[str]:
    yield f"{sum(counts['samples'].values()):,} samples"
    yield _splits(counts["samples"])
    yield f"{counts['supervised_tokens']:,} answer tokens of {counts['tokens']:,}"
    yield "answers ended by " + (
        ", ".join(f"{kind} {count:,}" for kind, count in counts["finish"].items()) or "nothing"
    )


def _vocab_counts(counts: dict[str, Any]) -> Iterator[str]:
    yield f"{counts['size']:,} of {counts['target_vocab_size']:,} tokens"
    yield ", ".join(f"{name} {count:,}" for name, count in counts["filled"].items() if count)
    share = counts["coverage"]["overall"]
    yield "coverage unknown" if share is None else f"covers {100 * share:.2f} %"


def _states_counts(counts: dict[str, Any]) -> Iterator[str]:
    yield f"{counts['samples']:,} samples, {counts['tokens']:,} tokens, {counts['supervised']:,} of them answers"
    yield f"{counts['shards']} shards, {size(counts['bytes'])}"


def _draft_counts(counts: dict[str, Any]) -> Iterator[str]:
    yield f"{counts['parameters'] / 1e6:.1f} M parameters"
    yield f"{counts['steps']:,} steps over {counts['samples']:,} samples"
    if counts["last_tau"] is not None:
        yield f"best held-out tau {counts['best_tau']:.3f} at step {counts['best_step']:,}"


def _scores_counts(counts: dict[str, Any]) -> Iterator[str]:
    yield f"{counts['prompts']:,} prompts, {counts['tokens']:,} tokens decoded"


def _export_counts(counts: dict[str, Any]) -> Iterator[str]:
    written = {name.removesuffix("_bytes"): count for name, count in counts.items() if name.endswith("_bytes")}
    yield from (f"{name} {size(count)}" for name, count in written.items())


_COUNTS: dict[str, Callable[[dict[str, Any]], Iterator[str]]] = {
    "prompts": _prompts_counts,
    "conversations": _conversations_counts,
    "vocab": _vocab_counts,
    "states": _states_counts,
    "draft": _draft_counts,
    "scores": _scores_counts,
    "export": _export_counts,
}


def _splits(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in counts.items())
