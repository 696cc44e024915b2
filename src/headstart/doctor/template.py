"""A chat template tried on its text alone: no tokenizer is loaded, no torch.

What it cannot see (where token boundaries fall) `headstart prepare` proves before it keeps a mask; what it sees is
whether that can succeed: the template renders user and assistant turns, prints what they say, and ends an answer.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Callable
from typing import Any

from jinja2.exceptions import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from headstart.doctor.checks import Check, Verdict

NAME = "chat template"
_BROKEN = (TemplateError, TypeError, ValueError, KeyError, AttributeError, IndexError, RecursionError)
_FIRST, _ANSWER, _OTHER, _SECOND = "Name a colour.", "red it is", "blue it is", "And a number?"


def check(source: str, file: str, special: dict[str, str]) -> Check:
    """Render two turns and look at what came out. special: bos_token, eos_token and their like, as texts."""
    try:
        template = _environment().from_string(_plain_blocks(source))
        given = {"tools": None, "documents": None, **special}
        told = _look(lambda messages, ask: template.render(messages=messages, add_generation_prompt=ask, **given))
    except _BROKEN as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        return Check(
            NAME, "stop", f"{file} refuses a plain chat: {reason}", "use the instruction-tuned model's template"
        )
    verdict, finding, do = told
    return Check(NAME, verdict, f"{file}: {finding}", do)


Messages = list[dict[str, Any]]
Render = Callable[[Messages, bool], str]
Told = tuple[Verdict, str, str | None]


def _look(render: Render) -> Told:
    wrap = _wrapping(render)
    if wrap is None:
        return "stop", "it does not print what a user says", "give the model a template that prints user messages"
    prompt = render(wrap(_user(_FIRST)), True)
    full = render(wrap(_user(_FIRST), _assistant(_ANSWER)), False)
    longer = render(wrap(_user(_FIRST), _assistant(_ANSWER), _user(_SECOND)), True)
    if _ANSWER not in full or not 0 <= longer.find(_FIRST) < longer.find(_ANSWER) < longer.find(_SECOND):
        return (
            "stop",
            "it does not print an assistant's answer in its place",
            "use the instruction-tuned model's template",
        )
    return _endings(prompt, full, render(wrap(_user(_FIRST), _assistant(_OTHER)), False))


def _endings(prompt: str, full: str, other: str) -> Told:
    """How an answer begins after its prompt, and what closes it: what follows both of two different answers."""
    tail, shared = full.rpartition(_ANSWER)[2], other.rpartition(_OTHER)[2]
    if not tail.strip() or tail != shared:
        return (
            "warn",
            "it closes an answer with no mark of its own",
            "the draft learns the text alone; check where vLLM stops",
        )
    said = f"answers end with {tail.strip()!r}"
    if not full.startswith(prompt):
        return (
            "go",
            f"{said}; it opens answers otherwise than it prints them: taken as a server would produce them",
            None,
        )
    return "go", said, None


def _wrapping(render: Render) -> Callable[..., Messages] | None:
    """How messages must be given: content as text, or as a list of parts; None when neither is printed."""
    for wrap in (_plain, _in_parts):
        try:
            if _FIRST in render(wrap(_user(_FIRST)), True):
                return wrap
        except _BROKEN:
            if wrap is _in_parts:
                raise
    return None


def _plain(*messages: dict[str, Any]) -> Messages:
    return list(messages)


def _in_parts(*messages: dict[str, Any]) -> Messages:
    return [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in messages]


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def _assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def _plain_blocks(source: str) -> str:
    """`{% generation %}` marks an answer for Transformers; here it is a block that is always taken."""
    opened = re.sub(r"(\{%[-+]?\s*)generation(\s*[-+]?%\})", r"\1if true\2", source)
    return re.sub(r"(\{%[-+]?\s*)endgeneration(\s*[-+]?%\})", r"\1endif\2", opened)


def _environment() -> ImmutableSandboxedEnvironment:
    """As Transformers sets it up for chat templates (utils/chat_template_utils.py)."""
    made = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    made.filters["tojson"] = _to_json
    made.globals |= {"raise_exception": _raise, "strftime_now": lambda form: datetime.datetime.now().strftime(form)}
    return made


def _to_json(value: Any, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=False, **options)


def _raise(message: str) -> None:
    raise TemplateError(message)
