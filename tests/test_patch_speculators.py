"""`headstart patch-speculators` on the released files of speculators 0.3.0, 0.4.0 and 0.4.0.1."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import subprocess
import sys
import venv
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

import fixtures_speculators as stand
from headstart.cli import app
from headstart.errors import UserError
from headstart.patches import environment, releases, speculators, splice
from headstart.patches.environment import Installed

VERSIONS = ("0.3.0", "0.4.0", "0.4.0.1")
TOOL = Path(__file__).resolve().parent.parent / "tools" / "old_speculators.py"
IDS = [1, 3, 5]


@pytest.fixture(scope="session")
def released() -> dict[str, Path]:
    """The folder of each release as its wheel has it, from the registry by name."""
    done = subprocess.run([sys.executable, str(TOOL)], capture_output=True, text=True, check=True)
    rows = [line.split("\t") for line in done.stdout.splitlines()]
    return {version: Path(folder) for version, folder in rows}


@pytest.fixture(scope="session", params=VERSIONS)
def version(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def original(released: dict[str, Path], version: str) -> bytes:
    return (released[version] / "speculators" / environment.FILE).read_bytes()


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> dict[str, ModuleType]:
    return stand.installed_fakes(monkeypatch)


@pytest.fixture(scope="session")
def text(released: dict[str, Path], version: str) -> str:
    """The patched file."""
    original = (released[version] / "speculators" / environment.FILE).read_bytes()
    return speculators.patched(original, environment.FILE).decode()


@pytest.fixture
def worker(text: str, fakes: dict[str, ModuleType]) -> ModuleType:
    """The patched file as a module."""
    return stand.load(text)


@pytest.fixture
def installed(released: dict[str, Path], version: str, tmp_path: Path) -> Installed:
    """A copy that may be changed, found as it is in an environment."""
    site = Path(shutil.copytree(released[version], tmp_path / "site packages"))
    return Installed("python", site / "speculators" / environment.FILE, version, "0.16.0")


def _patch(installed: Installed, **options: bool) -> list[str]:
    change = speculators.patching(installed, **options)
    change.apply()
    return speculators.told(installed, change)


# The file


def test_each_release_is_known_by_its_bytes(original: bytes, version: str) -> None:
    assert speculators.kind_of(original) == "original"
    assert releases.known(speculators._sha256(original)) == releases.of_version(version)


def test_the_patched_file_compiles_and_is_clean(original: bytes, tmp_path: Path) -> None:
    file = tmp_path / "custom_worker.py"
    file.write_bytes(speculators.patched(original, file))
    compile(file.read_text(), str(file), "exec")
    for command in (("check", "--ignore", "RUF100"), ("format", "--check")):
        subprocess.run([sys.executable, "-m", "ruff", *command, "--isolated", "--no-cache", str(file)], check=True)
    assert "headstart" not in splice.template()


def test_patching_twice_changes_nothing(installed: Installed) -> None:
    said = _patch(installed)
    assert said[-1] == "Patched custom_worker.py to handle multimodal wrappers"
    before = installed.file.read_bytes(), installed.file.stat().st_mtime_ns, installed.backup.stat().st_mtime_ns
    again = _patch(installed)
    assert again[-1] == "nothing was changed: custom_worker.py is patched already"
    assert before == (
        installed.file.read_bytes(),
        installed.file.stat().st_mtime_ns,
        installed.backup.stat().st_mtime_ns,
    )


def test_revert_restores_bytes_and_mode(installed: Installed, original: bytes) -> None:
    installed.file.chmod(0o640)
    _patch(installed)
    assert installed.backup.read_bytes() == original
    assert stat.S_IMODE(installed.file.stat().st_mode) == 0o640
    speculators.reverting(installed).apply()
    assert installed.file.read_bytes() == original
    assert stat.S_IMODE(installed.file.stat().st_mode) == 0o640
    assert sorted(path.name for path in installed.file.parent.iterdir() if path.name.startswith("custom")) == [
        "custom_worker.py"
    ]
    assert "is the original" in speculators.told(installed, speculators.reverting(installed))[-1]


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES])
def test_a_place_that_cannot_be_written(code: int, installed: Installed, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(source: object, target: object) -> None:
        raise OSError(code, os.strerror(code), str(target))

    monkeypatch.setattr(shutil, "copy2", refuse)
    before = installed.file.read_bytes()
    with pytest.raises(UserError, match="cannot be written"):
        _patch(installed)
    assert installed.file.read_bytes() == before
    assert [path.name for path in installed.file.parent.glob("*custom*")] == ["custom_worker.py"]


def test_a_hard_link_into_a_package_cache_is_not_written_through(installed: Installed, original: bytes) -> None:
    cache = installed.file.with_name("cached")
    os.link(installed.file, cache)
    _patch(installed)
    assert cache.read_bytes() == original


def test_the_diff_is_what_patch_applies(installed: Installed, tmp_path: Path) -> None:
    change = speculators.patching(installed)
    (tmp_path / "custom_worker.py").write_bytes(change.before)
    subprocess.run(["patch", "-p1", "--quiet"], input=change.diff, text=True, cwd=tmp_path, check=True)
    assert (tmp_path / "custom_worker.py").read_bytes() == change.after


def test_unknown_contents_are_refused_unless_forced(installed: Installed, original: bytes) -> None:
    other = original.replace(b"import logging\n", b"import logging\n\nMINE = 1\n", 1)
    installed.file.write_bytes(other)
    with pytest.raises(UserError, match="not as any known release") as refused:
        speculators.patching(installed)
    assert all(release.sha256[:16] in str(refused.value) for release in releases.RELEASES)
    _patch(installed, force=True)
    assert b"MINE = 1" in installed.file.read_bytes()
    assert _patch(installed)[-1].startswith("nothing was changed")
    speculators.reverting(installed).apply()
    assert installed.file.read_bytes() == other


def test_force_needs_a_place_for_it(installed: Installed) -> None:
    installed.file.write_text("import os\n\nprint(os.name)\n")
    with pytest.raises(UserError, match="HiddenStatesWorkerExtension is not in it"):
        speculators.patching(installed, force=True)


def test_a_patched_file_that_was_edited(installed: Installed, original: bytes) -> None:
    _patch(installed)
    written = installed.file.read_bytes()
    installed.file.write_bytes(written + b"# mine\n")
    for action in (speculators.patching, speculators.reverting):
        with pytest.raises(UserError, match="--force"):
            action(installed)
    _patch(installed, force=True)
    assert installed.file.read_bytes() == written
    installed.file.write_bytes(written + b"# mine\n")
    speculators.reverting(installed, force=True).apply()
    assert installed.file.read_bytes() == original


def test_what_an_older_headstart_wrote_is_made_anew(
    installed: Installed, original: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    older = splice.template().replace("_CHECKED_ROWS = 256", "_CHECKED_ROWS = 64")
    with monkeypatch.context() as patches:
        patches.setattr(splice, "template", lambda: older)
        _patch(installed)
    assert b"_CHECKED_ROWS = 64" in installed.file.read_bytes()
    assert _patch(installed)[-1] == speculators.DONE
    assert b"_CHECKED_ROWS = 256" in installed.file.read_bytes()
    speculators.reverting(installed).apply()
    assert installed.file.read_bytes() == original


def test_a_backup_that_is_gone_or_not_ours(installed: Installed) -> None:
    _patch(installed)
    installed.backup.write_bytes(b"something else")
    with pytest.raises(UserError, match="not what was kept"):
        speculators.reverting(installed)
    assert _patch(installed)[-1].startswith("nothing was changed")
    installed.backup.unlink()
    with pytest.raises(UserError, match="no backup") as refused:
        speculators.reverting(installed)
    assert f"speculators=={installed.version}" in str(refused.value)


def test_a_backup_of_an_earlier_release_gives_way(installed: Installed, original: bytes) -> None:
    installed.backup.write_bytes(b"what an earlier release had")
    _patch(installed)
    assert installed.backup.read_bytes() == original


# The command


@pytest.fixture
def python(released: dict[str, Path], tmp_path: Path) -> Callable[[str], str]:
    """Makes an environment with one release in it; gives its interpreter."""

    def make(version: str) -> str:
        venv.create(tmp_path / "an env", with_pip=False, symlinks=True)
        site = next((tmp_path / "an env").glob("lib/python*/site-packages"))
        shutil.copytree(released[version], site, dirs_exist_ok=True)
        return str(tmp_path / "an env" / "bin" / "python")

    return make


def _headstart(*arguments: str) -> tuple[str, str]:
    done = CliRunner().invoke(app, ["patch-speculators", *arguments], catch_exceptions=False)
    assert done.exit_code == 0
    return done.stdout, done.stderr


def test_the_command_in_an_environment_of_its_own(python: Callable, version: str, original: bytes, monkeypatch) -> None:
    path = python(version)
    monkeypatch.chdir(Path(path).parent)
    Path("speculators").mkdir()  # what stands beside the caller is not what is installed
    file = environment.locate(path).file
    diff, note = _headstart("--python", path, "--dry-run")
    assert diff.startswith("--- a/custom_worker.py\n+++ b/custom_worker.py\n")
    assert note == f"nothing was written: {file}\n"
    assert file.read_bytes() == original
    out, _ = _headstart("--python", path)
    lines = out.splitlines()
    assert lines[0] == f"environment: {path}: speculators {version}, vLLM not installed"
    assert lines[1] == f"file: {file}"
    assert lines[-1] == "Patched custom_worker.py to handle multimodal wrappers"
    assert _headstart("--python", path, "--dry-run")[0] == ""
    assert "restored" in _headstart("--python", path, "--revert")[0]
    assert file.read_bytes() == original


def test_an_environment_without_it(tmp_path: Path) -> None:
    venv.create(tmp_path / "empty", with_pip=False, symlinks=True)
    with pytest.raises(UserError, match="not installed"):
        environment.locate(str(tmp_path / "empty" / "bin" / "python"))
    with pytest.raises(UserError, match="does not answer as a Python"):
        environment.locate(str(tmp_path / "nothing"))
    with pytest.raises(UserError, match=r"has no custom_worker\.py"):  # ours has a newer speculators, as an oracle
        environment.locate()


@pytest.mark.parametrize(("version", "vllm", "said"), [
    ("0.3.0", "0.16.0", "runs on vLLM 0.11.0, not on 0.16.0; that of 0.4.0.1 does"),
    ("0.3.0", "0.11.2", "runs on vLLM 0.11.0, not on 0.11.2"),
    ("0.4.0", "0.17.1", "runs on vLLM 0.12 to 0.16, not on 0.17.1"),
])  # fmt: skip
def test_a_generator_that_this_vllm_does_not_take(version: str, vllm: str, said: str) -> None:
    assert said in releases.not_mended(version, vllm)[0]


@pytest.mark.parametrize(("version", "vllm"), [("0.3.0", "0.11.0"), ("0.4.0", "0.16.0"), ("0.4.0.1", "0.12.0+cpu")])
def test_a_generator_that_this_vllm_takes(version: str, vllm: str) -> None:
    assert not any("runs on vLLM" in line for line in releases.not_mended(version, vllm))


# What it captures


@pytest.mark.parametrize("shape", stand.SHAPES)
@pytest.mark.parametrize("kind", ["pair", "inside", "none", "tensor"])
def test_states_are_the_streams_after_the_layers(worker: ModuleType, shape: str, kind: str) -> None:
    model = stand.shaped(shape, kind)
    found = _states(worker, model)
    _same(found, [stand.decoder_of(model).truth[index] for index in IDS])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["pair", "inside"])
def test_half_precision_does_not_blur_the_self_check(worker: ModuleType, kind: str, dtype: torch.dtype) -> None:
    model = stand.shaped("Kimi-K2.5 of 0.16", kind).to(dtype)
    engine = stand.Engine(worker, model)
    engine.setup(IDS)
    found = engine.states(200)
    assert found[0].dtype == dtype
    _same(found, [engine.decoder.truth[index] for index in IDS])


def test_any_layers_in_any_order_come_by_rising_id(worker: ModuleType) -> None:
    engine = stand.Engine(worker, stand.shaped("Kimi-K2.5 of 0.16"))
    engine.setup([4, 0, 2])
    _same(engine.states(), [engine.decoder.truth[index] for index in (0, 2, 4)])


def test_the_models_own_output_stays(worker: ModuleType) -> None:
    model = stand.shaped("Qwen-VL")
    tokens, positions = torch.arange(4), torch.arange(4.0)
    with torch.inference_mode():
        before = model(tokens, positions)
        stand.Engine(worker, model).setup(IDS)
        assert torch.equal(model(tokens, positions), before)


def test_setting_up_again_replaces_the_hooks(worker: ModuleType) -> None:
    engine = stand.Engine(worker, stand.shaped("Llama"))
    engine.setup([0, 1, 2])
    engine.setup([4])
    _same(engine.states(), [engine.decoder.truth[4]])


def test_rows_go_to_their_requests_over_chunks(worker: ModuleType) -> None:
    engine = stand.Engine(worker, stand.shaped("Kimi-K2.5 of 0.16"))
    engine.setup([2])
    truth: list[Tensor] = []
    engine.model.register_forward_hook(lambda *_: truth.append(engine.decoder.truth[2]))
    found = engine.run({"a": 3, "b": 4}, {"b": 2, "c": 1})
    if isinstance(found, list):  # 0.3: all rows as they came
        _same(found, [torch.cat(truth)])
    else:
        assert found.keys() == {"a", "b", "c"}
        _same([found["a"][0], found["c"][0]], [truth[0][:3], truth[1][2:]])
        _same(found["b"], [torch.cat([truth[0][3:], truth[1][:2]])])


FAULTS: list[tuple[str, str, dict, str]] = [
    ("Kimi-K2.5 of 0.15", "pair", {}, "0.3 0.4"),
    ("Kimi-K2.5 of 0.16", "pair", {}, "0.3"),
    ("Llama", "pair", {"embed": "embed_input_ids"}, "0.3"),
    ("Llama", "pair", {"embed": "get_input_embeddings"}, "0.4"),
    ("Llama", "pair", {"scaling": 0.7}, "0.3 0.4"),
    ("Llama", "tensor", {}, "0.3 0.4"),
    ("Llama", "none", {}, "0.3 0.4"),
    ("Llama", "inside", {}, "0.3 0.4"),
]


@pytest.mark.parametrize(("shape", "kind", "decoder", "fails"), FAULTS)
def test_what_the_released_file_cannot_the_patched_one_can(
    original: bytes, worker: ModuleType, version: str, shape: str, kind: str, decoder: dict, fails: str
) -> None:
    """What is said to be mended was broken: an error, or states that are wrong."""
    made = partial(stand.shaped, shape, kind, **decoder)
    assert _is_right(worker, made)
    assert _is_right(stand.load(original.decode()), made) == (version[:3] not in fails)


def _is_right(module: ModuleType, made: Callable[[], torch.nn.Module]) -> bool:
    """Whether the states are those of a model of the same weights that nothing was done to."""
    try:
        found = _states(module, made())
    except (AttributeError, TypeError, ValueError):
        return False
    untouched = stand.Engine(module, made())
    untouched.forward(stand.ROWS)
    return all(torch.equal(state, untouched.decoder.truth[index]) for state, index in zip(found, IDS, strict=True))


def _states(module: ModuleType, model: torch.nn.Module) -> list[Tensor]:
    engine = stand.Engine(module, model)
    engine.setup(IDS)
    return engine.states()


# What it refuses


@pytest.mark.parametrize("model", [
    stand.CausalLM(stand.Decoder(layers="blocks")),
    stand.ToldWrapper(stand.CausalLM(stand.Decoder(layers="h"))),
])  # fmt: skip
def test_a_model_without_layers(worker: ModuleType, model: torch.nn.Module) -> None:
    with pytest.raises(AttributeError) as refused:
        stand.Engine(worker, model).setup(IDS)
    said = str(refused.value)
    assert type(model).__name__ in said
    assert all(place in said for place in ("language_model.model", "model.language_model", "language_model", "model"))
    assert ("get_language_model()" in said) == hasattr(model, "get_language_model")
    assert "embed_tokens" in said or "lm_head" in said  # attributes that exist
    assert any(f"{name} (6 x Layer)" in said for name in ("model.blocks", "language_model.model.h"))


def test_two_stacks_that_tie(worker: ModuleType) -> None:
    model = torch.nn.Module()
    model.high, model.low = stand.Decoder(), stand.Decoder()
    with pytest.raises(AttributeError, match=r"high.layers \(6 x Layer\), low.layers \(6 x Layer\)"):
        stand.Engine(worker, model).setup(IDS)


def _between(decoder: stand.Decoder) -> None:
    """Something of its own between the last layer and the final norm."""
    decoder.norm.register_forward_pre_hook(lambda _, args: (torch.sin(args[0]), *args[1:]))


def _twice(decoder: stand.Decoder) -> None:
    decoder.layers.append(decoder.layers[5])
    decoder.end_layer = 7


def _not_finite(decoder: stand.Decoder) -> None:
    torch.nn.init.constant_(decoder.layers[5].mlp.weight, float("nan"))


def _mixed(decoder: stand.Decoder) -> None:
    decoder.layers[3].register_forward_hook(lambda _layer, _args, out: (out[0] + out[1], None))


@pytest.mark.parametrize(("spoil", "said"), [
    (_between, "final norm does not tell"),
    (_twice, "ran twice"),
    (_not_finite, "final norm does not tell"),
    (_mixed, "Some layers return a residual"),
])  # fmt: skip
def test_states_that_would_be_wrong_stop_the_pass(worker: ModuleType, spoil: Callable, said: str) -> None:
    engine = stand.Engine(worker, stand.shaped("Kimi-K2.5 of 0.16"))
    spoil(engine.decoder)
    engine.setup([1, 3])
    with pytest.raises(RuntimeError, match=said):
        engine.states()


def test_rows_that_were_not_announced(worker: ModuleType) -> None:
    engine = stand.Engine(worker, stand.shaped("Llama"))
    engine.setup(IDS)
    if not hasattr(engine.worker, "_set_request_metadata"):
        return  # 0.3 announces nothing
    engine.worker._reset_capture()
    engine.worker._set_request_metadata({"a": 3, "b": 4})
    engine.batch.req_id_to_index = {"a": 0, "b": 1}
    with pytest.raises(RuntimeError, match="told apart"):
        engine.forward(8)
    engine.batch.req_id_to_index = {"a": 0}
    with pytest.raises(RuntimeError, match="not in the engine's batch"):
        engine.forward(7)


def test_a_warm_up_is_not_captured(worker: ModuleType) -> None:
    engine = stand.Engine(worker, stand.shaped("Llama"))
    engine.setup(IDS)
    engine.forward(9)
    captured = engine.worker._captured_states
    assert (captured is None) == hasattr(engine.worker, "_set_request_metadata")
    assert [len(state) for state in engine.states(4)] == [4, 4, 4]


def test_other_ranks_capture_nothing(worker: ModuleType, fakes: dict[str, ModuleType]) -> None:
    fakes["vllm.distributed"].rank.rank_in_group = 1
    engine = stand.Engine(worker, stand.shaped("Kimi-K2.5 of 0.16"))
    engine.setup(IDS)
    assert engine.run({"a": 3}) is None


def test_what_setup_refuses(worker: ModuleType) -> None:
    for layer_ids in ([], [6], [-1, 2]):
        with pytest.raises(ValueError, match="not within 0 to 5"):
            stand.Engine(worker, stand.shaped("Llama")).setup(layer_ids)
    with pytest.raises(ValueError, match="enforce_eager"):
        stand.Engine(worker, stand.shaped("Llama"), eager=False).setup(IDS)
    parted = stand.Engine(worker, stand.shaped("Llama"))
    parted.decoder.end_layer = 3
    with pytest.raises(ValueError, match="pipeline parallelism"):
        parted.setup(IDS)


def _same(found: list[Tensor], wanted: list[Tensor]) -> None:
    assert len(found) == len(wanted)
    for state, truth in zip(found, wanted, strict=True):
        torch.testing.assert_close(state, truth, rtol=0, atol=0)
