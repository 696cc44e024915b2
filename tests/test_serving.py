"""The serving check without an engine: the walk is the decoder, every planted fault is named, and nothing else is."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fixtures_models
from fixtures_drafts import FACTS, change_config, change_tensors
from fixtures_states import make_store
from headstart import config
from headstart.config import Train
from headstart.drafts import layers
from headstart.drafts.eagle3 import Eagle3
from headstart.drafts.shape import DraftShape
from headstart.engines.transformers import TransformersEngine
from headstart.engines.vllm.records import Counters, Served, ServedAnswer
from headstart.errors import GateError
from headstart.evaluation import faults, serving, serving_words
from headstart.evaluation.acceptance import AcceptanceLog
from headstart.evaluation.choice import Greedy
from headstart.evaluation.decode import Limits, plain_decode, speculative_decode
from headstart.evaluation.faults import Replayed
from headstart.evaluation.offline import reference_walk
from headstart.evaluation.serving import Reference
from headstart.events import Events
from headstart.formats import tensors, vllm
from headstart.formats.common import LAYER_IDS
from headstart.training.loop import Trainer
from headstart.types import Sample

AUX, K, ANSWER, PROMPTS = (2, 3, 4), 3, 40, 12
NEVER: frozenset[int] = frozenset()


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> TransformersEngine:
    folder = fixtures_models.save_llama(tmp_path_factory.mktemp("llama"), initializer_range=0.08)
    return TransformersEngine(config.Target.model_validate({"model": str(folder), "device": "cpu"}))


def make_draft(engine: TransformersEngine, seed: int = 3, **changes: Any) -> Eagle3:
    """Random weights over the target's own head: some drafts are accepted, and every part of the draft matters."""
    head, sizes = engine.head(), {"draft_vocab_size": 512, "rope_theta": 1e4, **changes}
    shape = DraftShape(
        hidden_size=64, target_hidden_size=64, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=16,
        intermediate_size=96, target_vocab_size=head.vocab_size, rms_norm_eps=1e-5, max_positions=512,
        **({"aux_layers": AUX, "norm_before_residual": False, "fc_norm": True, "norm_output": False} | sizes),
    )  # fmt: skip
    torch.manual_seed(seed)
    draft = Eagle3(shape, head.embed)
    count = shape.draft_vocab_size
    draft.draft_to_target = torch.randperm(head.vocab_size)[:count].sort().values
    with torch.no_grad():
        draft.lm_head.weight.copy_(head.lm_head[draft.draft_to_target])
        draft.norm.weight.copy_(head.norm_weight)
    return draft.eval().requires_grad_(False)


def prompts(count: int = PROMPTS, seed: int = 1) -> list[tuple[int, ...]]:
    rng = np.random.default_rng(seed)
    return [tuple(rng.integers(0, 390, rng.integers(3, 12)).tolist()) for _ in range(count)]


# --- the walk ---


@settings(max_examples=12, deadline=None)
@given(
    st.lists(st.integers(0, 511), min_size=1, max_size=9),
    st.integers(1, 5),
    st.integers(1, 24),
    st.fixed_dictionaries({"trimmed": st.booleans(), "norm_output": st.booleans(), "ends": st.booleans()}),
)
def test_the_reference_walk_is_the_decoder(
    engine: TransformersEngine, prompt: list[int], k: int, length: int, kind: dict[str, bool]
) -> None:
    draft = make_draft(engine, norm_output=kind["norm_output"], draft_vocab_size=256 if kind["trimmed"] else 512)
    session = engine.session(AUX)
    limits = Limits(length, NEVER)
    if kind["ends"]:
        limits = Limits(length, frozenset(plain_decode(session, prompt, Greedy(), Limits(9, NEVER)).ids[-1:]))
    found = speculative_decode(session, draft, prompt, Greedy(), limits, draft_tokens=k)
    ids = (*prompt, *found.ids)
    walked = reference_walk(draft, engine.session(AUX).extend(ids)[1], ids, len(prompt), k)
    assert walked.accepted.tolist() == found.log.accepted.tolist()
    assert walked.drafted.tolist() == found.log.drafted.tolist()


# --- an engine that makes one mistake ---


@pytest.fixture(scope="module")
def trained(engine: TransformersEngine, tmp_path_factory: pytest.TempPathFactory) -> Eagle3:
    """A draft that has learnt the answers, so that every part of it matters."""
    folder = tmp_path_factory.mktemp("trained")
    samples = [sample_of(engine, index, prompt) for index, prompt in enumerate(prompts())]
    states = make_store(engine, samples, folder / "states")
    draft = make_draft(engine, draft_vocab_size=400).requires_grad_(True)
    settings = Train.model_validate({
        "epochs": 60, "batch_tokens": 300, "optimizer": "adamw", "learning_rate": 4e-3, "validate_every": 900,
        "checkpoint_every": 900,
    })  # fmt: skip
    Trainer(draft, states.head(), states, settings, K, folder, Events(quiet=True)).run()
    return draft.eval().requires_grad_(False)


def sample_of(engine: TransformersEngine, index: int, prompt: tuple[int, ...]) -> Sample:
    answer = plain_decode(engine.session(AUX), prompt, Greedy(), Limits(ANSWER, NEVER)).ids
    ids = np.array([*prompt, *answer], dtype=np.int32)
    return Sample(str(index), str(index), "test", "train", ids, np.arange(len(ids)) >= len(prompt), "length")


def serve(engine: TransformersEngine, draft: Eagle3) -> Served:
    """What an engine that holds this draft would answer and count."""
    answers = []
    for prompt in prompts():
        session = engine.session(draft.shape.aux_layers)
        found = speculative_decode(session, draft, prompt, Greedy(), Limits(ANSWER, NEVER), draft_tokens=K)
        answers.append(ServedAnswer(found.ids, 1.0, counters_of(found.log)))
    return Served("0.32.0", "native", "", "float32", tuple(answers))


def counters_of(log: AcceptanceLog) -> Counters:
    per_position = tuple(int((log.accepted > place).sum()) for place in range(K))
    return Counters(log.steps, K * log.steps, int(log.accepted.sum()), per_position)


def loaded(folder: Path, draft: Eagle3) -> Eagle3:
    """The draft that an engine makes of a folder, rightly or wrongly written."""
    shape, found = vllm.read(folder)
    return tensors.rebuild(shape, found, draft.embed_tokens)


def swap_states(found: dict[str, Any]) -> None:
    """Slots 0 and 2 of the fusion are given each other's states."""
    first, middle, last = found["fc.weight"].split(64, dim=1)
    found["fc.weight"] = torch.cat((last, middle, first), dim=1)
    found["fc_norm.0.weight"], found["fc_norm.2.weight"] = found["fc_norm.2.weight"], found["fc_norm.0.weight"]


def forget_map(found: dict[str, Any]) -> None:
    del found["t2d"]
    found["d2t"] = torch.zeros_like(found["d2t"])


def forget_norms(found: dict[str, Any]) -> None:
    for index in range(3):
        del found[f"fc_norm.{index}.weight"]


def ids(*layers: int) -> dict[str, Any]:
    """In each place of a config.json where an engine looks for them."""
    return {LAYER_IDS: list(layers), "eagle_config": {LAYER_IDS: list(layers), "layer_ids": list(layers)}}


PLANTED: dict[str, tuple[dict[str, Any], Callable[[dict[str, Any]], Any] | None, str]] = {
    "ids too low": (ids(1, 2, 3), None, "layer ids one too low: 1, 2, 3 for 2, 3, 4"),
    "ids too high": (ids(3, 4, 5), None, "layer ids one too high"),
    "order": ({}, swap_states, "order 4, 3, 2"),
    "residual": ({"norm_before_residual": True}, None, "norm_before_residual = true instead of false"),
    "output": ({"norm_output": True}, None, "norm_output = true instead of false"),
    "fc norm": ({"fc_norm": False}, forget_norms, "fc_norm = false instead of true"),
    "vocabulary": ({}, forget_map, "draft ids taken for target ids"),
    "rope": (
        {"rope_theta": 1e6, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
        None,
        "RoPE theta 1,000,000",
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_fault_in_the_folder_is_named(
    engine: TransformersEngine, trained: Eagle3, known: Known, tmp_path: Path, name: str
) -> None:
    changes, change, says = PLANTED[name]
    vllm.write(tmp_path, trained, FACTS)
    change_config(tmp_path, **changes)
    if change is not None:
        change_tensors(tmp_path, change)
    causes = serving.likely(serve(engine, loaded(tmp_path, trained)).answers, known, seed=0)
    assert says in causes[0].says
    assert causes[0].step_for_step == (PROMPTS, PROMPTS)
    assert {cause.kind for cause in causes} - {"weights"} == {causes[0].kind}  # at tau 1 these are alike


def test_scaled_positions_are_named(
    engine: TransformersEngine, trained: Eagle3, known: Known, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = layers.rotate
    monkeypatch.setattr(layers, "rotate", lambda x, positions, theta: right(x, positions / 8, theta))
    wrong = serve(engine, trained)
    monkeypatch.undo()
    assert serving.likely(wrong.answers, known, seed=0)[0].says == "with RoPE positions scaled down by 8"


def test_weights_that_were_not_loaded_are_named(engine: TransformersEngine, known: Known) -> None:
    wrong = serve(engine, make_draft(engine, draft_vocab_size=400))
    causes = serving.likely(wrong.answers, known, seed=0)
    assert ("weights", "before it was trained") in [(cause.kind, cause.says) for cause in causes]


def test_an_engine_that_does_all_right_has_no_fault(engine: TransformersEngine, trained: Eagle3, known: Known) -> None:
    causes = serving.likely(serve(engine, trained).answers, known, seed=0)
    assert [cause.kind for cause in causes] == [serving.NO_FAULT]


def test_a_fault_that_nobody_knows_is_not_named(engine: TransformersEngine, trained: Eagle3, known: Known) -> None:
    answers = serve(engine, trained).answers
    perfect = [replace(answer, counters=Counters(10, 30, 29, (10, 10, 9))) for answer in answers]
    assert serving.likely(perfect, known, seed=0) == ()


Known = list[tuple[str, str, list[AcceptanceLog]]]


@pytest.fixture(scope="module")
def known(engine: TransformersEngine, trained: Eagle3) -> Known:
    """Every fault replayed on the target's own answers, which an engine keeps whatever its draft does."""
    found = [
        faults.no_fault(trained),
        *faults.candidates(trained, 7, untrained=make_draft(engine, draft_vocab_size=400)),
    ]
    boundaries, sequences = faults.needed(found), []
    for index, (prompt, answer) in enumerate(zip(prompts(), serve(engine, trained).answers, strict=True)):
        ids = (*prompt, *answer.ids)
        sequences.append(Replayed(str(index), ids, len(prompt), engine.session(boundaries).extend(ids)[1]))
    logs = faults.walk_all(found, reversed(sequences), K)
    return [
        (fault.kind, fault.says, [by_id[str(index)] for index in range(PROMPTS)])
        for fault, by_id in zip(found, logs, strict=True)
    ]


def test_faults_that_change_nothing_are_not_tried(engine: TransformersEngine) -> None:
    draft = make_draft(engine, fc_norm=False, rope_theta=5e5)
    draft.draft_to_target = torch.arange(512)
    known = faults.candidates(draft, 7)
    assert "vocabulary" not in {fault.kind for fault in known}
    assert not any("fc_norm" in fault.says or "theta 500,000" in fault.says for fault in known)
    assert len({fault.says for fault in known}) == len(known)
    low = faults.candidates(make_draft(engine, aux_layers=(0, 3, 7)), 7)
    assert [fault.says for fault in low if fault.kind == "layer ids"] == [
        "with the engine's default layer ids 2, 3, 4 for 0, 3, 7"
    ]


# --- the comparison ---


def served(*steps: tuple[int, int], ids: int = 7) -> Served:
    """Answers of so many tokens after the first, in so many verify steps, none of which the end cut."""
    answers = [
        ServedAnswer((ids,) * (emitted + 1), 2.0, Counters(count, K * count, emitted - count, (emitted - count, 0, 0)))
        for emitted, count in steps
    ]
    return Served("0.32.0", "native", "says why", "float32", tuple(answers))


def reference(run: Served, *steps: int, how: str = "decoder") -> Reference:
    """Our decoder on the same answers, in so many steps each."""
    logs = [
        AcceptanceLog.of([1] * (len(answer.ids) - 1 - count) + [0] * (2 * count - len(answer.ids) + 1), [K] * count)
        for answer, count in zip(run.answers, steps, strict=True)
    ]
    return Reference(how, tuple(answer.ids for answer in run.answers), tuple(logs))


SAME = [(30, 20), (40, 31), (30, 22), (35, 25), (40, 28)]


def test_equal_steps_agree() -> None:
    run = served(*SAME)
    found = serving.section(run, run, reference(run, *(count for _, count in SAME)), K, 0)
    assert found["agreement"] == {
        "verdict": "agrees", "inside_interval": True, "difference": 0.0, "difference_interval": [0.0, 0.0],
        "step_for_step": [5, 5],
    }  # fmt: skip
    assert found["tau"] == found["reference"]["tau"] == 175 / 126
    assert found["counters"] == {
        "drafts": 126, "draft_tokens": 378, "accepted": 49, "per_position": (49, 0, 0)
    }  # fmt: skip
    assert found["tau_by_counters"] == 1 + 49 / 126
    assert found["per_position"] == {"conditional": [49 / 126, 0.0, None], "unconditional": [49 / 126, 0.0, 0.0]}
    assert found["identical"] == [5, 5]
    assert found["speed"] == {"plain": 18.0, "drafted": 18.0, "speedup": 1.0}
    assert found["reference"]["same_answers"] == [5, 5]
    assert serving_words.warnings(whole(found)) == []
    assert "tau 1.389" in serving_words.lines(whole(found))[0]


def whole(found: dict[str, Any], **more: Any) -> dict[str, Any]:
    return json.loads(json.dumps({**found, "other_prompts": None, "mismatches": [], "causes": [], **more}))


def test_a_few_turned_steps_still_agree() -> None:
    run = served(*SAME)
    found = serving.section(run, run, reference(run, 21, 31, 22, 24, 28), K, 0)["agreement"]
    assert found["verdict"] == "agrees"
    assert found["step_for_step"] == [3, 5]


def test_a_difference_outside_the_interval_is_told_with_its_cause() -> None:
    run = served(*((30, 29),) * 5)
    found = serving.section(run, run, reference(run, 20, 21, 22, 20, 21), K, 0)
    assert found["agreement"]["verdict"] == "differs"
    cause = serving.Cause("layer ids", "with its layer ids one too low", 1.03, (1.0, 1.1), (4, 5)).as_json()
    told = serving_words.warnings(whole(found, causes=[cause]))
    assert "WARNING: vLLM's tau is not the reference decoder's: 1.034 against 1.442" in told[0]
    assert (
        told[1]
        == "vLLM's 1.03 is what the draft gives with its layer ids one too low (step for step in 4 of 5 prompts)"
    )
    assert "no known fault" in serving_words.warnings(whole(found))[1]


def test_a_small_fault_is_seen_on_the_same_answers() -> None:
    """Inside the wide interval over prompts, but every prompt takes more steps than it should."""
    run = served((40, 24), (40, 40), (40, 22), (40, 36))
    found = serving.section(run, run, reference(run, 21, 36, 20, 33), K, 0)["agreement"]
    assert found["inside_interval"]
    assert found["verdict"] == "differs"


def test_one_prompt_is_judged_by_its_own_steps() -> None:
    run = served((30, 20))
    assert serving.section(run, run, reference(run, 20), K, 0)["agreement"]["verdict"] == "agrees"
    assert serving.section(run, run, reference(run, 29), K, 0)["agreement"]["verdict"] == "differs"
    other = replace(reference(run, 29), answers=((1, 2, 3),))
    assert serving.section(run, run, other, K, 0)["agreement"]["verdict"] == "unknown"


def test_what_is_accepted_past_the_end_is_not_counted() -> None:
    """vLLM counts a whole step although the answer ends inside it: 9 tokens after the first, in three steps."""
    cut = ServedAnswer((7,) * 10, 1.0, Counters(3, 9, 9, (3, 3, 3)))
    run = Served("0.32.0", "native", "", "float32", (cut,))
    assert serving.steps_of(run.answers) == [(9, 3)]
    undrafted = ServedAnswer((7,) * 10, 1.0, Counters(3, 9, 4, (3, 1, 0)))  # 2 more tokens came without a draft
    assert serving.steps_of([undrafted]) == [(9, 5)]


def test_a_draft_that_was_not_used_is_no_measurement() -> None:
    idle = replace(served(), answers=(ServedAnswer((7, 7), 1.0, Counters(0, 0, 0, ())),))
    with pytest.raises(GateError, match="counted no verify step"):
        serving.section(idle, idle, reference(served((1, 1)), 1), K, 0)


def test_a_changed_answer_names_its_token_and_whether_it_is_a_tie() -> None:
    plain = served((4, 4), (4, 4))
    second = replace(plain.answers[1], ids=(7, 7, 9, 7, 7))
    drafted = replace(plain, answers=(plain.answers[0], second))
    assert serving.mismatches(plain, drafted) == [(1, 2)]
    tie = serving.judge(plain.answers[1], second, 2, 1e-5, "float32")
    assert tie == {"position": 2, "expected": 7, "found": 9, "gap": 1e-5, "noise": 1e-3, "tie": True}
    fault = serving.judge(plain.answers[1], second, 2, 0.5, "bfloat16")
    found = serving.section(plain, drafted, reference(plain, 4, 4), K, 0)
    assert found["identical"] == [1, 2]
    items = [{"set": "s", "prompt": "q", **item} for item in (tie, fault)]
    told = serving_words.warnings(whole(found, mismatches=items))
    assert "s q at answer token 2: 9 instead of 7; top-2 gap 1e-05, a tie within rounding" in told[0]
    assert "NOT explained by rounding" in told[1]
    unmeasured = serving.judge(plain.answers[1], second, 2, None, "float32")
    assert (
        "not measured"
        in serving_words.warnings(whole(found, mismatches=[{"set": "s", "prompt": "q", **unmeasured}]))[0]
    )


def test_another_template_in_the_engine_is_told() -> None:
    run = replace(served(*SAME), chat_ids=((1, 2, 3), (9, 4, 5)))
    assert serving.other_prompts([(1, 2, 3), (9, 4, 5), (6,)], run) is None
    found = serving.other_prompts([(1, 2, 3), (4, 5), (6,)], run)
    assert found == {"prompts": [1, 2], "token": 0, "measured": 4, "vllm": 9}
    section = serving.section(run, run, reference(run, *(count for _, count in SAME)), K, 0)
    assert (
        "makes other prompts (1 of 2): token 0 is 9, not 4"
        in serving_words.warnings(whole(section, other_prompts=found))[0]
    )


def test_served_answers_survive_a_file() -> None:
    run = replace(served(*SAME), chat_ids=((1, 2),))
    assert Served.from_json(json.loads(json.dumps(run.as_json()))) == run
    plain = replace(run, answers=tuple(replace(answer, counters=None) for answer in run.answers))
    assert Served.from_json(json.loads(json.dumps(plain.as_json()))) == plain


def test_counters_since() -> None:
    first, then = Counters(0, 0, 0, ()), Counters(4, 12, 5, (3, 2, 0))
    assert then.since(first) == then
    assert then.since(Counters(1, 3, 1, (1, 0, 0))) == Counters(3, 9, 4, (2, 2, 0))
    assert Counters.total([then, then]) == Counters(8, 24, 10, (6, 4, 0))
