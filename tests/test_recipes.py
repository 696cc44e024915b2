"""The shipped recipes: each loads, doctor and estimate answer for it without a network, its comments hold."""

from __future__ import annotations

import json
import re
import resource
import subprocess
import sys
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from headstart import cli, config
from headstart.doctor import machine, subject
from headstart.drafts.shape import LatentShape
from headstart.engines.vllm.releases import Release
from headstart.estimate import counting, examine
from headstart.events import Events, duration, size
from headstart.target.layers import check_boundaries
from headstart.training.shape import shape_for

ROOT = Path(__file__).parents[1]
LINKS = ROOT / "recipes"
FOLDER = Path(str(resources.files("headstart").joinpath("recipes")))
PUBLISHED = Path(__file__).parent / "configs" / "targets"
NAMES = sorted(path.stem for path in FOLDER.glob("*.toml"))
BIG = [name for name in NAMES if name != "demo"]
GB = 10**9
H200 = machine.Gpu("NVIDIA H200", 141 * GB, 140 * GB)

# What doctor says of capture and serving: on vLLM 0.16.0, and on 0.32.0.
RUNGS = {
    "kimi-k2.5": (("hooks", "refused"), ("native", "native")),
    "kimi-k2.5-mla": (("hooks", "refused"), ("native", "native")),
    "qwen3-8b": (("hooks", "native"), ("native", "native")),
    "qwen3-30b-a3b": (("hooks", "native"), ("native", "native")),
    "qwen2.5-vl-7b": (("hooks", "native"), ("native", "native")),
}


@pytest.fixture(autouse=True)
def _eight_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on the machine that the largest recipe is for; nothing is fetched."""
    monkeypatch.setattr(machine, "gpus", lambda: (H200,) * 8)
    monkeypatch.setattr(machine, "room", lambda _: 4000 * GB)
    monkeypatch.setattr(Release, "for_cpus", property(lambda _: False))  # the vLLM here is a CPU build
    monkeypatch.setattr(counting, "template_of", lambda _: None)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    rows = ({"prompt": f"What happened on day {day}? " + "Tell it all. " * 20} for day in range(500))
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def headstart(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, dict[str, Any]]:
    code = cli.app([*map(str, arguments), "--json"], standalone_mode=False) or 0
    return code, json.loads(capsys.readouterr().out)


def test_every_recipe_is_in_the_folder_for_people() -> None:
    assert sorted(path.stem for path in LINKS.glob("*.toml")) == NAMES
    assert all((LINKS / f"{name}.toml").samefile(FOLDER / f"{name}.toml") for name in NAMES)
    assert set(RUNGS) == set(BIG)


def test_a_run_goes_beside_the_file_that_was_named() -> None:
    assert Path(config.load(LINKS / "kimi-k2.5.toml").directory) == LINKS / "runs" / "kimi-k2.5"


@pytest.mark.parametrize("name", BIG)
def test_every_line_is_explained(name: str) -> None:
    """A comment on each line, but in sections whose first line speaks for all, and on the model, which the file is about."""
    section = ""
    for line in (FOLDER / f"{name}.toml").read_text().splitlines():
        section = line if line.startswith("[") else section
        if re.match(r"\w+ = ", line) and "#" not in line:
            key = line.partition(" ")[0]
            assert "#" in section or key == "model", line


@pytest.mark.parametrize("name", BIG)
@pytest.mark.parametrize("version", [0, 1], ids=["0.16.0", "0.32.0"])
def test_doctor_says_how(name: str, version: int, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = headstart(capsys, "doctor", LINKS / f"{name}.toml", "--engine-version", ("0.16.0", "0.32.0")[version])
    assert (found["engine"]["capture"]["rung"], found["engine"]["serve"]["rung"]) == RUNGS[name][version]
    assert found["engine"]["capture"]["why"]
    stopped = [check for check in found["checks"] if check["verdict"] == "stop"]
    assert (code, stopped) == (0, [])


@pytest.mark.parametrize("name", BIG)
def test_estimate_adds_up(name: str, prompts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--hardware", "8xH200", "--answer-tokens", 300, "-s", f"data.sources=['{prompts}']")
    code, found = headstart(capsys, "estimate", "-q", LINKS / f"{name}.toml", *arguments)
    assert (code, found["fits"], found["work"]["conversations"]) == (0, True, 500)
    assert found["work"]["answer_tokens"] == 300 * 500
    stages = {stage["verb"]: stage for stage in found["stages"]}
    assert stages["capture"]["disk"] > 0.5 * found["disk"] or stages["train"]["peak"] > stages["capture"]["disk"]
    assert all(stage["memory"] < 0.9 * 141 * GB for stage in stages.values())
    assert 0.01 < found["seconds"] / 3600 < 24


@pytest.mark.parametrize("name", BIG)
def test_the_draft_fits_its_target(name: str) -> None:
    """Where the target has MLA, a draft of plain heads must not take its head dimensions."""
    found = subject.open_subject(str(LINKS / f"{name}.toml"))
    run, anatomy = found.run, found.anatomy
    assert run is not None
    assert check_boundaries(run.capture.aux_layers, anatomy.required("num_layers")) == run.capture.aux_layers
    assert run.capture.aux_layers == check_boundaries(None, anatomy.required("num_layers"))
    assert run.vocab.size == 32000
    if run.draft.attention == "mla":
        assert shape_for(run.draft, anatomy, run.capture.aux_layers, 32000).latent == LatentShape(
            1536, 512, 128, 64, 128
        )
    else:
        assert run.draft.head_dim == 128
    assert run.draft.ttt_steps >= run.evaluate.draft_tokens
    if not anatomy.mla:
        assert (run.draft.num_heads, run.draft.num_kv_heads) == (anatomy.num_heads, anatomy.num_kv_heads)
    assert run.draft.intermediate_size == anatomy.intermediate_size


def test_the_recipe_with_mla_is_the_other_but_for_its_draft() -> None:
    plain, latent = (config.load(FOLDER / f"{name}.toml") for name in ("kimi-k2.5", "kimi-k2.5-mla"))
    kept = {"directory", "draft", "export"}
    assert latent.model_dump(exclude=kept) == plain.model_dump(exclude=kept)
    same = set(type(plain.draft).model_fields) - {"attention", "num_heads", "num_kv_heads", "head_dim"}
    assert latent.draft.model_dump(include=same) == plain.draft.model_dump(include=same)


def test_only_a_few_experts_count_for_a_token(prompts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Published: 32 of 1,000 B in Kimi-K2.5, 3.3 of 30.5 B in Qwen3-30B-A3B; all of Qwen3-8B's 8.2 B."""
    sizes = {"kimi-k2.5": (1026, 32.6), "qwen3-30b-a3b": (30.5, 3.3), "qwen3-8b": (8.2, 8.2)}
    for name, expected in sizes.items():
        arguments = ("--hardware", "8xH200", "-s", f"data.sources=['{prompts}']")
        _, found = headstart(capsys, "estimate", "-q", LINKS / f"{name}.toml", *arguments)
        told = [found["parameters"][kind] / 1e9 for kind in ("total", "active")]
        assert told == pytest.approx(expected, rel=0.03)


def test_kimi_needs_gpus_that_are_large_enough(prompts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--hardware", "8xH100", "-s", f"data.sources=['{prompts}']")
    code, found = headstart(capsys, "estimate", "-q", LINKS / "kimi-k2.5.toml", *arguments)
    assert code == 3
    assert "target.tensor_parallel = 16, of the 8 GPUs there" in "\n".join(found["advice"])


@pytest.mark.parametrize("file", sorted((FOLDER / "targets").iterdir()), ids=lambda file: file.stem)
def test_shipped_configurations_are_the_published_ones(file: Path) -> None:
    """They answer for a hub id that is nowhere on this disk, for no revision but the newest, and say what they are."""
    found = subject.open_subject(file.stem.replace("--", "/"))
    assert "that headstart ships" in found.name
    assert found.folder is None
    if (PUBLISHED / file.name).exists():
        assert json.loads((PUBLISHED / file.name).read_text()) == json.loads(file.read_text())
    assert any(config.load(path).target.model == file.stem.replace("--", "/") for path in FOLDER.glob("*.toml"))


def test_doctor_answers_for_the_night_in_seconds() -> None:
    """Of a processor, imports included: this machine may be busy with other things."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "headstart", "doctor", "recipes/kimi-k2.5.toml", "--engine-version", "0.16.0"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 5
    told = " ".join(done.stdout.split())
    assert "hooks: KimiK25ForConditionalGeneration of vLLM 0.16.0 has no" in told
    assert "language_model.model.layers" in told


@pytest.mark.slow
@pytest.mark.parametrize("name", BIG)
def test_the_figures_in_the_comments(name: str) -> None:
    """Each `headstart estimate ...` of a comment with the line `-> ...` below it, over the real shipped prompts."""
    text = (FOLDER / f"{name}.toml").read_text()
    asked = re.findall(
        r"^# +headstart estimate \S+ --hardware (\S+) --answer-tokens (\d+)\n# +-> (.+)$", text, re.MULTILINE
    )
    assert asked
    for figures, tokens, said in asked:
        found = examine.examine(str(LINKS / f"{name}.toml"), (), figures, Events(quiet=True), float(tokens))
        memory = max(stage.memory for stage in found.stages)
        assert said == f"{size(found.disk)} of disk, {duration(found.seconds)}, {size(memory)} of a GPU's memory"
