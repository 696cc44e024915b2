"""prepare: conversations out of the sources, clean, chosen, split; and the token pool.

A row is read, brought into our roles, cut to `data.max_turns`, compared with the evaluation sets and with the rows
before it, and its prompt is rendered with the target's template. Every row that does not come through is counted with
its reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from headstart import files
from headstart.config import Data
from headstart.data import pool, rows, selection, sources
from headstart.data import tally as drops
from headstart.data.content import media_of
from headstart.data.reading import Candidate, Reading
from headstart.data.tally import Tally
from headstart.data.templates import Template, TemplateRefused
from headstart.errors import UserError
from headstart.events import Events
from headstart.pipeline import Context
from headstart.target import source as target_source
from headstart.types import Conversation, Message, Split

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)


def run(context: Context) -> None:
    """Make the artifact `prompts`.

    Raises:
        UserError: a source is missing, too many rows cannot be used, or nothing is left.
    """
    data, target, events = context.run.data, context.run.target, context.events
    with context.create() as build:
        reading = Reading(data)
        reading.read_all(events)
        _check(reading.tally, data, events)
        folder = target_source.resolve(target.model, target.revision, weights=False, progress=events.say)
        template = Template.load(folder, trust_remote_code=target.trust_remote_code)
        fitting = _fitting(reading, template, data, events)
        _check(reading.tally, data, events)
        conversations = _conversations(fitting, data)
        rows.write_conversations(build.file("conversations.parquet"), conversations)
        pooled = _write_pool(build.file("pool.parquet"), reading, conversations, template, events)
        build.counts |= {**_counts(reading, len(fitting), conversations), "pool": pooled}
        build.facts |= _facts(reading, folder)
        for line in (*reading.tally.table(), _summary(build.counts)):
            events.say(line)


def _check(tally: Tally, data: Data, events: Events) -> None:
    """`Tally.check`; when it stops the stage, the table is shown before."""
    try:
        tally.check(data.max_drop)
    except UserError:
        for line in tally.table():
            events.say(line)
        raise


def _fitting(reading: Reading, template: Template, data: Data, events: Events) -> list[Candidate]:
    """The candidates whose prompt the template renders, short enough that an answer fits."""
    kept: list[Candidate] = []
    limit = min(data.max_prompt_tokens or data.max_length, data.max_length - 1)
    with events.progress("rendering prompts", len(reading.candidates), "prompts") as bar:
        for candidate in reading.candidates:
            try:
                _check_prompt(candidate.messages, template, limit)
                kept.append(candidate)
            except sources.Unusable as bad:
                reading.tally.of(candidate.source).drop(bad.reason, candidate.place, bad.detail)
            bar.advance(1)
    return kept


def _check_prompt(messages: Sequence[Message], template: Template, limit: int) -> None:
    """Raises Unusable: the template refuses the conversation or its images, or the first prompt has more than `limit` tokens
    (an image counts as the few that mark its place)."""
    if media_of(messages) and not template.places_images:
        raise sources.Unusable(drops.IMAGES)
    first = next(i for i, message in enumerate(messages) if message["role"] == "user") + 1
    try:
        prompt = template.prompt_ids(messages[:first])
        if messages[-1]["role"] == "assistant" and len(messages) > first + 1:  # a wrong order may show only later
            template.prompt_ids(messages[:-1])
    except TemplateRefused as error:
        reason = drops.TEMPLATE if sources.alternates(messages) else sources.TURN_ORDER
        raise sources.Unusable(reason, error.what) from None
    if len(prompt) > limit:
        raise sources.Unusable(drops.TOO_LONG)


def _conversations(candidates: Sequence[Candidate], data: Data) -> list[Conversation]:
    """Those chosen under `data.max_conversations`, each with its side, in the order of the sources."""
    groups = _groups(candidates)
    ids, names = [candidate.id for candidate in candidates], [candidate.source for candidate in candidates]
    chosen = selection.choose(ids, names, data.max_conversations, data.seed)
    sides = selection.sides((groups[i] for i in chosen), data.validation_fraction, data.seed)
    return [_conversation(candidates[i], sides[groups[i]]) for i in chosen]


def _conversation(candidate: Candidate, split: Split) -> Conversation:
    return Conversation(candidate.id, candidate.source, candidate.row, split, candidate.messages)


def _groups(candidates: Sequence[Candidate]) -> list[str]:
    """The conversation that each candidate is a part of, found source by source."""
    by_source: dict[str, list[int]] = {}
    for index, candidate in enumerate(candidates):
        by_source.setdefault(candidate.source, []).append(index)
    found = [""] * len(candidates)
    for indices in by_source.values():
        names = selection.groups([candidates[index].own_id for index in indices])
        for index, name in zip(indices, names, strict=True):
            found[index] = name
    return found


def _write_pool(
    path: Path, reading: Reading, conversations: Sequence[Conversation], template: Template, events: Events
) -> dict[str, int]:
    """Count tokens over all usable text but that of held-out conversations, and say how much it was."""
    held = {conversation.id for conversation in conversations if conversation.split == "validation"}
    texts = [item.text for item in reading.reservoir.texts if item.owner not in held]
    with events.progress("counting tokens", len(texts), "texts") as bar:
        counts = pool.count_tokens(template.tokenizer, texts, bar.advance)
    used = np.flatnonzero(counts)
    rows.write_pool(path, {int(token): int(counts[token]) for token in used})
    seen = reading.reservoir.seen
    return {"texts": len(texts), "texts_seen": seen, "tokens": int(counts.sum()), "distinct": len(used)}


def _counts(reading: Reading, fitting: int, conversations: Sequence[Conversation]) -> dict[str, Any]:
    tally = reading.tally
    return {
        "rows": tally.read,
        "kept": len(conversations),
        "not_chosen": fitting - len(conversations),
        "splits": _splits(conversations),
        **_images(conversations),
        "dropped": tally.dropped(),
        "contaminated": dict(reading.contaminated),
        "sources": {name: _source_counts(tally, name, conversations) for name in tally.sources},
    }


def _source_counts(tally: Tally, name: str, conversations: Sequence[Conversation]) -> dict[str, Any]:
    mine = [conversation for conversation in conversations if conversation.source == name]
    dropped = {reason: found.summary() for reason, found in tally.of(name).dropped.items()}
    return {"rows": tally.of(name).read, "kept": len(mine), "splits": _splits(mine), "dropped": dropped}


def _splits(conversations: Sequence[Conversation]) -> dict[str, int]:
    found = Counter(conversation.split for conversation in conversations)
    return {"train": found["train"], "validation": found["validation"]}


def _images(conversations: Sequence[Conversation]) -> dict[str, int]:
    """How many images there are; nothing where there are none."""
    found = sum(len(media_of(conversation.messages)) for conversation in conversations)
    return {"images": found} if found else {}


def _facts(reading: Reading, folder: Path) -> dict[str, Any]:
    shapes = {name: dict(tally.shapes) for name, tally in reading.tally.sources.items()}
    return {
        "sources": {source.name: {**source.facts(), "shapes": shapes[source.name]} for source in reading.sources},
        "target": target_source.fingerprint(folder),
        "tokenizer": _tokenizer_hash(folder),
    }


def _tokenizer_hash(folder: Path) -> str:
    """One hash over all files that decide how text becomes ids."""
    present = (name for name in _TOKENIZER_FILES if (folder / name).exists())
    return files.sha256_json({name: files.sha256_file(folder / name) for name in present})


def _summary(counts: dict[str, Any]) -> str:
    splits, pooled = counts["splits"], counts["pool"]
    left = f"; {counts['not_chosen']:,} more are usable (data.max_conversations)" if counts["not_chosen"] else ""
    alone = "" if splits["validation"] else "; none is held out"
    kept = f"kept {counts['kept']:,} conversations: {splits['train']:,} to train, {splits['validation']:,} to validate"
    return f"  {kept}{alone}{left}; pool of {pooled['tokens']:,} tokens"
