"""What a run will read, counted as far as it has come: its conversations, else its prompts, else a look into its sources."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from headstart import artifact, pipeline
from headstart.config import Data, Run
from headstart.data import readers, rows
from headstart.data.content import media_of, text_of
from headstart.data.reading import Reading
from headstart.data.templates import Template, TemplateRefused
from headstart.errors import UserError
from headstart.estimate.work import Work, bounded, counted
from headstart.events import Events
from headstart.target import source
from headstart.types import Message

SAMPLED = 200  # conversations whose lengths are measured
ENOUGH = 20_000  # usable ones after which the rest of a source's files is taken to be like its beginning
CHARACTERS = 4  # of a token of English, where there is no tokenizer
AROUND = 6  # tokens that a template puts around a turn
PREPARED = "prepared"
IMAGE = 1000  # tokens of an image, roughly: only the engine knows


@dataclass(frozen=True)
class Counted:
    """work; prompts: token ids of some, to measure with; told: what the numbers rest on, for people."""

    work: Work
    prompts: list[list[int]]
    told: str


@dataclass
class _Sample:
    """Lengths of some conversations, one entry each. first: of the prompt before the first answer."""

    first: list[int] = field(default_factory=list)
    prompts: list[int] = field(default_factory=list)
    answers: list[int] = field(default_factory=list)
    turns: list[int] = field(default_factory=list)
    ids: list[list[int]] = field(default_factory=list)


def count(run: Run, template: Template | None, events: Events, answer_tokens: float | None = None) -> Counted:
    """Of the newest fresh artifact in the run's directory, else of its sources. template: None where there is no tokenizer.

    answer_tokens: of one answer on average, where a person knows it; counts only until there are answers.

    Raises:
        UserError: a source cannot be read, or nothing in it can be used.
    """
    root = Path(run.directory)
    fresh = {state.folder for state in pipeline.status(run, root) if state.state == "fresh"}
    if "conversations" in fresh:
        return _made(artifact.open_artifact(root / "conversations", "conversations"))
    if "prompts" in fresh:
        prompts = artifact.open_artifact(root / "prompts", "prompts")
        found = [item.messages for item in rows.read_conversations(prompts.file("conversations.parquet"))]
        return _planned(run, found, len(found), template, answer_tokens, PREPARED)
    found, usable, whole = look(run.data, events)
    if not found:
        raise UserError("nothing in the sources can be used", do="headstart prepare says why")
    return _planned(run, found, usable, template, answer_tokens, "usable" if whole else "usable among those read")


def template_of(run: Run) -> Template | None:
    """The target's, where its tokenizer is at hand."""
    try:
        folder = source.resolve(run.target.model, run.target.revision, weights=False)
        return Template.load(folder, trust_remote_code=run.target.trust_remote_code)
    except UserError:
        return None


def _made(conversations: artifact.Artifact) -> Counted:
    work = counted(conversations.counts)
    samples = rows.read_samples(conversations.file("samples.parquet"))[:SAMPLED]
    prompts = [sample.input_ids[: max(int(sample.supervised.argmax()), 1)].tolist() for sample in samples]
    told = f"{work.conversations:,} conversations of {work.tokens:,} tokens, counted"
    return Counted(work, prompts, told)


def _planned(
    run: Run,
    found: Sequence[Sequence[Message]],
    usable: int,
    template: Template | None,
    answer_tokens: float | None,
    kind: str,
) -> Counted:
    chosen = random.Random(run.data.seed).sample(range(len(found)), min(SAMPLED, len(found)))
    sample = _measured([found[i] for i in chosen], template)
    fit = _fitting(run, sample) if kind != PREPARED else list(range(len(chosen)))
    number = round(usable * len(fit) / len(chosen))
    prompt, turns = (fmean(values[i] for i in fit) for values in (sample.prompts, sample.turns))
    given = None if answer_tokens is None else answer_tokens * turns
    if run.data.answers == "keep":
        given = fmean(sample.answers[i] for i in fit)
    work = bounded(run, number, prompt, turns, given)
    return Counted(work, [sample.ids[i] for i in fit if sample.ids[i]], _told(run, work, number, kind, template, given))


def _fitting(run: Run, sample: _Sample) -> list[int]:
    """Those whose first prompt `prepare` will let through."""
    limit = min(run.data.max_prompt_tokens or run.data.max_length, run.data.max_length - 1)
    fit = [i for i, length in enumerate(sample.first) if length <= limit]
    if not fit:
        raise UserError(f"none of {len(sample.first)} prompts fits into {limit} tokens", do="raise data.max_length")
    return fit


def _told(run: Run, work: Work, number: int, kind: str, template: Template | None, given: float | None) -> str:
    several = max(work.conversations, 1)
    prompts = "sampled" if template else f"sampled, without a tokenizer: {CHARACTERS} characters a token"
    answers = "sampled" if run.data.answers == "keep" else "--answer-tokens"
    if given is None:
        answers = "as long as they may be; --answer-tokens N takes N for one"
    return (
        f"{'at most' if given is None else 'about'} {work.conversations:,} conversations of {number:,} {kind}, each of "
        f"{work.prompt_tokens / several:,.0f} prompt tokens ({prompts}) and {work.answer_tokens / several:,.0f} tokens of answers "
        f"({answers})"
    )


def _measured(found: Sequence[Sequence[Message]], template: Template | None) -> _Sample:
    sample = _Sample()
    tokens: Callable[[str], int] = (
        (lambda text: len(template.encode(text))) if template else (lambda text: len(text) // CHARACTERS)
    )
    for messages in found:
        lengths = [tokens(text_of(message)) + AROUND + IMAGE * len(media_of([message])) for message in messages]
        answers = [message["role"] == "assistant" for message in messages]
        users = [i for i, message in enumerate(messages) if message["role"] == "user"]
        opening = users[0] + 1
        ids = _ids(messages[:opening], template)
        sample.first.append(len(ids) or sum(lengths[:opening]))
        sample.answers.append(sum(n for n, answer in zip(lengths, answers, strict=True) if answer))
        sample.prompts.append(sum(lengths[opening:]) - sample.answers[-1] + sample.first[-1])
        sample.turns.append(len(users))
        sample.ids.append(ids)
    return sample


def _ids(messages: Sequence[Message], template: Template | None) -> list[int]:
    if template is None or media_of(messages):
        return []
    try:
        return list(template.prompt_ids(messages))
    except TemplateRefused:
        return []


# --- a look into the sources ---


@dataclass
class _Glance:
    """A source that ends once `reading` has taken `most` conversations from it. read: bytes; whole: it came to its own end."""

    inner: readers.Source
    reading: Reading
    most: int
    read: int = 0
    taken: int = 0
    whole: bool = False

    @property
    def name(self) -> str:
        return self.inner.name

    @property
    def size(self) -> int:
        return self.inner.size

    @property
    def usable(self) -> float:
        """Conversations in all of it, where it goes on as it began."""
        known = not self.whole and 0 < self.read < self.size
        return self.taken * (self.size / self.read if known else 1)

    def facts(self) -> dict[str, Any]:
        return self.inner.facts()

    def records(self, tell: readers.Tell) -> Iterator[readers.Record]:
        def counting(read: int) -> None:
            self.read += read
            tell(read)

        before = len(self.reading.candidates)
        for record in self.inner.records(counting):
            yield record
            self.taken = len(self.reading.candidates) - before
            if self.taken >= self.most:
                return
        self.whole = True


def look(data: Data, events: Events) -> tuple[list[tuple[Message, ...]], int, bool]:
    """Conversations of the sources, read as far as needed; about how many there are in all, and whether that is known."""
    reading = Reading(data)
    most = max(2 * data.max_conversations if data.max_conversations else ENOUGH, SAMPLED)
    glances = [_Glance(found, reading, most) for found in reading.sources]
    reading.sources = glances
    reading.read_all(events)
    whole = all(glance.whole or glance.size for glance in glances)
    return [candidate.messages for candidate in reading.candidates], round(sum(g.usable for g in glances)), whole
