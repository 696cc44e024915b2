"""Artifacts: folders that are whole or do not exist.

A stage fills a hidden work folder (`.NAME.partial`), its `manifest.json` is written last, then the folder is renamed into
place. A kill at any moment leaves either the old artifact, or a work folder that the same stage with the same settings and
parents continues. A manifest says what the folder holds, from which parents and settings it was made, and by which versions.
"""

from __future__ import annotations

import fcntl
import os
import platform
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from headstart import __version__, files
from headstart.errors import UserError

FORMAT = 1
MANIFEST = "manifest.json"
KEY = ".key.json"
SCRATCH = "scratch"  # in a work folder: what only a resumed attempt needs; never part of the artifact
LIBRARIES = ("torch", "transformers", "tokenizers", "safetensors", "pyarrow", "numpy", "vllm")


@dataclass(frozen=True)
class Manifest:
    """What `manifest.json` holds. `id` covers everything but times and versions: equal content, equal id."""

    kind: str
    id: str
    settings: dict[str, Any]
    parents: dict[str, str]
    counts: dict[str, Any]
    files: dict[str, dict[str, Any]]
    facts: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    created: str = ""
    seconds: float = 0.0
    format: int = FORMAT


@dataclass(frozen=True)
class Artifact:
    """A whole artifact, opened."""

    path: Path
    manifest: Manifest

    def file(self, name: str) -> Path:
        return self.path / name

    @property
    def counts(self) -> dict[str, Any]:
        return self.manifest.counts

    @property
    def facts(self) -> dict[str, Any]:
        return self.manifest.facts


@dataclass
class Build:
    """An artifact being made: write files under `path`, fill `counts` and `facts`; `resumed` when work was found there."""

    path: Path
    resumed: bool
    counts: dict[str, Any] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)

    def file(self, name: str) -> Path:
        return self.path / name

    @property
    def scratch(self) -> Path:
        """A folder for what a resumed attempt continues from; removed once the artifact is whole."""
        folder = self.path / SCRATCH
        folder.mkdir(exist_ok=True)
        return folder


def open_artifact(path: Path, kind: str) -> Artifact:
    """Open a whole artifact.

    Raises:
        UserError: nothing whole is there, it is of another kind, or a file of it is missing or has another size.
    """
    _settle(path)
    if not (path / MANIFEST).exists():
        raise UserError(f"there is no finished {kind} in {path}", looked_for=str(path / MANIFEST), do=_remake(kind))
    manifest = _read_manifest(path)
    if manifest.kind != kind:
        raise UserError(f"{path} holds {manifest.kind}, not {kind}")
    for name, entry in manifest.files.items():
        _check_file(path / name, entry["bytes"], kind)
    return Artifact(path, manifest)


def read_manifest(path: Path) -> Manifest | None:
    """The manifest of the artifact at `path`, or None when nothing whole is there."""
    _settle(path)
    return _read_manifest(path) if (path / MANIFEST).exists() else None


def verify(artifact: Artifact) -> None:
    """Compare every file with its recorded checksum. Raises UserError naming the first that differs."""
    for name, entry in artifact.manifest.files.items():
        found = files.sha256_file(artifact.path / name)
        if found != entry["sha256"]:
            raise UserError(
                f"{artifact.path / name} was changed after it was written",
                looked_for=f"sha256 {entry['sha256'][:16]}..., found {found[:16]}...",
                do=_remake(artifact.manifest.kind),
            )


@contextmanager
def create(path: Path, kind: str, settings: Mapping[str, Any], parents: Mapping[str, Artifact]) -> Iterator[Build]:
    """Make the artifact `path`; continue the work folder of an earlier, killed attempt with equal settings and parents.

    Raises:
        UserError: `path` holds files that Headstart did not write, or another process is making it now.
    """
    _writable(path.parent)
    _settle(path)
    _refuse_foreign(path)
    parent_ids = {name: parent.manifest.id for name, parent in parents.items()}
    with _locked(path):
        build = _open_work(path, {"kind": kind, "format": FORMAT, "settings": settings, "parents": parent_ids})
        started = time.monotonic()
        yield build
        _finish(path, build, kind, dict(settings), parent_ids, time.monotonic() - started)


def is_partial(path: Path) -> bool:
    """Whether a killed attempt left work that the stage would look at."""
    return (_work(path) / KEY).exists()


def remove(path: Path) -> None:
    """Remove an artifact and its work folder, refusing when it holds foreign files."""
    _refuse_foreign(path)
    for folder in (path, _work(path), _old(path)):
        if folder.exists():
            shutil.rmtree(folder)


def _open_work(path: Path, key: dict[str, Any]) -> Build:
    work = _work(path)
    wanted = files.sha256_json(key)
    resumed = (work / KEY).exists() and files.read_json(work / KEY) == wanted
    if not resumed:
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        files.write_json(work / KEY, wanted)
    return Build(work, resumed)


def _finish(path: Path, build: Build, kind: str, settings: dict, parents: dict[str, str], seconds: float) -> None:
    entries = {name: _entry(build.path / name) for name in _names(build.path)}
    identity = {"kind": kind, "format": FORMAT, "settings": settings, "parents": parents, "files": entries}
    manifest = Manifest(
        kind=kind,
        id=files.sha256_json(identity),
        settings=settings,
        parents=parents,
        counts=build.counts,
        files=entries,
        facts=build.facts,
        versions=versions(),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        seconds=round(seconds, 3),
    )
    files.write_json(build.path / MANIFEST, asdict(manifest))
    _swap(path)


def _swap(path: Path) -> None:
    """Put the finished work folder in place. `_settle` completes this after a kill between any two lines."""
    shutil.rmtree(_work(path) / SCRATCH, ignore_errors=True)
    if path.exists():
        path.rename(_old(path))
    _work(path).rename(path)
    (path / KEY).unlink(missing_ok=True)
    files.sync_folder(path.parent)
    shutil.rmtree(_old(path), ignore_errors=True)


def _settle(path: Path) -> None:
    finished = (_work(path) / MANIFEST).exists()
    if finished and not is_held(path):
        _swap(path)
    elif not path.exists() and _old(path).exists():
        _old(path).rename(path)
    elif _old(path).exists():
        shutil.rmtree(_old(path), ignore_errors=True)


def is_held(path: Path) -> bool:
    """Whether another process is making `path` at this moment."""
    lock = _lock_file(path)
    if not lock.exists():
        return False
    with lock.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with _lock_file(path).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"another process is making {path}", do="wait for it, or end it") from None
        yield
    _lock_file(path).unlink(missing_ok=True)


def _refuse_foreign(path: Path) -> None:
    if not path.exists():
        return
    if not path.is_dir():
        raise UserError(f"{path} is a file", looked_for="a folder, or nothing", do="move it away")
    known = {MANIFEST, KEY}
    if (path / MANIFEST).exists():
        known |= set(_read_manifest(path).files)
    foreign = sorted(set(_names(path)) - known)
    if foreign:
        raise UserError(
            f"{path} holds files that headstart did not write: {', '.join(foreign[:5])}",
            looked_for="an empty folder, none, or one made by headstart",
            do="move them away, or choose another directory",
        )


def _writable(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".write-probe-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UserError(f"cannot write into {folder}: {error.strerror}", do="set `directory` to a writable place") from None


def _read_manifest(path: Path) -> Manifest:
    try:
        raw = files.read_json(path / MANIFEST)
        manifest = Manifest(**raw)
    except (ValueError, TypeError) as error:
        raise UserError(f"{path / MANIFEST} cannot be read: {error}", do="delete the folder and run the stage again") from None
    if manifest.format != FORMAT:
        raise UserError(f"{path} has format {manifest.format}; this headstart reads {FORMAT}")
    return manifest


def _check_file(path: Path, size: int, kind: str) -> None:
    if not path.exists():
        raise UserError(f"{path} is missing", do=_remake(kind))
    if path.stat().st_size != size:
        raise UserError(f"{path} has {path.stat().st_size} bytes, not {size}", do=_remake(kind))


def _names(folder: Path) -> list[str]:
    found = (file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file())
    return sorted(name for name in found if name not in (MANIFEST, KEY) and not name.startswith(f"{SCRATCH}/"))


def _entry(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "sha256": files.sha256_file(path)}


def _remake(kind: str) -> str:
    return f"run the stage that makes {kind} again (headstart status shows which)"


def _work(path: Path) -> Path:
    return path.with_name(f".{path.name}.partial")


def _old(path: Path) -> Path:
    return path.with_name(f".{path.name}.old")


def _lock_file(path: Path) -> Path:
    return path.with_name(f".{path.name}.lock")


def versions() -> dict[str, str]:
    """Versions of what shapes the numbers, without importing any of it."""
    found = {"headstart": __version__, "python": platform.python_version()}
    for name in LIBRARIES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
