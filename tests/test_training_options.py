"""Training options and many processes: each must give what it promises, and nothing else."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from fixtures_models import save_llama
from fixtures_states import answered, make_store, open_tiny
from headstart.config import Train
from headstart.data import store as stores
from headstart.data.footprint import bytes_per_token
from headstart.data.store import StateStore
from headstart.drafts.attention import dense
from headstart.drafts.checkpoint import load_tensors
from headstart.drafts.rows import plan_rows, within
from headstart.drafts.shape import LatentShape
from headstart.drafts.ttt import unroll
from headstart.errors import Stopped
from headstart.training.batches import assemble
from headstart.training.distributed import share
from headstart.training.flops import step_flops
from headstart.training.loop import BEST, Trainer
from headstart.training.step import Objective, row_scales, teacher_for
from test_training import make_draft, make_trainer


@pytest.fixture(scope="module")
def states(tmp_path_factory: pytest.TempPathFactory) -> StateStore:
    engine = open_tiny(save_llama(tmp_path_factory.mktemp("target")))
    return make_store(engine, answered(engine, 25, 24), tmp_path_factory.mktemp("states"))


def curve(trainer: Trainer) -> list[float]:
    return [record["loss"][0] for record in trainer.run().curves if record["kind"] == "train"]


@pytest.mark.parametrize("weighting", ["token", "sequence"])
def test_micro_batches_give_the_whole_steps_curve(states: StateStore, tmp_path: Path, weighting: str) -> None:
    whole = curve(make_trainer(states, tmp_path / "a", max_steps=8, weighting=weighting))
    parts = curve(make_trainer(states, tmp_path / "b", max_steps=8, weighting=weighting, micro_tokens=40))
    assert parts == pytest.approx(whole, rel=1e-5)


def test_row_scales_are_the_written_means() -> None:
    """Two samples with 4 and 1 live rows at step 0, and 3 and 0 at step 1; decay 0.5."""
    live = [np.array([4, 3]), np.array([1, 0])]
    token = row_scales(live, Train(step_decay=0.5))
    np.testing.assert_allclose(token, [[1 / 5, 0.5 / 3], [1 / 5, 0.5 / 3]], rtol=1e-6)
    sequence = row_scales(live, Train(step_decay=0.5, weighting="sequence"))
    np.testing.assert_allclose(sequence[0], [1 / 2 / 4, 0.5 / 1 / 3], rtol=1e-6)
    np.testing.assert_allclose(sequence[1, 0], 1 / 2, rtol=1e-6)


def test_recomputed_activations_give_the_same_gradients(states: StateStore, tmp_path: Path) -> None:
    plain = curve(make_trainer(states, tmp_path / "a", max_steps=5))
    again = curve(make_trainer(states, tmp_path / "b", max_steps=5, recompute=True))
    assert again == plain


def test_the_average_is_that_of_the_weights_and_is_what_is_kept(states: StateStore, tmp_path: Path) -> None:
    """Against the definition, followed step by step beside the training; and over an interruption."""
    followed: dict[str, torch.Tensor] = {}
    trainer = make_trainer(states, tmp_path / "a", max_steps=6, ema=0.8, validate_every=6, checkpoint_every=3)
    after = trainer._after

    def follow(progress, record):
        for name, tensor in trainer.parameters.items():
            followed[name] = followed[name] * 0.8 + tensor.detach() * 0.2
        after(progress, record)

    prepare = trainer._prepare

    def start():
        prepare()
        followed.update({name: tensor.detach().clone() for name, tensor in trainer.parameters.items()})

    trainer._after, trainer._prepare = follow, start  # type: ignore[method-assign]
    trainer.validation = []  # so the last one is kept, whatever its acceptance length
    trainer.run()
    kept = load_tensors(tmp_path / "a" / BEST)
    for name, tensor in followed.items():
        torch.testing.assert_close(kept[name], tensor, rtol=1e-5, atol=1e-6)
    broken = make_trainer(states, tmp_path / "b", max_steps=6, ema=0.8, validate_every=6, checkpoint_every=3)
    original, broken.validation = broken._backward, []

    def stop(part, packed):
        if part.step == 4:
            raise KeyboardInterrupt
        return original(part, packed)

    broken._backward = stop  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        broken.run()
    again = make_trainer(states, tmp_path / "b", max_steps=6, ema=0.8, validate_every=6, checkpoint_every=3)
    again.validation = []
    again.run()
    assert (tmp_path / "b" / BEST).read_bytes() == (tmp_path / "a" / BEST).read_bytes()


def test_noise_depends_on_seed_step_and_sample_alone(states: StateStore, tmp_path: Path) -> None:
    clean = curve(make_trainer(states, tmp_path / "a", max_steps=4))
    noisy = curve(make_trainer(states, tmp_path / "b", max_steps=4, noise=0.2))
    parts = curve(make_trainer(states, tmp_path / "c", max_steps=4, noise=0.2, micro_tokens=40))
    assert noisy != pytest.approx(clean, rel=1e-4)
    assert parts == pytest.approx(noisy, rel=1e-5)


def test_bfloat16_products_keep_float32_weights_and_follow_the_float32_curve(
    states: StateStore, tmp_path: Path
) -> None:
    trainer = make_trainer(states, tmp_path / "b", max_steps=10, dtype="bfloat16")
    narrow = curve(trainer)
    wide = curve(make_trainer(states, tmp_path / "a", max_steps=10))
    assert {p.dtype for p in trainer.draft.parameters()} == {torch.float32}
    assert narrow == pytest.approx(wide, rel=0.02)
    assert narrow != wide


def test_float8_states_take_half_the_bytes_and_keep_rows_within_their_rounding(
    states: StateStore, tmp_path: Path
) -> None:
    """e4m3 has 3 mantissa bits: at most 1/16 relative error of a value, for values down to 2**-9 of 448 times the row's scale."""
    x = torch.randn(50, 3, 64) * torch.logspace(-3, 3, 50)[:, None, None]
    narrow, scale = stores.narrow(x, stores.FLOAT8)
    back = stores.widen(narrow, scale)
    floor = x.abs().amax(-1, keepdim=True) / 448 * 2**-9
    assert bool(((back - x).abs() <= x.abs() / 16 + floor).all())
    assert torch.equal(back[3] * 0 + 1, torch.ones_like(back[3]))
    wide = bytes_per_token(3, 576, 2)
    assert bytes_per_token(3, 576, 1) / wide <= 0.55


def test_float8_shards_train_like_float32_ones(tmp_path: Path) -> None:
    engine = open_tiny(save_llama(tmp_path / "target"))
    samples = answered(engine, 10, 16)
    wide = make_store(engine, samples, tmp_path / "wide")
    narrow = make_store(engine, samples, tmp_path / "narrow", dtype=stores.FLOAT8)
    size = {name: sum(p.stat().st_size for p in (tmp_path / name).glob("shard-*")) for name in ("wide", "narrow")}
    assert size["narrow"] < 0.45 * size["wide"]  # float32 there, and headers of tiny shards
    one = curve(make_trainer(wide, tmp_path / "a", max_steps=10))
    other = curve(make_trainer(narrow, tmp_path / "b", max_steps=10))
    assert other == pytest.approx(one, rel=0.05)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_kv_heads": 4, "latent": LatentShape(q_rank=20, kv_rank=24, nope=10, rope=6, value=12)},
        {"sliding_window": 5},
    ],
)
def test_counted_flops_are_those_that_torch_counts(states: StateStore, changes: dict) -> None:
    """Against torch's own counter, on one document, where the dense reference attends to a full square: its surplus is known."""
    draft = make_draft(states, num_layers=2, **changes)
    entry = states.of("train")[0]
    batch = assemble(states, [entry], states.head(), 3, "exact", "cpu")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        unroll(draft, batch.aux, batch.tokens, batch.plan, dense)
    shape, plan = draft.shape, batch.plan
    window = shape.sliding_window or 10**6
    forward = seen = 0.0
    for index, step in enumerate(plan.steps):
        for layer in range(2):
            whole = index == 0 and layer == 0
            runs, rows = (plan.whole, len(plan.context)) if whole else (step.runs, len(step.rows))
            cut = within(runs, window - index)
            forward += sum(4 * 4 * 16 * (run.high - run.low) * (run.high - run.start + index) for run in cut)
            if index == 1:  # one value alone: torch multiplies elementwise, and does not count it
                forward -= 2 * 4 * 16 * len(step.rows)
            pairs = sum(min(row + 1 - run.start, window - index) for run in runs for row in range(run.low, run.high))
            seen += 2 * 4 * (16 + shape.value_dim) * (pairs + rows * index)
    counted = sum(counter.get_flop_counts()["Global"].values())
    matrices = counted - forward
    ours = step_flops(shape, plan, frozen_head=False)
    heads = 3 * 2 * 64 * 512 * sum(len(step.rows) for step in plan.steps) + 2 * 64 * 512 * len(plan.teacher)
    fc = 2 * 3 * 64 * 64 * len(plan.context)
    assert ours - heads - 3 * seen == pytest.approx(3 * matrices - fc, rel=1e-6)


def test_shares_are_whole_and_even() -> None:
    lengths = [100, 3, 50, 50, 7, 90]
    dealt = share(lengths, 2)
    assert sorted(dealt[0] + dealt[1]) == list(range(6))
    loads = [sum(lengths[i] for i in part) for part in dealt]
    assert max(loads) - min(loads) <= 10
    assert share([5], 3) == [[0], [], []]


def test_a_row_plan_names_the_document_of_each_row() -> None:
    plan = plan_rows([np.array([False, True, True, True]), np.array([False] * 3), np.array([True, True, True])], 1)
    assert plan.document.tolist() == [
        0,
        0,
        2,
    ]  # rows 0 and 1 of the first, row 0 of the last: nothing after the last live row


def test_sigterm_saves_and_the_next_run_ends_in_the_same_bits(states: StateStore, tmp_path: Path) -> None:
    whole = make_trainer(states, tmp_path / "a", max_steps=8)
    whole.run()
    stopped = make_trainer(states, tmp_path / "b", max_steps=8)
    backward = stopped._backward

    def kill(part, packed):
        if part.step == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return backward(part, packed)

    stopped._backward = kill  # type: ignore[method-assign]
    with pytest.raises(Stopped):
        stopped.run()
    again = make_trainer(states, tmp_path / "b", max_steps=8)
    again.run()
    for name, tensor in whole.draft.state_dict().items():
        assert torch.equal(tensor, again.draft.state_dict()[name]), name


CHILD = """
import faulthandler, sys, json
faulthandler.dump_traceback_later(200, exit=True)  # so that one which hangs says where, and ends
from pathlib import Path
from types import SimpleNamespace
from typing import Any
sys.path.insert(0, {tests!r})
import torch
from test_training import make_trainer
from headstart.data.store import StateStore
from headstart.processes import ended_at_once
from headstart.training.distributed import world
from headstart.training.loop import Trainer
settings = json.loads({settings!r})
with ended_at_once(), world("cpu") as joined:
    trainer = make_trainer(StateStore(Path({states!r}), {{}}), Path({folder!r}), **settings)
    trainer.world = joined
    trainer.__post_init__()
    progress = trainer.run()
    if joined.main:
        Path({folder!r}, "curves.json").write_text(json.dumps(progress.curves))
"""


def run_processes(count: int, states: StateStore, folder: Path, **settings: object) -> list[dict]:
    folder.mkdir(parents=True, exist_ok=True)
    code = folder / "child.py"
    texts = {"tests": str(Path(__file__).parent), "states": str(states.folder), "folder": str(folder)}
    code.write_text(CHILD.format(settings=json.dumps(settings), **texts))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count), str(code)]
    done = subprocess.run(
        command, capture_output=True, check=False, timeout=300, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr.decode()[-3000:]
    return json.loads((folder / "curves.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_processes_follow_the_curve_of_one(states: StateStore, tmp_path: Path, parallel: str) -> None:
    """Batches of 60 tokens hold few samples: some steps leave a process with nothing, and must not hang."""
    settings = {"max_steps": 8, "batch_tokens": 60, "validate_every": 4, "micro_tokens": 40}
    one = make_trainer(states, tmp_path / "one", **settings).run().curves
    two = run_processes(2, states, tmp_path / "two", parallel=parallel, **settings)
    for alone, shared in zip(one, two, strict=True):
        assert shared["loss"] == pytest.approx(alone["loss"], rel=1e-5)
        assert shared["tau"] == pytest.approx(alone["tau"], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_a_training_continues_on_another_number_of_processes(states: StateStore, tmp_path: Path, parallel: str) -> None:
    """Four steps on two processes, the rest on one; against one process throughout."""
    settings = {"max_steps": 8, "checkpoint_every": 4, "ema": 0.5}
    one = make_trainer(states, tmp_path / "one", **settings).run().curves
    folder = tmp_path / "two"
    run_processes(2, states, folder, parallel=parallel, **(settings | {"epochs": 40, "max_steps": 8}))
    checkpoints = sorted((folder / "checkpoints").glob("step-*"))
    assert [path.name for path in checkpoints] == ["step-000004", "step-000008"]
    import shutil

    shutil.rmtree(checkpoints[-1])
    rest = make_trainer(states, folder, **settings).run().curves
    assert [record["step"] for record in rest] == [record["step"] for record in one]
    for alone, shared in zip(one, rest, strict=True):
        assert shared["loss"] == pytest.approx(alone["loss"], rel=1e-5)


@pytest.mark.parametrize("library", ["wandb", "trackio"])
def test_a_continued_training_is_the_same_run_of_a_tracker(
    states: StateStore, tmp_path: Path, library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stand-ins for the libraries, whose servers cannot be here; the real ones take the same calls (wandb 0.31, trackio 0.43)."""
    begun, logged = [], []
    stand_in = SimpleNamespace(
        init=lambda **given: begun.append(given), log=lambda values, step: logged.append(step), finish=lambda: None
    )
    monkeypatch.setitem(sys.modules, library, stand_in)

    def train(folder: str, steps: int) -> None:
        trainer = make_trainer(states, tmp_path / folder, trackers=(library,), max_steps=steps, checkpoint_every=2)
        trainer.logs = tmp_path
        trainer.run()

    train("first", 2)
    train("first", 4)
    train("other", 2)
    names = [given["name"] for given in begun]
    assert names[0] == names[1] != names[2]
    assert sorted(set(logged)) == [1, 2, 3, 4]
    assert all(given["project"] == "headstart" for given in begun)
    if library == "wandb":
        assert all(given["name"].endswith(given["id"]) and given["dir"] == str(tmp_path) for given in begun)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # inside torch, when it traces
@pytest.mark.parametrize("loss", ["kl", {"lk": 0.9, "ce": 0.1}])
def test_compiled_parts_give_the_same_loss_and_gradients(states: StateStore, loss: Any) -> None:
    """The compile option's own code path, with the backend that traces but generates nothing."""
    draft, head = make_draft(states), states.head()
    batch = assemble(states, states.of("train")[:3], head, 3, "exact", "cpu")
    teacher = teacher_for(batch, head, head.lm_head, draft.draft_to_target)
    settings = Train(loss=loss)
    plain, _ = Objective(draft, settings)(batch, teacher, None)
    wanted = torch.autograd.grad(plain, draft.fc.weight)[0]
    objective = Objective(draft, settings)
    objective.compile_parts(backend="aot_eager")
    compiled, _ = objective(batch, teacher, None)
    found = torch.autograd.grad(compiled, draft.fc.weight)[0]
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(compiled, plain, rtol=1e-6, atol=1e-6)
