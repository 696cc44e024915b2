"""A new draft for a target: its weights from a seed and the target's head."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from headstart.drafts.eagle3 import Eagle3
from headstart.drafts.layers import DraftShape
from headstart.target.head import TargetHead

INIT_STD = 0.02


def new_draft(
    shape: DraftShape, head: TargetHead, draft_to_target: Tensor, *, lm_head: str, fc: str = "random", seed: int
) -> Eagle3:
    """A draft before its first step, float32. `lm_head` "target": the target's rows of the draft vocabulary.

    `fc` "last_aux": the last aux state passes through, so that the residual stream starts in the space the head reads.
    Norms start at 1 in any case: with the target's final gains the first losses on SmolLM2 were 16.7 instead of 10.2 nats.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        draft = Eagle3(shape, head.embed)
        for module in draft.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=INIT_STD)
    draft.draft_to_target = draft_to_target
    with torch.no_grad():
        if lm_head == "target":
            draft.lm_head.weight.copy_(head.lm_head[draft_to_target])
        if fc == "last_aux":
            draft.fc.weight.zero_()
            draft.fc.weight[:, -shape.target_hidden_size :].copy_(torch.eye(shape.target_hidden_size))
    return draft
