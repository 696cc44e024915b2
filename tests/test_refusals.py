"""A verb that is refused leaves the run directory as it was, to the byte; and where there was none, there is none."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path

import pytest

from fixtures_models import save_llama
from fixtures_text import save_tokenizer
from headstart import artifact, cli, config, pipeline, processes, rundir
from headstart.config import Run
from headstart.errors import UserError
from headstart.events import Events
from headstart.pipeline import BY_VERB, Context
from headstart.target.anatomy import inspect

QUIET = Events(quiet=True)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tokenizer(save_llama(tmp_path_factory.mktemp("target")))


@pytest.fixture
def file(target: Path, tmp_path: Path) -> Path:
    (tmp_path / "a.jsonl").write_text('{"prompt": "Name a number.", "completion": "40"}\n')
    path = tmp_path / "run.toml"
    path.write_text(
        f'[target]\nmodel = "{target}"\ndevice = "cpu"\n[data]\nsources = ["a.jsonl"]\nmax_length = 256\n'
        "decontaminate = []\n[evaluate]\nmax_new_tokens = 8\n"
    )
    return path


def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    monkeypatch.setattr(sys, "argv", ["headstart", *map(str, arguments)])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 2
    return capsys.readouterr().err


def settings(*overrides: str) -> list[str]:
    return [part for override in overrides for part in ("-s", override)]


def everything(folder: Path) -> dict[str, bytes | None]:
    return {str(path): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def plant(run: Run, verb: str, target: Path) -> None:
    """All that `verb` is made from, as if these settings had made it."""
    for stage in pipeline.STAGES[: list(BY_VERB).index(verb)]:
        with Context(run, stage, Path(run.directory), QUIET).create() as build:
            build.file("file").write_text("content")
            build.facts["target"] = asdict(inspect(target))


@pytest.mark.parametrize("verb", list(BY_VERB)[1:])
def test_a_verb_without_its_parents(
    file: Path, verb: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = everything(file.parent)
    assert f"{verb} needs" in refused(monkeypatch, capsys, verb, file, "-q")
    assert everything(file.parent) == before


REFUSALS = [
    ("prepare", "data.sources=['none.jsonl']", "none.jsonl does not exist"),
    ("prepare", "data.decontaminate=['none.jsonl']", "none.jsonl does not exist"),
    ("prepare", "data.max_length=2048", "more than the target can read"),
    ("prepare", "target.model='/none'", "no model in /none"),
    ("regenerate", "target.device='cuda:9'", "target.device = 'cuda:9'"),
    ("vocab", "vocab.size=100000", "larger than the target's vocabulary"),
    ("vocab", "vocab.size=1", "too small"),
    ("capture", "capture.aux_layers=[1,2,99]", "99 is not a boundary"),
    ("capture", "target.device='cuda:9'", "target.device = 'cuda:9'"),
    ("train", "draft.head_dim=15", "head_dim even"),
    ("train", "train.attention_backend=flex", "no backward pass on a CPU"),
    ("train", "train.trackers=['wandb']", "wandb, which is not installed"),
    ("train", "draft.num_layers=100000000", "parameters takes"),
    ("evaluate", "evaluate.prompts=['none.jsonl']", "the prompt set none.jsonl"),
    ("evaluate", "evaluate.max_new_tokens=500", "positions are needed"),
    ("evaluate", "target.engine=vllm target.python='/none'", "could not be asked for its vLLM"),
]


@pytest.mark.parametrize(("verb", "overrides", "said"), REFUSALS)
def test_settings_that_a_verb_refuses(
    file: Path,
    target: Path,
    verb: str,
    overrides: str,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    chosen = ["capture.aux_layers=[0,1,2]", *overrides.split()]
    arguments = (verb, file, "-q", "--force", *settings(*chosen))
    if verb == "prepare":
        before = everything(file.parent)
        assert said in refused(monkeypatch, capsys, *arguments)
        assert everything(file.parent) == before
    run = config.load(file, chosen)
    rundir.begin(config.load(file), Path(run.directory), quiet=True)
    plant(run, verb, target)
    before = everything(file.parent)
    assert said in refused(monkeypatch, capsys, *arguments)
    assert everything(file.parent) == before


def test_a_verb_does_not_ask_for_what_others_need(file: Path, target: Path) -> None:
    """Prompts are prepared on a machine without a GPU, and answers that are kept need no engine."""
    elsewhere = ["target.device='cuda:9'", "draft.head_dim=15", "evaluate.prompts=['none.jsonl']", "data.answers=keep"]
    run = config.load(file, elsewhere)
    plant(run, "vocab", target)
    for verb in ("prepare", "regenerate", "vocab"):
        pipeline.check(run, Path(run.directory), [verb], force=True)


def test_a_training_needs_the_states_alone(file: Path, target: Path) -> None:
    """Made elsewhere of a target of the hub, which this machine need not reach."""
    local = config.load(file, ["capture.aux_layers=[0,1,2]"])
    run = local.model_copy(update={"target": local.target.model_copy(update={"model": "some/model"})})
    plant(run, "train", target)
    pipeline.check(run, Path(run.directory), ["train"])


def test_what_is_being_made_or_not_ours(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root = Path(config.load(file).directory)
    rundir.begin(config.load(file), root, quiet=True)
    arguments = ("prepare", file, "-q", "-s", "data.seed=3")
    with artifact.create(root / "prompts", "prompts", {}, {}):
        before = everything(root)
        assert "another process is making" in refused(monkeypatch, capsys, *arguments)
        assert everything(root) == before
    (root / "prompts" / "mine.txt").write_text("mine")
    before = everything(root)
    assert "mine.txt" in refused(monkeypatch, capsys, *arguments)
    assert everything(root) == before


def test_prompts_that_were_trained_on(file: Path, target: Path) -> None:
    source = f"['{file.parent / 'a.jsonl'}']"
    run = config.load(file, ["capture.aux_layers=[0,1,2]", f"evaluate.prompts={source}"])
    plant(run, "evaluate", target)
    with pytest.raises(UserError, match=r"a\.jsonl is in data.sources and in evaluate.prompts"):
        pipeline.check(run, Path(run.directory), ["evaluate"])


def test_several_processes_where_one_is_needed(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of torchrun's processes the first one is refused as well."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(processes, "ended_at_once", nullcontext)
    before = everything(file.parent)
    assert "prepare runs in one process" in refused(monkeypatch, capsys, "prepare", file, "-q")
    assert everything(file.parent) == before


def test_the_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(monkeypatch, capsys, "demo", "-q", "--dir", tmp_path / "demo", "-s", "draft.head_dim=15")
    assert "head_dim even" in said
    assert not (tmp_path / "demo").exists()


def test_a_verb_that_is_not_refused_records_its_settings(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["headstart", "prepare", str(file), "-q", "-s", "data.max_drop=0.5"])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 0, capsys.readouterr().err
    recorded = json.loads((Path(config.load(file).directory) / rundir.SETTINGS).read_text())
    assert recorded["data"]["max_drop"] == 0.5
