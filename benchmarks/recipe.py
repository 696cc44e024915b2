#!/usr/bin/env python3
"""Our training recipe against that of speculators 0.9.0: the same states, the same wall time, one decoder that judges both.

    python benchmarks/recipe.py RUN_DIRECTORY [--minutes M] [--recipes default small-batch] [--prompts N] [--json FILE]

RUN_DIRECTORY is a run that has captured and trained, such as one of `headstart demo --size medium`. Ours is the draft it trained;
its `train` stage took so many seconds, validations and checkpoints among them. speculators gets as many for optimiser steps alone,
on the same training samples, with the same draft vocabulary, by its own model, collation, batch sampler, optimisers and defaults:

    default      as `speculators train` comes: Muon, batches of 8192 tokens
    small-batch  the same with batches as long as the run's: on little data 8192 tokens make few steps
    adamw        AdamW in the place of Muon, else default

Its schedule (linear, 1 % warm-up) falls to nothing over the steps that fit, which are counted anew after each one. SDPA stands
for FlexAttention, which has no backward pass on a CPU, the eager loss for the fused one: SDPA attends over the whole padded
pack, which at 8192 tokens is half of a step's work, and a fifth to a quarter at 1024. So `small-batch` is the comparison to
look at. It computes in bfloat16, its default, where that is faster here, else in float32, with PyTorch's own matrix products,
or with ours under --same-products. Rows that it would teach from the state after an answer's last token are left out, since
that state is not stored; no decoding asks for it.

Both drafts are run by our code (the norm before fc, which speculators has by default, is added to it), which must give
speculators' own logits before anything is timed. Both are the best of their training by acceptance on held-out states;
speculators alone would keep its last. Validations and checkpoints are in our time and not in theirs. The held-out loss is ours
for both: KL from the target's whole distribution, each TTT step's mean, averaged. Run it with the threads that the run had:
where our steps are slower or faster now than they were, speculators' time is stretched alike.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from recipe_parts import Material, Trained, measure, our_products, point, say
from recipe_speculators import CHANGES, Theirs, check_same, described, train_theirs

from headstart import events, files, pipeline, rundir
from headstart.data.templates import Template
from headstart.drafts.checkpoint import load_draft
from headstart.drafts.eagle3 import Eagle3
from headstart.engines.transformers import TransformersEngine
from headstart.errors import HeadstartError, UserError
from headstart.evaluation import scores
from headstart.evaluation.bench import Answer, Bench
from headstart.evaluation.decode import Limits
from headstart.evaluation.prompts import EvalPrompt, load_sets
from headstart.products import use_fast_products
from headstart.training.loop import Trainer

OURS = "headstart"
NEVER = 10**9


def our_training(material: Material) -> Trained:
    """From the run's manifest, curves and events; of a step that was made twice, the last."""
    manifest = material.draft.manifest
    state = next(item for item in pipeline.status(material.run, material.root) if item.verb == "train")
    if state.state != "fresh":
        raise UserError(f"the draft in {material.root} is {state.state}: {state.why}", do="headstart train again")
    told = (event for event in events.read(material.root / rundir.EVENTS) if event["event"] == "train-step")
    last = {event["step"]: event for event in told}
    steps = [last[step] for step in range(1, manifest.counts["steps"] + 1) if step in last]
    if len(steps) < manifest.counts["steps"]:
        raise UserError(f"{material.root / rundir.EVENTS} does not tell every training step", do="train again")
    seconds = [0.0, *itertools.accumulate(event["seconds"] for event in steps)]
    lines = material.draft.file("curves.jsonl").read_text(encoding="utf-8").splitlines()
    records: list[dict[str, Any]] = [json.loads(line) for line in lines]
    return Trained(
        name=OURS,
        steps=len(steps),
        tokens=sum(event["tokens"] for event in steps),
        step_seconds=seconds[-1],
        wall=max(manifest.seconds, seconds[-1]),  # a continued attempt's manifest counts from where it continued
        settings=material.run.train.model_dump(mode="json") | material.run.draft.model_dump(mode="json"),
        curve=[point(seconds[r["step"]], r["step"], r) for r in records if r["kind"] == "validation"],
        training_loss=[(seconds[r["step"]], float(np.mean(r["loss"]))) for r in records if r["kind"] == "train"],
    )


def pace(material: Material, steps: int = 6) -> float:
    """Tokens per second of our own steps on this machine at this moment; the first is a warm-up."""
    settings = material.run.train.model_copy(
        update={"max_steps": steps, "trackers": (), "validate_every": NEVER, "checkpoint_every": NEVER}
    )
    draft = load_draft(material.draft.path, material.head, untrained=True)
    with tempfile.TemporaryDirectory() as folder:
        told = events.Events(Path(folder) / rundir.EVENTS, quiet=True)
        ttt_steps = material.run.draft.ttt_steps
        Trainer(draft, material.head, material.store, settings, ttt_steps, Path(folder), told).run()
        rates = [
            e["tokens_per_second"] for e in events.read(Path(folder) / rundir.EVENTS) if e["event"] == "train-step"
        ]
    return statistics.median(rates[1:])


def decode(material: Material, drafts: dict[str, Eagle3], most: int | None) -> list[dict[str, Any]]:
    """Rows of scores, as the `evaluate` stage makes them: greedy, the run's prompt sets, K and answer length."""
    settings = material.run.evaluate
    template = Template.load(material.folder, trust_remote_code=material.run.target.trust_remote_code)
    sets = load_sets(settings.prompts, min(settings.max_prompts, most or NEVER), template)
    prompts: list[EvalPrompt] = [prompt for chosen in sets for prompt in chosen.prompts]
    engine = TransformersEngine(material.run.target)
    try:
        session = engine.session(tuple(material.store.facts["aux_layers"]))
        limits = Limits(settings.max_new_tokens, frozenset(template.end_ids))
        bench = Bench(session, drafts, limits, settings.draft_tokens, settings.seed)
        bench.warm_up(prompts[0], 0.0)
        answers: list[Answer] = []
        for number, prompt in enumerate(prompts, start=1):
            answers += bench.measure(prompt, 0.0)
            say(f"  decoded {number}/{len(prompts)} prompts")
    finally:
        engine.close()
    return scores.score_rows(answers, settings.draft_tokens, settings.seed)


HEADINGS = ("recipe", "steps", "tokens", "tokens/s", "wall", "held-out loss", "held-out tau", "tau", "95 %", "lossless")


def table(trained: Sequence[Trained], measured: dict[str, Any], rows: Sequence[dict[str, Any]]) -> str:
    lines: list[tuple[str, ...]] = [HEADINGS]
    for one in trained:
        row = whole(rows, one.name)
        interval = row["interval"]
        lines.append(
            (
                one.name,
                str(one.steps),
                f"{one.tokens:,}",
                f"{one.tokens / one.step_seconds:,.0f}",
                f"{one.wall:.1f} s",
                f"{np.mean(measured[one.name]['loss']):.3f}",
                f"{measured[one.name]['tau']:.3f}",
                f"{row['tau']:.3f}",
                f"{interval[0]:.3f} to {interval[1]:.3f}" if interval else "one prompt",
                "{}/{}".format(*row["lossless"]),
            )
        )
    widths = [max(len(line[i]) for line in lines) for i in range(len(HEADINGS))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def whole(rows: Sequence[dict[str, Any]], name: str) -> dict[str, Any]:
    """A draft's row over all prompt sets."""
    own = [row for row in rows if row["draft"] == name]
    return next((row for row in own if row["set"] == scores.ALL), own[-1])


def draw(path: Path, trained: Sequence[Trained]) -> None:
    """Held-out loss and tau against the seconds of optimiser steps."""
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    axes = figure.subplots(1, 2)
    for one in trained:
        seconds = [point["seconds"] for point in one.curve]
        axes[0].plot(seconds, [np.mean(point["loss"]) for point in one.curve], marker=".", label=one.name)
        axes[1].plot(seconds, [point["tau"] for point in one.curve], marker=".", label=one.name)
    axes[0].set_ylabel("held-out loss, nats")
    axes[1].set_ylabel("held-out tau, simulated")
    for side in axes:
        side.set_xlabel("seconds of optimiser steps")
    axes[0].legend()
    figure.savefig(path, dpi=120)


def compare(material: Material, options: argparse.Namespace) -> dict[str, Any]:
    ours = our_training(material)
    recorded = ours.tokens / ours.step_seconds
    with our_products():
        now = pace(material)
    seconds = options.minutes * 60 if options.minutes else ours.wall * recorded / now
    say(f"our steps: {recorded:,.0f} tokens/s in the run, {now:,.0f} now with {torch.get_num_threads()} thread(s)")
    trained, drafts = [ours], {OURS: load_draft(material.draft.path, material.head)}
    for recipe in options.recipes:
        name = f"speculators {recipe}"
        if options.same_products:
            use_fast_products(torch.device("cpu"))
        theirs = Theirs(material, CHANGES[recipe](material.run), options.dtype)
        say(f"{name}: {seconds:.0f} s; logits as ours within {check_same(theirs):.1e}; {json.dumps(described(theirs))}")
        found, drafts[name] = train_theirs(name, theirs, seconds)
        trained.append(found)
    with our_products():
        measured = {name: measure(draft, material) for name, draft in drafts.items()}
        rows = decode(material, drafts, options.prompts)
    print(table(trained, measured, rows))
    return {
        "run": {
            "target": material.run.target.model,
            "samples": len(material.training),
            "held_out": len(material.held_out),
        },
        "threads": torch.get_num_threads(),
        "our_tokens_per_second": {"run": recorded, "now": now},
        "trainings": [asdict(one) for one in trained],
        "held_out": measured,
        "rows": rows,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_directory", type=Path)
    parser.add_argument("--minutes", type=float, help="wall time given to speculators, instead of ours")
    parser.add_argument("--recipes", nargs="+", choices=list(CHANGES), default=["default", "small-batch"])
    parser.add_argument("--prompts", type=int, help="at most this many of each set, instead of the run's number")
    parser.add_argument(
        "--dtype", choices=["auto", "float32", "bfloat16"], default="auto", help="that speculators computes in"
    )
    parser.add_argument("--same-products", action="store_true", help="speculators with our matrix products too")
    parser.add_argument("--json", type=Path, help="curves and scores; a PNG beside it where matplotlib is installed")
    options = parser.parse_args()
    if options.minutes is not None and not options.minutes > 0:
        parser.error("--minutes must be above 0")
    try:
        result = compare(Material.open(options.run_directory), options)
    except HeadstartError as error:
        raise SystemExit(f"error: {error}") from None
    if options.json:
        files.write_json(options.json, result)
        if find_spec("matplotlib"):
            draw(options.json.with_suffix(".png"), [Trained(**one) for one in result["trainings"]])


if __name__ == "__main__":
    main()
