"""Artifacts: folders that are whole or do not exist.

A stage fills a hidden work folder (`.NAME.partial`), its `manifest.json` is written last, then the folder is renamed
into place. A kill at any moment leaves either the old artifact or the new one, and a work folder that the same stage
with the same settings and parents continues. A manifest says what the folder holds, from which parents and settings it
was made, and by which versions. In a work folder, a hidden name is a write that was cut short.
"""

from __future__ import annotations

import fcntl
import os
import platform
import shutil
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import IO, Any

from headstart import __version__, files
from headstart.errors import UserError, cannot_write

FORMAT = 2
MANIFEST = "manifest.json"
KEY = ".key.json"
SCRATCH = "scratch"  # in a work folder: what only a resumed attempt needs; never part of the artifact
PATIENCE = 0.5  # seconds: a lock that is held longer is not one of those who only ask
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
    """An artifact being made: write files under `path`, fill `counts` and `facts`.

    `resumed`: an earlier attempt with equal settings and parents left work in `path`.
    """

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
    for fault in damage(path, manifest):
        raise UserError(fault, do=_remake(kind))
    return Artifact(path, manifest)


def damage(path: Path, manifest: Manifest) -> list[str]:
    """Files of a finished artifact that are gone or have another size, told by name; `verify` reads their bytes too."""
    told = (_fault(path / name, entry["bytes"]) for name, entry in manifest.files.items())
    return [fault for fault in told if fault]


def read_manifest(path: Path) -> Manifest | None:
    """The manifest of the artifact at `path`, or None when nothing whole is there."""
    _settle(path)
    return _read_manifest(path) if (path / MANIFEST).exists() else None


def verify(artifact: Artifact, only: Collection[str] | None = None) -> None:
    """Compare every file, or those alone, with its recorded checksum. Raises UserError naming the first that differs."""
    for name, entry in artifact.manifest.files.items():
        if only is not None and name not in only:
            continue
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
    key = work_key(kind, settings, {name: parent.manifest.id for name, parent in parents.items()})
    with _locked(path):
        _complete(path)
        _refuse_foreign(path)
        build = _open_work(path, key)
        started = time.monotonic()
        yield build
        _finish(path, build, key, time.monotonic() - started)


def work_key(kind: str, settings: Mapping[str, Any], parents: Mapping[str, str]) -> dict[str, Any]:
    """What an artifact is made from. Attempts with equal keys continue each other. `parents`: their ids."""
    return {"kind": kind, "format": FORMAT, "settings": dict(settings), "parents": dict(parents)}


def is_partial(path: Path) -> bool:
    """Whether a killed attempt left work behind."""
    return (_work(path) / KEY).exists()


def is_held(path: Path, patience: float = 0.0) -> bool:
    """Whether a living process is making the artifact, for longer than `patience` seconds: others who ask hold the lock, too."""
    if not _lock_file(path).exists() or not os.access(path.parent, os.W_OK):
        return False
    lock = _acquire(path, patience)
    if lock is not None:
        with lock:
            _lock_file(path).unlink(missing_ok=True)
    return lock is None


def check_place(path: Path) -> None:
    """Whether `create` could begin now. Raises UserError as it does."""
    if is_held(path, PATIENCE):
        raise _held(path)
    _refuse_foreign(path)


def continues(path: Path, key: Mapping[str, Any]) -> bool:
    """Whether an attempt with this `work_key` would continue the work that a killed attempt left."""
    try:
        return is_partial(path) and files.read_json(_work(path) / KEY) == files.sha256_json(key)
    except (OSError, ValueError):
        return False


def _open_work(path: Path, key: dict[str, Any]) -> Build:
    work = _work(path)
    resumed = continues(path, key)
    if resumed:
        _drop_torn(work)
    else:
        _discard(work)
        work.mkdir(parents=True)
        files.write_json(work / KEY, files.sha256_json(key))
    return Build(work, resumed)


def _drop_torn(work: Path) -> None:
    """Without this, the rest of a write that was cut short would become part of the artifact.

    All that writes whole files, safetensors among it, writes under a hidden name first.
    """
    for torn in [path for path in work.rglob(".*") if path != work / KEY]:
        if torn.is_dir():
            shutil.rmtree(torn)
        else:
            torn.unlink(missing_ok=True)  # may have gone with the folder it was in


def _finish(path: Path, build: Build, key: dict[str, Any], seconds: float) -> None:
    for name in _names(build.path):  # safetensors writes for the owner alone; an export is read by servers
        (build.path / name).chmod(0o666 & ~_umask())
    entries = {name: _entry(build.path / name) for name in _names(build.path)}
    manifest = Manifest(
        kind=key["kind"],
        id=files.sha256_json(key | {"files": entries}),
        settings=key["settings"],
        parents=key["parents"],
        counts=build.counts,
        files=entries,
        facts=build.facts,
        versions=versions(),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        seconds=round(seconds, 3),
    )
    files.write_json(build.path / MANIFEST, asdict(manifest))
    _swap(path)


def _umask() -> int:
    value = os.umask(0)
    os.umask(value)
    return value


def _swap(path: Path) -> None:
    """Put the finished work folder in place. `_settle` completes this after a kill between any two lines."""
    _refuse_foreign(path)  # also what was put there while the stage ran
    shutil.rmtree(_work(path) / SCRATCH, ignore_errors=True)
    if path.exists():
        path.rename(_old(path))
    _work(path).rename(path)
    (path / KEY).unlink(missing_ok=True)
    files.sync_folder(path.parent)
    _discard(_old(path))


def _settle(path: Path) -> None:
    """Complete what a killed process left half done. What a living one does, or a reader may not change, is left."""
    if not _unsettled(path) or not os.access(path.parent, os.W_OK):
        return
    lock = _acquire(path, patience=0.0)
    if lock is not None:
        with lock:
            _complete(path)
            _lock_file(path).unlink(missing_ok=True)


def _unsettled(path: Path) -> bool:
    return (_work(path) / MANIFEST).exists() or _old(path).exists()


def _complete(path: Path) -> None:
    """As `_settle`, for the holder of the lock."""
    if (_work(path) / MANIFEST).exists():
        _swap(path)
    elif (_old(path) / MANIFEST).exists() and not path.exists():
        _old(path).rename(path)
    else:
        _discard(_old(path))


def _discard(folder: Path) -> None:
    """Remove a folder of ours, or what stands in its place. What says that it is whole, or can be continued, goes first."""
    if folder.is_symlink() or folder.is_file():
        folder.unlink()
        return
    for name in (MANIFEST, KEY):
        (folder / name).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def _held(path: Path) -> UserError:
    return UserError(f"another process is making {path}", do="wait for it, or end it")


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = _acquire(path, PATIENCE)
    except OSError as error:
        raise cannot_write(path.parent, error) from None
    if lock is None:
        raise _held(path)
    with lock:
        try:
            yield
        finally:
            _lock_file(path).unlink(missing_ok=True)


def _acquire(path: Path, patience: float) -> IO[str] | None:
    """The locked lock file of `path`; None when another process holds it for longer than `patience` seconds.

    The system drops the lock when its holder ends, however it ends. A file that its last holder has just removed is
    not the lock any more, so it is looked up again.
    """
    give_up = time.monotonic() + patience
    while True:
        file = _lock_file(path).open("w")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _same_file(file, _lock_file(path)):
                return file
        except BlockingIOError:
            if time.monotonic() >= give_up:
                file.close()
                return None
        file.close()
        time.sleep(0.01)


def _same_file(file: IO[str], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _refuse_foreign(path: Path) -> None:
    if path.is_symlink() or path.is_file():
        kind = "link" if path.is_symlink() else "file"
        raise UserError(f"{path} is a {kind}", looked_for="a folder, or nothing", do="move it away")
    known = {MANIFEST, KEY}
    if (path / MANIFEST).exists():
        known |= set(_read_manifest(path).files)
    found = {file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_symlink() or not file.is_dir()}
    if foreign := sorted(found - known):
        raise UserError(
            f"{path} holds files that no manifest of headstart's names: {', '.join(foreign[:5])}",
            looked_for=f"an empty folder, none, or one that was made by headstart, with its {MANIFEST}",
            do="move them away (or delete the folder, when headstart made it), or choose another directory",
        )


def _read_manifest(path: Path) -> Manifest:
    try:
        raw = files.read_json(path / MANIFEST)
        if raw["format"] != FORMAT:
            raise UserError(f"{path} has format {raw['format']}; this headstart reads {FORMAT}")
        manifest = Manifest(**raw)
        for part in (manifest.settings, manifest.parents, manifest.counts, manifest.files):
            part.items()
        return manifest
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        what = f"{path / MANIFEST} cannot be read: {error}"
        raise UserError(what, do="delete the folder and run the stage again") from None


def _fault(path: Path, size: int) -> str | None:
    if not path.exists():
        return f"{path} is missing"
    found = path.stat().st_size
    return f"{path} has {found} bytes, not {size}" if found != size else None


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
