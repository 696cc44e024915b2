"""What model families do at their output and where they keep their layers, by the names their configurations use.

Plain dictionaries in, no torch. Sources: the modelling files of Transformers 5.19 (`modeling_<family>.py`), and
vLLM's for the paths of layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

Norm = Literal["rms", "rms_offset", "layer", "layer_offset", "unknown"]
Fact = tuple[float | None, str]

# The final norm, by model type. A type that is not here is `unknown` until the model is loaded and its norm is probed.
_NORMS: dict[Norm, str] = {
    "rms": """
        afmoe apertus arcee aria_text bitnet chameleon cwm deepseek_ocr2_text deepseek_v2 deepseek_v3
        deepseek_v32 diffllama doge dots1 emu3 ernie4_5 ernie4_5_moe exaone4 exaone_moe falcon_h1 falcon_mamba
        flex_olmo gemma3n_text gemma4_text glm glm4 glm4_moe glm4_moe_lite glm4v_moe_text glm4v_text glm_moe_dsa
        gpt_oss granite granitemoe granitemoehybrid granitemoeshared helium hunyuan_v1_dense hunyuan_v1_moe
        hyperclovax jamba jetmoe kimi_k2 kimi_linear lfm2 lfm2_moe llama llama4_text longcat_flash mamba mamba2
        mimo_v2_flash minicpm minicpm3 minimax minimax_m2 ministral ministral3 mistral mistral4 mixtral
        mllama_text_model nanochat nemotron_h olmo2 olmo3 olmo_hybrid olmoe phi3 qwen2 qwen2_5_vl
        qwen2_5_vl_text qwen2_moe qwen2_vl qwen2_vl_text qwen3 qwen3_moe qwen3_omni_moe_text qwen3_vl_moe_text
        qwen3_vl_text seed_oss smollm3 solar_open zamba zamba2
    """,
    "rms_offset": """
        gemma gemma2 gemma3_text minimax_m3_vl_text muse_glimmer_text qwen3_5 qwen3_5_moe qwen3_5_moe_text
        qwen3_5_text qwen3_next recurrent_gemma vaultgemma
    """,
    "layer": """
        bloom codegen cohere cohere2 cohere2_moe dbrx falcon gpt2 gpt_bigcode gpt_neo gpt_neox gptj jais2 mpt
        olmo opt persimmon phi phimoe stablelm starcoder2
    """,
    "layer_offset": "nemotron",
}
_NORM_OF: dict[str, Norm] = {name: kind for kind, names in _NORMS.items() for name in names.split()}

# Where vLLM's classes keep the decoder layers, when not at the usual place of a text model or of a wrapper.
USUAL_PATH, USUAL_WRAPPED_PATH = "model.layers", "language_model.model.layers"
_PATHS = {
    "transformer.h": "bloom codegen falcon gpt2 gpt_bigcode gpt_neo gptj qwen",
    "transformer.blocks": "dbrx mpt",
    "transformer.encoder.layers": "chatglm",
    "gpt_neox.layers": "gpt_neox",
    "model.decoder.layers": "opt",
    "backbone.layers": "falcon_mamba mamba mamba2",
    "llm.model.layers": "minicpmo minicpmv ovis",
    "model.text_model.layers": "idefics3 smolvlm",
    "language_model.layers": "aria",
}
_PATH_OF = {name: path for path, names in _PATHS.items() for name in names.split()}

# `logits_scaling` multiplies the logits in these families; in all others that have it, it divides them, as in Granite.
_SCALING_MULTIPLIES = frozenset(("hyperclovax",))
_MULTIPLIERS = ("logit_scale", "lm_head_multiplier", "output_multiplier")


def final_norm(model_type: str | None) -> Norm:
    """`rms` and `layer` have gain w, their `_offset` forms gain 1+w."""
    return _NORM_OF.get(model_type or "", "unknown")


def layers_path(model_type: str | None, wrapper: bool) -> tuple[str, str]:
    """The path of the decoder layers in vLLM's class, and how it is known."""
    if model_type in _PATH_OF:
        return _PATH_OF[model_type], f"known for model_type {model_type}"
    if wrapper:
        return USUAL_WRAPPED_PATH, "usual path inside a wrapper; certain once loaded"
    return USUAL_PATH, "usual path of a text model; certain once loaded"


def softcap(text: Mapping[str, Any]) -> Fact:
    """c of `c * tanh(logits / c)`, and its key."""
    return _number(text, "final_logit_softcapping")


def attention_softcap(text: Mapping[str, Any]) -> Fact:
    """The same inside attention; fused kernels leave it out silently."""
    return _number(text, "attn_logit_softcapping")


def logit_scale(text: Mapping[str, Any]) -> Fact:
    """What the logits are multiplied by, and the key that says so; (None, "") when nothing does."""
    for key in _MULTIPLIERS:
        value, evidence = _number(text, key)
        if value is not None:
            return value, evidence
    return _scaling(text)


def _scaling(text: Mapping[str, Any]) -> Fact:
    value, key = _number(text, "logits_scaling")
    if value:
        multiplies = text.get("model_type") in _SCALING_MULTIPLIES
        return (value if multiplies else 1 / value), key
    base, width = text.get("dim_model_base"), text.get("hidden_size")
    if base and width:  # MiniCPM divides the states before the head
        return base / width, "dim_model_base"
    return None, ""


def _number(text: Mapping[str, Any], key: str) -> Fact:
    value = text.get(key)
    return (float(value), key) if isinstance(value, (int, float)) and not isinstance(value, bool) else (None, "")
