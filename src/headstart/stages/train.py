"""train: an EAGLE-3 draft from stored states, the best checkpoint by acceptance length."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from pathlib import Path

import torch

from headstart.data.store import StateStore
from headstart.data.vocab import DraftVocab
from headstart.drafts import checkpoint
from headstart.drafts.eagle3 import Eagle3
from headstart.engines.weights import pick_device
from headstart.pipeline import Context
from headstart.target.anatomy import Anatomy
from headstart.training.build import new_draft, shape_for
from headstart.training.checkpoint import BEST, Progress
from headstart.training.loop import Trainer


def run(context: Context) -> None:
    """Train the draft that the settings describe, continuing a killed attempt from its newest checkpoint.

    Raises:
        UserError: nothing to learn from, or a draft shape that does not fit.
        GateError: a gradient that is not finite.
    """
    settings = context.run.draft
    store = StateStore.open(context.parent("states"))
    head = store.head()
    vocab = DraftVocab.read(context.parent("vocab").path, head.vocab_size)
    target = Anatomy(**store.facts["target"])
    shape = shape_for(settings, target, tuple(store.facts["aux_layers"]), vocab.size)
    draft = new_draft(
        shape,
        head,
        torch.from_numpy(vocab.draft_to_target),
        lm_head=settings.lm_head,
        fc=settings.fc,
        seed=context.run.train.seed,
    )
    device = str(pick_device(context.run.target.device))
    with context.create() as build:
        _tell(context, draft)
        checkpoint.save_weights(build.file(checkpoint.UNTRAINED), draft)
        trainer = Trainer(
            draft.to(device),
            head.to(device),
            store,
            context.run.train,
            settings.ttt_steps,
            build.scratch,
            context.events,
            device,
        )
        progress = trainer.run()
        shutil.copy(build.scratch / BEST, build.file(checkpoint.TRAINED))
        counts = _counts(trainer, progress)
        facts = {"ttt_steps": settings.ttt_steps, "target": context.run.target.model, "vocabulary": vocab.size}
        checkpoint.save_shape(build.path, shape, facts | {name: counts[name] for name in ("best_step", "best_tau")})
        _write_curves(build.file("curves.jsonl"), progress)
        build.counts |= counts
        build.facts |= {"shape": asdict(shape)}


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
        "parameters": sum(parameter.numel() for parameter in trainer.draft.parameters()),
        "best_step": progress.best_step if validations else progress.step,
        "best_tau": progress.best_tau if validations else None,
        "last_tau": validations[-1]["tau"] if validations else None,
    }


def _write_curves(path: Path, progress: Progress) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in progress.curves), encoding="utf-8")
