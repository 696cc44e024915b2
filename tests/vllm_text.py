"""The text models of `vllm_models` that Transformers has a class for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import transformers

from vllm_models import HEAD_DIM, HEADS, MLA_CURE, WIDTH, Model, build, sizes


def text(architecture: str, config: str, path: str = "model.layers", *traits: str, **changes: Any) -> Model:
    """A text model that Transformers has under the class `config`. A change to None leaves that size out."""
    more = {key: changes.pop(key) for key in ("options", "cannot", "tolerance", "note") if key in changes}

    def make(folder: Path) -> None:
        settings = {key: value for key, value in sizes(**changes).items() if value is not None}
        build(getattr(transformers, config)(**settings)).save_pretrained(folder)

    return Model(architecture, path, make, traits, **more)


_MLA = {
    "q_lora_rank": 64,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "v_head_dim": 32,
    "num_key_value_heads": HEADS,
}
_EXPERTS = {"moe_intermediate_size": 64, "num_experts_per_tok": 2}

SHORT_CONV: dict[str, Any] = {
    "cannot": "logits rebuilt from the captured last state are not the target's own",
    "note": "vLLM's attention layers between short convolutions are wrong but for the first row: the identity check stops",
}
_MAMBA1 = "has no attribute 'selective_scan_fwd'"

TEXT: dict[str, Model] = {
    "llama": text("LlamaForCausalLM", "LlamaConfig"),
    "qwen2": text("Qwen2ForCausalLM", "Qwen2Config"),
    "qwen3": text("Qwen3ForCausalLM", "Qwen3Config", head_dim=HEAD_DIM),
    "mistral": text("MistralForCausalLM", "MistralConfig", sliding_window=None),
    "gemma": text("GemmaForCausalLM", "GemmaConfig", head_dim=HEAD_DIM),
    "gemma2": text(
        "Gemma2ForCausalLM",
        "Gemma2Config",
        "model.layers",
        "softcap",
        head_dim=HEAD_DIM,
        query_pre_attn_scalar=HEAD_DIM,
        sliding_window=16,
        final_logit_softcapping=5.0,
        attn_logit_softcapping=5.0,
    ),
    "gemma3": text("Gemma3ForCausalLM", "Gemma3TextConfig", head_dim=HEAD_DIM, sliding_window=16),
    "cohere": text("CohereForCausalLM", "CohereConfig", "model.layers", "residual trap", logit_scale=3.0),
    "cohere2": text(
        "Cohere2ForCausalLM", "Cohere2Config", "model.layers", "residual trap", sliding_window=64, logit_scale=3.0
    ),
    "exaone4": text(
        "Exaone4ForCausalLM",
        "Exaone4Config",
        "model.layers",
        "residual trap",
        sliding_window=16,
        sliding_window_pattern=4,
    ),
    "stablelm": text("StableLmForCausalLM", "StableLmConfig", "model.layers", "residual trap"),
    "phimoe": text(
        "PhiMoEForCausalLM",
        "PhimoeConfig",
        "model.layers",
        "residual trap",
        "moe",
        num_local_experts=4,
        num_experts_per_tok=2,
        attention_bias=True,
        lm_head_bias=True,
    ),
    "granite": text(
        "GraniteForCausalLM",
        "GraniteConfig",
        attention_multiplier=HEAD_DIM**-0.5,
        residual_multiplier=0.5,
        embedding_multiplier=3.0,
        logits_scaling=0.4,
    ),
    "granitemoe": text(
        "GraniteMoeForCausalLM", "GraniteMoeConfig", "model.layers", "moe", num_local_experts=4, residual_multiplier=0.5
    ),
    "granitehybrid": text(
        "GraniteMoeHybridForCausalLM",
        "GraniteMoeHybridConfig",
        "model.layers",
        "residual trap",
        "hybrid",
        layer_types=["mamba", "attention", "mamba", "attention"],
        mamba_n_heads=8,
        mamba_d_head=32,
        mamba_d_state=16,
        mamba_n_groups=1,
        num_local_experts=0,
        shared_intermediate_size=192,
    ),
    "glm4": text("Glm4ForCausalLM", "Glm4Config", head_dim=HEAD_DIM),
    "nemotron": text("NemotronForCausalLM", "NemotronConfig"),
    "mixtral": text(
        "MixtralForCausalLM", "MixtralConfig", "model.layers", "moe", num_local_experts=4, sliding_window=None
    ),
    "qwen2moe": text(
        "Qwen2MoeForCausalLM",
        "Qwen2MoeConfig",
        "model.layers",
        "moe",
        num_experts=4,
        shared_expert_intermediate_size=64,
        **_EXPERTS,
    ),
    "qwen3moe": text(
        "Qwen3MoeForCausalLM", "Qwen3MoeConfig", "model.layers", "moe", head_dim=HEAD_DIM, num_experts=4, **_EXPERTS
    ),
    "olmoe": text("OlmoeForCausalLM", "OlmoeConfig", "model.layers", "moe", num_experts=4, num_experts_per_tok=2),
    "gptoss": text(
        "GptOssForCausalLM",
        "GptOssConfig",
        "model.layers",
        "moe",
        head_dim=HEAD_DIM,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=16,
    ),
    "deepseek3": text(
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        "model.layers",
        "mla",
        "moe",
        first_k_dense_replace=2,
        n_routed_experts=4,
        n_shared_experts=1,
        n_group=1,
        topk_group=1,
        topk_method="noaux_tc",
        scoring_func="sigmoid",
        rope_interleave=True,
        options=MLA_CURE,
        **_MLA,
        **_EXPERTS,
    ),
    "opt": text(
        "OPTForCausalLM",
        "OPTConfig",
        "model.decoder.layers",
        ffn_dim=192,
        word_embed_proj_dim=WIDTH,
        intermediate_size=None,
    ),
    "gpt2": text("GPT2LMHeadModel", "GPT2Config", "transformer.h", num_key_value_heads=None),
    "gptj": text("GPTJForCausalLM", "GPTJConfig", "transformer.h", rotary_dim=16, num_key_value_heads=None),
    "bloom": text(
        "BloomForCausalLM",
        "BloomConfig",
        "transformer.h",
        num_key_value_heads=None,
        tolerance=5e-4,
        note="its tanh GELU is an exact one in vLLM",
    ),
    "falcon": text("FalconForCausalLM", "FalconConfig", "transformer.h", new_decoder_architecture=True, num_kv_heads=2),
    "mamba": text("MambaForCausalLM", "MambaConfig", "backbone.layers", "hybrid", state_size=16, cannot=_MAMBA1),
    "mamba2": text(
        "Mamba2ForCausalLM",
        "Mamba2Config",
        "backbone.layers",
        "hybrid",
        intermediate_size=None,
        num_heads=8,
        head_dim=32,
        state_size=16,
        n_groups=1,
        chunk_size=16,
    ),
    "jamba": text(
        "JambaForCausalLM",
        "JambaConfig",
        "model.layers",
        "hybrid",
        "moe",
        num_experts=2,
        num_experts_per_tok=1,
        attn_layer_period=2,
        attn_layer_offset=1,
        mamba_d_state=16,
        cannot=_MAMBA1,
    ),
    "lfm2": text(
        "Lfm2ForCausalLM",
        "Lfm2Config",
        "model.layers",
        "hybrid",
        layer_types=["conv", "full_attention", "conv", "full_attention"],
        block_auto_adjust_ff_dim=False,
        block_dim=WIDTH,
        block_ff_dim=192,
        conv_dim=WIDTH,
        conv_dim_out=WIDTH,
        **SHORT_CONV,
    ),
    "falconh1": text(
        "FalconH1ForCausalLM",
        "FalconH1Config",
        "model.layers",
        "hybrid",
        mamba_n_heads=8,
        mamba_d_head=32,
        mamba_d_ssm=256,
        mamba_d_state=16,
    ),
    "qwen3next": text(
        "Qwen3NextForCausalLM",
        "Qwen3NextConfig",
        "model.layers",
        "hybrid",
        "moe",
        head_dim=HEAD_DIM,
        num_experts=4,
        shared_expert_intermediate_size=64,
        linear_num_value_heads=4,
        linear_num_key_heads=2,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        cannot="CPU GDN attention requires BF16",
        **_EXPERTS,
    ),
    "glm": text(
        "GlmForCausalLM", "GlmConfig", "model.layers", "transformers backend", head_dim=HEAD_DIM, attention_bias=True
    ),
    "deepseek2": text(
        "DeepseekV2ForCausalLM",
        "DeepseekV2Config",
        "model.layers",
        "mla",
        "moe",
        first_k_dense_replace=2,
        n_routed_experts=4,
        n_shared_experts=1,
        n_group=1,
        topk_group=1,
        topk_method="greedy",
        scoring_func="softmax",
        options=MLA_CURE,
        **_MLA,
        **_EXPERTS,
    ),
    "phi": text("PhiForCausalLM", "PhiConfig", "model.layers", "transformers backend"),
    "olmo2": text("Olmo2ForCausalLM", "Olmo2Config", "model.layers", "transformers backend"),
    "gptneox": text(
        "GPTNeoXForCausalLM", "GPTNeoXConfig", "model.layers", "transformers backend", num_key_value_heads=None
    ),
    "smollm3": text("SmolLM3ForCausalLM", "SmolLM3Config", "model.layers", "transformers backend"),
    "ernie45": text("Ernie4_5ForCausalLM", "Ernie4_5Config", head_dim=HEAD_DIM),
    "hyperclovax": text("HyperCLOVAXForCausalLM", "HyperCLOVAXConfig", "model.layers", "residual trap"),
    "apertus": text(
        "ApertusForCausalLM", "ApertusConfig", tolerance=2e-3, note="vLLM has xIELU's constants in bfloat16"
    ),
}

# Twins of the above with other settings, for `vllm_dressed` to rename.
BARES: dict[str, Model] = TEXT | {
    "dbrx": text(
        "DbrxForCausalLM",
        "DbrxConfig",
        "transformer.blocks",
        "moe",
        d_model=WIDTH,
        hidden_size=None,
        num_key_value_heads=None,
        attn_config={"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        ffn_config={"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": WIDTH},
    ),
    "gemma3_silu": text(
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        head_dim=HEAD_DIM,
        sliding_window=16,
        query_pre_attn_scalar=HEAD_DIM,
        hidden_activation="silu",
    ),
    "phi_half": text(
        "PhiForCausalLM",
        "PhiConfig",
        "model.layers",
        "transformers backend",
        num_attention_heads=2,
        num_key_value_heads=2,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    ),
}
