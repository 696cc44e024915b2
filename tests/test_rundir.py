"""A run directory keeps its settings and its events, and leaves alone what is not its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from headstart import config, events, rundir
from headstart.errors import UserError
from headstart.events import Events

RUN = config.build({"target": {"model": "some/model"}, "data": {"sources": ["a.jsonl"]}})
OTHER = config.build(RUN.model_dump(mode="json"), ["train.epochs=9"])


def test_a_run_directory_keeps_the_resolved_settings(tmp_path: Path) -> None:
    root = tmp_path / "runs" / "one"
    log = rundir.begin(OTHER, root, quiet=True)
    assert rundir.recorded(root) == OTHER
    assert rundir.recorded(root, ["train.epochs=2"]).train.epochs == 2
    assert events.read(log.path or root)[0]["settings"] == OTHER.model_dump(mode="json")
    rundir.begin(RUN, root, quiet=True)
    assert rundir.recorded(root) == RUN


def test_a_file_that_is_not_ours_is_not_overwritten(tmp_path: Path) -> None:
    """Case C08, for the settings file."""
    for text in ("mine", "[]", '{"target": "x86"}'):
        (tmp_path / rundir.SETTINGS).write_text(text)
        with pytest.raises(UserError, match=r"run\.json is not a file of headstart's"):
            rundir.begin(RUN, tmp_path)
        assert (tmp_path / rundir.SETTINGS).read_text() == text
        with pytest.raises(UserError, match="does not hold the settings of a run"):
            rundir.recorded(tmp_path)


def test_what_is_no_run_directory(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not a run directory"):
        rundir.recorded(tmp_path)
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file", tmp_path / "file" / "run", Path("/proc/none")):
        with pytest.raises(UserError, match="cannot write into"):
            rundir.begin(RUN, place)


# --- events ---


def test_events_are_lines_and_a_torn_one_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "events.jsonl"
    assert events.read(path) == []
    log = Events(path, quiet=True)
    log.emit("one", path=tmp_path, numbers=[1, 2])
    log.say("hello")
    with path.open("a") as file:
        file.write('{"time": 1, "ev')
    found = events.read(path)
    assert [event["event"] for event in found] == ["one", "say"]
    assert found[0]["path"] == str(tmp_path)
    assert found[1]["text"] == "hello"


def test_progress_tells_share_rate_and_what_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with Events().progress("train", 200, "tok", done=100) as bar:
        bar.advance(50, loss=0.123456)
    said = capsys.readouterr()
    assert said.out == ""
    assert "train  75 %  150/200 tok" in said.err
    assert "loss 0.1235" in said.err


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0s"), (59.6, "1m00s"), (95, "1m35s"), (3600, "1h00m"), (7322, "2h02m"), (-3, "0s")]
)
def test_durations(seconds: float, text: str) -> None:
    assert events.duration(seconds) == text


def test_progress_is_silent_when_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    log = Events(quiet=True)
    log.say("hello")
    with log.progress("train", 200, "tok") as bar:
        bar.advance(50)
    assert capsys.readouterr() == ("", "")


def test_progress_on_a_terminal_counts_only_what_is_done_now(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setattr(events.time, "monotonic", iter(range(0, 1000, 10)).__next__)
    with Events().progress("capture", 300.0, "tok", done=100.0) as bar:
        bar.advance(100, bad=0.25)
    said = capsys.readouterr().err
    assert " 67%" in said
    assert "10.0 tok/s" in said
    assert "bad 0.25" in said
