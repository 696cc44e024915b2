"""`headstart estimate`: what it counts before and after each stage, what it measures, what it prints, how it ends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fixtures_models import save_llama
from fixtures_text import T_PLAIN, save_tokenizer
from headstart import cli, config, pipeline
from headstart.doctor import machine
from headstart.errors import UserError
from headstart.estimate import counting, hardware
from headstart.events import Events

ROWS = 60
FIGURES = "gpus=0,memory=24GB,prefill=500,decode=100,single=20,train=1G,disk=50GB"
TOML = """
directory = "{root}"
[target]
model = "{target}"
device = "cpu"
[data]
sources = ["chats.jsonl"]
max_length = 64
validation_fraction = 0.2
decontaminate = []
[regenerate]
max_new_tokens = 20
batch_size = 8
[vocab]
size = 128
[capture]
aux_layers = [0, 1, 2]
[draft]
ttt_steps = 2
[train]
epochs = 1
batch_tokens = 512
[evaluate]
prompts = ["prompts.jsonl"]
"""


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    save_llama(folder, vocab_size=400, num_hidden_layers=2)
    return save_tokenizer(folder, T_PLAIN, end_ids=[398])


@pytest.fixture
def run_file(target: Path, tmp_path: Path) -> Path:
    file = tmp_path / "run.toml"
    file.write_text(TOML.format(root=tmp_path / "made", target=target))
    write_chats(tmp_path / "chats.jsonl", ROWS)
    write_chats(tmp_path / "prompts.jsonl", 3)
    return file


def write_chats(path: Path, count: int) -> None:
    texts = (f"How many birds were there on day {day}?" for day in range(count))
    rows = (
        {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": "Two."}]} for text in texts
    )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def estimated(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, dict[str, Any]]:
    code, out = headstart(capsys, *arguments, "--json")
    return code, json.loads(out)


def headstart(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    code = cli.app(["estimate", "-q", *map(str, arguments)], standalone_mode=False) or 0
    return code, capsys.readouterr().out


def stage_of(found: dict[str, Any], verb: str) -> dict[str, Any]:
    return next(stage for stage in found["stages"] if stage["verb"] == verb)


def test_before_anything_is_made_answers_are_a_bound(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = estimated(capsys, run_file, "--hardware", FIGURES)
    assert (code, found["fits"], found["machine"]["measured"]) == (0, True, False)
    work = found["work"]
    assert (work["conversations"], work["answer_tokens"], work["exact"]) == (ROWS, 20 * ROWS, False)
    assert "sampled" in work["told"]
    assert "as long as they may be" in work["told"]
    assert stage_of(found, "regenerate")["seconds"] == pytest.approx(20 * ROWS / 100, abs=0.1)
    assert [stage["verb"] for stage in found["stages"]] == [stage.verb for stage in pipeline.STAGES]


def test_answers_whose_length_is_known(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, found = estimated(capsys, run_file, "--hardware", FIGURES, "--answer-tokens", "5")
    assert found["work"]["answer_tokens"] == 5 * ROWS
    _, found = estimated(capsys, run_file, "--hardware", FIGURES, "-s", "data.answers=keep")
    assert 0 < found["work"]["answer_tokens"] < 15 * ROWS


def test_what_has_been_made_is_counted(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Sampled prompts are near the counted ones; after `regenerate` nothing is a bound, and the states take as much as said."""
    run_file.write_text(run_file.read_text().replace('device = "cpu"', 'device = "auto"'))  # made so, and so looked for
    _, before = estimated(capsys, run_file, "--hardware", FIGURES)
    run = config.load(run_file)
    root, quiet = Path(run.directory), Events(quiet=True)
    pipeline.execute_all(run, root, quiet, until="prepare")
    _, prepared = estimated(capsys, run_file, "--hardware", FIGURES)
    assert "prepared" in prepared["work"]["told"]
    pipeline.execute_all(run, root, quiet, until="capture")
    _, after = estimated(capsys, run_file, "--hardware", FIGURES)
    assert after["work"]["exact"] is True
    states = pipeline.artifact.open_artifact(root / "states", "states")
    assert after["work"]["answer_tokens"] == states.counts["supervised"]
    for early in (before, prepared):
        assert early["work"]["prompt_tokens"] == pytest.approx(after["work"]["prompt_tokens"], rel=0.02)
        assert early["work"]["answer_tokens"] >= after["work"]["answer_tokens"]
    real = sum(path.stat().st_size for path in states.path.iterdir())
    fixed = 200_000  # of small files, nothing beside the states of a real target
    assert stage_of(after, "capture")["disk"] - fixed == pytest.approx(real, rel=0.1)


@pytest.mark.slow
def test_the_machine_is_measured_with_the_target(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = estimated(capsys, run_file)
    at = found["machine"]
    assert (code, at["measured"], at["gpus"], at["assumed"]) == (0, True, 0, [])
    for rate in ("prefill", "decode", "single", "train", "verify", "draft", "loading"):
        assert at[rate] > 0
    assert at["prefill"] > at["single"]
    assert at["decode"] > at["single"]
    assert stage_of(found, "regenerate")["seconds"] >= found["work"]["answer_tokens"] / at["decode"]


def test_what_is_printed(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, out = headstart(capsys, run_file, "--hardware", "1xH200,disk=1TB")
    for said in (
        "at most 60 conversations",
        "1 GPU of 141.0 GB",
        "assumed: decode, prefill",
        "it fits",
        "capture",
    ):
        assert said in out.replace("\n", " ")


def test_a_disk_that_is_too_small_ends_with_3(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = estimated(capsys, run_file, "--hardware", FIGURES.replace("50GB", "1MB"))
    assert (code, found["fits"]) == (3, False)
    assert found["advice"][0].startswith("disk: ")
    _, out = headstart(capsys, run_file, "--hardware", FIGURES.replace("50GB", "1MB"))
    assert "it does not fit" in out


def test_a_target_that_does_not_fit_here_is_not_loaded(
    run_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "memory_available", lambda: 1000)
    with pytest.raises(UserError, match="does not fit here") as error:
        headstart(capsys, run_file)
    assert "--hardware 8xH200" in (error.value.do or "")
    monkeypatch.undo()
    monkeypatch.setattr(hardware, "LOADING", 1.0)
    with pytest.raises(UserError, match="more than a minute"):
        headstart(capsys, run_file)


def test_without_a_tokenizer_figures_are_needed(
    run_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(counting, "template_of", lambda _: None)
    _, found = estimated(capsys, run_file, "--hardware", FIGURES)
    assert "4 characters a token" in found["work"]["told"]
    with pytest.raises(UserError, match="nothing to measure with"):
        headstart(capsys, run_file)


def test_large_sources_are_read_as_far_as_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_chats(tmp_path / "a.jsonl", 3000)
    write_chats(tmp_path / "b.jsonl", 100)
    monkeypatch.setattr(counting, "ENOUGH", 500)
    data = config.Data.model_validate({"sources": (str(tmp_path / "a.jsonl"),), "decontaminate": ()})
    found, usable, known = counting.look(data, Events(quiet=True))
    assert (len(found), known) == (500, True)
    assert usable == pytest.approx(3000, rel=0.05)
    both = data.model_copy(update={"sources": (*data.sources, str(tmp_path / "b.jsonl")), "max_conversations": 200})
    found, usable, _ = counting.look(both, Events(quiet=True))
    assert len(found) == 400  # the second file repeats the first one's beginning
    assert usable == pytest.approx(3000, rel=0.05)


REFUSED = [
    ("data.max_length=1024", "more than the target can read"),
    ("evaluate.prompts=['none.jsonl']", "the prompt set none.jsonl"),
    ("evaluate.prompts=['sharegpt']", "for training"),
    ("data.decontaminate=['none.jsonl']", "none.jsonl does not exist"),
    ("target.engine=vllm target.tensor_parallel=3", "does not divide the target's 4 attention heads"),
    ("target.engine=vllm evaluate.temperatures=[0.5]", "are measured greedily"),
    ("vocab.size=401", "larger than the target's vocabulary"),
    ("train.attention_backend=flex", "no backward pass on a CPU"),
    ("capture.aux_layers=[9]", "9 is not a boundary"),
    ("draft.head_dim=15", "head_dim even"),
]


@pytest.mark.parametrize(("overrides", "said"), REFUSED)
@pytest.mark.parametrize("where", ["here", "elsewhere"])
def test_what_a_run_would_refuse_gets_no_hours(
    run_file: Path, capsys: pytest.CaptureFixture[str], overrides: str, said: str, where: str
) -> None:
    arguments = [part for override in overrides.split() for part in ("-s", override)]
    figures = ["--hardware", FIGURES] if where == "elsewhere" else []
    with pytest.raises(UserError, match=said):
        headstart(capsys, run_file, *figures, *arguments)


def test_what_this_machine_lacks_counts_only_where_it_is_meant(
    run_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "/no/compiler")
    monkeypatch.setattr(machine, "room", lambda _: 1000)
    gpu = ("-s", "target.device=cuda:7")
    code, found = estimated(capsys, run_file, *gpu, "--hardware", "8xH200")
    assert (code, found["fits"], found["machine"]["disk"]) == (0, True, None)
    assert "free disk not known" in headstart(capsys, run_file, *gpu, "--hardware", "8xH200")[1]
    serving = ("-s", "target.engine=vllm", "-s", "target.python=/no/python")
    assert estimated(capsys, run_file, *serving, "--hardware", FIGURES)[0] == 0
    assert estimated(capsys, run_file, "-s", "train.compile=true", "--hardware", FIGURES)[0] == 0
    for settings, said in ((gpu, "cuda:7"), (serving, "/no/python"), (("-s", "train.compile=true"), "compiler")):
        with pytest.raises(UserError, match=said):
            headstart(capsys, run_file, *settings)


@pytest.mark.parametrize(
    ("device", "figures", "said"),
    [
        ("cuda", FIGURES, "the machine of --hardware has no GPU"),
        ("cuda:8", "8xH200", "the machine of --hardware has 8 GPUs"),
        ("gpu", "8xH200", "target.device = 'gpu' cannot be used"),
    ],
)
def test_a_device_that_the_other_machine_has_not(
    run_file: Path, capsys: pytest.CaptureFixture[str], device: str, figures: str, said: str
) -> None:
    with pytest.raises(UserError, match=said):
        headstart(capsys, run_file, "--hardware", figures, "-s", f"target.device={device}")


def test_what_cannot_be_estimated(
    run_file: Path, target: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for setting, said in (
        ("data.max_prompt_tokens=2", "fits into 2 tokens"),
        ("data.sources=['no.jsonl']", "no.jsonl"),
    ):
        with pytest.raises(UserError, match=said):
            headstart(capsys, run_file, "--hardware", FIGURES, "-s", setting)
    (tmp_path / "chats.jsonl").write_text('{"messages": []}\n')
    with pytest.raises(UserError, match="nothing in the sources"):
        headstart(capsys, run_file, "--hardware", FIGURES)
    with pytest.raises(UserError, match="is no run"):
        headstart(capsys, target, "--hardware", FIGURES)
