#!/usr/bin/env python3
"""Stored states: bytes a token for each type, how fast they are read from the page cache, and what a training step waits for.

    OMP_NUM_THREADS=1 python benchmarks/states.py [--samples N] [--share S] [--rounds R]

Random states of SmolLM2's shape (three aux states and the last, 576 wide), in samples of 50 to 450 tokens of which the last `share`
is the answer. Reading is what training does of it: memory-mapped shards to packed batches, widened to float32, the teacher normed.
The types alternate from round to round. Then a draft trains on the bfloat16 ones, and says what it waited for.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from headstart import events, rundir
from headstart.config import Train
from headstart.data import store
from headstart.data.store import Labelled, StateStore
from headstart.drafts.shape import DraftShape
from headstart.engines.base import States
from headstart.products import use_fast_products
from headstart.target.head import TargetHead
from headstart.training.batches import Packer, ahead, epoch_order
from headstart.training.build import new_draft
from headstart.training.loop import Trainer
from headstart.types import Sample

WIDTH, VOCAB, STEPS = 576, 49_152, 5
TYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn)
BATCH, SHARD = 2048, 32_768  # tokens
TRAINED = 8  # steps
SHAPE = DraftShape(
    hidden_size=WIDTH, target_hidden_size=WIDTH, aux_layers=(2, 15, 27), num_layers=1, num_heads=9, num_kv_heads=3, head_dim=64,
    intermediate_size=1536, target_vocab_size=VOCAB, draft_vocab_size=8192, rms_norm_eps=1e-5, rope_theta=1e5,
    max_positions=8192, norm_before_residual=False, fc_norm=True, norm_output=False,
)  # fmt: skip


def random_sample(number: int, share: float) -> Labelled:
    """States and their labels; what they are makes no difference to any time."""
    rng, generator = np.random.default_rng(number), torch.Generator().manual_seed(number)
    length = int(rng.integers(50, 450))
    produced = np.arange(length) >= length * (1 - share)
    ids = rng.integers(0, VOCAB, length).astype(np.int32)
    sample = Sample(f"{number}", f"{number}", "random", "train", ids, produced, "length")
    aux, last = (torch.randn(length, *size, WIDTH, generator=generator) for size in ((len(SHAPE.aux_layers),), ()))
    labels = torch.from_numpy(store.label_rows(produced))
    count = int(labels.sum())
    top1 = torch.randint(VOCAB, (count,), generator=generator, dtype=torch.int32)
    return Labelled(
        sample, States(sample.id, tuple(ids.tolist()), aux, last), last[labels], torch.full((count,), 20.0), top1
    )


def write(folder: Path, items: list[Labelled], dtype: torch.dtype) -> StateStore:
    folder.mkdir()
    by_id, entries = {item.sample.id: item for item in items}, []
    for number, part in enumerate(store.plan_shards([item.sample for item in items], SHARD)):
        path = folder / store.shard_name(number)
        store.write_shard(path, [by_id[sample.id] for sample in part], {}, dtype)
        entries += (store.read_header(path) or ([], {}))[0]
    store.write_index(folder / store.INDEX, entries)
    return StateStore(folder, {"aux_layers": list(SHAPE.aux_layers)})


def read_all(states: StateStore, head: TargetHead) -> float:
    """Tokens a second of one epoch, read ahead as training does, with nothing else to do."""
    packer = Packer(states, head, STEPS)
    batches = epoch_order(states.entries, BATCH, 0, 0)
    began = time.perf_counter()
    for _, packed in ahead(batches, lambda batch: packer.pack([states.entries[i] for i in batch], "exact")):
        packer.move(packed)
    return sum(entry.length for entry in states.entries) / (time.perf_counter() - began)


def train(states: StateStore, head: TargetHead, folder: Path) -> tuple[float, float]:
    """Tokens a second of optimiser steps, and the share of their time that they waited for data; the first step is left out."""
    draft = new_draft(SHAPE, head, torch.arange(SHAPE.draft_vocab_size), lm_head="target", seed=0)
    changes = {
        "batch_tokens": BATCH,
        "max_steps": TRAINED + 1,
        "trackers": (),
        "checkpoint_every": 10**9,
        "validate_every": 10**9,
    }
    folder.mkdir()
    told = events.Events(folder / rundir.EVENTS, quiet=True)
    Trainer(draft, head, states, Train.model_validate(changes), STEPS, folder, told).run()
    steps = [event for event in events.read(folder / rundir.EVENTS) if event["event"] == "train-step"][1:]
    seconds = sum(step["seconds"] for step in steps)
    return sum(step["tokens"] for step in steps) / seconds, sum(step["read"] for step in steps) / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=400)
    parser.add_argument("--share", type=float, default=0.6, help="of a sample that is answer")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    if options.samples < 1 or options.rounds < 1 or not 0 < options.share <= 1:
        parser.error("--samples and --rounds are 1 at least, --share above 0 and at most 1")
    use_fast_products(torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    embedding = torch.randn(VOCAB, WIDTH, generator=generator)
    head = TargetHead(embedding, embedding, torch.ones(WIDTH), 1e-5)
    items = [random_sample(number, options.share) for number in range(options.samples)]
    tokens = sum(len(item.sample.input_ids) for item in items)
    with tempfile.TemporaryDirectory() as folder:
        stores = {dtype: write(Path(folder) / str(dtype), items, dtype) for dtype in TYPES}
        size = {d: sum(p.stat().st_size for p in s.folder.glob("shard-*")) / tokens for d, s in stores.items()}
        rounds = [{dtype: read_all(stores[dtype], head) for dtype in TYPES} for _ in range(options.rounds)]
        rate, waited = train(stores[torch.bfloat16], head, Path(folder) / "training")
    print(
        f"{tokens:,} tokens, {options.share:.0%} of them answers; training: {rate:,.0f} tokens/s, {waited:.2%} of it waiting"
    )
    print(f"{'type':<16}{'bytes a token':>14}{'of bfloat16':>13}{'read, tokens/s':>16}{'training = 1':>14}")
    for dtype in TYPES:
        read = [found[dtype] for found in rounds]
        typical = statistics.median(read)
        print(
            f"{str(dtype).removeprefix('torch.'):<16}{size[dtype]:>14,.0f}{size[dtype] / size[torch.bfloat16]:>12.2f}x"
            f"{typical:>16,.0f}{typical / rate:>14.0f}   ({min(read):,.0f} to {max(read):,.0f})"
        )


if __name__ == "__main__":
    main()
