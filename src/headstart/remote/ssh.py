"""The system's OpenSSH as a channel to the agent on another machine. What ssh says when it fails becomes an error.

The command given to ssh is always one of two, made of plain words: `python3 -` (the program comes on stdin) to put the agent there,
and `python3 .cache/headstart/agent-HASH.pyz` to talk to it. Any shell reads them alike.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import IO, Any

from headstart.errors import UserError
from headstart.remote.agent.common import MARKER, PROTOCOL

FOLDER = ".cache/headstart"  # in the home there
NOISE = 1 << 20  # bytes that a login script may print before the agent speaks
PLAIN = re.compile(r"/[\w./+-]+")  # a path that every shell reads as one word

# Puts the agent where the next connection starts it from. Read by `python3 -`, by any Python 3.
_INSTALL = """
import os
path, data = {path}, {data}
os.makedirs(os.path.dirname(path), exist_ok=True)
temporary = path + "." + str(os.getpid())
with open(temporary, "wb") as file:
    file.write(data)
os.replace(temporary, path)
"""

_MAIN = "import sys\nfrom agent.__main__ import main\nmain(sys.argv[1:])\n"

Notes = Callable[[dict[str, Any], IO[bytes]], None]  # hears what is told on the way; bytes may follow it

# What ssh says, and what that means: (pattern, what is wrong with HOST, what to do about it).
_FAULTS = (
    ("Permission denied|Too many authentication failures", "refuses the login", "give it a key: ssh-copy-id {host}"),
    (
        "REMOTE HOST IDENTIFICATION|Host key verification",
        "is not the known one: its host key",
        "see that ssh {host} works",
    ),
    (
        "Could not resolve hostname",
        "is not known",
        "correct HOST, or write a Host entry for it in the ssh configuration",
    ),
    (
        "Connection refused|timed out|No route to host|unreachable",
        "cannot be reached",
        "see that it is up, and ssh {host}",
    ),
    (
        "onfiguration option|onfiguration file|Can't open user config",
        "cannot be looked up",
        "mend the ssh configuration",
    ),
)


class Unreachable(UserError):
    """There is no connection at this moment. It may come back."""


@dataclass(frozen=True)
class Host:
    """Where to: a host or alias as ssh takes it, another ssh configuration, and the Python that runs the agent there."""

    name: str
    config: Path | None = None
    python: str = "python3"

    def command(self, *words: str) -> list[str]:
        """The ssh command for a program there.

        Keys, ports, users and jump hosts are the ssh configuration's. Only what would break a channel is switched off.
        """
        options = ["-T", "-o", "RemoteCommand=none", "-o", "ClearAllForwardings=yes", *self._keep_alive()]
        asks = [] if sys.stdin.isatty() else ["-o", "BatchMode=yes"]
        return ["ssh", *self._config(), *options, *asks, "--", self.name, *words]

    def _config(self) -> list[str]:
        return [] if self.config is None else ["-F", str(self.config)]

    def _keep_alive(self) -> list[str]:
        """So that a dead connection is noticed; where the user's configuration says something, that holds."""
        ended = subprocess.run(
            ["ssh", *self._config(), "-G", "--", self.name], capture_output=True, text=True, check=False, stdin=-3
        )
        lines = set(ended.stdout.lower().splitlines())
        wanted = {
            "serveraliveinterval 0": ["-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=4"],
            "connecttimeout none": ["-o", "ConnectTimeout=20"],
        }
        return [word for line, words in wanted.items() if line in lines for word in words]


def host(name: str, config: Path | None, python: str | None) -> Host:
    """Raises UserError for a name that ssh would take for something else, or a configuration that is not there."""
    if not name or name.startswith("-") or any(char.isspace() for char in name):
        raise UserError(f"{name!r} is no host", looked_for="HOST, USER@HOST, ssh://USER@HOST:PORT, or an alias")
    if config is not None and not config.is_file():
        raise UserError(f"there is no ssh configuration {config}", do="correct --ssh-config")
    return Host(name, config, python if python and PLAIN.fullmatch(python) else "python3")


def pack() -> bytes:
    """The agent's files as one archive that Python runs; equal files give equal bytes."""
    told = io.BytesIO()
    folder = resources.files("headstart.remote.agent")
    with zipfile.ZipFile(told, "w") as archive:
        archive.writestr(zipfile.ZipInfo("__main__.py"), _MAIN)
        for name in sorted(entry.name for entry in folder.iterdir() if entry.name.endswith(".py")):
            archive.writestr(zipfile.ZipInfo(f"agent/{name}"), folder.joinpath(name).read_bytes())
    return told.getvalue()


class Channel:
    """One connection with an agent at its other end.

    Raises (all methods):
        Unreachable: the connection was lost, or could not be made.
        UserError: the login is refused, Python is missing there, or the agent refuses a request.
    """

    def __init__(self, to: Host) -> None:
        self.to = to
        self._process: subprocess.Popen[bytes] | None = None
        archive = pack()
        self._agent = f"{FOLDER}/agent-{hashlib.sha256(archive).hexdigest()[:16]}.pyz"
        if not self._start():
            self._install(archive)
            if not self._start():
                raise UserError(
                    f"the agent does not start on {to.name}", looked_for=self._agent, do=f"see ssh {to.name}"
                )

    def call(
        self,
        op: str,
        send: Iterable[bytes] = (),
        note: Notes | None = None,
        **arguments: Any,
    ) -> Any:
        """Ask for `op`, with the bytes of `send` after the request; returns its result. `note` gets what is told on the way."""
        if self._process is None:
            raise Unreachable(f"the connection to {self.to.name} has ended")
        try:
            told = self._converse(json.dumps({"op": op, **arguments}).encode() + b"\n", send, note)
        except BaseException:  # in the middle of a conversation: what still comes would be taken for the next answer
            self.close()
            raise
        return _result(told)

    def _converse(self, request: bytes, send: Iterable[bytes], note: Notes | None) -> dict[str, Any]:
        with suppress(BrokenPipeError):  # what the agent said before it hung up is read below
            self._in.write(request)
            for data in send:
                self._in.write(data)
            self._in.flush()
        while (line := self._out.readline()).endswith(b"\n"):
            told = json.loads(line)
            if "note" not in told:
                return told
            if note is not None:
                note(told["note"], self._out)
        raise explain(self.to, *self._end())

    @property
    def is_open(self) -> bool:
        return self._process is not None

    def close(self) -> None:
        if self._process is None:
            return
        for stream in (self._in, self._out, self._errors):
            with suppress(OSError):  # what was not sent yet is not needed any more
                stream.close()
        self._process.terminate()
        self._process.wait()
        self._process = None

    def _start(self) -> bool:
        """Whether the agent speaks. When it is not there yet, it does not."""
        self._open(self.to.python, self._agent)
        skipped = 0
        while skipped < NOISE and (line := self._out.readline()):
            if line.startswith(MARKER):
                return json.loads(line[len(MARKER) :])["protocol"] == PROTOCOL
            skipped += len(line)
        if skipped >= NOISE:
            self.close()
            raise UserError(f"the login on {self.to.name} prints without end", do="silence its shell's start-up files")
        code, said = self._end()
        if code == 255:
            raise explain(self.to, code, said)
        return False

    def _install(self, archive: bytes) -> None:
        self._open(self.to.python, "-")
        with suppress(OSError):  # why it hung up is told below
            self._in.write(_INSTALL.format(path=ascii(self._agent), data=archive).encode())
            self._in.close()
        self._out.read()
        code, said = self._end()
        if code:
            raise explain(self.to, code, said)

    def _open(self, *words: str) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (as long as the channel)
        try:
            process = subprocess.Popen(self.to.command(*words), stdin=-1, stdout=-1, stderr=self._errors)
        except FileNotFoundError:
            self._errors.close()
            raise UserError("there is no ssh on this machine", do="install the OpenSSH client") from None
        assert process.stdin is not None
        assert process.stdout is not None
        self._process, self._in, self._out = process, process.stdin, process.stdout

    def _end(self) -> tuple[int, str]:
        """How ssh, or what it was to start there, has ended, and what was said on stderr."""
        assert self._process is not None
        code = self._process.wait()
        self._errors.seek(0)
        said = self._errors.read().decode("utf-8", "replace").strip()
        self.close()
        return code, said


def explain(to: Host, code: int, said: str) -> UserError:
    """The error for an ssh command that ended with `code` and `said` this on stderr."""
    line = (said.splitlines() or [f"ssh ended with {code}"])[-1]
    if code == 255:
        for pattern, what, do in _FAULTS:
            if re.search(pattern, said):
                kind = Unreachable if what == "cannot be reached" else UserError
                return kind(f"{to.name} {what} ({line})", do=do.format(host=to.name))
        return Unreachable(f"the connection to {to.name} was lost ({line})")
    if code == 127 or re.search("not found|No such file|Unknown command", said):
        what = f"there is no {to.python} on {to.name} ({line})"
        return UserError(what, looked_for="Python 3.8 or newer", do="install it there, or give its path: --python PATH")
    if "No space left" in said:
        return UserError(f"no space is left in the home on {to.name} ({line})", do="make room there")
    if "SyntaxError" in said:
        return UserError(f"{to.python} on {to.name} is too old ({line})", do="--python PATH of 3.11 or newer")
    return Unreachable(f"the agent on {to.name} ended with {code} ({line})")


def _result(told: dict[str, Any]) -> Any:
    if "refused" in told:
        refused = told["refused"]
        raise UserError(refused["what"], looked_for=refused["looked_for"], do=refused["do"])
    if "fault" in told:
        raise RuntimeError(f"the agent failed:\n{told['fault']}")
    return told["result"]
