"""Acceptance without decoding: held-out states replayed through the draft, every position a start.

Exact for answers that the target decoded greedily, since then the recorded token is the target's own choice at every position. For
sampled answers it is the greedy acceptance along the sampled text.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from headstart.artifact import Artifact
from headstart.data.store import Entry, StateStore
from headstart.drafts.eagle3 import Eagle3
from headstart.drafts.ttt import unroll
from headstart.evaluation.acceptance import all_starts, summarise, walk
from headstart.target.head import TargetHead
from headstart.training.batches import assemble, learnable


def accept_matrices(
    draft: Eagle3, store: StateStore, head: TargetHead, steps: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(accept, live), bool [rows, steps] each, of every held-out sample that has a live row.

    Row t, column i: the draft of x_{t+2+i}, made on its own chain from true features up to t, is the target's most likely token.
    """
    entries = learnable(store, store.of("validation"), "exact")
    device = str(draft.fc.weight.device)
    head = head.to(device)
    for entry in entries:
        yield _matrices(draft, store, head, steps, entry, device)


def offline_acceptance(draft: Eagle3, states: Artifact, draft_tokens: int) -> dict[str, Any]:
    """Acceptance on held-out states: over all starts, over the starts that decoding takes."""
    store = StateStore.open(states)
    logs = list(accept_matrices(draft, store, store.head(), draft_tokens))
    if not logs:
        return {"samples": 0}
    return {
        "samples": len(logs),
        "all_starts": summarise([all_starts(*pair) for pair in logs], draft_tokens).as_json(),
        "walk": summarise([walk(*pair) for pair in logs], draft_tokens).as_json(),
    }


@torch.no_grad()
def _matrices(draft: Eagle3, store: StateStore, head: TargetHead, steps: int, entry: Entry, device: str):
    batch = assemble(store, [entry], head, steps, "exact", device)
    accept, live = (np.zeros((entry.length, steps), dtype=bool) for _ in range(2))
    outs = unroll(draft, batch.aux, batch.tokens, batch.plan)
    for index, (step, out) in enumerate(zip(batch.plan.steps, outs, strict=True)):
        chosen = draft.draft_to_target[draft.logits(out).argmax(-1)]
        at = batch.plan.context[step.rows].cpu().numpy()
        accept[at, index] = (chosen == batch.top1[step.labels]).cpu().numpy()
        live[at, index] = step.live.cpu().numpy()
    return accept, live
