"""Regeneration with a real tiny target: ids as sampled, budgets, policies, kills and resumption (C20, C21)."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from fixtures_models import save_llama
from fixtures_text import T_PLAIN, T_STRICT, T_THINK, chat, save_tokenizer
from headstart import artifact, pipeline
from headstart.artifact import Artifact
from headstart.config import Run, build
from headstart.data import dialogue, rows
from headstart.data.answers import AnswerLog
from headstart.data.asking import check
from headstart.data.templates import Template
from headstart.engines.base import Refused, Use
from headstart.engines.transformers import TransformersEngine
from headstart.errors import GateError, UserError
from headstart.events import Events, read
from headstart.pipeline import BY_VERB, Context
from headstart.stages import regenerate
from headstart.target.smollm2 import materialize
from headstart.types import Completion, Conversation, Finish, Message, Prompt, Sample, Sampling

QUESTIONS = ["What did she see?", "How many birds?", "Why?", "Add 12 and 40.", "Who waved?", "Was the water cold?"]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama with as many rows as TOK has ids; 21 end ids, so that some answers stop by themselves."""
    folder = tmp_path_factory.mktemp("target")
    save_llama(folder, vocab_size=400, num_hidden_layers=2)
    return save_tokenizer(folder, T_PLAIN, end_ids=[*range(300, 320), 398])


def conversations(*chats: list[Message]) -> list[Conversation]:
    splits = ("train", "validation")
    return [
        Conversation(f"c{i:03d}", "birds", i, splits[i % 5 == 4], tuple(messages)) for i, messages in enumerate(chats)
    ]


def singles(count: int) -> list[Conversation]:
    return conversations(*(chat(f"{QUESTIONS[i % 6]} ({i // 6})") for i in range(count)))


def make_run(root: Path, target: Path, given: Sequence[Conversation], *overrides: str) -> Run:
    raw = {"target": {"model": str(target), "device": "cpu"}, "data": {"sources": ["birds.jsonl"], "max_length": 96}}
    base = ("regenerate.max_new_tokens=12", "regenerate.batch_size=4")
    run = build(raw, [*base, *overrides])
    stage = pipeline.BY_VERB["prepare"]
    with artifact.create(root / "prompts", "prompts", pipeline.settings_of(run, stage), {}) as made:
        rows.write_conversations(made.file("conversations.parquet"), given)
        rows.write_pool(made.file("pool.parquet"), {1: 1})
    return run


def execute(run: Run, root: Path) -> Artifact:
    return pipeline.execute(run, root, "regenerate", Events(root / "events.jsonl", quiet=True))


def samples_of(made: Artifact) -> list[Sample]:
    return rows.read_samples(made.file("samples.parquet"))


def answers_of(sample: Sample) -> list[tuple[int, ...]]:
    """Runs of supervised ids."""
    runs, current = [], []
    for token, mine in zip(sample.input_ids.tolist(), sample.supervised.tolist(), strict=True):
        if mine:
            current.append(token)
        elif current:
            runs.append(tuple(current))
            current = []
    return [*runs, tuple(current)]


class Killed(BaseException):
    """Stands for a kill: nothing of ours catches it."""


class Watched:
    """The real engine, noting what it is asked; `lives` answers are given before it is killed."""

    def __init__(self, real: TransformersEngine, lives: int | None = None) -> None:
        self.real, self.lives = real, lives
        self.info, self.folder = real.info, real.folder
        self.asked: list[str] = []
        self.given: list[str] = []

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling, tell: Any = None) -> Iterator[Completion]:
        self.asked += [prompt.id for prompt in prompts]
        for completion in self.real.generate(prompts, sampling, tell):
            if self.lives is not None and len(self.given) >= self.lives:
                raise Killed
            self.given.append(completion.id)
            yield completion

    def close(self) -> None:
        self.real.close()


def watch(monkeypatch: pytest.MonkeyPatch, lives: int | None = None) -> list[Watched]:
    opened: list[Watched] = []

    def open_watched(settings: object, use: Use) -> Watched:
        opened.append(Watched(TransformersEngine(settings, use.batch_size), lives))  # pyright: ignore[reportArgumentType]
        return opened[-1]

    monkeypatch.setattr(regenerate, "open_engine", open_watched)
    return opened


def test_greedy_answers_are_those_of_transformers(tmp_path: Path, target: Path):
    made = execute(make_run(tmp_path, target, singles(9)), tmp_path)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    ends = list(Template.load(target).end_ids)
    samples = samples_of(made)
    assert [sample.id for sample in samples] == [f"c{i:03d}:00" for i in range(9)]
    for sample in samples:
        start = int(sample.supervised.argmax())
        prompt = torch.tensor(sample.input_ids[:start], dtype=torch.long)[None]
        oracle = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=12,
            do_sample=False,
            eos_token_id=ends,
            pad_token_id=0,
        )
        assert sample.input_ids.tolist() == oracle[0].tolist()
        assert sample.supervised[start:].all()
        assert not sample.supervised[:start].any()
        assert sample.finish == ("stop" if sample.input_ids[-1] in ends else "length")
    assert {sample.finish for sample in samples} == {"stop", "length"}  # or this test shows less than it says


def test_counts_and_events(tmp_path: Path, target: Path):
    made = execute(make_run(tmp_path, target, singles(10)), tmp_path)
    samples, counts = samples_of(made), made.counts
    assert counts["conversations"] == counts["conversations_read"] == counts["answers"] == 10
    assert counts["samples"] == {"train": 8, "validation": 2}
    assert counts["truncated"] == counts["finish"]["length"] == sum(sample.finish == "length" for sample in samples)
    assert counts["supervised_tokens"] == sum(int(sample.supervised.sum()) for sample in samples)
    assert made.facts["engine"]["name"] == "transformers"
    assert made.facts["template"]["end_of_turn"] == "<|im_end|>"
    (event,) = [event for event in read(tmp_path / "events.jsonl") if event["event"] == "generated"]
    assert event["tokens"] == counts["supervised_tokens"]
    assert event["seconds"] > 0
    assert event["asked"] == 10
    assert sorted(made.manifest.files) == ["samples.parquet"]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_c21_killed_and_resumed_equals_unbroken(
    tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch, temperature: float
):
    given = [
        *singles(20),
        *conversations(*[chat(*QUESTIONS[:3])] * 22)[20:],
    ]  # the last two have equal texts, of two turns
    setting = f"regenerate.temperature={temperature}"
    unbroken = execute(make_run(tmp_path / "a", target, given, setting), tmp_path / "a")
    run = make_run(tmp_path / "b", target, given, setting)
    given_before: list[str] = []
    for lives in (6, 9):  # killed twice, in the middle of a portion
        opened = watch(monkeypatch, lives)
        with pytest.raises(Killed):
            execute(run, tmp_path / "b")
        log = tmp_path / "b" / ".conversations.partial" / "scratch" / regenerate.LOG
        logged = [json.loads(line)["id"] for line in log.read_text().splitlines()]
        assert not set(opened[0].asked) & set(given_before)
        given_before = logged
    with log.open("a") as file:  # the kill cut a line short
        file.write('{"id": "c0')
    opened = watch(monkeypatch)
    resumed = execute(run, tmp_path / "b")
    assert len(given_before) >= 8
    assert not set(opened[0].asked) & set(given_before)
    assert len(opened[0].asked) + len(given_before) == 20 + 4
    assert resumed.manifest.id == unbroken.manifest.id
    assert resumed.counts == unbroken.counts
    assert [sample.conversation for sample in samples_of(resumed) if sample.id.endswith(":00")] == [c.id for c in given]


def test_a_finished_log_is_not_asked_again_and_other_settings_ask_anew(tmp_path: Path):
    prompt, completion = Prompt("a", (1, 2)), Completion("a", (3,), "stop")
    AnswerLog(tmp_path / "log", "target").append([(prompt, completion)])
    assert AnswerLog(tmp_path / "log", "target").get(prompt) == completion
    assert AnswerLog(tmp_path / "log", "target").get(Prompt("a", (1, 3))) is None
    assert AnswerLog(tmp_path / "log", "another target").get(prompt) is None


def test_a_log_with_a_broken_line_goes_on_before_it(tmp_path: Path):
    prompts = [Prompt(name, (1,)) for name in "abc"]
    log = AnswerLog(tmp_path / "log", "")
    log.append([(prompt, Completion(prompt.id, (3,), "stop")) for prompt in prompts[:2]])
    whole = (tmp_path / "log").read_bytes()
    for torn in (b"\0\0\0\n", b'{"id": "c", "ids"', b'{"id": "c"}\n'):
        (tmp_path / "log").write_bytes(whole + torn)
        again = AnswerLog(tmp_path / "log", "")
        assert len(again) == 2
        assert (tmp_path / "log").read_bytes() == whole
    again.append([(prompts[2], Completion("c", (4,), "length"))])
    assert len(AnswerLog(tmp_path / "log", "")) == 3


def test_a_refused_prompt_ends_its_conversation_alone(
    tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path, target, singles(4))
    unbroken = {sample.conversation: sample for sample in samples_of(execute(run, tmp_path))}
    victim = sorted(unbroken)[1]
    real = TransformersEngine.generate

    def refusing(self: TransformersEngine, prompts: Sequence[Prompt], *rest: Any) -> Iterator[Any]:
        taken = [prompt for prompt in prompts if not prompt.id.startswith(victim)]
        yield from (Refused(prompt.id, "no image") for prompt in prompts if prompt not in taken)
        yield from real(self, taken, *rest)

    monkeypatch.setattr(TransformersEngine, "generate", refusing)
    other = tmp_path / "other"
    made = execute(make_run(other, target, singles(4)), other)
    assert {sample.conversation for sample in samples_of(made)} == unbroken.keys() - {victim}
    assert made.counts["dropped"] == {regenerate.NOT_TAKEN: 1}
    said = [event["text"] for event in read(other / "events.jsonl") if event["event"] == "say"]
    assert any("refused 1 prompts" in text and "no image" in text for text in said)


def test_turns_see_the_targets_own_answers_and_sampled_ids_stay(
    tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch
):
    """A turn is trained on the ids the engine gave, though the next prompt holds them decoded and encoded anew."""
    given = conversations(chat("Why?", "an answer to be replaced", "How many?", "and another", "Who?"))
    opened = watch(monkeypatch)
    made = execute(make_run(tmp_path, target, given, "data.max_length=400"), tmp_path)
    template, messages, sampled = Template.load(target), [], {}
    engine = TransformersEngine(
        build({"target": {"model": str(target), "device": "cpu"}, "data": {"sources": ["x"]}}).target
    )
    for number, question in enumerate(("Why?", "How many?", "Who?")):
        messages.append({"role": "user", "content": question})
        prompt = Prompt(f"c000:{number:02d}", template.prompt_ids(messages))
        (completion,) = engine.generate([prompt], Sampling(12, 0.0, 1.0, 0, template.end_ids))
        sampled[prompt.id] = completion.ids
        messages.append({"role": "assistant", "content": template.answer_text(completion.ids)})
    assert opened[0].asked == list(sampled)
    assert [answer for sample in samples_of(made) for answer in answers_of(sample)] == list(sampled.values())


def test_prompt_and_answer_stay_within_max_length(tmp_path: Path, target: Path):
    template = Template.load(target)
    lengths = {len(template.prompt_ids(chat("bird " * n))): n for n in range(1, 40)}
    given = conversations(*(chat("bird " * n) for n in range(1, 40)))
    made = execute(make_run(tmp_path, target, given, "data.max_length=50", "regenerate.max_new_tokens=16"), tmp_path)
    samples = samples_of(made)
    assert max(len(sample.input_ids) for sample in samples) == 50
    too_long = sum(length >= 50 for length in lengths)
    assert made.counts["dropped"] == {dialogue.TOO_LONG: too_long}
    assert len(samples) == 39 - too_long
    assert 0 < too_long < 39


def test_room_comes_in_steps_so_that_long_prompts_share_a_batch(
    tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch
):
    given = conversations(*(chat("bird " * n) for n in range(1, 16)))
    opened = watch(monkeypatch)
    calls: list[int] = []
    real = Watched.generate

    def noting(self: Watched, prompts: Sequence[Prompt], sampling: Sampling, tell: Any = None) -> Iterator[Completion]:
        calls.append(sampling.max_new_tokens)
        assert all(len(prompt.ids) + sampling.max_new_tokens <= 60 for prompt in prompts)
        return real(self, prompts, sampling, tell)

    monkeypatch.setattr(Watched, "generate", noting)
    execute(make_run(tmp_path, target, given, "data.max_length=60", "regenerate.max_new_tokens=64"), tmp_path)
    assert opened
    assert len(set(calls)) > 1
    assert all(room % 3 == 0 for room in calls)  # steps of a sixteenth of what max_length leaves room for at most


def test_truncated_answers_are_counted_and_dropped_on_demand(tmp_path: Path, target: Path):
    given = [*singles(9), *conversations(*[chat("Hm?", "", "Go on.")] * 10)[9:]]
    kept = execute(make_run(tmp_path / "a", target, given), tmp_path / "a")
    dropped = execute(make_run(tmp_path / "b", target, given, "regenerate.truncated='drop'"), tmp_path / "b")
    whole = [sample.id for sample in samples_of(kept) if sample.finish == "stop" and sample.id.endswith(":00")]
    assert 0 < len(whole) < 10
    assert [sample.id for sample in samples_of(dropped) if sample.id.endswith(":00")] == whole
    assert {sample.finish for sample in samples_of(dropped)} == {"stop"}
    assert dropped.counts["truncated"] > 0
    assert dropped.counts["dropped"][dialogue.TRUNCATED] == 10 - len(whole)


@pytest.mark.parametrize(("truncated", "told"), [(35, True), (10, False)])
def test_c20_many_truncated_answers_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], truncated: int, told: bool
):
    context = Context(make_run(tmp_path, tmp_path, singles(1)), BY_VERB["regenerate"], tmp_path, Events())
    counts = {"conversations": 100, "conversations_read": 100, "supervised_tokens": 9, "dropped": {}, "shortened": {}}
    regenerate._tell(context, counts | {"answers": 100, "truncated": truncated})
    said = capsys.readouterr()
    assert ("35 of 100 answers were truncated (regenerate.truncated = 'keep')" in said.out + said.err) is told


def test_nothing_left_is_an_error_with_the_reason(tmp_path: Path, target: Path):
    run = make_run(tmp_path, target, conversations(chat("bird " * 60)), "data.max_length=20")
    with pytest.raises(UserError, match=r"kept 0 of 1 conversations \(1 prompt leaves no room"):
        execute(run, tmp_path)


def test_keep_uses_the_answers_of_the_data_and_loads_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = save_tokenizer(tmp_path / "target", T_THINK)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    long = chat("Why?", "bird " * 300)
    given = conversations(
        chat("Why?", "<think>\nhm\n</think>\n\nThe wind.", "And?", "The tide."),
        long,
        chat("bird " * 99, "x"),
        chat("Why?"),
    )
    opened = watch(monkeypatch)
    made = execute(make_run(tmp_path, folder, given, "data.answers='keep'"), tmp_path)
    template, samples = Template.load(folder), samples_of(made)
    assert not opened
    assert [sample.id for sample in samples] == ["c000:00", "c000:01", "c001:00"]
    produced = [template.decode(answers_of(sample)[0]) for sample in samples]
    assert produced[:2] == ["<think>\nhm\n</think>\n\nThe wind.<|im_end|>", "The tide.<|im_end|>"]
    assert len(samples[2].input_ids) == 96
    assert samples[2].supervised[-1]
    assert samples[2].finish == "length"
    assert made.counts["dropped"] == {dialogue.TOO_LONG: 1, regenerate.EMPTY: 1}
    assert made.counts["cut_at_max_length"] == 2
    assert made.counts["finish"] == {"given": 4}


def test_keep_counts_what_the_template_refuses(tmp_path: Path):
    folder = save_tokenizer(tmp_path / "target", T_STRICT)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    good, bad = chat("Why?", "The wind."), [*chat("Why?"), *chat("Why?", "The wind.")]
    made = execute(make_run(tmp_path, folder, conversations(good, bad), "data.answers='keep'"), tmp_path)
    assert made.counts["dropped"] == {regenerate.REFUSED: 1}
    assert made.counts["conversations"] == 1


@pytest.mark.parametrize("turns", [1, 3])
def test_every_turn_of_a_source_is_answered_after_what_went_before(tmp_path: Path, turns: int):
    """From the file that `prepare` reads, which keeps no answers; the template refuses two users in a row."""
    target = save_tokenizer(save_llama(tmp_path / "target", vocab_size=400, num_hidden_layers=2), T_STRICT)
    said = ["Why?", "The wind.", "Who waved?", "A boy.", "Add 12 and 40.", "52."]
    names = ("human", "gpt")
    talks = [{"conversations": [{"from": names[i % 2], "value": text} for i, text in enumerate(said)]}] * 2
    (tmp_path / "talks.json").write_text(json.dumps(talks))
    run = build(
        {"target": {"model": str(target), "device": "cpu"}, "data": {"sources": [str(tmp_path / "talks.json")]}},
        [
            f"data.max_turns={turns}",
            "data.max_length=400",
            "regenerate.max_new_tokens=6",
            "capture.aux_layers=[0, 1, 2]",
        ],
    )
    pipeline.execute_all(run, tmp_path / "run", Events(quiet=True), until="regenerate")
    made = artifact.open_artifact(tmp_path / "run" / "conversations", "conversations")
    assert made.counts["answers"] == turns * made.counts["conversations"] > 0
    template, asked = Template.load(target), said[: 2 * turns : 2]
    read = [template.decode(sample.input_ids.tolist()) for sample in samples_of(made)]
    held = [[text for text in asked if text in one] for one in read]
    assert all(texts == asked[: len(texts)] for texts in held)
    assert max(held, key=len) == asked
    assert not any(text in one for text in said[1::2] for one in read)
    assert sum(len(answers_of(sample)) for sample in samples_of(made)) == made.counts["answers"]


def test_asks_drop_given_answers_and_end_at_tool_results():
    tool: Message = {"role": "tool", "content": "12"}
    assert dialogue.asks(chat("a", "b", "c", system="s")) == [chat("a", system="s"), chat("c")]
    assert dialogue.asks([*chat("a", "b"), tool, *chat("c")]) == [chat("a")]
    assert dialogue.asks([{"role": "assistant", "content": "hello"}]) == []
    assert dialogue.asks([*chat("a"), *chat("c")]) == [chat("a"), chat("c")]


@pytest.mark.parametrize(
    ("ids", "finish", "problem"),
    [
        ((), "stop", "0 tokens"),
        ((1, 2, 3, 4, 5), "length", "5 tokens"),
        ((1, 2), "stop", "no place|at .1."),
        ((1, 9, 2), "length", "no place"),
        ((9, 9), "stop", "end ids at"),
    ],
)
def test_gates_on_what_an_engine_returns(ids: tuple[int, ...], finish: Finish, problem: str):
    sampling = Sampling(4, 0.0, 1.0, 0, (9,))
    with pytest.raises(GateError, match=problem):
        check(Completion("a", ids, finish), {"a"}, sampling)
    with pytest.raises(GateError, match="not asked"):
        check(Completion("b", (9,), "stop"), {"a"}, sampling)
    check(Completion("a", (1, 9), "stop"), {"a"}, sampling)


@pytest.mark.slow
def test_kill_9_and_resume(tmp_path: Path, target: Path):
    given = singles(60)
    unbroken = execute(make_run(tmp_path / "a", target, given), tmp_path / "a")
    run = make_run(tmp_path / "b", target, given)
    code = (
        "import sys; from pathlib import Path; from headstart import pipeline, config, events\n"
        "run = config.Run.model_validate_json(sys.argv[1])\n"
        "pipeline.execute(run, Path(sys.argv[2]), 'regenerate', events.Events(None, quiet=True))"
    )
    child = subprocess.Popen([sys.executable, "-c", code, run.model_dump_json(), str(tmp_path / "b")])
    log = tmp_path / "b" / ".conversations.partial" / "scratch" / regenerate.LOG
    deadline = time.monotonic() + 120
    while (
        child.poll() is None
        and time.monotonic() < deadline
        and not (log.exists() and log.read_bytes().count(b"\n") > 8)
    ):
        time.sleep(0.01)
    child.send_signal(signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL
    assert 8 < log.read_bytes().count(b"\n") < 60
    assert execute(run, tmp_path / "b").manifest.id == unbroken.manifest.id


@pytest.mark.slow
def test_real_target_keeps_turns_in_one_sample_with_the_ids_as_sampled(tmp_path: Path):
    """SmolLM2's text survives decoding and encoding, so the turns of a conversation extend one sequence."""
    given = conversations(chat("Say hello.", "", "And now say goodbye."), chat("Name three colours."))
    run = make_run(tmp_path, Path("smollm2-135m"), given, "data.max_length=200", "regenerate.max_new_tokens=40")
    made = execute(run, tmp_path)
    two_turns, one_turn = samples_of(made)
    template = Template.load(materialize())
    first, second = answers_of(two_turns)
    messages = chat("Say hello.", template.answer_text(first), "And now say goodbye.")
    prompt = template.prompt_ids(messages)
    assert two_turns.input_ids.tolist() == [*prompt, *second]
    assert made.counts["answers"] == 3
    assert len(answers_of(one_turn)) == 1
    assert first[-1] in template.end_ids or two_turns.finish == "length"
