"""A run directory: the settings it was made with, and its event log."""

from __future__ import annotations

from pathlib import Path

from headstart import config, files
from headstart.config import Run
from headstart.errors import UserError
from headstart.events import Events

SETTINGS = "run.json"
EVENTS = "events.jsonl"


def begin(run: Run, root: Path, *, quiet: bool = False) -> Events:
    """Make `root` ready for `run`: the resolved settings are stored and printed. Returns where to tell.

    Raises:
        UserError: the directory cannot be made or holds what is no run.
    """
    try:
        root.mkdir(parents=True, exist_ok=True)
        resolved = run.model_dump(mode="json")
        files.write_json(root / SETTINGS, resolved)
    except OSError as error:
        raise UserError(f"cannot write into {root}: {error.strerror}", do="set `directory` to a writable place") from None
    events = Events(root / EVENTS, quiet=quiet)
    events.emit("run", settings=resolved)
    events.say(f"run directory: {root}  (settings: {root / SETTINGS})")
    return events


def recorded(root: Path) -> Run:
    """The settings a run directory was last used with. Raises UserError when it is no run directory."""
    path = root / SETTINGS
    if not path.exists():
        raise UserError(f"{root} is not a run directory", looked_for=str(path), do="headstart run RUN.TOML makes one")
    return config.build(files.read_json(path))
