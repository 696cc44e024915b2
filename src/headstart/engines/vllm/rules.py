"""What changed for capture and serving between vLLM releases 0.11 and 0.32, in one table, and the refusals.

Each fact was read in that release's sources; where it was also run, the comment says so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headstart.engines.vllm.arch import Arch

if TYPE_CHECKING:
    from headstart.engines.vllm.releases import Release

# extract_hidden_states came with 0.17.0; until 0.24 it loses rows of chunked prefills, hybrids or the last layer.
FIRST_EXTRACTION, SANE_EXTRACTION = "0.17.0", "0.25.0"
ANY_MODEL_TYPE = "0.22.0"  # before, config/speculative.py takes EAGLE-3 only for a list of model types
CPU_SERVES = "0.22.0"  # v1/worker/cpu_model_runner.py: before, no speculative decoding or no auxiliary states

# Met when running 0.16.0 beside 0.32.0 on a CPU; what is done about each stands where it is done.
# - language_model_only came with 0.17.0; limit_mm_per_prompt of 0 for every modality is understood by both.
# - The processor of Kimi-K2.5 wants the tokenizer, so wrappers cannot start with skip_tokenizer_init.
# - Without Transformers 5 neither rope_parameters (rope.py) nor a tokenizer that it saved is read as it was meant.
# - The CPU worker of 0.16 has no device of its own. MLA on a CPU came with 0.28.0 (before: VLLM_MLA_DISABLE).
# - From 0.19.0 on a prompt starts only when all of it fits (scheduler_reserve_full_isl): before, prompts preempt each other.
# - The CPU attention of 0.32 takes blocks of a multiple of 32 tokens alone; 0.16 only advises it.

PIPELINE = "pipeline parallelism leaves each process with some of the layers only; use tensor parallelism"
FIXED_LIST = "before 0.22 vLLM takes EAGLE-3 drafts only for a fixed list of model types"
BACKENDS = frozenset(f"Transformers{kind}ForCausalLM" for kind in ("", "MoE", "MultiModal", "MultiModalMoE"))

# Packages of vllm/models have a class per platform; these have one for CPU too, since the release named.
GENERIC = {
    "DeepseekV32ForCausalLM": "0.29.0",
    "GlmMoeDsaForCausalLM": "0.29.0",
    "DeepseekV4ForCausalLM": "0.30.0",
}
# What vLLM's CPU build starts and cannot run, or runs wrongly; met when running 0.32.0.
NO_MAMBA_KERNEL = "its CPU build has no kernel for Mamba-1 layers"
WRONG_ON_CPU = "its CPU build computes wrong numbers for it"
ON_CPU = {
    **dict.fromkeys(("MambaForCausalLM", "FalconMambaForCausalLM", "JambaForCausalLM"), NO_MAMBA_KERNEL),
    **dict.fromkeys(("Lfm2ForCausalLM", "Lfm2MoeForCausalLM", "Lfm2VlForConditionalGeneration"), WRONG_ON_CPU),
}
DIFFUSION = frozenset(("DiffusionGemmaForBlockDiffusion",))

# Text models that wrappers name by model type alone; Transformers' MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.
ARCHITECTURE_OF = {
    "cohere": "CohereForCausalLM",
    "cohere2": "Cohere2ForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "exaone4": "Exaone4ForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "glm4": "Glm4ForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "granite": "GraniteForCausalLM",
    "internlm2": "InternLM2ForCausalLM",
    "lfm2": "Lfm2ForCausalLM",
    "lfm2_moe": "Lfm2MoeForCausalLM",
    "llama": "LlamaForCausalLM",
    "ministral3": "Ministral3ForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "nemotron_h": "NemotronHForCausalLM",
    "opt": "OPTForCausalLM",
    "phi": "PhiForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
}


def not_a_decoder(arch: Arch) -> str | None:
    """Why an architecture is no decoder language model, None when it is one."""
    if arch.enc_dec:
        return f"{arch.name} is an encoder-decoder: its decoder reads an encoder's states that a draft does not have"
    if arch.name in DIFFUSION:
        return f"{arch.name} writes blocks by diffusion, not one token after the other"
    return None


def not_served(arch: Arch, release: Release, device: str) -> str | None:
    """Why vLLM itself does not run an architecture on the device, None when it does."""
    if device == "cpu" and (why := ON_CPU.get(arch.name)):
        return f"vLLM {release.version} does not run {arch.name} on a CPU: {why}"
    if device == "cuda" or arch.inner is None or ".nvidia." not in arch.inner:
        return None
    since = GENERIC.get(arch.name)
    if since is not None and release.at_least(since):
        return None
    return f"vLLM {release.version} runs {arch.name} with CUDA kernels alone, not on CPU"


def no_capture(arch: Arch, release: Release, device: str) -> str | None:
    """Why hidden states of an architecture cannot be captured on any rung, None when they can."""
    if why := not_a_decoder(arch) or not_served(arch, release, device) or _no_layers(arch):
        return why
    if arch.lanes and not (arch.delivers and release.at_least(SANE_EXTRACTION)):
        return f"a layer of {arch.name} leaves no single residual stream, and vLLM {release.version} hands over none"
    if arch.table == "transformers" and not release.at_least(SANE_EXTRACTION):
        return (
            f"vLLM {release.version} runs {arch.name} through its Transformers backend, whose layers cannot be hooked"
        )
    return None


def no_serving(arch: Arch, release: Release, device: str, pipeline: int) -> str | None:
    """Why no EAGLE-3 draft can be served beside it."""
    if device == "cpu" and not release.at_least(CPU_SERVES):
        return f"vLLM {release.version} serves no EAGLE-3 draft on CPU; {CPU_SERVES} is the first that does"
    if pipeline > 1:
        return PIPELINE
    if why := not_a_decoder(arch) or not_served(arch, release, device) or _no_layers(arch):
        return why
    if device == "cpu" and arch.hybrid:  # run with GraniteMoeHybrid in 0.32: wrong with vLLM's own n-gram drafts too
        return "on a CPU vLLM's speculative decoding gives wrong tokens for models with recurrent layers"
    if arch.lanes and not arch.delivers:
        return f"a layer of {arch.name} leaves no single residual stream, and vLLM {release.version} hands over none"
    return None


def _no_layers(arch: Arch) -> str | None:
    if arch.stacks > 1:
        return f"{arch.name} alternates between {arch.stacks} stacks of layers, so a boundary has no single state"
    if arch.layers_path is None and arch.table != "transformers":
        return f"the decoder layers of {arch.cls} were not found in its source"
    return None


def before_extraction(release: Release) -> str:
    """Why a release below SANE_EXTRACTION is hooked."""
    if not release.at_least(FIRST_EXTRACTION):
        return f"that release cannot extract hidden states ({FIRST_EXTRACTION} is the first), so its layers are hooked"
    return f"its extraction loses rows (sound from {SANE_EXTRACTION} on), so its layers are hooked"


def like_a_decoder(architecture: str) -> bool:
    """Whether a name that no release knows may be that of a decoder language model."""
    return any(word in architecture for word in ("CausalLM", "ConditionalGeneration", "LMHead"))
