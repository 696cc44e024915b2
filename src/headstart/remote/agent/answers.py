"""The requests of one connection, and their answers."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import select
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any, BinaryIO

from .common import (
    CHUNK,
    MARKER,
    PROTOCOL,
    Refused,
    as_refusal,
    entry,
    free,
    home,
    part_of,
    read_json,
    sha256,
    within,
    write_json,
)
from .state import condition, is_alive, progress, tail, take

PATIENCE = 2.0  # seconds that a lock is waited for
IDLE = 300  # seconds without a request after which a client that holds a lock counts as gone
GRACE = ((signal.SIGINT, 30.0), (signal.SIGTERM, 10.0), (signal.SIGKILL, 10.0))
SMALL = ("draft", "export", "scores")  # artifacts that are fetched without being asked for
LOOSE = ("report.html", "scores.json", "run.json", "events.jsonl")
MANIFEST = "manifest.json"


class Agent:
    """Answers the requests of one connection. `base`: the folder of all runs; `root`: of the one that `open` named."""

    def __init__(self, asked: BinaryIO, answers: BinaryIO) -> None:
        self.asked, self.answers = asked, answers
        self.base = self.root = Path()
        self.shipping: int | None = None

    def serve(self) -> None:
        self.tell({"protocol": PROTOCOL, "python": list(sys.version_info[:3])}, MARKER)
        while True:
            if self.shipping is not None and not select.select([self.asked], [], [], IDLE)[0]:
                return
            line = self.asked.readline()
            if not line.endswith(b"\n"):  # the client is gone
                return
            self.answer(json.loads(line))

    def answer(self, request: dict[str, Any]) -> None:
        try:
            self.tell({"result": getattr(self, "do_" + request.pop("op"))(**request)})
        except Refused as refused:
            self.tell({"refused": refused.told})
        except BrokenPipeError:
            raise
        except OSError as error:
            self.tell({"refused": as_refusal(error, self.base).told})
        except Exception:
            self.tell({"fault": traceback.format_exc()})

    def tell(self, value: dict[str, Any], before: bytes = b"") -> None:
        self.answers.write((b"\n" + before if before else b"") + json.dumps(value).encode() + b"\n")
        self.answers.flush()

    # --- the run's folder ---

    def do_open(self, folder: str, name: str, origin: dict[str, str], create: bool) -> dict[str, Any]:
        self.base = home(folder)
        self.root = self.base / "runs" / name
        if not (self.root / "origin.json").exists():
            if not create:
                raise Refused(f"there is no run {name} in {self.base}", do="the same command without options starts it")
            self.root.mkdir(parents=True, exist_ok=True)
            write_json(self.root / "origin.json", origin)
        owner = read_json(self.root / "origin.json")
        if owner != origin:
            raise Refused(
                f"{self.root} belongs to another run",
                looked_for=f"one begun from {told(origin)}; it was begun from {told(owner)}",
                do="give this one a name of its own: --name NAME (or delete origin.json there to take that one over)",
            )
        return self.do_status()

    def do_lock(self, session: str) -> None:
        """Only one client ships at a time. A connection of the same session that still hangs on is ended."""
        if self.shipping is not None:
            return
        path = self.root / ".shipping"
        mine = {"session": session, "node": platform.node(), "pid": os.getpid()}
        give_up = time.monotonic() + PATIENCE
        while True:
            handle = take(path)
            if handle is not None:
                os.ftruncate(handle, 0)
                os.write(handle, json.dumps(mine).encode())
                self.shipping = handle
                return
            holder = read_json(path, {})
            if (holder.get("session"), holder.get("node")) == (session, mine["node"]):
                os.kill(holder["pid"], signal.SIGKILL)
            elif time.monotonic() > give_up:
                raise Refused(f"another client is shipping {self.root} at this moment", do="wait for it, or end it")
            time.sleep(0.1)

    # --- files to here ---

    def do_compare(self, files: dict[str, dict[str, Any]], prune: list[str]) -> dict[str, Any]:
        """Which of the files (by path under the base) are not here yet, with how many bytes of each are."""
        if is_alive(self.root):
            raise Refused(f"a run is going on in {self.root}", do="--status shows it, --stop ends it")
        known = read_json(self.root / ".shipped.json", {})
        have = {name: seen for name in files if (seen := self.seen(name, known)) is not None}
        for folder in prune:
            self.prune(self.base / folder, files)
        write_json(self.root / ".shipped.json", have)
        missing = {name: want for name, want in files.items() if name not in have or have[name][2] != want["sha256"]}
        parts = {name: part_of(self.base / name, want["sha256"]) for name, want in missing.items()}
        return {
            "missing": {name: part.stat().st_size if part.exists() else 0 for name, part in parts.items()},
            "free": free(self.base),
        }

    def seen(self, name: str, known: dict[str, list[Any]]) -> list[Any] | None:
        """Size, time of change and SHA-256 of a file; the last is only computed when the others are not as known."""
        path = within(self.base, name)
        if not path.is_file():
            return None
        found = path.stat()
        stamp = [found.st_size, found.st_mtime_ns]
        return known[name] if known.get(name, [])[:2] == stamp else [*stamp, sha256(path)]

    def prune(self, folder: Path, files: dict[str, dict[str, Any]]) -> None:
        wanted = {self.base / name for name in files}
        parts = {part_of(self.base / name, want["sha256"]) for name, want in files.items()}
        for path in [path for path in folder.rglob("*") if path.is_file() and path not in wanted | parts]:
            path.unlink()

    def do_put(self, files: list[dict[str, Any]]) -> None:
        """Files whose bytes follow the request, each from `offset` on of what an earlier attempt left."""
        try:
            for wanted in files:
                self.receive(wanted)
        except (Refused, OSError) as error:
            refused = error if isinstance(error, Refused) else as_refusal(error, self.base)
            self.tell({"refused": refused.told})
            raise SystemExit(1) from None  # the bytes that still come are not read

    def receive(self, wanted: dict[str, Any]) -> None:
        path = within(self.base, wanted["path"])
        path.parent.mkdir(parents=True, exist_ok=True)
        part, left = part_of(path, wanted["sha256"]), wanted["bytes"] - wanted["offset"]
        with part.open("ab") as file:
            file.truncate(wanted["offset"])
            while left:
                alive = select.select([self.asked], [], [], IDLE)[0]
                data = self.asked.read(min(CHUNK, left)) if alive else b""
                if not data:
                    raise SystemExit(0)  # the client is gone; what has arrived stays for the next attempt
                file.write(data)
                left -= len(data)
            file.flush()
            os.fsync(file.fileno())
        if sha256(part) != wanted["sha256"]:
            part.unlink()
            raise Refused(f"{path} did not arrive as it was sent", do="run the same command again")
        part.replace(path)

    # --- the run itself ---

    def do_exists(self, path: str) -> bool:
        return home(path).exists()

    def do_start(self, job: dict[str, Any]) -> dict[str, Any]:
        """Start the job unless it runs; it belongs to no connection."""
        handle = take(self.root / ".alive", patience=PATIENCE)
        if handle is None:
            return self.do_status()
        log = self.root / "log.txt"
        begun = log.stat().st_size if log.exists() else 0
        write_json(self.root / "job.json", job)
        state = {"phase": "starting", "began": time.time(), "log": begun, "inputs": job["inputs"], "code": job["code"]}
        write_json(self.root / "state.json", state)
        with log.open("ab") as output:
            subprocess.Popen(
                [sys.executable, str(Path(sys.argv[0]).absolute()), "supervise", str(self.root), str(handle)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                pass_fds=(handle,),
            )
        os.close(handle)
        if self.shipping is not None:
            os.close(self.shipping)
            self.shipping = None
        return self.do_status()

    def do_status(self) -> dict[str, Any]:
        state = read_json(self.root / "state.json", None)
        found = {
            "state": condition(self.root, state),
            "root": str(self.root),
            "free": free(self.root),
            "now": time.time(),
        }
        end, lines = tail(self.root / "log.txt", (state or {}).get("log", 0))
        return {**found, **(state or {}), "end": end, "tail": lines, **progress(self.root / "run" / "events.jsonl")}

    def do_follow(self, offset: int) -> dict[str, Any]:
        """Tell what the log gets until the run has ended; returns its status."""
        log = self.root / "log.txt"
        while True:
            over = not is_alive(self.root)
            offset = self.tell_log(log, offset, whole=over)
            if over:
                return self.do_status()
            if select.select([self.asked], [], [], 0.3)[0]:
                raise SystemExit(0)  # a client that follows asks nothing: it is gone

    def tell_log(self, log: Path, offset: int, whole: bool) -> int:
        with log.open("rb") as file:
            file.seek(offset)
            data = file.read()
        if not whole:
            data = data[: data.rfind(b"\n") + 1]
        if data:
            self.tell({"note": {"log": data.decode("utf-8", "replace"), "offset": offset + len(data)}})
        return offset + len(data)

    def do_stop(self) -> dict[str, Any]:
        """End the run as Ctrl-C would, then less kindly. It can be continued."""
        for number, seconds in GRACE:
            if not is_alive(self.root):
                break
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.group(), number)
            give_up = time.monotonic() + seconds
            while is_alive(self.root) and time.monotonic() < give_up:
                time.sleep(0.1)
        if is_alive(self.root):
            raise Refused(f"{self.root} does not end", do="look at its processes there")
        state = read_json(self.root / "state.json", {})
        if state and state.get("phase") != "ended":  # its supervisor was killed, too
            write_json(self.root / "state.json", {**state, "phase": "ended", "stopped": True, "ended": time.time()})
        return self.do_status()

    def group(self) -> int:
        """The process group of the run: of its supervisor, which writes its id down first of all."""
        give_up = time.monotonic() + 10
        while time.monotonic() < give_up:
            state = read_json(self.root / "state.json", {})
            if "pid" in state:
                return int(state["pid"])
            time.sleep(0.05)
        raise Refused(f"{self.root} is only starting", do="stop it again")

    # --- files from here ---

    def do_list(self, everything: bool) -> dict[str, Any]:
        """Whole artifacts with their manifests, and loose files with their checksums; paths are under the run directory."""
        run = self.root / "run"
        found = {path.parent.name: path for path in run.glob("*/" + MANIFEST) if not path.parent.name.startswith(".")}
        wanted = [name for name in sorted(found) if everything or name in SMALL]
        return {
            "artifacts": {name: found[name].read_text(encoding="utf-8") for name in wanted},
            "files": {name: entry(run / name) for name in LOOSE if (run / name).is_file()},
            "left": {name: manifest_bytes(found[name]) for name in sorted(found.keys() - set(wanted))},
        }

    def do_get(self, files: list[dict[str, Any]]) -> None:
        """Tell size and bytes of each file, from `offset` up to `bytes`: a log may have grown since it was listed."""
        for wanted in files:
            path = within(self.root / "run", wanted["path"])
            size = path.stat().st_size if path.is_file() else -1
            if size < wanted["bytes"]:
                raise Refused(f"{path} has changed while it was fetched", do="fetch again")
            with path.open("rb") as file:
                file.seek(wanted["offset"])
                self.send(file, wanted["path"], wanted["bytes"] - wanted["offset"])

    def send(self, file: BinaryIO, name: str, count: int) -> None:
        self.tell({"note": {"file": name, "bytes": count}})
        while count:
            data = file.read(min(CHUNK, count))
            if not data:
                raise SystemExit(1)  # cut short under our hands: the client hears less than was promised
            self.answers.write(data)
            count -= len(data)
        self.answers.flush()


def manifest_bytes(path: Path) -> int:
    return sum(one["bytes"] for one in read_json(path)["files"].values())


def told(origin: dict[str, str]) -> str:
    return f"{origin.get('file')} on {origin.get('machine')}"
