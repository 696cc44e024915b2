"""What a tokenizer's own files say: how many ids, which one ends a text, the chat template. Loads no tokenizer.

Formats read: tokenizer.json (tokenizers), tokenizer_config.json (Transformers), vocab.json with merges, and
tiktoken.model, which holds one rank a line. A SentencePiece model alone is said to be unknown.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from headstart.target.beside import read_optional

TOKENIZER, TOKENIZER_CONFIG, VOCAB, TIKTOKEN = "tokenizer.json", "tokenizer_config.json", "vocab.json", "tiktoken.model"
TEMPLATE_TEXT, TEMPLATE_JSON = "chat_template.jinja", "chat_template.json"
_FILES = (TOKENIZER, TOKENIZER_CONFIG, VOCAB, TIKTOKEN, "tokenizer.model")


@dataclass(frozen=True)
class TokenizerFiles:
    """The tokenizer's files in one folder; all of them may be missing."""

    folder: Path

    @property
    def present(self) -> tuple[str, ...]:
        return tuple(name for name in _FILES if (self.folder / name).is_file())

    @cached_property
    def size(self) -> tuple[int | None, str]:
        """One more than the highest id that the files name, and which files those are."""
        ids = list(self._ids())
        used = " + ".join(name for name in self.present if name != "tokenizer.model")
        return (max(ids) + 1, f"highest id in {used}") if ids else (None, f"unknown: no {TOKENIZER} here")

    @cached_property
    def end(self) -> tuple[int | None, str]:
        """Id of the end token that tokenizer_config.json names, and how it is known; None where none is named."""
        text = _content(self._config.get("eos_token"))
        if text is None:
            return None, ""
        listed = (number for number, content in self._added() if content == text)
        return next(listed, self._vocabulary.get(text)), f"{TOKENIZER_CONFIG} eos_token {text}"

    @cached_property
    def template(self) -> tuple[str | None, str]:
        """The text of the chat template, and the file it is in; of a named set the one called `default`."""
        if (self.folder / TEMPLATE_TEXT).is_file():
            return (self.folder / TEMPLATE_TEXT).read_text(encoding="utf-8", errors="replace"), TEMPLATE_TEXT
        for name, config in (
            (TEMPLATE_JSON, read_optional(self.folder, TEMPLATE_JSON)),
            (TOKENIZER_CONFIG, self._config),
        ):
            if text := _default_of(config.get("chat_template")):
                return text, name
        return None, ""

    @cached_property
    def special(self) -> dict[str, str]:
        """The texts of bos_token, eos_token and their like, as a template reads them."""
        found = {key: _content(value) for key, value in self._config.items() if key.endswith("_token")}
        return {key: text for key, text in found.items() if text is not None}

    @cached_property
    def _config(self) -> Mapping[str, Any]:
        return read_optional(self.folder, TOKENIZER_CONFIG)

    @cached_property
    def _whole(self) -> Mapping[str, Any]:
        return read_optional(self.folder, TOKENIZER)

    @cached_property
    def _vocabulary(self) -> Mapping[str, int]:
        model = self._whole.get("model")
        found = model.get("vocab") if isinstance(model, Mapping) else read_optional(self.folder, VOCAB)
        if isinstance(found, list):  # Unigram: [[token, score], ...] in the order of ids
            return {str(entry[0]): index for index, entry in enumerate(found) if entry}
        return found if isinstance(found, Mapping) else {}

    def _ids(self) -> Iterator[int]:
        yield from (number for number in self._vocabulary.values() if isinstance(number, int))
        yield from (number for number, _ in self._added())
        if not self._vocabulary and (self.folder / TIKTOKEN).is_file():
            yield sum(1 for line in (self.folder / TIKTOKEN).read_bytes().splitlines() if line.strip()) - 1

    def _added(self) -> Iterator[tuple[int, str | None]]:
        """Ids and texts of the added tokens, from both files that may list them."""
        for entry in self._whole.get("added_tokens") or ():
            if isinstance(entry, Mapping) and isinstance(entry.get("id"), int):
                yield entry["id"], _content(entry)
        decoder = self._config.get("added_tokens_decoder")
        for number, entry in decoder.items() if isinstance(decoder, Mapping) else ():
            if str(number).isdecimal():
                yield int(number), _content(entry)


def _content(token: Any) -> str | None:
    found = token.get("content") if isinstance(token, Mapping) else token
    return found if isinstance(found, str) else None


def _default_of(found: Any) -> str | None:
    if isinstance(found, list):  # [{"name": ..., "template": ...}, ...]
        found = {one.get("name"): one.get("template") for one in found if isinstance(one, Mapping)}
    if isinstance(found, Mapping) and found:
        found = found.get("default", next(iter(found.values())))
    return found if isinstance(found, str) else None
