"""Tiny multimodal wrappers that Transformers has: the language model, the tower, and, for some, what prepares images."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import transformers
from safetensors.torch import load_file, save_file

from vllm_models import FIRST_TOKEN, HEAD_DIM, NO_IMAGES, VOCAB, WIDTH, Model, build, save_tokenizer, sizes
from vllm_text import SHORT_CONV

INNER = "language_model.model.layers"
VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2}
_IMAGE = {**VISION, "image_size": 28, "patch_size": 14}

Processor = Callable[[Any, Any], Any]


def _whole(
    architecture: str,
    config: Callable[[], Any],
    path: str = INNER,
    *traits: str,
    tokens: tuple[str, ...] = ("<image>",),
    processor: Processor | None = None,
    **more: Any,
) -> Model:
    """A wrapper as Transformers builds it. `processor(tokenizer, config)` makes what prepares its images."""

    def make(folder: Path) -> None:
        settings = config()
        build(settings, transformers.AutoModelForImageTextToText).save_pretrained(folder)
        _old_spelling(folder / "model.safetensors")
        tokenizer = save_tokenizer(folder, tokens)
        if processor is not None:
            processor(tokenizer, settings).save_pretrained(folder)

    images = ("images",) if processor else ()
    return Model(architecture, path, make, ("wrapper", *images, *traits), {} if processor else NO_IMAGES, **more)


def _old_spelling(file: Path) -> None:
    """Write CLIP and SigLIP towers as checkpoints do: Transformers 5 saves without the `vision_model` that vLLM looks for."""
    tensors = load_file(file)
    for name in list(tensors):
        for part in ("embeddings", "encoder", "pre_layrnorm", "post_layernorm", "head"):
            old = f"vision_tower.{part}."
            if old in name:
                tensors[name.replace(old, f"vision_tower.vision_model.{part}.")] = tensors.pop(name)
    save_file(tensors, file, {"format": "pt"})


def _text(config: str = "LlamaConfig", **changes: Any) -> Any:
    return getattr(transformers, config)(**sizes(**changes))


def _clip() -> Any:
    return transformers.CLIPVisionConfig(**_IMAGE, projection_dim=32)


def _siglip(**changes: Any) -> Any:
    return transformers.SiglipVisionConfig(**_IMAGE | {"vision_use_head": False} | changes)


def _llava() -> Any:
    return transformers.LlavaConfig(
        vision_config=_clip(), text_config=_text(), image_token_index=FIRST_TOKEN, image_seq_length=4
    )


def _llava_processor(tokenizer: Any, config: Any) -> Any:
    size = {"height": 28, "width": 28}
    return transformers.LlavaProcessor(
        image_processor=transformers.CLIPImageProcessor(size={"shortest_edge": 28}, crop_size=size),
        tokenizer=tokenizer,
        patch_size=config.vision_config.patch_size,
        vision_feature_select_strategy="default",
        image_token="<image>",
        num_additional_image_tokens=1,
    )


def _llava_next() -> Any:
    return transformers.LlavaNextConfig(
        vision_config=_clip(),
        text_config=_text("MistralConfig", sliding_window=None),
        image_token_index=FIRST_TOKEN,
        image_grid_pinpoints=[[28, 56], [56, 28], [56, 56]],
        image_seq_length=4,
    )


_QWEN_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
_QWEN_IDS = {
    "vision_start_token_id": FIRST_TOKEN,
    "vision_end_token_id": FIRST_TOKEN + 1,
    "image_token_id": FIRST_TOKEN + 2,
    "video_token_id": FIRST_TOKEN + 3,
}
_MROPE = {"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 10000.0}


def _qwen2_vl() -> Any:
    vision = {"depth": 2, "embed_dim": 32, "hidden_size": WIDTH, "num_heads": 2, "mlp_ratio": 2}
    return transformers.Qwen2VLConfig(vision_config=vision, text_config=sizes(rope_parameters=_MROPE), **_QWEN_IDS)


def _qwen2_5_vl() -> Any:
    vision = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 2,
        "out_hidden_size": WIDTH,
        "window_size": 56,
        "fullatt_block_indexes": [1],
    }
    return transformers.Qwen2_5_VLConfig(vision_config=vision, text_config=sizes(rope_parameters=_MROPE), **_QWEN_IDS)


def _qwen3_vl() -> Any:
    vision = {
        "depth": 3,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 2,
        "out_hidden_size": WIDTH,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0, 1],
    }
    text = sizes(head_dim=HEAD_DIM, rope_parameters=_MROPE | {"mrope_interleaved": True})
    return transformers.Qwen3VLConfig(vision_config=vision, text_config=text, **_QWEN_IDS)


def _qwen_vl_processor(patch: int, name: str) -> Processor:
    def make(tokenizer: Any, config: Any) -> Any:
        del config
        pixels = {"shortest_edge": 4 * patch * patch, "longest_edge": 64 * patch * patch}
        image = transformers.Qwen2VLImageProcessor(size=pixels, patch_size=patch)
        video = getattr(transformers, "Qwen3VLVideoProcessor" if "3" in name else "Qwen2VLVideoProcessor")(
            size=pixels, patch_size=patch
        )
        return getattr(transformers, name)(image_processor=image, tokenizer=tokenizer, video_processor=video)

    return make


def _gemma3() -> Any:
    return transformers.Gemma3Config(
        vision_config=_siglip(image_size=56),
        text_config=_text("Gemma3TextConfig", head_dim=HEAD_DIM, sliding_window=16),
        mm_tokens_per_image=4,
        boi_token_index=FIRST_TOKEN,
        eoi_token_index=FIRST_TOKEN + 1,
        image_token_index=FIRST_TOKEN + 2,
    )


def _internvl() -> Any:
    vision = VISION | {"image_size": [28, 28], "patch_size": [14, 14]}
    return transformers.InternVLConfig(
        vision_config=vision, text_config=_text("Qwen2Config"), image_token_id=FIRST_TOKEN, image_seq_length=1
    )


def _idefics(kind: str) -> Callable[[], Any]:
    def config() -> Any:
        return getattr(transformers, kind)(
            vision_config=_IMAGE, text_config=_text(), image_token_id=FIRST_TOKEN, scale_factor=2, pad_token_id=0
        )

    return config


def _aria() -> Any:
    return transformers.AriaConfig(
        vision_config=transformers.Idefics3VisionConfig(**_IMAGE),
        text_config=_text("AriaTextConfig", moe_num_experts=4, moe_topk=2, moe_num_shared_experts=1, head_dim=HEAD_DIM),
        projector_patch_to_query_dict={"4": 4},
        image_token_index=FIRST_TOKEN,
    )


def _paligemma() -> Any:
    return transformers.PaliGemmaConfig(
        vision_config=_siglip(projection_dim=WIDTH),
        text_config=_text("GemmaConfig", head_dim=HEAD_DIM, num_image_tokens=4),
        image_token_index=FIRST_TOKEN,
        projection_dim=WIDTH,
        hidden_size=WIDTH,
        vocab_size=VOCAB,
    )


def _mistral3() -> Any:
    return transformers.Mistral3Config(
        vision_config=transformers.PixtralVisionConfig(**_IMAGE, head_dim=16),
        text_config=_text("MistralConfig", head_dim=HEAD_DIM, sliding_window=None),
        image_token_index=FIRST_TOKEN,
    )


def _cohere2_vision() -> Any:
    return transformers.Cohere2VisionConfig(
        vision_config=_siglip(),
        text_config=_text("Cohere2Config", sliding_window=64),
        image_token_id=FIRST_TOKEN,
        alignment_intermediate_size=64,
    )


def _lfm2_vl() -> Any:
    vision = transformers.Siglip2VisionConfig(**VISION, patch_size=14, num_patches=16, vision_use_head=False)
    kinds = ["conv", "full_attention", "conv", "full_attention"]
    return transformers.Lfm2VlConfig(
        vision_config=vision,
        text_config=_text(
            "Lfm2Config",
            layer_types=kinds,
            block_auto_adjust_ff_dim=False,
            block_dim=WIDTH,
            block_ff_dim=192,
            conv_dim=WIDTH,
            conv_dim_out=WIDTH,
        ),
        image_token_id=FIRST_TOKEN,
        projector_hidden_size=32,
    )


WRAPPERS: dict[str, Model] = {
    "llava": _whole("LlavaForConditionalGeneration", _llava, processor=_llava_processor),
    "llava_next": _whole("LlavaNextForConditionalGeneration", _llava_next),
    "qwen2_vl": _whole("Qwen2VLForConditionalGeneration", _qwen2_vl, tokens=_QWEN_TOKENS),
    "qwen2_5_vl": _whole(
        "Qwen2_5_VLForConditionalGeneration",
        _qwen2_5_vl,
        tokens=_QWEN_TOKENS,
        processor=_qwen_vl_processor(14, "Qwen2_5_VLProcessor"),
    ),
    "qwen3_vl": _whole(
        "Qwen3VLForConditionalGeneration",
        _qwen3_vl,
        tokens=_QWEN_TOKENS,
        processor=_qwen_vl_processor(16, "Qwen3VLProcessor"),
    ),
    "gemma3_mm": _whole("Gemma3ForConditionalGeneration", _gemma3, tokens=("<boi>", "<eoi>", "<image_soft_token>")),
    "internvl": _whole("InternVLForConditionalGeneration", _internvl, tokens=("<IMG_CONTEXT>",)),
    "idefics3": _whole("Idefics3ForConditionalGeneration", _idefics("Idefics3Config"), "model.text_model.layers"),
    "smolvlm": _whole("SmolVLMForConditionalGeneration", _idefics("SmolVLMConfig"), "model.text_model.layers"),
    "aria": _whole("AriaForConditionalGeneration", _aria, "language_model.layers", "moe"),
    "paligemma": _whole("PaliGemmaForConditionalGeneration", _paligemma),
    "mistral3": _whole("Mistral3ForConditionalGeneration", _mistral3),
    "cohere2_vision": _whole("Cohere2VisionForConditionalGeneration", _cohere2_vision, INNER, "residual trap"),
    "lfm2_vl": _whole("Lfm2VlForConditionalGeneration", _lfm2_vl, INNER, "hybrid", **SHORT_CONV),
}
