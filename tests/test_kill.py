"""A real run on a tiny target, killed in every stage: the same command finishes it, with the same results."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import killing_runs
from fixtures_models import save_llama
from fixtures_text import END, make_tokenizer, save_tokenizer
from headstart import artifact, config, demonstration, events, files, pipeline
from headstart.errors import StageFailed
from headstart.events import Events
from headstart.pipeline import STAGES

pytestmark = pytest.mark.slow

VERBS = [stage.verb for stage in STAGES]
DETERMINISTIC = [stage.folder for stage in STAGES if stage.verb != "evaluate"]  # scores hold measured times
WORDS = ("harbour", "quiet", "morning", "boat", "tide", "woman", "wheel", "man", "pier", "water", "wind", "bird")
RUN = """
[target]
model = "{folder}/model"
device = "cpu"
[data]
sources = ["{folder}/conversations.jsonl"]
max_length = 80
validation_fraction = 0.2
decontaminate = []
[regenerate]
max_new_tokens = 12
batch_size = 8
[vocab]
size = 300
[capture]
shard_tokens = 256
batch_tokens = 256
[draft]
ttt_steps = 2
[train]
epochs = 4
batch_tokens = 256
learning_rate = 3e-3
validate_every = 4
checkpoint_every = 3
[evaluate]
prompts = ["{folder}/prompts.jsonl"]
max_new_tokens = 10
draft_tokens = 2
"""


class Runs:
    """`headstart run` on the tiny target, in children of one process that has done the imports."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file = folder / "run.toml"
        self.environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent), "PYTHONWARNINGS": "ignore"}
        self.process = subprocess.Popen(
            [sys.executable, killing_runs.__file__], stdin=-1, stdout=-1, text=True, env=self.environment
        )

    def attempt(self, root: Path, *options: str, **kill: Any) -> dict[str, Any]:
        root.mkdir(parents=True, exist_ok=True)
        arguments = ["run", str(self.file), "-q", "-s", f"directory={root}", *options]
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps({"arguments": arguments, "root": str(root), **kill}) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def finish(self, root: Path, *options: str) -> int:
        """The same command, left alone; returns how many kill points it meets."""
        end = self.attempt(root, *options)
        assert end["code"] == 0, (root / killing_runs.LOG).read_text()
        return end["points"]

    def until(self, verb: str, source: Path, root: Path) -> Path:
        """A copy of a finished run directory as it was before stage `verb`."""
        root.mkdir(parents=True)
        for stage in STAGES[: VERBS.index(verb)]:
            shutil.copytree(source / stage.folder, root / stage.folder)
        return root


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    folder = tmp_path_factory.mktemp("runs")
    tokenizer = make_tokenizer()
    save_llama(folder / "model", initializer_range=0.05)  # small weights: answers that a tiny draft can learn
    save_tokenizer(folder / "model", end_ids=[tokenizer.convert_tokens_to_ids(END), tokenizer.eos_token_id])
    _write_conversations(folder)
    (folder / "run.toml").write_text(RUN.format(folder=folder))
    made = Runs(folder)
    yield made
    made.process.stdin.close()  # type: ignore[union-attr]
    made.process.stdout.close()  # type: ignore[union-attr]
    made.process.wait(20)


def _write_conversations(folder: Path) -> None:
    chance = random.Random(0)

    def text(words: int) -> str:
        return " ".join(chance.choices(WORDS, k=words))

    rows = [{"messages": [{"role": "user", "content": text(chance.randint(3, 9))}]} for _ in range(40)]
    for row in rows:
        row["messages"].append({"role": "assistant", "content": text(4)})
    (folder / "conversations.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": text(6)}) + "\n" for _ in range(3)))


@pytest.fixture(scope="module")
def unbroken(runs: Runs) -> Path:
    root = runs.folder / "unbroken"
    runs.finish(root)
    return root


def happened(root: Path, kind: str) -> list[dict[str, Any]]:
    return [event for event in events.read(root / "events.jsonl") if event["event"] == kind]


def scores(root: Path) -> list[tuple[Any, ...]]:
    rows = files.read_json(root / "scores" / "scores.json")["rows"]
    return [(row["set"], row["draft"], row["tau"], row["tokens"], row["lossless"]) for row in rows]


def assert_equal(root: Path, unbroken: Path, until: str) -> None:
    for stage in STAGES[: VERBS.index(until) + 1]:
        made = artifact.open_artifact(root / stage.folder, stage.folder)
        artifact.verify(made)
        if stage.folder in DETERMINISTIC:
            whole = artifact.open_artifact(unbroken / stage.folder, stage.folder)
            assert made.manifest.files == whole.manifest.files
            assert made.manifest.id == whole.manifest.id
            assert made.counts == whole.counts
    if until in ("evaluate", "export"):
        assert scores(root) == scores(unbroken)
    assert not [path for path in root.iterdir() if path.name.endswith((".partial", ".old"))]


def test_training_of_the_tiny_run_is_worth_breaking(unbroken: Path) -> None:
    """Otherwise equal drafts would say little: the draft must have changed, after the last checkpoint but one."""
    counts = artifact.open_artifact(unbroken / "draft", "draft").counts
    assert counts["steps"] > 12
    assert counts["best_step"] > 3
    assert counts["best_tau"] > 1.5
    assert len(list((unbroken / "states").glob("shard-*"))) > 3


@pytest.mark.parametrize("verb", VERBS)
def test_killed_at_any_write_of_a_stage(runs: Runs, unbroken: Path, tmp_path: Path, verb: str) -> None:
    limit = ("--until", verb)
    start = runs.until(verb, unbroken, tmp_path / "start")
    points = runs.finish(shutil.copytree(start, tmp_path / "counted"), *limit)
    assert_equal(tmp_path / "counted", unbroken, verb)
    chance = random.Random(verb)
    for number, point in enumerate({points - 8, *chance.sample(range(12, points - 8), 3)}):
        root = shutil.copytree(start, tmp_path / str(number))
        assert runs.attempt(root, *limit, point=point)["code"] is None
        run = config.load(runs.file)
        assert pipeline.status(run, root)[VERBS.index(verb)].state in ("missing", "partial", "fresh")
        runs.finish(root, *limit)
        assert_equal(root, unbroken, verb)


@pytest.mark.parametrize("verb", VERBS)
def test_killed_again_and_again_at_some_moment_of_a_stage(
    runs: Runs, unbroken: Path, tmp_path: Path, verb: str
) -> None:
    """Each attempt dies a little later than the one before, so the last ones continue what others continued."""
    stage = pipeline.BY_VERB[verb]
    root = runs.until(verb, unbroken, tmp_path / "run")
    seconds = artifact.open_artifact(unbroken / stage.folder, stage.folder).manifest.seconds
    ends = [
        runs.attempt(root, "--until", verb, stage=verb, delay=share * max(seconds, 0.05))["code"]
        for share in (0.0, 0.3, 0.6, 0.9, 0.9)
    ]
    assert None in ends or seconds < 0.1  # a very short stage may be over before it is seen to begin
    assert set(ends) <= {None, 0}
    runs.finish(root)
    assert_equal(root, unbroken, "export")


def test_the_command_itself_killed_while_it_trains(runs: Runs, unbroken: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "headstart", "run", str(runs.file), "-q", "-s", f"directory={tmp_path}"]
    with subprocess.Popen(command, env=runs.environment) as process:
        while len(happened(tmp_path, "train-step")) < 8:
            time.sleep(0.005)
            assert process.poll() is None
        process.kill()
    assert process.returncode == -9
    run = config.load(runs.file)
    assert [one.state for one in pipeline.status(run, tmp_path)[:5]] == ["fresh"] * 4 + ["partial"]
    subprocess.run(command, check=True, env=runs.environment, timeout=120)
    assert_equal(tmp_path, unbroken, "export")
    assert [event["stage"] for event in happened(tmp_path, "stage-start")] == [*VERBS[:5], *VERBS[4:]]
    steps = [event["step"] for event in happened(tmp_path, "train-step")]
    again = next(number for number, step in enumerate(steps[1:], start=1) if step <= steps[number - 1])
    assert steps[again] > 3  # from a checkpoint, not from the start


# --- a shard cut short, a full disk ---


def as_partial(root: Path) -> Path:
    """Turn the finished states into what a capture killed before its end leaves."""
    manifest = artifact.open_artifact(root / "states", "states").manifest
    work = (root / "states").rename(root / ".states.partial")
    key = artifact.work_key("states", manifest.settings, manifest.parents)
    files.write_json(work / artifact.KEY, files.sha256_json(key))
    for name in (artifact.MANIFEST, "index.parquet"):
        (work / name).unlink()
    return work


def test_a_half_written_shard_is_captured_again_and_no_other(runs: Runs, unbroken: Path, tmp_path: Path) -> None:
    counts = artifact.open_artifact(unbroken / "states", "states").counts
    root = runs.until("train", unbroken, tmp_path / "run")
    work = as_partial(root)
    for name, keep in (("shard-00001.safetensors", 0.5), ("shard-00002.safetensors", 0.999)):
        shard = work / name
        os.truncate(shard, int(keep * shard.stat().st_size))
    (work / "shard-00000.safetensors").unlink()
    (work / ".shard-00000.safetensors.tmp").write_bytes(b"half")
    runs.finish(root, "--until", "capture")
    assert_equal(root, unbroken, "capture")
    (captured,) = happened(root, "captured")
    assert 0 < captured["tokens"] < counts["tokens"] * 0.6


def test_a_disk_too_full_is_refused_before_any_work(
    runs: Runs, unbroken: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from headstart.stages import capture

    def never(*_: object) -> None:
        raise AssertionError("the target was opened")

    run = config.load(runs.file)
    root = runs.until("capture", unbroken, tmp_path / "run")
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**6, 10**6 - 1000, 1000))
    monkeypatch.setattr(capture, "open_engine", never)
    with pytest.raises(StageFailed, match=r"stage capture failed: the states of [\d,]+ tokens need") as caught:
        pipeline.execute_all(run, root, Events(quiet=True))
    assert "are free" in caught.value.what
    assert "3 aux states and the last one, 64 wide, float32" in str(caught.value.looked_for)
    assert not list((root / ".states.partial").glob("shard-*"))
    assert not (root / "vocab").exists() or pipeline.status(run, root)[2].state == "fresh"


# --- what a finished run shows ---


def test_the_table_of_a_finished_run(unbroken: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The demo's last words, on the tiny run."""
    result = demonstration.summary(unbroken)
    assert json.loads(json.dumps(result)) == result
    assert set(result["seconds"]) == set(VERBS)
    demonstration.show(unbroken, result, unbroken / "report.html")
    shown = capsys.readouterr().out
    for draft in ("no draft", "trained draft", "untrained draft"):
        assert f"\n{draft} " in shown
    assert shown.count(" 3/3 ") == 2
    assert f"vllm serve {unbroken.parent / 'model'} --speculative-config" in shown
    assert str(unbroken / "export" / "vllm") in shown
