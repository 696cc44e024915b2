"""evaluate: draft and states to scores: acceptance from held-out states, then real decoding of held-out prompts.

Each prompt is decoded by the target alone, with the trained draft, and with the draft as it was before training. The
scores hold measured times, so no other artifact is made from them. A target that only vLLM loads is answered by it, and
the drafts are replayed over the states of its answers. With evaluate.engine = "vllm" the trained draft is then served.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any, cast

from headstart import files
from headstart.artifact import Artifact, Build
from headstart.config import Evaluate, Run
from headstart.data.templates import Template
from headstart.drafts.checkpoint import load_draft, read_shape
from headstart.drafts.eagle3 import Eagle3
from headstart.engines.base import Decoding, Engine, EngineInfo, Use
from headstart.engines.load import open_engine
from headstart.evaluation import replay, scores, serving_words
from headstart.evaluation.bench import Answer, AnswerLog, Bench
from headstart.evaluation.check import ServingCheck, reference_of
from headstart.evaluation.decode import Limits
from headstart.evaluation.offline import offline_acceptance
from headstart.evaluation.prompts import STATEMENT, EvalPrompt, PromptSet, check_lengths, load_sets
from headstart.evaluation.replay import Replay
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
    prompts = [prompt for chosen in sets for prompt in chosen.prompts]
    limits = Limits(settings.max_new_tokens, frozenset(template.end_ids))
    drafts = _load_drafts(parents, settings)
    check_lengths(sets, drafts["trained"].shape.max_positions, settings)
    _tell_depth(context, parents["draft"])
    with context.create() as build:
        engine = open_engine(target, _use(context.run, prompts, drafts["trained"]))
        try:
            info = engine.info
            offline, answers = _measure(context, build, engine, drafts, limits, prompts)
        finally:
            engine.close()
        rows = scores.score_rows(answers, settings.draft_tokens, settings.seed)
        result = _result(settings, info, sets, rows, offline)
        if settings.engine == "vllm":
            check = ServingCheck(context.run, prompts, template.end_ids, drafts, build.scratch, context.events)
            result["serving"] = check.measure(reference_of(answers, result["method"]))
        scores.write_prompts(build.file("prompts.parquet"), answers)
        files.write_json(build.file("scores.json"), result)
        build.counts.update(prompts=len(prompts), tokens=sum(len(answer.ids) for answer in answers))
        build.facts.update(engine=asdict(info), sources={chosen.name: chosen.facts for chosen in sets})
        _tell(context, result)


def _use(run: Run, prompts: Sequence[EvalPrompt], draft: Eagle3) -> Use:
    return Use(
        longest=max(len(prompt.ids) for prompt in prompts) + run.evaluate.max_new_tokens,
        batch_size=replay.TOGETHER,
        batch_tokens=run.capture.batch_tokens,
        boundaries=draft.shape.aux_layers,
    )


def _measure(
    context: Context,
    build: Build,
    engine: Engine,
    drafts: dict[str, Eagle3],
    limits: Limits,
    prompts: Sequence[EvalPrompt],
) -> tuple[dict[str, Any], list[Answer]]:
    """What is found while the target is loaded: acceptance on held-out states, and the answers to the prompts."""
    settings, states = context.run.evaluate, context.parent("states")
    if context.run.target.engine == "vllm":
        drafts = replay.on_spare_device(drafts)
        walks = Replay(engine, drafts, limits, settings.draft_tokens, context.run.capture.batch_tokens)
        return _offline(context, build, drafts, states), _replay(context, build, walks, prompts)
    drafts = {name: draft.to(engine.info.device) for name, draft in drafts.items()}
    offline = _offline(context, build, drafts, states)
    session = cast(Decoding, engine).session(drafts["trained"].shape.aux_layers)
    return offline, _decode(
        context, build, Bench(session, drafts, limits, settings.draft_tokens, settings.seed), prompts
    )


def _load_drafts(parents: dict[str, Artifact], settings: Evaluate) -> dict[str, Eagle3]:
    head = TargetHead.read(parents["states"].path)
    drafts = {"trained": load_draft(parents["draft"].path, head)}
    if settings.baseline:
        drafts["untrained"] = load_draft(parents["draft"].path, head, untrained=True)
    return drafts


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


def _replay(context: Context, build: Build, walks: Replay, prompts: Sequence[EvalPrompt]) -> list[Answer]:
    """All answers, by prompt, in blocks; what an earlier attempt finished is read from its log."""
    log = AnswerLog(build.scratch / LOG)
    left = [prompt for prompt in prompts if (prompt.key, 0.0) not in log.found]
    done = len(prompts) - len(left)
    with context.events.progress("evaluate", len(prompts), "prompts", done) as progress:
        for block in _blocks(left):
            for prompt, answers in zip(block, walks.measure(block), strict=True):
                log.append((prompt.key, 0.0), answers)
                progress.advance(1)
    return [answer for prompt in prompts for answer in log.found[prompt.key, 0.0]]


def _blocks(prompts: Iterable[EvalPrompt]) -> Iterator[list[EvalPrompt]]:
    rest = iter(prompts)
    while block := list(itertools.islice(rest, replay.TOGETHER)):
        yield block


def _result(
    settings: Evaluate, info: EngineInfo, sets: Sequence[PromptSet], rows: list[dict[str, Any]], offline: dict[str, Any]
) -> dict[str, Any]:
    return {
        "target": asdict(info),
        "method": "walk" if info.name == "vllm" else "decoder",
        "draft_tokens": settings.draft_tokens,
        "max_new_tokens": settings.max_new_tokens,
        "prompts": STATEMENT,
        "sets": {chosen.name: {"prompts": len(chosen.prompts), "of": chosen.total} for chosen in sets},
        "rows": rows,
        "offline": offline,
    }


def _tell(context: Context, result: dict[str, Any]) -> None:
    rows = result["rows"]
    context.events.say(f"  {STATEMENT}; K = {result['draft_tokens']}\n{scores.table(rows)}")
    served_lines = serving_words.lines(result["serving"]) if "serving" in result else []
    for line in [*scores.mismatch_lines(rows), *scores.offline_lines(result["offline"]), *served_lines]:
        context.events.say(f"  {line}")
