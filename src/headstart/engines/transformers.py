"""The embedded engine: any model that Transformers loads, on a CPU or one GPU.

Generation is our own loop (see engines/decoding.py), capture hooks the decoder layers (engines/hooks.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from importlib import metadata
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from headstart.config import Target
from headstart.engines import decoding
from headstart.engines.attention import speed_up_decoding
from headstart.engines.base import EngineInfo, States, TopLogProbs
from headstart.engines.cache import GrowingCache, new_cache
from headstart.engines.hooks import Captured, capturing, find_decoder
from headstart.engines.weights import load_model, pick_device, pick_dtype
from headstart.errors import UserError
from headstart.products import for_rows, use_fast_products
from headstart.target.head import TargetHead
from headstart.target.layers import check_boundaries
from headstart.target.source import resolve
from headstart.types import Completion, Prompt, Sample, Sampling

if TYPE_CHECKING:
    from transformers import Cache


class TransformersEngine:
    """Implements `Engine` and `Decoding`. `batch_size` is how many prompts `generate` decodes together."""

    def __init__(self, target: Target, batch_size: int = 64) -> None:
        self.device = pick_device(target.device)
        self.dtype = pick_dtype(target.dtype, self.device)
        use_fast_products(self.device)
        self.batch_size = batch_size
        self.folder = resolve(target.model, target.revision)
        self.model = load_model(self.folder, target, self.device, self.dtype)
        speed_up_decoding(self.model)
        text = self.model.config.get_text_config(decoder=True)
        self.decoder = find_decoder(self.model, getattr(text, "num_hidden_layers", None), target.layers_path)
        self._head = TargetHead.from_model(self.model, self.decoder.final_norm)
        self.info = self._describe(target)

    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling, tell: Callable[[str, int], None] | None = None
    ) -> Iterator[Completion]:
        """Completions as they finish. The same prompts in one call give the same ids again, whatever ran before.

        Raises:
            UserError: a prompt is empty, or with its answer longer than the target can read.
        """
        for prompt in prompts:
            self._check_ids(prompt.id, prompt.ids)
        yield from decoding.generate(self.model, prompts, sampling, self.batch_size, tell)

    def capture(self, samples: Sequence[Sample], boundaries: Sequence[int], batch_tokens: int) -> Iterator[States]:
        """States on the engine's device and in its dtype, longest samples first.

        A batch holds at most `batch_tokens` tokens, padding counted, except when a single sample is longer.

        Raises:
            UserError: a boundary is out of range, repeated or not rising; a sample is empty.
            GateError: the hooks did not fire as they must.
        """
        boundaries = check_boundaries(boundaries, self.info.num_layers)
        sequences = {sample.id: tuple(sample.input_ids.tolist()) for sample in samples}
        for name, ids in sequences.items():
            self._check_ids(name, ids)
        for batch in batches_by_length(sequences, batch_tokens):
            states = self._forward(list(batch.values()), boundaries)
            for row, (name, ids) in enumerate(batch.items()):
                yield _cut(name, ids, states, boundaries, row)

    @torch.no_grad()
    def log_probs(self, ids: Sequence[int]) -> Tensor:
        """The model's own forward pass, head included: float32 [tokens, vocabulary]."""
        self._check_ids("the sequence", ids)
        logits = self.model(input_ids=torch.tensor([list(ids)], device=self.device), use_cache=False).logits[0]
        return logits.float().log_softmax(-1)

    def top_log_probs(self, ids: Sequence[int], k: int) -> TopLogProbs:
        values, best = self.log_probs(ids).topk(k)
        return TopLogProbs(best, values)

    def session(self, boundaries: Sequence[int]) -> TransformersSession:
        return TransformersSession(self, check_boundaries(boundaries, self.info.num_layers))

    def head(self) -> TargetHead:
        return self._head

    def close(self) -> None:
        """Let go of the weights. The engine cannot be used afterwards."""
        del self.model, self.decoder, self._head
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def capturing(self, boundaries: Sequence[int]) -> AbstractContextManager[Captured]:
        """Hooks on the decoder layers; see `hooks.capturing`."""
        return capturing(self.decoder.layers, boundaries)

    @torch.no_grad()
    def _forward(self, rows: list[tuple[int, ...]], boundaries: Sequence[int]) -> dict[int, Tensor]:
        """Hidden states [rows, longest, d] by boundary, the last one included, without running the output head.

        Rows are padded on the right with their own last token: under causal attention no real token sees it.
        """
        longest = max(map(len, rows))
        ids = torch.tensor([row + row[-1:] * (longest - len(row)) for row in rows], device=self.device)
        mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows], device=self.device)
        wanted = sorted({*boundaries, self.info.num_layers})
        with self.capturing(wanted) as captured:
            self.model.base_model(input_ids=ids, attention_mask=mask, use_cache=False)
        captured.check(wanted, (len(rows), longest, self.info.hidden_size))
        return captured.states

    def _check_ids(self, name: str, ids: Sequence[int]) -> None:
        if not ids:
            raise UserError(f"{name} has no tokens")
        rows = self._head.embed.shape[0]
        if not (min(ids) >= 0 and max(ids) < rows):
            raise UserError(
                f"{name} holds token id {max(ids) if max(ids) >= rows else min(ids)}; the target has {rows}",
                do="the tokenizer and the target do not belong together",
            )

    def _describe(self, target: Target) -> EngineInfo:
        return EngineInfo(
            name="transformers",
            version=metadata.version("transformers"),
            model=target.model,
            dtype=str(self.dtype).removeprefix("torch."),
            device=str(self.device),
            layers_path=self.decoder.path,
            num_layers=self.decoder.num_layers,
            hidden_size=self._head.hidden_size,
            vocab_size=self._head.vocab_size,
        )


class TransformersSession:
    """One sequence with a key/value cache. See `engines.base.Session`."""

    def __init__(self, engine: TransformersEngine, boundaries: tuple[int, ...]) -> None:
        self._engine = engine
        self._boundaries = boundaries
        self._ids: list[int] = []
        self._cache: Cache = new_cache(engine.model)

    @property
    def length(self) -> int:
        """Tokens in the cache."""
        return len(self._ids)

    def extend(self, ids: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Append tokens. Returns logits float32 [n, V] and aux states [n, n_aux, d]."""
        logits, states = self._step(list(ids))
        self._ids += ids
        return logits, torch.stack([states[boundary][0] for boundary in self._boundaries], dim=1)

    def rewind(self, length: int) -> None:
        """Forget everything after the first `length` tokens.

        A recurrent state cannot be cut (linear attention, Mamba): there the kept tokens are read again.
        """
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot rewind {self.length} tokens to {length}")
        surplus, self._ids = self.length - length, self._ids[:length]
        if not surplus:
            return
        if length and isinstance(self._cache, GrowingCache):
            self._cache.crop(-surplus)
            return
        self._cache = new_cache(self._engine.model)
        if length:
            self._step(self._ids)

    @torch.no_grad()
    def _step(self, ids: list[int]) -> tuple[Tensor, dict[int, Tensor]]:
        engine = self._engine
        engine._check_ids("the sequence", ids)
        with engine.capturing(self._boundaries) as captured:
            tokens = torch.tensor([ids], device=engine.device)
            with for_rows(len(ids)):
                output = engine.model(input_ids=tokens, past_key_values=self._cache, use_cache=True)
        captured.check(self._boundaries, (1, len(ids), engine.info.hidden_size))
        return output.logits[0].float(), captured.states


def batches_by_length(sequences: dict[str, tuple[int, ...]], batch_tokens: int) -> Iterator[dict[str, tuple[int, ...]]]:
    """Group sequences of like length, longest first, so that rows x longest row stays within `batch_tokens`."""
    batch: dict[str, tuple[int, ...]] = {}
    width = 0
    for name, ids in sorted(sequences.items(), key=lambda item: -len(item[1])):
        width = width or len(ids)
        if batch and (len(batch) + 1) * width > batch_tokens:
            yield batch
            batch, width = {}, len(ids)
        batch[name] = ids
    if batch:
        yield batch


def _cut(name: str, ids: tuple[int, ...], states: dict[int, Tensor], boundaries: Sequence[int], row: int) -> States:
    """One sample out of a padded batch, copied, so that the batch can go."""
    aux = torch.stack([states[boundary][row, : len(ids)] for boundary in boundaries], dim=1)
    return States(id=name, ids=ids, aux=aux, last=states[max(states)][row, : len(ids)].clone())
