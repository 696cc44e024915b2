"""What a run tells: one JSON line per event on disk, short lines and progress with time left on stderr."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

EARLY = 0.05  # share of the work after which the time left is guessed
PLAIN_EVERY = 10.0  # seconds between progress lines where stderr is not a terminal


class Progress(Protocol):
    """A running count of `unit`s; `shown` values appear beside it."""

    def advance(self, amount: float, **shown: Any) -> None: ...


class Events:
    """Writes events to `path` (when given) and tells a person on stderr unless `quiet`."""

    def __init__(self, path: Path | None = None, *, quiet: bool = False) -> None:
        self.path = path
        self.quiet = quiet

    def emit(self, kind: str, **fields: Any) -> None:
        """Append one event. A line that a kill cut short is skipped by `read`."""
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"time": round(time.time(), 3), "event": kind, **fields}, default=str) + "\n")

    def say(self, text: str) -> None:
        self.emit("say", text=text)
        if not self.quiet:
            print(text, file=sys.stderr, flush=True)

    @contextmanager
    def progress(self, label: str, total: float, unit: str, done: float = 0) -> Iterator[Progress]:
        """Progress over `total` units of which `done` were done before; the rate counts only what is done now."""
        if self.quiet:
            yield _Silent()
        elif sys.stderr.isatty():
            with _rich(label, total, unit, done) as bar:
                yield bar
        else:
            plain = _Plain(label, total, unit, done)
            yield plain
            plain.line()


def read(path: Path) -> list[dict[str, Any]]:
    """All whole events of a file, oldest first; none when the file does not exist."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    return [event for line in lines if (event := _parse(line)) is not None]


def _parse(line: str) -> dict[str, Any] | None:
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


class _Silent:
    def advance(self, amount: float, **shown: Any) -> None:
        del amount, shown


class _Plain:
    def __init__(self, label: str, total: float, unit: str, done: float) -> None:
        self.label, self.total, self.unit = label, total, unit
        self.first, self.done, self.shown = done, done, {}
        self.started = self.printed = time.monotonic()

    def advance(self, amount: float, **shown: Any) -> None:
        self.done += amount
        self.shown = shown or self.shown
        if time.monotonic() - self.printed >= PLAIN_EVERY:
            self.line()

    def line(self) -> None:
        self.printed = time.monotonic()
        rate = (self.done - self.first) / max(self.printed - self.started, 1e-9)
        now = self.done - self.first
        known = rate > 0 and now >= EARLY * (self.total - self.first)
        left = f"{duration((self.total - self.done) / rate)} left" if known else "time left not known yet"
        share = f"{100 * self.done / self.total:.0f} %" if self.total else "100 %"
        extra = "".join(f"  {key} {_number(value)}" for key, value in self.shown.items())
        counts = f"{self.done:,.0f}/{self.total:,.0f} {self.unit}  {rate:,.1f} {self.unit}/s"
        print(f"  {self.label}  {share}  {counts}  {left}{extra}", file=sys.stderr, flush=True)


@contextmanager
def _rich(label: str, total: float, unit: str, done: float) -> Iterator[Progress]:
    from rich.console import Console
    from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    columns = (TextColumn("  {task.description}"), BarColumn(), TaskProgressColumn(), TextColumn("{task.fields[rate]}"))
    columns = (*columns, TimeRemainingColumn(), TextColumn("{task.fields[extra]}"))
    with Bars(*columns, console=Console(stderr=True)) as bars:
        task = bars.add_task(label, total=total, completed=int(done), rate="", extra="")
        started, count = time.monotonic(), 0.0

        class Bar:
            def advance(self, amount: float, **shown: Any) -> None:
                nonlocal count
                count += amount
                rate = count / max(time.monotonic() - started, 1e-9)
                extra = "  ".join(f"{key} {_number(value)}" for key, value in shown.items())
                bars.update(task, advance=amount, rate=f"{rate:,.1f} {unit}/s", extra=extra)

        yield Bar()


def duration(seconds: float) -> str:
    """`95` -> `1m35s`."""
    whole = max(int(seconds + 0.5), 0)
    hours, minutes, rest = whole // 3600, whole % 3600 // 60, whole % 60
    if hours:
        return f"{hours}h{minutes:02d}m"
    return f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"


def size(count: float) -> str:
    """Bytes for a person."""
    for unit in ("bytes", "kB", "MB", "GB", "TB"):
        if count < 1000 or unit == "TB":
            break
        count = count / 1000 if count < 1e300 else math.inf  # integers may be larger than any float
    return f"{count:,.0f} {unit}" if unit == "bytes" else f"{count:,.1f} {unit}"


def times(ratio: float | None) -> str:
    """`0.74` -> `0.74x`; what was not measured is a dash."""
    return "-" if ratio is None else f"{ratio:.2f}x"


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
