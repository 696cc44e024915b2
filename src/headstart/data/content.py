"""What a message says: text, or a list of parts, text and images, in the order they are read.

Parts of ours: {"type": "text", "text": ...} and {"type": "image", "source": ..., "sha256": ...} (`Media`). Read are OpenAI's
parts (`image_url`; also `image`, with the image under one of several names), and rows with their images beside the turns
(`image`, `images`), whose places are marked by `<image>` in the text (LLaVA) or by image parts that name none.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from headstart.types import Media, Message

IMAGE_PARTS = ("image", "image_url", "input_image")
_NAMES = ("image_url", "image", "path", "url")  # where a part may name its image
_MARK = re.compile(r"\n?<image>\n?")

NOT_TEXT = "not text"
IMAGES = "images do not fit the text"

Part = dict[str, Any]
Find = Callable[[Any], Media]


class Unusable(Exception):
    """Why one row cannot be used: `reason` is one of a few fixed words, `detail` what was found."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail


class Reader:
    """Reads the contents of one row's turns, in their order. `find` makes out what a reference to an image stands for.

    Raises (all methods):
        Unusable: content that is neither text nor an image, or images that do not fit their marks.
    """

    def __init__(self, row: Mapping[str, Any], find: Find) -> None:
        beside = row.get("images") or row.get("image") or ()
        self._waiting = deque(beside if isinstance(beside, Sequence) and not isinstance(beside, str) else [beside])
        self._beside = len(self._waiting)
        self._find = find

    def read(self, content: Any) -> str | list[Part]:
        """Content as text where it is nothing else, as a list of parts where there are images."""
        if content is None:
            return ""
        if isinstance(content, str):
            return self._marked(content) if self._beside and "<image>" in content else content
        if isinstance(content, list) and all(isinstance(part, dict) for part in content):
            return _simplest([self._part(part) for part in content])
        raise Unusable(NOT_TEXT, short(content))

    def place_rest(self, messages: Sequence[Message]) -> None:
        """Put images that no mark has placed before the first user turn's text: where LLaVA reads them."""
        first = next((message for message in messages if message["role"] == "user"), None)
        if self._beside and len(self._waiting) == self._beside and first is not None:
            images = [self._image(self._waiting.popleft()) for _ in range(self._beside)]
            first["content"] = _simplest([*images, _text(text_of(first))])
        if self._waiting:
            raise Unusable(IMAGES, f"{self._beside - len(self._waiting)} marks for {self._beside} images")

    def _marked(self, text: str) -> str | list[Part]:
        first, *rest = _MARK.split(text)
        parts = [_text(first)]
        for piece in rest:
            parts += [self._image(self._next()), _text(piece)]
        return _simplest(parts)

    def _part(self, part: Part) -> Part:
        kind = part.get("type")
        if kind in ("text", "input_text") and isinstance(part.get("text"), str):
            return _text(part["text"])
        if kind not in IMAGE_PARTS:
            raise Unusable(NOT_TEXT, short(kind or part))
        named = next((part[name] for name in _NAMES if part.get(name)), None)
        return self._image(self._next() if named is None else named)

    def _next(self) -> Any:
        if not self._waiting:
            raise Unusable(IMAGES if self._beside else NOT_TEXT, f"{self._beside} images, and more marks")
        return self._waiting.popleft()

    def _image(self, reference: Any) -> Part:
        media = self._find(reference)
        return {"type": media.kind, "source": media.source, "sha256": media.sha256}


def text_of(message: Message) -> str:
    """The text of a message, without its images."""
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(part.get("text") or "" for part in content)


def media_of(messages: Iterable[Message]) -> tuple[Media, ...]:
    """The images of the messages, in the order they are read."""
    return tuple(Media(part["type"], part["source"], part["sha256"]) for part in _images(messages))


def identity(message: Message) -> str:
    """What tells two messages apart: their text, and what their images hold."""
    return "\n".join([*(part["sha256"] for part in _images([message])), text_of(message)])


def for_template(message: Message) -> Message:
    """The message as chat templates take it: image parts are empty, since a template only marks their places."""
    message = {key: value for key, value in message.items() if key != "tools"}
    if isinstance(message.get("content") or "", str):
        return message
    parts = [part if part["type"] == "text" else {"type": part["type"]} for part in message["content"]]
    return {**message, "content": parts}


def short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."


def _images(messages: Iterable[Message]) -> Iterator[Part]:
    for message in messages:
        if not isinstance(message.get("content") or "", str):
            yield from (part for part in message["content"] if part["type"] != "text")


def _text(text: str) -> Part:
    return {"type": "text", "text": text}


def _simplest(parts: Sequence[Part]) -> str | list[Part]:
    """Neighbouring texts in one, empty ones left out; text alone as a string."""
    merged: list[Part] = []
    for kind, group in groupby(parts, key=lambda part: part["type"]):
        if kind != "text":
            merged += group
        elif text := "".join(part["text"] for part in group):
            merged.append(_text(text))
    if all(part["type"] == "text" for part in merged):
        return "".join(part["text"] for part in merged)
    return merged
