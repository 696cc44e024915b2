"""What the table says of each vLLM version: loads the draft as it is meant, or why not (C43). No vLLM runs here."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from fixtures_drafts import DRAFTS, FACTS, FORMATS, LATENT_DRAFTS, random_draft
from headstart.formats import common, speculators, tensors, vllm


@pytest.mark.parametrize("changes", DRAFTS.values(), ids=DRAFTS)
@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_our_exports_load_from_the_version_that_knows_their_shape(form: ModuleType, changes: dict) -> None:
    draft = random_draft(**changes)
    names = tensors.outward(draft, "layers.0", embed=True)
    config = form.config_of(draft, FACTS)
    loads = [version for version in vllm.VERSIONS if not form.check(config, version, names)]
    new = len(draft.shape.aux_layers) != 3 or draft.shape.fc_norm
    assert loads == [f"0.{minor}" for minor in range(22 if new else 11, 33)]


@pytest.mark.parametrize("changes", LATENT_DRAFTS.values(), ids=LATENT_DRAFTS)
def test_a_draft_with_mla_loads_from_0_18(changes: dict) -> None:
    draft = random_draft(**changes)
    config = vllm.config_of(draft, FACTS)
    names = tensors.outward(draft, "layers.0", embed=True)
    assert [version for version in vllm.VERSIONS if not vllm.check(config, version, names)] == [
        f"0.{minor}" for minor in range(18, 33)
    ]
    assert "next-token layer" in vllm.check(config | {"model_type": "deepseek_v3"}, "0.32")[0]
    types = {"layer_types": ["sliding_attention"] * draft.shape.num_layers, "sliding_window": 8}
    assert "not looked at" in vllm.check(config | types, "0.32")[0]
    del config["kv_lora_rank"]
    assert vllm.check(config, "0.32") == ["kv_lora_rank is missing: the engine takes DeepSeek-V2's"]


FAULTS: list[tuple[str, Callable[[dict], Any], str, str]] = [
    ("0.32", lambda c: c.update(layer_types=["sliding_attention"]), "sliding_window is None", "sliding_attention"),
    ("0.21", lambda c: c.update(eagle_aux_hidden_state_layer_ids=[1, 2, 3, 4]), "4 aux hidden states", "needs 0.22"),
    ("0.32", lambda c: c.update(num_aux_hidden_states=4), "fc is built for 4", "set num_aux_hidden_states"),
    ("0.21", lambda c: c.update(norm_output=True), "norm_output", "say nothing"),
    ("0.21", lambda c: c.update(fc_norm=True), "fc_norm", "needs 0.22"),
    ("0.17", lambda c: c.update(norm_before_fc=True), "norm_before_fc", "needs 0.18"),
    ("0.16", lambda c: c.pop("eagle_aux_hidden_state_layer_ids"), "at the top level", "2, n//2, n-3"),
    ("0.32", lambda c: c.update(eagle_aux_hidden_state_layer_ids=[4, 3, 2]), "rising order", "[4, 3, 2]"),
    ("0.32", lambda c: c.update(head_dim=None), "head_dim is null", ""),
    ("0.32", lambda c: c["eagle_config"].update(layer_ids=None), "eagle_config.layer_ids is null", ""),
    ("0.32", lambda c: c.pop("num_key_value_heads"), "num_key_value_heads is missing", "num_attention_heads"),
    ("0.32", lambda c: c.pop("norm_before_residual"), "norm_before_residual is missing", "false"),
    ("0.11", lambda c: c.update(target_hidden_size=128), "hidden_size 64", "128"),
    ("0.21", lambda c: c.update(target_model_type="gemma3_text"), "gemma3_text", "0.22"),
    ("0.15", lambda c: c.update(target_model_type="afmoe"), "afmoe", "0.22"),
    ("0.17.1", lambda c: c.update(target_model_type="deepseek_v3"), "deepseek_v3", "0.22"),
    ("0.19.0", lambda c: c.update(target_model_type="gemma4"), "gemma4", "0.22"),
    ("0.32", lambda c: c.update(architectures=["DFlashDraftModel"]), "DFlashDraftModel", "Eagle3"),
    ("0.33", lambda c: None, "0.33 is not in the table", "0.11 to 0.32"),
    ("main", lambda c: None, "main is not in the table", ""),
]


@pytest.mark.parametrize(("version", "change", "said", "also"), FAULTS)
def test_check_says_what_a_version_would_stumble_over(version: str, change: Callable, said: str, also: str) -> None:
    """C43."""
    config = vllm.config_of(random_draft(), FACTS)
    assert vllm.check(config, version if version[0] == "0" and version != "0.33" else "0.32") == []
    change(config)
    says = vllm.check(config, version)
    assert len(says) == 1
    assert said in says[0]
    assert also in says[0]


def test_check_of_ids_that_stand_nowhere_or_only_inside() -> None:
    """C43: missing ids. Which inner key counts depends on the runner that the version starts."""
    config = vllm.config_of(random_draft(), FACTS)
    del config["eagle_aux_hidden_state_layer_ids"]
    assert vllm.check(config, "0.22") == vllm.check(config, "0.32") == []
    del config["eagle_config"]["layer_ids"]
    assert vllm.check(config, "0.28") == []
    assert len(vllm.check(config, "0.29")) == 1
    del config["eagle_config"]
    assert all("engine takes 2, n//2, n-3" in vllm.check(config, version)[0] for version in vllm.VERSIONS)


def test_check_of_maps_and_target_types() -> None:
    config = vllm.config_of(random_draft(draft_vocab_size=512), FACTS)
    assert vllm.check(config, "0.29", ["fc.weight", "d2t"]) == []
    assert "full vocabulary" in vllm.check(config, "0.30", ["fc.weight", "d2t"])[0]
    config = vllm.config_of(random_draft(), FACTS)
    assert "d2t is missing" in vllm.check(config, "0.16", ["fc.weight"])[0]
    kimi = {**config, "target_model_type": "kimi_k2"}
    accepted = [version for version in ("0.17", "0.18", "0.21", "0.22") if not vllm.check(kimi, version)]
    assert accepted == ["0.18", "0.21", "0.22"]
    gemma = {**config, "target_model_type": "gemma4"}
    assert vllm.check(gemma, "0.19.1") == []


def test_check_of_a_hand_written_config() -> None:
    """The published config of an official draft: no ids, no head_dim, positions of its own."""
    config = {
        "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 1,
        "num_attention_heads": 32, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "vocab_size": 128256,
        "draft_vocab_size": 32000, "torch_dtype": "float16",
    }  # fmt: skip
    says = "\n".join(vllm.check(config, "0.32"))
    absent = {"num_key_value_heads", "head_dim", "norm_before_residual", common.LAYER_IDS, "rope_theta"}
    assert {name for name in absent if f"{name} is missing" in says} == absent


def test_check_of_a_speculators_folder() -> None:
    config = speculators.config_of(random_draft(fc_norm=True), FACTS)
    layer = config["transformer_layer_config"]
    assert speculators.check({**config, "transformer_layer_config": {**layer, "fc_norm": False}}, "0.22") == [
        "fc_norm stands outside transformer_layer_config alone: not every version hands it on"
    ]
    null = {**config, "transformer_layer_config": {**layer, "head_dim": None}}
    assert speculators.check(null, "0.32") == ["head_dim is null"]
    assert speculators.check({**config, "target_hidden_size": None}, "0.32") == ["target_hidden_size is null"]
    bare = {name: value for name, value in config.items() if name != "norm_before_residual"}
    assert speculators.check(bare, "0.32") == [
        "norm_before_residual is missing: the engine takes true, speculators false"
    ]
    assert "proposal_methods is missing" in speculators.check({**config, "speculators_config": {}}, "0.32")[0]
    assert speculators.check({}, "0.32") == ["transformer_layer_config is missing"]
