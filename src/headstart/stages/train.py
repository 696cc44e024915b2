"""train: an EAGLE-3 draft from stored states, the best checkpoint by acceptance length."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from headstart.data.store import StateStore
from headstart.data.vocab import DraftVocab
from headstart.drafts import checkpoint
from headstart.drafts.eagle3 import Eagle3
from headstart.engines.weights import pick_device
from headstart.pipeline import Context
from headstart.products import use_fast_products
from headstart.target.anatomy import Anatomy
from headstart.training.build import new_draft
from headstart.training.checkpoint import BEST, Progress
from headstart.training.distributed import World, world
from headstart.training.loop import Trainer
from headstart.training.shape import shape_for


def run(context: Context) -> None:
    """Train the draft that the settings describe, continuing a killed attempt from its newest checkpoint.

    Raises:
        UserError: nothing to learn from, or a draft shape that does not fit.
        GateError: a gradient that is not finite.
        Stopped: SIGTERM came; a checkpoint was saved.
    """
    with context.create() as build, world(str(pick_device(context.run.target.device))) as joined:
        draft, facts = _new(context)
        _tell(context, draft)
        checkpoint.save_weights(build.file(checkpoint.UNTRAINED), draft)
        trainer = _trainer(context, draft, build.scratch, joined)
        progress = trainer.run()
        shutil.copy(build.scratch / BEST, build.file(checkpoint.TRAINED))
        counts = _counts(trainer, progress)
        best = {name: counts[name] for name in ("best_step", "best_tau")}
        checkpoint.save_shape(build.path, draft.shape, facts | best)
        _write_curves(build.file("curves.jsonl"), progress)
        build.counts |= counts
        build.facts |= {"shape": asdict(draft.shape), "processes": joined.size}


def follow(context: Context) -> None:
    """What every other process of torchrun does meanwhile: the same training on its share, without writing."""
    with world(str(pick_device(context.run.target.device))) as joined:
        _trainer(context, _new(context)[0], context.path, joined).run()


def _new(context: Context) -> tuple[Eagle3, dict[str, Any]]:
    """The untrained draft, and the facts that are stored beside its shape."""
    settings, store = context.run.draft, StateStore.open(context.parent("states"))
    head = store.head()
    vocab = DraftVocab.read(context.parent("vocab").path, head.vocab_size)
    shape = shape_for(settings, Anatomy(**store.facts["target"]), tuple(store.facts["aux_layers"]), vocab.size)
    kept = torch.from_numpy(vocab.draft_to_target)
    seed = context.run.train.seed
    draft = new_draft(shape, head, kept, lm_head=settings.lm_head, fc=settings.fc, seed=seed)
    return draft, {"ttt_steps": settings.ttt_steps, "target": context.run.target.model, "vocabulary": vocab.size}


def _trainer(context: Context, draft: Eagle3, folder: Path, joined: World) -> Trainer:
    store = StateStore.open(context.parent("states"))
    use_fast_products(torch.device(joined.device))
    return Trainer(
        draft.to(joined.device),
        store.head().to(joined.device),
        store,
        context.run.train,
        context.run.draft.ttt_steps,
        folder,
        context.events,
        joined,
        context.root,
    )


def _tell(context: Context, draft: Eagle3) -> None:
    size = sum(parameter.numel() for parameter in draft.parameters())
    shape = draft.shape
    context.events.say(
        f"  draft: {size / 1e6:.1f} M parameters, {shape.num_layers} layer(s) of width {shape.hidden_size}, "
        f"vocabulary {shape.draft_vocab_size:,} of {shape.target_vocab_size:,}, aux layers {list(shape.aux_layers)}"
    )


def _counts(trainer: Trainer, progress: Progress) -> dict[str, object]:
    validations = [record for record in progress.curves if record["kind"] == "validation"]
    return {
        "steps": progress.step,
        "samples": len(trainer.training),
        "held_out_samples": len(trainer.validation),
        "answer_tokens": sum(int(trainer.store.supervised(entry).sum()) for entry in trainer.training),
        "parameters": sum(parameter.numel() for parameter in trainer.draft.parameters()),
        "best_step": progress.best_step if validations else progress.step,
        "best_tau": progress.best_tau if validations else None,
        "last_tau": validations[-1]["tau"] if validations else None,
    }


def _write_curves(path: Path, progress: Progress) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in progress.curves), encoding="utf-8")
