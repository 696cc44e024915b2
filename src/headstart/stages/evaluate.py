"""evaluate: draft and states to scores: acceptance from held-out states, then real decoding of held-out prompts.

Each prompt is decoded by the target alone, with the trained draft, and with the draft as it was before training. The
scores hold measured times, so no other artifact is made from them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from headstart import files
from headstart.artifact import Artifact, Build
from headstart.config import Evaluate
from headstart.data.templates import Template
from headstart.drafts.checkpoint import load_draft, read_shape
from headstart.drafts.eagle3 import Eagle3
from headstart.engines.base import EngineInfo
from headstart.engines.load import open_engine
from headstart.errors import UserError
from headstart.evaluation import scores
from headstart.evaluation.bench import Answer, AnswerLog, Bench
from headstart.evaluation.decode import Limits
from headstart.evaluation.offline import offline_acceptance
from headstart.evaluation.prompts import STATEMENT, EvalPrompt, PromptSet, load_sets
from headstart.pipeline import Context
from headstart.target.head import TargetHead
from headstart.target.source import resolve

# In the scratch folder, for an attempt that continues this one; the artifact's own files hold the same at the end.
LOG = "answers.jsonl"
OFFLINE = "offline.json"


def run(context: Context) -> None:
    """Make `scores/`. Finished prompts of a killed attempt are not decoded again.

    Raises:
        UserError: prompts or settings that cannot be used, found before the target is loaded.
        GateError: nothing could be measured.
    """
    settings, target, parents = context.run.evaluate, context.run.target, context.parents()
    template = Template.load(resolve(target.model, target.revision), trust_remote_code=target.trust_remote_code)
    sets = load_sets(settings.prompts, settings.max_prompts, template)
    drafts = _load_drafts(parents, settings)
    _check_lengths(sets, drafts["trained"].shape.max_positions, settings)
    _tell_depth(context, parents["draft"])
    with context.create() as build:
        engine = open_engine(target)
        try:
            drafts = {name: draft.to(engine.info.device) for name, draft in drafts.items()}
            offline = _offline(context, build, drafts, parents["states"])
            session = engine.session(drafts["trained"].shape.aux_layers)
            limits = Limits(settings.max_new_tokens, frozenset(template.end_ids))
            bench = Bench(session, drafts, limits, settings.draft_tokens, settings.seed)
            answers = _decode(context, build, bench, [prompt for chosen in sets for prompt in chosen.prompts])
        finally:
            engine.close()
        rows = scores.score_rows(answers, settings.draft_tokens, settings.seed)
        scores.write_prompts(build.file("prompts.parquet"), answers)
        files.write_json(build.file("scores.json"), _result(settings, engine.info, sets, rows, offline))
        build.counts.update(
            prompts=sum(len(chosen.prompts) for chosen in sets), tokens=sum(len(answer.ids) for answer in answers)
        )
        build.facts.update(engine=asdict(engine.info), sources={chosen.name: chosen.facts for chosen in sets})
        _tell(context, rows, offline)


def _load_drafts(parents: dict[str, Artifact], settings: Evaluate) -> dict[str, Eagle3]:
    head = TargetHead.read(parents["states"].path)
    drafts = {"trained": load_draft(parents["draft"].path, head)}
    if settings.baseline:
        drafts["untrained"] = load_draft(parents["draft"].path, head, untrained=True)
    return drafts


def _check_lengths(sets: Sequence[PromptSet], max_positions: int, settings: Evaluate) -> None:
    longest = max((prompt for chosen in sets for prompt in chosen.prompts), key=lambda prompt: len(prompt.ids))
    need = len(longest.ids) + settings.max_new_tokens + settings.draft_tokens
    if need > max_positions:
        raise UserError(
            f"prompt {longest.id} has {len(longest.ids)} tokens; with answer and drafts {need} positions are needed",
            looked_for=f"at most {max_positions}, the target's limit",
            do="lower evaluate.max_new_tokens or evaluate.draft_tokens, or take shorter prompts",
        )


def _tell_depth(context: Context, draft: Artifact) -> None:
    """More drafts than training steps is a fair question to ask, but a surprise to whoever did not mean to."""
    depth, wanted = read_shape(draft.path)[1]["ttt_steps"], context.run.evaluate.draft_tokens
    if wanted > depth:
        context.events.say(f"  K = {wanted} is deeper than the draft was trained (draft.ttt_steps = {depth})")


def _offline(context: Context, build: Build, drafts: dict[str, Eagle3], states: Artifact) -> dict[str, Any]:
    kept = build.scratch / OFFLINE
    try:
        return files.read_json(kept)
    except (OSError, ValueError):  # not measured yet, or cut short
        pass
    context.events.say("  acceptance on held-out states, without decoding")
    wanted = context.run.evaluate.draft_tokens
    files.write_json(kept, {name: offline_acceptance(draft, states, wanted) for name, draft in drafts.items()})
    return files.read_json(kept)


def _decode(context: Context, build: Build, bench: Bench, prompts: Sequence[EvalPrompt]) -> list[Answer]:
    """All answers, by temperature, then prompt; what an earlier attempt finished is read from its log."""
    log = AnswerLog(build.scratch / LOG)
    tasks = [(prompt, temperature) for temperature in context.run.evaluate.temperatures for prompt in prompts]
    left = [(prompt, temperature) for prompt, temperature in tasks if (prompt.key, temperature) not in log.found]
    per_task = bench.limits.max_new_tokens * (len(bench.drafts) + 1)
    if left:
        bench.warm_up(*left[0])
    done = per_task * (len(tasks) - len(left))
    with context.events.progress("evaluate", per_task * len(tasks), "tokens", done) as progress:
        for prompt, temperature in left:
            answers = []
            for answer in bench.measure(prompt, temperature):
                answers.append(answer)
                progress.advance(len(answer.ids))
            log.append((prompt.key, temperature), answers)
            progress.advance(per_task - sum(len(answer.ids) for answer in answers))  # answers that ended early
    return [answer for prompt, temperature in tasks for answer in log.found[prompt.key, temperature]]


def _result(
    settings: Evaluate, info: EngineInfo, sets: Sequence[PromptSet], rows: list[dict[str, Any]], offline: dict[str, Any]
) -> dict[str, Any]:
    return {
        "target": asdict(info),
        "draft_tokens": settings.draft_tokens,
        "max_new_tokens": settings.max_new_tokens,
        "prompts": STATEMENT,
        "sets": {chosen.name: {"prompts": len(chosen.prompts), "of": chosen.total} for chosen in sets},
        "rows": rows,
        "offline": offline,
    }


def _tell(context: Context, rows: list[dict[str, Any]], offline: dict[str, Any]) -> None:
    context.events.say(f"  {STATEMENT}; K = {context.run.evaluate.draft_tokens}\n{scores.table(rows)}")
    for line in [*scores.mismatch_lines(rows), *scores.offline_lines(offline)]:
        context.events.say(f"  {line}")
