"""What vLLM's EAGLE-3 proposer expects of a target beside its aux states, supplied where a class lacks it.

Read in 0.32 (`v1/spec_decode/llm_base_proposer.py` of the V1 runner, `v1/worker/gpu/spec_decode/eagle/utils.py` of V2):
`get_language_model().model.embed_tokens` (or `.embedding`), and for a wrapper that it does not know by name
`config.image_token_index`, which it copies to the draft's configuration and does not read.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from headstart.engines.vllm.tree import TextModel, find_text_model, language_model

_IMAGE_TOKENS = ("image_token_id", "media_placeholder_token_id", "img_context_token_id", "image_pad_token_id")


def make_draftable(model: nn.Module, vllm_config: Any) -> None:
    """Add the missing attributes to a model that has just been built. They are aliases: no weight is held twice."""
    text = find_text_model(model)
    target = _language_model(model)
    if not isinstance(getattr(target, "model", None), nn.Module):
        _alias(target, "model", text.holder)
    _offer_embedding(target.model, text)
    if getattr(type(model), "supports_multimodal", False):
        _offer_image_token(model, vllm_config)


def _language_model(model: nn.Module) -> Any:
    """The module that the proposer will ask; one that raises NotImplementedError is made to answer."""
    found = language_model(model)
    if found is model and hasattr(model, "get_language_model"):
        _alias(model, "get_language_model", lambda: model)
    return found


def _offer_embedding(inner: nn.Module, text: TextModel) -> None:
    if not hasattr(inner, "embed_tokens") and not hasattr(inner, "embedding") and text.embed is not None:
        _alias(inner, "embed_tokens", text.embed)


def _offer_image_token(model: Any, vllm_config: Any) -> None:
    if not hasattr(model, "config"):
        model.config = vllm_config.model_config.hf_config
    if getattr(model.config, "image_token_index", None) is None:
        found = (getattr(model.config, name, None) for name in _IMAGE_TOKENS)
        model.config.image_token_index = next((token for token in found if token is not None), -1)


def _alias(module: nn.Module, name: str, value: object) -> None:
    """An attribute that is no submodule: it appears in no list of modules or weights."""
    module.__dict__[name] = value
