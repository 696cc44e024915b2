"""The host process and its protocol, with a stand-in for vLLM: streams, refusals, deaths, and nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fixtures_vllm import make_fake_vllm
from headstart.engines.vllm import handover, launch
from headstart.engines.vllm.launch import Host, Refused
from headstart.errors import UserError

CAPTURE = {"rung": "cache", "boundaries": [1, 2]}


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return make_fake_vllm(tmp_path_factory.mktemp("packages"))


@pytest.fixture
def host(environment: dict[str, str]) -> Iterator[Host]:
    running = Host(environment=environment)
    yield running
    running.close()


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def until(done: Callable[[], bool], seconds: float = 10) -> bool:
    deadline = time.monotonic() + seconds
    while not done() and time.monotonic() < deadline:
        time.sleep(0.02)
    return done()


def ask(*prompts: list[int]) -> list[dict[str, Any]]:
    return [{"id": f"p{number}", "ids": ids} for number, ids in enumerate(prompts)]


def test_answers_stream_and_growth_adds_up(host: Host) -> None:
    host.ask("start", arguments={"model": "m"})
    sampling = {"max_tokens": 5, "stop_token_ids": [33]}
    events = list(host.events("generate", requests=ask([10], [30], [20]), sampling=sampling))
    finished = {event["id"]: event for event in events if event["event"] == "finished"}
    assert finished["p0"]["ids"] == [11, 12, 13, 14, 15]
    assert (finished["p1"]["ids"], finished["p1"]["finish"]) == ([31, 32, 33], "stop")
    assert finished["p2"]["finish"] == "length"
    grown = [event["tokens"] for event in events if event["event"] == "grew"]
    assert {name: sum(part.get(name, 0) for part in grown) for name in finished} == {"p0": 5, "p1": 3, "p2": 5}
    assert events[-1] == {"event": "done"}
    assert next(event["id"] for event in events if event["event"] == "finished") == "p1"  # as they finish


def test_a_refused_request_does_not_lose_the_others(host: Host) -> None:
    host.ask("start", arguments={"model": "m"})
    events = list(host.events("generate", requests=ask([1], [2] * 9, [3]), sampling={"max_tokens": 2}))
    assert [event["id"] for event in events if event["event"] == "finished"] == ["p0", "p2"]
    (refused,) = [event for event in events if event["event"] == "refused"]
    assert refused == {"event": "refused", "id": "p1", "why": "ValueError: prompt of 9 tokens"}


def test_states_come_as_files_and_a_lost_one_is_told(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    host.ask("start", arguments={"model": "m"}, capture=CAPTURE)
    captured = {}
    for event in host.events("capture", requests=ask([1, 2], [3]), flush_within=1):
        if event["event"] == "captured":
            captured[event["id"]] = Path(event["path"]).read_bytes()
            Path(event["path"]).unlink()
    assert captured == {"p0": b"2", "p1": b"1"}
    *_, refused, done = host.events("capture", requests=ask([5], [8]), flush_within=1)
    assert (refused["id"], done["event"]) == ("p1", "done")
    assert "were not written within 1 s" in refused["why"]


def test_a_slow_reader_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case C27: files that nobody has read yet do not fill the memory."""
    told: list[str] = []
    files = handover.Files(tmp_path, lambda event, **fields: told.append(fields["id"]))
    path = files.expect("a")
    path.write_bytes(b"x" * 100)
    files.finished("a")
    assert files.announce() == 0
    monkeypatch.setattr(handover, "UNREAD", 99)
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 3:
            path.unlink()

    monkeypatch.setattr(handover.time, "sleep", sleep)
    files.wait_for_room()
    assert len(slept) == 3
    assert told == ["a"]


def test_a_failed_command_says_why_and_the_host_goes_on(host: Host) -> None:
    with pytest.raises(Refused, match="RuntimeError: it cannot be loaded") as refused:
        host.ask("start", arguments={"model": "broken"})
    assert "for many reasons" in refused.value.trace
    host.ask("start", arguments={"model": "m"})
    with pytest.raises(Refused, match="was not started to capture"):
        host.ask("capture", requests=ask([1]))
    assert host.ask("metrics")["counters"] == {"vllm:spec_decode_num_drafts": 3, "vllm:spec_decode_x": [1, 2]}


def test_a_dead_engine_ends_with_its_log(host: Host) -> None:
    host.ask("start", arguments={"model": "m"})
    with pytest.raises(UserError, match=r"vLLM ended \(signal SIGKILL\) during generate") as died:
        list(host.events("generate", requests=ask([13]), sampling={"max_tokens": 1}))
    assert "the last words of the engine" in died.value.what
    assert "continues" in str(died.value.do)
    assert not host.scratch.exists()
    with pytest.raises(UserError, match="vLLM ended"):
        host.ask("metrics")


def test_leaving_a_stream_early_ends_the_host(host: Host) -> None:
    """Whoever stops reading (an error, Ctrl-C) leaves no engine that goes on for hours."""
    host.ask("start", arguments={"model": "m"})
    stream = host.events("generate", requests=ask([7], [20]), sampling={"max_tokens": 50})
    next(stream)
    stream.close()
    assert not alive(host.pid)


def test_closing_leaves_nothing(host: Host) -> None:
    host.ask("start", arguments={"model": "m"})
    host.close()
    assert not alive(host.pid)
    assert not host.scratch.exists()
    host.close()


PARENT = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a suite in a shell's background inherits that it is ignored
from headstart.engines.vllm.launch import Host
host = Host(environment={"PYTHONPATH": sys.argv[1]})
host.ask("start", arguments={"model": "m"})
print(host.pid, host.scratch, flush=True)
list(host.events("generate", requests=[{"id": "a", "ids": [7]}], sampling={"max_tokens": 1000}))
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_a_killed_parent_leaves_no_host_behind(environment: dict[str, str], how: signal.Signals) -> None:
    command = [sys.executable, "-c", PARENT, environment["PYTHONPATH"]]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as parent:
        assert parent.stdout is not None
        pid, scratch = parent.stdout.readline().split()
        time.sleep(0.3)
        parent.send_signal(how)
    assert until(lambda: not alive(int(pid)))
    assert until(lambda: not Path(scratch).exists())


def test_a_parent_that_is_killed_within_a_command_leaves_no_host_behind(environment: dict[str, str]) -> None:
    running = Host(environment=environment)
    running._write.write('{"do": "generate", "requests": [')
    running._write.close()
    try:
        assert until(lambda: running._process.poll() is not None)
        assert not running.scratch.exists()
    finally:
        running.kill()


def test_events_that_nobody_reads_end_the_host(environment: dict[str, str]) -> None:
    """A killed parent may be noticed by the thread that tells before the one that listens: it too leaves nothing behind."""
    running = Host(environment=environment)
    running._read.close()
    try:
        running._send({"do": "facts"})
        assert until(lambda: running._process.poll() is not None)
        assert not running.scratch.exists()
    finally:
        running.kill()


def test_an_id_that_is_asked_for_twice_is_refused(host: Host) -> None:
    host.ask("start", arguments={"model": "m"}, capture=CAPTURE)
    with pytest.raises(Refused, match="the id p0 was asked for twice"):
        list(host.events("capture", requests=[*ask([1]), *ask([2])], flush_within=1))


def test_what_a_dead_process_left_in_memory_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "MEMORY", tmp_path)
    gone = subprocess.Popen(["true"])
    gone.wait()
    left = tmp_path / f"headstart-{launch._namespace()}-{gone.pid}-abc"
    left.mkdir()
    ours = tmp_path / f"headstart-{launch._namespace()}-{os.getpid()}-abc"
    ours.mkdir()
    containers = tmp_path / f"headstart-{launch._namespace() + 1}-{gone.pid}-abc"  # who shares /dev/shm with us
    containers.mkdir()
    assert launch._scratch().parent == tmp_path
    assert not left.exists()
    assert ours.exists()
    assert containers.exists()


def test_a_small_memory_folder_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Docker gives /dev/shm 64 MiB."""
    monkeypatch.setattr(launch, "MEMORY", tmp_path)
    monkeypatch.setattr(launch, "MEMORY_FREE", 1 << 60)
    made = launch._scratch()
    made.rmdir()
    assert made.parent == Path(tempfile.gettempdir())


def test_a_python_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_scratch", lambda: pytest.fail("a folder is left behind"))
    with pytest.raises(UserError, match="no program"):
        Host(python="/nowhere/python")


def test_the_host_sees_headstart_and_its_plugin_alone(environment: dict[str, str]) -> None:
    """An environment with another vLLM has no headstart installed."""
    running = Host(environment=environment)
    try:
        packages = running.scratch / "packages"
        assert sorted(path.name.split("-")[0] for path in packages.iterdir()) == ["headstart", "headstart"]
        assert (
            "headstart.engines.vllm.plugin:register" in next(packages.glob("*.dist-info/entry_points.txt")).read_text()
        )
    finally:
        running.close()
