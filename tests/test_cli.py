"""The command as a person or a machine meets it: help, exit codes, streams, and how little it imports."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from fixtures_models import save_llama
from fixtures_text import save_tokenizer
from headstart import __version__, cli

REPOSITORY = Path(__file__).parent.parent
VERBS = (
    *("run", "prepare", "regenerate", "vocab", "capture", "train", "evaluate", "export"),
    *("status", "config", "inspect", "doctor", "estimate", "report", "remote", "patch-speculators", "demo"),
)
STAGES = VERBS[1:8]
OPTIONAL = "optional-dependencies"
MODEL = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 128,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
}
HEAVY = {"torch", "transformers", "tokenizers", "datasets", "vllm", "matplotlib", "pyarrow", "numpy", "safetensors"}


def headstart(*arguments: object, folder: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    """`python -m headstart` in a process of its own, with warnings as errors and no colours."""
    plain = {"COLUMNS": "100", "NO_COLOR": "1", "TERM": "dumb", "PYTHONPATH": str(REPOSITORY / "src")}
    command = [sys.executable, "-W", "error", "-m", "headstart", *map(str, arguments)]
    return ended(command, folder, os.environ | plain | environment)


def ended(
    command: list[str], folder: Path | None = None, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment, timeout=60, check=False)


def refused(*arguments: object, folder: Path | None = None) -> list[str]:
    """The lines of an error: short, on stderr alone, exit code 2."""
    end = headstart(*arguments, folder=folder)
    assert (end.returncode, end.stdout) == (2, ""), end
    assert "Traceback" not in end.stderr
    lines = end.stderr.splitlines()
    assert lines[0].startswith("error: ")
    assert all(line.startswith("  ") for line in lines[1:])
    assert len(lines) <= 3
    return lines


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.toml"
    path.write_text('[target]\nmodel = "some/model"\n[data]\nsources = ["none.jsonl"]\n')
    return path


# --- help ---


def test_help_lists_every_verb() -> None:
    shown = headstart("--help")
    assert (shown.returncode, shown.stderr) == (0, "")
    listed = re.findall(r"^│ (\w[\w-]*) ", shown.stdout, re.MULTILINE)
    assert tuple(listed) == VERBS


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help_with_an_example(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.app([verb, "--help"])
    shown = capsys.readouterr().out
    assert end.value.code == 0
    assert f"Example: headstart {verb}" in shown


@pytest.mark.slow
def test_examples_are_commands_that_are_understood(tmp_path: Path) -> None:
    """Each example is parsed up to the point where its file is missing."""
    for command in cli.app.registered_commands:
        assert command.callback is not None
        example = re.search(r"Example: headstart (.*)", command.callback.__doc__ or "")
        assert example is not None
        if not example[1].startswith("demo"):
            refused(*example[1].split(), folder=tmp_path)


def test_version_and_no_arguments() -> None:
    assert headstart("--version").stdout == f"headstart {__version__}\n"
    assert "Usage: " in headstart().stdout


def test_wrong_usage_ends_with_2(file: Path) -> None:
    for arguments in (["trian", file], ["run"], ["run", file, "--nope"], ["run", file, "-s"]):
        end = headstart(*arguments)
        assert (end.returncode, end.stdout) == (2, "")
        assert "Traceback" not in end.stderr


# --- what is imported ---

IMPORTS = """
import json, sys
sys.argv = ["headstart", *sys.argv[1:]]
from headstart.cli import main
try:
    main()
except SystemExit as end:
    code = end.code
print(json.dumps([code or 0, sorted({name.partition(".")[0] for name in sys.modules})]), file=sys.stderr)
"""


@pytest.mark.parametrize("verb", ["help", "status", "config", "inspect"])
def test_light_verbs_import_nothing_heavy(verb: str, file: Path, tmp_path: Path) -> None:
    model = tmp_path / "config.json"
    model.write_text(json.dumps(MODEL))
    arguments = {"help": ["--help"], "inspect": ["inspect", model]}.get(verb, [verb, file])
    end = ended([sys.executable, "-c", IMPORTS, *map(str, arguments)], tmp_path)
    code, imported = json.loads(end.stderr.splitlines()[-1])
    assert code == 0, end
    assert HEAVY.isdisjoint(imported)
    if verb == "help":
        assert "pydantic" not in imported


# --- errors and streams ---


def test_a_misspelt_setting_gets_its_suggestion(file: Path) -> None:
    """Case C41."""
    expected = ["error: unknown setting train.epoch", "  do: did you mean train.epochs?"]
    for verb in ("config", "run", "train", "status"):
        assert refused(verb, file, "-s", "train.epoch=3") == expected
    assert refused("demo", "-s", "train.epoch=3", folder=file.parent) == expected


def test_evaluate_takes_an_engine(file: Path) -> None:
    (wrong, *_) = refused("evaluate", file, "--engine", "sglang")
    assert 'evaluate.engine = "sglang"' in wrong
    accepted = headstart("evaluate", file, "--engine", "vllm")
    assert "error: evaluate needs" in accepted.stderr


def test_files_that_are_not_there(file: Path, tmp_path: Path) -> None:
    assert (
        refused("run", tmp_path / "no.toml")[0]
        == f"error: cannot read {tmp_path / 'no.toml'}: No such file or directory"
    )
    assert "is not a run directory" in refused("status", tmp_path)[0]
    assert "is not a run directory" in refused("report", tmp_path)[0]
    file.write_text("[target\n")
    assert "line 1" in refused("run", file)[0]
    assert "no demo size 'huge'" in refused("demo", "--size", "huge", folder=tmp_path)[0]


def _with_target(file: Path) -> Path:
    """A target of which only the small files exist: enough until a parent is missed."""
    from fixtures_text import save_tokenizer

    model = save_tokenizer(file.parent / "model")
    (model / "config.json").write_text(json.dumps(MODEL | {"vocab_size": 400}))  # as many as the tokenizer has
    file.write_text(f'[target]\nmodel = "{model}"\n[data]\nsources = ["none.jsonl"]\n')
    return file.parent


def test_status_as_a_table_and_as_json(file: Path, tmp_path: Path) -> None:
    shown = headstart("status", file, folder=tmp_path)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert shown.stdout.count("missing") == len(STAGES)
    machine = headstart("status", file, "--json", folder=tmp_path)
    rows = json.loads(machine.stdout)
    assert machine.stderr == ""
    assert [row["stage"] for row in rows] == list(STAGES)
    assert {row["state"] for row in rows} == {"missing"}
    assert list(tmp_path.iterdir()) == [file]  # looking leaves nothing behind


def test_status_of_a_run_directory_with_odd_values(tmp_path: Path) -> None:
    """Values with square brackets are shown as they are, and overrides count."""
    from headstart import config, pipeline, rundir
    from headstart.events import Events

    run = config.build({"target": {"model": "m"}, "data": {"sources": ["[red]a[/].jsonl"]}})
    rundir.begin(run, tmp_path, quiet=True)
    with pipeline.Context(run, pipeline.BY_VERB["prepare"], tmp_path, Events()).create() as build:
        build.file("x").write_text("x")
    shown = headstart("status", tmp_path, "-s", 'data.sources=["[b]"]', COLUMNS="200")
    assert "was ['[red]a[/].jsonl'], is ['[b]']" in " ".join(shown.stdout.split())
    assert json.loads(headstart("status", tmp_path, "--json").stdout)[0]["state"] == "fresh"


def test_config_shows_every_setting_or_the_values_of_a_run(file: Path) -> None:
    """Case C41: what was switched on is visible."""
    from headstart.config import settings

    listing = headstart("config").stdout
    assert all(setting.name in listing for setting in settings())
    listed = json.loads(headstart("config", "--json").stdout)
    assert listed == [setting._asdict() for setting in settings()]
    shown = headstart("config", file, "-s", "draft.fc_norm=true", "-s", "draft.norm_output=true")
    assert shown.stderr == ""
    draft = json.loads(shown.stdout)["draft"]
    assert (draft["fc_norm"], draft["norm_output"]) == (True, True)


@pytest.mark.slow
def test_a_run_with_a_source_of_nothing_names_the_stage_and_stops(file: Path) -> None:
    """Case C49, with the real stage."""
    folder = _with_target(file)
    (file.parent / "none.jsonl").write_text('{"messages": []}\n')
    (file.parent / "asked.jsonl").write_text('{"prompt": "Why?"}\n')
    fitting = ("data.decontaminate=[]", "data.max_length=256", "capture.aux_layers=[1, 2, 3]")
    fitting += ("evaluate.prompts=['asked.jsonl']",)
    options = [part for setting in fitting for part in ("-s", setting)]
    lines = refused("run", file, "-q", "--json", *options, folder=folder)
    assert lines[0].startswith("error: stage prepare failed: ")
    assert "no messages" in lines[0]
    rows = json.loads(headstart("status", file, "--json", folder=folder).stdout)
    assert [row["state"] for row in rows[1:]] == ["missing"] * 6


# --- optional dependencies ---

WITHOUT = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {missing}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Missing())
sys.argv = ["headstart", *sys.argv[1:]]
from headstart.cli import main
main()
"""


def without(missing: set[str], *arguments: object, folder: Path) -> subprocess.CompletedProcess[str]:
    return ended([sys.executable, "-c", WITHOUT.format(missing=missing), *map(str, arguments)], folder)


def test_a_base_install_does_what_it_can_and_names_the_extra(file: Path, tmp_path: Path) -> None:
    for arguments in (["--help"], ["status", file], ["config", file]):
        assert without(set(cli.EXTRAS), *arguments, folder=tmp_path).returncode == 0
    for verb in ("run", "capture", "export"):
        end = without(set(cli.EXTRAS), verb, file, "-q", folder=tmp_path)
        assert (end.returncode, end.stdout) == (2, "")
        what, do = end.stderr.splitlines()
        assert what.startswith("error: ")
        assert what.endswith(" is not installed")
        assert do == "  do: in the folder of headstart's sources: pip install -e '.[train]'"


def test_extras_are_those_of_the_package() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    named = {extra: {re.split("[<>=]", item)[0] for item in items} for extra, items in project[OPTIONAL].items()}
    assert {name for name, extra in cli.EXTRAS.items() if extra == "train"} == named["train"]
    assert {name for name, extra in cli.EXTRAS.items() if extra == "report"} == named["report"] - named["train"]


# --- interruption ---

WAIT = """
import signal, sys, time, types
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell that started the tests in the background ignores it
stage = types.ModuleType("prepare")
def run(context):
    print("waiting", flush=True)
    time.sleep(60)
stage.run = run
sys.modules["headstart.stages.prepare"] = stage
sys.argv = ["headstart", *sys.argv[1:]]
from headstart.cli import main
main()
"""


@pytest.mark.slow
def test_ctrl_c_ends_with_130_and_says_that_it_continues(file: Path, tmp_path: Path) -> None:
    _with_target(file)
    (tmp_path / "none.jsonl").write_text('{"prompt": "Why?"}\n')
    command = [sys.executable, "-c", WAIT, "prepare", str(file), "-q", "-s", "data.max_length=256"]
    with subprocess.Popen(command, stdout=-1, stderr=-1, text=True, cwd=tmp_path) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "waiting\n"
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=20)
    assert process.returncode == 130
    assert told == "interrupted; the same command continues where this one stopped\n"


def test_a_refused_run_leaves_the_directory_as_it_was(tmp_path: Path) -> None:
    """`status` would else tell of settings that nothing was made with."""
    target = save_tokenizer(save_llama(tmp_path / "target"))
    (tmp_path / "a.jsonl").write_text('{"prompt": "Why?"}\n')
    (tmp_path / "run.toml").write_text(
        f'[target]\nmodel = "{target}"\n[data]\nsources = ["a.jsonl"]\nmax_length = 256\n'
    )
    refused("run", "run.toml", "-s", "draft.head_dim=15", folder=tmp_path)
    assert not (tmp_path / "runs").exists()


def test_a_target_that_transformers_rejects_is_told_in_lines(tmp_path: Path) -> None:
    target = save_tokenizer(save_llama(tmp_path / "target"))
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, "rope_parameters": [1]}))
    (tmp_path / "a.jsonl").write_text('{"prompt": "Why?"}\n{"prompt": "How?"}\n')
    (tmp_path / "run.toml").write_text(
        f'[target]\nmodel = "{target}"\n[data]\nsources = ["a.jsonl"]\nmax_length = 256\n'
    )
    (said, *_) = refused("prepare", "run.toml", "-q", folder=tmp_path)
    assert str(target) in said
    assert "rope_parameters" in said
