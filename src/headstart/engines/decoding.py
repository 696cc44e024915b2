"""Generation with Transformers: many prompts at once, in a batch that finished rows leave and waiting prompts enter.

Rows are padded on the left, so that the newest tokens share a column. Each row samples from a generator of its own,
seeded by the prompt: what a prompt gets does not depend on its neighbours (but for the rounding of batched matrix
products).
"""

from __future__ import annotations

import hashlib
import inspect
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from headstart.engines.cache import GrowingCache, new_cache
from headstart.engines.sampling import choose
from headstart.errors import UserError
from headstart.products import for_rows
from headstart.types import Completion, Finish, Prompt, Sampling

if TYPE_CHECKING:
    from transformers import Cache, PreTrainedModel

# Prompt tokens read at once, padding counted: small groups pad less, and 2048 rows already keep a CPU busy.
PREFILL_TOKENS = {"cpu": 2048, "cuda": 16384}
LEAVE_SHARE = 8  # finished rows leave once they are 1/8 of the batch: each leaving copies the cache


@dataclass
class _Row:
    """One prompt being answered."""

    prompt: Prompt
    limit: int
    generator: torch.Generator
    ids: list[int] = field(default_factory=list)
    finish: Finish | None = None

    def take(self, token: int, end_ids: frozenset[int]) -> None:
        self.ids.append(token)
        if token in end_ids:
            self.finish = "stop"
        elif len(self.ids) == self.limit:
            self.finish = "length"

    def completion(self) -> Completion:
        assert self.finish is not None
        return Completion(self.prompt.id, tuple(self.ids), self.finish)


@dataclass
class _Batch:
    """Rows with their cache. mask: int64 [rows, tokens in the cache], 0 where padded."""

    rows: list[_Row]
    cache: Cache
    mask: Tensor

    def keep(self, indices: list[int]) -> None:
        """Let the other rows leave, and with them the columns that only they used."""
        self.rows = [self.rows[index] for index in indices]
        chosen = torch.tensor(indices, device=self.mask.device, dtype=torch.long)
        self.mask = self.mask[chosen]
        if isinstance(self.cache, GrowingCache):
            start = self.mask.shape[1] - int(self.mask.sum(1).max())
            self.mask = self.mask[:, start:]
            self.cache.select(chosen, start)
        else:
            self.cache.reorder_cache(chosen)  # pyright: ignore[reportArgumentType]

    def join(self, other: _Batch) -> None:
        """Take in the rows of `other`; the shorter of both is padded on the left."""
        assert isinstance(self.cache, GrowingCache)
        assert isinstance(other.cache, GrowingCache)
        width = max(self.mask.shape[1], other.mask.shape[1])
        pads = [torch.nn.functional.pad(mask, (width - mask.shape[1], 0)) for mask in (self.mask, other.mask)]
        self.mask = torch.cat(pads)
        self.rows += other.rows
        self.cache.join(other.cache)


class _Decoder:
    """The loop of `generate`, one step at a time."""

    def __init__(self, model: PreTrainedModel, sampling: Sampling, batch_size: int) -> None:
        self.model = model
        self.sampling = sampling
        self.batch_size = batch_size
        self.end_ids = frozenset(sampling.end_ids)
        accepted = inspect.signature(model.forward).parameters
        self.prefill_tokens = PREFILL_TOKENS.get(model.device.type, 8192)
        self.options: dict[str, Any] = {"logits_to_keep": 1} if "logits_to_keep" in accepted else {}

    @torch.no_grad()
    def enter(self, batch: _Batch | None, waiting: deque[_Row]) -> _Batch | None:
        """Read as many waiting prompts as there is room for.

        Recurrent caches cannot be joined: there prompts only enter an empty batch.
        """
        if batch is not None and not isinstance(batch.cache, GrowingCache):
            return batch
        while waiting and (batch is None or len(batch.rows) < self.batch_size):
            room = self.batch_size - (len(batch.rows) if batch else 0)
            group = [waiting.popleft()]
            width = len(group[0].prompt.ids)  # the longest, since they wait in that order
            while waiting and len(group) < room and (len(group) + 1) * width <= self.prefill_tokens:
                group.append(waiting.popleft())
            entered = self._read(group, width)
            if batch is None:
                batch = entered
            else:
                batch.join(entered)
            if not isinstance(batch.cache, GrowingCache):
                break
        return batch

    @torch.no_grad()
    def step(self, batch: _Batch) -> None:
        """One more token for every row; finished rows that have not left repeat their last one unheard."""
        tokens = torch.tensor([[row.ids[-1]] for row in batch.rows], device=batch.mask.device)
        positions = batch.mask.sum(1, keepdim=True)
        batch.mask = torch.nn.functional.pad(batch.mask, (0, 1), value=1)
        self._take(batch.rows, self._forward(tokens, batch, positions))

    def _read(self, group: list[_Row], width: int) -> _Batch:
        device = self.model.device
        pads = [width - len(row.prompt.ids) for row in group]
        padded = [row.prompt.ids[:1] * pad + row.prompt.ids for row, pad in zip(group, pads, strict=True)]
        mask = torch.tensor([[0] * pad + [1] * (width - pad) for pad in pads], device=device)
        batch = _Batch(group, new_cache(self.model), mask)
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        self._take(group, self._forward(torch.tensor(padded, device=device), batch, positions))
        return batch

    def _forward(self, tokens: Tensor, batch: _Batch, positions: Tensor) -> Tensor:
        """Logits [rows, V] after the last of `tokens` [rows, n]."""
        with for_rows(tokens.numel()):
            output = self.model(
                input_ids=tokens,
                attention_mask=batch.mask,
                position_ids=positions,
                past_key_values=batch.cache,
                use_cache=True,
                **self.options,
            )
        return output.logits[:, -1]

    def _take(self, rows: list[_Row], logits: Tensor) -> None:
        chosen = choose(logits, self.sampling, [row.generator for row in rows])
        for row, token in zip(rows, chosen.tolist(), strict=True):
            if row.finish is None:
                row.take(token, self.end_ids)


def generate(
    model: PreTrainedModel,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    batch_size: int,
    tell: Callable[[str, int], None] | None = None,
) -> Iterator[Completion]:
    """Answer every prompt; completions come as they finish. `tell` hears of every token (prompt id, 1).

    Raises:
        UserError: a prompt leaves no room for an answer in the target's context.
    """
    decoder = _Decoder(model, sampling, batch_size)
    waiting = deque(sorted(_rows(model, prompts, sampling), key=lambda row: -len(row.prompt.ids)))
    batch = decoder.enter(None, waiting)
    told: set[str] = set()
    while batch is not None:
        for row in batch.rows:
            if row.finish is not None and row.prompt.id not in told:
                told.add(row.prompt.id)
                yield row.completion()
        batch = _let_leave(decoder, batch, waiting)
        if batch is not None:
            if tell is not None:
                for row in batch.rows:
                    if row.finish is None:
                        tell(row.prompt.id, 1)
            decoder.step(batch)


def _let_leave(decoder: _Decoder, batch: _Batch, waiting: deque[_Row]) -> _Batch | None:
    """The batch without its finished rows, refilled, when enough of them are finished. None when all work is done."""
    active = [index for index, row in enumerate(batch.rows) if row.finish is None]
    finished = len(batch.rows) - len(active)
    if not finished or (active and finished * LEAVE_SHARE < len(batch.rows)):
        return batch
    if not active:
        return decoder.enter(None, waiting)
    batch.keep(active)
    return decoder.enter(batch, waiting)


def _rows(model: PreTrainedModel, prompts: Sequence[Prompt], sampling: Sampling) -> Iterator[_Row]:
    longest = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    for prompt in prompts:
        limit = sampling.max_new_tokens
        if isinstance(longest, int):
            limit = min(limit, longest - len(prompt.ids))
        if limit < 1:
            raise UserError(
                f"{prompt.id} has {len(prompt.ids)} tokens; the target reads {longest}", do="lower data.max_length"
            )
        yield _Row(prompt, limit, torch.Generator().manual_seed(_seed(sampling.seed, prompt)))


def _seed(seed: int, prompt: Prompt) -> int:
    digest = hashlib.sha256(f"{seed}/{prompt.id}".encode()).digest()
    return int.from_bytes(digest[:8], "little")
