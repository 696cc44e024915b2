"""What `inspect` reads from configurations: hand-checked facts of real ones, and small ones for every rule."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import CONFIG_MAPPING

import fixtures_models
from headstart.errors import UserError
from headstart.target.anatomy import Anatomy, anatomy_of, inspect
from headstart.target.defaults import DEFAULTS

REAL = Path(__file__).parents[2] / "shared" / "configs" / "targets"

SIZES = {"num_hidden_layers": 8, "hidden_size": 64, "vocab_size": 100, "num_attention_heads": 4}

# By eye from the files: text_path, layers, width, vocabulary, heads, kv heads, head_dim, norm, tied, mla, moe.
CHECKED: dict[str, tuple[Any, ...]] = {
    "MiniMaxAI--MiniMax-M2.5": ("", 62, 3072, 200064, 48, 8, 128, "rms", False, False, True),
    "OpenGVLab--InternVL3-1B": ("llm_config", 24, 896, 151674, 14, 2, 64, "rms", False, False, False),
    "Qwen--Qwen2.5-VL-7B-Instruct": ("", 28, 3584, 152064, 28, 4, 128, "rms", False, False, False),
    "Qwen--Qwen3-0.6B": ("", 28, 1024, 151936, 16, 8, 128, "rms", True, False, False),
    "Qwen--Qwen3-30B-A3B": ("", 48, 2048, 151936, 32, 4, 128, "rms", False, False, True),
    "Qwen--Qwen3-32B-FP8": ("", 64, 5120, 151936, 64, 8, 128, "rms", False, False, False),
    "Qwen--Qwen3-Next-80B-A3B__transformers-5.24-default": (
        *("", 48, 2048, 151936, 16, 2, 256),
        *("rms_offset", False, False, True),
    ),
    "Qwen--Qwen3-VL-8B-Instruct": ("text_config", 36, 4096, 151936, 32, 8, 128, "rms", False, False, False),
    "Qwen--Qwen3.5-27B": ("text_config", 64, 5120, 248320, 24, 4, 256, "rms_offset", False, False, False),
    "deepseek-ai--DeepSeek-V3": ("", 61, 7168, 129280, 128, 128, 192, "rms", False, True, True),
    "google--gemma-3-12b-it": ("text_config", 48, 3840, 262208, 16, 8, 256, "rms_offset", True, False, False),
    "llava-hf--llava-1.5-7b-hf__transformers-5.24-default": (
        *("text_config", 32, 4096, 32000, 32, 32, 128),
        *("rms", False, False, False),
    ),
    "meta-llama--Meta-Llama-3.1-8B": ("", 32, 4096, 128256, 32, 8, 128, "rms", False, False, False),
    "mistralai--Mixtral-8x7B-v0.1": ("", 32, 4096, 32000, 32, 8, 128, "rms", False, False, True),
    "moonshotai--Kimi-K2-Instruct": ("", 61, 7168, 163840, 64, 64, 192, "rms", False, True, True),
    "moonshotai--Kimi-K2.5": ("text_config", 61, 7168, 163840, 64, 64, 192, "rms", False, True, True),
    "nvidia--Gemma-4-31B-IT-NVFP4": ("text_config", 60, 5376, 262144, 32, 16, 256, "rms", True, False, False),
    "openai--gpt-oss-20b": ("", 24, 2880, 201088, 64, 8, 64, "rms", False, False, True),
    "zai-org--GLM-5": ("", 78, 6144, 154880, 64, 64, 256, "rms", False, True, True),
}


@pytest.mark.skipif(not REAL.is_dir(), reason="the collected configurations are not here")
@pytest.mark.parametrize("name", CHECKED)
def test_real_configurations(name: str) -> None:
    found = inspect(REAL / f"{name}.json")
    wanted = CHECKED[name]
    sizes = (found.num_layers, found.hidden_size, found.vocab_size, found.num_heads, found.num_kv_heads, found.head_dim)
    assert (found.text_path, *sizes, found.norm, found.tied_head, found.mla, found.moe) == wanted
    assert set(found.evidence) == set(Anatomy.__dataclass_fields__) - {"evidence"}


@pytest.mark.skipif(not REAL.is_dir(), reason="the collected configurations are not here")
def test_the_story_is_seen_before_anything_is_loaded() -> None:
    kimi = inspect(REAL / "moonshotai--Kimi-K2.5.json")
    assert kimi.wrapper
    assert kimi.layers_path == "language_model.model.layers"
    assert kimi.architecture == "KimiK25ForConditionalGeneration"
    assert kimi.evidence["num_layers"] == "text_config.num_hidden_layers"
    assert kimi.quantization == "compressed-tensors pack-quantized"
    assert kimi.eos_ids == (163585,)
    assert kimi.rope_scaling is not None
    assert kimi.rope_scaling["type"] == "yarn"


@pytest.mark.skipif(not REAL.is_dir(), reason="the collected configurations are not here")
def test_every_real_configuration_can_be_read() -> None:
    for file in REAL.glob("*.json"):
        found = inspect(file)
        assert None not in (found.num_layers, found.hidden_size, found.vocab_size, found.rope_theta), file.name


@pytest.mark.parametrize("kind", fixtures_models.KINDS)
def test_agrees_with_the_loaded_model(kind: str, tmp_path: Path) -> None:
    folder = fixtures_models.KINDS[kind](tmp_path)
    found = inspect(folder)
    padded = 640 if kind == "padvocab" else 512
    layers = {"shallow": 4, "gemma": 4, "granite": 3, "cohere": 3}.get(kind, 7)
    assert (found.num_layers, found.hidden_size, found.vocab_size) == (layers, 64, padded)
    assert (found.num_heads, found.num_kv_heads) == (4, 2)
    assert found.head_dim == (32 if kind == "hd" else 16)
    assert found.tied_head == (kind in ("tied", "gemma", "cohere"))
    assert found.norm == {"gemma": "rms_offset", "cohere": "layer"}.get(kind, "rms")
    assert found.softcap == (30.0 if kind == "gemma" else None)
    assert found.logit_scale == pytest.approx({"cohere": 3.0, "granite": 2.5}.get(kind))
    assert (found.wrapper, found.text_path) == ((True, "text_config") if kind == "wrapper" else (False, ""))
    assert found.eos_ids == (2,)


@pytest.mark.parametrize("model_type", DEFAULTS)
def test_family_defaults_are_those_of_transformers(model_type: str) -> None:
    theirs = CONFIG_MAPPING[model_type]().to_dict()
    ours = dict(DEFAULTS[model_type])
    rope = theirs["rope_parameters"]
    assert ours.pop("rope_theta") == rope.get("full_attention", rope)["rope_theta"]
    assert ours == {key: theirs[key] for key in ours}
    read = anatomy_of({"text_config": {"model_type": model_type}})
    kv_heads, head_dim = theirs.get("num_key_value_heads"), theirs.get("head_dim")
    assert read.num_kv_heads == (kv_heads or theirs["num_attention_heads"])
    assert read.head_dim == (head_dim or theirs["hidden_size"] // theirs["num_attention_heads"])


@pytest.mark.parametrize(
    ("config", "path"),
    [
        (SIZES, ""),
        ({"text_config": SIZES, "vision_config": {**SIZES, "num_hidden_layers": 99}}, "text_config"),
        ({"hidden_size": 64, "llm_config": SIZES}, "llm_config"),
        (
            {"thinker_config": {"text_config": SIZES, "audio_config": SIZES}, "talker_config": SIZES},
            "thinker_config.text_config",
        ),
        ({"language_config": SIZES}, "language_config"),
        ({"odd_name": SIZES}, "odd_name"),
        ({"n_layer": 8, "n_embd": 64, "vocab_size": 100, "n_head": 4}, ""),
        ({"num_layers": 8, "d_model": 64, "padded_vocab_size": 100, "n_heads": 4}, ""),
    ],
)
def test_finds_the_text_model_by_structure(config: dict[str, Any], path: str) -> None:
    found = anatomy_of(config)
    assert found.text_path == path
    assert (found.num_layers, found.hidden_size, found.vocab_size, found.num_heads) == (8, 64, 100, 4)
    assert (found.num_kv_heads, found.head_dim) == (4, 16)


@pytest.mark.parametrize(
    ("rope", "theta", "scaling"),
    [
        ({"rope_theta": 5e5}, 5e5, None),
        ({"rope_theta": 5e5, "rope_scaling": None}, 5e5, None),
        ({"rope_theta": 1e4, "rope_scaling": {"type": "yarn", "factor": 4}}, 1e4, {"type": "yarn", "factor": 4}),
        ({"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}, 1e6, None),
        (
            {"rope_parameters": {"rope_theta": 1e6, "rope_type": "linear", "factor": 8}},
            1e6,
            {"rope_type": "linear", "factor": 8},
        ),
        (
            {
                "rope_parameters": {
                    "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
                    "full_attention": {"rope_theta": 1e6, "rope_type": "linear", "factor": 8},
                }
            },
            1e6,
            {"rope_type": "linear", "factor": 8},
        ),
        ({"rotary_emb_base": 10000}, 10000, None),
        ({}, None, None),
    ],
)
def test_both_generations_of_rope_keys(rope: dict[str, Any], theta: float | None, scaling: dict | None) -> None:
    found = anatomy_of(SIZES | rope)
    assert (found.rope_theta, found.rope_scaling) == (theta, scaling)


def test_what_is_not_known_is_said_to_be_unknown() -> None:
    found = anatomy_of(SIZES | {"model_type": "newcomer"})
    assert found.norm == "unknown"
    unknown = {fact for fact, evidence in found.evidence.items() if "unknown" in evidence}
    assert {"norm", "rms_norm_eps", "rope_theta", "tied_head", "dtype", "architecture", "eos_ids"} <= unknown
    assert (found.rms_norm_eps, found.tied_head, found.dtype, found.eos_ids) == (None, None, None, ())


def test_an_explicit_null_is_not_the_default() -> None:
    assert anatomy_of(SIZES | {"model_type": "gemma2"}).softcap == 30.0
    assert anatomy_of(SIZES | {"model_type": "gemma2", "final_logit_softcapping": None}).softcap is None


def test_ends_come_from_every_place(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"eos_token_id": [1, 106], "text_config": SIZES | {"eos_token_id": 1}})
    )
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 50}))
    found = inspect(tmp_path)
    assert found.eos_ids == (1, 50, 106)
    assert "generation_config.json" in found.evidence["eos_ids"]
    assert inspect(tmp_path / "config.json") == found


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "holds a list"),
        ("{}", "describes no language model"),
        (
            '{"vision_config": {"num_hidden_layers": 2, "hidden_size": 8, "vocab_size": 9}}',
            "describes no language model",
        ),
    ],
)
def test_files_that_are_no_configuration(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(UserError, match=message):
        inspect(tmp_path)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot read"):
        inspect(tmp_path)


def test_needs_neither_torch_nor_transformers() -> None:
    code = "import sys, headstart.target.anatomy; sys.exit(bool({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
