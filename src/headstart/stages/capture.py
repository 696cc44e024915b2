"""capture: the target's hidden states over the conversations, in shards, after proof that they are the right ones."""

from __future__ import annotations

import shutil
import time
from collections import Counter
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from headstart import config
from headstart.artifact import Build
from headstart.data import media, store
from headstart.data.footprint import bytes_per_token
from headstart.data.gates import fault, strange
from headstart.data.identity import check_identity
from headstart.data.rows import read_samples
from headstart.engines.base import Engine, Refused, States, Use
from headstart.engines.load import open_engine
from headstart.engines.weights import pick_device, pick_dtype
from headstart.errors import GateError, UserError
from headstart.events import Progress, size
from headstart.pipeline import Context
from headstart.target.anatomy import Anatomy, inspect
from headstart.target.head import TargetHead
from headstart.target.layers import check_boundaries
from headstart.target.source import resolve
from headstart.types import Sample

PROBES, PROBE_TOKENS = 4, 256


@dataclass(frozen=True)
class _Work:
    """What every shard needs."""

    engine: Engine
    head: TargetHead
    boundaries: tuple[int, ...]
    settings: config.Capture
    greedy: bool


def run(context: Context) -> None:
    """Capture every sample of conversations/ that no finished shard holds yet.

    Raises:
        UserError: aux layers that do not fit the target, or too little disk for the states.
        GateError: the identity check fails, or more samples than `max_bad_fraction` fail a gate.
    """
    settings, target = context.run.capture, context.run.target
    anatomy = inspect(resolve(target.model, target.revision))
    boundaries = check_boundaries(settings.aux_layers, anatomy.required("num_layers"))
    samples = read_samples(context.parent("conversations").file("samples.parquet"))
    shards = {store.shard_name(i): part for i, part in enumerate(store.plan_shards(samples, settings.shard_tokens))}
    images = media.check(sample.media for sample in samples)
    _refuse_twice(samples)
    with context.create() as build:
        missing = {name: part for name, part in shards.items() if store.read_header(build.file(name)) is None}
        check_disk(build.path, sum(map(_tokens, missing.values())), len(boundaries), anatomy, target, settings)
        engine = open_engine(target, replace(_use(samples, boundaries, settings), media=images))
        try:
            greedy = context.run.data.answers == "regenerate" and context.run.regenerate.temperature == 0
            work = _Work(engine, engine.head(), boundaries, settings, greedy)
            _prove(context, build, work, samples)
            _capture(context, build, work, missing, samples)
        finally:
            engine.close()
        _finish(build, list(shards), samples)


def _refuse_twice(samples: list[Sample]) -> None:
    """States go by the sample's id: with one of two, both would be given the states of the last."""
    name, count = Counter(sample.id for sample in samples).most_common(1)[0] if samples else ("", 0)
    if count > 1:
        raise GateError(f"{count} samples have the id {name}", do="headstart regenerate again")


def _use(samples: list[Sample], boundaries: tuple[int, ...], settings: config.Capture) -> Use:
    longest = max(len(sample.input_ids) for sample in samples)
    return Use(longest, batch_tokens=settings.batch_tokens, boundaries=boundaries)


def check_disk(
    folder: Path, tokens: int, aux: int, anatomy: Anatomy, target: config.Target, settings: config.Capture
) -> None:
    """Refuse before any work when the states cannot fit; every token counted as a label row."""
    width, dtype = anatomy.required("hidden_size"), stored_dtype(target, settings)
    needed = tokens * bytes_per_token(aux, width, dtype.itemsize)
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise UserError(
            f"the states of {tokens:,} tokens need {size(needed)}, {size(free)} are free in {folder.parent}",
            looked_for=f"{aux} aux states and the last one, {width} wide, {str(dtype).removeprefix('torch.')}",
            do="set capture.dtype to float8 or bfloat16, fewer data.max_conversations, or `directory` to a larger disk",
        )


def stored_dtype(target: config.Target, settings: config.Capture) -> torch.dtype:
    """What states are stored in: the type asked for, else the engine's, which may be at home in another environment."""
    if settings.dtype == "float8":
        return store.FLOAT8
    if settings.dtype != "auto":
        return getattr(torch, settings.dtype)
    if target.engine == "vllm":
        from headstart.engines.vllm.start import compute_dtype  # noqa: PLC0415 (each engine brings libraries of its own)

        return getattr(torch, compute_dtype(target))
    return pick_dtype(target.dtype, pick_device(target.device))


def _prove(context: Context, build: Build, work: _Work, samples: list[Sample]) -> None:
    """The identity check, and what it was made with, before the first shard."""
    work.head.save(build.path)
    identity = check_identity(work.engine, work.head, _probes(samples), work.boundaries, work.settings.batch_tokens)
    context.events.say(
        f"  identity: rebuilt logits are the target's own (max |dp| {identity.max_dp:.1e}, "
        f"argmax agreement {100 * identity.argmax_agreement:.1f} % of {identity.tokens} tokens)"
    )
    build.facts |= {
        "aux_layers": list(work.boundaries),
        "last": "boundary n, before the final norm",
        "identity": identity.as_dict(),
        "engine": asdict(work.engine.info),
        "target": asdict(inspect(work.engine.folder)),
    }


def _capture(
    context: Context, build: Build, work: _Work, missing: dict[str, list[Sample]], samples: list[Sample]
) -> None:
    bad = _dropped(sorted(build.path.glob("shard-*")))
    tokens = _tokens(samples)
    began, done = time.monotonic(), tokens - sum(map(_tokens, missing.values()))
    with context.events.progress("capture", tokens, "tok", done=done) as bar:
        for name, part in missing.items():
            bad |= _one_shard(build.file(name), part, work, bar)
            _check_budget(bad, work.settings.max_bad_fraction * len(samples), len(samples))
    context.events.emit("captured", tokens=tokens - done, seconds=round(time.monotonic() - began, 3))


def _one_shard(path: Path, part: list[Sample], work: _Work, bar: Progress) -> dict[str, str]:
    """Capture the samples of one shard and write it; returns the samples left out, with reasons."""
    wanted = {sample.id: sample for sample in part}
    kept: dict[str, States] = {}
    dropped: dict[str, str] = {}
    for captured in work.engine.capture(part, work.boundaries, work.settings.batch_tokens):
        sample = wanted[captured.id]
        if isinstance(captured, Refused):
            dropped[sample.id] = f"the engine refused it: {captured.why}"
            continue
        states = _stored(captured, work.settings)
        if reason := fault(sample, states):  # after the cast: a narrow type may have overflowed
            dropped[sample.id] = reason
        else:
            kept[sample.id] = states
        bar.advance(len(sample.input_ids), **({"bad": len(dropped)} if dropped else {}))
    lost = wanted.keys() - kept.keys() - dropped.keys()
    dropped |= {name: "the engine returned nothing" for name in wanted if name in lost}
    items = store.label([(sample, kept[sample.id]) for sample in part if sample.id in kept], work.head)
    if work.greedy:
        dropped |= {item.sample.id: why for item in items if (why := strange(item.sample, item.top1))}
    items = [item for item in items if item.sample.id not in dropped]
    store.write_shard(path, items, dropped, store.FLOAT8 if work.settings.dtype == "float8" else None)
    return dropped


def _stored(states: States, settings: config.Capture) -> States:
    if settings.dtype in ("auto", "float8"):  # float8 has scales, so nothing can overflow
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
    kept = {entry.id for entry in entries}
    store.write_index(build.file(store.INDEX), entries)
    build.counts |= {
        "samples": len(entries),
        "tokens": sum(entry.length for entry in entries),
        "supervised": int(sum(sample.supervised.sum() for sample in samples if sample.id in kept)),
        "shards": len(headers),
        "bytes": sum(build.file(name).stat().st_size for name in names if build.file(name).exists()),
        "dropped": dropped,
    }


def _dropped(shards: list[Path]) -> dict[str, str]:
    headers = (store.read_header(path) for path in shards)
    return {sample: reason for header in headers if header for sample, reason in header[1].items()}


def _probes(samples: list[Sample]) -> list[Sample]:
    """A few samples for the identity check, cut short: rows do not depend on what follows them.

    Of those with images their answers alone, which are text: any tokens do here.
    """
    cut = []
    for sample in samples[:PROBES]:
        ids, mask = sample.input_ids, sample.supervised
        if sample.media:
            ids, mask = ids[mask], mask[mask]
        text = {"media": (), "sent": None}
        cut.append(replace(sample, input_ids=ids[:PROBE_TOKENS], supervised=mask[:PROBE_TOKENS], **text))
    return cut


def _tokens(samples: list[Sample]) -> int:
    return sum(len(sample.input_ids) for sample in samples)
