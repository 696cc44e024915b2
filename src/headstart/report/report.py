"""`report.html` of a run directory: one file that opens anywhere, offline."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

from headstart import files
from headstart.errors import UserError, install

REPORT = "report.html"


def write(root: Path) -> Path:
    """Write `root/report.html` from what the run directory holds by now; what is missing is said to be missing.

    Raises:
        UserError: `root` is no run directory or not writable, a manifest cannot be read, or a library is missing.
    """
    numbers, page = (_part(f"headstart.report.{name}") for name in ("numbers", "page"))
    html = page.render(numbers.gather(root))
    try:
        files.write_text(root / REPORT, html)
    except OSError as error:
        raise UserError(f"cannot write {root / REPORT}: {error.strerror}") from None
    return root / REPORT


def _part(name: str) -> ModuleType:
    """Imported late: the libraries that draw are an extra."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("headstart"):
            raise
        raise UserError(f"the report needs {error.name}, which is not installed", do=install("report")) from None
