"""The `headstart` command: one function per verb. Nothing heavy is imported before a verb needs it."""

from __future__ import annotations

import errno
import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headstart import __version__, processes
from headstart.errors import FULL, MAKE_ROOM, HeadstartError, UserError, first_line, install

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
Force = Annotated[bool, typer.Option("--force", help="make it anew also when it is fresh")]
Json = Annotated[bool, typer.Option("--json", help="for machines: JSON on stdout")]

# What an optional dependency comes with, by the name it is imported by.
_TRAIN = "gguf huggingface_hub jinja2 numpy pyarrow safetensors tensorboard tokenizers torch transformers"
EXTRAS = {**dict.fromkeys(_TRAIN.split(), "train"), "matplotlib": "report"}
# What to do about an error of the system that is no bug of ours.
_RIGHTS = "see to it that you may read and write it (ls -l), or name another"
MENDED = {
    errno.EACCES: _RIGHTS,
    errno.EPERM: _RIGHTS,
    errno.EIO: "see to its disk or mount (dmesg tells more); then the same command continues",
    errno.EISDIR: "a file is needed there: move the folder away, or name another",
    errno.ENOTDIR: "one of the folders in its path is a file: move that away, or name another",
    errno.ELOOP: "its links lead in a circle: mend them, or name another",
    errno.EROFS: "make its file system writable, or name another place",
}
STOP = 3  # `doctor` says that something cannot work
INTERRUPTED = 130  # what typer ends with on Ctrl-C, as shells do


def main() -> None:
    """Run the command; errors that a person caused become short lines and exit code 2."""
    with processes.ended_at_once():
        _main()


def _main() -> None:
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
        return UserError(f"{missing} is not installed", do=install(EXTRAS[missing]))
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        return UserError(f"no file can have a name as long as {str(error.filename)[:40]}...")
    code = _number(error)
    if code in FULL:
        name = getattr(error, "filename", None) or "where it was written"
        return UserError(f"no space is left on the disk of {name}, or it is as large as a file may be", do=MAKE_ROOM)
    if code in MENDED:
        name = getattr(error, "filename", None) or "a file"
        return UserError(
            f"{name} cannot be used: {getattr(error, 'strerror', None) or first_line(error)}", do=MENDED[code]
        )
    return None


def _number(error: Exception) -> int | None:
    """The system's number of an error about a file. What libraries in Rust or C++ raise carries it in its text only."""
    if isinstance(error, OSError) and (error.filename or error.errno in (*FULL, errno.EIO)):
        return error.errno
    told = re.search(r"(?:os error|errno) (\d+)", str(error))
    return int(told[1]) if told else None


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

    verbs = pipeline.up_to(until)
    run, root = _load(file, settings)
    events = pipeline.begin(run, root, verbs, quiet=quiet)
    pipeline.execute_all(run, root, events, until)
    if processes.rank():  # the first process of torchrun talks
        return
    found = pipeline.status(run, root)
    if not as_json and all(stage.state == "fresh" for stage in found):
        from headstart import demonstration

        demonstration.conclude(root, events)
    else:
        _show_status(found, as_json)


def _stage(verb: str, what: str) -> None:
    def command(
        file: RunFile, settings: Settings = None, force: Force = False, quiet: Quiet = False, as_json: Json = False
    ) -> None:
        _execute(verb, file, settings or [], force=force, quiet=quiet, as_json=as_json)

    command.__doc__ = f"{what}\n\nExample: headstart {verb} run.toml"
    app.command(name=verb)(command)


def _execute(verb: str, file: Path, settings: list[str], *, force: bool, quiet: bool, as_json: bool) -> None:
    from headstart import pipeline

    run, root = _load(file, settings)
    events = pipeline.begin(run, root, [verb], force=force, quiet=quiet)
    made = pipeline.execute_one(run, root, verb, events, force=force)
    if as_json and made:
        print(json.dumps({"folder": str(made.path), "counts": made.counts, "facts": made.facts}, default=str))


_stage("prepare", "Read the sources, clean and split the conversations.")
_stage("regenerate", "Let the target answer the prompts; its token ids are final from here on.")
_stage("vocab", "Choose the draft vocabulary, and say what it covers.")
_stage("capture", "Store the target's hidden states, after proof that they are the right ones.")
_stage("train", "Train the draft; the best checkpoint by acceptance length is kept.")


@app.command()
def evaluate(
    file: RunFile,
    engine: Annotated[str | None, typer.Option(help="vllm: also serve the draft there and compare")] = None,
    settings: Settings = None,
    force: Force = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Decode held-out prompts with the draft: acceptance, losslessness, speed.

    Example: headstart evaluate run.toml --engine vllm
    """
    chosen = [f"evaluate.engine={engine}"] if engine else []
    _execute("evaluate", file, [*(settings or []), *chosen], force=force, quiet=quiet, as_json=as_json)


_stage("export", "Write the draft for serving engines, and read it back.")


@app.command()
def status(file: Annotated[Path, typer.Argument(help="a run's TOML file or run directory", metavar="RUN")],
           settings: Settings = None, as_json: Json = False) -> None:  # fmt: skip
    """What is fresh, stale (and why), interrupted or missing.

    Example: headstart status runs/demo-small
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


Model = Annotated[str, typer.Argument(help="hub id, folder, config.json under any name, or shipped model name")]


@app.command()
def inspect(model: Model, as_json: Json = False) -> None:
    """What is inside a target, each fact with its evidence: no weights, no GPU, no remote code.

    Example: headstart inspect Qwen3-8B/config.json
    """
    from dataclasses import asdict

    from headstart.doctor import engine, show, subject

    found = engine.placed(engine.named(subject.open_subject(model).anatomy), engine.release_of(None)[0])
    if as_json:
        print(json.dumps(asdict(found), indent=2))
    else:
        show.put(show.anatomy(found))


@app.command()
def doctor(
    model: Annotated[
        str | None, typer.Argument(help="hub id, folder, config.json under any name, or a run's TOML file")
    ] = None,
    engine_version: Annotated[str | None, typer.Option(help="answer for this vLLM", metavar="X.Y.Z")] = None,
    device: Annotated[str, typer.Option(help="where the engine computes: auto, cpu or cuda")] = "auto",
    census: Annotated[bool, typer.Option("--census", help="every architecture of that vLLM, with its way")] = False,
    settings: Settings = None,
    as_json: Json = False,
) -> None:
    """Will each stage work for this target, here: go, warn or stop (exit 3), each check with what to do.

    Example: headstart doctor Qwen3-8B/config.json --engine-version 0.16.0
    """
    from headstart.doctor import doctor as examining
    from headstart.doctor import engine, show, subject

    place = examining.pick_device(device)
    if census:
        counted = engine.census_of(engine_version, subject.python_of(model), place)
        print(json.dumps(show.census_json(counted), indent=2)) if as_json else show.put(show.census(counted))
        return
    if model is None:
        raise UserError("no model was given", do="headstart doctor MODEL, or headstart doctor --census")
    found = examining.examine(subject.open_subject(model, settings or ()), engine_version, place)
    print(json.dumps(found.as_json(), indent=2)) if as_json else show.put(show.diagnosis(found))
    if found.verdict == "stop":
        raise typer.Exit(STOP)


@app.command()
def estimate(
    file: RunFile,
    hardware: Annotated[
        str | None,
        typer.Option(help="of another machine, e.g. 8xH200 or gpus=8,memory=141GB,prefill=40k", metavar="FIGURES"),
    ] = None,
    answer_tokens: Annotated[
        float | None, typer.Option(help="of one answer on average, where you know", min=1, max=1e7)
    ] = None,
    settings: Settings = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Disk, memory and time of each stage before anything starts; what to change where it does not fit (exit 3).

    Measures this machine for about a minute, unless --hardware says what another has.

    Example: headstart estimate run.toml --hardware 8xH200
    """
    from headstart.doctor.show import put
    from headstart.estimate import examine, show
    from headstart.events import Events

    found = examine.examine(str(file), settings or [], hardware, Events(quiet=quiet), answer_tokens)
    print(json.dumps(found.as_json(), indent=2)) if as_json else put(show.estimate(found))
    if not found.fits:
        raise typer.Exit(STOP)


@app.command()
def report(
    file: Annotated[Path, typer.Argument(help="a run's TOML file or run directory", metavar="RUN")],
    quiet: Quiet = False,
) -> None:
    """One self-contained report.html of a run, with plots and what the numbers mean.

    Example: headstart report runs/demo-small
    """
    from headstart.events import Events
    from headstart.report import report as reporting

    path = reporting.write(_existing(_locate(file, None)[1]))
    Events(quiet=quiet).say(f"report: {path}")


@app.command()
def remote(
    host: Annotated[str, typer.Argument(help="as ssh takes it: alias, host, user@host", metavar="HOST")],
    file: RunFile,
    *,
    status: Annotated[bool, typer.Option("--status", help="show the run there, start nothing")] = False,
    stop: Annotated[bool, typer.Option("--stop", help="end the run there; it can be continued")] = False,
    fetch: Annotated[bool, typer.Option("--fetch", help="bring what is finished, start nothing")] = False,
    everything: Annotated[bool, typer.Option("--all", help="bring data and hidden states, too")] = False,
    follow: Annotated[bool, typer.Option("--follow/--no-follow", help="wait for its end, then fetch")] = True,
    folder: Annotated[str, typer.Option("--dir", help="folder of all runs there")] = "headstart",
    name: Annotated[str | None, typer.Option(help="of the run there, else of its run directory")] = None,
    python: Annotated[str | None, typer.Option(help="use this environment there", metavar="PATH")] = None,
    ship_model: Annotated[bool, typer.Option("--ship-model", help="send target.model, a folder here")] = False,
    ssh_config: Annotated[Path | None, typer.Option("-F", "--ssh-config", help="for ssh's -F")] = None,
    settings: Settings = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """The same run on another machine over ssh: ship, doctor, run detached, follow, fetch. Again: it continues.

    Example: headstart remote gpu8 run.toml
    """
    from headstart.events import Events
    from headstart.remote import command, show

    if status + stop + fetch > 1:
        raise UserError("--status, --stop and --fetch exclude each other")
    options = command.Options(host, file, tuple(settings or ()), ssh_config, folder, name, python, ship_model)
    events = Events(quiet=quiet)
    if status or stop:
        outcome = (command.stop if stop else command.look)(options, events)
    elif fetch:
        outcome = command.bring(options, events, everything=everything)
    else:
        outcome = command.launch(options, events, follow=follow, everything=everything)
    print(json.dumps(outcome.as_json(host), indent=2) if as_json else "\n".join(show.lines(outcome, host)))


@app.command(name="patch-speculators")
def patch_speculators(
    python: Annotated[str | None, typer.Option(help="interpreter of the environment to patch", metavar="PATH")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="print the unified diff, write nothing")] = False,
    revert: Annotated[bool, typer.Option("--revert", help="restore the original bytes")] = False,
    force: Annotated[bool, typer.Option("--force", help="also where the contents are not known")] = False,
) -> None:
    """Let speculators 0.3 and 0.4 capture hidden states inside multimodal wrappers: changes its custom_worker.py.

    Example: headstart patch-speculators --python ~/venv/bin/python --dry-run
    """
    from headstart.patches import environment, speculators

    installed = environment.locate(python)
    change = (speculators.reverting if revert else speculators.patching)(installed, force=force)
    if dry_run:
        print(change.diff, end="")
        print(f"nothing was written: {installed.file}", file=sys.stderr)
    else:
        change.apply()
        print("\n".join(speculators.told(installed, change)))


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


def _load(file: Path, settings: list[str] | None) -> tuple[Run, Path]:
    from headstart.config import load

    run = load(file, settings or ())
    return run, Path(run.directory)


def _locate(path: Path, settings: list[str] | None) -> tuple[Run, Path]:
    from headstart import rundir

    return (rundir.recorded(path, settings or ()), path) if path.is_dir() else _load(path, settings)


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


def _print(table: Any) -> None:
    from rich.console import Console

    width = None if sys.stdout.isatty() else 160
    Console(width=width, soft_wrap=False).print(table)
