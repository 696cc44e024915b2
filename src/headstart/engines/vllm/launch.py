"""Starting, asking and stopping the process that holds vLLM (host.py), from ours, which never imports vLLM.

The host gets a process group of its own, so that Ctrl-C reaches us alone and one signal ends it with all its workers; when we
die in whatever way, the pipe ends and it ends itself. Its log, and the states it hands over, are in a folder that goes with
it. `headstart` is given to it by a folder of one link, so that an environment with another vLLM needs no install and sees
nothing else of ours; a distribution beside the link announces the plugin to vLLM.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import headstart
from headstart.errors import UserError

MEMORY = Path("/dev/shm")
MEMORY_FREE = 4 << 30  # bytes that must be free there (containers often have 64 MiB); else the temporary folder serves
TAIL = 20  # lines of the log that an error shows
LEAVE_WITHIN = 20.0  # seconds for the host to end after it was asked to
CLEAN_WITHIN = 6.0  # and when its commands end
GONE_WITHIN = 3.0  # for what is left of its process group after a signal

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine in the host itself, so that each of its steps is ours
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # two processes on one machine would be bound to the same cores
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",  # the target is a folder by now
    "PYTHONUNBUFFERED": "1",
}


class Refused(Exception):
    """A command failed in the host, which goes on; `trace` is its traceback."""

    def __init__(self, what: str, trace: str = "") -> None:
        super().__init__(what)
        self.trace = trace


class Host:
    """A running host. Commands and events are described in host.py.

    python: the interpreter of the environment that holds vLLM; ours when None. environment: variables laid over ours.
    """

    def __init__(self, python: str | None = None, environment: Mapping[str, str] | None = None) -> None:
        interpreter = python or sys.executable
        if shutil.which(interpreter) is None:
            raise UserError(f"target.python = {interpreter!r} is no program", looked_for="the Python that has vLLM")
        self.scratch = _scratch()
        self.log = self.scratch / "vllm.log"
        commands, self._commands = os.pipe()
        self._events, events = os.pipe()
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [interpreter, "-m", "headstart.engines.vllm.host", str(commands), str(events), str(self.scratch)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=(commands, events),
                env=_environment(self.scratch, environment or {}),
                cwd=self.scratch,
                start_new_session=True,
            )
        os.close(commands)
        os.close(events)
        self._write: IO[str] = os.fdopen(self._commands, "w", encoding="utf-8")
        self._read: IO[str] = os.fdopen(self._events, encoding="utf-8")

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, command: str, **fields: Any) -> dict[str, Any]:
        """The results of a command. Raises as `events` does."""
        result: dict[str, Any] = {}
        for event in self.events(command, **fields):
            result = event
        return result

    def events(self, command: str, **fields: Any) -> Iterator[dict[str, Any]]:
        """The events of a command as they come, `done` the last. An iterator that is left early closes the host.

        Raises:
            Refused: the command failed, the host goes on.
            UserError: the host has died; shows the end of its log.
        """
        self._send({"do": command, **fields})
        finished = False
        try:
            while not finished:
                event = self._next(command)
                finished = event["event"] in ("done", "failed")
                if event["event"] == "failed":
                    raise Refused(event["what"], event["trace"])
                yield event
        finally:
            if not finished:
                self.kill()

    def close(self) -> None:
        """End the host and remove its folder. Calling it again does nothing."""
        if self._process.poll() is None:
            try:
                self._send({"do": "close"})
                self._process.wait(LEAVE_WITHIN)
            except (UserError, subprocess.TimeoutExpired):
                pass
        self.kill()

    def kill(self) -> None:
        """End the host, whatever it is doing: it cleans up when its commands end, and is given some seconds for it."""
        for pipe in (self._write, self._read):
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(CLEAN_WITHIN)
        for number in (signal.SIGTERM, signal.SIGKILL):  # workers outlive a host that crashed
            if self._group_gone(number):
                break
        self._process.wait()
        shutil.rmtree(self.scratch, ignore_errors=True)

    def _group_gone(self, number: signal.Signals) -> bool:
        """Signal the process group and wait a little; True when nobody is left in it."""
        deadline = time.monotonic() + GONE_WITHIN
        try:
            os.killpg(self._process.pid, number)
            while time.monotonic() < deadline:
                self._process.poll()
                os.killpg(self._process.pid, 0)
                time.sleep(0.02)
        except ProcessLookupError:
            return True
        return False

    def tail(self) -> str:
        """The end of the log, or that there is none."""
        try:
            lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            return f"(none: {self.log} is gone)"
        return "\n".join(lines[-TAIL:]) or "(none: it ended before it wrote a line)"

    def _send(self, command: dict[str, Any]) -> None:
        try:
            self._write.write(json.dumps(command) + "\n")
            self._write.flush()
        except (BrokenPipeError, ValueError):
            raise self._died(command["do"]) from None

    def _next(self, command: str) -> dict[str, Any]:
        try:
            line = self._read.readline()
        except ValueError:
            line = ""
        if not line.endswith("\n"):
            raise self._died(command)
        return json.loads(line)

    def _died(self, command: str) -> UserError:
        tail = self.tail()
        self.kill()
        code = self._process.returncode
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return UserError(
            f"vLLM ended ({how}) during {command}; the last lines of its log:\n{tail}",
            do="once the reason is gone, the same command continues where it stopped",
        )


def _scratch() -> Path:
    """A folder in memory where there is one, of our process; what processes that are gone left is removed.

    Containers may share /dev/shm and yet count processes each for themselves: of another's we cannot tell who lives.
    """
    roomy = os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free >= MEMORY_FREE
    base = MEMORY if roomy else Path(tempfile.gettempdir())
    ours = f"headstart-{_namespace()}-"
    for old in base.glob(f"{ours}*-*"):
        owner = old.name.split("-")[2]
        if owner.isdigit() and not Path(f"/proc/{owner}").exists() and os.access(old, os.W_OK):
            shutil.rmtree(old, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"{ours}{os.getpid()}-", dir=base))


def _namespace() -> int:
    """The number of the namespace that our process ids belong to."""
    return Path("/proc/self/ns/pid").stat().st_ino


def _environment(scratch: Path, changes: Mapping[str, str]) -> dict[str, str]:
    """Ours, with what vLLM needs; a VLLM_ variable that the user has set stays."""
    packages = scratch / "packages"
    _link_package(packages)
    found = {**ENVIRONMENT, **os.environ, **changes}
    found["VLLM_ENABLE_V1_MULTIPROCESSING"] = ENVIRONMENT["VLLM_ENABLE_V1_MULTIPROCESSING"]
    found["PYTHONPATH"] = os.pathsep.join(filter(None, [str(packages), found.get("PYTHONPATH", "")]))
    return found


def _link_package(packages: Path) -> None:
    info = packages / f"headstart-{headstart.__version__}.dist-info"
    info.mkdir(parents=True)
    (packages / "headstart").symlink_to(Path(headstart.__file__).parent, target_is_directory=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: headstart\nVersion: {headstart.__version__}\n")
    (info / "entry_points.txt").write_text(
        "[vllm.general_plugins]\nheadstart = headstart.engines.vllm.plugin:register\n"
    )
