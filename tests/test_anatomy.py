"""What `inspect` reads from configurations: hand-checked facts of real ones, and small ones for every rule."""

from __future__ import annotations

import json
import re
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
from headstart.target.tokenizer_files import TokenizerFiles
from headstart.training.shape import latent_of

SMALL = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 4, "vocab_size": 512}

REAL = Path(__file__).parent / "configs" / "targets"
COLLECTED = Path(__file__).parents[2] / "shared" / "configs" / "targets"  # these and more

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
    "moonshotai--Kimi-K2.5": ("text_config", 61, 7168, 163840, 64, 64, 192, "rms", False, True, True),
    "nvidia--Gemma-4-31B-IT-NVFP4": ("text_config", 60, 5376, 262144, 32, 16, 256, "rms", True, False, False),
    "nvidia--NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": ("", 52, 2688, 131072, 32, 2, 128, "rms", False, False, True),
    "openai--gpt-oss-20b": ("", 24, 2880, 201088, 64, 8, 64, "rms", False, False, True),
    "zai-org--GLM-5": ("", 78, 6144, 154880, 64, 64, 256, "rms", False, True, True),
}


# By eye from the files: what else is special about each of them; all others have none of it.
SPECIAL: dict[str, dict[str, Any]] = {
    "MiniMaxAI--MiniMax-M2.5": {
        "quantization": ("fp8 float8_e4m3fn", "quantization_config"),
        "eos_ids": (),
        "rope_theta": 5e6,
    },
    "OpenGVLab--InternVL3-1B": {
        "wrapper": True,
        "text_architecture": "Qwen2ForCausalLM",
        "eos_ids": (151643,),
        "rope_theta": 1e6,
        "rope_scaling": {"factor": 2.0, "rope_type": "dynamic", "type": "dynamic"},
    },
    "Qwen--Qwen2.5-VL-7B-Instruct": {
        "wrapper": True,
        "eos_ids": (151645,),
        "rope_theta": 1e6,
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    },
    "Qwen--Qwen3-0.6B": {"eos_ids": (151645,), "rope_theta": 1e6},
    "Qwen--Qwen3-30B-A3B": {"eos_ids": (151645,), "rope_theta": 1e6},
    "Qwen--Qwen3-32B-FP8": {
        "quantization": ("fp8 e4m3", "quantization_config"),
        "eos_ids": (151645,),
        "rope_theta": 1e6,
    },
    "Qwen--Qwen3-Next-80B-A3B__transformers-5.24-default": {
        "architecture": None,
        "eos_ids": (),
        "rope_theta": 1e4,
        "layer_kinds": {"linear_attention": 36, "full_attention": 12},
    },
    "Qwen--Qwen3-VL-8B-Instruct": {"wrapper": True, "eos_ids": (151645,), "rope_theta": 5e6},
    "Qwen--Qwen3.5-27B": {
        "wrapper": True,
        "eos_ids": (248044,),
        "rope_theta": 1e7,
        "rope_scaling": {"mrope_interleaved": True, "mrope_section": [11, 11, 10], "rope_type": "default"},
        "layer_kinds": {"linear_attention": 48, "full_attention": 16},
    },
    "deepseek-ai--DeepSeek-V3": {
        "quantization": ("fp8 e4m3", "quantization_config"),
        "eos_ids": (1,),
        "rope_theta": 1e4,
        "rope_scaling": "yarn",
    },
    "google--gemma-3-12b-it": {
        "wrapper": True,
        "eos_ids": (1, 106),
        "rope_theta": 1e6,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    },
    "llava-hf--llava-1.5-7b-hf__transformers-5.24-default": {
        "wrapper": True,
        "architecture": None,
        "eos_ids": (2,),
        "rope_theta": 1e4,
    },
    "meta-llama--Meta-Llama-3.1-8B": {"eos_ids": (128001,), "rope_theta": 5e5, "rope_scaling": "llama3"},
    "moonshotai--Kimi-K2.5": {
        "wrapper": True,
        "text_architecture": "DeepseekV3ForCausalLM",
        "eos_ids": (163585,),
        "quantization": ("compressed-tensors pack-quantized", "text_config.quantization_config"),
        "rope_theta": 5e4,
        "rope_scaling": "yarn",
    },
    "nvidia--Gemma-4-31B-IT-NVFP4": {
        "wrapper": True,
        "eos_ids": (1, 106),
        "softcap": 30.0,
        "rope_theta": 1e6,
        "rope_scaling": "proportional",
        "quantization": ("modelopt NVFP4", "quantization_config"),
        "layer_kinds": {"sliding_attention": 50, "full_attention": 10},
    },
    "nvidia--NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": {
        "eos_ids": (2,),
        "rope_theta": 1e4,
        "layer_kinds": {"mamba": 23, "moe": 23, "attention": 6},
    },
    "openai--gpt-oss-20b": {
        "quantization": ("mxfp4", "quantization_config"),
        "eos_ids": (200002,),
        "rope_theta": 1.5e5,
        "rope_scaling": "yarn",
        "layer_kinds": {"sliding_attention": 12, "full_attention": 12},
    },
    "zai-org--GLM-5": {"eos_ids": (154820, 154827, 154829), "rope_theta": 1e6},
}
HYBRID = ("Qwen3-Next", "Qwen3.5", "Nemotron")


@pytest.mark.parametrize("name", CHECKED)
def test_real_configurations(name: str) -> None:
    found = inspect(REAL / f"{name}.json")
    wanted = CHECKED[name]
    sizes = (found.num_layers, found.hidden_size, found.vocab_size, found.num_heads, found.num_kv_heads, found.head_dim)
    assert (found.text_path, *sizes, found.norm, found.tied_head, found.mla, found.moe) == wanted
    assert set(found.evidence) == set(Anatomy.__dataclass_fields__) - {"evidence"}


@pytest.mark.parametrize("name", SPECIAL)
def test_what_is_special_about_real_configurations(name: str) -> None:
    found, wanted = inspect(REAL / f"{name}.json"), SPECIAL[name]
    assert found.wrapper == wanted.get("wrapper", False)
    assert (found.architecture is None) == ("architecture" in wanted)
    assert found.text_architecture == wanted.get("text_architecture")
    assert (found.eos_ids, found.rope_theta) == (wanted["eos_ids"], wanted["rope_theta"])
    kind = (found.rope_scaling or {}).get("rope_type", (found.rope_scaling or {}).get("type"))
    assert (found.rope_scaling if isinstance(wanted.get("rope_scaling"), dict) else kind) == wanted.get("rope_scaling")
    assert (found.quantization, found.evidence["quantization"]) == wanted.get("quantization", (None, "none"))
    assert (found.softcap, found.logit_scale) == (wanted.get("softcap"), None)
    assert found.layer_kinds == wanted.get("layer_kinds")
    assert found.hybrid == any(part in name for part in HYBRID)


def test_at_least_fifteen_are_checked_by_hand() -> None:
    assert CHECKED.keys() == SPECIAL.keys() == {file.stem for file in REAL.glob("*.json")}
    assert len(CHECKED) >= 15


def test_the_story_is_seen_before_anything_is_loaded() -> None:
    kimi = inspect(REAL / "moonshotai--Kimi-K2.5.json")
    assert kimi.wrapper
    assert kimi.layers_path == "language_model.model.layers"
    assert kimi.architecture == "KimiK25ForConditionalGeneration"
    assert kimi.evidence["num_layers"] == "text_config.num_hidden_layers"
    assert kimi.evidence["head_dim"] == "text_config.qk_nope_head_dim + qk_rope_head_dim"
    assert (kimi.quantization_bits, kimi.remote_code) == (4, True)
    assert kimi.rope_scaling is not None
    assert kimi.rope_scaling["factor"] == 64.0


@pytest.mark.skipif(not COLLECTED.is_dir(), reason="the collected configurations are not here")
def test_every_collected_configuration_can_be_read() -> None:
    files = list(COLLECTED.glob("*.json"))
    assert len(files) >= 28
    for file in files:
        found = inspect(file)
        assert None not in (found.num_layers, found.hidden_size, found.vocab_size, found.rope_theta), file.name
        assert found.norm != "unknown", file.name
        assert found.wrapper == ("vision_config" in json.loads(file.read_text())), file.name


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


@pytest.mark.parametrize("name", ["q_lora_rank", "qk_nope_head_dim", "v_head_dim", "kv_lora_rank"])
def test_a_size_of_the_wrong_kind_is_named_with_its_value(name: str) -> None:
    sizes = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
    for value in ("24", 2.5, True, [8], 0):
        found = anatomy_of({**SMALL, "model_type": "deepseek_v2", **sizes, name: value})
        fact = "mla" if name == "kv_lora_rank" else "latent_sizes"
        assert f"{name} = {value!r}, which is not a whole number above 0" in found.evidence[fact]
        with pytest.raises(UserError, match=re.escape(f"{name} = {value!r}")):
            latent_of(found)
    missing = anatomy_of({**SMALL, "model_type": "deepseek_v2", **sizes, name: None})
    with pytest.raises(UserError, match=f"no {name}"):
        latent_of(missing)


def test_a_needed_size_of_the_wrong_kind_is_named() -> None:
    with pytest.raises(
        UserError, match="num_heads is unknown: num_attention_heads = 'abc', which is not a whole number"
    ):
        anatomy_of({**SMALL, "num_attention_heads": "abc"}).required("num_heads")
    with pytest.raises(UserError, match="num_heads is unknown: no num_attention_heads"):
        anatomy_of({**SMALL, "num_attention_heads": None}).required("num_heads")


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


# --- quantisation, kinds of layers, files beside config.json ---


@pytest.mark.parametrize(
    ("config", "method", "bits", "place"),
    [
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "gptq", 4, "quantization_config"),
        ({"text_config": SIZES | {"quantization_config": {"quant_method": "fp8"}}}, "fp8", 8, "text_config."),
        (
            {"compression_config": {"quant_method": "compressed-tensors"}},
            "compressed-tensors",
            None,
            "compression_config",
        ),
        ({"runtime": {"quantization_config": {"quant_method": "awq", "w_bit": 4}}}, "awq", 4, "runtime."),
        ({"quantization_config": {"quant_algo": "W4A16_AWQ"}}, "W4A16_AWQ", 4, "quantization_config"),
        ({"quantization_config": {"bits": 8}}, "unknown", 8, "quantization_config"),
        ({"quantization_config": None}, None, None, "none"),
    ],
)
def test_quantisation_wherever_it_sits(
    config: dict[str, Any], method: str | None, bits: int | None, place: str
) -> None:
    found = anatomy_of(SIZES | config)
    assert (found.quantization, found.quantization_bits) == (method, bits)
    assert found.evidence["quantization"].startswith(place)


@pytest.mark.parametrize(
    ("config", "kinds", "hybrid"),
    [
        ({}, None, False),
        ({"layer_types": ["full_attention"] * 8}, {"full_attention": 8}, False),
        ({"layer_types": ["conv", "full_attention"] * 4}, {"conv": 4, "full_attention": 4}, True),
        ({"layers_block_type": ["mamba"] * 6 + ["hybrid"] * 2}, {"mamba": 6, "hybrid": 2}, True),
        ({"full_attention_interval": 4}, {"linear_attention": 6, "full_attention": 2}, True),
        ({"layer_group_size": 8}, {"linear_attention": 7, "full_attention": 1}, True),
        ({"attn_layer_period": 4, "attn_layer_offset": 2}, {"mamba": 6, "attention": 2}, True),
        ({"attn_layer_indices": [3]}, {"mamba": 7, "attention": 1}, True),
        ({"full_attn_idxs": [2, 5]}, {"conv": 6, "attention": 2}, True),
        ({"attn_type_list": [0, 0, 0, 1] * 2}, {"linear_attention": 6, "full_attention": 2}, True),
        ({"hybrid_layer_pattern": [0, 1, 1, 1] * 2}, {"full_attention": 2, "sliding_attention": 6}, False),
        ({"hybrid_override_pattern": "M*-EM*-E"}, {"mamba": 2, "attention": 2, "mlp": 2, "moe": 2}, True),
        ({"block_types": ["recurrent", "recurrent", "attention"]}, {"recurrent": 6, "attention": 2}, True),
        (
            {"linear_attn_config": {"full_attn_layers": [4, 8], "kda_layers": [1, 2, 3, 5, 6, 7]}},
            {"full_attention": 2, "linear_attention": 6},
            True,
        ),
        ({"model_type": "falcon_mamba"}, {"mamba": 8}, True),
        ({"model_type": "falcon_h1"}, {"attention and mamba": 8}, True),
    ],
)
def test_kinds_of_layers_in_every_spelling(config: dict[str, Any], kinds: dict[str, int] | None, hybrid: bool) -> None:
    found = anatomy_of(SIZES | config)
    assert (found.layer_kinds, found.hybrid) == (kinds, hybrid)


def _write(folder: Path, name: str, value: Any) -> None:
    (folder / name).write_text(json.dumps(value))


def test_files_beside_it_add_facts(tmp_path: Path) -> None:
    _write(tmp_path, "config.json", SIZES)
    _write(tmp_path, "hf_quant_config.json", {"quantization": {"quant_algo": "NVFP4"}})
    _write(tmp_path, "model.safetensors.index.json", {"metadata": {"total_size": 1234}, "weight_map": {}})
    tokens = [{"id": 95, "content": "<|im_end|>"}]
    _write(tmp_path, "tokenizer.json", {"model": {"vocab": {"a": 0, "b": 90}}, "added_tokens": tokens})
    _write(tmp_path, "tokenizer_config.json", {"eos_token": {"content": "<|im_end|>"}})
    found = inspect(tmp_path)
    assert (found.quantization, found.quantization_bits, found.weights_bytes) == ("NVFP4", 4, 1234)
    assert (found.tokenizer_size, found.eos_ids) == (96, (95,))
    assert found.evidence["quantization"] == "hf_quant_config.json: quantization"
    assert found.evidence["weights_bytes"] == "model.safetensors.index.json: metadata.total_size"
    assert found.evidence["eos_ids"] == "tokenizer_config.json eos_token <|im_end|>"
    assert "tokenizer.json" in found.evidence["tokenizer_size"]


def test_a_lone_file_has_no_neighbours(tmp_path: Path) -> None:
    _write(tmp_path, "someone--model.json", SIZES)
    _write(tmp_path, "generation_config.json", {"eos_token_id": 7})
    found = inspect(tmp_path / "someone--model.json")
    assert (found.eos_ids, found.tokenizer_size, found.weights_bytes) == ((), None, None)


@pytest.mark.parametrize(
    ("files", "size"),
    [
        ({"tokenizer.json": {"model": {"vocab": [["a", 0.0], ["b", -1.0]]}, "added_tokens": []}}, 2),
        (
            {
                "vocab.json": {"a": 0, "b": 1},
                "tokenizer_config.json": {"added_tokens_decoder": {"7": {"content": "x"}}},
            },
            8,
        ),
        ({"tokenizer_config.json": {}}, None),
        ({}, None),
    ],
)
def test_how_many_ids_a_tokenizer_knows(files: dict[str, Any], size: int | None, tmp_path: Path) -> None:
    for name, value in files.items():
        _write(tmp_path, name, value)
    assert TokenizerFiles(tmp_path).size[0] == size


def test_a_tiktoken_file_is_counted(tmp_path: Path) -> None:
    (tmp_path / "tiktoken.model").write_text("YQ== 0\nYg== 1\n")
    _write(
        tmp_path, "tokenizer_config.json", {"added_tokens_decoder": {"5": {"content": "[EOS]"}}, "eos_token": "[EOS]"}
    )
    found = TokenizerFiles(tmp_path)
    assert (found.size[0], found.end[0]) == (6, 5)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("chat_template.jinja", "T"),
        ("chat_template.json", '{"chat_template": "T"}'),
        ("tokenizer_config.json", '{"chat_template": "T"}'),
        (
            "tokenizer_config.json",
            '{"chat_template": [{"name": "tool", "template": "X"}, {"name": "default", "template": "T"}]}',
        ),
    ],
)
def test_a_template_in_every_place(name: str, content: str, tmp_path: Path) -> None:
    assert TokenizerFiles(tmp_path).template == (None, "")
    (tmp_path / name).write_text(content)
    assert TokenizerFiles(tmp_path).template == ("T", name)
