"""The foreign formats: explicit in every field, and the same draft when read back. Damage and strangers are refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, LlamaConfig

from fixtures_drafts import (
    DRAFTS,
    FACTS,
    FORMATS,
    LATENT_DRAFTS,
    change_config,
    change_tensors,
    random_draft,
    read_config,
)  # fmt: skip
from fixtures_models import save_llama
from headstart.drafts import checkpoint
from headstart.errors import UserError
from headstart.formats import common, speculators, tensors, vllm
from headstart.stages import export
from headstart.target.spellings import LATENT


@pytest.fixture(params=FORMATS)
def form(request: pytest.FixtureRequest) -> ModuleType:
    return FORMATS[request.param]


@pytest.mark.parametrize("changes", DRAFTS.values(), ids=DRAFTS)
def test_what_is_written_is_read_back(tmp_path: Path, form: ModuleType, changes: dict) -> None:
    read_back(tmp_path, form, changes)


@pytest.mark.parametrize("changes", LATENT_DRAFTS.values(), ids=LATENT_DRAFTS)
def test_a_draft_with_mla_is_read_back_from_the_raw_format_and_from_ours(tmp_path: Path, changes: dict) -> None:
    read_back(tmp_path / "vllm", vllm, changes)
    draft = random_draft(**changes)
    checkpoint.save_shape(tmp_path, draft.shape, {"ttt_steps": 3})
    assert checkpoint.read_shape(tmp_path) == (draft.shape, {"ttt_steps": 3})
    with pytest.raises(UserError, match="MLA cannot be had in the speculators format"):
        speculators.write(tmp_path, draft, FACTS)


def test_a_draft_with_mla_has_the_names_of_deepseek(tmp_path: Path) -> None:
    vllm.write(tmp_path, random_draft(**LATENT_DRAFTS["mla"]), FACTS)
    found = load_file(tmp_path / "model.safetensors")
    prefix = "midlayer.self_attn."
    assert {name.removeprefix(prefix): list(found[name].shape) for name in found if name.startswith(prefix)} == {
        "q_a_proj.weight": [24, 128],
        "q_a_layernorm.weight": [24],
        "q_b_proj.weight": [4 * 20, 24],
        "kv_a_proj_with_mqa.weight": [32 + 8, 128],
        "kv_a_layernorm.weight": [32],
        "kv_b_proj.weight": [4 * (12 + 16), 32],
        "o_proj.weight": [64, 4 * 16],
    }
    config = AutoConfig.from_pretrained(tmp_path)
    sizes = (
        config.q_lora_rank,
        config.kv_lora_rank,
        config.qk_nope_head_dim,
        config.qk_rope_head_dim,
        config.v_head_dim,
    )
    assert (config.model_type, sizes) == ("deepseek_v2", (24, 32, 12, 8, 16))


YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 1.0}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rope_parameters": {**YARN, "factor": 4.0}}, r"rope_parameters\.factor = 4\.0"),
        ({"rope_scaling": {**YARN, "factor": 40, "mscale": 0.707}}, r"rope_scaling\.factor = 40"),
        ({"rope_scaling": {**YARN, "attention_factor": 1.2}}, r"rope_scaling\.attention_factor = 1\.2"),
        (
            {"rope_scaling": {**YARN, "original_max_position_embeddings": 128}},
            r"original_max_position_embeddings = 128",
        ),
        ({"rope_scaling": {**YARN, "mscale_all_dim": "1"}}, r"rope_scaling\.mscale_all_dim = '1'"),
        ({"rope_scaling": {**YARN, "rope_theta": 5e5}}, r"several bases: 10000\.0, 500000\.0"),
        ({"rope_interleave": False}, "rope_interleave = False"),
        ({"n_routed_experts": 64}, "n_routed_experts = 64"),
        ({"n_routed_experts": 64, "first_k_dense_replace": 0}, "n_routed_experts = 64"),
        ({"n_routed_experts": 64, "first_k_dense_replace": "1"}, "first_k_dense_replace = '1'"),
        ({"kv_lora_rank": "32"}, "kv_lora_rank = '32'"),
        ({"index_topk": 8}, "index_topk = 8"),
        ({"v_head_dim": 24}, "wider than its keys"),
        ({"qk_rope_head_dim": None}, "qk_rope_head_dim = None"),
        ({"model_type": "llama"}, "model_type"),
    ],
)
def test_mla_of_other_kinds_is_refused(tmp_path: Path, changes: dict, said: str) -> None:
    vllm.write(tmp_path, random_draft(**LATENT_DRAFTS["mla"]), FACTS)
    change_config(tmp_path, **changes)
    with pytest.raises(UserError, match=said):
        vllm.read(tmp_path)


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_scaling": None},
        {"rope_parameters": {}, "rope_scaling": {"type": "linear", "factor": 1}},
        {"rope_scaling": {**YARN, "factor": 1, "mscale": 0.707, "mscale_all_dim": 0, "attention_factor": None}},
        {"rope_scaling": {**YARN, "original_max_position_embeddings": 512, "beta_fast": 1, "truncate": False}},
        {"rope_interleave": True, "model_type": "deepseek_v3"},
        {"n_routed_experts": None},
        {"n_routed_experts": 0, "first_k_dense_replace": 0},
        {"n_routed_experts": 384, "n_shared_experts": 1, "first_k_dense_replace": 1, "moe_layer_freq": 1},
        {"n_routed_experts": 256, "model_type": "deepseek_v3"},
        {"index_topk": None, "quantization_config": None, "head_dim": 8, "num_key_value_heads": 1},
    ],
)
def test_mla_fields_without_effect_are_read(tmp_path: Path, changes: dict) -> None:
    """`test_ttt` compares the numbers with Transformers' where a scale of yarn or the layout of positions is told."""
    draft = random_draft(**LATENT_DRAFTS["mla"])
    vllm.write(tmp_path, draft, FACTS)
    change_config(tmp_path, **changes)
    assert vllm.read(tmp_path)[0] == draft.shape


def read_back(tmp_path: Path, form: ModuleType, changes: dict) -> None:
    draft = random_draft(**changes)
    form.write(tmp_path, draft, FACTS)
    shape, found = form.read(tmp_path)
    assert shape == draft.shape
    wanted = {
        **draft.state_dict(),
        "draft_to_target": draft.draft_to_target,
        "embed_tokens": draft.embed_tokens,
    }
    assert set(found) == set(wanted)
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())
    again = tensors.rebuild(shape, found, draft.embed_tokens)
    assert torch.equal(export.probe(again), export.probe(draft))
    other = tmp_path.with_name(f"{tmp_path.name} again")
    form.write(other, again, FACTS)
    assert {file.name: file.read_bytes() for file in other.iterdir()} == {
        file.name: file.read_bytes() for file in tmp_path.iterdir() if file.is_file()
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_type_is_the_drafts_own(tmp_path: Path, form: ModuleType, dtype: torch.dtype) -> None:
    draft = random_draft().to(dtype)
    form.write(tmp_path, draft, FACTS)
    assert read_config(tmp_path)["dtype"] == str(dtype).removeprefix("torch.")
    _, found = form.read(tmp_path)
    assert {tensor.dtype for name, tensor in found.items() if name != "draft_to_target"} == {dtype}


def test_vllm_tensors_have_the_names_and_shapes_that_vllm_knows(tmp_path: Path) -> None:
    vllm.write(tmp_path, random_draft(fc_norm=True, head_dim=10, norm_output=True), FACTS)
    heads, kv, width = 4 * 10, 2 * 10, 64
    layer = {
        "hidden_norm.weight": [width],
        "input_layernorm.weight": [width],
        "post_attention_layernorm.weight": [width],
        "self_attn.q_proj.weight": [heads, 2 * width],
        "self_attn.k_proj.weight": [kv, 2 * width],
        "self_attn.v_proj.weight": [kv, 2 * width],
        "self_attn.o_proj.weight": [width, heads],
        "mlp.gate_proj.weight": [96, width],
        "mlp.up_proj.weight": [96, width],
        "mlp.down_proj.weight": [width, 96],
    }
    wanted = {f"midlayer.{name}": shape for name, shape in layer.items()} | {
        "fc.weight": [width, 3 * width],
        **{f"fc_norm.{index}.weight": [width] for index in range(3)},
        "norm.weight": [width],
        "lm_head.weight": [96, width],
        "embed_tokens.weight": [512, width],
        "d2t": [96],
        "t2d": [512],
    }
    found = load_file(tmp_path / "model.safetensors")
    assert {name: list(tensor.shape) for name, tensor in found.items()} == wanted
    assert found["d2t"].dtype == torch.int64
    assert found["t2d"].dtype == torch.bool


def test_layers_of_a_deeper_draft_are_numbered_from_0(tmp_path: Path) -> None:
    vllm.write(tmp_path, random_draft(num_layers=2), FACTS)
    found = load_file(tmp_path / "model.safetensors")
    assert found["layers.0.self_attn.q_proj.weight"].shape == (64, 128)
    assert found["layers.1.self_attn.q_proj.weight"].shape == (64, 64)
    assert "layers.1.hidden_norm.weight" not in found


@given(st.sets(st.integers(0, 511), min_size=1, max_size=511))
def test_offsets_lead_from_draft_ids_to_target_ids(ids: set[int]) -> None:
    draft = random_draft(draft_vocab_size=len(ids))
    draft.draft_to_target = torch.tensor(sorted(ids))
    out = tensors.outward(draft, "layers.0", embed=False)
    assert [index + offset for index, offset in enumerate(out["d2t"].tolist())] == sorted(ids)
    assert set(out["t2d"].nonzero()[:, 0].tolist()) == ids


def test_a_full_vocabulary_has_no_maps(tmp_path: Path, form: ModuleType) -> None:
    form.write(tmp_path, random_draft(draft_vocab_size=512), FACTS)
    assert not {"d2t", "t2d"} & set(tensors.names_in(tmp_path))
    assert torch.equal(form.read(tmp_path)[1]["draft_to_target"], torch.arange(512))


def test_embedding_is_the_targets_byte_for_byte_or_absent(tmp_path: Path, form: ModuleType) -> None:
    """C45."""
    target = load_file(save_llama(tmp_path / "target") / "model.safetensors")["model.embed_tokens.weight"]
    draft = random_draft(embed=target)
    form.write(tmp_path / "kept", draft, FACTS)
    kept = load_file(tmp_path / "kept" / "model.safetensors")["embed_tokens.weight"]
    assert kept.numpy().tobytes() == target.numpy().tobytes()


def test_embedding_may_be_left_out_where_the_target_gives_it(tmp_path: Path) -> None:
    """C45: vLLM shares the target's; speculators would fill the gap with whatever is in memory."""
    draft, facts = random_draft(), replace(FACTS, embed_tokens=False)
    vllm.write(tmp_path / "vllm", draft, facts)
    assert "embed_tokens.weight" not in tensors.names_in(tmp_path / "vllm")
    shape, found = vllm.read(tmp_path / "vllm")
    assert "embed_tokens" not in found
    again = tensors.rebuild(shape, found, draft.embed_tokens)
    assert torch.equal(export.probe(again), export.probe(draft))
    with pytest.raises(UserError, match="random embedding"):
        speculators.write(tmp_path / "speculators", draft, facts)
    assert not (tmp_path / "speculators").exists()


@pytest.mark.parametrize("changes", DRAFTS.values(), ids=DRAFTS)
def test_every_field_is_explicit_and_none_is_null(tmp_path: Path, form: ModuleType, changes: dict) -> None:
    """C43; a target without a beginning-of-text id has no such field, instead of null."""
    draft = random_draft(**changes)
    form.write(tmp_path, draft, replace(FACTS, bos_id=None, eos_ids=(2, 7)))
    config, shape = read_config(tmp_path), draft.shape
    assert list(common.nulls(config)) == []
    layer = config["transformer_layer_config"] if form is speculators else config
    assert layer["eos_token_id"] == [2, 7]
    assert "bos_token_id" not in layer
    wanted = {
        "head_dim": shape.head_dim,
        "num_key_value_heads": shape.num_kv_heads,
        "vocab_size": 512,
        "max_position_embeddings": 512,
        "num_aux_hidden_states": len(shape.aux_layers),
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "target_model_type": "llama",
        "dtype": "float32",
    }
    assert {name: layer[name] for name in wanted} == wanted
    outer = {
        "draft_vocab_size": shape.draft_vocab_size,
        "target_hidden_size": 64,
        "eagle_aux_hidden_state_layer_ids": list(shape.aux_layers),
        "norm_before_residual": shape.norm_before_residual,
        "norm_before_fc": False,
        "fc_norm": shape.fc_norm,
        "norm_output": shape.norm_output,
    }
    assert {name: config[name] for name in outer} == outer
    assert layer["eagle_config"] == {
        "use_aux_hidden_state": True,
        "layer_ids": list(shape.aux_layers),
        "eagle_aux_hidden_state_layer_ids": list(shape.aux_layers),
    }


def test_transformers_reads_the_config_as_it_is_meant(tmp_path: Path) -> None:
    """What vLLM does first with the folder."""
    vllm.write(tmp_path, random_draft(head_dim=10, rope_theta=500000.0), FACTS)
    config = AutoConfig.from_pretrained(tmp_path)
    assert isinstance(config, LlamaConfig)
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 500000.0}
    assert (config.head_dim, config.num_key_value_heads, config.dtype) == (10, 2, torch.float32)
    assert (config.draft_vocab_size, config.eagle_aux_hidden_state_layer_ids) == (96, [2, 3, 4])


def test_speculators_names_target_and_proposal(tmp_path: Path) -> None:
    speculators.write(tmp_path, random_draft(), replace(FACTS, draft_tokens=5))
    config = read_config(tmp_path)
    assert config["speculators_model_type"] == "eagle3"
    said = config["speculators_config"]
    assert said["verifier"] == {"name_or_path": "owner/target", "architectures": ["LlamaForCausalLM"]}
    assert [method["speculative_tokens"] for method in said["proposal_methods"]] == [5]
    assert said["default_proposal_method"] == said["proposal_methods"][0]["proposal_type"]


DAMAGE: dict[str, tuple[Callable[[dict[str, torch.Tensor]], Any], str]] = {
    "missing weight": (lambda t: t.pop("fc.weight"), "lacks: fc.weight"),
    "unknown weight": (lambda t: t.update(extra=torch.zeros(1)), "unknown tensors: extra"),
    "other shape": (lambda t: t.update({"norm.weight": torch.ones(8)}), "norm.weight"),
    "no map": (lambda t: (t.pop("d2t"), t.pop("t2d")), "96 of 512"),
    "map of another size": (lambda t: t.update(d2t=torch.zeros(64, dtype=torch.int64)), "64"),
    "map past the vocabulary": (lambda t: t["d2t"].__setitem__(-1, 600), "no vocabulary"),
    "map that goes back": (lambda t: t["d2t"].__setitem__(0, 500), "no vocabulary"),
    "maps that differ": (lambda t: t["t2d"].logical_not_(), "different tokens"),
}


@pytest.mark.parametrize(("damage", "said"), DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_folder_is_refused(tmp_path: Path, form: ModuleType, damage: Callable, said: str) -> None:
    """C25 (c) and (d) among them."""
    form.write(tmp_path, random_draft(), FACTS)
    change_tensors(tmp_path, damage)
    with pytest.raises(UserError, match=said):
        form.read(tmp_path)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"eagle_aux_hidden_state_layer_ids": None, "eagle_config": {}}, "which states"),
        ({"hidden_size": None}, "hidden_size"),
        ({"attention_bias": True}, "attention_bias"),
        ({"norm_before_fc": True}, "norm_before_fc"),
        ({"mlp_bias": True}, "mlp_bias = True"),
        ({"qkv_bias": True}, "qkv_bias = True"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"is_causal": False}, "is_causal = False"),
        ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor = 0\.5"),
        ({"logit_scale": 0.5}, r"logit_scale = 0\.5"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config = "),
        ({"rope_scaling": {"type": "yarn"}, "rope_parameters": None}, r"rope_scaling\.factor = None"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, r"rope_scaling\.factor = 8\.0"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 1.0}}, r"rope_scaling\.rope_type = 'dynamic'"),
        ({"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}}, r"rope_scaling\.type = 'mrope'"),
        ({"rope_scaling": {"type": "default", "rope_type": "linear", "factor": 1}}, r"rope_scaling\.type = 'default'"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, r"rope_parameters\.partial_rot"),
        ({"rope_theta": 5e5}, r"several bases: 10000\.0, 500000\.0"),
        (
            {"rope_theta": None, "rope_parameters": {"rope_theta": 5e5}, "rope_scaling": {"type": "default"}},
            "several bases",
        ),
        ({"num_key_value_heads": 3}, "num_key_value_heads = 3"),
        ({"head_dim": 15}, "width of 15"),
        ({"head_dim": None, "num_attention_heads": 3, "num_key_value_heads": 3}, "num_attention_heads = 3"),
        ({"eagle_aux_hidden_state_layer_ids": [3, 2, 4]}, "rising"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}, "in other places"),
        ({"num_hidden_layers": 200_000}, "too few for the 200000 layers"),
        ({"kv_lora_rank": None, "model_type": "deepseek_v2"}, "kv_lora_rank = None"),
        ({"layer_types": ["sliding_attention"]}, "sliding_window is None"),
        ({"layer_types": ["sliding_attention"], "sliding_window": 0}, "sliding_window is 0"),
        ({"layer_types": ["sliding_attention"], "sliding_window": 8.5}, "sliding_window is 8.5"),
        ({"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 9}, "a type for each layer"),
        ({"layer_types": ["linear_attention"], "sliding_window": 9}, "all alike"),
        ({"layer_types": 5}, "not a list"),
    ],
)
def test_a_draft_that_ours_is_not_is_refused(tmp_path: Path, changes: dict, said: str) -> None:
    vllm.write(tmp_path, random_draft(), FACTS)
    change_config(tmp_path, **changes)
    with pytest.raises(UserError, match=said):
        vllm.read(tmp_path)


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_scaling": {}},
        {"rope_scaling": {"type": "default"}},
        {"rope_scaling": {"rope_type": "llama3", "factor": 1, "low_freq_factor": 1, "high_freq_factor": 4}},
        {"rope_parameters": None, "rope_theta": None},
        {"logit_scale": 1, "quantization_config": None, "attention_bias": None, "is_causal": None, "hidden_act": None},
        # of a target's configuration, and of no Llama layer
        {"residual_multiplier": 0.2, "attention_multiplier": 0.1, "query_pre_attn_scalar": 256},
        {"final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0, "scale_emb": 12},
        {
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
        },  # of a vision-language target
        {"hidden_act": "swish", "kv_lora_rank": None, "eagle_config": None, "attention_dropout": 0.1},
        {"num_experts": 128, "sliding_window": 512, "use_sliding_window": False, "pretraining_tp": 1},
    ],
)
def test_fields_without_effect_are_read(tmp_path: Path, form: ModuleType, changes: dict) -> None:
    draft = random_draft()
    form.write(tmp_path, draft, FACTS)
    config = read_config(tmp_path)
    config.get("transformer_layer_config", config).update(changes)
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert form.read(tmp_path)[0] == draft.shape


VALUES: list[Any] = [None, True, "1", "", [], [1], {}, {"a": 1}, -1, 0, 1.5, 10**30, float("nan"), float("inf"), "yarn"]
ROPES = ("rope_parameters", "rope_scaling")
COUNTS = ("hidden_size", "vocab_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
NEEDED = (*COUNTS, "rms_norm_eps", "max_position_embeddings")
SWITCHES = ("norm_before_residual", "fc_norm", "norm_output", "norm_before_fc", "attention_bias", "mlp_bias", "bias")
READ = {
    "vllm": (*ROPES, "eagle_config", "norm_before_fc", "bias", "logit_scale", "is_causal", "sliding_window"),
    "mla": (*ROPES, *LATENT.values(), "rope_interleave", "n_routed_experts", "first_k_dense_replace", "index_topk"),
    "speculators": (*ROPES, "eagle_config"),
}


@pytest.mark.parametrize("kind", READ)
def test_no_value_of_any_field_ends_in_a_traceback(tmp_path: Path, kind: str) -> None:
    """Every field that is written or looked for, and those one level down: of every kind, and missing."""
    form = speculators if kind == "speculators" else vllm
    form.write(tmp_path, random_draft(**(LATENT_DRAFTS["mla"] if kind == "mla" else {})), FACTS)
    good = read_config(tmp_path)
    inside = ("transformer_layer_config",) if kind == "speculators" else ()
    inner = good[inside[0]] if inside else good
    paths = [(name,) for name in good] + [(*inside, name) for name in (*inner, *READ[kind])]
    paths += [(*inside, part, name) for part in (*ROPES, "eagle_config") for name in _inside(inner, part)]
    for path in dict.fromkeys(paths):
        for value in (*VALUES, ...):
            config = json.loads(json.dumps(good))
            _put(config, path, value)
            (tmp_path / "config.json").write_text(json.dumps(config))
            with suppress(UserError):
                form.read(tmp_path)


@pytest.mark.parametrize("value", ["64", True, [1], {"a": 1}, None, -1, 2.5])
def test_a_field_of_the_wrong_kind_is_named_with_its_value(tmp_path: Path, value: Any) -> None:
    vllm.write(tmp_path, random_draft(), FACTS)
    good = read_config(tmp_path)
    for name in (
        *NEEDED,
        *SWITCHES,
        "num_key_value_heads",
        "head_dim",
        "draft_vocab_size",
        "target_hidden_size",
        "rope_theta",
    ):
        optional = name not in NEEDED and value is None
        fits = (name in SWITCHES and value is True) or (name in ("rms_norm_eps", "rope_theta") and value == 2.5)
        if not optional and not fits:
            (tmp_path / "config.json").write_text(json.dumps(good | {name: value}))
            with pytest.raises(UserError, match=re.escape(f"{tmp_path / 'config.json'} has {name} = {value!r}")):
                vllm.read(tmp_path)
    for name in NEEDED:
        (tmp_path / "config.json").write_text(json.dumps({key: good[key] for key in good if key != name}))
        with pytest.raises(UserError, match=re.escape(f"{tmp_path / 'config.json'} has {name} = None")):
            vllm.read(tmp_path)


def _inside(config: dict, part: str) -> list[str]:
    more = ["factor", "mscale", "type", "rope_theta", "attention_factor", "original_max_position_embeddings"]
    return [*(config.get(part) or {}), *more]


def _put(config: dict, path: tuple[str, ...], value: Any) -> None:
    for name in path[:-1]:
        config = config.setdefault(name, {})
    if value is ...:
        config.pop(path[-1], None)
    else:
        config[path[-1]] = value


@pytest.mark.parametrize("value", ["yarn", [1], 3, True])
def test_what_stands_for_an_object_is_named(tmp_path: Path, value: Any) -> None:
    vllm.write(tmp_path, random_draft(), FACTS)
    for name in ("rope_parameters", "rope_scaling", "eagle_config"):
        change_config(tmp_path, **{name: value})
        with pytest.raises(UserError, match=re.escape(f"config.json has {name} = {value!r}")):
            vllm.read(tmp_path)
        change_config(tmp_path, **{name: None})


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"hidden_size": "64"}, "shape.hidden_size = '64'"),
        ({"num_layers": True}, "shape.num_layers = True"),
        ({"aux_layers": 5}, "shape.aux_layers = 5"),
        ({"latent": {"q_rank": "24"}}, "shape.latent.q_rank = '24'"),
        ({"unknown": 1}, "shape.unknown = 1"),
        (None, "shape = None"),
    ],
)
def test_a_shape_of_ours_is_read_strictly(tmp_path: Path, content: dict | None, said: str) -> None:
    checkpoint.save_shape(tmp_path, random_draft().shape, {})
    raw = json.loads((tmp_path / "draft.json").read_text())
    (tmp_path / "draft.json").write_text(json.dumps({"shape": content and raw["shape"] | content}))
    with pytest.raises(UserError, match=re.escape(said)):
        checkpoint.read_shape(tmp_path)
    (tmp_path / "draft.json").write_text("[]")
    with pytest.raises(UserError, match="holds a list"):
        checkpoint.read_shape(tmp_path)


def test_absent_fields_are_read_as_the_engine_reads_them(tmp_path: Path) -> None:
    draft = random_draft(num_kv_heads=4, draft_vocab_size=512)
    vllm.write(tmp_path, draft, FACTS)
    config = read_config(tmp_path)
    for name in ("num_key_value_heads", "head_dim", "draft_vocab_size", "norm_before_residual", "target_hidden_size"):
        del config[name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert vllm.read(tmp_path)[0] == draft.shape


def test_one_layer_under_its_number_is_read_too(tmp_path: Path) -> None:
    draft = random_draft()
    vllm.write(tmp_path, draft, FACTS)
    save_file(tensors.outward(draft, "layers.0", embed=True), tmp_path / "model.safetensors")
    name = "layers.0.mlp.up_proj.weight"
    assert torch.equal(vllm.read(tmp_path)[1][name], draft.state_dict()[name])


def test_speculators_folder_must_say_its_residual(tmp_path: Path) -> None:
    speculators.write(tmp_path, random_draft(), FACTS)
    change_config(tmp_path, norm_before_residual=None)
    with pytest.raises(UserError, match="norm_before_residual"):
        speculators.read(tmp_path)
    change_config(tmp_path, speculators_model_type="dflash")
    with pytest.raises(UserError, match="dflash"):
        speculators.read(tmp_path)


@pytest.mark.parametrize("content", [None, "{", "[]"])
def test_unreadable_folders(tmp_path: Path, form: ModuleType, content: str | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(UserError, match=r"config\.json"):
        form.read(tmp_path)
    form.write(tmp_path, random_draft(), FACTS)
    (tmp_path / "model.safetensors").write_bytes(b"\0" * 100)
    with pytest.raises(UserError, match=r"model\.safetensors"):
        form.read(tmp_path)


def test_drafts_that_no_engine_loads_are_not_written(tmp_path: Path, form: ModuleType) -> None:
    with pytest.raises(UserError, match="32 wide"):
        form.write(tmp_path, random_draft(hidden_size=32), FACTS)
    draft = random_draft(embed=torch.randn(520, 64))
    with pytest.raises(UserError, match="520 rows"):
        form.write(tmp_path, draft, FACTS)
    assert not list(tmp_path.iterdir())
    vllm.write(tmp_path, draft, replace(FACTS, embed_tokens=False))
