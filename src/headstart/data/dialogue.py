"""A conversation while the target answers it: what is asked, what was answered, and the samples that come of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from headstart.config import Run
from headstart.data.content import media_of
from headstart.data.templates import Template
from headstart.data.turns import Rendered, Turn
from headstart.types import Completion, Conversation, Finish, Message, Sample

TOO_LONG = "prompt leaves no room within max_length"
TRUNCATED = "answer truncated"


@dataclass
class Dialogue:
    """A conversation being answered. `asks`: what is said before each answer; `ended`: why no further turn is asked."""

    conversation: Conversation
    asks: list[list[Message]]
    messages: list[Message] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    finishes: list[Finish] = field(default_factory=list)
    ended: str | None = None


def asks(messages: Sequence[Message]) -> list[list[Message]]:
    """What is said before each answer; every user turn has one. Ends at the first tool result: the target made no such call."""
    found: list[list[Message]] = []
    said: list[Message] = []
    for message in messages:
        if message["role"] == "tool":
            break
        if message["role"] == "assistant":  # of somebody else
            continue
        said.append(message)
        if message["role"] == "user":
            found.append(said)
            said = []
    return found


def take(dialogue: Dialogue, completion: Completion, template: Template, run: Run) -> None:
    """Add an answer to its conversation; the prompt was put there when it was rendered, without what an image is expanded to."""
    prompt = completion.prompt or dialogue.turns[-1].prompt
    completion = within(completion, run.data.max_length - len(prompt))
    dialogue.turns[-1] = replace(dialogue.turns[-1], prompt=prompt, answer=completion.ids)
    dialogue.finishes.append(completion.finish)
    dialogue.messages.append({"role": "assistant", "content": template.answer_text(completion.ids)})
    if completion.finish == "length" and run.regenerate.truncated == "drop":
        dialogue.turns[-1] = replace(dialogue.turns[-1], answer=())
        dialogue.ended = TRUNCATED
    elif not completion.ids:
        dialogue.ended = TOO_LONG


def within(completion: Completion, room: int) -> Completion:
    """The answer cut to `room` tokens: that images leave so little shows only when the engine has read the prompt."""
    if len(completion.ids) <= room:
        return completion
    return replace(completion, ids=completion.ids[: max(room, 0)], finish="length")


def sample_of(dialogue: Dialogue, rendered: Rendered) -> Sample:
    """What is learned from some turns of a dialogue. With images it has what makes an engine read it again: the prompt of its
    last turn as it was sent, and that turn's answer."""
    found = sample(dialogue.conversation, rendered, dialogue.finishes[rendered.turns[-1]])
    last = dialogue.turns[rendered.turns[-1]]
    if last.sent is None:
        return found
    said = dialogue.asks[: rendered.turns[-1] + 1]
    images = media_of(message for messages in said for message in messages)
    return replace(found, media=images, sent=np.asarray(last.sent + last.answer, dtype=np.int32))


def sample(conversation: Conversation, rendered: Rendered, finish: Finish) -> Sample:
    return Sample(
        id=f"{conversation.id}:{rendered.turns[0]:02d}",
        conversation=conversation.id,
        source=conversation.source,
        split=conversation.split,
        input_ids=np.asarray(rendered.ids, dtype=np.int32),
        supervised=np.asarray(rendered.supervised, dtype=np.bool_),
        finish=finish,
    )
