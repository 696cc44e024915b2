"""Wrappers that the real vLLM 0.16.0 loads on a CPU: a tiny Kimi-K2.5, and SmolLM2's own weights inside a LLaVA.

Configurations are in the schema of Transformers 4 (`rope_theta` at the top), which both 0.16's and ours read.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from fixtures_text import save_tokenizer

SEED = 20
VISION = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
# What KimiK25ProcessingInfo asks of the media processor that the model's folder ships.
MEDIA = """from transformers import BaseImageProcessor
class TinyMedia(BaseImageProcessor):
    num_frames_per_chunk = 4
    def media_tokens_calculator(self, chunk):
        return 1
"""


def save_kimi(folder: Path) -> tuple[Path, Path]:
    """A Kimi-K2.5 of 6 layers (MLA, the first dense, 8 experts after it), and beside it its text model alone.

    Returns the folders of the wrapper and of the bare DeepseekV3, which hold the same text weights.
    """
    bare = folder / "bare"
    text = _deepseek(bare)
    wrapped = _save_tokenizer(folder / "kimi")
    weights = {f"language_model.{name}": value for name, value in load_file(bare / "model.safetensors").items()}
    save_file(weights | _kimi_tower(text["hidden_size"]), wrapped / "model.safetensors", {"format": "pt"})
    _write(wrapped / "config.json", _kimi_config(text))
    _write(
        wrapped / "preprocessor_config.json",
        {"image_processor_type": "TinyMedia", "auto_map": {"AutoImageProcessor": "media.TinyMedia"}},
    )
    (wrapped / "media.py").write_text(MEDIA)
    return wrapped, bare


def save_llava(folder: Path, text: Path) -> Path:
    """A LLaVA around the very weights, tokenizer and template of `text`, with a tiny random CLIP tower."""
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(text / name, folder)
    inner = json.loads((text / "config.json").read_text())
    weights = {f"language_model.{name}": value for name, value in load_file(text / "model.safetensors").items()}
    save_file(weights | _clip_tower(inner["hidden_size"]), folder / "model.safetensors", {"format": "pt"})
    config = {
        "architectures": ["LlavaForConditionalGeneration"],
        "model_type": "llava",
        "dtype": "float32",
        "text_config": inner,
        "vision_config": {"model_type": "clip_vision_model", **VISION, "image_size": 28, "patch_size": 14},
        "image_token_index": 0,
        "projector_hidden_act": "gelu",
        "tie_word_embeddings": True,
    }
    _write(folder / "config.json", config)
    return folder


def _save_tokenizer(folder: Path) -> Path:
    """Described as Transformers 4 reads it: ours writes a class and a list that 0.16's cannot load."""
    path = save_tokenizer(folder) / "tokenizer_config.json"
    described = json.loads(path.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    del described["extra_special_tokens"]
    _write(path, described)
    return folder


def _deepseek(folder: Path) -> dict[str, Any]:
    """Save the text model; returns its configuration in the old schema."""
    torch.manual_seed(SEED)
    config = DeepseekV3Config(
        **_TEXT, rope_parameters={"rope_type": "default", "rope_theta": 50000.0}, attn_implementation="eager"
    )
    model = DeepseekV3ForCausalLM(config).eval()
    with torch.no_grad():
        for name, module in model.named_modules():
            if type(module).__name__.endswith("Norm"):
                module.weight.add_(torch.rand_like(module.weight) - 0.5)
            if name.endswith("mlp.gate"):
                nn.init.normal_(module.weight, std=0.2)
    model.save_pretrained(folder)
    _save_tokenizer(folder)
    return {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", **_TEXT, "rope_theta": 50000.0}


_TEXT = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 192,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "q_lora_rank": 64,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "v_head_dim": 32,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "dtype": "float32",
}


def _kimi_config(text: dict[str, Any]) -> dict[str, Any]:
    return {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "dtype": "float32",
        "text_config": text,
        "vision_config": {**VISION, "patch_size": 14, "init_pos_emb_height": 8, "init_pos_emb_width": 8},
        "media_placeholder_token_id": 511,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "tie_word_embeddings": False,
    }


def _kimi_tower(text_width: int) -> dict[str, Tensor]:
    """Random weights of MoonViT3dPretrainedModel and the projector, by the names of vLLM 0.16 (kimi_k25_vit.py)."""
    width, inner = VISION["hidden_size"], VISION["intermediate_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "vision_tower.patch_embed.proj.weight": (width, 3, 14, 14),
        "vision_tower.patch_embed.proj.bias": (width,),
        "vision_tower.patch_embed.pos_emb.weight": (8, 8, width),
        **_norm("vision_tower.encoder.final_layernorm", width),
        **_norm("mm_projector.pre_norm", width),
        **_linear("mm_projector.proj.0", 4 * width, 4 * width),
        **_linear("mm_projector.proj.2", text_width, 4 * width),
    }
    for index in range(VISION["num_hidden_layers"]):
        block = f"vision_tower.encoder.blocks.{index}"
        shapes |= _norm(f"{block}.norm0", width) | _norm(f"{block}.norm1", width)
        shapes |= _linear(f"{block}.wqkv", 3 * width, width) | _linear(f"{block}.wo", width, width)
        shapes |= _linear(f"{block}.mlp.fc0", inner, width) | _linear(f"{block}.mlp.fc1", width, inner)
    return _random(shapes)


def _clip_tower(text_width: int) -> dict[str, Tensor]:
    width, inner = VISION["hidden_size"], VISION["intermediate_size"]
    tower = "vision_tower.vision_model"
    shapes: dict[str, tuple[int, ...]] = {
        f"{tower}.embeddings.class_embedding": (width,),
        f"{tower}.embeddings.patch_embedding.weight": (width, 3, 14, 14),
        f"{tower}.embeddings.position_embedding.weight": (5, width),
        **_norm(f"{tower}.pre_layrnorm", width),
        **_norm(f"{tower}.post_layernorm", width),
        **_linear("multi_modal_projector.linear_1", text_width, width),
        **_linear("multi_modal_projector.linear_2", text_width, text_width),
    }
    for index in range(VISION["num_hidden_layers"]):
        layer = f"{tower}.encoder.layers.{index}"
        shapes |= _norm(f"{layer}.layer_norm1", width) | _norm(f"{layer}.layer_norm2", width)
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            shapes |= _linear(f"{layer}.self_attn.{name}", width, width)
        shapes |= _linear(f"{layer}.mlp.fc1", inner, width) | _linear(f"{layer}.mlp.fc2", width, inner)
    return _random(shapes)


def _linear(name: str, rows: int, columns: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (rows, columns), f"{name}.bias": (rows,)}


def _norm(name: str, width: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


def _random(shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(SEED)
    return {name: torch.randn(shape, generator=generator) * 0.02 for name, shape in shapes.items()}


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2))
