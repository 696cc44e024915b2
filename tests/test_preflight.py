"""Settings that only a late stage would refuse are refused before the first one starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fixtures_models import save_llama, save_shallow
from fixtures_text import save_tokenizer
from headstart import config, pipeline
from headstart.errors import UserError

ALL = pipeline.up_to(None)


def run_for(root: Path, target: Path, *overrides: str) -> config.Run:
    (root / "data.jsonl").write_text(json.dumps({"prompt": "Name a number.", "completion": "40"}) + "\n")
    raw = {"target": {"model": str(target)}, "data": {"sources": [str(root / "data.jsonl")], "max_length": 256}}
    return config.build(raw, overrides)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tokenizer(save_llama(tmp_path_factory.mktemp("target")))


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("capture.aux_layers=[1, 2, 99]", "99 is not a boundary"),
        ("capture.aux_layers=[2, 2]", "repeated"),
        ("data.max_length=2048", "more than the target can read"),
        ("draft.num_kv_heads=3", "num_heads a multiple of num_kv_heads"),
        ("draft.head_dim=5", "head_dim even"),
        ("target.device=cuda:9", "cannot be used"),
        ("vocab.size=100000", "larger than the target's vocabulary"),
        ("evaluate.prompts=['no_such_set']", "no_such_set"),
        ("evaluate.prompts=['sharegpt']", "for training"),
    ],
)
def test_nothing_starts(tmp_path: Path, target: Path, override: str, said: str) -> None:
    run = run_for(tmp_path, target, override)
    with pytest.raises(UserError, match=said):
        pipeline.begin(run, tmp_path / "run", ALL, quiet=True)
    assert not (tmp_path / "run").exists()


def test_a_draft_with_mla_needs_a_target_that_has_it(tmp_path: Path, target: Path) -> None:
    run = run_for(tmp_path, target, "draft.attention=mla", "export.formats=['vllm']")
    with pytest.raises(UserError, match="no multi-head latent attention"):
        pipeline.begin(run, tmp_path / "run", ALL, quiet=True)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("draft.head_dim=64", "head_dim cannot be set"),
        ("draft.num_layers=1", "set export.formats"),
        ("draft.sliding_window=64", "vLLM serves no such draft"),
    ],
)
def test_settings_that_mla_does_not_take(tmp_path: Path, target: Path, override: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        run_for(tmp_path, target, "draft.attention=mla", override)


def test_flex_attention_is_refused_on_a_cpu(tmp_path: Path, target: Path) -> None:
    with pytest.raises(UserError, match="no backward pass on a CPU"):
        pipeline.begin(
            run_for(tmp_path, target, "train.attention_backend=flex", "target.device=cpu"), tmp_path / "run", ALL
        )


def test_a_compiled_training_needs_a_compiler(tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", str(tmp_path / "no-compiler"))
    run = run_for(tmp_path, target, "train.compile=true", "target.device=cpu")
    with pytest.raises(UserError, match=r"C\+\+ compiler"):
        pipeline.begin(run, tmp_path / "run", ALL, quiet=True)


def test_heads_that_do_not_share_out_are_refused(tmp_path: Path, target: Path) -> None:
    run = run_for(tmp_path, target, "target.engine=vllm")
    run = run.model_copy(update={"target": run.target.model_copy(update={"tensor_parallel": 3})})
    with pytest.raises(UserError, match="does not divide the target's 4 attention heads"):
        pipeline.begin(run, tmp_path / "run", ALL, quiet=True)


def test_a_shallow_target_is_refused_with_layers_that_fit(tmp_path: Path) -> None:
    """Case C30, before the answers are made."""
    shallow = save_tokenizer(save_shallow(tmp_path / "target"))
    with pytest.raises(UserError, match=r"capture\.aux_layers, for instance to \[1, 2, 3\]"):
        pipeline.begin(run_for(tmp_path, shallow), tmp_path / "run", ALL)
