"""Runs inside vLLM 0.16: what speculators' worker extension captures of a model. `speculators` comes from PYTHONPATH.

    python drive_speculators.py llm|generator MODEL PROMPTS.json OUT.safetensors

llm: through `LLM(worker_extension_cls=...)`, a prompt at a time; writes, for prompt i, `theirs.i` and, read by our own hooks in
the very same pass, `ours.i`. generator: through speculators' VllmHiddenStatesGenerator, all prompts at once; writes `theirs.i`.
All are [tokens, layers, d].
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from vllm import LLM, SamplingParams

from headstart.engines.vllm import taps, tree

EXTENSION = "speculators.data_generation.custom_worker.HiddenStatesWorkerExtension"
LAYER_IDS = [0, 2, 5]
LENGTH = 256
ON_CPU = {"dtype": "float32", "limit_mm_per_prompt": {"vision_chunk": 0}}  # its image processor is a stand-in
# The CPU build's rotary_embedding kernel is wrong for the three-dimensional queries of MLA: the plain PyTorch one is taken.
CURE = {"compilation_config": {"mode": 0, "custom_ops": ["all", "-rotary_embedding"]}}


def through_llm(model: str, prompts: list[list[int]]) -> dict[str, torch.Tensor]:
    llm = LLM(
        model, max_model_len=LENGTH, enforce_eager=True, enable_prefix_caching=False, trust_remote_code=True,
        worker_extension_cls=EXTENSION, **ON_CPU, **CURE,
    )  # fmt: skip
    llm.collective_rpc("_setup_hidden_states_capture", args=(LAYER_IDS,))
    tensors: dict[str, torch.Tensor] = {}
    for index, ids in enumerate(prompts):
        tensors[f"theirs.{index}"], tensors[f"ours.{index}"] = _captured(llm, ids)
    return tensors


def _captured(llm: LLM, ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    worker: Any = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    text = tree.find_text_model(worker.model_runner.get_model())
    llm.collective_rpc("_reset_capture")
    if hasattr(worker, "_set_request_metadata"):
        llm.collective_rpc("_set_request_metadata", args=({"only": len(ids)},))
    with taps.Taps(text, [index + 1 for index in LAYER_IDS]) as ours:
        llm.generate([{"prompt_token_ids": ids}], SamplingParams(max_tokens=1, detokenize=False), use_tqdm=False)
        (states,) = llm.collective_rpc("_get_captured_states")
        theirs = states["only"] if isinstance(states, dict) else states
        return torch.stack(theirs, dim=1), ours.take(len(ids))


def through_generator(model: str, prompts: list[list[int]]) -> dict[str, torch.Tensor]:
    """As its users call it; the settings of a CPU, which it does not know, come in from the side."""
    from speculators.data_generation import vllm_hidden_states_generator as theirs

    model_config, vllm_config = theirs.ModelConfig, theirs.VllmConfig
    theirs.ModelConfig = lambda **given: model_config(**(given | ON_CPU))
    theirs.VllmConfig = lambda **given: vllm_config(**given, **CURE)
    theirs.mem_get_info = lambda: (4 << 30, 4 << 30)
    batch = {"max_num_batched_tokens": LENGTH}  # less than the prompts together: one is cut into chunks
    generator = theirs.VllmHiddenStatesGenerator(model, LAYER_IDS, max_model_len=LENGTH, **batch)
    made = generator.generate(prompts)
    assert [one["input_ids"].tolist() for one in made] == prompts
    return {f"theirs.{index}": torch.stack(one["hidden_states"], dim=1) for index, one in enumerate(made)}


def main(way: str, model: str, prompts: str, out: str) -> None:
    run = {"llm": through_llm, "generator": through_generator}[way]
    tensors = run(model, json.loads(Path(prompts).read_text()))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, out)


if __name__ == "__main__":
    main(*sys.argv[1:])
