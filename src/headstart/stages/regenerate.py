"""`regenerate`: the target answers the prompts; what it sampled becomes the samples, never decoded and encoded again.

Conversations of several turns are answered in rounds. Round r renders the messages so far with the target's own earlier
answers, as a chat client would send them back, and asks for the next. With `data.answers = "keep"` the answers in the
data are used as they stand, and no model is loaded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from headstart.artifact import Build
from headstart.data import media, rows
from headstart.data.answers import AnswerLog
from headstart.data.asking import Asker
from headstart.data.content import media_of
from headstart.data.dialogue import TOO_LONG, Dialogue, asks, sample, sample_of, take
from headstart.data.templates import Template, TemplateRefused
from headstart.data.turns import Turn, cut, merge_turns
from headstart.engines.base import Engine, Use
from headstart.engines.load import open_engine
from headstart.errors import UserError
from headstart.pipeline import Context
from headstart.target import source
from headstart.types import Conversation, Prompt, Sample

LOG = "answers.jsonl"
MANY_TRUNCATED = 0.1  # share of the answers from which on a person is told
REFUSED = "chat template refused"
EMPTY = "nothing to train on"
NOT_TAKEN = "the engine refused the prompt"


@dataclass
class Tally:
    """What is counted on the way, for the manifest."""

    finish: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)  # conversations without a sample, by reason
    shortened: Counter[str] = field(default_factory=Counter)  # conversations that lost later turns, by reason
    cut: int = 0
    inexact: int = 0


def run(context: Context) -> None:
    """Make the artifact `conversations`.

    Raises:
        UserError: nothing is left to train on, or the target cannot be opened.
        GateError: the engine answered something else than what it was asked.
    """
    conversations = rows.read_conversations(context.parent("prompts").file("conversations.parquet"))
    images = media.check(media_of(conversation.messages) for conversation in conversations)
    tally = Tally()
    with context.create() as build:
        if context.run.data.answers == "keep":
            _refuse_images(images)
            samples = _keep(context, build, conversations, tally)
        else:
            use = Use(context.run.data.max_length, context.run.regenerate.batch_size, media=images)
            samples = _regenerate(context, build, conversations, tally, use)
        samples.sort(key=lambda sample: sample.id)
        build.counts |= _counts(conversations, samples, tally)
        if not samples:
            raise _nothing_left(len(conversations), tally)
        rows.write_samples(build.file("samples.parquet"), samples)
    _tell(context, build.counts)


# --- answers given in the data ---


def _refuse_images(images: Mapping[str, int]) -> None:
    if images:
        raise UserError(
            "data.answers = 'keep' cannot be used with images: only an engine knows how many tokens an image is",
            do="set data.answers = 'regenerate' and target.engine = 'vllm'",
        )


def _keep(context: Context, build: Build, conversations: Sequence[Conversation], tally: Tally) -> list[Sample]:
    target = context.run.target
    folder = source.resolve(target.model, target.revision, weights=False, progress=context.events.say)
    template = _open_template(context, build, folder)
    samples: list[Sample] = []
    for conversation in conversations:
        samples.extend(_kept(conversation, template, context.run.data.max_length, tally))
    return samples


def _kept(conversation: Conversation, template: Template, max_length: int, tally: Tally) -> list[Sample]:
    try:
        turns = template.turns(conversation.messages)
    except TemplateRefused:
        tally.dropped[REFUSED] += 1
        return []
    whole = [sample(conversation, item, "given") for item in merge_turns(turns)]
    kept = [short for sample in whole if (short := cut(sample, max_length)) is not None]
    tally.finish["given"] += len(turns)
    tally.inexact += sum(not turn.exact for turn in turns)
    tally.cut += sum(len(sample.input_ids) > max_length for sample in whole)
    if not kept:
        tally.dropped[TOO_LONG if whole else EMPTY] += 1
    elif len(kept) < len(whole):
        tally.shortened[TOO_LONG] += 1
    return kept


# --- answers of the target ---


def _regenerate(
    context: Context, build: Build, conversations: Sequence[Conversation], tally: Tally, use: Use
) -> list[Sample]:
    engine = open_engine(context.run.target, use)
    try:
        template = _open_template(context, build, engine.folder)
        build.facts["engine"] = asdict(engine.info)
        log = AnswerLog(build.scratch / LOG, build.facts["target"])
        dialogues = [Dialogue(conversation, asks(conversation.messages)) for conversation in conversations]
        _answer_all(context, engine, template, log, dialogues)
    finally:
        engine.close()
    return [sample for dialogue in dialogues for sample in _collected(dialogue, tally)]


def _answer_all(
    context: Context, engine: Engine, template: Template, log: AnswerLog, dialogues: Sequence[Dialogue]
) -> None:
    """Answer round after round. Progress counts tokens of budget: an answer that ends early frees its rest."""
    longest = context.run.regenerate.max_new_tokens
    total = longest * sum(len(dialogue.asks) for dialogue in dialogues)
    with context.events.progress("regenerate", total, "tok", done=longest * len(log)) as bar:
        asker = Asker(engine, context.run, template.end_ids, log, bar)
        for number in range(max((len(dialogue.asks) for dialogue in dialogues), default=0)):
            live = [dialogue for dialogue in dialogues if dialogue.ended is None and number < len(dialogue.asks)]
            asked = [(prompt, item) for item in live if (prompt := _prompt(item, template, asker, number))]
            by_id = {prompt.id: dialogue for prompt, dialogue in asked}
            for completion in asker.answers([prompt for prompt, _ in asked]):
                take(by_id[completion.id], completion, template, context.run)
            for prompt in asker.refused.keys() & by_id.keys():
                by_id[prompt].turns.pop()
                by_id[prompt].ended = NOT_TAKEN
            bar.advance(longest * _given_up(live, number))
    _tell_speed(context, asker)


def _prompt(dialogue: Dialogue, template: Template, asker: Asker, number: int) -> Prompt | None:
    """Render the next turn of a conversation; None, and the conversation ends, when it cannot be asked."""
    dialogue.messages += dialogue.asks[number]
    try:
        ids = template.prompt_ids(dialogue.messages)
    except TemplateRefused:
        dialogue.ended = REFUSED
        return None
    if not asker.room(ids):
        dialogue.ended = TOO_LONG
        return None
    images = media_of(dialogue.messages)
    dialogue.turns.append(Turn(ids, (), sent=ids if images else None))
    return Prompt(f"{dialogue.conversation.id}:{number:02d}", ids, images)


def _given_up(live: Sequence[Dialogue], number: int) -> int:
    """Turns that will not be asked since their conversation ended in this round."""
    ended = (dialogue for dialogue in live if dialogue.ended is not None)
    return sum(len(dialogue.asks) - max(number, len(dialogue.turns)) for dialogue in ended)


def _collected(dialogue: Dialogue, tally: Tally) -> list[Sample]:
    tally.finish.update(dialogue.finishes)
    merged = merge_turns(dialogue.turns)
    if not merged:
        tally.dropped[dialogue.ended or EMPTY] += 1
    elif dialogue.ended is not None:
        tally.shortened[dialogue.ended] += 1
    return [sample_of(dialogue, item) for item in merged]


# --- both ---


def _open_template(context: Context, build: Build, folder: Path) -> Template:
    template = Template.load(folder, trust_remote_code=context.run.target.trust_remote_code)
    tested = template.self_test()
    context.events.say(tested.text)
    build.facts |= {"target": source.fingerprint(folder), "template": asdict(tested), "end_ids": list(template.end_ids)}
    return template


def _counts(conversations: Sequence[Conversation], samples: Sequence[Sample], tally: Tally) -> dict[str, Any]:
    return {
        "conversations_read": len(conversations),
        "conversations": len({sample.conversation for sample in samples}),
        "samples": dict(sorted(Counter(sample.split for sample in samples).items())),
        "tokens": sum(len(sample.input_ids) for sample in samples),
        "supervised_tokens": sum(int(sample.supervised.sum()) for sample in samples),
        "answers": tally.finish.total(),
        "finish": dict(sorted(tally.finish.items())),
        "truncated": tally.finish["length"],
        "cut_at_max_length": tally.cut,
        "answers_not_as_rendered": tally.inexact,
        "dropped": dict(sorted(tally.dropped.items())),
        "shortened": dict(sorted(tally.shortened.items())),
    }


def _nothing_left(read: int, tally: Tally) -> UserError:
    reasons = ", ".join(f"{count} {reason}" for reason, count in tally.dropped.most_common()) or "there were none"
    return UserError(
        f"nothing is left to train on: kept 0 of {read} conversations ({reasons})",
        looked_for="conversations with at least one answer within data.max_length",
        do="raise data.max_length or regenerate.max_new_tokens, or give other sources",
    )


def _tell_speed(context: Context, asker: Asker) -> None:
    """Times go to the events alone: a manifest is the same whenever it was made."""
    counted = {"asked": asker.asked, "tokens": asker.tokens, "prompt_tokens": asker.prompt_tokens}
    context.events.emit("generated", **counted, seconds=round(asker.seconds, 3))
    if asker.refused:
        prompt, why = next(iter(asker.refused.items()))
        context.events.say(f"note: the engine refused {len(asker.refused)} prompts; the first, {prompt}: {why}")
    if asker.asked:
        rate = asker.tokens / max(asker.seconds, 1e-9)
        context.events.say(f"regenerate: {asker.asked} answers, {asker.tokens:,} tokens, {rate:,.1f} tokens/s")


def _tell(context: Context, counts: dict[str, Any]) -> None:
    say, answers = context.events.say, counts["answers"]
    kept = f"{counts['conversations']} of {counts['conversations_read']} conversations"
    say(f"kept {kept}, {counts['supervised_tokens']:,} answer tokens")
    for kind in ("dropped", "shortened"):
        if counts[kind]:
            say(f"{kind}: " + ", ".join(f"{count} {reason}" for reason, count in counts[kind].items()))
    if counts["truncated"] > MANY_TRUNCATED * answers:
        policy = context.run.regenerate.truncated
        say(f"note: {counts['truncated']} of {answers} answers were truncated (regenerate.truncated = {policy!r})")
