"""Training: it learns what it must, resumes to the same bits, keeps the best, and leaves frozen things frozen."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from fixtures_models import save_llama, save_tied
from fixtures_states import AUX, answered, make_store, open_tiny
from headstart.config import Train
from headstart.data.store import StateStore
from headstart.drafts.eagle3 import Eagle3
from headstart.drafts.losses import Teacher
from headstart.drafts.shape import DraftShape
from headstart.engines.transformers import TransformersEngine
from headstart.evaluation.choice import Greedy
from headstart.evaluation.decode import Limits, plain_decode, speculative_decode
from headstart.evaluation.offline import accept_matrices
from headstart.events import Events
from headstart.training import checkpoint
from headstart.training.batches import assemble, epoch_order
from headstart.training.build import new_draft
from headstart.training.loop import BEST, Trainer
from headstart.training.optim import schedule as rate_at
from headstart.training.step import forward
from headstart.types import Sample


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> TransformersEngine:
    return open_tiny(save_llama(tmp_path_factory.mktemp("target")))


@pytest.fixture(scope="module")
def states(engine: TransformersEngine, tmp_path_factory: pytest.TempPathFactory) -> StateStore:
    return make_store(engine, answered(engine, 25, 24), tmp_path_factory.mktemp("states"))


def make_draft(states: StateStore, vocabulary: int = 512, **changes: object) -> Eagle3:
    head = states.head()
    sizes = {
        "hidden_size": 64, "target_hidden_size": 64, "aux_layers": AUX, "num_layers": 1, "num_heads": 4, "num_kv_heads": 2,
        "head_dim": 16, "intermediate_size": 128, "target_vocab_size": head.vocab_size, "draft_vocab_size": vocabulary,
        "rms_norm_eps": 1e-5, "rope_theta": 1e4, "max_positions": 512, "norm_before_residual": False, "fc_norm": False,
        "norm_output": False,
    }  # fmt: skip
    return new_draft(DraftShape(**(sizes | changes)), head, torch.arange(vocabulary), lm_head="target", seed=0)  # type: ignore[arg-type]


def make_trainer(
    states: StateStore, folder: Path, draft: Eagle3 | None = None, steps: int = 3, **settings: object
) -> Trainer:
    defaults = {
        "epochs": 40,
        "batch_tokens": 160,
        "validate_every": 10,
        "checkpoint_every": 10,
        "learning_rate": 2e-3,
        "optimizer": "adamw",
    }
    train = Train(**(defaults | settings))  # type: ignore[arg-type]
    folder.mkdir(parents=True, exist_ok=True)
    return Trainer(draft or make_draft(states), states.head(), states, train, steps, folder, Events(quiet=True))


def interrupt(trainer: Trainer, at: int) -> Trainer:
    """The same trainer, ended by the user in the middle of step `at`."""
    backward = trainer._backward

    def backward_or_stop(part, packed):
        if part.step == at:
            raise KeyboardInterrupt
        return backward(part, packed)

    trainer._backward = backward_or_stop  # type: ignore[method-assign]
    return trainer


def clearest(engine: TransformersEngine, sample: Sample) -> float:
    """The smallest lead of the target's choice over its second: a near tie cannot be learnt to the last row in few steps."""
    top = engine.log_probs(sample.input_ids.tolist()).topk(2).values
    return float((top[:, 0] - top[:, 1])[sample.supervised.argmax() - 1 : -1].min())


def test_overfit_one_chat_accepts_everything_in_the_decoder(engine: TransformersEngine, tmp_path: Path) -> None:
    """Case C34: accuracy about 1 at every depth in training means K + 1 tokens per step when decoding."""
    sample = max(answered(engine, 100, 26), key=lambda s: clearest(engine, s))
    states = make_store(engine, [sample], tmp_path / "states")
    trainer = make_trainer(states, tmp_path / "train", steps=4, epochs=300, learning_rate=3e-3, validate_every=300)
    progress = trainer.run()
    final = [record for record in progress.curves if record["kind"] == "train"][-1]
    assert min(final["accuracy"]) > 0.99
    prompt = sample.input_ids[~sample.supervised].tolist()
    limits, session, draft = Limits(26, frozenset()), engine.session(AUX), trainer.draft.eval().requires_grad_(False)
    decoded = speculative_decode(session, draft, prompt, Greedy(), limits, draft_tokens=4)
    plain = plain_decode(engine.session(AUX), prompt, Greedy(), limits)
    assert decoded.ids == plain.ids == tuple(sample.input_ids[sample.supervised].tolist())
    assert [a for a, d in zip(decoded.log.accepted, decoded.log.drafted, strict=True) if d == 4 and a < 4] == []
    assert len(decoded.log.accepted) == math.ceil(25 / 5)  # 25 tokens after the prefill's own, K + 1 = 5 a step


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_resumed_training_equals_unbroken_training_bit_for_bit(
    states: StateStore, tmp_path: Path, optimizer: str
) -> None:
    """Case C39: 20 steps straight; 13, a new process's worth of fresh objects, 10 more from the checkpoint at 10."""
    whole = make_trainer(states, tmp_path / "whole", max_steps=20, optimizer=optimizer)
    curves = whole.run().curves
    with pytest.raises(KeyboardInterrupt):
        interrupt(
            make_trainer(states, tmp_path / "broken", max_steps=20, checkpoint_every=5, optimizer=optimizer), at=13
        ).run()
    again = make_trainer(states, tmp_path / "broken", max_steps=20, checkpoint_every=5, optimizer=optimizer)
    assert again.run().curves == curves
    for name, tensor in whole.draft.state_dict().items():
        assert torch.equal(tensor, again.draft.state_dict()[name]), name
    assert (tmp_path / "whole" / BEST).read_bytes() == (tmp_path / "broken" / BEST).read_bytes()


CHILD = """
import sys, os, signal
from pathlib import Path
sys.path.insert(0, {tests!r})
from test_training import make_trainer
from headstart.data.store import StateStore
import headstart.drafts.checkpoint as weights, torch
count = 0
def dying(original):
    def call(*args, **kwargs):
        global count
        count += 1
        if count == {at}:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **kwargs)
    return call
torch.save = dying(torch.save)
Path.rename = dying(Path.rename)
Path.replace = dying(Path.replace)
make_trainer(StateStore(Path({states!r}), {{}}), Path({folder!r}), max_steps=8, checkpoint_every=2, validate_every=4).run()
print("finished", count)
"""


@pytest.mark.slow
def test_a_kill_anywhere_in_a_save_leaves_a_valid_older_checkpoint(states: StateStore, tmp_path: Path) -> None:
    """Kill -9 before each rename or write of a save in turn; the rerun ends in the same bits."""
    whole = make_trainer(states, tmp_path / "whole", max_steps=8, checkpoint_every=2, validate_every=4)
    whole.run()
    for at in (1, 2, 3, 5, 8, 13):
        folder = tmp_path / f"killed{at}"
        code = CHILD.format(tests=str(Path(__file__).parent), at=at, states=str(states.folder), folder=str(folder))
        dead = subprocess.run([sys.executable, "-c", code], capture_output=True, env=os.environ, check=False)
        assert dead.returncode == -9, dead.stderr.decode()[-500:]
        again = make_trainer(states, folder, max_steps=8, checkpoint_every=2, validate_every=4)
        again.run()
        assert all(torch.equal(t, again.draft.state_dict()[n]) for n, t in whole.draft.state_dict().items()), at
        assert (folder / BEST).read_bytes() == (tmp_path / "whole" / BEST).read_bytes(), at


@pytest.mark.slow
def test_best_is_the_acceptance_peak_not_the_last_step(states: StateStore, tmp_path: Path) -> None:
    """Case C42: on 20 tiny answers the held-out tau peaks before the training loss stops falling."""
    trainer = make_trainer(states, tmp_path, epochs=60, learning_rate=5e-3, validate_every=5)
    progress = trainer.run()
    validations = {record["step"]: record["tau"] for record in progress.curves if record["kind"] == "validation"}
    losses = [record["loss"][0] for record in progress.curves if record["kind"] == "train"]
    assert progress.best_tau == max(validations.values()) == validations[progress.best_step]
    assert progress.best_step < max(validations)
    assert np.mean(losses[-5:]) < np.mean(losses[progress.best_step : progress.best_step + 5])


def test_held_out_tau_equals_the_definition_over_all_starts(states: StateStore, tmp_path: Path) -> None:
    """The trainer's estimate against the metric computed from explicit accept matrices."""
    trainer = make_trainer(states, tmp_path, max_steps=30, steps=3)
    progress = trainer.run()
    last = [record for record in progress.curves if record["kind"] == "validation"][-1]
    accept, live = (
        np.concatenate(parts) for parts in zip(*accept_matrices(trainer.draft, states, states.head(), 3), strict=True)
    )
    for step in range(3):
        joint = (np.logical_and.accumulate(accept & live, axis=1)[:, step]).sum() / live[:, step].sum()
        assert last["joint"][step] == pytest.approx(joint, abs=1e-6)
    assert last["tau"] == pytest.approx(1 + sum(last["joint"]), abs=1e-5)


def test_frozen_stays_frozen_and_a_tied_target_is_not_touched(tmp_path: Path) -> None:
    """Case C38: the embedding never changes, the draft head is its own and has the draft vocabulary's rows."""
    engine = open_tiny(save_tied(tmp_path / "target"))
    states = make_store(engine, answered(engine, 10, 16), tmp_path / "states")
    before = states.head().embed.clone()
    draft = make_draft(states, vocabulary=128)
    head = draft.lm_head.weight.clone()
    make_trainer(states, tmp_path / "a", draft, max_steps=3).run()
    assert torch.equal(draft.embed_tokens, before)
    assert draft.lm_head.weight.shape == (128, 64)
    assert not torch.equal(draft.lm_head.weight, head)
    frozen = make_draft(states, vocabulary=128)
    make_trainer(states, tmp_path / "b", frozen, max_steps=3, freeze_lm_head=True).run()
    assert torch.equal(frozen.lm_head.weight, head)


def test_loss_is_the_weighted_mean_over_live_rows(states: StateStore) -> None:
    """One batch against the formula written out with full logits and torch's own kl_div."""
    draft, head = make_draft(states), states.head()
    batch = assemble(states, states.of("train")[:6], head, 3, "exact", "cpu")
    teacher = Teacher(batch.teacher, head.lm_head.float(), batch.log_normalizer)
    total, stats = forward(draft, batch, teacher, Train(step_decay=0.7), alpha=True)
    from headstart.drafts.ttt import unroll

    expected = torch.zeros(())
    for i, (step, out) in enumerate(
        zip(batch.plan.steps, unroll(draft, batch.aux, batch.tokens, batch.plan), strict=True)
    ):
        p = (batch.teacher[step.labels] @ head.lm_head.T).softmax(-1)
        rows = torch.nn.functional.kl_div(draft.logits(out).log_softmax(-1), p, reduction="none").sum(-1)
        expected = expected + 0.7**i * rows[step.live].mean()
        assert stats.rows[i] == step.live.sum()
    torch.testing.assert_close(total, expected, rtol=1e-5, atol=1e-5)


def test_padding_free_packing_does_not_change_a_documents_numbers(states: StateStore) -> None:
    """The loss of a pack is the row-weighted mean of its documents' losses, each computed alone."""
    draft, head, entries = make_draft(states), states.head(), states.of("train")[:5]
    teacher_of = lambda batch: Teacher(batch.teacher, head.lm_head.float(), batch.log_normalizer)  # noqa: E731
    batch = assemble(states, entries, head, 3, "exact", "cpu")
    _, packed = forward(draft, batch, teacher_of(batch), Train())
    alone = [
        forward(draft, b, teacher_of(b), Train())[1]
        for e in entries
        for b in [assemble(states, [e], head, 3, "exact", "cpu")]
    ]
    torch.testing.assert_close(packed.loss, sum(s.loss for s in alone), rtol=1e-6, atol=1e-6)


def test_every_sample_once_an_epoch_and_the_order_is_a_function_of_seed_and_epoch(states: StateStore) -> None:
    entries = states.of("train")
    first = epoch_order(entries, 100, seed=1, epoch=0)
    assert sorted(i for batch in first for i in batch) == list(range(len(entries)))
    assert first == epoch_order(entries, 100, seed=1, epoch=0)
    assert first != epoch_order(entries, 100, seed=1, epoch=1)
    assert all(sum(entries[i].length for i in batch) <= 100 for batch in first)


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
def test_learning_rate_rises_then_falls_to_its_floor(schedule: str) -> None:
    settings = Train(schedule=schedule, warmup_fraction=0.1, min_lr_fraction=0.1, learning_rate=1.0)  # type: ignore[arg-type]
    rates = [rate_at(step, 100, settings) for step in range(100)]
    assert rates[:10] == pytest.approx([(i + 1) / 10 for i in range(10)])
    assert rates[10] == 1.0
    assert all(a >= b for a, b in pairwise(rates[10:]))
    assert rates[-1] == pytest.approx(1.0 if schedule == "constant" else 0.1, abs=0.02)


GOLDEN = Path(__file__).parent / "golden_loss.txt"


def test_twenty_steps_follow_the_golden_curve(states: StateStore, tmp_path: Path) -> None:
    """A curve that was looked at once: whoever changes the mathematics must mean to. Regenerate with GOLDEN=write."""
    trainer = make_trainer(states, tmp_path, max_steps=20, learning_rate=1e-3)
    losses = [record["loss"][0] for record in trainer.run().curves if record["kind"] == "train"]
    if os.environ.get("GOLDEN") == "write":
        GOLDEN.write_text("\n".join(f"{loss:.4f}" for loss in losses) + "\n")
    assert losses == pytest.approx([float(line) for line in GOLDEN.read_text().split()], rel=2e-3)


def test_checkpoints_are_kept_by_policy(states: StateStore, tmp_path: Path) -> None:
    make_trainer(states, tmp_path, max_steps=12, checkpoint_every=2, keep_checkpoints=2).run()
    assert [path.name for path in checkpoint.steps(tmp_path / "checkpoints")] == ["step-000010", "step-000012"]


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["optimizer.pt", "draft.safetensors", "state.json"])
@pytest.mark.parametrize("damage", ["cut", "empty", "gone"])
def test_a_damaged_newest_checkpoint_falls_back_to_the_one_before(
    states: StateStore, tmp_path: Path, victim: str, damage: str
) -> None:
    whole = make_trainer(states, tmp_path / "whole", max_steps=8, checkpoint_every=2)
    whole.run()
    with pytest.raises(KeyboardInterrupt):
        interrupt(make_trainer(states, tmp_path / "b", max_steps=8, checkpoint_every=2), at=7).run()
    newest = checkpoint.steps(tmp_path / "b" / "checkpoints")[-1]
    assert newest.name == "step-000006"
    data = (newest / victim).read_bytes()
    (newest / victim).unlink()
    if damage != "gone":
        (newest / victim).write_bytes(data[: len(data) // 2] if damage == "cut" else b"")
    again = make_trainer(states, tmp_path / "b", max_steps=8, checkpoint_every=2)
    again.run()
    assert all(torch.equal(t, again.draft.state_dict()[n]) for n, t in whole.draft.state_dict().items())
