"""The evaluate stage on a tiny run directory: scores, agreement of its two measurements, resuming, and bad input."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from fixtures_models import save_llama
from fixtures_text import save_tokenizer
from headstart import artifact, config, files, preflight
from headstart.data import store
from headstart.data.store import StateStore
from headstart.data.templates import Template
from headstart.drafts import checkpoint
from headstart.drafts.eagle3 import Eagle3
from headstart.drafts.shape import DraftShape
from headstart.engines.transformers import TransformersEngine
from headstart.engines.vllm.records import Counters, Served, ServedAnswer
from headstart.engines.vllm.served import Asked, Drafting
from headstart.errors import GateError, UserError
from headstart.evaluation import check, scores
from headstart.evaluation.acceptance import AcceptanceLog
from headstart.evaluation.bench import Answer, AnswerLog, Bench
from headstart.evaluation.choice import Greedy
from headstart.evaluation.decode import Limits, Mismatch, plain_decode, speculative_decode
from headstart.evaluation.prompts import load_sets
from headstart.evaluation.speed import Costs, Timing
from headstart.events import Events
from headstart.formats import tensors, vllm
from headstart.formats.common import CONFIG, LAYER_IDS
from headstart.pipeline import BY_VERB, Context, status
from headstart.stages import evaluate
from headstart.training.loop import Trainer
from headstart.types import Sample

AUX = (2, 3, 4)
TEXTS = ("The boat came in", "add(40, 2)", "Name a number.", "What is water?", "Show every step")
ANSWER = 20


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, prompts, and finished draft/ and states/; the held-out states are of its answers to the prompts."""
    root = tmp_path_factory.mktemp("run")
    target = save_tokenizer(save_llama(root / "target", num_hidden_layers=7))
    rows = [{"id": f"q{i}", "messages": [{"role": "user", "content": text}]} for i, text in enumerate(TEXTS)]
    (root / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    engine = TransformersEngine(make_run(root).target)
    draft = make_draft(engine)
    with artifact.create(root / "states", "states", {}, {}) as build:
        samples = held_out(engine, root)
        captured = {states.id: states for states in engine.capture(samples, AUX, 512)}
        engine.head().save(build.path)
        name = store.shard_name(0)
        store.write_shard(build.file(name), store.label([(s, captured[s.id]) for s in samples], engine.head()), {})
        store.write_index(build.file(store.INDEX), (store.read_header(build.file(name)) or ([], {}))[0])
        build.facts |= {"aux_layers": list(AUX)}
    with artifact.create(
        root / "draft", "draft", {}, {"states": artifact.open_artifact(root / "states", "states")}
    ) as build:
        checkpoint.save_weights(build.file(checkpoint.UNTRAINED), draft)
        with torch.no_grad():
            draft.fc.weight.copy_(torch.cat([torch.zeros(64, 128), torch.eye(64)], dim=1))
        checkpoint.save_weights(build.file(checkpoint.TRAINED), draft)
        checkpoint.save_shape(build.path, draft.shape, {"ttt_steps": 3})
    assert target.exists()
    return root


def held_out(engine: TransformersEngine, root: Path) -> list[Sample]:
    template = Template.load(engine.folder)
    limits, session, samples = Limits(ANSWER, frozenset(template.end_ids)), engine.session(AUX), []
    for prompt in load_sets([str(root / "prompts.jsonl")], 9, template)[0].prompts:
        answer = plain_decode(session, prompt.ids, Greedy(), limits).ids
        mask = np.array([False] * len(prompt.ids) + [True] * len(answer))
        ids = np.array([*prompt.ids, *answer], dtype=np.int32)
        samples.append(Sample(prompt.id, prompt.id, "test", "validation", ids, mask, "length"))
    return samples


def make_draft(engine: TransformersEngine) -> Eagle3:
    head = engine.head()
    shape = DraftShape(
        hidden_size=64, target_hidden_size=64, aux_layers=AUX, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=16,
        intermediate_size=96, target_vocab_size=head.vocab_size, draft_vocab_size=500, rms_norm_eps=1e-5,
        rope_theta=1e4, max_positions=512, norm_before_residual=False, fc_norm=False, norm_output=False,
    )  # fmt: skip
    torch.manual_seed(4)
    draft = Eagle3(shape, head.embed)
    draft.draft_to_target = torch.arange(500)
    with torch.no_grad():
        draft.lm_head.weight.copy_(head.lm_head[:500])
        draft.norm.weight.copy_(head.norm_weight)
    return draft


def make_run(root: Path, *overrides: str) -> config.Run:
    raw: dict[str, Any] = {
        "target": {"model": str(root / "target"), "device": "cpu"},
        "data": {"sources": ["unused.jsonl"]},
        "evaluate": {"prompts": [str(root / "prompts.jsonl")], "max_new_tokens": ANSWER, "draft_tokens": 3},
    }
    return config.build(raw, overrides)


def context_for(root: Path, *overrides: str, events: Events | None = None) -> Context:
    return Context(make_run(root, *overrides), BY_VERB["evaluate"], root, events or Events(quiet=True))


@pytest.fixture
def root(base: Path, tmp_path: Path) -> Path:
    shutil.copytree(base, tmp_path / "run")
    return tmp_path / "run"


def read_scores(root: Path) -> dict[str, Any]:
    return files.read_json(root / "scores" / "scores.json")


def test_scores(root: Path) -> None:
    events = Events(root / "events.jsonl", quiet=True)
    evaluate.run(context_for(root, events=events))
    found = read_scores(root)
    rows = {row["draft"]: row for row in found["rows"]}
    assert list(rows) == ["none", "trained", "untrained"]
    assert found["draft_tokens"] == 3
    assert found["sets"] == {str(root / "prompts.jsonl"): {"prompts": 5, "of": 5}}
    assert rows["none"]["tau"] == 1
    for name in ("trained", "untrained"):
        row = rows[name]
        assert row["lossless"] == [5, 5]
        assert row["mismatches"] == []
        assert row["tokens"] == rows["none"]["tokens"]
        assert row["tau"] == pytest.approx(row["emitted"] / row["steps"])
        assert row["emitted"] == row["tokens"] - 5  # each prompt's first token is the prefill's
        low, high = row["interval"]
        assert low <= row["tau"] <= high
        ratio = row["costs"]["verify_ratio"] + 3 * row["costs"]["draft_ratio"]
        assert row["modelled_speedup"] == pytest.approx(row["tau"] / ratio)
        assert row["measured_speedup"] > 0
    assert rows["trained"]["tau"] > 1  # the decoder did accept drafts
    assert sorted(path.name for path in (root / "scores").iterdir()) == [
        "manifest.json",
        "prompts.parquet",
        "scores.json",
    ]
    said = (root / "events.jsonl").read_text()
    assert "first user turn" in said
    assert "5/5" in said


def test_offline_equals_decoding(root: Path) -> None:
    """Held-out states of the very answers: the walk through them is what the decoder did, in every number."""
    evaluate.run(context_for(root))
    found = read_scores(root)
    for row in found["rows"][1:]:
        offline = found["offline"][row["draft"]]["walk"]
        for name in ("tau", "steps", "emitted", "accepted_per_step", "per_position"):
            assert offline[name] == row[name]


def test_prompts_table(root: Path) -> None:
    evaluate.run(context_for(root, "evaluate.temperatures=[0, 0.8]", "evaluate.baseline=false"))
    table = pq.read_table(root / "scores" / "prompts.parquet").to_pylist()
    assert len(table) == 5 * 2 * 2
    for row in table:
        assert row["tokens"] == len(row["ids"])
        if row["draft"] == "trained":
            assert sum(row["accepted"]) + row["steps"] == row["tokens"] - 1
            if row["steps"]:  # sampled, an answer may end with its prefill
                assert row["tau"] == pytest.approx((row["tokens"] - 1) / row["steps"])
            assert row["identical"] is (True if row["temperature"] == 0 else None)
    rows = [row for row in read_scores(root)["rows"] if row["draft"] == "trained"]
    assert [row["temperature"] for row in rows] == [0, 0.8]
    assert [row["lossless"] for row in rows] == [[5, 5], None]


def test_where_the_prompts_lie_changes_no_sampled_answer(root: Path, tmp_path: Path) -> None:
    def sampled(prompts: Path) -> list[list[int]]:
        evaluate.run(context_for(root, "evaluate.temperatures=[0.8]", f'evaluate.prompts=["{prompts}"]'))
        return pq.read_table(root / "scores" / "prompts.parquet")["ids"].to_pylist()

    here = sampled(root / "prompts.jsonl")
    elsewhere = tmp_path / "moved.jsonl"
    elsewhere.write_bytes((root / "prompts.jsonl").read_bytes())
    assert sampled(elsewhere) == here


class Killed(Exception):
    pass


class Dying(Events):
    """Ends the run after so many advances of its progress."""

    def __init__(self, left: int) -> None:
        super().__init__(quiet=True)
        self.left = left

    @contextmanager
    def progress(self, *args: Any, **kwargs: Any):
        with super().progress(*args, **kwargs) as inner:
            self.inner = inner
            yield self

    def advance(self, amount: float, **shown: Any) -> None:
        self.left -= 1
        if not self.left:
            raise Killed
        self.inner.advance(amount, **shown)


def test_a_killed_run_continues_where_it_stopped(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = "evaluate.temperatures=[0, 0.8]"
    evaluate.run(context_for(root, settings))
    whole = pq.read_table(root / "scores" / "prompts.parquet").drop_columns("seconds")
    shutil.rmtree(root / "scores")
    with pytest.raises(Killed):
        evaluate.run(context_for(root, settings, events=Dying(left=4 * 3 + 2)))  # inside the fourth prompt
    log = root / ".scores.partial" / "scratch" / evaluate.LOG
    assert log.read_bytes().count(b"\n") == 3
    with log.open("ab") as file:
        file.write(b'{"key": ["half')
    measured = []
    measure = Bench.measure
    monkeypatch.setattr(
        Bench, "measure", lambda self, prompt, t: measured.append(prompt.id) or measure(self, prompt, t)
    )
    evaluate.run(context_for(root, settings))
    assert len(measured) == 7
    assert pq.read_table(root / "scores" / "prompts.parquet").drop_columns("seconds") == whole


def test_a_changed_prompt_is_decoded_anew(root: Path) -> None:
    with pytest.raises(Killed):
        evaluate.run(context_for(root, events=Dying(left=4 * 2 + 1)))
    path = root / "prompts.jsonl"
    path.write_text(path.read_text().replace(TEXTS[0], "Another question"))
    evaluate.run(context_for(root))
    table = pq.read_table(root / "scores" / "prompts.parquet").to_pylist()
    expected = len(Template.load(root / "target").prompt_ids([{"role": "user", "content": "Another question"}]))
    assert next(row for row in table if row["id"] == "q0")["prompt_tokens"] == expected
    assert read_scores(root)["rows"][1]["lossless"] == [5, 5]


def test_several_sets_are_pooled(root: Path) -> None:
    lines = (root / "prompts.jsonl").read_text().splitlines(keepends=True)
    one, two = root / "one.jsonl", root / "two.jsonl"
    one.write_text("".join(lines[:2]))
    two.write_text("".join(lines[2:]))
    evaluate.run(context_for(root, f"evaluate.prompts=['{one}', '{two}']", "evaluate.baseline=false"))
    rows = {row["set"]: row for row in read_scores(root)["rows"] if row["draft"] == "trained"}
    assert list(rows) == [str(one), str(two), "all"]
    assert rows["all"]["steps"] == rows[str(one)]["steps"] + rows[str(two)]["steps"]
    assert rows["all"]["lossless"] == [5, 5]


def test_deeper_than_trained_is_told(root: Path) -> None:
    events = Events(root / "events.jsonl", quiet=True)
    evaluate.run(context_for(root, "evaluate.draft_tokens=4", "evaluate.max_prompts=2", events=events))
    assert "deeper than the draft was trained" in (root / "events.jsonl").read_text()
    assert len(read_scores(root)["rows"][1]["per_position"]["unconditional"]) == 4


def test_status_names_a_changed_setting(root: Path) -> None:
    evaluate.run(context_for(root, "evaluate.max_prompts=2"))
    state = next(item for item in status(make_run(root, "evaluate.max_prompts=3"), root) if item.verb == "evaluate")
    assert "evaluate.max_prompts was 2, is 3" in state.why


# --- serving ---


class FakeVllm:
    """In place of `served`: our decoder plays vLLM, with the draft that it finds in the exported folder."""

    def __init__(self, root: Path) -> None:
        self.engine = TransformersEngine(make_run(root).target)
        self.spoil: Callable[[Path], Any] = lambda folder: None
        self.turn: Callable[[tuple[int, ...]], tuple[int, ...]] = lambda ids: ids
        self.started: list[bool] = []

    def way_of(self, target: config.Target) -> None:
        """It can serve everything."""

    def serve(self, target: config.Target, asked: Asked, drafting: Drafting | None, tell: Any) -> Served:
        self.started.append(drafting is not None)
        limits = Limits(asked.max_new_tokens, frozenset(asked.end_ids))
        answers = []
        for prompt in asked.prompts:
            if drafting is None:
                found = plain_decode(self.engine.session(AUX), prompt.ids, Greedy(), limits)
                answers.append(ServedAnswer(found.ids, 1.0, None))
            else:
                answers.append(self._drafted(prompt.ids, limits, drafting))
            tell(len(answers[-1].ids))
        chats = tuple(Template.load(self.engine.folder).prompt_ids(chat) for chat in asked.chats)
        return Served("0.32.0", "native", "it can", "float32", tuple(answers), chats)

    def _drafted(self, prompt: tuple[int, ...], limits: Limits, drafting: Drafting) -> ServedAnswer:
        self.spoil(drafting.folder)
        shape, weights = vllm.read(drafting.folder)
        draft = tensors.rebuild(shape, weights, self.engine.head().embed)
        session = self.engine.session(shape.aux_layers)
        found = speculative_decode(session, draft, prompt, Greedy(), limits, draft_tokens=drafting.draft_tokens)
        log = found.log
        per_position = tuple(int((log.accepted > place).sum()) for place in range(drafting.draft_tokens))
        drafted = drafting.draft_tokens * log.steps
        return ServedAnswer(
            self.turn(found.ids), 0.8, Counters(log.steps, drafted, int(sum(log.accepted)), per_position)
        )


@pytest.fixture
def fake(root: Path, monkeypatch: pytest.MonkeyPatch) -> FakeVllm:
    made = FakeVllm(root)
    monkeypatch.setattr(check, "served", made)
    return made


def test_served_as_it_was_trained(root: Path, fake: FakeVllm) -> None:
    events = Events(root / "events.jsonl", quiet=True)
    evaluate.run(context_for(root, "evaluate.engine=vllm", events=events))
    scored = read_scores(root)
    found, trained = scored["serving"], scored["rows"][1]
    assert found["tau"] == found["reference"]["tau"] == trained["tau"]
    assert found["interval"] == found["reference"]["interval"] == trained["interval"]
    assert found["counters"]["drafts"] == trained["steps"]
    assert found["reference"] | {"how": "", "tau": 0, "interval": 0} == {
        "how": "", "tau": 0, "interval": 0, "same_answers": [5, 5]
    }  # fmt: skip
    assert found["agreement"]["verdict"] == "agrees"
    assert found["agreement"]["step_for_step"] == found["identical"] == [5, 5]
    assert (found["causes"], found["mismatches"], found["other_prompts"]) == ([], [], None)
    said = (root / "events.jsonl").read_text()
    assert "decoding step by step gives" in said
    assert "WARNING" not in said


def learn(root: Path) -> None:
    """Train the draft of the run on the very answers, so that a fault costs it much."""
    path = root / "draft" / checkpoint.TRAINED
    states = StateStore.open(artifact.open_artifact(root / "states", "states"))
    states.entries = [replace(entry, split="train") for entry in states.entries]
    draft = checkpoint.load_draft(root / "draft", states.head()).requires_grad_(True)
    train = config.Train.model_validate(
        {"epochs": 60, "batch_tokens": 200, "optimizer": "adamw", "learning_rate": 4e-3}
    )
    folder = root / "training"
    folder.mkdir()
    Trainer(draft.train(), states.head(), states, train, 3, folder, Events(quiet=True)).run()
    size = path.stat().st_size
    checkpoint.save_weights(path, draft)
    assert path.stat().st_size == size  # or the artifact would count as damaged


def test_served_with_a_fault(root: Path, fake: FakeVllm) -> None:
    """The engine takes other layers than the draft was trained on."""
    learn(root)
    low = [1, 2, 3]
    inner = {LAYER_IDS: low, "layer_ids": low}
    fake.spoil = lambda folder: files.write_json(
        folder / CONFIG, files.read_json(folder / CONFIG) | {LAYER_IDS: low, "eagle_config": inner}
    )
    events = Events(root / "events.jsonl", quiet=True)
    evaluate.run(context_for(root, "evaluate.engine=vllm", events=events))
    found = read_scores(root)["serving"]
    assert found["agreement"]["verdict"] == "differs"
    assert found["causes"][0]["kind"] == "layer ids"
    assert found["causes"][0]["step_for_step"] == [5, 5]
    said = (root / "events.jsonl").read_text()
    assert f"vLLM's {found['tau']:.2f} is what the draft gives with its layer ids one too low" in said


def test_answers_that_the_draft_changes(root: Path, fake: FakeVllm) -> None:
    fake.turn = lambda ids: (*ids[:6], (ids[6] + 1) % 512, *ids[7:])
    evaluate.run(context_for(root, "evaluate.engine=vllm", "evaluate.max_prompts=2"))
    found = read_scores(root)["serving"]
    assert found["identical"] == [0, 2]
    assert [item["position"] for item in found["mismatches"]] == [6, 6]
    assert all(item["gap"] > 0 and not item["tie"] for item in found["mismatches"])


def test_what_was_served_is_kept_over_a_kill(root: Path, fake: FakeVllm, monkeypatch: pytest.MonkeyPatch) -> None:
    section = check.serving.section
    monkeypatch.setattr(check.serving, "section", lambda *_: (_ for _ in ()).throw(Killed))
    with pytest.raises(Killed):
        evaluate.run(context_for(root, "evaluate.engine=vllm"))
    monkeypatch.setattr(check.serving, "section", section)
    evaluate.run(context_for(root, "evaluate.engine=vllm"))
    assert fake.started == [False, True]
    assert read_scores(root)["serving"]["agreement"]["verdict"] == "agrees"


def test_a_target_that_only_vllm_loads_is_replayed(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its answers and states alone give every number that decoding gives, but for times."""
    evaluate.run(context_for(root))
    decoded = read_scores(root)["rows"]
    shutil.rmtree(root / "scores")
    engine = TransformersEngine(make_run(root).target)
    engine.info = replace(engine.info, name="vllm")
    monkeypatch.setattr(evaluate, "open_engine", lambda target, use: engine)
    evaluate.run(context_for(root, "target.engine=vllm"))
    scored = read_scores(root)
    assert scored["method"] == "walk"
    assert [row["draft"] for row in scored["rows"]] == ["none", "trained", "untrained"]
    for row, other in zip(scored["rows"][1:], decoded[1:], strict=True):
        for name in ("tau", "interval", "per_position", "steps", "emitted", "tokens"):
            assert row[name] == other[name]
        assert row["lossless"] is row["measured_speedup"] is row["modelled_speedup"] is None


@pytest.mark.parametrize(
    ("overrides", "what"),
    [
        (["target.engine=vllm", "evaluate.temperatures=[0, 0.8]"], "are measured greedily"),
        (["evaluate.engine=vllm", "evaluate.temperatures=[0.8]"], "compares greedy answers"),
        (["evaluate.engine=vllm", "target.python=/nowhere/python"], "/nowhere/python"),
    ],
)
def test_what_vllm_cannot_do_is_said_first(root: Path, overrides: list[str], what: str) -> None:
    with pytest.raises(UserError, match=what):
        preflight.check(make_run(root, *overrides), root, ["evaluate"])


# --- bad input: named before the target is loaded ---


@pytest.mark.parametrize(
    ("override", "what"),
    [
        ("evaluate.prompts=['nowhere.jsonl']", "nowhere.jsonl"),
        ("evaluate.prompts=[]", "evaluate.prompts"),
        ("evaluate.prompts=['sharegpt']", "sharegpt is for training"),
        ("evaluate.prompts=['mt_bench', 'mt_bench']", "mt_bench twice"),
        ("evaluate.prompts=['EMPTY']", "holds no prompt"),
        ("evaluate.prompts=['BROKEN']", "row 2 of the prompt set"),
        ("evaluate.prompts=['BLANK']", "row 1 of the prompt set"),
        ("evaluate.max_new_tokens=1", "leaves nothing to draft"),
        ("evaluate.max_new_tokens=500", "positions are needed"),
        ("evaluate.draft_tokens=500", "positions are needed"),
        ("evaluate.temperatures=[]", "temperatures"),
        ("evaluate.temperatures=[-1]", "temperatures"),
        ("evaluate.temperatures=[0, 0]", "temperatures"),
    ],
)
def test_bad_input(root: Path, override: str, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluate, "open_engine", lambda *_: pytest.fail("the target was loaded"))
    bad = {"EMPTY": "", "BROKEN": '{"prompt": "Hello"}\n{"prompt": "Hel', "BLANK": '{"prompt": "  "}\n'}
    for name, text in bad.items():
        (root / name).write_text(text)
        override = override.replace(f"'{name}'", f"'{root / name}'")
    with pytest.raises(UserError, match=what) as caught:
        evaluate.run(context_for(root, override))
    assert "\n" not in caught.value.what
    assert not (root / "scores").exists()


def test_missing_parent(root: Path) -> None:
    shutil.rmtree(root / "draft")
    with pytest.raises(UserError, match="no finished draft"):
        evaluate.run(context_for(root))


# --- pieces ---


def answer(draft: str, **changes: Any) -> Answer:
    made = Answer("s", "1", "q", 0.0, draft, 4, (5, 6, 7), "length", AcceptanceLog.of([1], [3]), Costs())
    return replace(made, **changes)


def test_an_answer_that_ended_with_its_prefill_has_no_tau(tmp_path: Path) -> None:
    whole, ended = answer("trained"), answer("trained", ids=(5,), log=AcceptanceLog.of([], []))
    scores.write_prompts(tmp_path / "p.parquet", [whole, ended])
    assert pq.read_table(tmp_path / "p.parquet")["tau"].to_pylist() == [2.0, None]


def test_a_mismatch_reaches_scores_and_people() -> None:
    mismatch = Mismatch(position=2, expected=7, found=8, gap=1e-6, noise=1e-5, tie=True)
    plain = answer("none", log=AcceptanceLog.of([], []), costs=Costs(plain=Timing(2, 1.0), whole=Timing(2, 1.0)))
    rows = scores.score_rows([plain, answer("trained", identical=False, mismatch=mismatch)], 3, 0)
    assert rows[1]["lossless"] == [0, 1]
    assert rows[1]["mismatches"] == [
        {"set": "s", "prompt": "q", "position": 2, "expected": 7, "found": 8, "gap": 1e-6, "noise": 1e-5, "tie": True}
    ]
    assert "8 instead of 7" in scores.mismatch_lines(rows)[0]
    assert "tie" in scores.mismatch_lines(rows)[0]
    assert "NOT" in scores.mismatch_lines([{**rows[1], "mismatches": [{**rows[1]["mismatches"][0], "tie": False}]}])[0]
    assert "0/1" in scores.table(rows)
    assert json.loads(json.dumps(rows, allow_nan=False)) == rows


def test_answers_of_one_token_are_no_measurement() -> None:
    nothing = AcceptanceLog.of([], [])
    with pytest.raises(GateError, match="longer than one token"):
        scores.score_rows([answer("none", log=nothing), answer("trained", log=nothing)], 3, 0)


def test_answers_survive_the_log(tmp_path: Path) -> None:
    mismatch = Mismatch(position=2, expected=7, found=None, gap=0.5, noise=1e-5, tie=False)
    written = [
        answer("none"),
        answer("trained", identical=False, mismatch=mismatch, costs=Costs(verify=Timing(1, 0.5))),
    ]
    AnswerLog(tmp_path / "log").append(("key", 0.5), written)
    found = AnswerLog(tmp_path / "log").found["key", 0.5]
    for one, other in zip(found, written, strict=True):
        assert one.as_json() == other.as_json()
        assert one.ids == other.ids


def test_prompts_are_spread_over_a_set_and_keep_the_system_message(root: Path) -> None:
    template = Template.load(root / "target")
    system = {"role": "system", "content": "Be brief."}
    turns = [
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": "1"},
        {"role": "user", "content": "Two?"},
    ]
    path = root / "many.jsonl"
    path.write_text("".join(json.dumps({"id": i, "messages": [system, *turns]}) + "\n" for i in range(10)))
    (found,) = load_sets([str(path)], 3, template)
    assert [prompt.id for prompt in found.prompts] == ["0", "3", "6"]
    assert found.total == 10
    assert found.prompts[0].ids == template.prompt_ids([system, turns[0]])
    assert len({prompt.key for prompt in found.prompts}) == 3


@pytest.mark.slow
def test_shipped_sets(root: Path) -> None:
    found = load_sets(("mt_bench", "humaneval", "gsm8k"), 40, Template.load(root / "target"))
    assert [(chosen.name, len(chosen.prompts), chosen.total) for chosen in found] == [
        ("mt_bench", 40, 80),
        ("humaneval", 40, 164),
        ("gsm8k", 40, 100),
    ]
