"""Bringing results here, each file compared with the checksum that its manifest gives.

An artifact arrives file by file and its manifest last, so a fetch that broke off leaves none that looks whole, and goes on
where it was.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from headstart import files
from headstart.artifact import MANIFEST
from headstart.errors import GateError
from headstart.events import Events, Progress, size
from headstart.remote.agent.common import part_of
from headstart.remote.ssh import Unreachable
from headstart.remote.there import MB, There

Entry = dict[str, Any]


@dataclass(frozen=True)
class Fetched:
    """folder: where the results are; artifacts: names of those that are whole there; received: bytes that came now."""

    folder: Path
    artifacts: tuple[str, ...]
    files: int
    received: int


def fetch(there: There, folder: Path, events: Events, *, everything: bool = False) -> Fetched:
    """Bring draft, export, scores, report and event log into `folder`; `everything`: also data and states.

    Raises:
        GateError: a file is not what its manifest says, there or on the way.
    """
    listing = there.call("list", everything=everything)
    manifests: dict[str, str] = listing["artifacts"]
    wanted: dict[str, Entry] = dict(listing["files"])
    for name, text in manifests.items():
        wanted |= {f"{name}/{inside}": entry for inside, entry in json.loads(text)["files"].items()}
    _check_names([*manifests, *wanted])
    for name, text in manifests.items():
        _reopen(folder / name, text)
    received = _bring(there, folder, wanted, events)
    for name, text in manifests.items():
        _close(folder / name, text)
    for name, left in sorted(listing["left"].items()):
        events.say(f"left there: {name}, {size(left)} (--fetch --all brings it)")
    return Fetched(folder, tuple(manifests), len(wanted), received)


def _bring(there: There, folder: Path, wanted: Mapping[str, Entry], events: Events) -> int:
    missing = {name: entry for name, entry in wanted.items() if not _is_here(folder / name, entry)}
    if not missing:
        return 0
    begun = {name: _begun(folder / name, entry) for name, entry in missing.items()}
    todo = sum(entry["bytes"] - begun[name] for name, entry in missing.items())
    events.say(f"fetching {len(missing)} of {len(wanted)} files, {size(todo)}, into {folder}")
    with events.progress("fetch", todo / MB, "MB") as progress:
        receiver = _Receiver(folder, missing, progress)
        there.lasting(lambda channel: channel.call("get", note=receiver.receive, files=receiver.left()))
    return todo


class _Receiver:
    """Takes files as they come. What a broken connection left half is continued."""

    def __init__(self, folder: Path, missing: Mapping[str, Entry], progress: Progress) -> None:
        self.folder, self.missing, self.progress = folder, missing, progress

    def left(self) -> list[dict[str, Any]]:
        """What is still to come, as the agent is asked for it."""
        waiting = {name: entry for name, entry in self.missing.items() if not _is_here(self.folder / name, entry)}
        return [
            {"path": name, "bytes": entry["bytes"], "offset": _begun(self.folder / name, entry)}
            for name, entry in waiting.items()
        ]

    def receive(self, told: dict[str, Any], stream: IO[bytes]) -> None:
        path, entry, left = self.folder / told["file"], self.missing[told["file"]], told["bytes"]
        path.parent.mkdir(parents=True, exist_ok=True)
        with _part(path, entry).open("ab") as file:
            while left:
                data = stream.read(min(files.CHUNK, left))
                if not data:
                    raise Unreachable("the connection was lost while files came")
                file.write(data)
                left -= len(data)
                self.progress.advance(len(data) / MB)
        self._settle(path, entry)

    def _settle(self, path: Path, entry: Entry) -> None:
        part = _part(path, entry)
        if (found := files.sha256_file(part)) != entry["sha256"]:
            part.unlink()
            raise GateError(
                f"{path} is not what was to be fetched",
                looked_for=f"sha256 {entry['sha256'][:16]}..., found {found[:16]}...",
                do="fetch again; if it stays so, the file there was changed after it was written",
            )
        part.replace(path)


def _is_here(path: Path, entry: Entry) -> bool:
    same_size = path.is_file() and path.stat().st_size == entry["bytes"]
    return same_size and files.sha256_file(path) == entry["sha256"]


def _begun(path: Path, entry: Entry) -> int:
    part = _part(path, entry)
    return min(part.stat().st_size, entry["bytes"]) if part.exists() else 0


def _part(path: Path, entry: Entry) -> Path:
    return part_of(path, entry["sha256"])


def _reopen(folder: Path, text: str) -> None:
    """An artifact that is to change is not whole until all of it is here; what only the old one had goes."""
    manifest = folder / MANIFEST
    old = manifest.read_text(encoding="utf-8") if manifest.exists() else text
    if old != text:
        manifest.unlink()
        for name in json.loads(old)["files"].keys() - json.loads(text)["files"].keys():
            (folder / name).unlink(missing_ok=True)


def _close(folder: Path, text: str) -> None:
    if not (folder / MANIFEST).exists():
        files.write_text(folder / MANIFEST, text)


def _check_names(names: Iterable[str]) -> None:
    for name in names:
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise GateError(f"a manifest there names {name!r}, which lies outside its folder")
