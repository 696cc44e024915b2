"""The `headstart` command in this process, on settings that name things which need not exist."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from headstart import cli


def settings_file(folder: Path) -> Path:
    """A run.toml with the fewest settings; its run directory is `folder / "out"`."""
    path = folder / "run.toml"
    path.write_text(f'directory = "{folder / "out"}"\n[target]\nmodel = "m"\n[data]\nsources = ["a"]\n')
    return path


def command(monkeypatch: pytest.MonkeyPatch, *arguments: Any) -> int:
    """Its exit code."""
    monkeypatch.setattr(sys, "argv", ["headstart", *map(str, arguments)])
    with pytest.raises(SystemExit) as end:
        cli.main()
    return int(end.value.code or 0)
