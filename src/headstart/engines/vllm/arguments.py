"""What vLLM is started with: everything follows from what the engine is opened for and from the target's anatomy.

Arguments of `vllm.LLM` (names that 0.16 to 0.32 share) and environment variables. What the user gives in
target.engine_options is laid over them, except where another value would make the states wrong.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headstart.config import Target
from headstart.engines.base import Use
from headstart.engines.vllm.ladder import Rung
from headstart.engines.vllm.variables import LAYERS_PATH, SHIM
from headstart.errors import UserError
from headstart.target.anatomy import Anatomy

EXTENSION = "headstart.engines.vllm.worker.HeadstartWorker"
CONNECTOR = "headstart.engines.vllm.connector"
BACKEND = {False: "TransformersForCausalLM", True: "TransformersMultiModalForCausalLM"}
MODALITIES = ("image", "video", "audio", "vision_chunk")

ROOM = 2  # positions after the longest sequence: near the limit vLLM leaves the hidden states of a whole batch out
GIB = 1 << 30
HALF = 0.5  # of the free memory, at most, for the cache on a CPU

# Values that correctness needs: (argument, why it cannot be another one).
_OURS = {
    "model": "it is target.model",
    "worker_extension_cls": "our commands reach the workers by it",
}
_OURS_IN_CAPTURE = {
    "enforce_eager": "the checks of the states hook into layers, and compiled layers call no hooks",
    "speculative_config": "it makes vLLM keep the hidden states",
    "kv_transfer_config": "it hands the hidden states over",
    "pipeline_parallel_size": "vLLM keeps hidden states of one pipeline stage only",
}


@dataclass(frozen=True)
class Plan:
    """How vLLM is to be started. capture: rung and boundaries for the host, None when only answers are wanted."""

    python: str | None
    environment: Mapping[str, str]
    arguments: Mapping[str, Any]
    layers_path: str | None
    capture: Mapping[str, Any] | None = None
    rung: Rung | None = None


def plan(folder: Path, target: Target, use: Use, anatomy: Anatomy, rung: Rung | None, device: str) -> Plan:
    """The start for `use`. rung: how states are captured, None to generate only. device: `cpu` or `cuda`.

    Raises:
        UserError: an engine option that correctness forbids, or a length that the target does not read.
    """
    arguments = base_arguments(folder, target, use, anatomy, device)
    environment = base_environment(target, use, anatomy, device)
    capture = None
    if use.boundaries is not None:
        assert rung is not None
        boundaries = sorted({*use.boundaries, anatomy.required("num_layers")})
        arguments |= _capture_arguments(rung, boundaries, anatomy)
        capture = {"rung": "hooks" if rung.name == "hooks" else "cache", "boundaries": boundaries}
        if rung.name == "shim":
            environment |= shim_environment(target, anatomy)
    arguments = with_options(arguments, target, capturing=capture is not None)
    return Plan(target.python, environment, arguments, target.layers_path, capture, rung)


def shim_environment(target: Target, anatomy: Anatomy) -> dict[str, str]:
    """What tells the plugin to give this architecture the interface, and where its layers are."""
    path = {LAYERS_PATH: target.layers_path} if target.layers_path else {}
    return {SHIM: str(anatomy.architecture), **path}


def base_arguments(folder: Path, target: Target, use: Use, anatomy: Anatomy, device: str) -> dict[str, Any]:
    """What every start has, whatever it is for."""
    arguments: dict[str, Any] = {
        "model": str(folder),
        "dtype": dtype_of(target, device),
        "max_model_len": _length(use, anatomy),
        "max_num_seqs": use.batch_size,
        "max_num_batched_tokens": max(use.batch_tokens, use.batch_size) + use.batch_size,
        "tensor_parallel_size": target.tensor_parallel,
        "trust_remote_code": target.trust_remote_code,
        "skip_tokenizer_init": not anatomy.wrapper,  # the processors of some wrappers (Kimi-K2.5) ask for it at the start
        "disable_log_stats": False,
        "worker_extension_cls": EXTENSION,
        "seed": 0,
    }
    if anatomy.wrapper:
        arguments["limit_mm_per_prompt"] = media_limits(use)
    if device == "cpu":
        arguments["enforce_eager"] = True  # compiling takes minutes and gains a third
    if device == "cpu" and anatomy.hybrid:
        arguments["enable_prefix_caching"] = False  # the recurrent states would be copied by Triton kernels
    if device == "cpu" and anatomy.mla:
        arguments["compilation_config"] = MLA_ON_CPU
    return arguments


def media_limits(use: Use) -> dict[str, int]:
    """How many of each modality a prompt may have: what the data have, so that the rest of a tower costs no memory."""
    found: dict[str, int] = {**dict.fromkeys(MODALITIES, 0), **use.media}
    return found | {"vision_chunk": found["image"]}  # what Kimi-K2.5 calls images and videos


# The CPU kernel of rotary embeddings is wrong for the three-dimensional queries of MLA (0.16 to 0.32): use plain torch.
# MLA itself came to the CPU with 0.28, and EAGLE-3 beside Kimi fails on it in 0.32: run it as ordinary heads.
# A draft with MLA is always MLA, and a cache of both kinds has no common block size on a CPU: the target is then MLA as well.
MLA_AS_HEADS = {"VLLM_MLA_DISABLE": "1"}
MLA_ON_CPU = {"mode": 0, "custom_ops": ["all", "-rotary_embedding"]}


def base_environment(target: Target, use: Use, anatomy: Anatomy, device: str) -> dict[str, str]:
    if device == "cpu":
        space = cache_gib(use, anatomy, 4 if dtype_of(target, device) == "float32" else 2)
        return {"VLLM_CPU_KVCACHE_SPACE": str(space), **(MLA_AS_HEADS if anatomy.mla else {})}
    index = target.device.partition(":")[2]
    return {"CUDA_VISIBLE_DEVICES": _visible(int(index))} if index else {}


def _visible(index: int) -> str:
    """The GPU of that number, by the name it has for a process that sees it alone: CUDA counts those that are visible."""
    seen = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    if not seen:
        return str(index)
    if index >= len(seen):
        raise UserError(
            f"target.device = 'cuda:{index}', but CUDA_VISIBLE_DEVICES shows {len(seen)} GPUs", do="cuda:0 is the first"
        )
    return seen[index]


def cache_gib(use: Use, anatomy: Anatomy, itemsize: int) -> int:
    """GiB of key/value cache on a CPU, whole: the sequences decoded together, or two passes of a capture with its states."""
    heads = anatomy.num_kv_heads or anatomy.num_heads or 1
    width = 2 * heads * (anatomy.head_dim or anatomy.required("hidden_size"))
    token = anatomy.required("num_layers") * width
    tokens = use.batch_size * use.longest
    if use.boundaries is not None:
        token += (len(use.boundaries) + 1) * anatomy.required("hidden_size")
        tokens = min(tokens, 2 * (use.batch_tokens + use.longest))
    wanted = -(-token * itemsize * tokens // GIB)
    return max(1, min(wanted, int(HALF * free_memory() / GIB)))


def free_memory() -> int:
    """Bytes of memory that could be had."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def dtype_of(target: Target, device: str) -> str:
    if target.dtype != "auto":
        return target.dtype
    return "float32" if device == "cpu" else "bfloat16"


def with_options(arguments: dict[str, Any], target: Target, *, capturing: bool) -> dict[str, Any]:
    """The user's options laid over ours.

    Raises:
        UserError: an option would make the states wrong or the sequences too long; says why.
    """
    ours = _OURS | (_OURS_IN_CAPTURE if capturing else {})
    for name, value in target.engine_options.items():
        if name in ours and arguments.get(name) != value:
            raise UserError(f"target.engine_options.{name} cannot be set: {ours[name]}", do="leave it out")
    options = dict(target.engine_options)
    if options.get("enable_prefix_caching") and arguments.get("enable_prefix_caching") is False:
        raise UserError(
            "target.engine_options.enable_prefix_caching cannot be true here: cached prefixes pass no layer hooks",
            do="leave it out",
        )
    if "compilation_config" in options and "compilation_config" in arguments:
        raise UserError(
            "target.engine_options.compilation_config cannot be set here: with any other, vLLM's CPU kernel rotates the "
            "queries of MLA wrongly, and nothing tells",
            do="leave it out",
        )
    length = options.get("max_model_len", arguments["max_model_len"])
    if length < arguments["max_model_len"]:
        raise UserError(
            f"target.engine_options.max_model_len = {length} is too short",
            looked_for=f"at least {arguments['max_model_len']}, for the longest sequence",
            do="leave it out, or lower data.max_length",
        )
    return arguments | options


def _length(use: Use, anatomy: Anatomy) -> int:
    limit = anatomy.max_positions or use.longest + ROOM
    if use.longest > limit:
        raise UserError(f"a sequence of {use.longest} tokens is more than the target reads ({limit})")
    return min(use.longest + ROOM, limit)


def _common_names(anatomy: Anatomy) -> dict[str, int]:
    """Sizes by the names that vLLM asks the drafter's configuration for.

    It is a copy of the target's in which aliases are lost (n_head for num_attention_heads: GPT-2, DBRX; 0.32,
    transformers_utils/configs/extract_hidden_states.py). A wrapper's copy keeps its text configuration whole.
    """
    names = {
        "num_attention_heads": anatomy.num_heads,
        "hidden_size": anatomy.hidden_size,
        "num_hidden_layers": anatomy.num_layers,
    }
    return {} if anatomy.text_path else {name: size for name, size in names.items() if size is not None}


def _capture_arguments(rung: Rung, boundaries: list[int], anatomy: Anatomy) -> dict[str, Any]:
    if rung.name == "hooks":
        return {"enforce_eager": True, "enable_prefix_caching": False}
    arguments: dict[str, Any] = {
        "enforce_eager": True,
        "speculative_config": {
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {
                "hf_config": {"eagle_aux_hidden_state_layer_ids": boundaries, **_common_names(anatomy)}
            },
        },
        "kv_transfer_config": {
            "kv_connector": "HeadstartConnector",
            "kv_connector_module_path": CONNECTOR,
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {
                "use_synchronization_lock": False,
                "allow_custom_save_path": True,
                "num_writer_threads": 2,
            },
        },
    }
    if rung.name == "transformers":
        arguments["hf_overrides"] = {"architectures": [BACKEND[anatomy.wrapper]]}
    return arguments
