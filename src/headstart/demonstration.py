"""`headstart demo`: the whole pipeline on a real small model, ending in one table."""

from __future__ import annotations

import json
import sys
import tomllib
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from headstart import artifact, config, files, pipeline
from headstart.errors import UserError, install
from headstart.events import Events, duration, times
from headstart.report import report

SCORES = "scores.json"  # in the run directory, and the artifact's own in `scores`
NEEDED = ("torch", "transformers", "pyarrow", "matplotlib", "jinja2")
COLUMNS = ("draft", "T", "prompts", "tokens", "tau", "95 % interval", "lossless", "modelled", "measured")

# What grows with the size. small is made for about 15 minutes on 2 CPU cores.
SIZES: dict[str, tuple[str, ...]] = {
    "small": (),
    "medium": ("data.max_conversations=2500", "evaluate.max_prompts=40", "evaluate.max_new_tokens=128"),
    "large": (
        "data.max_conversations=7000",
        "regenerate.max_new_tokens=256",
        "data.max_length=1024",
        "evaluate.max_prompts=80",
        "evaluate.max_new_tokens=128",
    ),
}


def run(size: str, directory: Path | None, overrides: list[str], *, quiet: bool = False, as_json: bool = False) -> None:
    """Run the demo of a size in `directory` (default `runs/demo-SIZE`), continuing what is there; print the table.

    Raises:
        UserError: an unknown size, a missing library, or whatever a stage refuses.
    """
    settings = settings_for(size, directory, overrides)
    _check_installed()
    root = Path(settings.directory)
    events = pipeline.begin(settings, root, pipeline.up_to(None), quiet=quiet)
    pipeline.execute_all(settings, root, events)
    conclude(root, events, as_json=as_json)


def conclude(root: Path, events: Events, *, as_json: bool = False) -> None:
    """Write the report and `scores.json` of a finished run, and show its table."""
    events.say(f"report: writing {report.REPORT}")
    page = report.write(root)
    result = summary(root)
    files.write_json(root / SCORES, result)
    if as_json:
        print(json.dumps(result, indent=2))  # noqa: T201 (data goes to stdout)
    else:
        show(root, result, page)


def _check_installed() -> None:
    """The report is written last; that it cannot be drawn is said first."""
    for name in NEEDED:
        if find_spec(name) is None:
            raise UserError(f"{name} is not installed", do=install("train,report"))


def settings_for(size: str, directory: Path | None, overrides: list[str]) -> config.Run:
    """The demo's settings: the shipped recipe, then the size, then the user's own."""
    if size not in SIZES:
        raise UserError(f"there is no demo size {size!r}", looked_for=", ".join(SIZES))
    recipe = resources.files("headstart").joinpath("recipes/demo.toml").read_text(encoding="utf-8")
    raw = tomllib.loads(recipe)
    raw["directory"] = str(directory or Path("runs") / f"demo-{size}")
    return config.build(raw, [*SIZES[size], *overrides])


def summary(root: Path) -> dict[str, Any]:
    """The demo's numbers in one place: tokens, seconds and rates of each stage, scores, files."""
    opened = {stage.verb: artifact.open_artifact(root / stage.folder, stage.folder) for stage in pipeline.STAGES}
    artifact.verify(opened["evaluate"], (SCORES,))
    scores = files.read_json(opened["evaluate"].file(SCORES))
    manifests = {verb: made.manifest for verb, made in opened.items()}
    return {
        "target": scores["target"]["model"],
        "tokens": {
            "answers": manifests["train"].counts.get("answer_tokens"),  # not there in drafts of before
            "captured": manifests["capture"].counts["tokens"],
        },
        "seconds": {verb: manifest.seconds for verb, manifest in manifests.items()},
        "rows": scores["rows"],
        "draft_tokens": scores["draft_tokens"],
        "offline": scores["offline"],
        "held_out_tau": manifests["train"].counts["best_tau"],
        "export": {name: str(root / "export" / name) for name in _formats(root)},
        "serve": manifests["export"].facts["serve"],
    }


def _formats(root: Path) -> list[str]:
    return sorted(path.name for path in (root / "export").iterdir() if path.is_dir())


def show(root: Path, result: dict[str, Any], page: Path) -> None:
    """Print the table, what the columns mean, and what was written, to stdout."""
    table = Table(*COLUMNS, box=None, pad_edge=False)
    for row in _overall(result["rows"]):
        table.add_row(*_cells(row))
    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False, soft_wrap=True, markup=False)
    tokens, seconds = result["tokens"], result["seconds"]
    trained = f"{tokens['answers']:,} answer tokens of " if tokens["answers"] else ""
    console.print(f"\ntrained on {trained}{result['target']} ({tokens['captured']:,} tokens captured)")
    console.print("  ".join(f"{verb} {duration(spent)}" for verb, spent in seconds.items()) + "\n")
    console.print(table)
    console.print("\ntau: tokens per verify step of the target, its own token included; T 0: greedy decoding")
    console.print(f"files: {page}, {root / SCORES}, {', '.join(result['export'].values())}")
    console.print(f"serve: {result['serve']}")


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    """One line of the table; columns as in `COLUMNS`."""
    return (
        "no draft" if row["draft"] == "none" else f"{row['draft']} draft",
        f"{row['temperature']:g}",
        str(row["prompts"]),
        f"{row['tokens']:,}",
        f"{row['tau']:.3f}",
        "{:.3f} to {:.3f}".format(*row["interval"]) if row["interval"] else "-",
        "/".join(map(str, row["lossless"])) if row["lossless"] else "-",
        times(row["modelled_speedup"]),
        times(row["measured_speedup"]),
    )


def _overall(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows over all prompt sets; with a single set, its own."""
    names = {row["set"] for row in rows}
    return [row for row in rows if row["set"] == ("all" if "all" in names else row["set"])]
