"""Conversations as token ids, by the target's own chat template, and which of those ids the target produces.

The mask comes from token boundaries. For the answer of turn i, P is the prompt (messages before it, rendered with the
generation prompt) and F the messages up to and with it. Where F begins with P, the answer is what follows, up to and
with the id that ends the turn. Templates that open a thinking block, or re-tokenise across the border, break that;
there the answer is what a server would have produced then: the content's own ids after P, and the end of turn.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from jinja2.exceptions import TemplateError
from transformers import AutoTokenizer

from headstart.data.content import for_template, text_of
from headstart.data.turns import Ids, Rendered, Turn, merge_turns
from headstart.errors import GateError, UserError, first_line
from headstart.target.beside import read_optional
from headstart.target.source import not_loaded
from headstart.target.tokenizer_files import TokenizerFiles
from headstart.types import Message

_BROKEN = (TemplateError, TypeError, ValueError, KeyError, AttributeError, IndexError)  # what a template can raise
_ASK: Message = {"role": "user", "content": "Name a colour."}
_PICTURE: Message = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": _ASK["content"]}]}
_COLOURS = ("red", "blue")  # two answers that share no last token


class TemplateRefused(UserError):
    """The chat template raised for one conversation (unknown roles, wrong order, missing fields)."""


@dataclass(frozen=True)
class SelfTest:
    """What `Template.self_test` found. `text` says it to a person."""

    end_of_turn: str | None
    exact: bool
    one_sample: bool
    text: str


class Template:
    """Tokenizer and chat template of one target. Use `Template.load`.

    end_of_turn: the id that ends an answer as the template writes it, None where it writes none.
    end_ids: every id that can end a turn, rising. structure_ids: special and added ids the template can emit, rising.
    """

    def __init__(self, tokenizer: Any, generation_ends: Iterable[int] = ()) -> None:
        self.tokenizer = tokenizer
        self._source = _chat_template(tokenizer)
        self._added = _added_ids(tokenizer)
        self._parts = False
        self._parts = self._wants_parts()
        generation_ends = tuple(generation_ends)
        self._tail = self._find_tail(generation_ends)
        self.end_of_turn = self._tail[0] if self._tail else None
        found = {*generation_ends, *_present(tokenizer.eos_token_id), *self._tail[:1]}
        self.end_ids: Ids = tuple(sorted(found))
        self.structure_ids: Ids = self._find_structure()

    @classmethod
    def load(cls, folder: Path, *, trust_remote_code: bool = False) -> Template:
        """Read tokenizer, chat template and end ids out of a model's folder.

        Raises:
            UserError: there is no tokenizer, no chat template, or one that does not print what it is given.
        """
        try:
            tokenizer = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=trust_remote_code)
        except Exception as error:  # tokenizers has no other kind, and Transformers stumbles in its own ways
            raise not_loaded(
                folder,
                f"the tokenizer in {folder}",
                error,
                looked_for="tokenizer.json, or a vocabulary that Transformers reads, and a config.json that it takes",
                do="put the model's own tokenizer files and config.json into its folder",
            ) from error
        if not tokenizer.chat_template:  # older multimodal models keep it beside their processor, in chat_template.json
            tokenizer.chat_template = TokenizerFiles(folder).template[0]
        return cls(tokenizer, _generation_ends(folder))

    @property
    def vocab_size(self) -> int:
        """Ids that the tokenizer knows; the target's head may have more rows."""
        return len(self.tokenizer)

    def encode(self, text: str) -> Ids:
        """Ids of `text` as it stands, nothing put around it."""
        return tuple(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def decode(self, ids: Sequence[int], *, skip_special: bool = False) -> str:
        return self.tokenizer.decode(list(ids), skip_special_tokens=skip_special, clean_up_tokenization_spaces=False)

    def answer_text(self, answer: Sequence[int]) -> str:
        """An answer as a server hands it to a chat client: without the end of turn and other special tokens."""
        body = answer[:-1] if answer and answer[-1] in self.end_ids else answer
        return self.decode(body, skip_special=True)

    def prompt_ids(self, messages: Sequence[Message]) -> Ids:
        """What the target reads before it answers `messages`. Raises TemplateRefused."""
        return self._ids(messages, generation=True)

    @cached_property
    def places_images(self) -> bool:
        """Whether the template marks the place of an image with something else than the part itself, spelt out."""
        bare = {**_PICTURE, "content": _PICTURE["content"][1:]}
        try:
            plain, marked = (self._text([message], generation=True) for message in (bare, _PICTURE))
        except TemplateRefused:
            return False
        return marked != plain and _ASK["content"] in marked and "'type'" not in marked

    def samples(self, messages: Sequence[Message]) -> list[Rendered]:
        """Sequences to learn from, for the answers given in `messages`. Raises TemplateRefused."""
        return merge_turns(self.turns(messages))

    def turns(self, messages: Sequence[Message]) -> list[Turn]:
        """One turn per answer; an assistant message before any user message is no answer. Raises TemplateRefused."""
        first = next((i for i, message in enumerate(messages) if message["role"] == "user"), len(messages))
        answers = (i for i in range(first, len(messages)) if messages[i]["role"] == "assistant")
        return [self._turn(messages[:index], messages[index]) for index in answers]

    def early_merges(self) -> list[int]:
        """Ids of ordinary tokens of more than one symbol, lowest first: in BPE, the merges learned first."""
        vocabulary = self.tokenizer.get_vocab()
        merged = (i for token, i in vocabulary.items() if len(token) > 1 and not token.startswith("<0x"))
        return sorted(i for i in merged if i not in self._added)

    def self_test(self) -> SelfTest:
        """Render two short turns and look whether each answer's ids are its text and the end of turn.

        Raises:
            GateError: they are not, so no mask made by this template could be trusted.
        """
        plain, thinking = (_probe_chat(opening) for opening in ("", "<think>\nhm\n</think>\n\n"))
        turns = self.turns(plain)
        for turn, message in zip(turns, plain[1::2], strict=True):
            text = self.decode(turn.answer)
            if message["content"] not in text or _ASK["content"] in text or not self._ends_well(turn.answer):
                do = "check the chat template in the model's folder"
                raise GateError(f"the chat template gives the answer {message['content']!r} as {text!r}", do=do)
        exact = all(turn.exact for turn in turns)
        one_sample = len(merge_turns(turns)) == 1 and len(self.samples(thinking)) == 1
        end = None if self.end_of_turn is None else self.decode([self.end_of_turn])
        return SelfTest(end, exact, one_sample, _statement(end, exact, one_sample))

    def _turn(self, before: Sequence[Message], answer: Message) -> Turn:
        prompt = self.prompt_ids(before)
        full = self._ids([*before, answer], generation=False)
        content = self.encode(text_of(answer))
        if full[: len(prompt)] == prompt:
            body = self._body(full[len(prompt) :], content)
            if body is not None:
                return Turn(prompt, body)
        overlap = self._overlap(prompt, content)
        return Turn(prompt, content[overlap:] + self._tail[:1], exact=False)

    def _body(self, rest: Ids, content: Ids) -> Ids | None:
        """The answer at the start of what follows a prompt; None where its end is not at a token boundary."""
        if not self._tail:
            return content if rest[: len(content)] == content else None
        ends = rest[-len(self._tail) :] == self._tail
        return rest[: len(rest) - len(self._tail) + 1] if ends else None

    def _overlap(self, prompt: Ids, content: Ids) -> int:
        """Ids that end the prompt and also begin the content, such as `<think>`: the server sends them only once."""
        for length in range(min(len(prompt), len(content), 8), 0, -1):
            if prompt[-length:] == content[:length] and not self._added.isdisjoint(content[:length]):
                return length
        return 0

    def _ends_well(self, answer: Ids) -> bool:
        return self.end_of_turn is None or (answer[-1] == self.end_of_turn and answer.count(self.end_of_turn) == 1)

    def _ids(self, messages: Sequence[Message], *, generation: bool) -> Ids:
        return self.encode(self._text(messages, generation=generation))

    def _text(self, messages: Sequence[Message], *, generation: bool) -> str:
        given = [_in_parts(message) if self._parts else for_template(message) for message in messages]
        tools = messages[0].get("tools") if messages else None
        try:
            return self.tokenizer.apply_chat_template(
                given, tools=tools, tokenize=False, add_generation_prompt=generation
            )
        except _BROKEN as error:
            roles = ", ".join(str(message.get("role")) for message in messages)
            raise TemplateRefused(
                f"the chat template refused messages of roles {roles}: {first_line(error)}"
            ) from error

    def _wants_parts(self) -> bool:
        """Whether the template takes content as a list of parts, as templates of multimodal models do."""
        if self._prints_probe():
            return False
        self._parts = True
        if self._prints_probe():
            return True
        raise UserError(
            "the chat template does not print what the messages say",
            looked_for="the content of a user message, as text or as a list of parts, in what it renders",
            do="give the model's folder a chat template that takes user and assistant messages",
        )

    def _prints_probe(self) -> bool:
        try:
            return _ASK["content"] in self._text([_ASK], generation=True)
        except TemplateRefused:
            return False

    def _find_tail(self, generation_ends: Ids) -> Ids:
        """What closes an answer, from the id that ends the turn on: out of what two answers share at their end.

        That id is the first which the generation config names, else the first special or added token. May be empty.
        """
        first, second = (
            self._ids([_ASK, {"role": "assistant", "content": text}], generation=False) for text in _COLOURS
        )
        shared = _common_suffix(first, second)
        for wanted in (set(generation_ends), self._added):
            for index, token in enumerate(shared):
                if token in wanted:
                    return shared[index:]
        return ()

    def _find_structure(self) -> Ids:
        """Special and added ids seen in a rendered chat, or written literally in the template's source."""
        chat: list[Message] = [_ASK, {"role": "assistant", "content": _COLOURS[0]}]
        emitted = {*self._ids(chat, generation=False), *self._ids([*chat, _ASK], generation=True)}
        named = self.tokenizer.added_tokens_decoder.items()
        literal = {index for index, token in named if index in self._added and token.content in self._source}
        return tuple(sorted((emitted & self._added) | literal))


def _probe_chat(opening: str) -> list[Message]:
    answers: list[Message] = [{"role": "assistant", "content": f"{opening}{colour} it is"} for colour in _COLOURS]
    return [message for answer in answers for message in (_ASK, answer)]


def _statement(end: str | None, exact: bool, one_sample: bool) -> str:
    parts = [
        f"answers end with {end}"
        if end
        else "the template ends an answer with no token of its own: its text alone is learned"
    ]
    if not exact:
        parts.append(
            "it renders answers otherwise than they are generated: they are taken as a server would have produced them"
        )
    parts.append(
        "turns share one sample"
        if one_sample
        else "it rewrites earlier answers, with think text at least: there, one sample per turn"
    )
    return "chat template: " + "; ".join(parts)


def _chat_template(tokenizer: Any) -> str:
    try:
        return tokenizer.get_chat_template()
    except ValueError:
        raise UserError(
            f"the tokenizer in {tokenizer.name_or_path} has no chat template",
            looked_for="chat_template.jinja, or chat_template in tokenizer_config.json (`default` of several)",
            do="use the instruction-tuned model, or put its chat template into the folder",
        ) from None


def _added_ids(tokenizer: Any) -> set[int]:
    """Special and added ids, without the runs of blanks that some tokenizers add."""
    blank = {index for index, token in tokenizer.added_tokens_decoder.items() if not token.content.strip()}
    return {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder} - blank


def _generation_ends(folder: Path) -> Ids:
    """End ids of generation_config.json, else of config.json: what Transformers itself stops at."""
    for name in ("generation_config.json", "config.json"):
        ends = _read_ends(folder / name)
        if ends:
            return ends
    return ()


def _read_ends(path: Path) -> Ids:
    raw = read_optional(path.parent, path.name)
    for section in (raw, raw.get("text_config")):
        ends = section.get("eos_token_id") if isinstance(section, dict) else None
        listed = ends if isinstance(ends, list) else [ends]
        if ends is not None and not all(isinstance(one, int) and not isinstance(one, bool) for one in listed):
            what = f"{path} has eos_token_id = {reprlib.repr(ends)}"
            raise UserError(
                what, looked_for="a token id, or a list of them", do="mend the file: the answers end with it"
            )
        if ids := _present(ends):
            return ids
    return ()


def _present(ends: int | Sequence[int] | None) -> Ids:
    if ends is None:
        return ()
    return (ends,) if isinstance(ends, int) else tuple(ends)


def _common_suffix(first: Ids, second: Ids) -> Ids:
    length = 0
    while length < min(len(first), len(second)) and first[-1 - length] == second[-1 - length]:
        length += 1
    return first[len(first) - length :]


def _in_parts(message: Message) -> Message:
    given, content = for_template(message), message.get("content")
    return {**given, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else given
