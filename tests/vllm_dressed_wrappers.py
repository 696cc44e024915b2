"""The multimodal wrappers of `vllm_models` that carry the renamed weights of a bare text model (see `vllm_dressed`)."""

from __future__ import annotations

import torch

from vllm_dressed import AUTO, TRUST, Config, Weights, behind, dressed, fused, renamed
from vllm_models import FIRST_TOKEN, LAYERS, MLA_CURE, NO_IMAGES, VOCAB, WIDTH, Model

INNER = "language_model.model.layers"


def _kimi_k25(text: Config) -> Config:
    return {
        "model_type": "kimi_k25",
        "text_config": text | {"model_type": "kimi_k2"},
        "vision_config": {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "patch_size": 14,
            "pos_emb_height": 4,
            "pos_emb_width": 4,
            "merge_kernel_size": [2, 2],
        },
        "media_placeholder_token_id": FIRST_TOKEN,
        "image_token_id": FIRST_TOKEN,
        "tie_word_embeddings": False,
    }


_KIMI_IMAGES = {
    "image_processor_type": "Kimi_K25ImageProcessor",
    "media_proc_cfg": {
        "patch_size": 14,
        "merge_kernel_size": 2,
        "temporal_merge_kernel_size": 4,
        "in_patch_limit": 64,
        "in_patch_limit_each_frame": 64,
        "patch_limit_on_one_side": 16,
        "fixed_output_tokens": None,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    },
}


def _kimi_vl(text: Config) -> Config:
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    return {
        "model_type": "kimi_vl",
        "text_config": text,
        "vision_config": vision | {"init_pos_emb_height": 4, "init_pos_emb_width": 4},
        "media_placeholder_token_id": FIRST_TOKEN,
    }


def _ovis(text: Config) -> Config:
    backbone = {"model_type": "aimv2", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    backbone |= {"num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    tower = {"model_type": "aimv2_visual_tokenizer", "vocab_size": 64, "hidden_stride": 2, "backbone_config": backbone}
    return {"model_type": "ovis", "llm_config": text, "visual_tokenizer_config": tower, "hidden_size": WIDTH}


def _minicpmv(text: Config) -> Config:
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    vision |= {"image_size": 28, "patch_size": 14}
    own = {
        "model_type": "minicpmv",
        "version": 2.6,
        "query_num": 4,
        "vision_config": vision,
        "drop_vision_last_layer": False,
    }
    return text | own | AUTO


_MINICPMV_CODE = """
from transformers import Qwen2Config, SiglipVisionConfig


class TinyConfig(Qwen2Config):
    model_type = "minicpmv"

    def __init__(self, vision_config=None, **others):
        super().__init__(**others)
        self.vision_config = SiglipVisionConfig(**(vision_config or {}))
"""


def _moondream3(bare: Config) -> Config:
    text = {
        "dim": WIDTH,
        "ff_dim": bare["intermediate_size"],
        "n_layers": LAYERS,
        "vocab_size": VOCAB,
        "max_context": 512,
        "n_heads": bare["num_attention_heads"],
        "n_kv_heads": bare["num_key_value_heads"],
        "rope_theta": bare["rope_parameters"]["rope_theta"],
        "moe": {"start_layer": LAYERS, "n_experts": 4, "n_experts_per_tok": 2, "expert_inner_dim": 64},
    }
    vision = {
        "enc_dim": 32,
        "enc_n_layers": 1,
        "enc_ff_dim": 48,
        "enc_n_heads": 2,
        "proj_inner_dim": 32,
        "crop_size": 28,
    }
    return {"model_type": "moondream3", "config": {"text": text, "vision": vision}, "tie_word_embeddings": False}


def _moondream3_weights(tensors: Weights) -> Weights:
    """Phi's names, and tau scaling that is one everywhere."""
    names = renamed(
        ("model.embed_tokens", "text.wte"),
        ("model.layers", "text.blocks"),
        ("model.final_layernorm", "text.post_ln"),
        ("input_layernorm", "ln"),
        ("self_attn", "attn"),
        (".dense.", ".proj."),
    )
    result = fused(names(tensors), ("q_proj", "k_proj", "v_proj"), "qkv")
    for layer in range(LAYERS):
        heads = result[f"text.blocks.{layer}.attn.qkv.weight"].shape[0] // 3 // (WIDTH // 2)
        tau = f"text.blocks.{layer}.attn.tau."
        result |= {
            tau + "alpha": torch.zeros(heads),
            tau + "wq": torch.zeros(heads, 3 * WIDTH),
            tau + "wv": torch.zeros(heads, 3 * WIDTH),
        }
    return result


def _midasheng(text: Config) -> Config:
    audio = {"embed_dim": 32, "depth": 1, "num_heads": 2}
    return {
        "model_type": "midashenglm",
        "text_config": text,
        "audio_encoder_config": audio,
        "audio_token_id": FIRST_TOKEN,
    }


DRESSED_WRAPPERS: dict[str, Model] = {
    "kimi_k25": dressed(
        "KimiK25ForConditionalGeneration",
        "deepseek3",
        INNER,
        "wrapper",
        "mla",
        "moe",
        config=_kimi_k25,
        weights=behind("language_model."),
        tokens=("<|media_pad|>",),
        files={"preprocessor_config.json": _KIMI_IMAGES},
        options=MLA_CURE | {"limit_mm_per_prompt": {"vision_chunk": 0}},
    ),
    "kimi_vl": dressed(
        "KimiVLForConditionalGeneration",
        "deepseek2",
        INNER,
        "wrapper",
        "mla",
        "moe",
        config=_kimi_vl,
        weights=behind("language_model."),
        tokens=("<|media_pad|>",),
        options=MLA_CURE | NO_IMAGES,
    ),
    "ovis": dressed(
        "Ovis",
        "qwen2",
        "llm.model.layers",
        "wrapper",
        config=_ovis,
        weights=behind("llm."),
        tokens=("<image>",),
        options=NO_IMAGES,
    ),
    "minicpmv": dressed(
        "MiniCPMV",
        "qwen2",
        "llm.model.layers",
        "wrapper",
        config=_minicpmv,
        weights=behind("llm."),
        tokens=("<unk>", "<image>", "</image>"),
        files={"configuration_tiny.py": _MINICPMV_CODE},
        options=NO_IMAGES | TRUST,
    ),
    "moondream3": dressed(
        "Moondream3ForCausalLM",
        "phi_half",
        "text.blocks",
        "wrapper",
        config=_moondream3,
        weights=_moondream3_weights,
        tokens=("<image>",),
        options=NO_IMAGES,
    ),
    "midashenglm": dressed(
        "MiDashengLMModel",
        "qwen2",
        "decoder.model.layers",
        "wrapper",
        config=_midasheng,
        weights=behind("decoder."),
        tokens=("<|AUDIO|>",),
        options={"limit_mm_per_prompt": {"audio": 0}},
        cannot="failed to be inspected",
        note="it imports torchaudio, which the test environment does not have",
    ),
}
