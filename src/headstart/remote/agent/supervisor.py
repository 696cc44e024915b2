"""The run, in a session of its own: environment, doctor, stages, one after the other."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import traceback
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from .common import Refused, as_refusal, home, read_json, say, write_json
from .state import take

NEWEST, OLDEST = (3, 13), (3, 11)  # Pythons that a new environment is made with
# Version of a Python, and which of the packages or modules named it lacks.
PROBE = """
import importlib.util, json, sys
from importlib import metadata
def lacks(name):
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return importlib.util.find_spec(name) is None
print(json.dumps([list(sys.version_info[:2]), [name for name in sys.argv[1:] if lacks(name)]]))
"""


class Supervisor:
    """Does the job of a run step by step, and writes down how far it got."""

    def __init__(self, root: Path, lock: int) -> None:
        self.root, self.base, self.lock = root, root.parent.parent, lock
        self.job = read_json(root / "job.json")
        self.state = {**read_json(root / "state.json"), "pid": os.getpid()}
        write_json(root / "state.json", self.state)
        self.stopped = False
        for number in (signal.SIGINT, signal.SIGTERM):  # not ignored, whatever we inherited: children die of them
            signal.signal(number, self.stop)

    def stop(self, *_: Any) -> None:
        self.stopped = True

    def work(self) -> None:
        try:
            code, refusal = self.steps(), None
        except Refused as refused:
            code, refusal = 2, refused.told
        except OSError as error:
            code, refusal = 2, as_refusal(error, self.base).told
        except Exception:
            say(traceback.format_exc())
            code, refusal = 1, None
        ended = {"phase": "ended", "step": self.state["phase"], "exit": code, "refused": refusal, "ended": time.time()}
        write_json(self.root / "state.json", {**self.state, **ended, "stopped": self.stopped})

    def steps(self) -> int:
        self.enter("environment")
        site = unpack(self.base / self.job["wheel"])
        python = given(self.job) if self.job["python"] else made(self.base, self.job, self.call)
        where = {"PYTHONPATH": os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")]))}
        for verb in self.job["verbs"]:
            if self.stopped:
                return 130
            self.enter(verb[0])
            code = self.call([python, "-u", "-m", "headstart", *verb], **where)
            if code:
                return code
        return 0

    def enter(self, phase: str) -> None:
        self.state["phase"] = phase
        write_json(self.root / "state.json", self.state)

    def call(self, command: list[str], **environment: str) -> int:
        """Run a program whose output is the log's. Returns what a shell would call its exit status."""
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            cwd=str(self.root),
            env={**os.environ, **environment},
            pass_fds=(self.lock,),
        )
        code = child.wait()
        return 128 - code if code < 0 else code


def given(job: dict[str, Any]) -> str:
    """The interpreter of an environment that is there, when it has all that is needed."""
    # Not resolved: a virtual environment is a link to some Python, and lost when the link is followed.
    python = str(home(job["python"]))
    found = probe(python, job["needs"])
    if found is None:
        raise Refused(f"{python} is no Python that can be run", "an interpreter there", "correct --python")
    version, missing = found
    if version < list(OLDEST):
        raise Refused(
            f"{python} is Python {version[0]}.{version[1]}", "3.11 or newer", "give another one: --python PATH"
        )
    if missing:
        packages = sorted(job["needs"][name] for name in missing)
        what = f"the environment of {python} lacks {', '.join(packages)}"
        raise Refused(what, do=f"there: {python} -m pip install {' '.join(map(repr, packages))}")
    return python


def made(base: Path, job: dict[str, Any], call: Callable[[list[str]], int]) -> str:
    """The interpreter of a virtual environment with the packages needed, made when it is not there yet."""
    folder = base / "envs" / job["environment"]
    python, ready = str(folder / "bin" / "python"), folder / ".ready"
    folder.mkdir(parents=True, exist_ok=True)
    handle = take(folder / ".lock", patience=3600)  # another run may be making it
    if handle is None:
        raise Refused(f"another run has been making {folder} for an hour", do="see what it waits for")
    try:
        if ready.exists():
            return python
        say(f"making an environment in {folder}")
        if call([newest(), "-m", "venv", str(folder)]):
            raise Refused(
                "no virtual environment could be made: see the log", do="install Python's venv there (python3-venv)"
            )
        installer = [python, "-m", "pip", "install", "--disable-pip-version-check", "--progress-bar", "off"]
        if call([*installer, *job["requirements"]]):
            raise Refused(
                "the packages could not be installed: see the log", do="mend it, or give an environment: --python PATH"
            )
        ready.touch()
        return python
    finally:
        os.close(handle)


def newest() -> str:
    """A Python to make an environment with: the newest of those that the packages are built for."""
    names = [f"python3.{minor}" for minor in range(NEWEST[1], OLDEST[1] - 1, -1)]
    for name in [*names, "python3", sys.executable]:
        path = shutil.which(name)
        found = probe(path, ["venv", "ensurepip"]) if path else None
        if found and list(OLDEST) <= found[0] <= list(NEWEST) and not found[1]:
            return str(path)
    raise Refused(
        "there is no Python 3.11 or newer",
        ", ".join([*names, "python3"]),
        "install one, or give its path: --python PATH",
    )


def probe(python: str, modules: Iterable[str]) -> tuple[list[int], list[str]] | None:
    """Version of an interpreter, and which modules it lacks; None when it cannot be run."""
    try:
        ended = subprocess.run(
            [python, "-c", PROBE, *modules], stdin=subprocess.DEVNULL, capture_output=True, check=True
        )
        version, missing = json.loads(ended.stdout.splitlines()[-1])
    except (OSError, subprocess.CalledProcessError, ValueError, IndexError):
        return None
    return version, missing


def unpack(wheel: Path) -> Path:
    """The folder with the package out of its wheel: no installation, so one environment serves any version of it."""
    site = wheel.parent / "site"
    if not site.exists():
        work = wheel.parent / f"site.{os.getpid()}"
        with zipfile.ZipFile(str(wheel)) as archive:
            archive.extractall(str(work))
        try:
            work.rename(site)
        except OSError:
            if not site.exists():  # else another run was quicker
                raise
            shutil.rmtree(str(work), ignore_errors=True)
    return site
