"""From a source's records to conversations: shapes, role names, turn order, and which part of a row can be used.

Shapes read: ShareGPT (`conversations` of `from`/`value`, `system` beside it), OpenAI (`messages` of `role`/`content`),
`prompt` with or without `completion` (texts, or lists of messages), MT-bench (`turns`: the user's texts). The shape is
seen row by row. What a turn says may hold images (see `content`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

from headstart.data import media
from headstart.data.content import Reader, Unusable, media_of, short, text_of
from headstart.data.readers import NOT_UTF8
from headstart.errors import UserError
from headstart.types import Message

ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "system": "system",
    "tool": "tool",
}
KNOWN = ("user", "assistant", "system", "tool")
SHAREGPT, OPENAI, PAIR, PROMPT, QUESTION = "ShareGPT", "OpenAI", "prompt/completion", "prompt", "MT-bench"
_BESIDE = ("name", "tool_calls", "tool_call_id", "reasoning_content", "thinking")  # what templates read beside content

NO_MESSAGES = "no messages"
UNKNOWN_ROLE = "unknown role"
TURN_ORDER = "roles"  # the turns do not follow one another as a chat does
EMPTY = "empty"
NOTHING = "nothing to train on"
BAD_TOOLS = "unreadable tools"


def role_names(aliases: Mapping[str, str]) -> dict[str, str]:
    """Foreign role name -> role, `aliases` first.

    Raises:
        UserError: an alias stands for something that is no role.
    """
    for name, role in aliases.items():
        if role not in KNOWN:
            raise UserError(f"data.role_aliases: {name} = {role!r} names no role", looked_for=", ".join(KNOWN))
    return ROLES | dict(aliases)


def read_row(value: Any, roles: Mapping[str, str], folder: Path | None = None) -> tuple[str, list[Message]]:
    """Shape and messages of one record, all turns of it, roles in our names. Without a folder, images are refused.

    Raises:
        Unusable: no messages, an unknown role, content that is neither text nor an image, or no UTF-8.
        UserError: the record holds token ids instead of text.
    """
    shape, turns = _shape(value)
    reader = Reader(value, partial(media.find, folder=folder))
    messages = [_message(turn, roles, reader) for turn in turns]
    if not messages:
        raise Unusable(NO_MESSAGES)
    reader.place_rest(messages)
    if tools := _tools(value):
        messages[0] = {**messages[0], "tools": tools}
    return shape, messages


def to_answer(messages: Sequence[Message], max_turns: int) -> tuple[Message, ...]:
    """What the target is to answer anew: the system message and at most `max_turns` user turns.

    It ends before a tool's turn, which answers a call that the target may never make.

    Raises:
        Unusable: an assistant or tool turn opens the conversation, a user turn is blank, or there is none.
    """
    _check_opening(messages)
    kept: list[Message] = []
    for message in _first_turns(messages, max_turns):
        if message["role"] == "tool" or message.get("tool_calls"):
            break
        if message["role"] != "assistant":
            kept.append(message)
    kept = _without_tail(kept, "user")
    _refuse_blank(kept)
    return tuple(kept)


def to_learn(messages: Sequence[Message], max_turns: int) -> tuple[Message, ...]:
    """At most `max_turns` user turns with all that belongs to them, up to the last answer among them.

    Raises:
        Unusable: an assistant or tool turn opens the conversation, a turn is blank, or there is no answer.
    """
    _check_opening(messages)
    kept = _without_tail(_first_turns(messages, max_turns), "assistant")
    _refuse_blank(kept)
    return tuple(kept)


def alternates(messages: Sequence[Message]) -> bool:
    """Whether user and assistant take turns, the user first; system messages only before them."""
    roles = [message["role"] for message in messages]
    while roles and roles[0] == "system":
        roles.pop(0)
    return all(role == ("user", "assistant")[i % 2] for i, role in enumerate(roles))


def user_texts(messages: Iterable[Message]) -> list[str]:
    return [text_of(message) for message in messages if message["role"] == "user"]


# --- shapes ---


def _shape(value: Any) -> tuple[str, list[Any]]:
    if not isinstance(value, dict):
        raise Unusable(NO_MESSAGES, f"a {type(value).__name__} instead of an object")
    if "conversations" in value:
        return _list_shape(value, "conversations")
    if "messages" in value:
        return _list_shape(value, "messages")
    if "prompt" in value:
        return _pair(value["prompt"], value.get("completion"))
    if isinstance(value.get("turns"), list):
        return QUESTION, [{"role": "user", "content": text} for text in value["turns"]]
    if "input_ids" in value:
        raise UserError(
            "the source holds token ids, which this version does not read",
            looked_for="conversations, messages, or prompt and completion, as text",
            do="give the conversations as text; with data.answers = 'keep' their answers are kept",
        )
    raise Unusable(NO_MESSAGES, f"keys {', '.join(map(str, value)) or 'none'}")


def _list_shape(value: dict[str, Any], key: str) -> tuple[str, list[Any]]:
    turns = value[key]
    if not isinstance(turns, list) or not turns:
        raise Unusable(NO_MESSAGES, f"{key} is {short(turns)}")
    system = value.get("system")
    opening = [{"role": "system", "content": system}] if system else []
    shape = SHAREGPT if isinstance(turns[0], dict) and "from" in turns[0] else OPENAI
    return shape, [*opening, *turns]


def _pair(prompt: Any, completion: Any) -> tuple[str, list[Any]]:
    answer = [] if completion is None else _side(completion, "assistant")
    return PAIR if answer else PROMPT, [*_side(prompt, "user"), *answer]


def _tools(value: dict[str, Any]) -> list[dict[str, Any]]:
    """The tool definitions of a record, a list or its JSON text, keys in the order they came in: templates print them so."""
    tools = value.get("tools") or []
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except ValueError:
            raise Unusable(BAD_TOOLS, short(tools)) from None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise Unusable(BAD_TOOLS, short(tools))
    return tools


def _side(value: Any, role: str) -> list[Any]:
    return value if isinstance(value, list) else [{"role": role, "content": value}]


# --- one turn ---


def _message(turn: Any, roles: Mapping[str, str], reader: Reader) -> Message:
    if not isinstance(turn, dict):
        raise Unusable(NO_MESSAGES, f"a turn is {short(turn)}")
    beside = {key: turn[key] for key in _BESIDE if turn.get(key) is not None}
    content = turn["value"] if "value" in turn else turn.get("content")
    if content is None and "tool_calls" in beside:
        content = ""
    message = {"role": _role(turn, roles), "content": reader.read(content), **beside}
    _refuse_surrogates(message)
    return message


def _role(turn: Mapping[str, Any], roles: Mapping[str, str]) -> str:
    name = turn.get("from", turn.get("role"))
    if not isinstance(name, str):
        raise Unusable(UNKNOWN_ROLE, "none" if name is None else short(name))
    role = roles.get(name) or roles.get(name.strip().lower())
    if role is None:
        raise Unusable(UNKNOWN_ROLE, name)
    return role


def _refuse_surrogates(message: Message) -> None:
    """Lone surrogates come from bytes that were not UTF-8, or from escapes of half a character.

    No tokenizer takes them.
    """
    try:
        json.dumps(message, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        raise Unusable(NOT_UTF8) from None


# --- turns ---


def _check_opening(messages: Sequence[Message]) -> None:
    first = next((message["role"] for message in messages if message["role"] != "system"), None)
    if first is None:
        raise Unusable(NOTHING, "only a system message")
    if first != "user":
        raise Unusable(TURN_ORDER, f"{first} first")


def _first_turns(messages: Sequence[Message], max_turns: int) -> list[Message]:
    users = 0
    for position, message in enumerate(messages):
        users += message["role"] == "user"
        if users > max_turns:
            return list(messages[:position])
    return list(messages)


def _without_tail(messages: list[Message], last: Literal["user", "assistant"]) -> list[Message]:
    while messages and messages[-1]["role"] != last:
        messages.pop()
    if not messages:
        raise Unusable(NOTHING, f"no {last} turn")
    return messages


def _refuse_blank(messages: Sequence[Message]) -> None:
    for message in messages:
        says = text_of(message).strip() or media_of([message]) or "tool_calls" in message
        if message["role"] in ("user", "assistant") and not says:
            raise Unusable(EMPTY, f"{message['role']} turn")
