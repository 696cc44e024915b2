"""The serving check in the real vLLM: one chat learnt by heart is accepted whole, and a fault in the export is named.

Four starts of vLLM: to capture through it, to serve without the draft, with it, and with a spoilt export.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fixtures_models import save_llama
from fixtures_states import open_tiny
from fixtures_text import chat, save_tokenizer
from headstart import config, files
from headstart.config import Train
from headstart.data import store
from headstart.data.store import StateStore
from headstart.data.templates import Template
from headstart.drafts.eagle3 import Eagle3
from headstart.drafts.shape import DraftShape, LatentShape
from headstart.engines.base import Use
from headstart.engines.transformers import TransformersEngine
from headstart.engines.vllm.engine import VllmEngine
from headstart.evaluation import check, serving, serving_words
from headstart.evaluation.check import ServingCheck, reference_of
from headstart.evaluation.decode import Limits
from headstart.evaluation.prompts import EvalPrompt
from headstart.evaluation.replay import Replay, capture_sequences
from headstart.events import Events
from headstart.formats import vllm
from headstart.formats.common import CONFIG, LAYER_IDS
from headstart.target.head import TargetHead
from headstart.training.loop import Trainer
from headstart.types import Prompt, Sample, Sampling
from vllm_models import save_model

pytestmark = pytest.mark.slow

AUX, K = (2, 3, 4), 3
ANSWER = 1 + 7 * (K + 1)  # the prefill's token and seven whole steps, so that no step is cut
GREEDY = Sampling(max_new_tokens=ANSWER, temperature=0.0, top_p=1.0, seed=0, end_ids=())


@dataclass(frozen=True)
class Learnt:
    """One chat, the draft that knows it by heart, and what the reference says of it."""

    run: config.Run
    prompt: EvalPrompt
    drafts: dict[str, Eagle3]
    reference: serving.Reference
    scratch: Path

    def check(self, root: Path, engine: str) -> ServingCheck:
        """engine: the one that captures states to look for a cause."""
        run = make_run(Path(self.run.target.model), engine)
        events = Events(root / "events.jsonl", quiet=True)
        return ServingCheck(run, [self.prompt], (), self.drafts, self.scratch, events)


@pytest.fixture(scope="module")
def learnt(tmp_path_factory: pytest.TempPathFactory) -> Learnt:
    root = tmp_path_factory.mktemp("learnt")
    return learn(root, save_tokenizer(save_llama(root / "target", head_dim=32)))  # vLLM's CPU needs 32


def learn(root: Path, target: Path, least: float = 0.99, **changes: Any) -> Learnt:
    """least: share of the tokens that the draft must have learnt at each depth."""
    run = make_run(target)
    prompt = clearest(open_tiny(target), target)
    engine = VllmEngine(run.target, Use(longest=len(prompt.ids) + ANSWER, batch_size=1, boundaries=AUX))
    try:
        head, limits = engine.head(), Limits(ANSWER, frozenset())
        untrained = make_draft(head, **changes)
        (plain, _), *_ = Replay(engine, {"untrained": untrained}, limits, K, 512).measure([prompt])
        states = learn_from(engine, head, prompt, plain.ids, root / "states")
        draft = overfit(make_draft(head, **changes), head, states, plain.ids, root / "training", least)
        drafts = {"trained": draft, "untrained": untrained}
        answers = next(iter(Replay(engine, drafts, limits, K, 512).measure([prompt])))
    finally:
        engine.close()
    (root / "scratch").mkdir()
    return Learnt(run, prompt, drafts, reference_of(answers, "walk"), root / "scratch")


def make_run(target: Path, engine: str = "vllm") -> config.Run:
    return config.build({
        "target": {"model": str(target), "device": "cpu", "engine": engine},
        "data": {"sources": ["unused.jsonl"]},
        "evaluate": {"engine": "vllm", "max_new_tokens": ANSWER, "draft_tokens": K},
    })  # fmt: skip


def clearest(engine: TransformersEngine, target: Path) -> EvalPrompt:
    """The chat whose answer has no near tie: such a choice cannot be learnt, and engines may differ in it."""
    template, found = Template.load(target), {}
    for number in range(60):
        messages = tuple(chat(f"Name {number}."))
        found[str(number)] = EvalPrompt("chat", "1", "one", tuple(template.prompt_ids(messages)), messages)
    prompts = [Prompt(name, prompt.ids) for name, prompt in found.items()]
    lead = {one.id: smallest_lead(engine, found[one.id].ids, one.ids) for one in engine.generate(prompts, GREEDY)}
    return found[max(lead, key=lambda name: lead[name])]


def smallest_lead(engine: TransformersEngine, prompt: tuple[int, ...], answer: tuple[int, ...]) -> float:
    values = engine.top_log_probs([*prompt, *answer], 2).values
    return float((values[:, 0] - values[:, 1])[len(prompt) - 1 : -1].min())


def make_draft(head: TargetHead, **changes: Any) -> Eagle3:
    sizes = {
        "hidden_size": 64, "target_hidden_size": 64, "aux_layers": AUX, "num_layers": 1, "num_heads": 4, "num_kv_heads": 2,
        "head_dim": 32, "intermediate_size": 96, "target_vocab_size": head.vocab_size, "draft_vocab_size": 400,
        "rms_norm_eps": 1e-5, "rope_theta": 1e4, "max_positions": 512, "norm_before_residual": False, "fc_norm": True,
        "norm_output": False,
    }  # fmt: skip
    shape = DraftShape(**(sizes | changes))
    torch.manual_seed(0)
    return Eagle3(shape, head.embed)


def learn_from(
    engine: VllmEngine, head: TargetHead, prompt: EvalPrompt, answer: tuple[int, ...], folder: Path
) -> StateStore:
    """The states of the chat as vLLM computes them, in a store."""
    ids = (*prompt.ids, *answer)
    (states,) = capture_sequences(engine, {"one": ids}, AUX, 512)
    supervised = np.arange(len(ids)) >= len(prompt.ids)
    sample = Sample("one", "one", "test", "train", np.array(ids, dtype=np.int32), supervised, "length")
    folder.mkdir()
    head.save(folder)
    path = folder / store.shard_name(0)
    store.write_shard(path, store.label([(sample, states)], head), {})
    store.write_index(folder / store.INDEX, (store.read_header(path) or ([], {}))[0])
    return StateStore(folder, {"aux_layers": list(AUX)})


def overfit(
    draft: Eagle3, head: TargetHead, states: StateStore, answer: tuple[int, ...], folder: Path, least: float
) -> Eagle3:
    """300 steps on the one chat; its tokens are in the draft vocabulary."""
    others = [token for token in range(draft.shape.target_vocab_size) if token not in answer]
    kept = sorted({*answer, *others[: draft.shape.draft_vocab_size - len(set(answer))]})
    draft.draft_to_target = torch.tensor(kept)
    train = Train.model_validate({
        "epochs": 300, "batch_tokens": 160, "optimizer": "adamw", "learning_rate": 3e-3, "validate_every": 300
    })  # fmt: skip
    folder.mkdir()
    progress = Trainer(draft, head, states, train, K, folder, Events(quiet=True)).run()
    assert min([record for record in progress.curves if record["kind"] == "train"][-1]["accuracy"]) > least
    return draft.eval().requires_grad_(False)


def test_one_chat_learnt_by_heart_is_accepted_whole(learnt: Learnt, tmp_path: Path) -> None:
    """Case C34 in the real engine: K of K at every step, by vLLM's own counters."""
    found = learnt.check(tmp_path, "vllm").measure(learnt.reference)
    assert found["counters"] == {"drafts": 7, "draft_tokens": 7 * K, "accepted": 7 * K, "per_position": (7, 7, 7)}
    assert found["tau"] == found["tau_by_counters"] == found["reference"]["tau"] == K + 1
    assert found["identical"] == found["agreement"]["step_for_step"] == found["reference"]["same_answers"] == [1, 1]
    assert found["agreement"]["verdict"] == "agrees"
    assert found["rung"] == "native"
    assert found["other_prompts"] is None
    assert serving_words.warnings(found | {"mismatches": []}) == []


WINDOW = 6
LATENT = LatentShape(
    q_rank=64, kv_rank=512, nope=32, rope=64, value=32
)  # 512 and 64 are all that vLLM's CPU kernel takes


def test_a_draft_with_mla_beside_a_target_with_mla(tmp_path: Path) -> None:
    """The same steps, with the same tokens accepted, as the reference decoder takes. The base of the rotary positions is not the
    default, so that one which gets lost would be seen."""
    target = save_tokenizer(save_model("deepseek3", tmp_path / "target"))
    sizes = {"hidden_size": 128, "target_hidden_size": 128, "num_kv_heads": 4, "head_dim": 96, "rope_theta": 5e4}
    learnt = learn(tmp_path, target, 0.9, latent=LATENT, **sizes)
    found = learnt.check(tmp_path, "vllm").measure(learnt.reference)
    assert (
        found["tau"] == found["reference"]["tau"] > 0.75 * (K + 1)
    )  # the counters also have what the last step was cut by
    assert found["identical"] == found["agreement"]["step_for_step"] == found["reference"]["same_answers"] == [1, 1]
    assert found["agreement"]["verdict"] == "agrees"


def test_a_draft_with_a_sliding_window(tmp_path: Path) -> None:
    """vLLM drafts as the reference decoder does, which sees the window; without it, its drafts are others."""
    target = save_tokenizer(save_llama(tmp_path / "target", head_dim=32))
    learnt = learn(tmp_path, target, 0.9, sliding_window=WINDOW)
    found = learnt.check(tmp_path, "vllm").measure(learnt.reference)
    assert found["tau"] == found["reference"]["tau"]
    assert found["identical"] == found["agreement"]["step_for_step"] == found["reference"]["same_answers"] == [1, 1]
    learnt.drafts["trained"].shape = replace(learnt.drafts["trained"].shape, sliding_window=None)
    (learnt.scratch / "drafted.json").unlink()
    assert learnt.check(tmp_path, "vllm").measure(learnt.reference)["agreement"]["step_for_step"] == [0, 1]


def test_a_spoilt_export_is_named(learnt: Learnt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every layer id one too low: vLLM loads it and says nothing."""
    right = vllm.write

    def spoilt(folder: Path, draft: Eagle3, facts: Any) -> None:
        right(folder, draft, facts)
        files.write_json(folder / CONFIG, spoil(files.read_json(folder / CONFIG)))

    monkeypatch.setattr(check.vllm, "write", spoilt)
    (learnt.scratch / "drafted.json").unlink(missing_ok=True)
    checked = learnt.check(tmp_path, "transformers")
    found = checked.measure(learnt.reference)
    assert found["agreement"]["verdict"] == "differs"
    assert found["identical"] == [1, 1]
    assert found["causes"][0]["kind"] == "layer ids"
    assert "with its layer ids one too low: 1, 2, 3 for 2, 3, 4" in found["causes"][0]["says"]
    assert found["tau"] == pytest.approx(found["causes"][0]["tau"])
    assert "WARNING: vLLM's tau is not" in "\n".join(serving_words.lines(found))


def spoil(written: dict[str, Any]) -> dict[str, Any]:
    low = [boundary - 1 for boundary in AUX]
    inner = written["eagle_config"] | {"layer_ids": low, LAYER_IDS: low}
    return written | {LAYER_IDS: low, "eagle_config": inner}
