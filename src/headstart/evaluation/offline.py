"""Acceptance without decoding: held-out states replayed through the draft, every position a start.

Exact for answers that the target decoded greedily, since then the recorded token is the target's own choice at every position. For
sampled answers it is the greedy acceptance along the sampled text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headstart.artifact import Artifact
from headstart.data.store import Entry, StateStore
from headstart.drafts.eagle3 import Eagle3
from headstart.drafts.rows import RowPlan, plan_rows
from headstart.drafts.ttt import unroll
from headstart.evaluation.acceptance import AcceptanceLog, all_starts, summarise, walk
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


def reference_walk(
    draft: Eagle3, aux: Tensor, ids: Sequence[int], prompt_tokens: int, draft_tokens: int
) -> AcceptanceLog:
    """The verify steps of greedy decoding, from states alone: no target is needed that decodes step by step.

    aux: states [tokens, n_aux, d] of `ids`, which are a prompt of `prompt_tokens` tokens and the target's greedy answer
    to it. Because the answer is the target's own choice everywhere, it tells every verdict: a draft is accepted when it
    is the recorded token. Step for step what `decode.speculative_decode` does.
    """
    supervised = np.arange(len(ids)) >= prompt_tokens
    if supervised.sum() < 2:
        return AcceptanceLog.of([], [])
    device = draft.fc.weight.device
    plan = plan_rows([supervised], draft_tokens).to(device)
    tokens = torch.tensor(list(ids), device=device)
    wanted = [tokens[step.inputs + 1] for step in plan.steps]
    aux = aux[: len(plan.context)].to(device, draft.fc.weight.dtype)
    return walk(*_replay(draft, aux, tokens, plan, wanted))


@torch.no_grad()
def _matrices(draft: Eagle3, store: StateStore, head: TargetHead, steps: int, entry: Entry, device: str):
    batch = assemble(store, [entry], head, steps, "exact", device)
    wanted = [batch.top1[step.labels] for step in batch.plan.steps]
    return _replay(draft, batch.aux, batch.tokens, batch.plan, wanted)


@torch.no_grad()
def _replay(
    draft: Eagle3, aux: Tensor, tokens: Tensor, plan: RowPlan, wanted: Sequence[Tensor]
) -> tuple[np.ndarray, np.ndarray]:
    """(accept, live), bool [tokens, steps], of one sample; wanted: the target's choice for the rows of each step."""
    accept, live = (np.zeros((len(tokens), len(plan.steps)), dtype=bool) for _ in range(2))
    outs = unroll(draft, aux, tokens, plan)
    for index, (step, out) in enumerate(zip(plan.steps, outs, strict=True)):
        chosen = draft.draft_to_target[draft.logits(out).argmax(-1)]
        at = plan.context[step.rows].cpu().numpy()
        accept[at, index] = (chosen == wanted[index]).cpu().numpy()
        live[at, index] = step.live.cpu().numpy()
    return accept, live
