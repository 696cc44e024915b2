"""Proof that a shimmed architecture works in the real engine: captured, and served with a draft trained on what was captured.

    HEADSTART_SHIM=Gemma2ForCausalLM python tests/vllm_shim_run.py FOLDER OUT.json [eager] [compiled]

FOLDER: a model of `vllm_models`. The steps: greedy answers of the plain engine; capture of prompts and answers through
vLLM's `extract_hidden_states`, held against Transformers; a draft overfitted on these few chats, exported in vLLM's format;
the same answers with the draft, eager and, where asked, compiled. OUT.json gets the numbers; a process runs one model.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

TESTS = Path(__file__).parent
COMMON = {
    "dtype": "float32",
    "max_model_len": 96,
    "max_num_batched_tokens": 512,
    "max_num_seqs": 4,
    "disable_log_stats": False,
}
ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1"}
NEW_TOKENS, DRAFT_TOKENS = 24, 3
CONNECTOR = "headstart.engines.vllm.connector"


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(3, 380, (length,), generator=generator).tolist() for length in (7, 12, 19)]


def generate(
    folder: Path, options: dict[str, Any], ids: Sequence[list[int]], tokens: int, files: Any = None, **extra: Any
) -> tuple[list, dict]:
    """Greedy answers (request outputs), and the engine's speculation counters."""
    from vllm import LLM, SamplingParams

    llm = LLM(model=str(folder), **{**COMMON, **options}, **extra)
    sampling = [
        SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False, extra_args=one)
        for one in files or [None] * len(ids)
    ]
    outputs = llm.generate([{"prompt_token_ids": list(prompt)} for prompt in ids], sampling, use_tqdm=False)
    counters = {
        metric.name: metric.value
        for metric in llm.get_metrics()
        if "spec_decode" in metric.name and hasattr(metric, "value")
    }
    if extra.get("kv_transfer_config"):
        llm.generate([{"prompt_token_ids": [1]}], SamplingParams(max_tokens=1), use_tqdm=False)  # a step that flushes
    checked = check(llm) if extra.get("kv_transfer_config") else {}
    llm.llm_engine.engine_core.shutdown()
    del llm
    gc.collect()
    return outputs, checked or counters


def check(llm: Any) -> dict[str, Any]:
    """The residual self-check, on a pass of its own."""
    from vllm import SamplingParams

    from headstart.engines.vllm.taps import Probe, known_rule
    from headstart.engines.vllm.tree import find_text_model

    model = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner.get_model()
    text = find_text_model(model)
    with Probe(text) as probe:
        llm.generate([{"prompt_token_ids": [7, 8, 9]}], SamplingParams(max_tokens=1), use_tqdm=False)
    result = probe.result()
    assert result.rule == known_rule(text.layer_class), result
    return {"path": text.path, "rule": result.rule, "evidence": result.evidence, "self_check": result.difference}


def captured(
    folder: Path, options: dict[str, Any], ids: Sequence[list[int]], aux: Sequence[int], out: Path
) -> tuple[list[Tensor], dict]:
    """States [tokens, n_aux, d] of each sequence through the extraction path, and what the self-check said."""
    extraction = {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": list(aux)}},
    }
    transfer = {
        "kv_connector": "HeadstartConnector",
        "kv_connector_module_path": CONNECTOR,
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {
            "shared_storage_path": str(out),
            "use_synchronization_lock": False,
            "allow_custom_save_path": True,
        },
    }
    out.mkdir(parents=True, exist_ok=True)
    paths = [out / f"{number}.safetensors" for number in range(len(ids))]
    files = [{"kv_transfer_params": {"hidden_states_path": str(path)}} for path in paths]
    _, said = generate(
        folder, options, ids, 1, files, enforce_eager=True, speculative_config=extraction, kv_transfer_config=transfer
    )
    tensors = [load_file(path) for path in paths]
    assert [one["token_ids"].tolist() for one in tensors] == [list(sent) for sent in ids]
    states = [one["hidden_states"] for one in tensors]
    return states, said


@torch.no_grad()
def reference(model: Any, ids: list[int], boundaries: Sequence[int]) -> Tensor:
    """Transformers' states at the boundaries, [tokens, n, d]."""
    from headstart.engines.hooks import capturing, find_decoder

    decoder = find_decoder(model, None)
    with capturing(decoder.layers, boundaries) as seen:
        model(input_ids=torch.tensor([ids]))
    return torch.stack([seen.states[boundary][0] for boundary in boundaries], dim=1)


def overfit(
    embed: Tensor, chats: Sequence[tuple[list[int], list[int]]], states: Sequence[Tensor], aux: Sequence[int]
) -> Any:
    """A draft that has learnt what follows in these chats (prompt, answer), from their states [tokens, n_aux, d]."""
    import numpy as np

    from fixtures_drafts import random_draft
    from headstart.drafts.rows import plan_rows
    from headstart.drafts.ttt import unroll

    width = embed.shape[1]
    sizes = {"hidden_size": width, "target_hidden_size": width, "intermediate_size": 2 * width, "head_dim": 32}
    draft = random_draft(
        embed=embed, aux_layers=tuple(aux), target_vocab_size=len(embed), draft_vocab_size=len(embed), **sizes
    )
    draft.draft_to_target = torch.arange(len(embed))
    plan = plan_rows([np.array([False] * len(a) + [True] * len(b)) for a, b in chats], DRAFT_TOKENS)
    tokens = torch.tensor([token for a, b in chats for token in (*a, *b)])
    context, following = torch.cat(list(states))[plan.context], tokens[plan.teacher + 1]
    optimizer = torch.optim.AdamW(draft.parameters(), lr=3e-3)
    for _ in range(150):
        losses = [
            torch.nn.functional.cross_entropy(draft.logits(out)[step.live], following[step.labels[step.live]])
            for out, step in zip(unroll(draft, context, tokens, plan), plan.steps, strict=True)
        ]
        optimizer.zero_grad()
        sum(losses).backward()
        optimizer.step()
    return draft.eval()


def export(draft: Any, folder: Path, architecture: str) -> Path:
    from dataclasses import replace

    from fixtures_drafts import FACTS
    from headstart.formats import vllm

    folder.mkdir(parents=True, exist_ok=True)
    vllm.write(folder, draft, replace(FACTS, architectures=(architecture,), draft_tokens=DRAFT_TOKENS))
    return folder


def load_reference(folder: Path) -> Any:
    """The model in Transformers; that of its text part where only that one is known there."""
    import transformers

    from vllm_models import BARE

    bare = folder / BARE if (folder / BARE).exists() else folder
    wrapper = "vision_config" in json.loads((bare / "config.json").read_text())
    auto = transformers.AutoModelForImageTextToText if wrapper else transformers.AutoModelForCausalLM
    return auto.from_pretrained(bare, dtype=torch.float32, attn_implementation="eager").eval()


def served(folder: Path, options: dict[str, Any], draft: Path, mode: str, answers: list[list[int]]) -> dict[str, Any]:
    """Whether the answers with the draft are the same, and how many of its tokens were accepted."""
    speculation = {"method": "eagle3", "model": str(draft), "num_speculative_tokens": DRAFT_TOKENS}
    if mode == "compiled" and "compilation_config" in options:
        options = options | {"compilation_config": {**options["compilation_config"], "mode": None}}
    eager = mode == "eager"
    outputs, counters = generate(
        folder, options, prompts(), NEW_TOKENS, enforce_eager=eager, speculative_config=speculation
    )
    names = ("draft_tokens", "accepted_tokens")
    drafted, accepted = (int(counters[f"vllm:spec_decode_num_{name}"]) for name in names)
    same = [list(output.outputs[0].token_ids) for output in outputs] == answers
    return {"identical": same, "drafted": drafted, "accepted": accepted}


def run(folder: Path, out: Path, modes: Sequence[str]) -> dict[str, Any]:
    """All steps for one model; `out` is written after each, so that what was measured outlives a failure."""
    from vllm_models import LAYERS, models

    known = models()[folder.name]
    options = known.options | ({"enable_prefix_caching": False} if "hybrid" in known.traits else {})  # CPU: Triton only
    started, aux = time.perf_counter(), (1, 2, LAYERS)
    plain, _ = generate(folder, options, prompts(), NEW_TOKENS, enforce_eager=True)
    answers = [list(output.outputs[0].token_ids) for output in plain]
    chats = list(zip(prompts(), answers, strict=True))
    sequences = [prompt + answer for prompt, answer in chats]
    states, said = captured(folder, options, sequences, (0, *aux), out.parent / "states")
    model = load_reference(folder)
    expected = [reference(model, ids, (0, *aux)) for ids in sequences]
    differences = [float((a - b).abs().max() / b.abs().max()) for a, b in zip(states, expected, strict=True)]
    result = {"architecture": known.architecture, **said, "difference": max(differences)}
    out.write_text(json.dumps(result))
    embed = model.get_input_embeddings().weight.detach().clone()
    draft = export(overfit(embed, chats, [one[:, 1:] for one in states], aux), out.parent / "draft", known.architecture)
    for mode in modes:
        result[mode] = served(folder, options, draft, mode, answers)
        result["seconds"] = round(time.perf_counter() - started)
        out.write_text(json.dumps(result))
    return result


if __name__ == "__main__":
    os.environ.update({name: os.environ.get(name, value) for name, value in ENVIRONMENT.items()})
    sys.path.insert(0, str(TESTS))
    target, written, *wanted = sys.argv[1:]
    Path(written).parent.mkdir(parents=True, exist_ok=True)
    run(Path(target).resolve(), Path(written).resolve(), wanted)
