"""`headstart train` as torchrun starts it, and how one of several processes ends."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fixtures_models import save_llama
from fixtures_text import T_PLAIN, save_tokenizer
from headstart import config, events, pipeline
from headstart.events import Events

TOML = """
directory = "run"
[target]
model = "target"
device = "cpu"
[data]
sources = ["chats.jsonl"]
answers = "keep"
max_length = 64
validation_fraction = 0.2
decontaminate = []
[vocab]
size = 128
[capture]
aux_layers = [0, 1, 2]
[draft]
ttt_steps = 2
[train]
epochs = 2
batch_tokens = 256
"""
TWO = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


@pytest.fixture(scope="module")
def captured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with run.toml, and all that is there before training."""
    folder = tmp_path_factory.mktemp("captured")
    save_llama(folder / "target", vocab_size=400, num_hidden_layers=2)
    save_tokenizer(folder / "target", T_PLAIN, end_ids=[398])
    asked = ({"role": "user", "content": f"How many birds were there on day {day}?"} for day in range(30))
    rows = ({"messages": [question, {"role": "assistant", "content": "Two, as before."}]} for question in asked)
    (folder / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "run.toml").write_text(TOML)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        run = config.load(Path("run.toml"))
        pipeline.execute_all(run, Path(run.directory), Events(quiet=True), until="capture")
    return folder


def command(folder: Path, run: str, settings: dict[str, str], *before: str) -> subprocess.Popen[str]:
    """`headstart train` into the run directory `run`."""
    if not (folder / run).exists():
        shutil.copytree(folder / "run", folder / run)
    options = [part for name, value in settings.items() for part in ("-s", f"{name}={value}")]
    words = [*(before or [sys.executable]), "-m", "headstart", "train", "run.toml", "-s", f"directory={run}", *options]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(words, cwd=folder, stderr=subprocess.PIPE, text=True, env=environment)


def train(folder: Path, run: str, settings: dict[str, str], *before: str) -> str:
    """The same to its end; what it told."""
    with command(folder, run, settings, *before) as process:
        _, told = process.communicate(timeout=300)
    assert process.returncode == 0, told[-3000:]
    assert "Warning" not in told
    return told


def curves(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "draft" / "curves.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "parallel", "tolerance"),
    [("adamw", "ddp", 1e-5), ("muon", "fsdp", 1e-3)],  # Muon orthogonalises in bfloat16: the order of a sum soon shows
)
def test_the_command_under_torchrun_makes_the_draft_of_one_process(
    captured: Path, optimizer: str, parallel: str, tolerance: float
) -> None:
    settings = {"train.optimizer": optimizer, "train.parallel": parallel}
    alone, shared = f"{optimizer}-alone", f"{optimizer}-shared"
    train(captured, alone, settings)
    told = train(captured, shared, settings, *TWO)
    assert told.count("train: done") == 1  # one process talks
    assert len(curves(captured / alone)) == len(curves(captured / shared)) > 4
    for one, two in zip(curves(captured / alone), curves(captured / shared), strict=True):
        assert two["loss"] == pytest.approx(one["loss"], rel=tolerance)
    assert "train: fresh, skipped" in train(captured, shared, settings, *TWO)


@pytest.mark.slow
def test_sigterm_of_torchrun_saves_and_one_process_goes_on(captured: Path) -> None:
    settings = {"train.epochs": "60"}
    log = captured / "term" / "events.jsonl"

    def steps() -> list[int]:
        return [event["step"] for event in events.read(log) if event["event"] == "train-step"]

    with command(captured, "term", settings, *TWO) as process:
        while not steps():
            assert process.poll() is None
            time.sleep(0.05)
        process.terminate()
        _, told = process.communicate(timeout=300)
    assert "error: SIGTERM at step" in told
    before = steps()
    train(captured, "term", settings)
    assert steps()[len(before)] == before[-1] + 1  # nothing was lost
    assert steps() == list(range(1, 1 + len(steps())))


@pytest.mark.slow
def test_a_killed_process_ends_the_others_with_a_line_and_loses_no_checkpoint(captured: Path) -> None:
    settings = {"train.epochs": "60", "train.checkpoint_every": "1"}
    kept = captured / "kill" / ".draft.partial" / "scratch" / "checkpoints"
    with command(captured, "kill", settings, *TWO) as process:
        while not list(kept.glob("step-*")):
            assert process.poll() is None
            time.sleep(0.05)
        workers = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(workers[1]), signal.SIGKILL)
        _, told = process.communicate(timeout=300)
    assert "error: another process of torchrun ended, and process 0 with it" in told
    train(captured, "kill", settings)
    steps = [
        event["step"] for event in events.read(captured / "kill" / "events.jsonl") if event["event"] == "train-step"
    ]
    assert sorted(set(steps)) == list(range(1, max(steps) + 1))
    assert len(steps) <= max(steps) + 1  # at most one was made twice


ENDING = """
import atexit, sys
from headstart.processes import ended_at_once
atexit.register(print, "Python has ended")
with ended_at_once():
    print("worked")
    {end}
"""


@pytest.mark.parametrize("size", ["1", "2"])
@pytest.mark.parametrize(
    ("end", "code", "told"),
    [
        ("pass", 0, ""),
        ("sys.exit()", 0, ""),
        ("sys.exit(3)", 3, ""),
        ("sys.exit('not that way')", 1, "not that way"),
        ("1 / 0", 1, "ZeroDivisionError: division by zero"),
        ("raise KeyboardInterrupt", None, "KeyboardInterrupt"),
    ],
)
def test_one_of_several_ends_as_alone_but_without_python_s_own_end(size: str, end: str, code: int, told: str) -> None:
    """What aborts or waits for ever happens in that end, where a thread of gloo may want the interpreter."""
    command = [sys.executable, "-c", ENDING.format(end=end)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=60, env=os.environ | {"WORLD_SIZE": size}
    )
    assert done.returncode == code if code is not None else done.returncode != 0
    assert done.stdout.splitlines() == ["worked"] + ["Python has ended"] * (size == "1")
    assert told in done.stderr
