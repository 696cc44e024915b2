"""Which rung each model takes in each vLLM, and the reasons given. Answers come from the shipped table."""

from __future__ import annotations

import pytest

from headstart.engines.vllm import ladder, releases, rules
from headstart.engines.vllm.ladder import Device, Rung

KIMI, LLAVA = "KimiK25ForConditionalGeneration", "LlavaForConditionalGeneration"

CAPTURE: list[tuple[str, str, Device, str, str]] = [
    ("0.16.0", KIMI, "cuda", "hooks", "has no EAGLE-3 interface; that release cannot extract"),
    ("0.16.0", KIMI, "cpu", "hooks", "0.17.0 is the first"),
    ("0.16.0", "LlamaForCausalLM", "cuda", "hooks", "with the EAGLE-3 interface; that release cannot extract"),
    ("0.24.0", KIMI, "cuda", "hooks", "sound from 0.25.0 on"),
    ("0.25.0", KIMI, "cuda", "native", "with the EAGLE-3 interface"),
    ("0.32.0", KIMI, "cuda", "native", "vLLM 0.32.0 serves KimiK25ForConditionalGeneration with the EAGLE-3 interface"),
    ("0.32.0", "LlamaForCausalLM", "cpu", "native", ""),
    ("0.32.0", "Gemma2ForCausalLM", "cpu", "shim", "has no EAGLE-3 interface; headstart's plugin adds it"),
    ("0.32.0", "MiMoForCausalLM", "cuda", "shim", "carries the EAGLE-3 flag, but mimo:MiMoModel hands over no states"),
    ("0.32.0", "Exaone4_5_ForConditionalGeneration", "cuda", "shim", "carries the EAGLE-3 flag"),
    ("0.32.0", "DeepseekV32ForCausalLM", "cuda", "shim", "does not hand over the state behind its last layer"),
    ("0.32.0", "IQuestLoopCoderForCausalLM", "cuda", "shim", "the last pass counts"),
    ("0.32.0", "Olmo2ForCausalLM", "cpu", "native", "through its Transformers backend"),
    ("0.32.0", "DeepseekV4ForCausalLM", "cuda", "native", ""),
    ("0.32.0", "KimiK3ForConditionalGeneration", "cpu", "refused", "with CUDA kernels alone, not on CPU"),
    ("0.32.0", "Gemma3nForCausalLM", "cuda", "refused", "leaves no single residual stream"),
    ("0.32.0", "HrmTextForCausalLM", "cuda", "refused", "2 stacks of layers"),
    ("0.32.0", "WhisperForConditionalGeneration", "cuda", "refused", "encoder-decoder"),
    ("0.32.0", "DiffusionGemmaForBlockDiffusion", "cuda", "refused", "blocks by diffusion"),
    ("0.16.0", "SmolLM3ForCausalLM", "cuda", "refused", "whose layers cannot be hooked"),
    ("0.32.0", "AquilaForCausalLM", "cpu", "transformers", "does not know AquilaForCausalLM"),
    ("0.16.0", "Llama9ForCausalLM", "cpu", "refused", "it has "),
    ("0.32.0", "BertModel", "cpu", "refused", "by its name it is not a decoder"),
]


@pytest.mark.parametrize(("version", "architecture", "device", "rung", "why"), CAPTURE)
def test_capture(version: str, architecture: str, device: Device, rung: str, why: str) -> None:
    found = ladder.capture_rung(releases.known(version), architecture, device=device)
    assert found.name == rung
    assert why in found.why
    assert "\n" not in found.why


SERVE: list[tuple[str, str, Device, str, str]] = [
    ("0.16.0", KIMI, "cuda", "refused", "only for a fixed list of model types"),
    ("0.16.0", "LlamaForCausalLM", "cuda", "native", "if its model_type is on the list"),
    ("0.16.0", "LlamaForCausalLM", "cpu", "refused", "0.22.0 is the first"),
    ("0.18.0", KIMI, "cuda", "native", "if its model_type is on the list"),
    ("0.22.0", "Gemma2ForCausalLM", "cpu", "shim", "headstart's plugin adds it"),
    ("0.32.0", KIMI, "cpu", "native", ""),
    ("0.32.0", "DeepseekV32ForCausalLM", "cuda", "native", ""),
    ("0.32.0", "WhisperForConditionalGeneration", "cuda", "refused", "encoder-decoder"),
    ("0.32.0", "Qwen4ExpForCausalLM", "cuda", "refused", "leaves no single residual stream"),
]


@pytest.mark.parametrize(("version", "architecture", "device", "rung", "why"), SERVE)
def test_serve(version: str, architecture: str, device: Device, rung: str, why: str) -> None:
    found = ladder.serve_rung(releases.known(version), architecture, device=device)
    assert found.name == rung
    assert why in found.why


@pytest.mark.parametrize(
    ("inner", "rung", "why"),
    [
        (None, "shim", "its text model is chosen by the configuration"),
        ("LlamaForCausalLM", "native", ""),
        ("Gemma2ForCausalLM", "shim", "its text model Gemma2ForCausalLM does not deliver"),
    ],
)
def test_a_wrapper_is_what_its_text_model_is(inner: str | None, rung: str, why: str) -> None:
    found = ladder.capture_rung(releases.known("0.32.0"), LLAVA, inner=inner)
    assert found.name == rung
    assert why in found.why


def test_the_text_model_of_a_configuration() -> None:
    assert ladder.inner_architecture({"architectures": ["XForCausalLM"], "model_type": "llama"}) == "XForCausalLM"
    assert ladder.inner_architecture({"model_type": "llama"}) == "LlamaForCausalLM"
    assert ladder.inner_architecture({"model_type": "novel"}) is None
    known = releases.known("0.32.0").archs
    assert [name for name in rules.ARCHITECTURE_OF.values() if name not in known] == []


def test_pipeline_parallelism_is_refused() -> None:
    release = releases.known("0.32.0")
    for rung in (ladder.capture_rung, ladder.serve_rung):
        assert rung(release, "LlamaForCausalLM", pipeline=2) == Rung("refused", rules.PIPELINE)


REFUSED = {  # what 0.32 cannot be captured of on a GPU, by reason
    "encoder-decoder": {f"{name}ForConditionalGeneration" for name in ("CohereAsr", "NemotronParse", "Whisper")},
    "diffusion": {"DiffusionGemmaForBlockDiffusion"},
    "stacks of layers": {"HrmTextForCausalLM"},
    "no single residual stream": {
        *("Gemma3nForCausalLM", "Gemma3nForConditionalGeneration", "HYV4ForCausalLM", "InklingForCausalLM"),
        *("InklingForConditionalGeneration", "Qwen4ExpForCausalLM", "Qwen4ExpForConditionalGeneration"),
    },
}


def test_census_of_0_32() -> None:
    found = ladder.census(releases.known("0.32.0"), "cuda")
    refused = {entry.arch.name: entry.capture.why for entry in found.entries if not entry.capture.works}
    for reason, names in REFUSED.items():
        assert {name for name, why in refused.items() if reason in why} == names
    assert len(refused) == sum(map(len, REFUSED.values()))
    assert len(found.entries) == 262
    assert sum(found.totals("capture").values()) == 262
    assert found.share >= 0.95


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("version", ["0.11.2", "0.16.0", "0.22.0", "0.25.0", "0.32.0"])
def test_nearly_every_decoder_can_be_captured(version: str, device: Device) -> None:
    found = ladder.census(releases.known(version), device)
    assert found.share >= 0.95
    assert all(entry.capture.why and entry.serve.why for entry in found.entries)
