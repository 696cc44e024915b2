"""Readers, shapes, turn order, selection and the row files."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headstart.data import contamination, readers, rows, selection, sources
from headstart.errors import UserError
from headstart.types import Conversation, Sample

ROLES = sources.role_names({})
TALK = [("system", "Be brief."), ("user", "One?"), ("assistant", "1"), ("user", "Two?"), ("assistant", "2")]


def sharegpt(talk: list[tuple[str, str]]) -> dict[str, Any]:
    names = {"user": "human", "assistant": "gpt", "system": "system"}
    return {"conversations": [{"from": names[role], "value": text} for role, text in talk]}


def openai(talk: list[tuple[str, str]]) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": text} for role, text in talk]}


def messages(talk: list[tuple[str, str]]) -> list[dict[str, str]]:
    return [{"role": role, "content": text} for role, text in talk]


def read_all(*paths: Path) -> list[readers.Record]:
    return list(readers.FileSource("test", paths).records(lambda _: None))


def write(path: Path, *lines: bytes) -> Path:
    path.write_bytes(b"\n".join(lines))
    return path


def line(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode()


# --- readers ---


def test_jsonl_is_split_at_newlines_only(tmp_path: Path):
    text = "one\u2028two\u0085three\u000bfour"
    path = write(tmp_path / "a.jsonl", line({"a": text}), b"", line({"a": "next"}) + b"\r", b"")
    assert [(record.row, record.value) for record in read_all(path)] == [(1, {"a": text}), (3, {"a": "next"})]


def test_bad_lines_are_told_with_row_and_reason(tmp_path: Path):
    lines = (b'\xef\xbb\xbf{"a": 1}', b'{"a": "\xff"}', b'{"a": }', b"[" * 100_000, b'{"a": "b')
    path = write(tmp_path / "a.jsonl", *lines)
    found = [(record.place, record.value, record.problem) for record in read_all(path)]
    assert found == [
        ("1", {"a": 1}, ""),
        ("2", None, "not UTF-8"),
        ("3", None, "not JSON"),
        ("4", None, "not JSON"),
        ("5", None, "truncated JSON"),
    ]


@pytest.mark.parametrize("cut", range(1, 40))
def test_a_cut_array_gives_its_whole_records_and_one_drop(tmp_path: Path, cut: int):
    whole = json.dumps([{"a": 1}, {"a": "b\u00e4\u4e2d", "n": 1.5e3}, {"a": True}], ensure_ascii=False).encode()
    [*good, bad] = read_all(write(tmp_path / "a.json", whole[:-cut]))
    assert [record.value for record in good] == json.loads(whole)[: len(good)]
    assert (bad.row, bad.value, bad.problem) == (len(good) + 1, None, "truncated JSON")


def test_a_whole_array(tmp_path: Path):
    values = [{"a": 1}, {"a": [{"b": "]"}]}, "text"]
    path = write(tmp_path / "a.json", json.dumps(values, indent=2).encode())
    assert [record.value for record in read_all(path)] == values
    assert read_all(write(tmp_path / "empty.json", b" [ ] \n")) == []


def test_an_array_broken_in_the_middle_is_refused(tmp_path: Path):
    path = write(tmp_path / "a.json", b'[{"a": 1}, {"a": "x"y"}, {"a": 2}]')
    with pytest.raises(UserError, match="record 2"):
        read_all(path)


def test_bytes_that_are_no_utf8_cost_one_record_of_an_array(tmp_path: Path):
    path = write(tmp_path / "a.json", b'[{"prompt": "good"}, {"prompt": "b\xffd"}, {"prompt": "half \\ud83d"}]')
    good, *bad = read_all(path)
    assert sources.read_row(good.value, ROLES)[1] == messages([("user", "good")])
    for record in bad:
        with pytest.raises(sources.Unusable, match="not UTF-8"):
            sources.read_row(record.value, ROLES)


def test_parquet_gives_rows_and_finds_those_that_are_no_utf8(tmp_path: Path):
    bad = pa.StringArray.from_buffers(3, pa.py_buffer(np.array([0, 1, 2, 3], np.int32)), pa.py_buffer(b"a\xffc"))
    pq.write_table(pa.table({"prompt": bad}), tmp_path / "a.parquet")
    found = [(record.value, record.problem) for record in read_all(tmp_path / "a.parquet")]
    assert found == [({"prompt": "a"}, ""), (None, "not UTF-8"), ({"prompt": "c"}, "")]


def test_a_cut_parquet_file_is_refused(tmp_path: Path):
    pq.write_table(pa.table({"prompt": ["a"]}), tmp_path / "a.parquet")
    (tmp_path / "a.parquet").write_bytes((tmp_path / "a.parquet").read_bytes()[:-6])
    with pytest.raises(UserError, match="Parquet"):
        read_all(tmp_path / "a.parquet")


def test_a_glob_is_one_source_in_order_of_names(tmp_path: Path):
    for name in ("b", "a"):
        write(tmp_path / f"{name}.jsonl", line({"prompt": name}), line({"prompt": name * 2}))
    source = readers.find(str(tmp_path / "*.jsonl"))
    found = [(record.row, record.place, record.value["prompt"]) for record in source.records(lambda _: None)]
    assert found == [(1, "a.jsonl:1", "a"), (2, "a.jsonl:2", "aa"), (3, "b.jsonl:1", "b"), (4, "b.jsonl:2", "bb")]


@pytest.mark.parametrize("name", ["nothing.jsonl", "nothing*.jsonl", "ultrachat", "."])
def test_a_missing_source_is_an_error_that_says_what_was_looked_for(tmp_path: Path, name: str):
    with pytest.raises(UserError, match=r"does not exist|is a folder"):
        readers.find(str(tmp_path / name) if name != "ultrachat" else name)


def test_reading_tells_its_bytes(tmp_path: Path):
    for name, content in (("a.jsonl", b'{"a": 1}\n\n{"a": 2}'), ("b.json", b'[{"a": 1},{"a": 2}]')):
        source, told = readers.find(str(write(tmp_path / name, content))), []
        assert len(list(source.records(told.append))) == 2
        assert 0.7 * source.size <= sum(told) <= source.size


# --- shapes (C03) ---


@pytest.mark.parametrize("kind", ["jsonl", "json", "parquet"])
def test_every_shape_and_file_gives_the_same_messages(tmp_path: Path, kind: str):
    talks = [[("user", f"Question {i}?"), ("assistant", f"Answer {i}\u2028.")] for i in range(20)]
    shaped: dict[str, list[Any]] = {
        "ShareGPT": [sharegpt(talk) for talk in talks],
        "OpenAI": [openai(talk) for talk in talks],
        "prompt/completion": [{"prompt": talk[0][1], "completion": talk[1][1]} for talk in talks],
    }
    for shape, values in shaped.items():
        path = tmp_path / f"{shape.replace('/', '-')}.{kind}"
        if kind == "parquet":
            pq.write_table(pa.Table.from_pylist(values), path)
        else:
            write(path, *map(line, values)) if kind == "jsonl" else path.write_bytes(line(values))
        found = [sources.read_row(record.value, ROLES) for record in read_all(path)]
        assert found == [(shape, messages(talk)) for talk in talks]


def test_six_turns_with_a_system_field_stay():
    talk = [("user", "a"), ("assistant", "b")] * 3
    found = sources.read_row({"system": "Be brief.", **sharegpt(talk)}, ROLES)[1]
    assert found == messages([("system", "Be brief."), *talk])
    assert sources.read_row({"system": "", **sharegpt(talk)}, ROLES)[1] == messages(talk)


def test_other_rows_that_can_be_read():
    assert sources.read_row({"prompt": "a"}, ROLES) == ("prompt", messages([("user", "a")]))
    lists = {"prompt": messages(TALK[:2]), "completion": messages(TALK[2:3])}
    assert sources.read_row(lists, ROLES) == ("prompt/completion", messages(TALK[:3]))
    assert sources.read_row({"turns": ["a", "b"]}, ROLES) == ("MT-bench", messages([("user", "a"), ("user", "b")]))
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert sources.read_row({"messages": [{"role": "user", "content": parts}]}, ROLES)[1] == messages([("user", "ab")])


def test_tool_calls_stay_beside_the_content():
    calls = [{"function": {"name": "f", "arguments": "{}"}}]
    given = {"role": "assistant", "content": None, "tool_calls": calls, "weight": 1}
    assert sources.read_row({"messages": [given]}, ROLES)[1] == [
        {"role": "assistant", "content": "", "tool_calls": calls}
    ]


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ({"text": "a"}, "no messages"),
        ("text", "no messages"),
        (None, "no messages"),
        ({"conversations": []}, "no messages"),
        ({"messages": None}, "no messages"),
        ({"messages": ["a"]}, "no messages"),
        ({"messages": [{"role": "judge", "content": "a"}]}, "unknown role"),
        ({"messages": [{"content": "a"}]}, "unknown role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "not text"),
        ({"prompt": 3}, "not text"),
        ({"prompt": "half a pair \ud83d"}, "not UTF-8"),
    ],
)
def test_rows_that_cannot_be_read(value: Any, reason: str):
    with pytest.raises(sources.Unusable) as caught:
        sources.read_row(value, ROLES)
    assert caught.value.reason == reason


def test_token_ids_are_refused_by_name():
    with pytest.raises(UserError, match="token ids"):
        sources.read_row({"input_ids": [1], "loss_mask": [1]}, ROLES)


def test_aliases_come_before_our_names_and_must_be_roles():
    names = sources.role_names({"my_model_v2": "assistant", "human": "tool"})
    assert (names["my_model_v2"], names["human"], names["gpt"]) == ("assistant", "tool", "assistant")
    with pytest.raises(UserError, match="my_model"):
        sources.role_names({"my_model": "model"})


# --- turns ---


def test_to_answer_keeps_system_and_user_turns_to_the_limit():
    kept = sources.to_answer(messages(TALK), 4)
    assert kept == tuple(messages([TALK[0], TALK[1], TALK[3]]))
    assert sources.to_answer(messages(TALK), 1) == tuple(messages(TALK[:2]))


def test_to_answer_ends_before_a_tool_is_called():
    call = {"role": "assistant", "content": "", "tool_calls": [{}]}
    talk = [*messages([("user", "a")]), call, {"role": "tool", "content": "1"}, *messages([("user", "b")])]
    assert sources.to_answer(talk, 4) == tuple(messages([("user", "a")]))


def test_to_learn_ends_with_an_answer_within_the_limit():
    assert sources.to_learn(messages(TALK), 4) == tuple(messages(TALK))
    assert sources.to_learn(messages(TALK[:4]), 4) == tuple(messages(TALK[:3]))
    assert sources.to_learn(messages(TALK), 1) == tuple(messages(TALK[:3]))


@pytest.mark.parametrize(
    ("talk", "answer", "learn"),
    [
        ([("assistant", "a"), ("user", "b"), ("assistant", "c")], "roles", "roles"),
        ([("system", "a")], "nothing to train on", "nothing to train on"),
        ([("user", "a")], None, "nothing to train on"),
        ([("user", " \n"), ("assistant", "a")], "empty", "empty"),
        ([("user", "a"), ("assistant", "")], None, "empty"),
    ],
)
def test_conversations_without_use(talk: list[tuple[str, str]], answer: str | None, learn: str | None):
    for cut, reason in ((sources.to_answer, answer), (sources.to_learn, learn)):
        if reason is None:
            assert cut(messages(talk), 4)
            continue
        with pytest.raises(sources.Unusable) as caught:
            cut(messages(talk), 4)
        assert caught.value.reason == reason


def test_alternation():
    assert sources.alternates(messages(TALK))
    assert not sources.alternates(messages([("user", "a"), ("user", "b")]))
    assert not sources.alternates(messages([("user", "a"), ("system", "b"), ("assistant", "c")]))


# --- contamination ---


def test_overlap_is_found_in_any_user_turn_whatever_the_case_and_blanks():
    evaluations = contamination.Evaluations({"mt": ["What  is\nlove?", "And war?"], "other": ["and war?"]})
    assert evaluations.hit(messages([("user", "hello"), ("assistant", "x"), ("user", " what is LOVE? ")])) == "mt"
    assert evaluations.hit(messages([("user", "AND WAR?")])) == "mt"
    assert evaluations.hit(messages([("user", "hello"), ("assistant", "what is love?")])) is None


def test_an_evaluation_set_must_be_readable_to_the_last_row(tmp_path: Path):
    path = write(tmp_path / "eval.jsonl", line({"turns": ["a", "b"]}), b'{"turns": ["c"')
    with pytest.raises(UserError, match=r"row 2 .*truncated"):
        contamination.Evaluations.read([str(path)], ROLES)


# --- choice and split ---

COUNTS = st.dictionaries(st.text("abc", max_size=3), st.integers(0, 500), min_size=1, max_size=5)


@given(COUNTS, st.integers(1, 1500))
def test_shares_are_proportional_to_within_one(available: dict[str, int], total: int):
    quota, whole = selection.shares(available, total), sum(available.values())
    assert sum(quota.values()) == min(total, whole)
    for name, count in available.items():
        assert quota[name] <= count
        assert total >= whole or abs(quota[name] - total * count / whole) < 1


NAMES = st.lists(st.text(min_size=1, max_size=4), unique=True, min_size=1, max_size=60)


@given(NAMES, st.floats(0, 1), st.integers(0, 3), st.randoms())
def test_sides_do_not_depend_on_the_order_and_are_never_empty(names: list[str], fraction: float, seed: int, mixer: Any):
    sides = selection.sides(names, fraction, seed)
    shuffled = mixer.sample(names, len(names))
    assert selection.sides(shuffled, fraction, seed) == sides
    found = Counter(sides.values())
    if fraction == 0:
        assert found == {"train": len(names)}
    elif len(names) > 1:
        assert found["train"]
        assert found["validation"]


def test_sides_hold_out_the_fraction_and_stay_when_others_come():
    names = [f"name {i}" for i in range(4000)]
    sides = selection.sides(names, 0.1, 0)
    assert abs(Counter(sides.values())["validation"] - 400) < 4 * (4000 * 0.1 * 0.9) ** 0.5
    assert selection.sides(names[:1000], 0.1, 0) == {name: sides[name] for name in names[:1000]}
    assert selection.sides(names, 0.1, 1) != sides


def test_the_choice_does_not_decide_the_side():
    names = [f"name {i}" for i in range(4000)]
    chosen = [names[i] for i in selection.choose(names, ["a"] * 4000, 400, 0)]
    held = Counter(selection.sides(chosen, 0.5, 0).values())["validation"]
    assert abs(held - 200) < 4 * 10


def test_the_choice_is_the_same_conversations_in_any_order():
    names, owners = [f"n{i}" for i in range(50)], ["a"] * 30 + ["b"] * 20
    chosen = {names[i] for i in selection.choose(names, owners, 10, 0)}
    turned = {names[::-1][i] for i in selection.choose(names[::-1], owners[::-1], 10, 0)}
    assert chosen == turned
    assert len(chosen) == 10
    assert selection.choose(names, owners, None, 0) == list(range(50))


def test_chunks_belong_together_but_numbers_are_not_always_chunks():
    assert selection.groups(["x_0", "x_1", "y_0", "z"]) == ["x", "x", "y", "z"]
    assert selection.groups(["chat_0", "chat_1", "chat_2"]) == ["chat_0", "chat_1", "chat_2"]
    many = [f"{stem}_{i}" for stem in ("train", "test") for i in range(50)]
    assert selection.groups(many) == many


# --- our own files ---

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
SAMPLES = st.lists(
    st.builds(
        lambda name, split, finish, pairs: Sample(
            name,
            "c",
            "s",
            split,
            np.array([token for token, _ in pairs], np.int32),
            np.array([mask for _, mask in pairs], bool),
            finish,
        ),
        TEXT,
        st.sampled_from(["train", "validation"]),
        st.sampled_from(["stop", "length", "given"]),
        st.lists(st.tuples(st.integers(0, 2**31 - 1), st.booleans()), max_size=9),
    ),
    max_size=6,
)


@given(SAMPLES)
def test_samples_come_back_as_written(tmp_path_factory: pytest.TempPathFactory, samples: list[Sample]):
    path = tmp_path_factory.mktemp("rows") / "samples.parquet"
    rows.write_samples(path, samples)
    for split in (None, "train", "validation"):
        expected = [one for one in samples if split in (None, one.split)]
        for one, other in zip(rows.read_samples(path, split), expected, strict=True):
            assert (one.id, one.split, one.finish) == (other.id, other.split, other.finish)
            assert (one.input_ids.dtype, one.supervised.dtype) == (np.int32, np.bool_)
            np.testing.assert_array_equal(one.input_ids, other.input_ids)
            np.testing.assert_array_equal(one.supervised, other.supervised)


def test_samples_of_unequal_lengths_are_refused(tmp_path: Path):
    bad = Sample("a", "c", "s", "train", np.zeros(3, np.int32), np.zeros(2, bool), "stop")
    with pytest.raises(ValueError, match="sample a"):
        rows.write_samples(tmp_path / "samples.parquet", [bad])


@given(st.lists(st.lists(st.tuples(st.sampled_from(["user", "assistant"]), TEXT), max_size=3), max_size=5))
def test_conversations_come_back_as_written(tmp_path_factory: pytest.TempPathFactory, talks: list[Any]):
    path = tmp_path_factory.mktemp("rows") / "conversations.parquet"
    given = [Conversation(str(i), "s", i, "train", tuple(messages(talk))) for i, talk in enumerate(talks)]
    rows.write_conversations(path, given)
    assert rows.read_conversations(path) == given
    assert rows.read_conversations(path, "validation") == []


@given(st.dictionaries(st.integers(0, 2**31 - 1), st.integers(1, 2**60)))
def test_the_pool_comes_back_by_rising_token(tmp_path_factory: pytest.TempPathFactory, counts: dict[int, int]):
    path = tmp_path_factory.mktemp("rows") / "pool.parquet"
    rows.write_pool(path, counts)
    tokens, found = rows.read_pool(path)
    assert tokens.tolist() == sorted(counts)
    assert dict(zip(tokens.tolist(), found.tolist(), strict=True)) == counts
