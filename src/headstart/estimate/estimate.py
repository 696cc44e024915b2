"""Disk, memory and time of each stage, from a run's settings, its target's anatomy, the work and the machine."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headstart.config import Run
from headstart.data.footprint import bytes_per_token
from headstart.doctor.sizes import BYTES
from headstart.estimate.draft import FLOAT, parameters, training_cost
from headstart.estimate.hardware import Hardware
from headstart.estimate.work import Work
from headstart.target.anatomy import Anatomy

if TYPE_CHECKING:
    from headstart.drafts.shape import DraftShape

PER_TOKEN = 4  # bytes of a token in conversations/
FIXED = 200_000  # bytes of small files of a stage
WORKING = 2_000_000_000  # bytes beside the weights: activations and the cache of a few sequences
WRITING = 3e8  # bytes/s that an export is written and read back with
TAU = 1.4  # assumed of a draft before it is measured; only the time of `evaluate` depends on it
EVALUATION_PROMPT = 150  # tokens


@dataclass(frozen=True)
class Stage:
    """disk: bytes it leaves; peak: bytes on disk while it runs, beyond that; memory: bytes on one device."""

    verb: str
    disk: float
    memory: float
    seconds: float
    peak: float = 0.0


@dataclass(frozen=True)
class Subject:
    """What is estimated. shape: the draft's, of `training.build.shape_for`; weights: bytes of the target's."""

    run: Run
    anatomy: Anatomy
    shape: DraftShape
    weights: float
    work: Work

    @property
    def itemsize(self) -> int:
        """Bytes of a stored number."""
        return BYTES[self.run.capture.dtype] if self.run.capture.dtype != "auto" else self.computed

    @property
    def computed(self) -> int:
        """Bytes of a number in the target's passes: float32 on a CPU."""
        named = self.run.target.dtype
        return BYTES[named] if named != "auto" else (FLOAT if self.run.target.device == "cpu" else 2)

    @property
    def head_bytes(self) -> int:
        """The target's final norm, head and embedding, beside the states."""
        rows = self.shape.target_vocab_size * self.shape.target_hidden_size
        return rows * (1 if self.anatomy.tied_head else 2) * self.computed


def estimate(subject: Subject, machine: Hardware) -> list[Stage]:
    """All stages in order."""
    return [
        Stage("prepare", FIXED, 0.0, 10.0),
        _regenerate(subject, machine),
        Stage("vocab", FIXED, 0.0, 1.0),
        _capture(subject, machine),
        _train(subject, machine),
        _evaluate(subject, machine),
        _export(subject),
    ]


def disk_needed(stages: list[Stage]) -> float:
    """The most bytes that lie on the disk at any time."""
    kept, most = 0.0, 0.0
    for stage in stages:
        kept += stage.disk
        most = max(most, kept + stage.peak)
    return most


def _regenerate(subject: Subject, machine: Hardware) -> Stage:
    run, work = subject.run, subject.work
    disk = FIXED + work.tokens * PER_TOKEN
    if run.data.answers == "keep":
        return Stage("regenerate", disk, 0.0, 5.0)
    seconds = _loading(subject, machine) + work.answer_tokens / machine.decode
    return Stage("regenerate", disk, _target_memory(subject, machine), seconds)


def _capture(subject: Subject, machine: Hardware) -> Stage:
    work, shape = subject.work, subject.shape
    labels = work.answer_tokens / max(work.tokens, 1)  # only they have a last state
    each = bytes_per_token(len(shape.aux_layers), shape.target_hidden_size, subject.itemsize, labels)
    seconds = _loading(subject, machine) + work.tokens / machine.prefill
    return Stage("capture", work.tokens * each + subject.head_bytes + FIXED, _target_memory(subject, machine), seconds)


def _train(subject: Subject, machine: Hardware) -> Stage:
    train, work, shape = subject.run.train, subject.work, subject.shape
    counts = parameters(shape)
    cost = training_cost(shape, subject.run.draft.ttt_steps, work.length, freeze_head=train.freeze_lm_head)
    steps = work.steps(subject.run)
    passes = steps * train.epochs / work.steps(_unlimited(subject.run))
    live, dead = work.answer_tokens, work.prompt_tokens
    training = passes * (1 - work.held_out) * cost.total(live, dead)
    validations = math.ceil(steps / train.validate_every) + 1
    alpha = 2 * shape.target_hidden_size * shape.target_vocab_size  # the target's whole distribution
    validating = validations * work.held_out * (cost.total(live, dead) / 3 + live * alpha)
    optimizer = counts.optimizer_bytes(train.optimizer)
    kept = optimizer + (counts.bytes if train.ema else 0)
    checkpoints = (train.keep_checkpoints + 1) * (2 * counts.bytes + kept) + counts.bytes
    memory = 2 * counts.bytes + kept + subject.head_bytes + _activations(subject)
    disk = 2 * counts.bytes + FIXED  # the draft, and as it was before
    return Stage("train", disk, memory, (training + validating) / machine.train, peak=max(checkpoints - disk, 0))


def _unlimited(run: Run) -> Run:
    return run.model_copy(update={"train": run.train.model_copy(update={"max_steps": None})})


def _activations(subject: Subject) -> float:
    """Of one forward pass, kept for backward: fused states, and per TTT step the residual stream, queries, keys and values (of the
    steps before as well, side by side) and the MLP."""
    shape, train = subject.shape, subject.run.train
    share = subject.work.answer_tokens / max(subject.work.tokens, 1)
    steps, pair = subject.run.draft.ttt_steps, 2 * shape.num_kv_heads * shape.head_dim
    row = 8 * shape.hidden_size + 3 * shape.intermediate_size + 2 * shape.num_heads * shape.head_dim
    row += pair * (1 + (steps - 1) / 2)
    tokens = min(train.batch_tokens, train.micro_tokens or train.batch_tokens)
    live = tokens * share * steps * row * shape.num_layers
    return FLOAT * (live + tokens * ((len(shape.aux_layers) + 3) * shape.hidden_size + pair * shape.num_layers))


def _evaluate(subject: Subject, machine: Hardware) -> Stage:
    settings = subject.run.evaluate
    prompts = settings.max_prompts * len(settings.prompts) * len(settings.temperatures)
    tokens = prompts * settings.max_new_tokens
    drafted = settings.draft_tokens * machine.draft + machine.verify
    if subject.run.target.engine == "vllm":  # the target answers in batches, drafts are replayed over its states
        ways = 2 if settings.baseline else 1
        seconds = (
            tokens / machine.decode + ways * prompts * (EVALUATION_PROMPT + settings.max_new_tokens) / machine.prefill
        )
    else:
        plain_steps = tokens * (1 + drafted / TAU + (drafted if settings.baseline else 0))
        seconds = plain_steps / machine.single
    return Stage("evaluate", FIXED, _target_memory(subject, machine), _loading(subject, machine) + seconds)


def _export(subject: Subject) -> Stage:
    embedding = subject.shape.target_vocab_size * subject.shape.target_hidden_size * subject.computed
    each = parameters(subject.shape).bytes + (embedding if subject.run.export.embed_tokens else 0)
    disk = len(subject.run.export.formats) * each
    return Stage("export", disk, each, 3 * disk / WRITING)


def _target_memory(subject: Subject, machine: Hardware) -> float:
    return subject.weights / max(min(subject.run.target.tensor_parallel, machine.gpus), 1) + WORKING


def _loading(subject: Subject, machine: Hardware) -> float:
    return subject.weights / machine.loading
