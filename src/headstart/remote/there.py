"""One run on another machine: its folder there, what is shipped into it, started in it, followed and stopped.

Every request can be made again, so a connection that breaks is made anew and the request repeated.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from headstart import files
from headstart.errors import UserError
from headstart.events import Events, Progress, size
from headstart.remote.ssh import Channel, Host, Notes, Unreachable

PATIENCE = 600.0  # seconds that a lost connection is tried again
FIRST_WAIT, LONGEST_WAIT = 1.0, 30.0
MB = 1e6
MARGIN = 64 << 20  # bytes that must stay free beside what is shipped


class There:
    """The run called `name` in `folder` on `host`, begun from `origin` (machine and file)."""

    def __init__(self, host: Host, folder: str, name: str, origin: dict[str, str], events: Events) -> None:
        self.host, self.name, self.events = host, name, events
        self._opening = {"folder": folder, "name": name, "origin": origin}
        self._session = uuid.uuid4().hex
        self._channel: Channel | None = None
        self._create = self._locked = False
        self.status: dict[str, Any] = {}

    def open(self, *, create: bool) -> dict[str, Any]:
        """Connect, and make the run's folder when `create`; returns its status.

        Raises:
            Unreachable: the host cannot be reached now.
            UserError: the login is refused, there is no Python, no such run, or one of that name that is another.
        """
        self._create = create
        self.status = self._connect()
        return self.status

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def call(self, op: str, note: Notes | None = None, **arguments: Any) -> Any:
        """Ask the agent there; over a new connection when this one breaks."""
        return self.lasting(lambda channel: channel.call(op, note=note, **arguments))

    # --- shipping ---

    def ship(self, wanted: Mapping[str, Path], prune: str) -> int:
        """Send the files (path under the base folder there -> path here) that are not there yet, or not as here.

        prune: a folder there in which no other file shall stay. Returns the bytes that were sent.

        Raises:
            UserError: the disk there is too full, or another client is shipping this run.
        """
        self._locked = True
        self.call("lock", session=self._session)
        told = {
            name: {"bytes": path.stat().st_size, "sha256": files.sha256_file(path)} for name, path in wanted.items()
        }
        return self.lasting(lambda channel: self._send(channel, wanted, told, prune))

    def _send(self, channel: Channel, wanted: Mapping[str, Path], told: dict[str, dict[str, Any]], prune: str) -> int:
        found = channel.call("compare", files=told, prune=[prune])
        plan = [{"path": name, "offset": offset, **told[name]} for name, offset in found["missing"].items()]
        todo = sum(entry["bytes"] - entry["offset"] for entry in plan)
        if todo + MARGIN > found["free"]:
            raise UserError(
                f"the disk of {self.status['root']} on {self.host.name} is too full",
                looked_for=f"{size(todo + MARGIN)} for what is shipped; {size(found['free'])} are free",
                do="make room there, or choose another disk: --dir FOLDER",
            )
        if plan:
            self.events.say(f"shipping {len(plan)} of {len(told)} files, {size(todo)}")
            with self.events.progress("ship", todo / MB, "MB") as progress:
                channel.call("put", send=_contents(wanted, plan, progress), files=plan)
        return todo

    # --- the run ---

    def start(self, job: dict[str, Any]) -> dict[str, Any]:
        """Start the job unless it runs, and let other clients ship again."""
        self.status = self.call("start", job=job)
        self._locked = False
        return self.status

    def follow(self, offset: int) -> dict[str, Any]:
        """Tell the run's log from `offset` on until the run has ended; returns its status then."""

        def hear(told: dict[str, Any], _: IO[bytes]) -> None:
            nonlocal offset
            offset = told["offset"]
            for line in told["log"].splitlines():
                self.events.say(line)

        self.status = self.lasting(lambda channel: channel.call("follow", note=hear, offset=offset))
        return self.status

    def stop(self) -> dict[str, Any]:
        self.status = self.call("stop")
        return self.status

    # --- connections ---

    def _connect(self) -> dict[str, Any]:
        self.close()
        self._channel = Channel(self.host)
        status = self._channel.call("open", create=self._create, **self._opening)
        if self._locked:
            self._channel.call("lock", session=self._session)
        return status

    def lasting(self, ask: Callable[[Channel], Any]) -> Any:
        """The answer to what `ask` does with a connection. It is asked again over a new one when this one breaks.

        Raises:
            UserError: what the agent refuses, or the host does not come back.
        """
        give_up, wait = time.monotonic() + PATIENCE, FIRST_WAIT
        while True:
            try:
                if self._channel is None or not self._channel.is_open:
                    self._connect()
                    self.events.say(f"connected with {self.host.name} again")
                    give_up, wait = time.monotonic() + PATIENCE, FIRST_WAIT
                assert self._channel is not None
                return ask(self._channel)
            except Unreachable as lost:
                self.close()
                if time.monotonic() > give_up:
                    do = "the run there goes on; the same command follows it again"
                    raise UserError(f"{self.host.name} did not come back: {lost.what}", do=do) from None
                self.events.say(f"{lost.what}; trying again in {wait:.0f} s")
                time.sleep(wait)
                wait = min(2 * wait, LONGEST_WAIT)


def _contents(wanted: Mapping[str, Path], plan: list[dict[str, Any]], progress: Progress) -> Iterator[bytes]:
    """The bytes of the planned files, one after the other, each from where an earlier attempt ended."""
    for entry in plan:
        left = entry["bytes"] - entry["offset"]
        with wanted[entry["path"]].open("rb") as file:
            file.seek(entry["offset"])
            while left:
                data = file.read(min(files.CHUNK, left))
                if not data:
                    raise UserError(f"{wanted[entry['path']]} has changed while it was shipped", do="ship it again")
                yield data
                progress.advance(len(data) / MB)
                left -= len(data)
