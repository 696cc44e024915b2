"""The tables of a report: plain strings, escaped by the page's template."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

from headstart import config
from headstart.events import duration, size, times
from headstart.pipeline import STAGES
from headstart.report.counts import told
from headstart.report.numbers import ALL, Numbers

Row = tuple[str, ...]
SHOWN = 5  # rows, samples or details named beside a count


class Table(NamedTuple):
    """name: its anchor; missing: the sentence to show when there are no rows; right: columns aligned to the right."""

    name: str
    title: str
    head: Row
    rows: list[Row]
    missing: str
    right: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()


def stages(numbers: Numbers) -> Table:
    rows = [_stage_row(numbers, stage.folder) for stage in STAGES]
    total = sum(status.manifest.seconds for status in numbers.statuses if status.manifest)
    head = ("stage", "artifact", "state", "took", "made (UTC)", "counts")
    notes = (f"Together {duration(total)}, the last attempt of each stage counted.",) if total else ()
    return Table("stages", "Stages", head, rows, "", (3,), notes)


def scores(numbers: Numbers) -> Table:
    found = numbers.scores
    head = ("prompts", "T", "draft", "tau", "95 % interval", "lossless", "tokens", "steps", "modelled", "measured")
    rows = [_score_row(row) for row in found["rows"]] if found else []
    notes = []
    if found:
        notes = [
            f"K = {found['draft_tokens']} drafted tokens, up to {found['max_new_tokens']} tokens an answer; "
            f"{found['prompts']}."
        ]
        notes += [f"{name}: {chosen['prompts']} of {chosen['of']} prompts." for name, chosen in found["sets"].items()]
        notes += list(_mismatches(found["rows"]))
    return Table("scores", "Scores", head, rows, _lacks(numbers, "scores"), (1, 3, 4, 5, 6, 7, 8, 9), tuple(notes))


def costs(numbers: Numbers) -> Table:
    """What a step costs, and what the model of the speed makes of it."""
    head, rows = numbers.headline, []
    for name, row in head.drafts.items() if head else ():
        parts = (_ms(row["costs"].get(f"{part}_step_seconds")) for part in ("plain", "verify", "draft"))
        ratios = (_plain(row["costs"].get(key)) for key in ("verify_ratio", "draft_ratio"))
        rows.append((name, *parts, *ratios, times(row["modelled_speedup"]), times(row["measured_speedup"])))
    columns = (
        "draft",
        "plain step",
        "verify step",
        "draft step",
        "verify / plain",
        "draft / plain",
        "modelled",
        "measured",
    )
    notes = (
        "modelled = tau / (verify / plain + K * draft / plain); measured: seconds per token without the "
        "draft / with it.",
    )
    return Table(
        "costs", "Costs of a step", columns, rows, _lacks(numbers, "scores"), tuple(range(1, 8)), notes if rows else ()
    )


def rates(numbers: Numbers) -> Table:
    rows = [
        (rate.label, f"{rate.tokens:,}", duration(rate.seconds), f"{rate.per_second:,.1f}") for rate in numbers.rates
    ]
    return Table(
        "rates",
        "Tokens per second",
        ("work", "tokens", "took", "tokens/s"),
        rows,
        "No stage told its speed yet.",
        (1, 2, 3),
    )


def drops(numbers: Numbers) -> Table:
    """Every row, conversation and sample that did not come through, by reason."""
    rows = [*_prepare_drops(numbers), *_regenerate_drops(numbers), *_capture_drops(numbers)]
    done = [folder for folder in ("prompts", "conversations", "states") if folder in numbers.artifacts]
    missing = f"Nothing was dropped ({', '.join(done)})." if done else "Nothing was read yet."
    return Table("drops", "Dropped data", ("stage", "reason", "count", "where"), rows, missing, (2,))


def identity(numbers: Numbers) -> Table:
    found = numbers.facts("states").get("identity")
    engine = numbers.facts("states").get("engine", {})
    rows = []
    if found:
        rows = [
            ("probe samples", f"{found['probes']:,}"),
            ("tokens compared", f"{found['tokens']:,}"),
            ("largest difference of a probability", f"{found['max_dp']:.2e}"),
            ("same most likely token", f"{100 * found['argmax_agreement']:.2f} %"),
            ("aux layers (boundary indices)", ", ".join(map(str, numbers.facts("states").get("aux_layers", [])))),
            *((f"engine: {key.replace('_', ' ')}", str(value)) for key, value in engine.items()),
        ]
    notes = ("Logits rebuilt from the captured last states against the target's own.",) if rows else ()
    return Table(
        "identity", "Identity check of the capture", ("what", "value"), rows, _lacks(numbers, "states"), (), notes
    )


def exports(numbers: Numbers) -> Table:
    head = (
        "format",
        "size",
        "tensors equal",
        "logits compared",
        "largest difference",
        "loads in vLLM",
        "does not load",
    )
    rows = [
        _export_row(name, facts, numbers.counts("export"))
        for name, facts in numbers.facts("export").items()
        if isinstance(facts, dict) and "read_back" in facts
    ]
    against = {f"vLLM: {said}" for _, facts in numbers.facts("export").items() for said in _objections(facts)}
    return Table(
        "exports", "Export checks", head, rows, _lacks(numbers, "export"), (1, 2, 3, 4), tuple(sorted(against))
    )


def settings(numbers: Numbers) -> Table:
    values = numbers.run.model_dump(mode="json")
    rows = []
    for name, _, default, meaning in config.settings():
        value: Any = values
        for key in name.split("."):
            value = value[key]
        shown = "absent" if value is None else json.dumps(value, ensure_ascii=False)
        rows.append((name, shown, default, meaning))
    return Table("settings", "Settings", ("setting", "value", "default", "meaning"), rows, "")


def versions(numbers: Numbers) -> Table:
    """One line per package and version; the stages are named where they differ."""
    made = {status.verb: status.manifest.versions for status in numbers.statuses if status.manifest}
    found: dict[tuple[str, str], list[str]] = {}
    for verb, packages in made.items():
        for package, version in packages.items():
            found.setdefault((package, version), []).append(verb)
    rows = [
        (package, version, "all" if len(verbs) == len(made) else ", ".join(verbs))
        for (package, version), verbs in found.items()
    ]
    return Table("versions", "Versions", ("package", "version", "stages"), sorted(rows), "No stage was finished yet.")


def _stage_row(numbers: Numbers, folder: str) -> Row:
    status = numbers.status(folder)
    state = "damaged" if folder in numbers.damaged else status.state
    why = numbers.damaged.get(folder, status.why)
    if status.manifest is None:
        return status.verb, folder, state, "", "", why
    counts = "; ".join(told(folder, status.manifest.counts))
    made = status.manifest.created.replace("T", " ")[:16]
    return status.verb, folder, state, duration(status.manifest.seconds), made, f"{counts}. {why}" if why else counts


def _score_row(row: dict[str, Any]) -> Row:
    interval = f"{row['interval'][0]:.3f} to {row['interval'][1]:.3f}" if row["interval"] else "one prompt"
    lossless = f"{row['lossless'][0]}/{row['lossless'][1]}" if row["lossless"] else "-"
    who = (f"{row['set']} ({row['prompts']})", f"{row['temperature']:g}", row["draft"])
    found = (f"{row['tau']:.3f}", interval, lossless, f"{row['tokens']:,}", f"{row['steps']:,}")
    return *who, *found, times(row["modelled_speedup"]), times(row["measured_speedup"])


def _mismatches(rows: list[dict[str, Any]]) -> Iterator[str]:
    for row in rows:
        for item in row["mismatches"] if row["set"] != ALL else ():
            reason = "a tie within rounding" if item["tie"] else "not explained by rounding"
            yield (
                f"Not identical: {item['set']} {item['prompt']} with the {row['draft']} draft, at answer "
                f"token {item['position']}: "
                f"{item['found']} instead of {item['expected']}, {reason} (top-2 gap {item['gap']:.2g}, "
                f"rounding {item['noise']:.2g})."
            )


def _prepare_drops(numbers: Numbers) -> Iterator[Row]:
    counts = numbers.counts("prompts")
    for source, found in counts.get("sources", {}).items():
        for reason, one in found["dropped"].items():
            details = ", ".join(f"{detail} ({count:,})" for detail, count in one["details"].items())
            rows = f"rows {', '.join(map(str, one['rows']))}" if one["rows"] else ""
            yield "prepare", reason, f"{one['count']:,}", "; ".join(part for part in (source, rows, details) if part)
    if counts.get("not_chosen"):
        yield "prepare", "usable, but not chosen (data.max_conversations)", f"{counts['not_chosen']:,}", ""


def _regenerate_drops(numbers: Numbers) -> Iterator[Row]:
    counts = numbers.counts("conversations")
    for reason, count in counts.get("dropped", {}).items():
        yield "regenerate", reason, f"{count:,}", "whole conversations"
    for reason, count in counts.get("shortened", {}).items():
        yield "regenerate", reason, f"{count:,}", "conversations that lost later turns"


def _capture_drops(numbers: Numbers) -> Iterator[Row]:
    dropped: dict[str, str] = numbers.counts("states").get("dropped", {})
    for reason, count in Counter(dropped.values()).most_common():
        samples = [sample for sample, found in dropped.items() if found == reason]
        yield "capture", reason, f"{count:,}", f"samples {', '.join(samples[:SHOWN])}"


def _export_row(name: str, facts: dict[str, Any], counts: dict[str, Any]) -> Row:
    back = facts["read_back"]
    good = [version for version, against in facts.get("vllm", {}).items() if not against]
    bad = [version for version, against in facts.get("vllm", {}).items() if against]
    written = counts.get(f"{name}_bytes")
    compared = (f"{back['tensors']:,}", f"{back['logits_compared']:,}", f"{back['max_difference']:g}")
    return name, size(written) if written else "", *compared, ", ".join(good) or "none", ", ".join(bad) or "none"


def _objections(facts: Any) -> Iterator[str]:
    if isinstance(facts, dict):
        for against in facts.get("vllm", {}).values():
            yield from against


def _lacks(numbers: Numbers, folder: str) -> str:
    status = numbers.status(folder)
    return f"Missing: {folder} {numbers.damaged.get(folder) or status.why} (headstart {status.verb})."


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1000 * seconds:.2f} ms"


def _plain(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
