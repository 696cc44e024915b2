"""The `headstart` command: one function per verb. Nothing heavy is imported before a verb needs it."""

from __future__ import annotations

import errno
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headstart import __version__
from headstart.errors import HeadstartError, UserError

if TYPE_CHECKING:
    from headstart.config import Run
    from headstart.pipeline import Status

app = typer.Typer(
    name="headstart",
    help="Train speculative-decoding draft models (EAGLE-3) for the model you serve, and prove that they work.",
    epilog="First: headstart demo. Your own model: write a run.toml (headstart config), then headstart run run.toml",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

RunFile = Annotated[Path, typer.Argument(help="the run's TOML file", metavar="RUN.TOML")]
Settings = Annotated[
    list[str] | None, typer.Option("-s", "--set", help="any setting, e.g. -s train.epochs=2", metavar="KEY=VALUE")
]
Quiet = Annotated[bool, typer.Option("-q", "--quiet", help="no progress")]
Json = Annotated[bool, typer.Option("--json", help="for machines: JSON on stdout")]

# What an optional dependency comes with, by the name it is imported by.
_TRAIN = "gguf huggingface_hub jinja2 numpy pyarrow safetensors tokenizers torch transformers"
EXTRAS = {**dict.fromkeys(_TRAIN.split(), "train"), "matplotlib": "report"}
INTERRUPTED = 130  # what typer ends with on Ctrl-C, as shells do


def main() -> None:
    """Run the command; errors that a person caused become short lines and exit code 2."""
    try:
        app()
    except SystemExit as end:
        if end.code == INTERRUPTED:
            print("interrupted; the same command continues where this one stopped", file=sys.stderr)
        raise
    except Exception as error:
        told = _told(error)
        if told is None:  # our bug: with its traceback
            raise
        print(f"error: {told}", file=sys.stderr)
        raise SystemExit(told.exit_code) from None


def _told(error: Exception) -> HeadstartError | None:
    """The error as a person should see it; None when it is nothing they can do something about."""
    if isinstance(error, HeadstartError):
        return error
    if isinstance(error, ModuleNotFoundError) and (missing := (error.name or "").partition(".")[0]) in EXTRAS:
        return UserError(f"{missing} is not installed", do=f"pip install 'headstart[{EXTRAS[missing]}]'")
    if _disk_is_full(error):
        name = getattr(error, "filename", None) or "where it was written"
        return UserError(f"no space is left on the disk of {name}", do="make room; the same command continues")
    return None


def _disk_is_full(error: Exception) -> bool:
    """Libraries that write on their own (safetensors, pyarrow) only carry the system's number in their text."""
    codes = (errno.ENOSPC, errno.EDQUOT)
    if isinstance(error, OSError) and error.errno in codes:
        return True
    return any(f"os error {code}" in str(error) or f"errno {code}" in str(error) for code in codes)


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="print the version")] = False) -> None:
    if version:
        print(f"headstart {__version__}")
        raise typer.Exit


@app.command(name="run")
def run_all(file: RunFile, until: Annotated[str | None, typer.Option(help="stop after this stage")] = None,
            settings: Settings = None, quiet: Quiet = False, as_json: Json = False) -> None:  # fmt: skip
    """All stages in order: fresh ones are skipped, broken ones continue.

    Example: headstart run run.toml --until capture
    """
    from headstart import pipeline

    pipeline.check_verb(until)
    run, root, events = _open(file, settings, quiet)
    pipeline.execute_all(run, root, events, until)
    found = pipeline.status(run, root)
    if not as_json and all(stage.state == "fresh" for stage in found):
        from headstart import demonstration

        demonstration.conclude(root, events)
    else:
        _show_status(found, as_json)


def _stage(verb: str, what: str) -> None:
    def command(
        file: RunFile,
        settings: Settings = None,
        force: Annotated[bool, typer.Option("--force", help="make it anew also when it is fresh")] = False,
        quiet: Quiet = False,
        as_json: Json = False,
    ) -> None:
        from headstart import pipeline

        run, root, events = _open(file, settings, quiet)
        made = pipeline.execute_one(run, root, verb, events, force=force)
        if as_json and made:
            print(json.dumps({"folder": str(made.path), "counts": made.counts, "facts": made.facts}, default=str))

    command.__doc__ = f"{what}\n\nExample: headstart {verb} run.toml"
    app.command(name=verb)(command)


_stage("prepare", "Read the sources, clean and split the conversations.")
_stage("regenerate", "Let the target answer the prompts; its token ids are final from here on.")
_stage("vocab", "Choose the draft vocabulary, and say what it covers.")
_stage("capture", "Store the target's hidden states, after proof that they are the right ones.")
_stage("train", "Train the draft; the best checkpoint by acceptance length is kept.")
_stage("evaluate", "Decode held-out prompts with the draft: acceptance, losslessness, speed.")
_stage("export", "Write the draft for serving engines, and read it back.")


@app.command()
def status(file: Annotated[Path, typer.Argument(help="a run's TOML file or run directory", metavar="RUN")],
           settings: Settings = None, as_json: Json = False) -> None:  # fmt: skip
    """What is fresh, stale (and why), interrupted or missing.

    Example: headstart status runs/demo
    """
    from headstart import pipeline

    run, root = _locate(file, settings)
    _show_status(pipeline.status(run, root), as_json)


@app.command()
def config(file: Annotated[Path | None, typer.Argument(help="show this run's values", metavar="[RUN.TOML]")] = None,
           settings: Settings = None, as_json: Json = False) -> None:  # fmt: skip
    """Every setting with type, default and meaning; with a file, the values it resolves to.

    Example: headstart config run.toml -s train.epochs=2
    """
    from headstart import config as configuration

    if file is not None:
        print(json.dumps(configuration.load(file, settings or ()).model_dump(mode="json"), indent=2))
    elif as_json:
        print(json.dumps([setting._asdict() for setting in configuration.settings()], indent=2))
    else:
        _show_settings(list(configuration.settings()))


@app.command()
def inspect(
    model: Annotated[str, typer.Argument(help="folder, config.json or shipped model name")], as_json: Json = False
) -> None:
    """What is inside a target, read from its config.json alone: no weights, no GPU, no remote code.

    Example: headstart inspect Qwen3-8B/config.json
    """
    from dataclasses import asdict

    from headstart.target import anatomy, source

    path = Path(model)
    found = anatomy.inspect(path if path.exists() else source.resolve(model, None, weights=False))
    if as_json:
        print(json.dumps(asdict(found), indent=2, default=str))
    else:
        _show_facts({name: value for name, value in asdict(found).items() if name != "evidence"}, found.evidence)


@app.command()
def report(
    file: Annotated[Path, typer.Argument(help="a run's TOML file or run directory", metavar="RUN")],
    quiet: Quiet = False,
) -> None:
    """One self-contained report.html of a run, with plots and what the numbers mean.

    Example: headstart report runs/demo
    """
    from headstart.events import Events
    from headstart.report import report as reporting

    path = reporting.write(_existing(_locate(file, None)[1]))
    Events(quiet=quiet).say(f"report: {path}")


@app.command()
def demo(
    size: Annotated[str, typer.Option(help="small, medium or large")] = "small",
    directory: Annotated[Path | None, typer.Option("--dir", help="run directory")] = None,
    settings: Settings = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """The whole pipeline on a real small model (SmolLM2-135M-Instruct) and real prompts, on this machine.

    Example: headstart demo --size small
    """
    from headstart import demonstration

    demonstration.run(size, directory, settings or [], quiet=quiet, as_json=as_json)


def _open(file: Path, settings: list[str] | None, quiet: bool) -> tuple[Run, Path, Any]:
    from headstart import pipeline, rundir
    from headstart.config import load
    from headstart.events import Events

    run = load(file, settings or ())
    root = Path(run.directory)
    return run, root, Events(quiet=True) if pipeline.rank() else rundir.begin(run, root, quiet=quiet)


def _locate(path: Path, settings: list[str] | None) -> tuple[Run, Path]:
    from headstart import rundir
    from headstart.config import load

    if path.is_dir():
        return rundir.recorded(path, settings or ()), path
    run = load(path, settings or ())
    return run, Path(run.directory)


def _existing(root: Path) -> Path:
    from headstart import rundir

    rundir.recorded(root)
    return root


def _show_status(found: list[Status], as_json: bool) -> None:
    if as_json:
        print(json.dumps([_status_row(one) for one in found], indent=2))
        return
    from rich.markup import escape
    from rich.table import Table

    table = Table("stage", "artifact", "state", "made", "took", "why", box=None, pad_edge=False)
    for column in table.columns[:-1]:
        column.no_wrap, column.min_width = True, 5
    colors = {"fresh": "green", "stale": "yellow", "partial": "yellow", "missing": "red"}
    for one in found:
        made, took = (
            (one.manifest.created[5:16].replace("T", " "), f"{one.manifest.seconds:.0f} s")
            if one.manifest
            else ("", "")
        )
        table.add_row(one.verb, one.folder, f"[{colors[one.state]}]{one.state}[/]", made, took, escape(one.why))
    _print(table)


def _status_row(one: Status) -> dict[str, Any]:
    made = {"made": one.manifest.created, "seconds": one.manifest.seconds} if one.manifest else {}
    return {"stage": one.verb, "folder": one.folder, "state": one.state, "why": one.why, **made}


def _show_settings(found: list[Any]) -> None:
    from rich.markup import escape
    from rich.table import Table

    table = Table("setting", "type", "default", "meaning", box=None, pad_edge=False)
    table.columns[0].no_wrap, table.columns[0].min_width = True, max(len(setting.name) for setting in found)
    for setting in found:
        table.add_row(*(escape(part) for part in setting))
    _print(table)


def _show_facts(facts: dict[str, Any], evidence: dict[str, str]) -> None:
    from rich.markup import escape
    from rich.table import Table

    table = Table("fact", "value", "evidence", box=None, pad_edge=False)
    for name, value in facts.items():
        table.add_row(name, "unknown" if value is None else escape(str(value)), escape(evidence.get(name, "")))
    _print(table)


def _print(table: Any) -> None:
    from rich.console import Console

    width = None if sys.stdout.isatty() else 160
    Console(width=width, soft_wrap=False).print(table)
