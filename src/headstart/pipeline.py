"""The stages of a run, in order: what each reads, which settings it depends on, and whether its artifact is fresh."""

from __future__ import annotations

import importlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from headstart import artifact, files, processes, rundir
from headstart.artifact import Artifact, Manifest
from headstart.config import Run
from headstart.errors import HeadstartError, StageFailed, UserError
from headstart.events import Events, duration
from headstart.files import canonical
from headstart.target.source import fingerprint


@dataclass(frozen=True)
class Stage:
    """One verb: makes the artifact `folder` (of kind `folder`) from `parents`, depending on the settings named."""

    verb: str
    folder: str
    parents: tuple[str, ...]
    settings: tuple[str, ...]


# A stage depends on a setting when another value could change the bytes it writes.
STAGES = (
    Stage("prepare", "prompts", (), ("target.model", "target.revision", "data")),
    Stage("regenerate", "conversations", ("prompts",), ("target", "data.answers", "data.max_length", "regenerate")),
    Stage("vocab", "vocab", ("prompts", "conversations"), ("target.model", "target.revision", "vocab")),
    Stage("capture", "states", ("conversations",), ("target", "capture")),
    Stage("train", "draft", ("states", "vocab"), ("draft", "train")),
    Stage("evaluate", "scores", ("draft", "states"), ("target", "evaluate")),
    Stage("export", "export", ("draft", "states"), ("target.model", "export", "evaluate.draft_tokens")),
)
BY_VERB = {stage.verb: stage for stage in STAGES}

# How a result is computed, not what it is: a change does not make an artifact stale. (Another batch can change a last bit.)
_SPEED_ONLY = {
    "data.max_drop",
    "regenerate.batch_size",
    "capture.batch_tokens",
    "capture.max_bad_fraction",
    "train.checkpoint_every",
    "train.keep_checkpoints",
    "train.micro_tokens",
    "train.recompute",
    "train.compile",
    "train.attention_backend",
    "train.parallel",
    "train.trackers",
}

_TABLES = ("data.role_aliases", "target.engine_options")  # settings whose value is a table

VERIFY_UP_TO = 16 << 30

State = Literal["fresh", "stale", "partial", "missing"]


@dataclass(frozen=True)
class Status:
    """What `headstart status` says of one stage."""

    verb: str
    folder: str
    state: State
    why: str
    manifest: Manifest | None


@dataclass(frozen=True)
class Context:
    """All that a stage gets: the run's settings, its own for the manifest, its opened parents, where to tell."""

    run: Run
    stage: Stage
    root: Path
    events: Events

    @property
    def path(self) -> Path:
        return self.root / self.stage.folder

    @property
    def settings(self) -> dict[str, Any]:
        return settings_of(self.run, self.stage)

    def parent(self, folder: str) -> Artifact:
        """Raises UserError when the parent is missing or incomplete."""
        return artifact.open_artifact(self.root / folder, folder)

    def parents(self) -> dict[str, Artifact]:
        return {folder: self.parent(folder) for folder in self.stage.parents}

    def verify_parents(self) -> None:
        """Compare what this stage reads with its checksums, up to VERIFY_UP_TO bytes each: hashing terabytes takes hours."""
        for name, parent in self.parents().items():
            if sum(entry["bytes"] for entry in parent.manifest.files.values()) > VERIFY_UP_TO:
                continue
            try:
                artifact.verify(parent)
            except UserError as error:
                verb = next(stage.verb for stage in STAGES if stage.folder == name)
                do = f"headstart {verb} RUN.TOML --force makes it again"
                raise UserError(error.what, looked_for=error.looked_for, do=do) from None

    def create(self) -> Any:
        """The context manager that makes this stage's artifact (see `artifact.create`)."""
        return artifact.create(self.path, self.stage.folder, self.settings, self.parents())


def settings_of(run: Run, stage: Stage) -> dict[str, Any]:
    """The values a stage depends on, by dotted name, as JSON has them."""
    values = _flatten(run.model_dump(mode="json"))
    chosen = {name: value for name, value in values.items() if _belongs(name, stage.settings)}
    kept = {name: value for name, value in chosen.items() if name not in _SPEED_ONLY}
    return kept | _inputs(run, stage)


def _inputs(run: Run, stage: Stage) -> dict[str, Any]:
    """What files outside the run directory hold, so that a stage is stale when one of those it reads changes."""
    names = {"prepare": (*run.data.sources, *run.data.decontaminate), "evaluate": run.evaluate.prompts}
    paths = {path for name in names.get(stage.verb, ()) for path in files.matching(name)}
    found: dict[str, Any] = {f"content of {path}": files.fingerprint(path) for path in sorted(paths)}
    if stage.verb == "prepare" and (folder := files.home(run.target.model)).is_dir():
        found[f"content of {run.target.model}"] = fingerprint(folder)
    return found


def status(run: Run, root: Path) -> list[Status]:
    """The state of every stage from manifests alone, in order; a stale parent makes its children stale."""
    found: dict[str, Status] = {}
    for stage in STAGES:
        found[stage.folder] = _status_of(run, root, stage, found)
    return list(found.values())


def begin(run: Run, root: Path, verbs: Sequence[str], *, force: bool = False, quiet: bool = False) -> Events:
    """Make the run directory ready for these verbs. What they would refuse is refused before: it is left as it was.

    Raises:
        UserError: as `check`, or the directory cannot be made or holds what is no run.
    """
    check(run, root, verbs, force=force)
    return Events(quiet=True) if processes.rank() else rundir.begin(run, root, quiet=quiet)


def check(run: Run, root: Path, verbs: Sequence[str], *, force: bool = False) -> None:
    """Whether those of the verbs that have something to do (all, with `force`) can begin; writes nothing.

    Raises:
        UserError: what one is made from is missing or stale and will not be made before it, another process is making it or
            it holds what is not ours, and what `preflight` refuses.
    """
    states = status(run, root)
    wanted = [BY_VERB[state.verb] for state in states if state.verb in verbs and (force or state.state != "fresh")]
    folders = {stage.folder for stage in wanted}
    for stage in wanted:
        _check_processes(stage, _module(stage.verb))
        _require_fresh(states, root, stage, folders)
        if not processes.rank():  # for the others, the first one may have begun
            artifact.check_place(root / stage.folder)
    if wanted:
        importlib.import_module("headstart.preflight").check(run, root, [stage.verb for stage in wanted])


def _module(verb: str) -> Any:
    return importlib.import_module(f"headstart.stages.{verb}")


def _check_processes(stage: Stage, module: Any) -> None:
    if processes.count() > 1 and not hasattr(module, "follow"):
        raise UserError(
            f"{stage.verb} runs in one process, and this is one of {processes.count()} (WORLD_SIZE)",
            do=f"headstart {stage.verb} RUN.TOML without torchrun; train alone takes several",
        )


def execute(run: Run, root: Path, verb: str, events: Events) -> Artifact | None:
    """Run one stage, whatever its state; what it is made from must be fresh. Returns the new artifact; None in a process of
    torchrun that only helps.

    Raises:
        UserError: a stage before it is missing or stale, or what the stage itself refuses.
        RuntimeError: the stage ended without making its artifact; an older one with other settings does not count.
    """
    stage, module = BY_VERB[verb], _module(verb)
    _require_fresh(status(run, root), root, stage)
    context = Context(run, stage, root, events)
    events.emit("stage-start", stage=verb)
    if processes.rank():  # the first process of torchrun makes the artifact
        module.follow(context)
        return None
    context.verify_parents()
    module.run(context)
    left = artifact.read_manifest(context.path)
    if left is None or canonical(left.settings) != canonical(context.settings):
        raise RuntimeError(f"the stage {verb} ended without making {context.path}")
    made = artifact.open_artifact(context.path, stage.folder)
    events.emit("stage-end", stage=verb, seconds=made.manifest.seconds, counts=made.counts)
    events.say(f"{verb}: done in {duration(made.manifest.seconds)}")
    return made


def execute_one(run: Run, root: Path, verb: str, events: Events, *, force: bool = False) -> Artifact | None:
    """Run one stage when it is not fresh, or `force`; returns its artifact. Raises as `execute` does."""
    state = next(item for item in status(run, root) if item.verb == verb)
    if state.state == "fresh" and not force:
        events.say(f"{verb}: fresh, skipped (--force makes it anew)")
        return None if processes.rank() else artifact.open_artifact(root / state.folder, state.folder)
    return execute(run, root, verb, events)


def execute_all(run: Run, root: Path, events: Events, until: str | None = None) -> None:
    """Run every stage that is not fresh, in order, up to and with `until`.

    Raises:
        StageFailed: a stage ended with a user error; names it, and no later stage is started.
        Exception: a stage has a bug; a note names the stage, and no later stage is started.
    """
    for verb in up_to(until):
        state = next(item for item in status(run, root) if item.verb == verb)
        if state.state == "fresh":
            events.say(f"{verb}: fresh, skipped")
            continue
        events.say(f"{verb}: starting ({state.why})")
        try:
            execute(run, root, verb, events)
        except HeadstartError as error:
            events.emit("stage-failed", stage=verb, error=str(error))
            failed = StageFailed(f"stage {verb} failed: {error.what}", looked_for=error.looked_for, do=error.do)
            failed.exit_code = error.exit_code
            raise failed from error
        except Exception as error:
            events.emit("stage-failed", stage=verb, error=repr(error))
            error.add_note(f"stage {verb} failed")
            raise


def _require_fresh(states: Sequence[Status], root: Path, stage: Stage, promised: Collection[str] = ()) -> None:
    """promised: artifacts that will be made before."""
    for state in states:
        if state.folder in stage.parents and state.folder not in promised and state.state != "fresh":
            raise UserError(
                f"{stage.verb} needs {state.folder}, which is {state.state}: {state.why}",
                looked_for=f"a finished {root / state.folder}, made with these settings",
                do=f"headstart run RUN.TOML --until {stage.verb}",
            )


def up_to(until: str | None) -> tuple[str, ...]:
    """The verbs up to and with that one; all of them when None. Raises UserError for a stage that does not exist."""
    verbs = tuple(BY_VERB)
    if until is None:
        return verbs
    if until not in BY_VERB:
        raise UserError(f"there is no stage {until!r}", looked_for=", ".join(BY_VERB))
    return verbs[: verbs.index(until) + 1]


def _status_of(run: Run, root: Path, stage: Stage, earlier: Mapping[str, Status]) -> Status:
    path, settings = root / stage.folder, settings_of(run, stage)
    manifest = artifact.read_manifest(path)
    if manifest is None:
        partial = artifact.is_partial(path)
        why = _why_partial(path, stage, settings, earlier) if partial else "not made yet"
        return Status(stage.verb, stage.folder, "partial" if partial else "missing", why, None)
    reasons = _why_stale(manifest, stage, settings, earlier, artifact.damage(path, manifest))
    return Status(stage.verb, stage.folder, "stale" if reasons else "fresh", "; ".join(reasons), manifest)


def _why_partial(path: Path, stage: Stage, settings: dict[str, Any], earlier: Mapping[str, Status]) -> str:
    """A killed attempt is continued only when it was made from the very same parents and settings."""
    if artifact.is_held(path):
        return "is being made at this moment"
    parents = {folder: made.id for folder in stage.parents if (made := earlier[folder].manifest) is not None}
    if any(earlier[folder].state != "fresh" for folder in stage.parents):
        return "was interrupted; what it is made from is not ready"
    if artifact.continues(path, artifact.work_key(stage.folder, settings, parents)):
        return "was interrupted; continues where it stopped"
    return "was interrupted with other settings or parents; starts anew"


def _why_stale(
    manifest: Manifest, stage: Stage, wanted: dict[str, Any], earlier: Mapping[str, Status], damage: list[str]
) -> list[str]:
    reasons = list(damage)
    for name in sorted(set(wanted) | set(manifest.settings)):
        old, new = manifest.settings.get(name), wanted.get(name)
        if canonical(old) != canonical(new):
            reasons.append(f"{name} changed" if name.startswith("content of") else f"{name} was {old!r}, is {new!r}")
    for folder in stage.parents:
        parent = earlier[folder]
        if parent.state != "fresh":
            reasons.append(f"{folder} is {parent.state}")
        elif parent.manifest is not None and parent.manifest.id != manifest.parents.get(folder):
            reasons.append(f"{folder} was made anew")
    return reasons


def _flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and name not in _TABLES:
            flat |= _flatten(value, f"{name}.")
        else:
            flat[name] = value
    return flat


def _belongs(name: str, chosen: tuple[str, ...]) -> bool:
    return any(name == item or name.startswith(f"{item}.") for item in chosen)
