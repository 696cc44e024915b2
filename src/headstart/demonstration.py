"""`headstart demo`: the whole pipeline on a real small model, ending in one table."""

from __future__ import annotations

import json
import sys
import tomllib
from importlib import resources
from pathlib import Path
from typing import Any

from headstart import artifact, config, files, pipeline, rundir
from headstart.errors import UserError
from headstart.events import Events, duration

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
        UserError: an unknown size, or whatever a stage refuses.
    """
    settings = settings_for(size, directory, overrides)
    root = Path(settings.directory)
    events = rundir.begin(settings, root, quiet=quiet)
    pipeline.execute_all(settings, root, events)
    report = _report(root, events)
    result = summary(root)
    files.write_json(root / "scores.json", result)
    if as_json:
        print(json.dumps(result, indent=2))  # noqa: T201 (data goes to stdout)
    else:
        _show(root, result, report)


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
    scores = files.read_json(root / "scores" / "scores.json")
    manifests = {stage.verb: artifact.open_artifact(root / stage.folder, stage.folder).manifest for stage in pipeline.STAGES}
    return {
        "target": scores["target"]["model"],
        "tokens": {
            "answers": manifests["capture"].counts["supervised"],
            "captured": manifests["capture"].counts["tokens"],
        },
        "seconds": {verb: manifest.seconds for verb, manifest in manifests.items()},
        "rows": scores["rows"],
        "draft_tokens": scores["draft_tokens"],
        "offline": scores["offline"],
        "held_out_tau": manifests["train"].counts["best_tau"],
        "export": {name: str(root / "export" / name) for name in _formats(root)},
        "serve": serve_command(root, scores["target"]["model"], scores["draft_tokens"]),
    }


def serve_command(root: Path, target: str, draft_tokens: int) -> str:
    """The shell command that serves the target with the exported draft in vLLM."""
    speculative = {"method": "eagle3", "model": str(root / "export" / "vllm"), "num_speculative_tokens": draft_tokens}
    return f"vllm serve {target} --speculative-config '{json.dumps(speculative)}'"


def _formats(root: Path) -> list[str]:
    return sorted(path.name for path in (root / "export").iterdir() if path.is_dir())


def _report(root: Path, events: Events) -> Path:
    from headstart.report import report

    events.say("report: writing report.html")
    return report.write(root)


def _show(root: Path, result: dict[str, Any], report: Path) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("draft", "prompts", "tokens", "tau", "95 % interval", "lossless", "modelled", "measured", box=None, pad_edge=False)
    for row in _overall(result["rows"]):
        low, high = row["interval"] or (float("nan"),) * 2
        lossless = "/".join(map(str, row["lossless"])) if row["lossless"] else "-"
        table.add_row(
            f"{row['draft']} draft" if row["draft"] != "none" else "no draft", str(row["prompts"]), f"{row['tokens']:,}",
            f"{row['tau']:.3f}", f"{low:.3f} to {high:.3f}", lossless, _times(row["modelled_speedup"]), _times(row["measured_speedup"]),
        )  # fmt: skip
    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False, soft_wrap=True)
    tokens, seconds = result["tokens"], result["seconds"]
    console.print(f"\ntrained on {tokens['answers']:,} answer tokens of {result['target']} ({tokens['captured']:,} captured)")
    console.print("  ".join(f"{verb} {duration(spent)}" for verb, spent in seconds.items()) + "\n")
    console.print(table)
    console.print("\ntau: tokens per verify step of the target, its own token included; greedy decoding of held-out prompts")
    console.print(f"files: {report}, {root / 'scores.json'}, {', '.join(result['export'].values())}")
    console.print(f"serve: {result['serve']}")


def _overall(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows over all prompt sets; with a single set, its own."""
    names = {row["set"] for row in rows}
    return [row for row in rows if row["set"] == ("all" if "all" in names else row["set"])]


def _times(value: float | None) -> str:
    return f"{value:.2f}x" if value else "-"
