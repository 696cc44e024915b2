"""capture: the target's hidden states over the conversations, in shards, after proof that they are the right ones."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import torch

from headstart import config
from headstart.artifact import Build
from headstart.data import store
from headstart.data.gates import fault
from headstart.data.identity import check_identity
from headstart.data.rows import read_samples
from headstart.engines.base import Engine, States
from headstart.engines.load import open_engine
from headstart.errors import GateError, UserError
from headstart.events import Progress
from headstart.pipeline import Context
from headstart.target.anatomy import Anatomy, inspect
from headstart.target.head import TargetHead
from headstart.target.layers import check_boundaries
from headstart.target.source import resolve
from headstart.types import Sample

PROBES, PROBE_TOKENS = 4, 256
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def run(context: Context) -> None:
    """Capture every sample of conversations/ that no finished shard holds yet.

    Raises:
        UserError: aux layers that do not fit the target, or too little disk for the states.
        GateError: the identity check fails, or more samples than `max_bad_fraction` fail a gate.
    """
    settings = context.run.capture
    target = context.run.target
    anatomy = inspect(resolve(target.model, target.revision))
    boundaries = check_boundaries(settings.aux_layers, anatomy.required("num_layers"))
    samples = read_samples(context.parent("conversations").file("samples.parquet"))
    shards = store.plan_shards(samples, settings.shard_tokens)
    with context.create() as build:
        missing = {name: part for name, part in _named(shards) if store.read_header(build.file(name)) is None}
        tokens = _tokens(samples)
        check_disk(
            build.path, sum(_tokens(part) for part in missing.values()), len(boundaries), anatomy, target, settings
        )
        engine = open_engine(target)
        try:
            _capture(context, build, engine, boundaries, missing, tokens)
        finally:
            engine.close()
        _finish(build, [name for name, _ in _named(shards)], samples)


def check_disk(
    folder: Path, tokens: int, aux: int, anatomy: Anatomy, target: config.Target, settings: config.Capture
) -> None:
    """Refuse before any work when the states cannot fit. Size: tokens * (n_aux + 1) * d * bytes, and 13 bytes of labels."""
    width = anatomy.required("hidden_size")
    dtype = next(
        (d for d in (settings.dtype, target.dtype) if d != "auto"), "float32" if target.device == "cpu" else "bfloat16"
    )
    needed = tokens * ((aux + 1) * width * BYTES[dtype] + 13)
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise UserError(
            f"the states of {tokens:,} tokens need {needed / 1e9:.1f} GB, {free / 1e9:.1f} GB are free in {folder.parent}",
            looked_for=f"{aux} aux states and the last one, {width} wide, {dtype}",
            do="set capture.dtype to bfloat16, fewer data.max_conversations, or `directory` to a larger disk",
        )


def _capture(
    context: Context,
    build: Build,
    engine: Engine,
    boundaries: tuple[int, ...],
    missing: dict[str, list[Sample]],
    tokens: int,
) -> None:
    settings = context.run.capture
    head = engine.head()
    head.save(build.path)
    samples = read_samples(context.parent("conversations").file("samples.parquet"))
    identity = check_identity(engine, head, _probes(samples), settings.batch_tokens)
    context.events.say(
        f"  identity: rebuilt logits are the target's own (max |dp| {identity.max_dp:.1e}, "
        f"argmax agreement {100 * identity.argmax_agreement:.1f} % of {identity.tokens} tokens)"
    )
    build.facts |= {
        "aux_layers": list(boundaries),
        "last": "boundary n, before the final norm",
        "identity": identity.as_dict(),
        "engine": asdict(engine.info),
        "target": asdict(inspect(engine.folder)),
    }
    budget = settings.max_bad_fraction * len(samples)
    bad = _dropped(sorted(build.path.glob("shard-*")))
    began, done = time.monotonic(), tokens - sum(_tokens(part) for part in missing.values())
    with context.events.progress("capture", tokens, "tok", done=done) as bar:
        for name, part in missing.items():
            bad |= _one_shard(build.file(name), part, engine, boundaries, head, settings, bar)
            _check_budget(bad, budget, len(samples))
    context.events.emit("captured", tokens=tokens - done, seconds=round(time.monotonic() - began, 3))


def _one_shard(
    path: Path,
    part: list[Sample],
    engine: Engine,
    boundaries: tuple[int, ...],
    head: TargetHead,
    settings: config.Capture,
    bar: Progress,
) -> dict[str, str]:
    """Capture the samples of one shard and write it; returns the samples left out, with reasons."""
    wanted = {sample.id: sample for sample in part}
    kept: dict[str, States] = {}
    dropped: dict[str, str] = {}
    for states in engine.capture(part, boundaries, settings.batch_tokens):
        sample = wanted[states.id]
        reason = fault(sample, states)
        if reason:
            dropped[sample.id] = reason
        else:
            kept[sample.id] = _stored(states, settings)
        bar.advance(len(sample.input_ids), bad=len(dropped)) if dropped else bar.advance(len(sample.input_ids))
    dropped |= {
        sample.id: "the engine returned nothing" for sample in part if sample.id not in kept.keys() | dropped.keys()
    }
    pairs = [(sample, kept[sample.id]) for sample in part if sample.id in kept]
    if pairs:
        store.write_shard(path, pairs, head, dropped)
    return dropped


def _stored(states: States, settings: config.Capture) -> States:
    if settings.dtype == "auto":
        return states
    dtype = getattr(torch, settings.dtype)
    return States(states.id, states.ids, states.aux.to(dtype), states.last.to(dtype))


def _check_budget(bad: dict[str, str], budget: float, total: int) -> None:
    if len(bad) <= budget:
        return
    shown = "; ".join(f"{sample}: {reason}" for sample, reason in list(bad.items())[:5])
    raise GateError(
        f"{len(bad)} of {total} samples have states that cannot be trusted: {shown}",
        looked_for=f"at most {budget:.1f} (capture.max_bad_fraction)",
        do="find out why; what was captured before is kept",
    )


def _finish(build: Build, names: list[str], samples: list[Sample]) -> None:
    headers = [header for name in names if (header := store.read_header(build.file(name))) is not None]
    entries = [entry for found, _ in headers for entry in found]
    dropped = {sample: reason for _, found in headers for sample, reason in found.items()}
    if not entries:
        raise GateError("no sample was captured")
    store.write_index(build.file(store.INDEX), entries)
    build.counts |= {
        "samples": len(entries),
        "tokens": sum(entry.length for entry in entries),
        "supervised": int(sum(sample.supervised.sum() for sample in samples if sample.id not in dropped)),
        "shards": len(headers),
        "bytes": sum(build.file(name).stat().st_size for name in names if build.file(name).exists()),
        "dropped": dropped,
    }


def _dropped(shards: list[Path]) -> dict[str, str]:
    headers = (store.read_header(path) for path in shards)
    return {sample: reason for header in headers if header for sample, reason in header[1].items()}


def _probes(samples: list[Sample]) -> list[Sample]:
    """A few samples for the identity check, cut short: rows do not depend on what follows them."""
    cut = []
    for sample in samples[:PROBES]:
        ids, mask = sample.input_ids[:PROBE_TOKENS], sample.supervised[:PROBE_TOKENS]
        cut.append(Sample(sample.id, sample.conversation, sample.source, sample.split, ids, mask, sample.finish))
    return cut


def _named(shards: list[list[Sample]]) -> Iterator[tuple[str, list[Sample]]]:
    for number, part in enumerate(shards):
        yield store.shard_name(number), part


def _tokens(samples: list[Sample]) -> int:
    return sum(len(sample.input_ids) for sample in samples)
