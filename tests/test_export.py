"""The export stage: what it writes gives back the draft, or nothing is left that looks like an export."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fixtures_drafts import FORMATS, change_config, change_tensors, random_draft, read_config
from fixtures_models import save_hd, save_llama, save_wrapper
from headstart import config as settings
from headstart import pipeline
from headstart.artifact import create, open_artifact
from headstart.drafts import checkpoint
from headstart.drafts.eagle3 import Eagle3
from headstart.errors import GateError, UserError
from headstart.events import Events
from headstart.formats import tensors, vllm
from headstart.formats.common import ExportFacts
from headstart.formats.facts import target_facts
from headstart.stages import export
from headstart.target.head import TargetHead


def make_run(tmp_path: Path, target: Path, draft: Eagle3, head: TargetHead, **export_settings: Any) -> pipeline.Context:
    """A context whose parents hold this draft and this head."""
    raw = {"target": {"model": str(target)}, "data": {"sources": ["none.jsonl"]}, "export": export_settings}
    run, root = settings.build(raw), tmp_path / "run"
    with create(root / "states", "states", {}, {}) as build:
        head.save(build.path)
    with create(root / "draft", "draft", {}, {}) as build:
        checkpoint.save_shape(build.path, draft.shape, {})
        checkpoint.save_weights(build.file(checkpoint.TRAINED), draft)
    return pipeline.Context(run, pipeline.BY_VERB["export"], root, Events(root / "events.jsonl", quiet=True))


def make_head(target: Path) -> TargetHead:
    found = load_file(target / "model.safetensors")
    return TargetHead(found["model.embed_tokens.weight"], found["lm_head.weight"], found["model.norm.weight"], 1e-5)


@pytest.mark.parametrize("save", [save_llama, save_hd])
def test_stage_writes_what_it_then_reads(tmp_path: Path, save: Callable[[Path], Path]) -> None:
    target = save(tmp_path / "target's folder")
    head = make_head(target)
    draft = random_draft(embed=head.embed, aux_layers=(1, 2, 4, 6))
    context = make_run(tmp_path, target, draft, head)
    export.run(context)
    made = open_artifact(context.path, "export")
    assert set(made.manifest.files) == {
        f"{name}/{file}" for name in FORMATS for file in ("config.json", "model.safetensors")
    }
    for name, form in FORMATS.items():
        shape, found = form.read(made.path / name)
        assert shape == draft.shape
        assert torch.equal(export.probe(tensors.rebuild(shape, found, head.embed)), export.probe(draft))
        assert torch.equal(found["embed_tokens"], head.embed)
        facts = made.facts[name]
        assert facts["read_back"]["max_difference"] == 0.0
        assert [version for version, says in facts["vllm"].items() if not says] == list(vllm.VERSIONS[11:])
        assert made.counts[f"{name}_bytes"] == sum(file.stat().st_size for file in (made.path / name).iterdir())
    assert made.facts["serve"].startswith(f"vllm serve '{tmp_path}/target'\"'\"'s folder' --speculative-config '")
    assert '"num_speculative_tokens": 3' in made.facts["serve"]
    layer = read_config(made.path / "speculators")["transformer_layer_config"]
    assert (layer["bos_token_id"], layer["eos_token_id"], layer["target_model_type"]) == (1, 2, "llama")


def test_stage_looks_into_a_wrapper(tmp_path: Path) -> None:
    target = save_wrapper(tmp_path / "target")
    head = make_head(save_llama(tmp_path / "inner"))
    context = make_run(tmp_path, target, random_draft(embed=head.embed), head, formats=["speculators"])
    export.run(context)
    config = read_config(context.path / "speculators")
    assert config["transformer_layer_config"]["target_model_type"] == "llama"
    assert config["speculators_config"]["verifier"]["architectures"] == ["LlavaForConditionalGeneration"]
    made = open_artifact(context.path, "export")
    assert not (context.path / "vllm").exists()
    assert made.facts["serve"] == f"vllm serve {context.path}/speculators"


def test_stage_stops_when_the_folder_gives_back_another_draft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A format that loses something, made by breaking ours; nothing is left that looks like an export."""
    target = save_llama(tmp_path / "target")
    head = make_head(target)
    breaks: dict[str, Callable[[Path], None]] = {
        "describes another draft": lambda folder: change_config(folder, norm_before_residual=True),
        "fc.weight": lambda folder: change_tensors(folder, lambda t: t["fc.weight"][0].mul_(1.0001)),
        "embedding": lambda folder: change_tensors(folder, lambda t: t["embed_tokens.weight"].normal_()),
    }
    write = vllm.write
    for number, (said, damage) in enumerate(breaks.items()):
        context = make_run(tmp_path / str(number), target, random_draft(embed=head.embed), head)

        def broken(folder: Path, draft: Eagle3, facts: ExportFacts, damage: Callable[[Path], None] = damage) -> None:
            write(folder, draft, facts)
            damage(folder)

        monkeypatch.setattr(vllm, "write", broken)
        with pytest.raises(GateError, match=said):
            export.run(context)
        assert not context.path.exists()


def test_stage_compares_logits_of_the_rebuilt_draft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = save_llama(tmp_path / "target")
    head = make_head(target)
    context = make_run(tmp_path, target, random_draft(embed=head.embed), head)
    monkeypatch.setattr(tensors, "rebuild", lambda *parts: random_draft(embed=head.embed, seed=4))
    with pytest.raises(GateError, match="other logits"):
        export.run(context)
    assert not context.path.exists()


@pytest.mark.parametrize(("architecture", "kind", "shim"), [
    ("LlamaForCausalLM", "llama", False),
    ("Gemma2ForCausalLM", "gemma2", True),
    ("InternVLForConditionalGeneration", "qwen2", True),
    ("NoSuchForCausalLM", "nosuch", False),
])  # fmt: skip
def test_a_target_without_the_interface_is_served_with_the_plugin(architecture: str, kind: str, shim: bool) -> None:
    """vLLM 0.32's own sources: Llama has the EAGLE-3 interface, Gemma-2 and InternVL's wrapper have not."""
    facts = ExportFacts("target", (architecture,), kind, 1, (2,), 3, True)
    line = export.serve_command(Path("/run"), ["vllm"], facts)
    assert line.startswith(f"HEADSTART_SHIM={architecture} vllm serve" if shim else "vllm serve")


def test_the_text_model_of_any_wrapper_is_found(tmp_path: Path) -> None:
    """Wherever a wrapper keeps it, as `inspect` finds it."""
    text = {"model_type": "qwen2", "num_hidden_layers": 2, "hidden_size": 64, "vocab_size": 512, "eos_token_id": [5, 7]}
    whole = {
        "model_type": "wrapper",
        "architectures": ["Wrapper"],
        "thinker_config": {"text_config": text},
        "bos_token_id": 3,
    }
    (tmp_path / "config.json").write_text(json.dumps(whole))
    run = settings.build({"target": {"model": str(tmp_path)}, "data": {"sources": ["unused.jsonl"]}})
    facts = target_facts(run)
    assert (facts.architectures, facts.target_type) == (("Wrapper",), "qwen2")
    assert (facts.bos_id, facts.eos_ids) == (3, (5, 7))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"eos_token_id": "</s>"}, "eos_token_id = '</s>'"),
        ({"eos_token_id": [2, None]}, r"eos_token_id = \[2, None\]"),
        ({"bos_token_id": {}}, "bos_token_id = {}"),
        ({"architectures": [3]}, r"architectures = \[3\]"),
        ({"model_type": 5}, "model_type = 5"),
        ({"model_type": None}, "model_type = None"),
    ],
)
def test_facts_of_the_wrong_kind_are_named(tmp_path: Path, changes: dict, said: str) -> None:
    target = save_llama(tmp_path / "target")
    change_config(target, **changes)
    run = settings.build({"target": {"model": str(target)}, "data": {"sources": ["none.jsonl"]}})
    with pytest.raises(UserError, match=rf"config\.json has {said}"):
        target_facts(run)


def test_facts_that_a_target_lacks(tmp_path: Path) -> None:
    target = save_llama(tmp_path / "target")
    change_config(target, architectures=None, eos_token_id=None, bos_token_id=None)
    facts = target_facts(settings.build({"target": {"model": str(target)}, "data": {"sources": ["none.jsonl"]}}))
    assert (facts.architectures, facts.eos_ids, facts.bos_id) == ((), (), None)
