"""`headstart remote`: a run on another machine, from shipping to fetched results. The same command continues at any point."""

from __future__ import annotations

import platform
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headstart import config, files
from headstart.config import Run
from headstart.errors import HeadstartError, UserError
from headstart.events import Events
from headstart.remote import inputs, wheel
from headstart.remote.fetch import Fetched, fetch
from headstart.remote.ssh import host
from headstart.remote.there import There

FOLDER = "headstart"  # in the home there
SETTINGS = "run.toml"
VERBS = (("doctor", SETTINGS), ("run", SETTINGS))
_NAME = re.compile(r"\w[\w.+-]*")
_GLOB = re.compile(r"[*?\[\]]")


@dataclass(frozen=True)
class Options:
    """Where and how, as given on the command line. python: of an environment there; None makes one."""

    host: str
    file: Path
    settings: tuple[str, ...] = ()
    ssh_config: Path | None = None
    folder: str = FOLDER
    name: str | None = None
    python: str | None = None
    ship_model: bool = False


@dataclass(frozen=True)
class Outcome:
    """status: what the agent says of the run; fetched: what was brought here."""

    status: dict[str, Any]
    fetched: Fetched | None = None

    def as_json(self, name: str) -> dict[str, Any]:
        """Plain data for machines."""
        found = {
            key: self.status.get(key) for key in ("state", "phase", "step", "exit", "stages", "stage", "last", "free")
        }
        told = {"host": name, "folder": self.status["root"], **found, "fetched": None}
        if self.fetched is not None:
            got = self.fetched
            told["fetched"] = {"folder": str(got.folder), "artifacts": list(got.artifacts), "files": got.files}
            told["fetched"]["bytes"] = got.received
        return told


class Ended(HeadstartError):
    """The run there did not end well. Its exit code is passed on."""

    def __init__(self, what: str, code: int, *, looked_for: str | None = None, do: str | None = None) -> None:
        super().__init__(what, looked_for=looked_for, do=do)
        self.exit_code = code


def launch(options: Options, events: Events, *, follow: bool = True, everything: bool = False) -> Outcome:
    """Ship, start unless it runs or has finished, and with `follow` wait for its end and fetch (see `bring`).

    Raises:
        UserError: what was given cannot be used, here or there; the host cannot be reached; the run there is another.
        Ended: doctor says stop, or the run failed, was stopped, or died.
    """
    run = config.load(options.file, options.settings)
    found = inputs.collect(run, ship_model=options.ship_model)
    with _there(options, run, events, create=True) as there:
        begun = not _settle_start(there, options, run, found)
        if not follow:
            return Outcome(there.status)
        status = _follow(there, options.host, begun)
        check_end(status, options.host)
        return Outcome(status, fetch(there, target_folder(options, run), events, everything=everything))


def look(options: Options, events: Events) -> Outcome:
    """The state of the run there. Raises UserError as `launch` does."""
    return _asked(options, events, lambda there, _: Outcome(there.status))


def stop(options: Options, events: Events) -> Outcome:
    """End the run there; it can be continued. Raises UserError as `launch` does."""
    return _asked(options, events, lambda there, _: Outcome(there.stop()))


def bring(options: Options, events: Events, *, everything: bool) -> Outcome:
    """Fetch what is finished there, whatever the run does; `everything`: also data and states.

    Raises UserError as `launch` does, GateError as `fetch`.
    """

    def work(there: There, run: Run) -> Outcome:
        return Outcome(there.status, fetch(there, target_folder(options, run), events, everything=everything))

    return _asked(options, events, work)


def target_folder(options: Options, run: Run) -> Path:
    """Where results are brought to: beside the run directory of this machine, which is left alone."""
    directory, host_name = Path(run.directory), re.sub(r"[^\w.@+-]", "_", options.host)
    return directory.with_name(f"{directory.name}@{host_name}")


def check_end(status: Mapping[str, Any], name: str) -> None:
    """Raises Ended unless the run has finished."""
    state, root = status["state"], status["root"]
    if state == "finished":
        return
    again = f"its log is {root}/log.txt there; the same command continues"
    if state == "died":
        room = f"{status['free'] / 1e9:.1f} GB are free there"
        raise Ended(f"the run on {name} was killed, or the machine restarted", 2, looked_for=room, do=again)
    if state == "stopped":
        raise Ended(f"the run on {name} was stopped", 2, do=again)
    if refused := status.get("refused"):
        raise Ended(f"{name}: {refused['what']}", 2, looked_for=refused["looked_for"], do=refused["do"] or again)
    if state == "refused":
        raise Ended(f"doctor says stop on {name}: see above", 3, do="change what it says, then the same command")
    raise Ended(f"the run on {name} failed with exit code {status['exit']}", status["exit"], do=again)


# --- steps ---


def _asked(options: Options, events: Events, work: Any) -> Outcome:
    run = config.load(options.file, options.settings)
    with _there(options, run, events, create=False) as there:
        return work(there, run)


@contextmanager
def _there(options: Options, run: Run, events: Events, *, create: bool) -> Iterator[There]:
    name = options.name or re.sub(r"[^\w.+-]", "_", Path(run.directory).name)
    if not _NAME.fullmatch(name):
        raise UserError(f"{name!r} is no name for a run", looked_for="letters, digits, . _ + -", do="--name NAME")
    if _GLOB.search(options.folder):
        raise UserError(f"--dir {options.folder!r} holds a wildcard", do="choose a folder without * ? [ ]")
    origin = {"machine": platform.node(), "file": str(options.file.absolute())}
    there = There(host(options.host, options.ssh_config, options.python), options.folder, name, origin, events)
    try:
        there.open(create=create)
        yield there
    finally:
        there.close()


def _settle_start(there: There, options: Options, run: Run, found: inputs.Inputs) -> bool:
    """Whether the run had to be started: with these inputs, it is neither running nor finished."""
    events, status = there.events, there.status
    key = _key(options, found)
    if status["state"] == "running":
        if status["inputs"] != key:
            raise UserError(
                f"a run of that name is going on there in {status['root']}, with other settings or files",
                do="--status shows it, --stop ends it; --name NAME begins another one",
            )
        events.say(f"it is running on {options.host} in {status['root']}")
        return False
    if found.model is not None and not there.call("exists", path=found.model):
        raise UserError(
            f"target.model = {found.model} is a folder of this machine, and {options.host} has none there",
            do="--ship-model sends it; or give a hub id, or the path that it has there",
        )
    with tempfile.TemporaryDirectory() as folder:
        job, wanted = _job(there, options, run, found, Path(folder))
        if status["state"] == "finished" and (status["inputs"], status["code"]) == (key, job["code"]):
            events.say(f"it has finished on {options.host} in {status['root']}")
            return False
        there.ship(wanted, prune=f"runs/{there.name}/inputs")
    there.start({**job, "inputs": key})
    events.say(f"started on {options.host} in {there.status['root']}; it goes on without this connection")
    return True


def _key(options: Options, found: inputs.Inputs) -> str:
    """What tells runs apart: settings, contents of their files, and the environment they run in."""
    held = {name: files.fingerprint(path) for name, path in found.files.items()}
    return files.sha256_json({"settings": found.text, "files": held, "python": options.python})


def _job(
    there: There, options: Options, run: Run, found: inputs.Inputs, folder: Path
) -> tuple[dict[str, Any], dict[str, Path]]:
    """What the run's supervisor is to do, and the files to ship for it, by their paths there."""
    built = wheel.build(folder)
    code = files.sha256_file(built)
    settings = folder / SETTINGS
    settings.write_text(found.text, encoding="utf-8")
    needs = wheel.requirements(built, _extras(run))
    place = f"wheels/{code[:16]}/{built.name}"
    own = {**found.files, SETTINGS: settings}
    wanted = {f"runs/{there.name}/{name}": path for name, path in own.items()} | {place: built}
    job = {
        "code": code,
        "wheel": place,
        "python": options.python,
        "environment": files.sha256_json(needs)[:16],
        "requirements": needs,
        "needs": {wheel.package(need): need for need in needs},
        "verbs": VERBS,
    }
    return job, wanted


def _extras(run: Run) -> tuple[str, ...]:
    """vLLM belongs into the environment when the run uses it and names no other Python for it."""
    serves = "vllm" in (run.target.engine, run.evaluate.engine) and run.target.python is None
    return (*wheel.EXTRAS, "vllm") if serves else wheel.EXTRAS


def _follow(there: There, name: str, begun: bool) -> dict[str, Any]:
    """begun: the run was going on or had finished before: its log is told from the last lines on."""
    status = there.status
    for line in status["tail"] if begun and status["state"] == "running" else ():
        there.events.say(line)
    try:
        return there.follow(status["end"] if begun else status["log"])
    except KeyboardInterrupt:
        there.events.say(f"the run goes on on {name}; --status shows it, --stop ends it")
        raise
