"""Tiny random target models, saved as folders that Transformers, and so the engines, open like any real one.

Weights come from a fixed seed and are large enough that next-token distributions are far from flat; norm gains are
random, so that a forgotten gain changes every number. There are 512 rows of vocabulary, more than ids in the tokenizer
of `fixtures_text`: all are padded, `padvocab` (640 rows) more than the others.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from transformers import AutoModelForCausalLM as CausalLM
from transformers import (
    CLIPVisionConfig,
    CohereConfig,
    Gemma2Config,
    GraniteConfig,
    LlamaConfig,
    LlavaConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers import LlavaForConditionalGeneration as Llava

VOCAB = 512
SEED = 20


def save_llama(folder: Path, **changes: object) -> Path:
    """7 layers (the fewest whose default boundaries 2, n//2, n-3 differ), width 64, 4 heads, 2 key/value heads."""
    return save(build(llama_config(**changes)), folder)


def save_tied(folder: Path) -> Path:
    """The output head is the embedding."""
    return save_llama(folder, tie_word_embeddings=True)


def save_hd(folder: Path) -> Path:
    """head_dim 32, not hidden_size / heads = 16."""
    return save_llama(folder, head_dim=32)


def save_shallow(folder: Path) -> Path:
    """4 layers: the default boundaries would be 2, 2, 1."""
    return save_llama(folder, num_hidden_layers=4)


def save_padvocab(folder: Path) -> Path:
    """640 rows of embedding and head, far more than any tokenizer put beside them has ids."""
    return save_llama(folder, vocab_size=640)


def save_gemma(folder: Path) -> Path:
    """Gemma-2: gains 1+w, scaled embeddings, tied head, soft caps on logits and attention that bite, windows of 16."""
    config = Gemma2Config(
        **_sizes(num_hidden_layers=4),
        head_dim=16,
        query_pre_attn_scalar=16,
        sliding_window=16,
        final_logit_softcapping=30.0,
        attn_logit_softcapping=5.0,
    )
    model = build(config)
    with torch.no_grad():
        model.get_decoder().norm.weight.mul_(4).add_(4)  # raw logits of 10 to 40 meet the cap of 30
    return save(model, folder)


def save_granite(folder: Path) -> Path:
    """Logits are divided by logits_scaling."""
    return save(build(GraniteConfig(**_sizes(num_hidden_layers=3), logits_scaling=0.4)), folder)


def save_cohere(folder: Path) -> Path:
    """Mean-centred norm without bias; logits are multiplied by logit_scale; tied head."""
    return save(build(CohereConfig(**_sizes(num_hidden_layers=3), logit_scale=3.0)), folder)


def save_wrapper(folder: Path) -> Path:
    """A Llava around the very weights of `save_llama`, with a tiny CLIP tower."""
    vision = CLIPVisionConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=9,  # more than the text model has: the longest list is not the right one
        num_attention_heads=2,
        image_size=28,
        patch_size=14,
        projection_dim=32,
    )
    text = build(llama_config())
    config = LlavaConfig(vision_config=vision, text_config=text.config, image_token_index=VOCAB - 1)
    torch.manual_seed(SEED)
    model = Llava(config)
    missing, unexpected = model.model.language_model.load_state_dict(text.model.state_dict(), strict=True)
    assert not missing
    assert not unexpected
    model.lm_head.load_state_dict(text.lm_head.state_dict())
    return save(model, folder)


KINDS: dict[str, Callable[[Path], Path]] = {
    "llama": save_llama,
    "tied": save_tied,
    "hd": save_hd,
    "shallow": save_shallow,
    "padvocab": save_padvocab,
    "gemma": save_gemma,
    "granite": save_granite,
    "cohere": save_cohere,
    "wrapper": save_wrapper,
}


def llama_config(**changes: object) -> LlamaConfig:
    return LlamaConfig(**_sizes(**changes), rms_norm_eps=1e-5)


def build(config: PreTrainedConfig) -> PreTrainedModel:
    """A causal language model with random weights and random norm gains, float32, the same on every call."""
    torch.manual_seed(SEED)
    model = CausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for module in model.modules():
            if type(module).__name__.endswith("Norm") and isinstance(module.weight, nn.Parameter):
                module.weight.add_(torch.rand_like(module.weight) - 0.5)
    return model


def save(model: PreTrainedModel, folder: Path) -> Path:
    model.save_pretrained(folder)
    return folder


def _sizes(**changes: object) -> dict:
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 7,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.2,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    return sizes | changes
