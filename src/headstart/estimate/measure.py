"""The rates of this machine, measured with the target itself in about a minute: what `Hardware` holds.

A few prompts are answered, the states of such sequences are captured and stored, and a new draft takes a few training steps on
them: the work of the stages in small, by their own parts. Sequences are as long as the run's are on average.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from headstart.config import Run
from headstart.data import store
from headstart.drafts.eagle3 import DraftCache, Eagle3
from headstart.drafts.shape import DraftShape
from headstart.engines.base import Engine, Refused, Use
from headstart.engines.load import open_engine
from headstart.errors import UserError
from headstart.estimate.draft import training_cost
from headstart.estimate.hardware import Hardware
from headstart.estimate.work import Work
from headstart.products import use_fast_products
from headstart.target.head import TargetHead
from headstart.training.batches import assemble
from headstart.training.build import new_draft
from headstart.training.optim import Optimizer
from headstart.training.step import forward, teacher_for
from headstart.types import Prompt, Sample, Sampling

NEW = 12  # tokens of a measured answer
CAPTURED = 1024  # tokens captured at most
ALONE = 8  # steps of one sequence alone
SLOW = 4.0  # seconds after which a measurement is not repeated
AGAIN = 2.0  # seconds spent on repetitions


@dataclass(frozen=True)
class Task:
    """What is to be measured. prompts: token ids of some; weights: bytes of the target, once loaded."""

    run: Run
    shape: DraftShape
    work: Work
    prompts: Sequence[list[int]]
    weights: float

    @property
    def length(self) -> int:
        return max(round(self.work.length), 4)

    @property
    def answer(self) -> int:
        """Tokens of a sequence that the target produced."""
        share = self.work.answer_tokens / max(self.work.tokens, 1)
        return min(max(round(self.length * share), 2), self.length - 1)


def measure(task: Task, gpus: int, memory: float, disk: float) -> Hardware:
    """Open the target, measure, close it.

    Raises:
        UserError: the target cannot be opened, or refuses the prompts.
    """
    run, began = task.run, time.perf_counter()
    longest = max(run.data.max_length, *map(len, task.prompts)) + NEW
    use = Use(longest, run.regenerate.batch_size, run.capture.batch_tokens, task.shape.aux_layers)
    with closing(open_engine(run.target, use)) as engine, tempfile.TemporaryDirectory() as folder:
        loading = task.weights / (time.perf_counter() - began)
        head, samples = engine.head(), _samples(task)
        prefill = _capture(engine, head, task, samples, Path(folder))
        decode = _decode(engine, task, prefill)
        single, verify = _alone(engine, task)
        train = _train(head, task, store.StateStore(Path(folder), {}))
        draft = _draft_step(head, task.shape) * single
    return Hardware(gpus, memory, disk, prefill, decode, single, train, verify, draft, loading)


# --- the target ---


def _decode(engine: Engine, task: Task, prefill: float) -> float:
    """Tokens/s of a full batch of whole answers, from a short one: reading the prompts, then a few steps."""
    count = min(task.run.regenerate.batch_size, max(task.work.conversations, 1))
    batch = [Prompt(f"{i}", tuple(task.prompts[i % len(task.prompts)])) for i in range(count)]
    heard: dict[str, float] = {}

    def tell(name: str, _: int) -> None:
        heard.setdefault(name, time.perf_counter())

    whole = _answer(engine, batch, NEW, tell)
    first = max(heard.values()) - whole.began if heard else sum(len(prompt.ids) for prompt in batch) / prefill
    step = max(whole.seconds - first, whole.seconds / NEW / 10) / (NEW - 1)
    return count * task.answer / (first + (task.answer - 1) * step)


@dataclass(frozen=True)
class _Spent:
    began: float
    seconds: float


def _answer(
    engine: Engine, prompts: list[Prompt], tokens: int, tell: Callable[[str, int], None] | None = None
) -> _Spent:
    """Greedy answers of that length, on past every end."""
    began = time.perf_counter()
    found = list(engine.generate(prompts, Sampling(tokens, 0.0, 1.0, 0, ()), tell))
    if any(isinstance(item, Refused) for item in found):
        raise UserError("the engine refused a prompt that it was to be measured with", do="headstart doctor")
    return _Spent(began, time.perf_counter() - began)


def _samples(task: Task) -> list[Sample]:
    """Sequences as long as the run's, with its share of answer tokens: prompts, repeated to that length."""
    most = min(task.run.capture.batch_tokens, CAPTURED)
    produced = np.arange(task.length) >= task.length - task.answer
    made = []
    for i in range(max(most // task.length, 1)):
        ids = np.resize(task.prompts[i % len(task.prompts)], task.length).astype(np.int32)
        made.append(Sample(f"{i}", f"{i}", "measured", "train", ids, produced, "given"))
    return made


def _capture(engine: Engine, head: TargetHead, task: Task, samples: list[Sample], folder: Path) -> float:
    """Tokens/s from the engine's pass to a shard on the disk."""
    wanted = {sample.id: sample for sample in samples}
    path = folder / store.shard_name(0)

    def once() -> None:
        states = engine.capture(samples, task.shape.aux_layers, task.run.capture.batch_tokens)
        pairs = [(wanted[item.id], item) for item in states if not isinstance(item, Refused)]
        store.write_shard(path, store.label(pairs, head), {})

    seconds = _timed(once)
    header = store.read_header(path)
    assert header is not None
    store.write_index(folder / store.INDEX, header[0])
    return len(samples) * task.length / seconds


def _alone(engine: Engine, task: Task) -> tuple[float, float]:
    """Tokens/s of one answer alone, and a step over K+1 tokens in plain steps (assumed where steps cannot be had)."""
    open_session = getattr(engine, "session", None)
    if open_session is None:
        spent = _answer(engine, [Prompt("alone", tuple(task.prompts[0]))], 4 * NEW)
        return 4 * NEW / spent.seconds, Hardware.verify
    session, prompt = open_session(task.shape.aux_layers), task.prompts[0]
    session.extend(prompt)

    def steps(tokens: int) -> float:
        def several() -> None:
            for _ in range(ALONE):
                session.extend(prompt[:1] * tokens)
                session.rewind(len(prompt))

        return _timed(several) / ALONE

    plain = steps(1)
    return 1 / plain, steps(task.run.evaluate.draft_tokens + 1) / plain


# --- the draft ---


def _new(head: TargetHead, shape: DraftShape) -> Eagle3:
    """Which tokens its vocabulary holds makes no difference to its speed."""
    kept = torch.arange(shape.draft_vocab_size, device=head.lm_head.device)
    return new_draft(shape, head, kept, lm_head="target", seed=0).to(head.lm_head.device)


@torch.no_grad()
def _draft_step(head: TargetHead, shape: DraftShape) -> float:
    """Seconds of one token: fusion, layers, head."""
    draft, device = _new(head, shape), head.lm_head.device
    aux = torch.zeros(1, len(shape.aux_layers), shape.target_hidden_size, device=device)
    token = torch.zeros(1, dtype=torch.long, device=device)

    def several() -> None:
        cache = DraftCache()
        for _ in range(ALONE):
            draft.logits(draft.extend(token, draft.fuse(aux), cache))

    return _timed(several) / ALONE


def _train(head: TargetHead, task: Task, states: store.StateStore) -> float:
    """FLOP/s of training steps, as `training_cost` counts them."""
    run, draft, device = task.run, _new(head, task.shape), str(head.lm_head.device)
    use_fast_products(head.lm_head.device)  # as the train stage does: an engine in another process chose for its own
    frozen = {"lm_head.weight"} if run.train.freeze_lm_head else set()
    for name, parameter in draft.named_parameters():
        parameter.requires_grad_(name not in frozen)
    learning = {name: parameter for name, parameter in draft.named_parameters() if name not in frozen}
    optimizer = Optimizer(learning, run.train)
    rows = head.lm_head[draft.draft_to_target].float()
    entries = states.entries[: max(run.train.batch_tokens // task.length, 1)]

    def step() -> None:
        batch = assemble(states, entries, head, run.draft.ttt_steps, run.train.mask, device)
        loss, _ = forward(draft, batch, teacher_for(batch, head, rows, draft.draft_to_target), run.train)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(learning.values(), run.train.clip)
        optimizer.step(0.0)

    cost = training_cost(task.shape, run.draft.ttt_steps, task.length, freeze_head=run.train.freeze_lm_head)
    live = len(entries) * task.answer
    return cost.total(live, len(entries) * task.length - live) / _timed(step)


def _timed(work: Callable[[], None]) -> float:
    """Seconds of the fastest call after the first, which warms up (or of that, where it took long): others who use the machine
    only ever add to it."""
    first = _once(work)
    if first > SLOW:
        return first
    until, calls = time.perf_counter() + AGAIN, [_once(work)]
    while time.perf_counter() < until:
        calls.append(_once(work))
    return min(calls)


def _once(work: Callable[[], None]) -> float:
    began = time.perf_counter()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - began
