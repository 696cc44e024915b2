"""Which ids of a conversation the target produced: cases C10, C11, C14, and the properties behind them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fixtures_text as text
from fixtures_text import chat, make_tokenizer, save_tokenizer
from headstart.data.content import Unusable
from headstart.data.rows import read_conversations, write_conversations
from headstart.data.sources import BAD_TOOLS, read_row, role_names
from headstart.data.templates import Template, TemplateRefused
from headstart.data.turns import Rendered, Turn, cut, merge_turns
from headstart.errors import UserError
from headstart.types import Conversation, Sample

THREE = chat(
    "What did she see?", "Birds, mostly.", "How many?", "365, as I said.", "Why?", "The wind: it turned north."
)
THINKING = chat("Hi", "<think>\nfirst\n</think>\n\nred", "And?", "<think>\nthen\n</think>\n\nblue")
EOS, START, END, PAD = 396, 397, 398, 399


def supervised(template: Template, rendered: Rendered) -> str:
    assert len(rendered.ids) == len(rendered.supervised)
    return template.decode([token for token, mine in zip(rendered.ids, rendered.supervised, strict=True) if mine])


def answers(messages: list[dict[str, str]]) -> list[str]:
    return [message["content"] for message in messages if message["role"] == "assistant"]


def make(source: str, **options: bool) -> Template:
    return Template(make_tokenizer(source, **options))


def sample_of(length: int, *spans: tuple[int, int]) -> Sample:
    mask = np.zeros(length, dtype=bool)
    for start, end in spans:
        mask[start:end] = True
    return Sample("s", "c", "source", "train", np.arange(length, dtype=np.int32), mask, "given")


def test_c10_same_mask_with_and_without_generation_tags():
    plain, tagged = make(text.T_PLAIN), make(text.T_GEN)
    (one,), (other,) = plain.samples(THREE), tagged.samples(THREE)
    assert one == other
    assert supervised(plain, one) == "".join(answer + "<|im_end|>" for answer in answers(THREE))
    assert one.on_policy
    assert one.turns == (0, 1, 2)


def test_c10_mask_equals_the_one_transformers_makes_from_the_tags():
    template = make(text.T_GEN)
    oracle = template.tokenizer.apply_chat_template(THREE, return_dict=True, return_assistant_tokens_mask=True)
    (one,) = template.samples(THREE)
    assert list(one.ids) == oracle["input_ids"][: len(one.ids)]  # what follows is the template's last line break
    assert [int(mine) for mine in one.supervised] == oracle["assistant_masks"][: len(one.ids)]
    assert not any(oracle["assistant_masks"][len(one.ids) :])


@pytest.mark.parametrize("source", [text.T_THINK, text.T_STUB], ids=["stripped", "stub"])
@pytest.mark.parametrize("think_tokens", [False, True])
def test_c11_stripped_thinking_gives_one_sample_per_turn_as_the_server_saw_it(source: str, think_tokens: bool):
    template = make(source, think_tokens=think_tokens)
    samples = template.samples(THINKING)
    assert [sample.turns for sample in samples] == [(0,), (1,)]
    for sample, answer, earlier in zip(samples, answers(THINKING), ([], ["red"]), strict=True):
        produced = supervised(template, sample)
        assert answer.removeprefix("<think>\n") in produced
        assert produced.endswith("<|im_end|>")
        prompt = template.decode(sample.ids[: sample.supervised.index(True)])
        assert "first" not in prompt
        assert all(text in prompt for text in earlier)
    assert not template.self_test().one_sample
    assert "one sample per turn" in template.self_test().text


def test_c11_prompt_of_each_sample_is_the_prompt_the_server_renders():
    for source in (text.T_THINK, text.T_THINK_LAST, text.T_STUB):
        template = make(source, think_tokens=True)
        for turn, count in zip(template.turns(THINKING), (1, 3), strict=True):
            oracle = template.tokenizer.apply_chat_template(
                THINKING[:count], add_generation_prompt=True, return_dict=False
            )
            assert list(turn.prompt) == oracle


def test_an_opened_think_block_is_not_opened_twice():
    template = make(text.T_STUB, think_tokens=True)
    whole = template.decode(template.samples(THINKING)[0].ids)
    assert whole.endswith("assistant\n<think>\nfirst\n</think>\n\nred<|im_end|>")
    assert not template.samples(THINKING)[0].on_policy


def test_when_only_the_last_answer_thinks_turns_still_chain_by_what_was_produced():
    template = make(text.T_THINK_LAST)
    (one,) = template.samples(THINKING)  # the second prompt still shows the first answer whole
    assert supervised(template, one) == "".join(answer + "<|im_end|>" for answer in answers(THINKING))
    assert not one.on_policy


def test_closing_token_after_the_turn_is_not_produced():
    template = make(text.T_CLOSE)
    (one,) = template.samples(THREE)
    assert EOS not in one.ids
    assert one.ids[-1] == END
    assert template.end_ids == (EOS, END)


def test_default_system_text_is_read_and_not_learned():
    template = make(text.T_SYS)
    (one,) = template.samples(THREE)
    assert template.decode(one.ids).startswith("<|im_start|>system\nBe brief.<|im_end|>")
    assert supervised(template, one) == supervised(template, make(text.T_PLAIN).samples(THREE)[0])


def test_strict_template_refuses_a_chat_that_opens_with_an_answer():
    template = make(text.T_STRICT)
    with pytest.raises(TemplateRefused, match=r"assistant, user.*alternate"):
        template.samples([{"role": "assistant", "content": "Hello!"}, *THREE])
    assert len(template.samples(THREE)) == 1


def test_an_opening_assistant_message_is_context_not_an_answer():
    template = make(text.T_PLAIN)
    (one,) = template.samples([{"role": "assistant", "content": "Hello!"}, *THREE])
    assert "Hello!" not in supervised(template, one)


def test_template_without_end_of_turn_learns_the_text_alone_and_says_so():
    template = make(text.T_BARE)
    assert template.end_of_turn is None
    assert template.structure_ids == ()
    assert template.end_ids == (EOS,)
    assert [supervised(template, sample) for sample in template.samples(THREE)] == answers(THREE)
    assert "text alone" in template.self_test().text


def test_content_in_parts_is_found_out():
    assert make(text.T_PARTS).samples(THREE) == make(text.T_PLAIN).samples(THREE)


def test_template_that_prints_no_content_is_refused():
    with pytest.raises(UserError, match="does not print"):
        make("{% for m in messages %}<|im_start|>{% endfor %}")


def test_end_of_turn_is_the_one_the_generation_config_names(tmp_path: Path):
    """The server stops where the generation config says, so a template's earlier special belongs to the answer."""
    source = text.T_PLAIN.replace("<|im_end|>", "<pad><|im_end|>")
    template = Template.load(save_tokenizer(tmp_path, source, end_ids=[EOS, END]))
    assert template.end_of_turn == END
    assert template.end_ids == (EOS, END)
    assert template.structure_ids == (START, END, PAD)
    assert supervised(template, template.samples(chat("Hi", "red"))[0]) == "red<pad><|im_end|>"


def test_loading_from_a_folder(tmp_path: Path):
    loaded = Template.load(save_tokenizer(tmp_path / "one", text.T_PLAIN))
    assert loaded.samples(THREE) == make(text.T_PLAIN).samples(THREE)
    assert loaded.vocab_size == text.VOCAB_SIZE
    assert loaded.end_ids == (EOS, END)
    named = Template.load(save_tokenizer(tmp_path / "set", {"default": text.T_PLAIN, "tool_use": text.T_BARE}))
    assert named.samples(THREE) == loaded.samples(THREE)


def test_end_ids_of_the_config_when_there_is_no_generation_config(tmp_path: Path):
    folder = save_tokenizer(tmp_path)
    (folder / "config.json").write_text('{"model_type": "llama", "text_config": {"eos_token_id": [7, 398]}}')
    assert Template.load(folder).end_ids == (7, EOS, END)


@pytest.mark.parametrize("source", [None, {"tool_use": text.T_PLAIN}], ids=["none", "no default"])
def test_no_chat_template_is_a_clear_error(tmp_path: Path, source: dict[str, str] | None):
    with pytest.raises(UserError, match="no chat template"):
        Template.load(save_tokenizer(tmp_path, source))


def test_no_tokenizer_is_a_clear_error(tmp_path: Path):
    with pytest.raises(UserError, match="cannot be loaded"):
        Template.load(tmp_path)


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("tokenizer.json", "{}", "added_tokens"),
        ("tokenizer_config.json", '{"tokenizer_class": 5}', "'int' object"),
        ("config.json", '{"model_type": ["llama"]}', "unhashable"),
        (
            "config.json",
            '{"model_type": "llama", "num_attention_heads": "abc"}',
            "'num_attention_heads': .*expected int",
        ),
        ("config.json", '{"model_type": "llama", "rope_parameters": "yarn"}', "'rope_parameters': .*with value 'yarn'"),
        ("config.json", '{"model_type": "llama", "rope_parameters": {"rope_type": "yarn"}}', "'factor'"),
    ],
)
def test_what_transformers_stumbles_over_is_a_clear_error(tmp_path: Path, file: str, content: str, said: str):
    (save_tokenizer(tmp_path) / file).write_text(content)
    with pytest.raises(UserError, match=f"the tokenizer in {tmp_path} cannot be loaded: .*{said}") as raised:
        Template.load(tmp_path)
    assert "Traceback" not in str(raised.value)
    assert raised.value.do


@pytest.mark.parametrize("ends", ['"x"', "{}", "true", '[2, "x"]'])
@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
def test_ends_of_the_wrong_kind_are_named(tmp_path: Path, file: str, ends: str):
    (save_tokenizer(tmp_path) / file).write_text(f'{{"eos_token_id": {ends}}}')
    with pytest.raises(UserError, match=r"eos_token_id = |eos_token_id'"):
        Template.load(tmp_path)


def test_broken_generation_config_is_a_clear_error(tmp_path: Path):
    (save_tokenizer(tmp_path) / "generation_config.json").write_text("{")
    with pytest.raises(UserError, match="not JSON"):
        Template.load(tmp_path)


def test_answer_text_is_what_a_chat_client_gets():
    template = make(text.T_PLAIN)
    assert template.answer_text((*template.encode("It is red."), END)) == "It is red."
    assert template.answer_text(template.encode("It is")) == "It is"
    assert template.answer_text(()) == ""


def test_early_merges_are_ordinary_tokens_of_several_symbols():
    template = make(text.T_PLAIN)
    merges = template.early_merges()
    assert merges == list(range(256, 396))  # 256 bytes, then what BPE learned, then the specials


def test_merge_extends_on_equal_ids_and_begins_anew_otherwise():
    first, second, third = Turn((1, 2), (3, 4)), Turn((1, 2, 3, 4, 5), (6,)), Turn((1, 2, 9), (7, 8), exact=False)
    one, two = merge_turns([first, second, third])
    assert one == Rendered((1, 2, 3, 4, 5, 6), (False, False, True, True, False, True), True, (0, 1))
    assert two == Rendered((1, 2, 9, 7, 8), (False, False, False, True, True), False, (2,))
    assert merge_turns([Turn((1,), ())]) == []


def test_c14_long_answer_is_cut_and_stays_supervised():
    kept = cut(sample_of(310, (10, 310)), 100)
    assert kept is not None
    assert len(kept.input_ids) == len(kept.supervised) == 100
    assert kept.supervised[10:].all()
    assert not kept.supervised[:10].any()
    assert kept.finish == "length"


def test_c14_cut_inside_the_prompt_drops():
    assert cut(sample_of(300, (150, 300)), 100) is None
    assert cut(sample_of(50), 100) is None


def test_cut_inside_a_later_prompt_keeps_the_earlier_answer_whole():
    kept = cut(sample_of(300, (10, 40), (150, 300)), 100)
    assert kept is not None
    assert len(kept.input_ids) == 40
    assert kept.finish == "given"


def test_cut_leaves_what_fits():
    sample = sample_of(100, (10, 100))
    assert cut(sample, 100) is sample


_PLAIN = make(text.T_PLAIN)
_texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=30)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(
        _texts | st.sampled_from(["\n", " \n x", "<think>\nno\n</think>\n\nyes", "<|im_start|>"]),
        min_size=2,
        max_size=6,
    )
)
def test_supervised_tokens_decode_to_exactly_the_answers(texts: list[str]):
    messages = chat(*texts)
    samples = _PLAIN.samples(messages)
    produced = "".join(supervised(_PLAIN, sample) for sample in samples)
    assert produced == "".join(answer + "<|im_end|>" for answer in answers(messages))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 5)), min_size=1, max_size=5), st.integers(1, 60))
def test_cut_keeps_a_prefix_that_ends_supervised(spans: list[tuple[int, int]], max_length: int):
    mask = np.concatenate([[False] * unseen + [True] * mine for unseen, mine in spans]).astype(bool)
    sample = Sample("s", "c", "source", "train", np.arange(len(mask), dtype=np.int32), mask, "stop")
    kept = cut(sample, max_length)
    if kept is None:
        assert not mask[:max_length].any()
        return
    size = len(kept.input_ids)
    assert size == len(kept.supervised) <= max_length
    assert kept.supervised[-1]
    assert (kept.supervised == mask[:size]).all()
    assert not mask[size:max_length].any()


TOOLS = [{"type": "function", "function": {"name": "tide", "parameters": {"type": "object", "properties": {}}, "a": 1}}]


@pytest.mark.parametrize("given", [TOOLS, json.dumps(TOOLS)])
def test_c16_tool_definitions_reach_the_prompt_as_they_came(tmp_path: Path, given: object) -> None:
    """Keys out of order stay so, on the way through our own Parquet too; the ids are those of the tokenizer's own template."""
    row = {"tools": given, "messages": [{"role": "user", "content": "What did she see?"}]}
    _, messages = read_row(row, role_names({}))
    write_conversations(tmp_path / "c.parquet", [Conversation("c", "s", 0, "train", tuple(messages))])
    (stored,) = read_conversations(tmp_path / "c.parquet")
    template = make(text.T_TOOL)
    expected = template.tokenizer.apply_chat_template(
        row["messages"], tools=TOOLS, add_generation_prompt=True, tokenize=False
    )
    assert template.decode(template.prompt_ids(stored.messages)) == expected
    assert '"name": "tide", "parameters": {"type": "object", "properties": {}}, "a": 1' in expected
    later = [*stored.messages, {"role": "assistant", "content": "Birds."}, {"role": "user", "content": "Why?"}]
    assert "tide" in template.decode(template.prompt_ids(later))


@pytest.mark.parametrize("given", ["no json", [1], {"name": "x"}])
def test_c16_tools_that_cannot_be_read_drop_the_row_with_a_reason(given: object) -> None:
    with pytest.raises(Unusable) as dropped:
        read_row({"tools": given, "messages": [{"role": "user", "content": "Hi"}]}, role_names({}))
    assert dropped.value.reason == BAD_TOOLS
