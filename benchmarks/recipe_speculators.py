"""speculators 0.9.0 trains one draft on the states of a run, as its `train` command would."""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from recipe_parts import Material, Trained, measure, our_products, point, say
from torch import Tensor, nn

from headstart.config import Run
from headstart.data.store import Entry, StateStore, label_rows, widen
from headstart.drafts.eagle3 import Eagle3
from headstart.drafts.layers import RMSNorm
from headstart.drafts.rows import plan_rows
from headstart.drafts.shape import DraftShape
from headstart.drafts.ttt import unroll
from headstart.errors import UserError
from headstart.training.batches import ahead

CHANGES: dict[str, Callable[[Run], dict[str, Any]]] = {
    "default": lambda run: {},
    "small-batch": lambda run: {"total_seq_len": run.train.batch_tokens},
    "adamw": lambda run: {"optimizer": "adamw"},
}
VALIDATIONS = 8  # of a training, at even distances in time, which is stopped meanwhile
SAME = 2e-3  # largest difference between two implementations' logits in float32


class TheirDraft(Eagle3):
    """Our draft with the one part that speculators' default has and ours has not: a norm of the joined aux states."""

    def __init__(self, shape: DraftShape, embed: Tensor) -> None:
        super().__init__(shape, embed)
        self.input_norm = RMSNorm(len(shape.aux_layers) * shape.target_hidden_size, shape.rms_norm_eps)

    def fuse(self, aux: Tensor) -> Tensor:
        return self.fc(self.input_norm(aux.flatten(-2)))


class Theirs:
    """speculators 0.9.0, training one draft on `material`."""

    def __init__(self, material: Material, changes: dict[str, Any], dtype: str) -> None:
        import oracle_speculators as oracle  # noqa: PLC0415 (slow to import)

        self.oracle, self.material = oracle, material  # nothing of speculators can be imported before it
        from speculators.train.config.schema import TrainConfig  # noqa: PLC0415
        from speculators.train.optimizers import build_optimizers  # noqa: PLC0415

        on_cpu = {"loss_implementation": "eager", "draft_attn_impl": "sdpa"}
        self.settings: dict[str, Any] = TrainConfig().flatten() | changes | on_cpu
        longest = max(entry.length for entry in material.store.entries)
        if longest >= self.settings["sliding_window"]:
            raise UserError(
                f"samples are up to {longest} tokens long", looked_for="less than speculators' sliding window"
            )
        torch.manual_seed(self.settings["seed"])
        self.model = self._model()
        self.call, _ = oracle.Eagle3DraftModel.get_trainer_kwargs(**self.settings)
        self.optimizers: list[torch.optim.Optimizer] = build_optimizers(self.model, argparse.Namespace(**self.settings))
        self.peaks = [[group["lr"] for group in part.param_groups] for part in self.optimizers]
        self.optimizer_seconds = 0.0  # of all steps so far
        self.probe: dict[str, float] = {}  # seconds of a small batch's gradients by type
        self.dtype = self._faster() if dtype == "auto" else getattr(torch, dtype)
        self.settings["hidden_states_dtype"] = str(self.dtype).removeprefix("torch.")

    def _model(self) -> Any:
        """As their `train` command builds it: aux layers and vocabulary are the run's."""
        from speculators.train.cli import create_transformer_layer_config  # noqa: PLC0415

        names = {"num_layers", "draft_arch", "sliding_window", "full_attention_indices"}
        chosen: dict[str, Any] = {name: self.settings[name] for name in names} | {
            "hidden_act": self.settings["draft_hidden_act"]
        }
        layer = create_transformer_layer_config(str(self.material.folder), **chosen)
        kept = self.material.vocabulary
        inside = torch.zeros(self.material.head.vocab_size, dtype=torch.bool).index_fill_(0, kept, True)
        given = {
            "verifier_name_or_path": str(self.material.folder),
            "draft_vocab_size": len(kept),
            "target_layer_ids": list(self.material.store.facts["aux_layers"]),
        }
        offsets = kept - torch.arange(len(kept))
        model = self.oracle.Eagle3DraftModel.from_training_args(layer, t2d=inside, d2t=offsets, **self.settings | given)
        return model.train()

    def batches(self) -> Iterator[list[Entry]]:
        """The training samples in the order and the groups of their sampler, epoch after epoch."""
        from speculators.train.distributed_batch_sampler import MultipackDistributedBatchSamplerV2  # noqa: PLC0415

        entries = self.material.training
        lengths = [entry.length for entry in entries]
        sampler = MultipackDistributedBatchSamplerV2(
            self.settings["total_seq_len"], lengths, 1, 0, seed=self.settings["seed"]
        )
        for epoch in itertools.count():
            sampler.set_epoch(epoch)
            for batch in sampler:
                yield [entries[int(i)] for i in batch]

    def collate(self, entries: Sequence[Entry], length: int, dtype: torch.dtype) -> dict[str, Tensor]:
        shape = (self.material.head.hidden_size, len(self.material.store.facts["aux_layers"]))
        pack = self.oracle.CollateFn(length, *shape, dtype=dtype, preprocess=self.oracle.shift_batch)
        found = pack([sample_of(self.material.store, entry) for entry in entries])
        return {name: value for name, value in found.items() if isinstance(value, Tensor)}

    def read(self, entries: Sequence[Entry]) -> dict[str, Tensor]:
        return self.collate(entries, self.settings["total_seq_len"], self.dtype)

    def loss(self, batch: dict[str, Tensor], dtype: torch.dtype) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
            _, loss, _ = self.model(**batch, **self.call)
        return loss

    def gradients(self, batch: dict[str, Tensor], dtype: torch.dtype) -> float:
        """Seconds of one forward and backward pass, whose gradients are thrown away."""
        began = time.perf_counter()
        self.loss(batch, dtype).backward()
        spent = time.perf_counter() - began
        self.model.zero_grad(set_to_none=True)
        return spent

    def step(self, batch: dict[str, Tensor], share: float) -> float:
        """One optimiser step at `share` of the peak rates, as their trainer makes it. Returns the loss before it."""
        loss = self.loss(batch, self.dtype)
        self.model.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        began = time.perf_counter()
        for optimizer, peaks in zip(self.optimizers, self.peaks, strict=True):
            for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                group["lr"] = peak * share
            optimizer.step()
        self.optimizer_seconds += time.perf_counter() - began
        return float(loss.detach())

    def _faster(self) -> torch.dtype:
        entries = next(self.batches())[:4]
        for dtype in (torch.float32, torch.bfloat16):
            batch = self.collate(entries, sum(entry.length for entry in entries), dtype)
            seconds = min(self.gradients(batch, dtype) for _ in range(3))
            self.probe[str(dtype).removeprefix("torch.")] = round(seconds, 4)
        return getattr(torch, min(self.probe, key=lambda name: self.probe[name]))

    def draft(self) -> Eagle3:
        """The model as it is now, as a draft of ours; tensors are copied."""
        return adopt(self.model, self.material)


def sample_of(store: StateStore, entry: Entry) -> dict[str, Tensor]:
    """One stored sample of n tokens as their data set gives it. Last states that are not stored are 0, and masked out."""
    stored = store.read(entry)
    supervised = stored.supervised.bool()
    labels = torch.from_numpy(label_rows(supervised.numpy()))
    last = torch.zeros(entry.length, stored.last.shape[1])
    last[labels] = widen(stored.last, stored.last_scale)
    return {
        "input_ids": stored.input_ids.long(),
        "hidden_states": widen(stored.aux, stored.aux_scale).flatten(1),
        "verifier_last_hidden_states": last,
        "loss_mask": supervised & labels,
        "lengths": torch.tensor([entry.length]),
        "position_ids": torch.arange(entry.length),
    }


def adopt(model: nn.Module, material: Material) -> Eagle3:
    """A speculators model as a draft that our decoder runs."""
    config: Any = model.config
    layer = config.transformer_layer_config
    shape = DraftShape(
        hidden_size=layer.hidden_size,
        target_hidden_size=material.head.hidden_size,
        aux_layers=tuple(config.eagle_aux_hidden_state_layer_ids),
        num_layers=layer.num_hidden_layers,
        num_heads=layer.num_attention_heads,
        num_kv_heads=layer.num_key_value_heads,
        head_dim=layer.head_dim or layer.hidden_size // layer.num_attention_heads,
        intermediate_size=layer.intermediate_size,
        target_vocab_size=layer.vocab_size,
        draft_vocab_size=config.draft_vocab_size,
        rms_norm_eps=layer.rms_norm_eps,
        rope_theta=float(layer.rope_parameters["rope_theta"]),
        max_positions=layer.max_position_embeddings,
        norm_before_residual=config.norm_before_residual,
        fc_norm=config.fc_norm,
        norm_output=config.norm_output,
    )
    draft = (TheirDraft if config.norm_before_fc else Eagle3)(shape, material.head.embed)
    foreign = ("embed_tokens.weight", "verifier_norm.weight", "verifier_lm_head.weight", "d2t", "t2d")
    weights = {
        name.replace("fc_norm.", "fc_norms."): t for name, t in model.state_dict().items() if name not in foreign
    }
    draft.load_state_dict(weights)
    draft.draft_to_target = material.vocabulary
    return draft.eval().requires_grad_(False)


@torch.no_grad()
def check_same(theirs: Theirs) -> float:
    """Both implementations on one held-out sample, every TTT step. Returns the largest difference of two logits.

    Raises:
        SystemExit: it is not rounding.
    """
    material, entry = theirs.material, theirs.material.held_out[0]
    stored, steps = material.store.read(entry), theirs.settings["ttt_steps"]
    logits: list[Tensor] = []
    hook = theirs.model.lm_head.register_forward_hook(lambda module, args, out: logits.append(out.detach()[0]))
    theirs.loss(theirs.collate([entry], entry.length - 1, torch.float32), torch.float32)
    hook.remove()
    draft, plan = theirs.draft(), plan_rows([stored.supervised.numpy().astype(bool)], steps)
    aux = widen(stored.aux, stored.aux_scale)[plan.context]
    outs = unroll(draft, aux, stored.input_ids.long(), plan)
    differences = [
        float((draft.logits(out) - found[plan.context[step.rows]]).abs().max())
        for step, out, found in zip(plan.steps, outs, logits, strict=True)
        if len(out)
    ]
    if not differences or max(differences) > SAME:
        raise SystemExit(f"our code gives other logits than speculators: {differences}, by TTT step")
    return max(differences)


def train_theirs(name: str, theirs: Theirs, seconds: float) -> tuple[Trained, Eagle3]:
    """Optimiser steps for `seconds`, reading included; the best draft on held-out states. Measuring stops the clock."""
    found = Trained(name, 0, 0, 0.0, 0.0, described(theirs), [], [])
    best, best_tau, marks = theirs.draft(), -1.0, [seconds * i / VALIDATIONS for i in range(VALIDATIONS + 1)]
    total = warmup = None
    clock = time.perf_counter()
    for entries, batch in ahead(theirs.batches(), theirs.read):
        waited = time.perf_counter() - clock
        if total is None or warmup is None:
            total = max(1, round(seconds / theirs.gradients(batch, theirs.dtype)))
            warmup = total // 100
        if marks and found.wall >= marks[0]:
            marks = [mark for mark in marks if mark > found.wall]
            best, best_tau = _better(theirs, found, best, best_tau)
        if found.steps >= total:
            break
        began = time.perf_counter()
        loss = theirs.step(batch, linear(found.steps, warmup, total))
        found.wall += waited + time.perf_counter() - began
        found.steps += 1
        found.tokens += sum(entry.length for entry in entries)
        found.training_loss.append((found.wall, loss))
        total = found.steps + int(max(0.0, seconds - found.wall) / (found.wall / found.steps) + 0.5)
        clock = time.perf_counter()
    found.step_seconds = found.wall
    found.settings["optimizer_seconds"] = round(theirs.optimizer_seconds, 2)
    if not found.curve or found.curve[-1]["step"] < found.steps:
        best, _ = _better(theirs, found, best, best_tau)
    return found, best


def linear(step: int, warmup: int, total: int) -> float:
    """The share of the peak rate at 0-based `step`: up from nothing, then down to nothing, as Transformers' schedule does."""
    return step / warmup if step < warmup else (total - step) / max(1, total - warmup)


def _better(theirs: Theirs, found: Trained, best: Eagle3, best_tau: float) -> tuple[Eagle3, float]:
    draft = theirs.draft()
    with our_products():
        summary = measure(draft, theirs.material)
    now = point(found.wall, found.steps, summary)
    found.curve.append(now)
    loss = float(np.mean(now["loss"]))
    say(f"  step {found.steps}, {found.wall:.0f} s: held-out loss {loss:.3f}, tau {now['tau']:.3f}")
    return (draft, now["tau"]) if now["tau"] >= best_tau else (best, best_tau)


def described(theirs: Theirs) -> dict[str, Any]:
    """Those of their settings that matter to this draft."""
    names = (
        "optimizer lr muon_lr weight_decay muon_weight_decay scheduler_type total_seq_len hidden_states_dtype ttt_steps "
        "ttt_step_loss_decay loss_fn num_layers norm_before_residual norm_before_fc fc_norm norm_output"
    )
    parameters = theirs.model.named_parameters()
    trained = sum(p.numel() for _, p in parameters if p.requires_grad)
    head = bool(theirs.model.lm_head.weight.requires_grad)
    return {
        **{n: theirs.settings[n] for n in names.split()},
        "trained_parameters": trained,
        "trains_lm_head": head,
        "probe": theirs.probe,
    }
