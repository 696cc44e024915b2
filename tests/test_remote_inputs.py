"""What a run takes along to another machine: data files, images, settings; and the package and agent themselves."""

from __future__ import annotations

import ast
import json
import shutil
import sys
import zipfile
from pathlib import Path

import pytest

from headstart import config, files
from headstart.errors import UserError
from headstart.remote import inputs, ssh, toml, wheel

ODD = 'it\'s "odd" $HOME `id` ünï'


def write_run(folder: Path, text: str) -> config.Run:
    (folder / "run.toml").write_text(text)
    return config.load(folder / "run.toml")


def shipped(found: inputs.Inputs, folder: Path) -> config.Run:
    """The run as it is read where its files have been put."""
    for name, path in found.files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, folder / name)
    return write_run(folder, found.text)


def test_settings_survive_as_toml(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    run = write_run(
        tmp_path,
        '[target]\nmodel = "some/model"\n'
        'engine_options = {gpu_memory_utilization = 0.9, "odd key" = {deep = [1, "é\\u007f\\"\\\\"]}}\n'
        '[data]\nsources = ["sharegpt"]\nrole_aliases = {"my.bot" = "assistant"}\n'
        "[train]\nlearning_rate = 1e-5\nmax_steps = 7\n[evaluate]\ntemperatures = [0, 0.7]\n",
    )
    back = shipped(inputs.collect(run), tmp_path / "there")
    assert back == run.model_copy(update={"directory": str(tmp_path / "there" / "run")})


def test_toml_leaves_out_what_is_absent() -> None:
    assert toml.dumps({"a": 1, "b": None, "t": {"c": True, "d": None}}) == "a = 1\n\n[t]\nc = true\n"


def test_sources_stay_the_same_files_in_the_same_order(tmp_path: Path) -> None:
    here, other = tmp_path / ODD, tmp_path / "there [1]"
    for name in ("b/2.jsonl", "b/10.jsonl", "a/1.jsonl", "mine.jsonl", "other.jsonl"):
        (here / name).parent.mkdir(parents=True, exist_ok=True)
        (here / name).write_text(json.dumps({"prompt": name}) + "\n")
    other.mkdir()
    run = write_run(
        here,
        '[target]\nmodel = "some/model"\n[data]\nsources = ["mine.jsonl", "*/*.jsonl", "sharegpt", "/nowhere/there.jsonl"]\n'
        '[evaluate]\nprompts = ["other.jsonl", "mt_bench"]\n',
    )
    found = inputs.collect(run)
    assert sorted(path.name for path in found.files.values()) == [
        "1.jsonl",
        "10.jsonl",
        "2.jsonl",
        "mine.jsonl",
        "other.jsonl",
    ]
    (plain := tmp_path / "plain").mkdir()
    back = shipped(found, plain)
    for before, after in zip(run.data.sources, back.data.sources, strict=True):
        assert [path.read_bytes() for path in files.matching(before)] == [
            path.read_bytes() for path in files.matching(after)
        ]
    assert back.data.sources[2:] == ("sharegpt", "/nowhere/there.jsonl")
    assert back.evaluate.prompts[1] == "mt_bench"
    again = inputs.collect(
        run.model_copy(update={"data": run.data.model_copy(update={"sources": run.data.sources[::-1]})})
    )
    assert again.files == found.files


PNG = b"\x89PNG\r\n\x1a\n" + bytes(20)


def image_rows(*names: str) -> str:
    parts = [{"type": "image_url", "image_url": {"url": name}} for name in names]
    message = {"role": "user", "content": [{"type": "text", "text": "what is it?"}, *parts]}
    return json.dumps({"messages": [message], "path": "secret.png"}) + "\n"


def collect_images(folder: Path, text: str) -> list[str]:
    (folder / "data.jsonl").write_text(text)
    run = write_run(folder, '[target]\nmodel = "some/model"\n[data]\nsources = ["data.jsonl"]\n')
    return sorted(path.name for path in inputs.collect(run).files.values())


def test_images_that_rows_name_go_along(tmp_path: Path) -> None:
    for name in ("one.png", "deep/two.png", "three.png", "secret.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(PNG)
    text = image_rows("one.png", "deep/two.png", "gone.png", "https://web/x.png", "data:image/png;base64,AA==")
    assert collect_images(tmp_path, text) == ["data.jsonl", "one.png", "two.png"]
    beside = json.dumps([{"image": "three.png", "conversations": [{"from": "human", "value": "<image> what?"}]}])
    assert collect_images(tmp_path, beside) == ["data.jsonl", "three.png"]


@pytest.mark.parametrize("name", ["{here}/one.png", "../one.png", "file://{here}/one.png"])
def test_images_that_would_be_others_there_are_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "one.png").write_bytes(PNG)
    with pytest.raises(UserError, match="would be another file on another machine"):
        collect_images(tmp_path / "data", image_rows(name.format(here=tmp_path)))


def test_a_model_folder_is_shipped_only_when_asked(tmp_path: Path) -> None:
    (tmp_path / "model" / ".cache").mkdir(parents=True)
    for name in ("config.json", "model.safetensors", ".cache/lock"):
        (tmp_path / "model" / name).write_text(name)
    run = write_run(tmp_path, '[target]\nmodel = "model"\n[data]\nsources = ["sharegpt"]\n')
    kept = inputs.collect(run)
    assert (kept.model, kept.files) == (str(tmp_path / "model"), {})
    found = inputs.collect(run, ship_model=True)
    (tmp_path / "there").mkdir()
    back = shipped(found, tmp_path / "there")
    assert sorted(path.name for path in Path(back.target.model).iterdir()) == ["config.json", "model.safetensors"]


# --- the agent and the wheel travel ---


def test_the_agent_is_python_3_8_with_nothing_installed() -> None:
    for path in (Path(ssh.__file__).parent / "agent").glob("*.py"):
        tree = ast.parse(path.read_text(), feature_version=(3, 8))
        for node in ast.walk(tree):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            assert {name.partition(".")[0] for name in names} <= sys.stdlib_module_names
    assert ssh.pack() == ssh.pack()


def test_the_wheel_holds_the_package_and_its_needs(tmp_path: Path) -> None:
    (tmp_path / "1").mkdir()
    (tmp_path / "2").mkdir()
    built = wheel.build(tmp_path / "1")
    assert built.read_bytes() == wheel.build(tmp_path / "2").read_bytes()
    with zipfile.ZipFile(built) as archive:
        held = archive.namelist()
    assert {"headstart/cli.py", "headstart/recipes/demo.toml", "headstart/remote/agent/__main__.py"} <= set(held)
    light, full = wheel.requirements(built, ()), wheel.requirements(built, ("train", "report"))
    assert [wheel.package(need) for need in light] == ["pydantic", "rich", "typer"]
    assert {"torch", "matplotlib", "huggingface-hub", "typer"} <= {wheel.package(need) for need in full}
    assert "vllm" not in map(wheel.package, full)
