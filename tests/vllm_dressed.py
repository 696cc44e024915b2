"""Models that Transformers has no class for, or spells otherwise: the weights of a bare model of `vllm_models` under other names.

Where the mathematics is the same (a Kimi-K2.5 around DeepSeek-V3, a ChatGLM that is a GLM, a MiniCPM that is a Granite, a Plamo-3
that is a Gemma-3 with SiLU, a Moondream-3 that is a Phi), the bare model, kept in `<folder>/bare`, says what the states must be.
No images are allowed here, so vLLM never builds the towers and their weights need not exist.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from vllm_models import BARE, HEAD_DIM, HEADS, LAYERS, VOCAB, WIDTH, Model, save_tokenizer
from vllm_text import BARES

Config = dict[str, Any]
Weights = dict[str, Tensor]


def dressed(
    architecture: str,
    bare: str,
    path: str,
    *traits: str,
    config: Callable[[Config], Config],
    weights: Callable[[Weights], Weights],
    tokens: tuple[str, ...] = (),
    files: dict[str, Any] | None = None,
    options: dict[str, Any] | None = None,
    **more: Any,
) -> Model:
    """The text model `bare` of BARES with `config(its config.json)` and `weights(its tensors)`. files: further files by name."""

    def make(folder: Path) -> None:
        BARES[bare].make(folder / BARE)
        (folder / "config.json").write_text(json.dumps(config(_config(folder / BARE)), indent=2))
        tensors = weights(load_file(folder / BARE / "model.safetensors"))
        save_file(
            {name: tensor.contiguous() for name, tensor in tensors.items()},
            folder / "model.safetensors",
            {"format": "pt"},
        )
        save_tokenizer(folder, tokens)
        for name, content in (files or {}).items():
            (folder / name).write_text(content if isinstance(content, str) else json.dumps(content, indent=2))

    return Model(architecture, path, make, traits, BARES[bare].options | (options or {}), **more)


def save_grafted(bare: Path, folder: Path) -> Path:
    """The real text model in `bare` inside a LLaVA whose tower is described but has no weights: for text alone."""
    text = _config(bare)
    vision = {"model_type": "clip_vision_model", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    vision |= {"num_attention_heads": 2, "image_size": 28, "patch_size": 14, "projection_dim": 32}
    top = {
        "model_type": "llava",
        "architectures": ["LlavaForConditionalGeneration"],
        "image_token_index": text["vocab_size"] - 1,
    }
    shutil.copytree(bare, folder, ignore=shutil.ignore_patterns("*.safetensors", "manifest.json"))
    (folder / "config.json").write_text(
        json.dumps(top | {"text_config": text, "vision_config": vision, "tie_word_embeddings": True})
    )
    save_file(
        behind("language_model.")(load_file(bare / "model.safetensors")), folder / "model.safetensors", {"format": "pt"}
    )
    return folder


def _config(folder: Path) -> Config:
    return json.loads((folder / "config.json").read_text())


def behind(prefix: str) -> Callable[[Weights], Weights]:
    """Every name with `prefix` before it."""
    return lambda tensors: {prefix + name: tensor for name, tensor in tensors.items()}


def renamed(*pairs: tuple[str, str]) -> Callable[[Weights], Weights]:
    """Every name with the parts of the pairs replaced, in their order."""

    def rename(tensors: Weights) -> Weights:
        return {new_name(name): tensor for name, tensor in tensors.items()}

    def new_name(name: str) -> str:
        for old, new in pairs:
            name = name.replace(old, new)
        return name

    return rename


def fused(tensors: Weights, parts: tuple[str, ...], whole: str) -> Weights:
    """Tensors whose names differ in `parts` alone become one called `whole`, in that order."""
    result = dict(tensors)
    for name in [name for name in tensors if f".{parts[0]}." in name]:
        names = [name.replace(f".{parts[0]}.", f".{part}.") for part in parts]
        result[name.replace(f".{parts[0]}.", f".{whole}.")] = torch.cat([result.pop(item) for item in names])
    return result


def remote(model_type: str, base: str) -> dict[str, Any]:
    """A configuration class shipped with the model (such models need trust_remote_code), on Transformers' class `base`."""
    code = f"from transformers import {base}\n\n\nclass TinyConfig({base}):\n    model_type = {model_type!r}\n"
    return {"configuration_tiny.py": code}


AUTO = {"auto_map": {"AutoConfig": "configuration_tiny.TinyConfig"}}
TRUST = {"trust_remote_code": True}


# --- text models ---


def _chatglm(bare: Config) -> Config:
    return {
        "model_type": "chatglm",
        "num_layers": LAYERS,
        "padded_vocab_size": VOCAB,
        "hidden_size": WIDTH,
        "ffn_hidden_size": bare["intermediate_size"],
        "kv_channels": HEAD_DIM,
        "num_attention_heads": HEADS,
        "seq_length": 512,
        "layernorm_epsilon": bare["rms_norm_eps"],
        "add_qkv_bias": True,
        "multi_query_attention": True,
        "multi_query_group_num": 2,
        "original_rope": True,
        "tie_word_embeddings": False,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }


def _chatglm_weights(tensors: Weights) -> Weights:
    names = renamed(
        ("model.embed_tokens", "transformer.embedding.word_embeddings"),
        ("model.layers", "transformer.encoder.layers"),
        ("model.norm", "transformer.encoder.final_layernorm"),
        ("lm_head", "transformer.output_layer"),
        ("self_attn", "self_attention"),
        ("o_proj", "dense"),
        ("gate_up_proj", "dense_h_to_4h"),
        ("down_proj", "dense_4h_to_h"),
    )
    return fused(names(tensors), ("q_proj", "k_proj", "v_proj"), "query_key_value")


def _minicpm(bare: Config) -> Config:
    """Granite's multipliers in MiniCPM's spelling: embeddings, both branches of a layer, and the width before the head."""
    depth = bare["residual_multiplier"] * LAYERS**0.5
    own = {
        "scale_emb": bare["embedding_multiplier"],
        "scale_depth": depth,
        "dim_model_base": WIDTH / bare["logits_scaling"],
    }
    return bare | own | {"model_type": "minicpm", **AUTO}


def _plamo3(bare: Config) -> Config:
    windows = [bare["sliding_window"] if kind == "sliding_attention" else None for kind in bare["layer_types"]]
    return bare | {"model_type": "plamo3", "interleaved_sliding_window": windows, "sliding_window": None, **AUTO}


def _plamo3_weights(tensors: Weights) -> Weights:
    """Gemma's gains are 1 + w, Plamo's 1 + w, 1/5 + w and 5**-1.5 + w; its embeddings are not scaled."""
    names = renamed(
        ("model.layers", "model.layers.layers"),
        ("self_attn", "mixer"),
        ("input_layernorm", "pre_mixer_norm"),
        ("post_attention_layernorm", "post_mixer_norm"),
        ("pre_feedforward_layernorm", "pre_mlp_norm"),
        ("post_feedforward_layernorm", "post_mlp_norm"),
    )
    result = names(tensors)
    for name in result:
        if "post_mixer_norm" in name:
            result[name] = result[name] + 1 - 1 / 5
        elif "post_mlp_norm" in name:
            result[name] = result[name] + 1 - 5**-1.5
    embedding = result["model.embed_tokens.weight"]
    result["lm_head.weight"] = result.get("lm_head.weight", embedding)
    result["model.embed_tokens.weight"] = embedding * WIDTH**0.5
    fuse = fused(result, ("q_proj", "k_proj", "v_proj"), "qkv_proj")
    return fused(fuse, ("gate_proj", "up_proj"), "gate_up_proj")


DRESSED: dict[str, Model] = {
    "chatglm": dressed("ChatGLMModel", "glm", "transformer.encoder.layers", config=_chatglm, weights=_chatglm_weights),
    "minicpm": dressed(
        "MiniCPMForCausalLM",
        "granite",
        "model.layers",
        "residual trap",
        config=_minicpm,
        weights=dict,
        files=remote("minicpm", "LlamaConfig"),
        options=TRUST,
    ),
    "dbrx": dressed(
        "DbrxForCausalLM",
        "dbrx",
        "transformer.blocks",
        "moe",
        config=lambda bare: bare,
        weights=renamed((".experts.mlp.", ".experts.routed_experts.mlp.")),  # 0.32 fails to load DBRX's own names
    ),
    "plamo3": dressed(
        "Plamo3ForCausalLM",
        "gemma3_silu",
        "model.layers.layers",
        config=_plamo3,
        weights=_plamo3_weights,
        files=remote("plamo3", "Gemma3TextConfig"),
        options=TRUST,
    ),
}
