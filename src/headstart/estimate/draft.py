"""What a draft's shape costs: parameters, checkpoint bytes, floating-point operations of training. No torch.

Counts are of a multiplication and an addition each. Checked against published figures: Llama-3.1-8B with a draft vocabulary
of 32,000 trains at 16.4 GFLOP a token with seven TTT steps, and at 7.2 with three.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headstart.drafts.shape import DraftShape

FLOAT = 4  # bytes: drafts are trained and kept in float32


@dataclass(frozen=True)
class Parameters:
    """Weights that are trained. matrices: those between hidden states, which Muon takes; head: [draft vocabulary, d]."""

    matrices: int
    head: int
    norms: int

    @property
    def total(self) -> int:
        return self.matrices + self.head + self.norms

    @property
    def bytes(self) -> int:
        return self.total * FLOAT

    def optimizer_bytes(self, optimizer: str) -> int:
        """What the optimiser keeps: one average for Muon's matrices, two for all that AdamW has."""
        muon = self.matrices if optimizer == "muon" else 0
        return FLOAT * (muon + 2 * (self.total - muon))


def parameters(shape: DraftShape) -> Parameters:
    """Of the whole draft, without the target's embedding, which is frozen."""
    d, aux = shape.hidden_size, len(shape.aux_layers)
    fuse = aux * shape.target_hidden_size * d
    layers = _layer(shape, first=True) + (shape.num_layers - 1) * _layer(shape, first=False)
    norms = d * (2 * shape.num_layers + 2) + (aux * shape.target_hidden_size if shape.fc_norm else 0)
    if shape.latent:
        norms += shape.num_layers * (shape.latent.kv_rank + shape.latent.q_rank)
    return Parameters(fuse + layers, shape.draft_vocab_size * d, norms)


@dataclass(frozen=True)
class TokenCost:
    """FLOP of one training step by token. live: a row with a label; dead: one that only others attend to."""

    live: float
    dead: float

    def total(self, live: float, dead: float) -> float:
        return live * self.live + dead * self.dead


def training_cost(shape: DraftShape, steps: int, length: float, *, freeze_head: bool = False) -> TokenCost:
    """FLOP of a token, forward and backward, at `steps` TTT steps and sequences of `length` tokens.

    Backward costs twice the forward; with a frozen head, once in the head. A dead row takes part in the fusion and the first
    layer's keys and values alone. The teacher's logits (draft vocabulary) are made once for a live row.
    """
    d, aux = shape.hidden_size, len(shape.aux_layers)
    fuse = 2 * aux * shape.target_hidden_size * d
    layers = 2 * sum(_layer(shape, first=index == 0) for index in range(shape.num_layers))
    keys = length / 2  # those that a row sees, on average
    if shape.sliding_window and shape.sliding_window < length:
        keys = shape.sliding_window * (1 - shape.sliding_window / (2 * length))
    attention = 2 * shape.num_layers * shape.num_heads * (shape.head_dim + shape.value_dim) * keys
    head = 2 * d * shape.draft_vocab_size
    live = 3 * (fuse + steps * (layers + attention)) + (2 if freeze_head else 3) * steps * head
    dead = 3 * (fuse + 2 * shape.attention_weights(2 * d)[0])
    return TokenCost(live + head, dead)


def _layer(shape: DraftShape, *, first: bool) -> int:
    """Matrices of one decoder layer; the first reads the embedding beside the hidden state."""
    d = shape.hidden_size
    return sum(shape.attention_weights(2 * d if first else d)) + 3 * d * shape.intermediate_size
