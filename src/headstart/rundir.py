"""A run directory: the settings it was made with, and its event log."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headstart import config, files
from headstart.config import Run
from headstart.errors import UserError, cannot_write
from headstart.events import Events

SETTINGS = "run.json"
EVENTS = "events.jsonl"


def begin(run: Run, root: Path, *, quiet: bool = False) -> Events:
    """Make `root` ready for `run`: the resolved settings are stored and printed. Returns where to tell.

    Raises:
        UserError: the directory cannot be made or holds what is no run.
    """
    resolved = run.model_dump(mode="json")
    _refuse_foreign(root)
    try:
        root.mkdir(parents=True, exist_ok=True)
        files.write_json(root / SETTINGS, resolved)
    except OSError as error:
        raise cannot_write(root, error) from None
    events = Events(root / EVENTS, quiet=quiet)
    events.emit("run", settings=resolved)
    events.say(f"run directory: {root}  (settings: {root / SETTINGS})")
    for line in _lines(resolved):
        events.say(line)
    return events


def _lines(resolved: dict[str, Any]) -> list[str]:
    """The settings, a line for each section; absent ones are left out."""
    shown = {name: section for name, section in resolved.items() if isinstance(section, dict)}
    return [
        f"  {name}: " + "  ".join(f"{key}={_short(value)}" for key, value in section.items() if value not in (None, {}))
        for name, section in shown.items()
    ]


def _short(value: Any) -> str:
    return (
        ",".join(map(str, value))
        if isinstance(value, list)
        else str(value).lower()
        if isinstance(value, bool)
        else str(value)
    )


def recorded(root: Path, overrides: Sequence[str] = ()) -> Run:
    """The settings a run directory was last used with, changed by `overrides`.

    Raises:
        UserError: it is no run directory, or its settings cannot be read.
    """
    path = root / SETTINGS
    if not path.exists():
        raise UserError(f"{root} is not a run directory", looked_for=str(path), do="headstart run RUN.TOML makes one")
    raw = _read(path)
    if raw is None:
        what = f"{path} does not hold the settings of a run"
        raise UserError(what, do="move it away; headstart run RUN.TOML writes it again")
    return config.build(raw, overrides)


def _refuse_foreign(root: Path) -> None:
    path = root / SETTINGS
    if path.exists() and _read(path) is None:
        what = f"{path} is not a file of headstart's"
        raise UserError(what, do="move it away, or set `directory` to another place")


def _read(path: Path) -> dict[str, Any] | None:
    """What the file holds when that looks like the settings of a run, else None."""
    try:
        raw = files.read_json(path)
    except (OSError, ValueError):
        return None
    return raw if isinstance(raw, dict) and {"target", "data", "directory"} <= raw.keys() else None
