"""What the host hands over while a command runs: how answers grow, and the files of captured states. Standard library only."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from pathlib import Path

TELL_EVERY = 0.2  # seconds between two `grew` events
UNREAD = 2 << 30  # bytes of state files that may wait to be read before the engine pauses


class Growth:
    """Tokens by request since the last `grew` event."""

    def __init__(self, tell: Callable[..., None]) -> None:
        self._tell, self._new, self._told = tell, {}, time.monotonic()

    def add(self, name: str, tokens: int) -> None:
        self._new[name] = self._new.get(name, 0) + tokens
        if time.monotonic() - self._told >= TELL_EVERY:
            self.flush()

    def flush(self) -> None:
        if self._new:
            self._tell("grew", tokens=self._new)
        self._new, self._told = {}, time.monotonic()


class Files:
    """State files of one capture: expected from the engine, then announced, then removed by who reads them."""

    def __init__(self, folder: Path, tell: Callable[..., None]) -> None:
        self._folder, self._tell = folder, tell
        self._file: dict[str, Path] = {}
        self._ended: set[str] = set()
        self._number = itertools.count()
        self._unread: dict[Path, int] = {}

    def expect(self, name: str) -> Path:
        """Raises ValueError for a name that is expected already: the states of one would be taken for the other's."""
        if name in self._file:
            raise ValueError(f"the id {name} was asked for twice")
        self._file[name] = self._folder / f"{next(self._number):06d}.safetensors"
        return self._file[name]

    def finished(self, name: str) -> None:
        self._ended.add(name)

    def announce(self) -> int:
        """Tell of the files that have appeared; returns how many requests have ended without theirs."""
        for name in [name for name in self._ended if self._file[name].exists()]:
            path = self._file.pop(name)
            self._ended.discard(name)
            self._unread[path] = path.stat().st_size
            self._tell("captured", id=name, path=str(path))
        return len(self._ended)

    def lost(self, stem: str, why: str) -> None:
        for name in [name for name in self._ended if self._file[name].stem == stem]:
            self._ended.discard(name)
            self._tell("refused", id=name, why=why)

    def give_up(self, seconds: float) -> None:
        for name in sorted(self._ended):
            self._tell("refused", id=name, why=f"its states were not written within {seconds:.0f} s")

    def wait_for_room(self) -> None:
        """Pause while too much that was announced is still there: whoever reads is slower than the engine."""
        while True:
            self._unread = {path: size for path, size in self._unread.items() if path.exists()}
            if sum(self._unread.values()) <= UNREAD:
                return
            time.sleep(0.01)
