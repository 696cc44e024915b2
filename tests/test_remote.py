"""Runs on another machine, over a real sshd on loopback: shells, odd paths, broken connections, refusals, a whole run."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import fixtures_ssh
from fixtures_models import save_llama
from fixtures_ssh import SSHD, Sshd
from fixtures_text import END, make_tokenizer, save_tokenizer
from headstart import artifact, cli, events, files, pipeline
from headstart.errors import GateError, UserError
from headstart.events import Events
from headstart.remote import command, fetch, ssh, there, wheel
from headstart.remote.command import Options
from headstart.remote.there import There

if SSHD is None:
    assert not os.environ.get("CI"), "openssh-server is missing"
    pytest.skip("there is no sshd: apt-get install openssh-server", allow_module_level=True)

SHELLS = ("sh", "bash", "zsh", "fish", "tcsh")
ODD = 'it\'s "odd" $HOME `id` ünï'
ORIGIN = {"machine": "here", "file": "run.toml"}


@pytest.fixture(scope="module")
def sshd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sshd]:
    folder = tmp_path_factory.mktemp("sshd")
    server = fixtures_ssh.start(folder / "server", folder / ODD)
    yield server
    server.stop()


@pytest.fixture
def shell(sshd: Sshd) -> Iterator[Shell]:
    """Changes the login shell, and with keywords the environment, for one test."""

    def change(words: str, **environment: str) -> None:
        path = f"{sshd.folder}/bin:/usr/bin:/bin"
        fixtures_ssh.set_shell(sshd.folder, sshd.home, words, {"PATH": path, "OMP_NUM_THREADS": "1", **environment})

    yield change
    change("sh")


Shell = Callable[..., None]


@pytest.fixture(autouse=True)
def impatience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(there, "FIRST_WAIT", 0.1)


Open = Callable[..., There]


@pytest.fixture
def opened(sshd: Sshd, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Open]:
    """Opens runs there, each test in a folder of its own; what they say is in `said`."""
    made: list[There] = []

    def make(name: str = "run", *, create: bool = True, **changes: Any) -> There:
        to = ssh.host("there", sshd.config, changes.pop("python", None))
        folder = changes.pop("folder", f"of {request.node.name[:60].replace('[', '(')}")
        made.append(There(to, folder, name, changes.pop("origin", ORIGIN), Events(tmp_path / "said", quiet=True)))
        made[-1].open(create=create)
        return made[-1]

    yield make
    for one in made:
        if one.status.get("state") == "running":
            one.stop()
        one.close()


def said(tmp_path: Path) -> list[str]:
    return [event["text"] for event in events.read(tmp_path / "said")]


def at(one: There) -> Path:
    return Path(one.status["root"])


def wait_until(true: Callable[[], Any], seconds: float = 60) -> None:
    give_up = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < give_up
        time.sleep(0.02)


# --- connections ---


@pytest.mark.parametrize("name", SHELLS)
def test_any_login_shell_does(opened: Open, sshd: Sshd, shell: Shell, tmp_path: Path, name: str) -> None:
    if shutil.which(name) is None:
        assert not os.environ.get("CI"), f"{name} is missing"
        pytest.skip(f"there is no {name}")
    shell(name)
    (tmp_path / ODD).write_text("content")
    one = opened()
    assert one.ship({f"runs/run/inputs/{ODD}/{ODD}": tmp_path / ODD}, "runs/run/inputs") == 7
    assert (at(one) / "inputs" / ODD / ODD).read_text() == "content"
    assert at(one).parent.parent.parent == sshd.home


def test_what_a_login_prints_is_skipped(opened: Open, sshd: Sshd, shell: Shell) -> None:
    noisy = sshd.folder / "noisy"
    noisy.write_text('#!/bin/sh\nprintf "Welcome!\\n{}\\nno end"\nexec sh "$@"\n')
    noisy.chmod(0o755)
    shell(str(noisy))
    assert opened().status["state"] == "new"


def test_through_a_jump_host_and_with_the_configuration_s_own_commands(sshd: Sshd) -> None:
    with sshd.config.open("a") as file:
        file.write("Host *\n    RequestTTY force\n    RemoteCommand echo hello\n")
    for name in ("there-by-jump", "there"):
        channel = ssh.Channel(ssh.host(name, sshd.config, None))
        assert channel.call("exists", path="~")
        channel.close()


@pytest.mark.parametrize(
    ("name", "python", "what"),
    [
        ("there-wrong-key", None, r"there-wrong-key refuses the login .*Permission denied"),
        ("there-gone", None, r"there-gone cannot be reached .*Connection refused"),
        ("nowhere.invalid", None, r"nowhere.invalid is not known .*Could not resolve"),
        ("there", "/no/such/python", r"there is no /no/such/python on there"),
        ("-oProxyCommand=true", None, r"is no host"),
        ("two words", None, r"is no host"),
    ],
)
def test_who_cannot_be_talked_to(sshd: Sshd, name: str, python: str | None, what: str) -> None:
    with pytest.raises(UserError, match=what) as refused:
        ssh.Channel(ssh.host(name, sshd.config, python))
    assert refused.value.do or refused.value.looked_for


def test_no_python_at_all(sshd: Sshd, shell: Shell) -> None:
    shell("/bin/sh", PATH="/nowhere")
    with pytest.raises(UserError, match="there is no python3 on there") as refused:
        ssh.Channel(ssh.host("there", sshd.config, None))
    assert "--python PATH" in str(refused.value)


def test_a_changed_host_key_and_a_broken_configuration(sshd: Sshd, tmp_path: Path) -> None:
    known = (sshd.folder / "known_hosts").read_text().split()
    (tmp_path / "known").write_text(f"{known[0]} {' '.join((sshd.folder / 'key.pub').read_text().split()[:2])}\n")
    other = tmp_path / "config"
    other.write_text(f"Host there\nUserKnownHostsFile {tmp_path}/known\n" + sshd.config.read_text())
    with pytest.raises(UserError, match="its host key"):
        ssh.Channel(ssh.host("there", other, None))
    other.write_text("Nonsense yes\n")
    with pytest.raises(UserError, match=r"cannot be looked up.*onfiguration option"):
        ssh.Channel(ssh.host("there", other, None))
    with pytest.raises(UserError, match="there is no ssh configuration"):
        ssh.host("there", tmp_path / "none", None)


def test_no_ssh_here(sshd: Sshd, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(UserError, match="there is no ssh on this machine"):
        ssh.Channel(ssh.host("there", sshd.config, None))


# --- shipping ---


def test_only_what_changed_is_shipped_again(opened: Open, tmp_path: Path) -> None:
    one = opened()
    wanted = {}
    for name in ("a", "b", "c"):
        (tmp_path / name).write_text(name * 10)
        wanted[f"runs/run/inputs/{name}"] = tmp_path / name
    assert one.ship(wanted, "runs/run/inputs") == 30
    assert one.ship(wanted, "runs/run/inputs") == 0
    (tmp_path / "b").write_text("B" * 10)
    del wanted["runs/run/inputs/c"]
    assert one.ship(wanted, "runs/run/inputs") == 10
    assert sorted(path.read_text() for path in (at(one) / "inputs").iterdir()) == ["B" * 10, "a" * 10]
    (at(one) / "inputs" / "a").write_text("damaged  !")
    assert one.ship(wanted, "runs/run/inputs") == 10


def test_a_connection_that_breaks_while_it_ships_is_made_again(
    opened: Open, sshd: Sshd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    big = tmp_path / "big"
    big.write_bytes(os.urandom(24 << 20))
    one, asked = opened(), []
    contents = there._contents

    def cutting(wanted: Any, plan: Any, progress: Any) -> Iterator[bytes]:
        asked.append([entry["offset"] for entry in plan])
        for number, data in enumerate(contents(wanted, plan, progress)):
            if len(asked) == 1 and number == 12:
                wait_until(lambda: any((at(one) / "inputs").glob(".*.part")))
                sshd.cut()
            yield data

    monkeypatch.setattr(there, "_contents", cutting)
    one.ship({"runs/run/inputs/big": big}, "runs/run/inputs")
    assert files.sha256_file(at(one) / "inputs" / "big") == files.sha256_file(big)
    assert asked[0] == [0]
    assert 0 < asked[1][0] < 24 << 20
    assert any("trying again" in line for line in said(tmp_path))


SMALL_DISK = """unshare -m sh -c 'mount -t tmpfs -o size=1m none "$HOME/small" && exec sh "$@"' sh"""


def test_a_full_disk_is_seen_before_and_while_shipping(
    opened: Open, sshd: Sshd, shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (sshd.home / "small").mkdir()
    trial = ["unshare", "-m", "mount", "-t", "tmpfs", "none", str(tmp_path)]
    if subprocess.run(trial, capture_output=True, check=False).returncode:
        pytest.skip("no file system can be mounted here")
    shell(SMALL_DISK)
    (tmp_path / "big").write_bytes(bytes(4 << 20))
    wanted = {"runs/run/inputs/big": tmp_path / "big"}
    with pytest.raises(UserError, match="is too full") as refused:
        opened(folder="small").ship(wanted, "runs/run/inputs")
    assert "MB for what is shipped; 1" in str(refused.value)
    monkeypatch.setattr(there, "MARGIN", -(1 << 30))
    with pytest.raises(UserError, match="no space is left on the disk of"):
        opened(folder="small").ship(wanted, "runs/run/inputs")


@pytest.mark.slow
def test_one_client_ships_at_a_time_and_its_own_dead_connection_is_no_hindrance(opened: Open, tmp_path: Path) -> None:
    first, second, again = opened(), opened(), opened()
    first.call("lock", session=first._session)
    with pytest.raises(UserError, match="another client is shipping"):
        second.call("lock", session=second._session)
    again.call("lock", session=first._session)  # as after a connection whose end the other side has not seen
    with pytest.raises(UserError, match="another client is shipping"):
        second.call("lock", session=second._session)


def test_runs_do_not_take_each_other_s_place(opened: Open) -> None:
    opened()
    assert opened("other").status["state"] == "new"
    with pytest.raises(UserError, match="belongs to another run") as refused:
        opened(origin={"machine": "here", "file": "other.toml"})
    assert "--name NAME" in str(refused.value)
    with pytest.raises(UserError, match="there is no run third"):
        opened("third", create=False)


# --- jobs ---

# A Python that works for a while where it is told to: at a verb `long`, or at any while there is a file `hold`.
SLOW = """#!/bin/sh
case "$*" in *headstart*long*) echo working; exec sleep 300;; esac
case "$*" in *headstart*run.toml) if [ -e "$HOME/hold" ]; then echo working; exec sleep 300; fi;; esac
exec {python} "$@"
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return wheel.build(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("slow") / "python of me"
    path.write_text(SLOW.format(python=sys.executable))
    path.chmod(0o755)
    return path


Job = Callable[..., dict[str, Any]]


@pytest.fixture
def job(built: Path, slow: Path) -> Job:
    def make(one: There, *verbs: tuple[str, ...], **changes: Any) -> dict[str, Any]:
        """Ship the wheel, and describe a job of these verbs in this environment."""
        one.ship({"wheels/1/headstart.whl": built}, "runs/run/inputs")
        plan = {"wheel": "wheels/1/headstart.whl", "code": "1", "inputs": "1", "verbs": verbs, "python": str(slow)}
        return plan | {"environment": "1", "requirements": [], "needs": {}} | changes

    return make


def test_a_job_runs_the_shipped_package_to_its_end(opened: Open, job: Job, tmp_path: Path) -> None:
    one = opened()
    one.start(job(one, ("--version",), ("config",)))
    end = one.follow(0)
    assert (end["state"], end["exit"], end["step"]) == ("finished", 0, "config")
    lines = said(tmp_path)
    assert "headstart 0" in lines[1]
    assert any("train.epochs" in line for line in lines)
    assert (at(one).parent.parent / "wheels" / "1" / "site" / "headstart" / "cli.py").exists()
    command.check_end(end, "there")


@pytest.mark.parametrize(
    ("verbs", "changes", "state", "code", "what"),
    [
        ((("doctor", "no-such.json"), ("config",)), {}, "failed", 2, "failed with exit code 2"),
        ((("config",),), {"python": "/no/such python"}, "failed", 2, "/no/such python is no Python that can be run"),
        (
            (("config",),),
            {"needs": {"no-such": "no-such>=2", "json": "x", "typer": "y"}},
            "failed",
            2,
            "lacks no-such>=2",
        ),
    ],
)
def test_a_job_that_fails_says_why(
    opened: Open, job: Job, verbs: Any, changes: dict[str, Any], state: str, code: int, what: str
) -> None:
    one = opened()
    one.start(job(one, *verbs, **changes))
    end = one.follow(0)
    assert (end["state"], end["exit"]) == (state, code)
    with pytest.raises(command.Ended, match=what) as ended:
        command.check_end(end, "there")
    assert ended.value.exit_code == code


ENCODER = {
    "model_type": "bert",
    "architectures": ["BertModel"],
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "vocab_size": 128,
    "max_position_embeddings": 256,
}


def test_doctor_s_stop_ends_the_job_before_the_run(opened: Open, job: Job, tmp_path: Path) -> None:
    (tmp_path / "model.json").write_text(json.dumps(ENCODER))
    one = opened()
    one.start(job(one, ("doctor", str(tmp_path / "model.json")), ("config",)))
    end = one.follow(0)
    assert (end["state"], end["exit"], end["step"]) == ("refused", 3, "doctor")
    with pytest.raises(command.Ended, match="doctor says stop") as ended:
        command.check_end(end, "there")
    assert ended.value.exit_code == 3
    assert any("stop" in line for line in end["tail"])


def test_a_job_outlives_its_connection_and_is_started_once(opened: Open, job: Job, sshd: Sshd, tmp_path: Path) -> None:
    one = opened()
    plan = job(one, ("long",))
    first = one.start(plan)
    wait_until(lambda: "working" in one.call("status")["tail"])
    sshd.cut()
    again = opened()
    assert again.status["state"] == "running"
    assert again.start(plan)["began"] == first["began"]
    end = again.stop()
    assert (end["state"], end["stopped"]) == ("stopped", True)
    assert not alive(end["pid"])
    assert again.start(job(again, ("config",)))["began"] > first["began"]
    assert again.follow(0)["state"] == "finished"


def alive(group: int) -> list[int]:
    """Processes of the group that have not ended."""
    told = [path.read_text().rpartition(")")[2].split() for path in Path("/proc").glob("[0-9]*/stat")]
    return [int(parent) for state, parent, pgrp, *_ in told if int(pgrp) == group and state != "Z"]


def test_a_killed_supervisor_leaves_the_run_known(opened: Open, job: Job) -> None:
    """The run itself holds the lock: it counts as running as long as it does, and as dead when it is."""
    one = opened()
    one.start(job(one, ("long",)))
    wait_until(lambda: "working" in one.call("status")["tail"])
    group = one.call("status")["pid"]
    os.kill(group, signal.SIGKILL)
    time.sleep(0.2)
    assert one.call("status")["state"] == "running"
    os.killpg(group, signal.SIGKILL)
    wait_until(lambda: one.call("status")["state"] == "died")
    with pytest.raises(command.Ended, match="was killed, or the machine restarted"):
        command.check_end(one.call("status"), "there")
    assert one.stop()["state"] == "stopped"


def test_a_host_that_does_not_come_back(opened: Open, sshd: Sshd, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(there, "PATIENCE", 0.3)
    one = opened()
    one.host = dataclasses.replace(one.host, name="there-gone")
    sshd.cut()
    with pytest.raises(UserError, match="there-gone did not come back") as gone:
        one.call("status")
    assert "follows it again" in str(gone.value)


@pytest.mark.slow
def test_an_environment_is_made_once(opened: Open, job: Job, built: Path, tmp_path: Path) -> None:
    """From the registry, with the few packages that the light commands need."""
    one = opened()
    plan = job(one, ("config",), python=None, requirements=wheel.requirements(built, ()), environment="light")
    one.start(plan)
    assert one.follow(0)["state"] == "finished", said(tmp_path)
    assert any("Successfully installed" in line for line in said(tmp_path))
    python = at(one).parent.parent / "envs" / "light" / "bin" / "python"
    lacks = "import importlib.util as u; print([n for n in ('typer', 'headstart') if u.find_spec(n) is None])"
    assert subprocess.run([python, "-c", lacks], capture_output=True, text=True, check=True).stdout == "['headstart']\n"
    begun = one.start(plan)["log"]
    assert one.follow(begun)["state"] == "finished"
    assert not any("environment" in line for line in one.status["tail"])


# --- fetching ---


def make_artifact(one: There, name: str, content: bytes) -> Path:
    path = at(one) / "run" / name
    with artifact.create(path, name, {"content": files.sha256_json(str(content))}, {}) as build:
        build.file("deep").mkdir()
        build.file("deep/weights.bin").write_bytes(content)
    return path


def test_fetched_artifacts_are_whole_and_unchanged_ones_stay(opened: Open, tmp_path: Path) -> None:
    one, here = opened(), tmp_path / "results"
    for name in ("draft", "states"):
        make_artifact(one, name, os.urandom(3 << 20))
    (at(one) / "run" / "report.html").write_text("<p>")
    got = fetch.fetch(one, here, Events(quiet=True))
    assert (got.artifacts, got.received, sorted(path.name for path in here.iterdir())) == (
        ("draft",),
        (3 << 20) + 3,
        ["draft", "report.html"],
    )
    artifact.verify(artifact.open_artifact(here / "draft", "draft"))
    assert fetch.fetch(one, here, Events(quiet=True)).received == 0
    shutil.rmtree(at(one) / "run" / "draft")
    make_artifact(one, "draft", b"another")
    assert fetch.fetch(one, here, Events(quiet=True)).received == 7
    assert artifact.open_artifact(here / "draft", "draft").file("deep/weights.bin").read_bytes() == b"another"
    got = fetch.fetch(one, here, Events(quiet=True), everything=True)
    assert got.artifacts == ("draft", "states")
    artifact.verify(artifact.open_artifact(here / "states", "states"))


def test_a_fetch_that_breaks_off_goes_on(
    opened: Open, sshd: Sshd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, here = opened(), tmp_path / "results"
    content = os.urandom(24 << 20)
    make_artifact(one, "draft", content)
    plans, left = [], fetch._Receiver.left

    def counting(receiver: Any) -> Any:
        plans.append(left(receiver))
        return plans[-1]

    def cutting(self: Any, amount: float, **_: Any) -> None:
        if len(plans) == 1:
            sshd.cut()

    monkeypatch.setattr(fetch._Receiver, "left", counting)
    monkeypatch.setattr(events._Silent, "advance", cutting)
    fetch.fetch(one, here, Events(quiet=True))
    assert plans[0][0]["offset"] == 0
    assert plans[1][0]["offset"] > 0
    assert (here / "draft" / "deep" / "weights.bin").read_bytes() == content


def test_a_file_that_is_not_what_its_manifest_says_is_refused(opened: Open, tmp_path: Path) -> None:
    one = opened()
    made = make_artifact(one, "draft", b"weights")
    (made / "deep" / "weights.bin").write_bytes(b"weighty")
    with pytest.raises(GateError, match="is not what was to be fetched"):
        fetch.fetch(one, tmp_path / "results", Events(quiet=True))
    assert not (tmp_path / "results" / "draft" / "manifest.json").exists()
    manifest = json.loads((made / "manifest.json").read_text())
    manifest["files"] = {"../../../evil": {"bytes": 1, "sha256": "0"}}
    (made / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(GateError, match="outside its folder"):
        fetch.fetch(one, tmp_path / "results", Events(quiet=True))


# --- the command ---


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    (tmp_path / "mine.jsonl").write_text('{"prompt": "hello"}\n')
    (tmp_path / "run.toml").write_text('[target]\nmodel = "model"\n[data]\nsources = ["mine.jsonl"]\n')
    (tmp_path / "model").mkdir()
    return tmp_path / "run.toml"


def refusal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: object) -> str:
    monkeypatch.setattr(sys, "argv", ["headstart", "remote", *map(str, arguments)])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 2
    return capsys.readouterr().err


def test_what_the_command_refuses(
    sshd: Sshd, run_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*options: object) -> str:
        return refusal(capsys, monkeypatch, "there", run_file, "-F", sshd.config, *options)

    assert "exclude each other" in refused("--status", "--stop")
    assert "there is no run run in" in refused("--status", "--dir", "none")
    assert "is no name for a run" in refused("--name", "../run")
    assert "holds a wildcard" in refused("--dir", "runs[1]")
    shutil.copytree(run_file.parent / "model", run_file.parent / "away")
    text = run_file.read_text()
    monkeypatch.setattr(There, "call", lambda *_, **__: False)  # here and there are one machine: there it is elsewhere
    assert "a folder of this machine, and there has none there" in refused("--dir", "refused")
    assert run_file.read_text() == text


@pytest.fixture
def held(sshd: Sshd) -> Iterator[None]:
    (sshd.home / "hold").touch()
    yield
    (sshd.home / "hold").unlink()


@pytest.mark.usefixtures("held")
def test_a_run_with_other_settings_is_not_followed_in_its_place(sshd: Sshd, run_file: Path, slow: Path) -> None:
    options = Options("there", run_file, ssh_config=sshd.config, folder="of two", python=str(slow))
    quiet = Events(quiet=True)
    assert command.launch(options, quiet, follow=False).status["state"] == "running"
    assert command.launch(options, quiet, follow=False).status["state"] == "running"
    with pytest.raises(UserError, match="with other settings or files"):
        command.launch(dataclasses.replace(options, settings=("train.epochs=2",)), quiet, follow=False)
    assert command.look(options, quiet).status["state"] == "running"
    assert command.stop(options, quiet).status["state"] == "stopped"


FOLLOW = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell that started the tests in the background ignores it
from headstart.cli import main
main()
"""


@pytest.mark.usefixtures("held")
def test_ctrl_c_ends_the_following_alone(sshd: Sshd, run_file: Path, slow: Path) -> None:
    options = ["remote", "there", run_file, "-F", sshd.config, "--dir", "of ctrl-c", "--python", slow]
    with subprocess.Popen(
        [sys.executable, "-c", FOLLOW, *map(str, options)], stderr=-1, stdin=-3, text=True
    ) as process:
        assert process.stderr is not None
        lines = iter(process.stderr.readline, "")
        assert "working\n" in lines
        process.send_signal(signal.SIGINT)
        told = [*lines]
    assert process.returncode == 130
    assert told[0] == "the run goes on on there; --status shows it, --stop ends it\n"
    given = Options("there", run_file, ssh_config=sshd.config, folder="of ctrl-c", python=str(slow))
    assert command.look(given, Events(quiet=True)).status["state"] == "running"
    assert command.stop(given, Events(quiet=True)).status["state"] == "stopped"


# --- a whole run ---

RUN = """
[target]
model = "the model"
device = "cpu"
[data]
sources = ["mine, and {yours}.jsonl"]
max_length = 64
validation_fraction = 0.2
decontaminate = []
[regenerate]
max_new_tokens = 6
[vocab]
size = 300
[draft]
ttt_steps = 2
[train]
epochs = 1
batch_tokens = 256
[evaluate]
prompts = ["prompts.jsonl"]
max_new_tokens = 4
draft_tokens = 2
baseline = false
"""


class Client:
    """`headstart remote` on a tiny real run, in a process of its own."""

    def __init__(self, sshd: Sshd, folder: Path) -> None:
        self.folder, self.log = folder, folder / "client.log"
        self.root = sshd.home / "runs of 'me'" / "runs" / "run"
        tokenizer = make_tokenizer()
        save_llama(folder / "the model", initializer_range=0.05)
        save_tokenizer(folder / "the model", end_ids=[tokenizer.convert_tokens_to_ids(END), tokenizer.eos_token_id])
        rows = [json.dumps({"prompt": f"the harbour was quiet in the morning of day {number}"}) for number in range(12)]
        (folder / "mine, and {yours}.jsonl").write_text("\n".join(rows))
        (folder / "prompts.jsonl").write_text(rows[0])
        (folder / "run.toml").write_text(RUN)
        options = ["--ship-model", "--python", sys.executable, "--dir", "runs of 'me'", "-F", sshd.config]
        command = [sys.executable, "-m", "headstart", "remote", "there", folder / "run.toml", *options]
        self.command = list(map(str, command))

    def start(self) -> subprocess.Popen[bytes]:
        with self.log.open("wb") as log:
            return subprocess.Popen(self.command, stdin=subprocess.DEVNULL, stderr=log)

    def call(self, *options: str) -> dict[str, Any]:
        ended = subprocess.run(
            [*self.command, *options, "--json"], capture_output=True, text=True, check=False, timeout=300
        )
        assert ended.returncode == 0, ended.stderr
        return json.loads(ended.stdout) | {"said": ended.stderr}

    def told(self, text: str) -> int:
        """How many lines of its log begin with `text`."""
        return sum(line.startswith(text) for line in self.log.read_text().splitlines())

    def happened(self, kind: str) -> list[str]:
        return [event["stage"] for event in events.read(self.root / "run" / "events.jsonl") if event["event"] == kind]


@pytest.mark.slow
def test_a_whole_run_over_a_cut_connection_and_a_killed_client(sshd: Sshd, shell: Shell, tmp_path: Path) -> None:
    shell("zsh")
    (tmp_path / ODD).mkdir()
    client = Client(sshd, tmp_path / ODD)
    process = client.start()
    wait_until(lambda: client.happened("stage-start"), 200)
    sshd.cut()
    wait_until(lambda: "connected with there again" in client.log.read_text())
    wait_until(lambda: "regenerate" in client.happened("stage-end"), 200)
    wait_until(lambda: client.told("prepare: done") == 1)
    process.kill()
    process.wait()
    assert client.call("--status")["state"] in (
        "running",
        "finished",
    )  # it goes on without us, and may be through by now
    end = client.call()
    assert (end["state"], end["exit"]) == ("finished", 0)
    assert "it is running on there" in end["said"] or "it has finished on there" in end["said"]
    verbs = [stage.verb for stage in pipeline.STAGES]
    assert (
        client.happened("stage-start") == client.happened("stage-end") == verbs
    )  # each stage once: nothing began anew
    assert_fetched(Path(end["fetched"]["folder"]), client.root / "run")
    assert Path(end["fetched"]["folder"]) == client.folder / "runs" / "run@there"
    assert client.told("prepare: done") == 1  # nothing was told twice, either
    again = client.call()
    assert "it has finished on there" in again["said"]
    assert again["fetched"]["bytes"] == 0
    other = client.call("--no-follow", "-s", "train.epochs=2")
    assert "shipping 1 of" in other["said"]
    assert client.call("--stop")["state"] == "stopped"


def assert_fetched(here: Path, there: Path) -> None:
    for name in ("draft", "export", "scores"):
        made = artifact.open_artifact(here / name, name)
        artifact.verify(made)
        for inside in made.manifest.files:
            assert (here / name / inside).read_bytes() == (there / name / inside).read_bytes()
    assert (here / "report.html").read_bytes() == (there / "report.html").read_bytes()
    assert not (here / "states").exists()
