"""Paths that cannot be: of users who are not there, folders where files belong, unreadable files, full disks, deep settings."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from fixtures_commands import command, settings_file
from headstart import cli, config, files, rundir
from headstart.data import media, readers
from headstart.data.content import Unusable
from headstart.doctor import machine, subject
from headstart.errors import MAKE_ROOM, UserError, cannot_write
from headstart.events import Events
from headstart.remote import inputs
from headstart.remote.agent import common
from headstart.target import source
from headstart.training import checkpoint

NOBODY = "~no-such-user/x"
DISK_FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return settings_file(tmp_path)


def failing(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """`prepare` fails so."""

    def fail(context: object) -> None:
        raise error

    stage, preflight = ModuleType("prepare"), ModuleType("preflight")
    stage.run, preflight.check = fail, lambda run, root, verbs: None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "headstart.stages.prepare", stage)
    monkeypatch.setitem(sys.modules, "headstart.preflight", preflight)


# --- users who are not there ---


def test_a_home_is_that_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/here")
    assert files.home("~/x") == Path("/here/x")
    assert files.home("x/~") == Path("x/~")
    with pytest.raises(UserError, match="there is no user no-such-user, and so no ~no-such-user/x"):
        files.home(NOBODY)


@pytest.mark.parametrize(
    "use",
    [
        files.matching,
        readers.find,
        source.resolve,
        subject.open_subject,
        lambda name: subject.python_of(f"{name}.toml"),
        lambda name: machine.room(Path(name)),
        lambda name: config._found(Path("/"), name),
        lambda name: inputs._data(inputs.Inputs(), name),
    ],
)
def test_an_unknown_user_is_told_wherever_a_path_is_read(use: Any) -> None:
    with pytest.raises(UserError, match="there is no user no-such-user"):
        use(NOBODY)


@pytest.mark.parametrize("verb", ["status", "config", "prepare", "report", "estimate", "doctor"])
@pytest.mark.parametrize("setting", ["directory", "target.model", "data.sources", "evaluate.prompts"])
def test_an_unknown_user_is_no_traceback(
    verb: str, setting: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    values = {"target.model": '"m"', "data.sources": '["a"]'}
    values[setting] = f'["{NOBODY}"]' if setting in ("data.sources", "evaluate.prompts") else f'"{NOBODY}"'
    path = tmp_path / "run.toml"
    path.write_text("".join(f"{name} = {value}\n" for name, value in values.items()))
    if (verb, setting) in [("config", "target.model"), ("report", "target.model")]:  # does not read it
        return
    assert command(monkeypatch, verb, path) == 2
    told = capsys.readouterr().err
    assert "there is no user no-such-user" in told
    assert "Traceback" not in told


def test_an_image_of_an_unknown_user_is_a_missing_one(tmp_path: Path) -> None:
    with pytest.raises(Unusable):
        media.find(NOBODY, tmp_path)


def test_the_other_machine_refuses_an_unknown_user() -> None:
    with pytest.raises(common.Refused, match="there is no user there for ~no-such-user/x"):
        common.home(NOBODY)


# --- folders where files belong ---


@pytest.mark.parametrize("name", ["", ".", "/", "..", "/tmp", "./"])
def test_a_folder_is_no_source(name: str) -> None:
    assert files.matching(name) == []
    with pytest.raises(UserError, match="is a folder"):
        readers.find(name)


@pytest.mark.parametrize("name", ["", ".", "/"])
@pytest.mark.parametrize("key", ["data.sources", "data.decontaminate", "evaluate.prompts"])
def test_status_with_a_folder_for_a_source(
    name: str, key: str, file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["headstart", "status", str(file), "-s", f'{key}=["{name}"]'])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 0
    assert "not made yet" in capsys.readouterr().out


# --- files that cannot be used, and full disks ---


@pytest.mark.parametrize(
    "number", [errno.EACCES, errno.EPERM, errno.EIO, errno.EISDIR, errno.ENOTDIR, errno.ELOOP, errno.EROFS]
)
def test_a_file_that_cannot_be_used_is_told(
    number: int, file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failing(monkeypatch, OSError(number, os.strerror(number), "/data/model.safetensors"))
    assert command(monkeypatch, "prepare", file, "-q") == 2
    told = capsys.readouterr().err
    assert told.startswith(f"error: /data/model.safetensors cannot be used: {os.strerror(number)}\n  do: ")
    assert "Traceback" not in told


@pytest.mark.parametrize("text", ["Permission denied (os error 13)", "Input/output error (os error 5)"])
def test_what_libraries_tell_of_a_file(
    text: str, file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failing(monkeypatch, Exception(text))
    assert command(monkeypatch, "prepare", file, "-q") == 2
    assert f"error: a file cannot be used: {text}\n  do: " in capsys.readouterr().err


def test_a_read_that_fails_names_no_file() -> None:
    told = cli._told(OSError(errno.EIO, "Input/output error"))
    assert told is not None
    assert told.what == "a file cannot be used: Input/output error"


@pytest.mark.parametrize("error", [FileNotFoundError(errno.ENOENT, "none", "/x"), PermissionError(), OSError("odd")])
def test_other_errors_of_the_system_stay_bugs(error: OSError) -> None:
    assert cli._told(error) is None


@pytest.mark.parametrize("verb", ["status", "report", "estimate"])
def test_a_source_or_folder_without_rights(
    verb: str, file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*given: object, **named: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), "/data/a.jsonl")

    monkeypatch.setattr(Path, "is_dir" if verb != "status" else "is_file", refuse)
    monkeypatch.setattr(Path, "exists", refuse)
    assert command(monkeypatch, verb, file) == 2
    told = capsys.readouterr().err
    assert "/data/a.jsonl cannot be used: Permission denied" in told


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.EFBIG, "File too large", "/data/file"),
        OSError(errno.ENOSPC, "No space left", "/data/file"),
        RuntimeError("I/O error: File too large (os error 27)"),
    ],
)
def test_a_full_disk_and_a_full_file_are_told_alike(
    error: Exception, file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failing(monkeypatch, error)
    assert command(monkeypatch, "prepare", file, "-q") == 2
    told = capsys.readouterr().err
    assert "no space is left on the disk of" in told
    assert "or it is as large as a file may be" in told
    assert MAKE_ROOM in told
    assert cli._told(RuntimeError("os error 280")) is None


def full(*given: object, **named: object) -> int:
    raise DISK_FULL


def test_a_write_that_fails_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files.write_text(tmp_path / "file", "old")
    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        files.write_text(tmp_path / "file", "new")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_text() == "old"


def test_the_other_machine_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        common.write_json(tmp_path / "file", {})
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_that_fails_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "write_bytes", full)
    snapshot = checkpoint.Snapshot({"a": torch.zeros(1)}, {}, checkpoint.Progress())
    with pytest.raises(OSError, match="No space left"):
        checkpoint.save(tmp_path, snapshot, keep=1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("number", "do"), [(errno.ENOSPC, MAKE_ROOM), (errno.EFBIG, MAKE_ROOM), (errno.EACCES, "set `directory`")]
)
def test_begin_says_what_helps(number: int, do: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Path, value: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(files, "write_json", fail)
    run = config.build({"target": {"model": "m"}, "data": {"sources": ["a"]}})
    with pytest.raises(UserError, match="cannot write into") as caught:
        rundir.begin(run, tmp_path, quiet=True)
    assert do in str(caught.value.do)
    assert cannot_write("x", DISK_FULL, do="other").do == MAKE_ROOM


def test_an_event_log_that_is_a_folder(
    tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out" / rundir.EVENTS).mkdir(parents=True)
    with pytest.raises(IsADirectoryError):
        Events(tmp_path / "out" / rundir.EVENTS).emit("x")
    failing(monkeypatch, AssertionError())
    assert command(monkeypatch, "prepare", file, "-q") == 2
    assert f"{rundir.EVENTS} cannot be used: Is a directory" in capsys.readouterr().err


# --- settings that no one can read ---

HEAD = '[target]\nmodel = "m"\n[data]\nsources = ["a"]\n'


@pytest.mark.parametrize("name", ["a\\u0000b", "\\u0000"])
def test_a_directory_with_a_null_character(name: str, tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(f'directory = "{name}"\n{HEAD}')
    with pytest.raises(UserError, match="holds a null character, which no path can"):
        config.load(path)


@pytest.mark.parametrize(
    "text",
    [
        f"x = {'[' * 5000}{']' * 5000}\n{HEAD}",
        f"{HEAD}[{'.'.join(['a'] * 500)}]\nb = 1\n",
        f"{HEAD}[target.engine_options{'.a' * 500}]\nb = 1\n",
        f"{HEAD}[target.engine_options]\na = {'[' * 250}{']' * 250}\n",
        f"{HEAD}[target.engine_options{'.a' * 5000}]\nb = 1\n",
    ],
)
def test_settings_nested_too_deeply(text: str, tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(text)
    with pytest.raises(UserError, match="nested too deeply"):
        config.load(path)


@pytest.mark.parametrize("override", [f"x={'[' * 5000}{']' * 5000}", f"target.engine_options{'.a' * 5000}=1"])
def test_overrides_nested_too_deeply(override: str) -> None:
    with pytest.raises(UserError, match="nested too deeply"):
        config.build({"target": {"model": "m"}, "data": {"sources": ["a"]}}, [override])


def test_settings_with_what_no_text_can_hold() -> None:
    with pytest.raises(UserError, match="the settings cannot be read"):
        config.build({"target": {"model": "m"}, "data": {"sources": ["a"]}}, ["directory=\udcff"])
