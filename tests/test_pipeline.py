"""What is fresh, stale (and why), interrupted or missing is told from manifests; `run` makes what is not fresh."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from fixtures_commands import command, settings_file
from headstart import artifact, cli, config, events, pipeline
from headstart.config import Run
from headstart.errors import GateError, StageFailed, Stopped, UserError
from headstart.events import Events
from headstart.pipeline import BY_VERB, STAGES, Context, Stage, status

ALL = ["prepare", "regenerate", "vocab", "capture", "train", "evaluate", "export"]
QUIET = Events(quiet=True)
Made = Callable[[Context], None]


def run_with(*overrides: str) -> Run:
    return config.build({"target": {"model": "some/model"}, "data": {"sources": ["a.jsonl"]}}, overrides)


RUN = run_with()


def make(root: Path, verb: str, run: Run = RUN, content: str = "content") -> None:
    with Context(run, BY_VERB[verb], root, QUIET).create() as build:
        build.file("file").write_text(f"{content} of {verb}")


def make_all(root: Path, run: Run = RUN) -> None:
    for verb in ALL:
        make(root, verb, run)


def states(root: Path, run: Run = RUN) -> dict[str, str]:
    return {status.verb: status.state for status in pipeline.status(run, root)}


def why(root: Path, verb: str, run: Run = RUN) -> str:
    return next(status.why for status in pipeline.status(run, root) if status.verb == verb)


def stale(root: Path, run: Run) -> list[str]:
    assert set(states(root, run).values()) <= {"fresh", "stale"}
    return [verb for verb, state in states(root, run).items() if state == "stale"]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A run directory in which everything is fresh."""
    make_all(tmp_path)
    return tmp_path


# --- status ---


def test_stages_read_only_what_stages_before_them_made() -> None:
    assert [stage.verb for stage in STAGES] == ALL
    made: set[str] = set()
    for stage in STAGES:
        assert set(stage.parents) <= made
        made.add(stage.folder)


def test_nothing_is_there_at_first_and_all_is_fresh_at_the_end(tmp_path: Path) -> None:
    assert states(tmp_path) == dict.fromkeys(ALL, "missing")
    assert why(tmp_path, "train") == "not made yet"
    for done, verb in enumerate(ALL, start=1):
        make(tmp_path, verb)
        expected = ["fresh"] * done + ["missing"] * (len(ALL) - done)
        assert list(states(tmp_path).values()) == expected
    assert all(status.why == "" and status.manifest for status in pipeline.status(RUN, tmp_path))


CHILDREN = {
    "prepare": ALL,
    "regenerate": ALL[1:],
    "vocab": ["vocab", "train", "evaluate", "export"],
    "capture": ["capture", "train", "evaluate", "export"],
    "train": ["train", "evaluate", "export"],
    "evaluate": ["evaluate"],
    "export": ["export"],
}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ("target.model=other/model", CHILDREN["prepare"]),
        ("target.revision=abc", CHILDREN["prepare"]),
        ("target.dtype=float16", CHILDREN["regenerate"]),
        ("data.seed=1", CHILDREN["prepare"]),
        ("data.sources=['b.jsonl']", CHILDREN["prepare"]),
        ("data.role_aliases={a='user'}", CHILDREN["prepare"]),
        ("regenerate.temperature=0.5", CHILDREN["regenerate"]),
        ("vocab.size=100", CHILDREN["vocab"]),
        ("capture.aux_layers=[1, 2, 3]", CHILDREN["capture"]),
        ("capture.dtype=float16", CHILDREN["capture"]),
        ("draft.fc_norm=false", CHILDREN["train"]),
        ("train.epochs=1", CHILDREN["train"]),
        ("train.validate_every=7", CHILDREN["train"]),
        ("evaluate.max_prompts=1", CHILDREN["evaluate"]),
        ("evaluate.draft_tokens=4", ["evaluate", "export"]),
        ('export.formats=["vllm"]', CHILDREN["export"]),
    ],
)
def test_a_changed_setting_makes_its_stage_and_what_follows_stale(root: Path, change: str, expected: list[str]) -> None:
    run = run_with(change)
    assert stale(root, run) == expected
    name = change.partition("=")[0]
    assert why(root, expected[0], run).startswith(f"{name} was ")
    assert stale(root, RUN) == []  # and back again


@pytest.mark.parametrize(
    "change",
    [
        "directory=elsewhere",
        "data.max_drop=1",
        "regenerate.batch_size=1",
        "capture.batch_tokens=1",
        "capture.max_bad_fraction=1",
        "train.checkpoint_every=1",
        "train.keep_checkpoints=9",
        "train.micro_tokens=100",
        "train.parallel=fsdp",
        "train.attention_backend=dense",
        "train.trackers=[]",
        "train.epochs=3",  # the default, said aloud
        "train.learning_rate=0.0004",
    ],
)
def test_what_changes_no_result_makes_nothing_stale(root: Path, change: str) -> None:
    assert stale(root, run_with(change)) == []


def test_every_setting_belongs_to_a_stage_or_is_of_speed_alone() -> None:
    used = {name for stage in STAGES for name in pipeline.settings_of(RUN, stage)}
    named = {setting.name for setting in config.settings()}
    unused = {"directory", "data.max_drop", "regenerate.batch_size", "capture.batch_tokens", "capture.max_bad_fraction"}
    ways = ("checkpoint_every", "keep_checkpoints", "micro_tokens", "recompute", "compile", "parallel", "trackers")
    assert used == named - unused - {f"train.{way}" for way in (*ways, "attention_backend")}


def test_status_says_what_differs(root: Path) -> None:
    run = run_with("train.epochs=9", "data.sources=['b.jsonl']")
    assert why(root, "prepare", run) == "data.sources was ['a.jsonl'], is ['b.jsonl']"
    assert why(root, "regenerate", run) == "prompts is stale"
    assert why(root, "train", run) == "train.epochs was 3, is 9; states is stale; vocab is stale"


def test_a_parent_made_anew_with_equal_content_leaves_its_children_fresh(root: Path) -> None:
    make(root, "prepare")
    make(root, "capture")
    assert stale(root, RUN) == []
    make(root, "prepare", content="other content")
    assert stale(root, RUN) == CHILDREN["regenerate"]
    assert why(root, "regenerate") == "prompts was made anew"
    assert why(root, "capture") == "conversations is stale"


def test_a_missing_parent_makes_its_children_stale(root: Path) -> None:
    (root / "states").rename(root / "elsewhere")
    assert states(root) == dict.fromkeys(ALL, "fresh") | {
        "capture": "missing",
        "train": "stale",
        "evaluate": "stale",
        "export": "stale",
    }
    assert why(root, "train") == "states is missing"


def test_a_setting_that_an_older_manifest_does_not_know(root: Path) -> None:
    path = root / "draft" / artifact.MANIFEST
    raw = json.loads(path.read_text())
    assert raw["settings"].pop("train.max_steps") is None
    path.write_text(json.dumps(raw))
    assert stale(root, RUN) == []
    raw["settings"].pop("train.loss")
    path.write_text(json.dumps(raw))
    assert why(root, "train") == "train.loss was None, is 'kl'"


def abandon(root: Path, verb: str, run: Run = RUN) -> None:
    with pytest.raises(InterruptedError), Context(run, BY_VERB[verb], root, QUIET).create():
        raise InterruptedError


def test_an_interrupted_stage_is_partial_and_says_what_becomes_of_its_work(tmp_path: Path) -> None:
    make(tmp_path, "prepare")
    abandon(tmp_path, "regenerate")
    assert states(tmp_path) == dict.fromkeys(ALL, "missing") | {"prepare": "fresh", "regenerate": "partial"}
    assert why(tmp_path, "regenerate") == "was interrupted; continues where it stopped"
    other = run_with("regenerate.seed=1")
    assert why(tmp_path, "regenerate", other) == "was interrupted with other settings or parents; starts anew"
    make(tmp_path, "prepare", content="other")
    assert why(tmp_path, "regenerate") == "was interrupted with other settings or parents; starts anew"
    (tmp_path / "prompts").rename(tmp_path / "elsewhere")
    assert why(tmp_path, "regenerate") == "was interrupted; what it is made from is not ready"


def test_a_stage_that_another_process_is_at_is_not_called_interrupted(tmp_path: Path) -> None:
    with Context(RUN, BY_VERB["prepare"], tmp_path, QUIET).create() as build:
        assert why(tmp_path, "prepare") == "is being made at this moment"
        build.file("file").write_text("x")
    assert states(tmp_path)["prepare"] == "fresh"


def test_a_whole_artifact_counts_while_a_newer_one_is_half_made(root: Path) -> None:
    abandon(root, "train", run_with("train.epochs=5"))
    assert stale(root, RUN) == []
    assert stale(root, run_with("train.epochs=5")) == CHILDREN["train"]


# --- running stages ---


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Stages that write one file each; the list holds which were started."""
    calls: list[str] = []

    def stage(verb: str) -> Made:
        def run(context: Context) -> None:
            calls.append(verb)
            with context.create() as build:
                build.file("file").write_text(f"content of {verb}")

        return run

    for verb in ALL:
        put(monkeypatch, verb, stage(verb))
    nothing = ModuleType("preflight")
    nothing.check = lambda run, root, verbs: None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "headstart.preflight", nothing)
    return calls


def put(monkeypatch: pytest.MonkeyPatch, verb: str, run: Made) -> None:
    module = ModuleType(verb)
    module.run = run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, f"headstart.stages.{verb}", module)


def test_run_makes_all_and_then_nothing(tmp_path: Path, started: list[str]) -> None:
    pipeline.execute_all(RUN, tmp_path, QUIET)
    assert started == ALL
    assert set(states(tmp_path).values()) == {"fresh"}
    pipeline.execute_all(RUN, tmp_path, QUIET)
    assert started == ALL


def test_run_with_other_settings_makes_only_what_is_stale(root: Path, started: list[str]) -> None:
    run = run_with("vocab.size=100", "evaluate.seed=1")
    pipeline.execute_all(run, root, QUIET)
    assert started == ["vocab", "train", "evaluate", "export"]
    assert stale(root, run) == []


def test_run_stops_early_once_a_stale_stage_gives_equal_content(root: Path, started: list[str]) -> None:
    make(root, "prepare", content="other")
    assert stale(root, RUN) == CHILDREN["regenerate"]
    make(root, "prepare")
    pipeline.execute_all(RUN, root, QUIET)
    assert started == []


def test_until_is_the_last_stage_made(tmp_path: Path, started: list[str]) -> None:
    pipeline.execute_all(RUN, tmp_path, QUIET, until="vocab")
    assert started == ALL[:3]
    pipeline.execute_all(RUN, tmp_path, QUIET, until="vocab")
    assert started == ALL[:3]
    with pytest.raises(UserError, match="no stage 'training'") as caught:
        pipeline.execute_all(RUN, tmp_path, QUIET, until="training")
    assert caught.value.looked_for == ", ".join(ALL)
    assert started == ALL[:3]


@pytest.mark.parametrize("error", [UserError("bad input", looked_for="good", do="mend it"), GateError("bad states")])
def test_the_first_failing_stage_ends_the_run(
    tmp_path: Path, started: list[str], monkeypatch: pytest.MonkeyPatch, error: UserError
) -> None:
    """Case C49."""

    def fail(context: Context) -> None:
        raise error

    put(monkeypatch, "capture", fail)
    log = Events(tmp_path / "events.jsonl", quiet=True)
    with pytest.raises(StageFailed) as caught:
        pipeline.execute_all(RUN, tmp_path, log)
    assert started == ALL[:3]
    assert str(caught.value) == str(error).replace(error.what, f"stage capture failed: {error.what}")
    assert caught.value.exit_code == 2
    assert [event["event"] for event in events.read(tmp_path / "events.jsonl")][-2:] == ["stage-start", "stage-failed"]
    assert not (tmp_path / "draft").exists()


def test_a_bug_in_a_stage_is_no_user_error_but_names_the_stage(
    tmp_path: Path, started: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def crash(context: Context) -> None:
        raise ZeroDivisionError

    put(monkeypatch, "train", crash)
    with pytest.raises(ZeroDivisionError) as caught:
        pipeline.execute_all(RUN, tmp_path, QUIET)
    assert caught.value.__notes__ == ["stage train failed"]
    assert started == ALL[:4]


@pytest.mark.parametrize("before", ["nothing", "older"])
def test_a_stage_that_ends_without_its_artifact_has_failed(
    tmp_path: Path, started: list[str], monkeypatch: pytest.MonkeyPatch, before: str
) -> None:
    """Case C49: training that "ends" without an export; an older artifact does not count."""
    if before == "older":
        make_all(tmp_path, run_with("train.epochs=1"))
    put(monkeypatch, "train", lambda context: None)
    with pytest.raises(RuntimeError, match="the stage train ended without making"):
        pipeline.execute_all(RUN, tmp_path, QUIET)
    assert "evaluate" not in started


def test_a_single_stage_needs_its_parents(tmp_path: Path, started: list[str]) -> None:
    with pytest.raises(UserError, match="regenerate needs prompts, which is missing"):
        pipeline.execute(RUN, tmp_path, "regenerate", QUIET)
    make(tmp_path, "prepare")
    made = pipeline.execute(RUN, tmp_path, "regenerate", QUIET)
    assert made.path == tmp_path / "conversations"


def test_a_single_stage_does_not_build_on_what_is_stale(root: Path, started: list[str]) -> None:
    changed = run_with("capture.dtype=float32")
    with pytest.raises(UserError, match=r"train needs states, which is stale: capture\.dtype was 'auto'"):
        pipeline.execute(changed, root, "train", QUIET)
    assert started == []


@pytest.mark.parametrize("damage", ["gone", "short"])
def test_a_damaged_artifact_is_stale_and_made_anew(root: Path, started: list[str], damage: str) -> None:
    victim = root / "vocab" / "file"
    victim.unlink() if damage == "gone" else victim.write_text("x")
    (found,) = [state for state in status(RUN, root) if state.folder == "vocab"]
    assert found.state == "stale"
    assert "vocab/file" in found.why
    pipeline.execute_all(RUN, root, QUIET)
    assert started == ["vocab"]


def test_a_context_knows_its_settings_and_parents(root: Path) -> None:
    context = Context(RUN, BY_VERB["train"], root, QUIET)
    assert context.path == root / "draft"
    assert set(context.parents()) == {"states", "vocab"}
    assert context.settings["draft.ttt_steps"] == 5
    assert {name.partition(".")[0] for name in context.settings} == {"draft", "train"}
    (root / "vocab" / "file").unlink()
    with pytest.raises(UserError, match="vocab/file is missing"):
        context.parents()


def test_settings_of_a_stage_are_plain_json() -> None:
    for stage in STAGES:
        settings = pipeline.settings_of(run_with("data.role_aliases={a='user'}"), stage)
        assert json.loads(json.dumps(settings)) == settings
    assert pipeline.settings_of(RUN, Stage("x", "x", (), ("data.seed",))) == {"data.seed": 0}
    assert pipeline.settings_of(RUN, Stage("x", "x", (), ("dat",))) == {}


# --- through the command ---


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return settings_file(tmp_path)


def test_the_command_ends_with_2_and_names_the_stage(
    file: Path, started: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Case C49."""

    def fail(context: Context) -> None:
        raise UserError("nothing to learn from", do="give more data")

    put(monkeypatch, "train", fail)
    assert command(monkeypatch, "run", file, "--quiet") == 2
    assert started == ALL[:4]
    told = capsys.readouterr()
    assert told.err == "error: stage train failed: nothing to learn from\n  do: give more data\n"
    assert command(monkeypatch, "run", file, "--until", "vocab", "--json", "-q") == 0
    shown = json.loads(capsys.readouterr().out)
    assert [row["state"] for row in shown] == ["fresh"] * 4 + ["missing"] * 3


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ModuleNotFoundError("No module named 'torch'", name="torch"), "pip install -e '.[train]'"),
        (
            ModuleNotFoundError("No module named 'matplotlib.axes'", name="matplotlib.axes"),
            "pip install -e '.[report]'",
        ),
        (OSError(28, "No space left on device", "/data/file"), "no space is left on the disk of /data/file"),
    ],
)
def test_what_a_person_can_mend_is_told_without_a_traceback(
    file: Path,
    started: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: Exception,
    expected: str,
) -> None:
    def fail(context: Context) -> None:
        raise error

    put(monkeypatch, "prepare", fail)
    assert command(monkeypatch, "prepare", file, "-q") == 2
    told = capsys.readouterr().err
    assert expected in told
    assert "Traceback" not in told


def test_sigterm_s_exit_code_comes_out_of_a_whole_run(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(context: Context) -> None:
        raise Stopped("SIGTERM at step 3")

    put(monkeypatch, "prepare", stop)
    monkeypatch.setattr(pipeline, "check", lambda *_, **__: None)
    assert command(monkeypatch, "run", file, "-q") == command(monkeypatch, "prepare", file, "-q") == 143


def test_what_was_changed_afterwards_is_said_with_the_verb_that_makes_it_again(root: Path) -> None:
    data = next(path for path in (root / "prompts").iterdir() if path.name != artifact.MANIFEST)
    data.write_bytes(data.read_bytes()[::-1])
    with pytest.raises(UserError, match="was changed after it was written") as raised:
        pipeline.execute(RUN, root, "regenerate", Events(quiet=True))
    assert raised.value.do == "headstart prepare RUN.TOML --force makes it again"


def test_a_bug_keeps_its_traceback(file: Path, started: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(context: Context) -> None:
        raise ModuleNotFoundError("No module named 'headstart.nothing'", name="headstart.nothing")

    put(monkeypatch, "prepare", fail)
    monkeypatch.setattr(sys, "argv", ["headstart", "prepare", str(file), "-q"])
    with pytest.raises(ModuleNotFoundError):
        cli.main()
