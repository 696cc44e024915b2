"""The prompts that drafts are measured on: the first user turn of held-out conversations, rendered by the target's
template."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from headstart.config import Evaluate
from headstart.data import readers, sources
from headstart.data.packages import SHIPPED
from headstart.data.templates import Template
from headstart.errors import UserError
from headstart.files import sha256_json
from headstart.types import Message, Prompt

STATEMENT = "the first user turn of each prompt, after its system message where it has one"


@dataclass(frozen=True)
class EvalPrompt:
    """One prompt. place: where its set has it; ids: what the target reads; messages: what they were rendered from."""

    set: str
    place: str
    id: str
    ids: tuple[int, ...]
    messages: tuple[Message, ...] = field(default=(), compare=False)

    @property
    def key(self) -> str:
        """Tells prompts apart also when a file gives one id twice, or was changed between two attempts of a run."""
        return sha256_json([self.set, self.place, self.ids])

    def as_prompt(self) -> Prompt:
        return Prompt(self.key, self.ids)


@dataclass(frozen=True)
class PromptSet:
    """The prompts chosen from one set. total: how many it holds; facts: format and checksums."""

    name: str
    prompts: tuple[EvalPrompt, ...]
    total: int
    facts: dict[str, Any]


def load_sets(names: Sequence[str], max_prompts: int, template: Template) -> list[PromptSet]:
    """Read the sets called `names`: shipped evaluation sets, or files of conversations.

    Of a set with more than `max_prompts` prompts, that many are taken at even distances, since sets are sorted by
    topic.

    Raises:
        UserError: a name twice, an unknown set, one meant for training, one without prompts, or a row that cannot be
            read or rendered.
    """
    check_names(names)
    return [_load(name, max_prompts, template) for name in names]


def check_names(names: Sequence[str]) -> None:
    """Whether the sets exist, without reading them. Raises UserError as `load_sets` does."""
    twice = sorted({name for name in names if list(names).count(name) > 1})
    if twice:
        raise UserError(f"evaluate.prompts names {twice[0]} twice")
    for name in names:
        _find(name)


def check_lengths(sets: Sequence[PromptSet], max_positions: int, settings: Evaluate) -> None:
    """Whether the target has room for the longest prompt, its answer and the drafts. Raises UserError."""
    longest = max((prompt for chosen in sets for prompt in chosen.prompts), key=lambda prompt: len(prompt.ids))
    need = len(longest.ids) + settings.max_new_tokens + settings.draft_tokens
    if need > max_positions:
        raise UserError(
            f"prompt {longest.id} has {len(longest.ids)} tokens; with answer and drafts {need} positions are needed",
            looked_for=f"at most {max_positions}, the target's limit",
            do="lower evaluate.max_new_tokens or evaluate.draft_tokens, or take shorter prompts",
        )


def _load(name: str, max_prompts: int, template: Template) -> PromptSet:
    source = _find(name)
    rows = [_read(name, record) for record in source.records(lambda _: None)]
    if not rows:
        raise UserError(f"the prompt set {name} holds no prompt", do="correct evaluate.prompts")
    count = min(max_prompts, len(rows))
    chosen = [rows[i * len(rows) // count] for i in range(count)]
    prompts = tuple(
        EvalPrompt(name, place, key, template.prompt_ids(messages), messages) for place, key, messages in chosen
    )
    return PromptSet(name, prompts, len(rows), source.facts())


def _find(name: str) -> readers.Source:
    if name in SHIPPED and SHIPPED[name].use != "evaluate":
        raise UserError(
            f"{name} is for training; a draft measured on it would look better than it is", looked_for=_shipped()
        )
    try:
        return readers.find(name)
    except UserError as error:
        do = f"set evaluate.prompts to files, or to {_shipped()}"
        raise UserError(
            f"the prompt set {name} cannot be read: {error.what}", looked_for=error.looked_for, do=do
        ) from None


def _read(name: str, record: readers.Record) -> tuple[str, str, tuple[Message, ...]]:
    try:
        if record.problem:
            raise sources.Unusable(record.problem)
        _, messages = sources.read_row(record.value, sources.ROLES)
        prompt = sources.to_answer(messages, max_turns=1)
    except sources.Unusable as bad:
        why = f"{bad.reason} {bad.detail}".strip()
        raise UserError(
            f"row {record.place or '?'} of the prompt set {name} cannot be used: {why}",
            do="mend it, or take it out of the file",
        ) from None
    given = record.value.get("id")
    return record.place, f"{name}:{record.place}" if given is None else str(given), prompt


def _shipped() -> str:
    return ", ".join(name for name, shipped in SHIPPED.items() if shipped.use == "evaluate")
