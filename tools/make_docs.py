#!/usr/bin/env python3
"""Writes the pages of docs/ that come from code: settings.md, cli.md, patch-speculators.md and kimi-k2.5.md.

With --check, writes nothing, and exits 1 when a page is out of date.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any, cast

# Read when typer and rich are imported: the width of every box, and no colours, wherever this runs.
os.environ |= {"COLUMNS": "100", "TERMINAL_WIDTH": "100", "NO_COLOR": "1", "TERM": "dumb"}
for _forces_color in ("FORCE_COLOR", "PY_COLORS", "GITHUB_ACTIONS"):
    os.environ.pop(_forces_color, None)

from typer.main import get_command  # noqa: E402
from typer.testing import CliRunner  # noqa: E402

import kimi_page  # noqa: E402
import patch_page  # noqa: E402
from headstart import config  # noqa: E402
from headstart.cli import app  # noqa: E402
from headstart.config import Run, SettingDoc  # noqa: E402

DOCS = Path(__file__).resolve().parent.parent / "docs"
NOTE = "<!-- Written by tools/make_docs.py from the code: change it there, then `make docs`. -->"


def main() -> int:
    stale = [name for name, page in PAGES.items() if not _is_current(DOCS / name, page())]
    if "--check" in sys.argv[1:]:
        for name in stale:
            print(f"docs: {name} is out of date; make docs", file=sys.stderr)
        return 1 if stale else 0
    DOCS.mkdir(exist_ok=True)
    for name in stale:
        (DOCS / name).write_text(PAGES[name](), encoding="utf-8")
    print(f"docs: {len(stale)} of {len(PAGES)} pages written")
    return 0


def settings_page() -> str:
    """Every setting, a table for each section."""
    parts = [
        "# Settings",
        NOTE,
        "A run is one TOML file. Each section below is a TOML table; only `target.model` and `data.sources` are "
        "required. Any setting can be given on the command line, too: `-s train.epochs=2`, in TOML syntax, and a word "
        "needs no quotes. `headstart config run.toml` prints the values that a run resolves to.",
    ]
    for section, found in groupby(config.settings(), key=lambda setting: setting.name.rpartition(".")[0]):
        if section:
            parts += [f"## [{section}]", _docstring(section)]
        parts.append(_table(list(found)))
    return "\n\n".join(parts) + "\n"


def cli_page() -> str:
    """What `headstart --help` and `headstart VERB --help` print."""
    parts = [
        "# Commands",
        NOTE,
        "Exit codes: 0 done; 2 your input; 3 doctor says stop, or estimate that it does not fit; 1 a bug of headstart's, with its "
        "traceback; 130 interrupted; 143 stopped by SIGTERM.",
    ]
    for verb in ("", *cast(Any, get_command(app)).commands):
        parts += [f"## headstart {verb}".rstrip(), f"```text\n{_help(verb)}\n```"]
    return "\n\n".join(parts) + "\n"


PAGES: dict[str, Callable[[], str]] = {
    "settings.md": settings_page,
    "cli.md": cli_page,
    "patch-speculators.md": lambda: patch_page.page(NOTE),
    "kimi-k2.5.md": lambda: kimi_page.page(NOTE),
}


def _is_current(path: Path, text: str) -> bool:
    return path.exists() and path.read_text(encoding="utf-8") == text


def _docstring(section: str) -> str:
    annotation = Run.model_fields[section].annotation
    return (annotation.__doc__ or "").strip()


def _table(settings: list[SettingDoc]) -> str:
    rows = [
        (f"`{setting.name.rpartition('.')[2]}`", setting.type, _code(setting.default), setting.meaning)
        for setting in settings
    ]
    assert not any("|" in cell for row in rows for cell in row), "a bar would end the cell"
    lines = [("setting", "type", "default", "meaning"), ("---",) * 4, *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _code(default: str) -> str:
    return default if default in ("required", "absent") else f"`{default}`"


def _help(verb: str) -> str:
    shown = CliRunner().invoke(app, [*verb.split(), "--help"], prog_name="headstart")
    assert shown.exit_code == 0, shown.output
    return "\n".join(line.rstrip() for line in shown.output.split("\n")).strip("\n")


if __name__ == "__main__":
    raise SystemExit(main())
