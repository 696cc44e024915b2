"""Stored states of a tiny real target over its own greedy answers, made with the real engine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from headstart import config
from headstart.data import store
from headstart.data.store import StateStore
from headstart.engines.transformers import TransformersEngine
from headstart.types import Prompt, Sample, Sampling

AUX = (2, 3, 4)


def open_tiny(folder: Path) -> TransformersEngine:
    return TransformersEngine(config.Target(model=str(folder), device="cpu"))


def answered(engine: TransformersEngine, count: int, new_tokens: int, seed: int = 0) -> list[Sample]:
    """Random prompts of mixed lengths with the target's greedy answers; every fifth is held out."""
    rng = np.random.default_rng(seed)
    prompts = [Prompt(f"p{i:03d}", tuple(rng.integers(0, 390, rng.integers(3, 14)).tolist())) for i in range(count)]
    sampling = Sampling(max_new_tokens=new_tokens, temperature=0.0, top_p=1.0, seed=0, end_ids=())
    answers = {completion.id: completion.ids for completion in engine.generate(prompts, sampling)}
    return [
        _sample(prompt, answers[prompt.id], "validation" if i % 5 == 4 else "train") for i, prompt in enumerate(prompts)
    ]


def _sample(prompt: Prompt, answer: Sequence[int], split: str) -> Sample:
    ids = np.array([*prompt.ids, *answer], dtype=np.int32)
    mask = np.array([False] * len(prompt.ids) + [True] * len(answer))
    return Sample(prompt.id, prompt.id, "test", split, ids, mask, "length")  # type: ignore[arg-type]


def make_store(
    engine: TransformersEngine,
    samples: Sequence[Sample],
    folder: Path,
    shard_tokens: int = 200,
    dtype: torch.dtype | None = None,
) -> StateStore:
    """Capture `samples` into `folder` and open it."""
    folder.mkdir(parents=True, exist_ok=True)
    head = engine.head()
    head.save(folder)
    entries = []
    for number, part in enumerate(store.plan_shards(samples, shard_tokens)):
        captured = {states.id: states for states in engine.capture(part, AUX, 512)}
        path = folder / store.shard_name(number)
        store.write_shard(path, store.label([(sample, captured[sample.id]) for sample in part], head), {}, dtype)
        entries += (store.read_header(path) or ([], {}))[0]
    store.write_index(folder / store.INDEX, entries)
    return StateStore(folder, {"aux_layers": list(AUX)})
