"""Opening a target: finding its layers, refusing what cannot be used, and where models come from."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
from torch import nn

import fixtures_models
from headstart.config import Target
from headstart.engines.base import Use
from headstart.engines.hooks import find_decoder
from headstart.engines.load import open_engine
from headstart.errors import UserError
from headstart.target import source


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fixtures_models.save_llama(tmp_path_factory.mktemp("llama"))


def opened(folder: Path, **changes: object) -> None:
    open_engine(Target.model_validate({"model": str(folder), **changes}), Use(64))


class TestFindingLayers:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.self_attn = nn.Linear(1, 1)
            self.experts = nn.ModuleList([nn.Linear(1, 1)] * 9)

    def tree(self, **lists: int) -> nn.Module:
        """A model with a list of `count` blocks at each path (`__` for a dot), a norm beside each."""
        root = nn.Module()
        for path, count in lists.items():
            owner = root
            *parents, name = path.split("__")
            for parent in parents:
                if not hasattr(owner, parent):
                    owner.add_module(parent, nn.Module())
                owner = owner.get_submodule(parent)
            owner.add_module(name, nn.ModuleList(self.Block() for _ in range(count)))
            owner.add_module("norm", nn.LayerNorm(1))
        return root

    @pytest.mark.parametrize(
        "path",
        ["model__layers", "language_model__model__layers", "transformer__h", "thinker__model__layers", "odd__things"],
    )
    def test_anywhere_outside_towers(self, path: str) -> None:
        model = self.tree(**{path: 4, "vision_tower__encoder__layers": 9, "audio__layers": 4, "visual__blocks": 6})
        assert find_decoder(model, None).path == path.replace("__", ".")
        assert find_decoder(model, 4).num_layers == 4

    def test_the_configured_number_decides(self) -> None:
        model = self.tree(model__layers=4, assistant__layers=6)
        assert find_decoder(model, 4).path == "model.layers"
        assert find_decoder(model, 6).path == "assistant.layers"

    def test_two_alike_are_an_error_that_names_both(self) -> None:
        model = self.tree(first__layers=4, second__layers=4)
        with pytest.raises(UserError, match=r"first.layers.*second.layers") as raised:
            find_decoder(model, 4)
        assert "target.layers_path" in str(raised.value)
        assert find_decoder(model, 4, "second.layers").path == "second.layers"

    def test_none_is_an_error_that_says_what_is_there(self) -> None:
        with pytest.raises(UserError, match="were not found") as raised:
            find_decoder(self.tree(vision__layers=4), 4)
        assert "vision.layers (4)" in str(raised.value)

    @pytest.mark.parametrize("path", ["model.layer", "model", "model.layers.0"])
    def test_a_given_path_must_be_a_list(self, path: str) -> None:
        with pytest.raises(UserError, match="leads to") as raised:
            find_decoder(self.tree(model__layers=2), 2, path)
        assert "model.layers" in str(raised.value)

    def test_a_missing_norm_is_an_error(self) -> None:
        model = self.tree(model__layers=2)
        del model.get_submodule("model").norm
        with pytest.raises(UserError, match=r"final norm beside model\.layers"):
            find_decoder(model, 2)


def test_a_missing_weight_stops_the_load(llama: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(llama / "model.safetensors")
    del tensors["model.layers.3.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((llama / "config.json").read_text())
    with pytest.raises(UserError, match=r"lacks 1 weights: model.layers.3.mlp.up_proj.weight"):
        opened(tmp_path)


def test_code_in_the_folder_is_not_run_unasked(llama: Path, tmp_path: Path) -> None:
    config = json.loads((llama / "config.json").read_text())
    config |= {
        "model_type": "newcomer",
        "auto_map": {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "code.py").write_text("raise SystemExit('this ran')")
    with pytest.raises(UserError, match="can only be loaded by code") as raised:
        opened(tmp_path)
    assert "target.trust_remote_code" in str(raised.value)


def test_an_encoder_decoder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "t5", "is_encoder_decoder": True}))
    with pytest.raises(UserError, match="encoder-decoder"):
        opened(tmp_path)


def test_a_model_without_a_language_head_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "clip_vision_model"}))
    with pytest.raises(UserError, match="no language model for clip_vision_model"):
        opened(tmp_path)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_attention_heads": "abc"}, "'num_attention_heads': .*expected int"),
        ({"rope_parameters": [1]}, "'rope_parameters': .*"),
        ({"rope_parameters": {"rope_type": "nope", "rope_theta": 1e4}}, "KeyError: 'nope'"),
        ({"rope_parameters": {"rope_type": "linear", "factor": "x", "rope_theta": 1e4}}, "TypeError: "),
        ({"hidden_act": "blah"}, "KeyError: 'blah'"),
        ({"model_type": "newcomer"}, "model type `newcomer`"),
        ({"model_type": ["llama"]}, "unhashable"),
        ({"quantization_config": [1]}, "'list' object"),
    ],
)
def test_what_transformers_rejects_is_a_clear_error(llama: Path, tmp_path: Path, changes: dict, said: str) -> None:
    """Whatever it raises; its own first line is told, and where it goes on after a colon, the second."""
    changed(llama, tmp_path, changes)
    with pytest.raises(UserError, match=f"{tmp_path} .*cannot be loaded: .*{said}") as raised:
        opened(tmp_path)
    assert "config.json" in str(raised.value.looked_for)
    assert raised.value.do


@pytest.mark.parametrize("value", [[1], "a"])
def test_a_text_model_that_is_no_object(llama: Path, tmp_path: Path, value: object) -> None:
    changed(llama, tmp_path, {"text_config": value})
    with pytest.raises(UserError, match="for its text model"):
        opened(tmp_path)


def test_a_target_without_architectures_opens_all_the_same(llama: Path, tmp_path: Path) -> None:
    changed(llama, tmp_path, {"architectures": None})
    opened(tmp_path)


def changed(llama: Path, folder: Path, changes: dict) -> None:
    """The weights of `llama` with other values in config.json."""
    (folder / "model.safetensors").symlink_to(llama / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(json.loads((llama / "config.json").read_text()) | changes))


def test_devices_that_are_not_here(llama: Path) -> None:
    for device in ("cuda:77", "toaster"):
        with pytest.raises(UserError, match="cannot be used"):
            opened(llama, device=device)


def test_loading_is_quiet(tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    folder = fixtures_models.save_wrapper(tmp_path)
    capfd.readouterr()
    with caplog.at_level(logging.DEBUG):
        opened(folder)
    assert capfd.readouterr() == ("", "")


def test_sources(llama: Path, tmp_path: Path) -> None:
    assert source.resolve(str(llama)) == llama
    with pytest.raises(UserError, match="there is no model in"):
        source.resolve(str(tmp_path))
    with pytest.raises(UserError, match="there is no model in"):
        source.resolve("./nowhere")
    with pytest.raises(UserError, match="the model nobody/nothing cannot be had"):
        source.resolve("nobody/nothing")


def test_a_fingerprint_sees_changed_weights(tmp_path: Path) -> None:
    folder = fixtures_models.save_shallow(tmp_path)
    before = source.fingerprint(folder)
    assert source.fingerprint(folder) == before
    weights = folder / "model.safetensors"
    changed = bytearray(weights.read_bytes())
    changed[-1] ^= 1
    weights.write_bytes(changed)
    assert source.fingerprint(folder) != before
