"""The stage `prepare` on small sources and a real tokenizer: shared cases C01, C02, C05, C06, C08, and more."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from fixtures_text import T_PLAIN, T_STRICT, make_tokenizer, save_tokenizer
from headstart import config, pipeline
from headstart.artifact import Artifact
from headstart.data import pool, rows
from headstart.errors import UserError
from headstart.events import Events
from headstart.types import Conversation

Row = dict[str, Any]


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return make_target(tmp_path / "target", T_PLAIN)


@pytest.fixture
def strict(tmp_path: Path) -> Path:
    return make_target(tmp_path / "strict", T_STRICT)


def make_target(folder: Path, template: str) -> Path:
    save_tokenizer(folder, template)
    (folder / "config.json").write_text("{}")
    return folder


def write(path: Path, values: list[Row]) -> str:
    path.write_text("".join(json.dumps(value) + "\n" for value in values), encoding="utf-8")
    return str(path)


def talk(number: int, *, assistant: str = "assistant", turns: int = 1) -> Row:
    said = [
        message
        for turn in range(turns)
        for message in (
            {"role": "user", "content": f"What is {number} and {turn}?"},
            {"role": assistant, "content": f"It is {number + turn}."},
        )
    ]
    return {"id": f"chat {number}", "messages": said}


def prepare(root: Path, target: Path, *names: str, **settings: Any) -> Artifact:
    data = {"sources": list(names), "decontaminate": [], **settings}
    run = config.build({"target": {"model": str(target)}, "data": data})
    return pipeline.execute(run, root, "prepare", Events(root / "events.jsonl", quiet=True))


def read(made: Artifact) -> list[Conversation]:
    return rows.read_conversations(made.file("conversations.parquet"))


def without_times(made: Artifact) -> tuple[str, Any, Any]:
    return made.manifest.id, made.counts, made.facts


# --- C01, C02, C05: what cannot be used ---


@pytest.mark.parametrize("answers", ["regenerate", "keep"])
def test_one_bad_chat_among_good_ones_is_dropped_and_named(tmp_path: Path, strict: Path, answers: str):
    values = [talk(i) for i in range(1, 101)]
    values[36]["messages"].pop(0)
    source = write(tmp_path / "chats.jsonl", values)
    made = prepare(tmp_path / "run", strict, source, answers=answers)
    assert (made.counts["rows"], made.counts["kept"], made.counts["dropped"]) == (100, 99, {"roles": 1})
    found = made.counts["sources"][source]["dropped"]["roles"]
    assert found == {"count": 1, "rows": [37], "details": {"assistant first": 1}}
    assert {one.row for one in read(made)} == set(range(1, 101)) - {37}
    with pytest.raises(UserError, match=r"1 of 100 rows \(1 %\).* roles.*37"):
        prepare(tmp_path / "none", strict, source, answers=answers, max_drop=0)
    assert not (tmp_path / "none" / "prompts").exists()


def test_a_turn_order_that_only_the_template_refuses(tmp_path: Path, strict: Path):
    values = [talk(i, turns=2) for i in range(10)]
    values[4]["messages"].insert(2, {"role": "user", "content": "And?"})
    made = prepare(tmp_path / "run", strict, write(tmp_path / "chats.jsonl", values), answers="keep")
    assert made.counts["dropped"] == {"roles": 1}
    system = [{"role": "system", "content": "Be brief."}]
    values = [talk(i) for i in range(10)]
    values[4]["messages"] = system + values[4]["messages"]  # in order, but this template knows no system message
    made = prepare(tmp_path / "run", strict, write(tmp_path / "chats.jsonl", values))
    assert made.counts["dropped"] == {"template": 1}


def test_an_unknown_role_stops_unless_it_is_named_or_allowed(tmp_path: Path, target: Path):
    values = [talk(i, assistant="my_model_v2" if i % 2 else "assistant") for i in range(100)]
    source = write(tmp_path / "chats.jsonl", values)
    with pytest.raises(UserError, match=r"'my_model_v2' in 50 % of the rows") as caught:
        prepare(tmp_path / "run", target, source)
    assert 'data.role_aliases={"my_model_v2" = "assistant"}' in str(caught.value)
    assert prepare(tmp_path / "run", target, source, max_drop=0.5).counts["dropped"] == {"unknown role": 50}
    aliased = prepare(tmp_path / "run", target, source, answers="keep", role_aliases={"my_model_v2": "assistant"})
    normal = write(tmp_path / "chats.jsonl", [talk(i) for i in range(100)])
    assert read(aliased) == read(prepare(tmp_path / "run", target, normal, answers="keep"))
    assert aliased.counts["kept"] == 100


def test_nothing_left_says_why(tmp_path: Path, target: Path):
    source = write(tmp_path / "chats.jsonl", [talk(i) for i in range(7)])
    with pytest.raises(UserError, match="kept 0 of 7 rows, all too long: rows 1, 2, 3") as caught:
        prepare(tmp_path / "run", target, source, max_length=10)
    assert "max_length" in str(caught.value)
    with pytest.raises(UserError, match="kept 0 of 0 rows"):
        prepare(tmp_path / "run", target, write(tmp_path / "empty.jsonl", []))
    source = write(tmp_path / "mixed.jsonl", [{"text": "a"}, {"messages": []}, {"prompt": ""}])
    with pytest.raises(UserError, match="kept 0 of 3 rows: 2 no messages; 1 empty"):
        prepare(tmp_path / "run", target, source)


def test_the_length_limit_is_of_the_first_prompt(tmp_path: Path, target: Path):
    tokenizer = make_tokenizer(T_PLAIN)
    values = [{"prompt": "What? " * i} for i in range(1, 9)]
    asked = ([{"role": "user", "content": value["prompt"]}] for value in values)
    texts = [str(tokenizer.apply_chat_template(one, add_generation_prompt=True, tokenize=False)) for one in asked]
    lengths = [len(tokenizer.encode(text, add_special_tokens=False)) for text in texts]
    source = write(tmp_path / "chats.jsonl", values)
    for limits, longest in (
        ({"max_length": lengths[4]}, lengths[4] - 1),  # a prompt of max_length leaves no room for an answer
        ({"max_prompt_tokens": lengths[4]}, lengths[4]),
    ):
        made = prepare(tmp_path / "run", target, source, **limits)
        assert made.counts["kept"] == sum(length <= longest for length in lengths)


def test_bad_lines_and_rows_are_counted(tmp_path: Path, target: Path):
    path = tmp_path / "chats.jsonl"
    write(path, [talk(i) for i in range(20)])
    with path.open("ab") as file:
        file.write(b'{"prompt": "\xff"}\n{"messages": [{"role": "user", "content": []}]}\n{"prompt": "cut')
    made = prepare(tmp_path / "run", target, str(path))
    found = made.counts["sources"][str(path)]["dropped"]
    assert {reason: entry["rows"] for reason, entry in found.items()} == {
        "not UTF-8": [21],
        "empty": [22],
        "truncated JSON": [23],
    }
    assert made.facts["sources"][str(path)]["format"] == "jsonl"
    assert made.facts["sources"][str(path)]["shapes"] == {"OpenAI": 21}


# --- duplicates and contamination ---


def test_duplicates_are_by_first_prompt_or_by_everything(tmp_path: Path, target: Path):
    values = [talk(1), talk(2), talk(1, turns=2), {"prompt": "  what is 1   AND 0?"}, talk(2)]
    source = write(tmp_path / "chats.jsonl", values)
    made = prepare(tmp_path / "run", target, source, max_drop=0)
    assert [one.row for one in read(made)] == [1, 2]
    assert made.counts["dropped"] == {"duplicate": 3}
    kept = prepare(tmp_path / "run", target, source, answers="keep")
    assert [one.row for one in read(kept)] == [1, 2, 3]
    assert kept.counts["dropped"] == {"duplicate": 1, "nothing to train on": 1}


def test_evaluation_prompts_are_not_trained_on(tmp_path: Path, target: Path):
    first = write(tmp_path / "mt.jsonl", [{"turns": ["WHAT is 3 and 0?", "no such"]}])
    second = write(tmp_path / "other.jsonl", [{"prompt": "what is 5\nand 1?"}])
    source = write(tmp_path / "chats.jsonl", [talk(i, turns=2) for i in range(10)])
    made = prepare(tmp_path / "run", target, source, decontaminate=[first, second], max_drop=0, max_turns=1)
    assert made.counts["contaminated"] == {first: 1, second: 1}
    assert {one.id for one in read(made)} == {f"chat {i}" for i in range(10)} - {"chat 3", "chat 5"}
    with pytest.raises(UserError, match="evaluation set"):
        prepare(tmp_path / "run", target, "mt_bench")


# --- choice and split (C06) ---


def test_mix_and_cap_by_share(tmp_path: Path, target: Path):
    big = write(tmp_path / "a.jsonl", [talk(i) for i in range(180)])
    small = write(tmp_path / "b.jsonl", [talk(1000 + i) for i in range(20)])
    made = prepare(tmp_path / "run", target, big, small, max_conversations=50)
    assert Counter(one.source for one in read(made)) == {big: 45, small: 5}
    assert made.counts["not_chosen"] == 150
    again = prepare(tmp_path / "again", target, big, small, max_conversations=50)
    assert without_times(again) == without_times(made)
    other = prepare(tmp_path / "other", target, big, small, max_conversations=50, seed=1)
    assert {one.id for one in read(other)} != {one.id for one in read(made)}


def test_choice_and_split_do_not_depend_on_the_order_of_rows(tmp_path: Path, target: Path):
    values = [talk(i) for i in range(60)]
    for value in values[::2]:
        del value["id"]  # its content names it
    sides = []
    for order in range(2):
        random.Random(order).shuffle(values)
        made = prepare(tmp_path / "run", target, write(tmp_path / "a.jsonl", values), max_conversations=40)
        sides.append({one.id: one.split for one in read(made)})
    assert sides[0] == sides[1]
    assert set(sides[0].values()) == {"train", "validation"}


def test_chunks_of_one_conversation_stay_on_one_side(tmp_path: Path, target: Path):
    values = [
        {"id": f"{name}_{chunk}", "conversations": [{"from": "human", "value": f"{name} asks {chunk}"}]}
        for name in ("ada", "bob", "cyd", "dan", "eve", "fay")
        for chunk in range(3)
    ]
    source = write(tmp_path / "chats.jsonl", values)
    for seed in range(5):
        made = prepare(tmp_path / "run", target, source, validation_fraction=0.5, seed=seed)
        sides = {(one.id.split("_")[0], one.split) for one in read(made)}
        assert len(sides) == 6
        assert made.counts["splits"]["train"] % 3 == 0
        assert 0 < made.counts["splits"]["train"] < 18


def test_ids_that_are_taken_are_made_unique_and_stay_together(tmp_path: Path, target: Path):
    values = [talk(i) | {"id": str(i % 10)} for i in range(30)]
    first, second = write(tmp_path / "a.jsonl", values[:20]), write(tmp_path / "b.jsonl", values[20:])
    found = read(prepare(tmp_path / "run", target, first, second, validation_fraction=0.5))
    assert len({one.id for one in found}) == 30
    assert len({(one.id.partition("~")[0], one.split) for one in found}) == 10


# --- messages and pool ---


def test_what_is_to_be_answered_or_learned(tmp_path: Path, target: Path):
    source = write(tmp_path / "chats.jsonl", [talk(1, turns=3)])
    asked = read(prepare(tmp_path / "run", target, source, max_turns=2))[0].messages
    assert [message["role"] for message in asked] == ["user", "user"]
    kept = read(prepare(tmp_path / "run", target, source, max_turns=2, answers="keep"))[0].messages
    assert kept == tuple(talk(1, turns=2)["messages"])


def test_the_pool_counts_all_text_but_that_of_held_out_conversations(tmp_path: Path, target: Path):
    values = [talk(i, turns=3) for i in range(30)]
    source = write(tmp_path / "chats.jsonl", values)
    made = prepare(tmp_path / "run", target, source, max_turns=1, max_conversations=20, validation_fraction=0.3)
    held = {one.id for one in read(made) if one.split == "validation"}
    assert held
    tokenizer, expected = make_tokenizer(T_PLAIN), Counter[int]()
    for value in values:
        if value["id"] not in held:
            for message in value["messages"]:
                expected.update(tokenizer.encode(message["content"], add_special_tokens=False))
    tokens, counts = rows.read_pool(made.file("pool.parquet"))
    assert dict(zip(tokens.tolist(), counts.tolist(), strict=True)) == expected
    assert made.counts["pool"]["tokens"] == expected.total()


def test_the_reservoir_gives_each_text_an_equal_chance():
    found = Counter[str]()
    for seed in range(400):
        reservoir = pool.Reservoir(seed, limit=5)
        for i in range(20):
            reservoir.offer("owner", str(i))
        assert (len(reservoir.texts), reservoir.seen) == (5, 20)
        found.update(item.text for item in reservoir.texts)
    assert all(abs(found[str(i)] - 100) < 4 * (400 * 0.25 * 0.75) ** 0.5 for i in range(20))


# --- the stage as a whole ---


def test_a_broken_off_attempt_is_made_anew(tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch):
    source = write(tmp_path / "chats.jsonl", [talk(i) for i in range(30)])
    whole = prepare(tmp_path / "whole", target, source)
    with monkeypatch.context() as patched:
        patched.setattr(pool, "count_tokens", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            prepare(tmp_path / "run", target, source)
    assert not (tmp_path / "run" / "prompts").exists()
    assert without_times(prepare(tmp_path / "run", target, source)) == without_times(whole)


def test_a_missing_source_is_told_before_the_target_is_looked_for(tmp_path: Path):
    with pytest.raises(UserError, match=r"nothing\.jsonl does not exist"):
        prepare(tmp_path / "run", tmp_path / "no target", str(tmp_path / "nothing.jsonl"))


def test_a_folder_with_foreign_files_is_refused(tmp_path: Path, target: Path):
    foreign = tmp_path / "run" / "prompts" / "thesis.txt"
    foreign.parent.mkdir(parents=True)
    foreign.write_text("years of work")
    with pytest.raises(UserError, match=r"thesis\.txt"):
        prepare(tmp_path / "run", target, write(tmp_path / "chats.jsonl", [talk(1)]))
    assert foreign.read_text() == "years of work"


def test_another_template_is_another_tokenizer_hash(tmp_path: Path, target: Path, strict: Path):
    source = write(tmp_path / "chats.jsonl", [talk(i) for i in range(3)])
    found = {prepare(tmp_path / "run", folder, source).facts["tokenizer"] for folder in (target, strict, target)}
    assert len(found) == 2


def test_what_a_person_is_told(tmp_path: Path, target: Path, capsys: pytest.CaptureFixture[str]):
    source = write(tmp_path / "chats.jsonl", [*(talk(i) for i in range(20)), {"text": "a"}])
    run = config.build({"target": {"model": str(target)}, "data": {"sources": [source], "decontaminate": []}})
    pipeline.execute(run, tmp_path / "run", "prepare", Events())
    told = capsys.readouterr()
    assert told.out == ""
    for words in ("OpenAI", "no messages", "21 (keys text)", "kept 20 conversations", "0s left"):
        assert words in told.err


@pytest.mark.slow
def test_the_shipped_set_with_the_real_tokenizer(tmp_path: Path):
    data = {"sources": ["sharegpt"], "max_conversations": 300, "max_prompt_tokens": 512, "max_length": 1024}
    run = config.build({"target": {"model": "smollm2-135m"}, "data": data})
    made = pipeline.execute(run, tmp_path, "prepare", Events(quiet=True))
    counts = made.counts
    assert counts["rows"] == 9583 + 8088 + 1
    assert (counts["dropped"]["no messages"], counts["dropped"]["truncated JSON"]) == (126, 1)
    assert counts["kept"] == 300
    assert 40_000 < counts["pool"]["distinct"] <= 49_152


def test_lone_surrogates_in_roles_and_ids_do_not_end_the_stage(tmp_path: Path, target: Path):
    """JSON can spell what no encoding can hold; it may come from a text cut in the middle of an emoji."""
    rows = [json.dumps(talk(number)) for number in range(4)]
    rows.append('{"messages": [{"role": "us\\ud83d", "content": "a"}]}')
    rows.append('{"id": "\\ud800", "messages": [{"role": "user", "content": "What is water?"}]}')
    (tmp_path / "a.jsonl").write_text("\n".join(rows) + "\n")
    made = prepare(tmp_path / "run", target, str(tmp_path / "a.jsonl"), max_drop=1.0)
    assert "\\ud800" in {conversation.id for conversation in read(made)}
    assert made.counts["kept"] == 5


def test_a_single_conversation_is_trained_on(tmp_path: Path, target: Path):
    for seed in range(8):
        made = prepare(
            tmp_path / f"run{seed}", target, write(tmp_path / "a.jsonl", [talk(1)]), validation_fraction=0.9, seed=seed
        )
        assert made.counts["splits"] == {"train": 1, "validation": 0}
