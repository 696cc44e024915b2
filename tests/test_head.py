"""The rebuilt end of the target against Transformers' own, for every family that does something of its own there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transformers import GPTNeoXConfig, NemotronConfig, PreTrainedModel, Qwen3NextConfig

import fixtures_models
from headstart.engines.hooks import Decoder, capturing, find_decoder
from headstart.errors import UserError
from headstart.target.families import final_norm
from headstart.target.head import TargetHead
from headstart.target.layers import check_boundaries, suggest_boundaries

IDS = torch.arange(5, 45)[None]
SMALL = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "initializer_range": 0.3,
}
CONFIGS = {
    "llama": fixtures_models.llama_config(),
    "gpt_neox": GPTNeoXConfig(**SMALL),  # LayerNorm with bias
    "nemotron": NemotronConfig(**SMALL, num_key_value_heads=2, head_dim=16),  # LayerNorm with gain 1+w
    "qwen3_next": Qwen3NextConfig(  # gain 1+w, linear attention
        **SMALL,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=2,
        num_experts_per_tok=1,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        layer_types=["linear_attention", "full_attention"],
    ),
}


@torch.no_grad()
def last_and_logits(model: PreTrainedModel, decoder: Decoder) -> tuple[torch.Tensor, torch.Tensor]:
    with capturing(decoder.layers, [decoder.num_layers]) as captured:
        logits = model(input_ids=IDS).logits[0]
    return captured.states[decoder.num_layers][0], logits


@pytest.fixture(scope="module", params=CONFIGS)
def built(request: pytest.FixtureRequest) -> tuple[PreTrainedModel, Decoder, TargetHead]:
    model = fixtures_models.build(CONFIGS[request.param])
    decoder = find_decoder(model, model.config.num_hidden_layers)
    with torch.no_grad():
        for parameter in decoder.final_norm.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return model, decoder, TargetHead.from_model(model, decoder.final_norm)


def test_rebuilt_logits_are_the_models_own(built: tuple[PreTrainedModel, Decoder, TargetHead]) -> None:
    model, decoder, head = built
    last, logits = last_and_logits(model, decoder)
    torch.testing.assert_close(head.logits(last), logits, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(head.norm(last), decoder.final_norm(last), rtol=1e-5, atol=1e-5)


def test_the_probed_norm_is_the_one_known_for_the_family(built: tuple[PreTrainedModel, Decoder, TargetHead]) -> None:
    model, _, head = built
    kind = head.norm_kind + ("_offset" if head.norm_offset else "")
    assert kind == final_norm(model.config.model_type)


def test_rows(built: tuple[PreTrainedModel, Decoder, TargetHead]) -> None:
    model, decoder, head = built
    last, logits = last_and_logits(model, decoder)
    rows = torch.tensor([3, 17, 90])
    torch.testing.assert_close(head.logits(last, rows), logits[:, rows], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(head.restricted(rows).logits(last), head.logits(last, rows))


@pytest.mark.parametrize("kind", ["llama", "tied", "gemma", "cohere", "granite"])
def test_saved_heads_are_read_back(kind: str, tmp_path: Path) -> None:
    model = {
        "llama": lambda: fixtures_models.build(fixtures_models.llama_config()),
        "tied": lambda: fixtures_models.build(fixtures_models.llama_config(tie_word_embeddings=True)),
    }.get(kind, lambda: load(fixtures_models.KINDS[kind](tmp_path / "model")))()
    decoder = find_decoder(model, model.config.num_hidden_layers)
    head = TargetHead.from_model(model, decoder.final_norm)
    head.save(tmp_path)
    back = TargetHead.read(tmp_path)
    last, logits = last_and_logits(model, decoder)
    assert torch.equal(back.logits(last), head.logits(last))
    torch.testing.assert_close(back.logits(last), logits, rtol=1e-5, atol=1e-5)
    assert torch.equal(back.embed, model.get_input_embeddings().weight)
    assert back.tied == head.tied == (kind in ("tied", "gemma", "cohere"))
    moved = back.to(dtype=torch.bfloat16)
    assert moved.tied == back.tied
    assert moved.lm_head.dtype == torch.bfloat16


def load(folder: Path) -> PreTrainedModel:
    return fixtures_models.CausalLM.from_pretrained(folder).eval()


def test_a_soft_cap_bends(tmp_path: Path) -> None:
    """Otherwise the tests above would pass without one."""
    model = load(fixtures_models.save_gemma(tmp_path))
    decoder = find_decoder(model, 4)
    last, logits = last_and_logits(model, decoder)
    head = TargetHead.from_model(model, decoder.final_norm)
    uncapped = TargetHead(**{**head.__dict__, "softcap": None}).logits(last)
    assert (uncapped - logits).abs().max() > 5
    assert logits.abs().max() < 30


def test_an_unknown_norm_is_refused() -> None:
    class Cubed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.eps = nn.Parameter(torch.ones(64)), 1e-5

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x**3 * self.weight

    model = fixtures_models.build(fixtures_models.llama_config())
    with pytest.raises(UserError, match="final norm Cubed computes something"):
        TargetHead.from_model(model, Cubed())


def test_a_missing_head_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        TargetHead.read(tmp_path)


@pytest.mark.parametrize(
    ("boundaries", "message"),
    [((), "there is none"), ((-1, 2), "-1 is not"), ((2, 9), "9 is not"), ((2, 2), "repeated"), ((3, 2), "3")],
)
def test_boundaries_that_do_not_fit(boundaries: tuple[int, ...], message: str) -> None:
    with pytest.raises(UserError, match=message) as raised:
        check_boundaries(boundaries, 8)
    assert "capture.aux_layers" in str(raised.value)


def test_a_shallow_target_gets_a_suggestion() -> None:
    """Case C30: (2, 2, 1) for four layers."""
    with pytest.raises(UserError, match="default aux layers") as raised:
        check_boundaries(None, 4)
    assert "[1, 2, 3]" in str(raised.value)
    assert check_boundaries((1, 2, 3), 4) == (1, 2, 3)
    assert check_boundaries((0, 4), 4) == (0, 4)
    assert check_boundaries(None, 32) == (2, 16, 29)


@given(st.integers(1, 200))
def test_every_suggestion_fits(num_layers: int) -> None:
    assert check_boundaries(suggest_boundaries(num_layers), num_layers) == suggest_boundaries(num_layers)
    if num_layers >= 7:
        assert check_boundaries(None, num_layers) == suggest_boundaries(num_layers)
