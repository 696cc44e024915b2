"""The package as a wheel: built from the checkout it runs from, without network."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import headstart
from headstart.errors import UserError

EXTRAS = ("train", "report")

# The build hook of the checkout's own build system (PEP 517), in a process of its own: it wants the checkout as its folder.
_BUILD = "import sys; from hatchling.build import build_wheel; print(build_wheel(sys.argv[1]))"
_EXTRA = re.compile(r"""\s*;\s*extra\s*==\s*['"](\w+)['"]\s*$""")


def build(folder: Path) -> Path:
    """Build the wheel into `folder`; equal sources give equal bytes.

    Raises:
        UserError: this headstart does not run from a checkout, or hatchling is not here, or fails.
    """
    checkout = Path(headstart.__file__).resolve().parents[2]
    if not (checkout / "pyproject.toml").is_file():
        what = f"{checkout} is no checkout of headstart, and only from one can a wheel be built"
        raise UserError(what, looked_for="pyproject.toml", do="pip install -e CHECKOUT")
    ended = subprocess.run(
        [sys.executable, "-c", _BUILD, str(folder.absolute())],
        cwd=checkout,
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    if ended.returncode:
        last = (ended.stderr.strip().splitlines() or ["no message"])[-1]
        raise UserError(f"no wheel could be built of {checkout}: {last}", do="pip install hatchling")
    return folder / ended.stdout.splitlines()[-1]


def requirements(wheel: Path, extras: tuple[str, ...]) -> list[str]:
    """What the wheel's own metadata says that it needs with these extras, as pip takes it."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        told = Parser().parsestr(archive.read(name).decode("utf-8"))
    found = []
    for line in told.get_all("Requires-Dist", []):
        extra = _EXTRA.search(line)
        if extra is None or extra[1] in extras:
            found.append(_EXTRA.sub("", line))
    return sorted(set(found))


def package(requirement: str) -> str:
    """The package that a requirement names."""
    return re.split(r"[^\w.-]", requirement.strip(), maxsplit=1)[0]
