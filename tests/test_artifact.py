"""Artifacts are whole or do not exist, whatever kills the process that makes them, and say what they were made from."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import killing
from headstart import artifact, files
from headstart.artifact import Artifact, Manifest
from headstart.errors import UserError
from killing import KIND, SETTINGS, make

OLD = {"size": 1, "name": "old"}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@pytest.fixture(autouse=True)
def _no_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kill loses nothing that the kernel has; only a power cut would, which no test here makes."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


@pytest.fixture
def _no_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looking them up is most of the time of a making."""
    monkeypatch.setattr(artifact, "versions", dict)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / KIND


def whole(path: Path) -> Manifest:
    opened = artifact.open_artifact(path, KIND)
    artifact.verify(opened)
    return opened.manifest


def abandon(path: Path, settings: dict[str, Any], *parts: int) -> None:
    """Leave what an attempt killed after writing `parts` leaves."""
    with suppress(InterruptedError), artifact.create(path, KIND, settings, {}) as build:
        for number in parts:
            files.write_text(build.file(f"part-{number}.txt"), f"{settings['name']} {number}\n" * 50)
        (build.scratch / "state").write_text("left behind")
        raise InterruptedError


def kill_everywhere(base: Path, *starts: Path, work: str = "make") -> list[Path]:
    """The folders that are left when `work` in a copy of each start was killed at each point; equal ones once."""
    subprocess.run([sys.executable, killing.__file__, work, base, *starts], check=True, timeout=120)
    return list({content(folder): folder for folder in sorted(base.iterdir(), reverse=True)}.values())[::-1]


def content(folder: Path) -> tuple[tuple[str, bytes], ...]:
    """Names and bytes of all that is in a folder, without process ids in the names of temporary files."""
    found = sorted(folder.rglob("*"))
    names = (re.sub(r"\.\d+\.tmp", ".tmp", str(file.relative_to(folder))) for file in found)
    return tuple((name, file.read_bytes() if file.is_file() else b"") for name, file in zip(names, found, strict=True))


@pytest.fixture(params=["nothing", "old", "old-and-partial", "partial-of-others", "torn"])
def start(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A folder as it is before the attempt that gets killed."""
    folder = tmp_path / "start"
    folder.mkdir()
    if request.param.startswith("old"):
        make(folder / KIND, OLD)
    if request.param == "old-and-partial":
        abandon(folder / KIND, SETTINGS, 0)
    if request.param == "partial-of-others":
        abandon(folder / KIND, OLD, 0, 1)
    if request.param == "torn":
        abandon(folder / KIND, SETTINGS, 0)
        for name in (".manifest.json.1.tmp", ".part-7.txt.1.tmp", ".folder.tmp/deep/file", "deep/.tmp8jL0WW"):
            files.write_text(folder / f".{KIND}.partial" / name, "half of som")
    return folder


@pytest.mark.usefixtures("_no_versions")
def test_killed_anywhere_leaves_the_old_or_the_new_and_continues(start: Path, tmp_path: Path) -> None:
    unbroken = tmp_path / "unbroken" / KIND
    make(unbroken)
    new = whole(unbroken).id
    old = whole(start / KIND).id if (start / KIND).exists() else None
    cases = kill_everywhere(tmp_path / "cases", start)
    assert len(cases) > 25
    seen = set()
    for case in cases:
        found = artifact.read_manifest(case / KIND)
        seen.add(found.id if found else None)
        if found:
            assert whole(case / KIND).id == found.id
        make(case / KIND)
        assert whole(case / KIND).id == new, case
        assert [file.name for file in case.iterdir()] == [KIND], case
    assert seen == {old, new}


@pytest.mark.usefixtures("_no_versions")
def test_one_who_only_asks_is_no_holder(tmp_path: Path) -> None:
    lock = tmp_path / ".made.lock"
    asking = lock.open("w")
    fcntl.flock(asking, fcntl.LOCK_EX)
    threading.Timer(0.1, asking.close).start()
    assert artifact.is_held(tmp_path / "made")
    artifact.check_place(tmp_path / "made")


def test_killed_again_while_a_kill_is_being_repaired(tmp_path: Path) -> None:
    start = tmp_path / "start"
    make(start / KIND, OLD)
    old = whole(start / KIND).id
    unsettled = [
        case
        for case in kill_everywhere(tmp_path / "first", start)
        if (case / f".{KIND}.old").exists() or (case / f".{KIND}.partial" / artifact.MANIFEST).exists()
    ]
    assert len(unsettled) >= 8
    again = kill_everywhere(tmp_path / "second", *unsettled, work="read")
    assert len(again) > len(unsettled)
    ids = {whole(case / KIND).id for case in again}
    assert old not in ids
    assert len(ids) == 1


@pytest.mark.usefixtures("_no_versions")
def test_work_is_found_again_from_the_moment_its_key_is_written(tmp_path: Path) -> None:
    (tmp_path / "start").mkdir()
    resumed = [make(case / KIND) for case in kill_everywhere(tmp_path / "cases", tmp_path / "start")]
    first = resumed.index(True)
    assert first < 10
    last = len(resumed) - resumed[::-1].index(True)
    assert all(resumed[first:last])  # after that the artifact is whole, and this is another making of it
    assert last > len(resumed) * 0.6


def test_an_error_keeps_the_work_and_frees_the_lock(path: Path) -> None:
    abandon(path, SETTINGS, 0)
    assert not path.exists()
    assert artifact.is_partial(path)
    assert not path.with_name(f".{KIND}.lock").exists()
    assert make(path) is True
    assert not artifact.is_partial(path)


# --- what is continued, and what is not ---


def test_other_settings_or_parents_start_anew(path: Path, tmp_path: Path) -> None:
    make(tmp_path / "a")
    parent = artifact.open_artifact(tmp_path / "a", KIND)
    for settings, parents in ((OLD, {}), (SETTINGS, {"a": parent})):
        abandon(path, SETTINGS, 0)
        with artifact.create(path, KIND, settings, parents) as build:
            assert not build.resumed
            assert [file.name for file in build.path.iterdir()] == [artifact.KEY]
    with artifact.create(path, "others", SETTINGS, {}) as build:
        assert not build.resumed


def test_continues_says_what_create_will_do(path: Path) -> None:
    key = artifact.work_key(KIND, SETTINGS, {})
    assert not artifact.continues(path, key)
    abandon(path, SETTINGS, 0)
    assert artifact.continues(path, key)
    assert not artifact.continues(path, artifact.work_key(KIND, OLD, {}))
    assert not artifact.continues(path, artifact.work_key(KIND, SETTINGS, {"a": "0"}))


def test_equal_content_has_an_equal_id_whenever_it_is_made(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(path)
    first = whole(path)
    monkeypatch.setattr(artifact, "versions", lambda: {"headstart": "9.9"})
    monkeypatch.setattr(time, "monotonic", iter(range(0, 10**6, 100)).__next__)
    make(path)
    second = whole(path)
    assert (second.versions, second.seconds) != (first.versions, first.seconds)
    assert second.id == first.id
    make(path, SETTINGS | {"size": 3})
    assert whole(path).id != first.id


def test_the_id_covers_content_settings_parents_and_kind(path: Path, tmp_path: Path) -> None:
    make(tmp_path / "parent", OLD)
    parent = artifact.open_artifact(tmp_path / "parent", KIND)

    def made(content: str, kind: str, settings: dict[str, Any], parents: dict[str, Artifact]) -> str:
        with artifact.create(path, kind, settings, parents) as build:
            build.file("content").write_text(content)
        return artifact.open_artifact(path, kind).manifest.id

    plain = made("a", KIND, {}, {})
    others = [
        made("b", KIND, {}, {}),
        made("a", "x", {}, {}),
        made("a", KIND, OLD, {}),
        made("a", KIND, {}, {"p": parent}),
    ]
    assert len({plain, *others}) == 5
    assert made("a", KIND, {}, {}) == plain


def test_the_manifest_says_what_is_there(path: Path) -> None:
    make(path)
    manifest = whole(path)
    assert manifest.settings == SETTINGS
    assert manifest.counts == {"parts": 2}
    assert manifest.parents == {}
    assert list(manifest.files) == ["deep/end.json", "part-0.txt", "part-1.txt"]
    assert manifest.files["part-0.txt"]["bytes"] == len("new 0\n" * 50)
    assert manifest.versions.keys() >= {"headstart", "python"}


def test_scratch_is_kept_for_the_next_attempt_and_never_part_of_the_artifact(path: Path) -> None:
    abandon(path, SETTINGS)
    with artifact.create(path, KIND, SETTINGS, {}) as build:
        assert (build.scratch / "state").read_text() == "left behind"
        build.file("result").write_text("x")
    assert list(whole(path).files) == ["result"]
    assert sorted(file.name for file in path.iterdir()) == [artifact.MANIFEST, "result"]


# --- files that are not ours ---


def foreign_file(path: Path) -> str:
    (path / "notes.txt").write_text("mine")
    return "notes.txt"


def foreign_link(path: Path) -> str:
    (path / "link").symlink_to(path / "nowhere")
    return "link"


def foreign_in_scratch(path: Path) -> str:
    files.write_text(path / artifact.SCRATCH / "deep.txt", "mine")
    return "scratch/deep.txt"


@pytest.mark.parametrize("add", [foreign_file, foreign_link, foreign_in_scratch])
@pytest.mark.parametrize("before", ["empty", "artifact"])
def test_foreign_files_are_named_and_never_deleted(path: Path, add: Any, before: str) -> None:
    """Case C08."""
    if before == "artifact":
        make(path, OLD)
    path.mkdir(exist_ok=True)
    name = add(path)
    with pytest.raises(UserError, match=name):
        make(path)
    assert os.path.lexists(path / name)
    assert not path.with_name(f".{KIND}.partial").exists()


def test_foreign_files_that_come_while_the_stage_runs_are_not_deleted(path: Path) -> None:
    make(path, OLD)
    with pytest.raises(UserError, match=r"notes\.txt"), artifact.create(path, KIND, SETTINGS, {}) as build:  # noqa: PT012
        build.file("result").write_text("x")
        (path / "notes.txt").write_text("mine")
    assert (path / "notes.txt").read_text() == "mine"
    (path / "notes.txt").rename(path.with_name("elsewhere"))
    assert list(whole(path).files) == ["result"]  # the finished work was not lost


def test_an_empty_folder_is_taken(path: Path) -> None:
    path.mkdir()
    make(path)
    whole(path)


def test_a_file_or_a_link_in_the_way_is_refused(path: Path, tmp_path: Path) -> None:
    path.write_text("mine")
    with pytest.raises(UserError, match="is a file"):
        make(path)
    assert path.read_text() == "mine"
    path.unlink()
    (tmp_path / "elsewhere").mkdir()
    for goal in ("elsewhere", "nowhere"):
        path.symlink_to(tmp_path / goal)
        with pytest.raises(UserError, match="is a link"):
            make(path)
        path.unlink()


def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file" / KIND, Path("/proc/nothing") / KIND):
        with pytest.raises(UserError, match=f"cannot write into {place.parent}"):
            make(place)


# --- damage ---


def test_nothing_there_or_another_kind(path: Path) -> None:
    assert artifact.read_manifest(path) is None
    with pytest.raises(UserError, match="no finished things"):
        artifact.open_artifact(path, KIND)
    path.mkdir()
    (path / "part").write_text("without a manifest, it does not exist")
    with pytest.raises(UserError, match="no finished things"):
        artifact.open_artifact(path, KIND)
    (path / "part").unlink()
    make(path)
    with pytest.raises(UserError, match="holds things, not others"):
        artifact.open_artifact(path, "others")


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "{}", '{"format": 2}', '{"format": 2, "extra": 2}', "\xff"])
def test_a_damaged_manifest_is_named(path: Path, text: str) -> None:
    make(path)
    (path / artifact.MANIFEST).write_bytes(text.encode("latin-1"))
    for use in (lambda: artifact.open_artifact(path, KIND), lambda: artifact.read_manifest(path), lambda: make(path)):
        with pytest.raises(UserError, match=r"manifest\.json cannot be read"):
            use()


def test_a_manifest_of_another_format_is_told_apart_from_damage(path: Path) -> None:
    make(path)
    raw = files.read_json(path / artifact.MANIFEST) | {"format": 3, "new": "field"}
    files.write_json(path / artifact.MANIFEST, raw)
    with pytest.raises(UserError, match="has format 3; this headstart reads 2"):
        artifact.open_artifact(path, KIND)


def test_a_missing_or_shortened_file_is_named(path: Path) -> None:
    make(path)
    part = path / "part-1.txt"
    with part.open("r+b") as file:
        file.truncate(10)
    with pytest.raises(UserError, match=r"part-1\.txt has 10 bytes, not 300"):
        artifact.open_artifact(path, KIND)
    part.unlink()
    with pytest.raises(UserError, match=r"part-1\.txt is missing"):
        artifact.open_artifact(path, KIND)


def test_verify_finds_one_flipped_byte(path: Path) -> None:
    make(path)
    opened = artifact.open_artifact(path, KIND)
    artifact.verify(opened)
    data = bytearray((path / "part-0.txt").read_bytes())
    data[150] ^= 1
    (path / "part-0.txt").write_bytes(data)
    with pytest.raises(UserError, match=r"part-0\.txt was changed"):
        artifact.verify(artifact.open_artifact(path, KIND))


# --- several processes ---

HOLD = """
import sys
from pathlib import Path
from killing import KIND, SETTINGS
from headstart import artifact
with artifact.create(Path(sys.argv[1]), KIND, SETTINGS, {}) as build:
    build.file("result").write_text("the other one's")
    print("holding", flush=True)
    sys.stdin.readline()
"""
# Stops between moving the old artifact away and moving the new one in.
HOLD_IN_SWAP = """
import os, sys
rename = os.rename
def slow(source, target):
    rename(source, target)
    if str(target).endswith(".old"):
        print("holding", flush=True)
        sys.stdin.readline()
os.rename = slow
from pathlib import Path
from killing import make
make(Path(sys.argv[1]))
"""


def other_process(script: str, path: Path) -> subprocess.Popen[str]:
    tests = str(Path(__file__).parent)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([tests, os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-c", script, str(path)]
    process = subprocess.Popen(command, stdin=-1, stdout=-1, text=True, env=environment)
    assert process.stdout is not None
    assert process.stdout.readline() == "holding\n"
    return process


def test_two_processes_do_not_make_the_same_artifact(path: Path) -> None:
    with other_process(HOLD, path) as process:
        with pytest.raises(UserError, match="another process is making"):
            make(path)
        assert artifact.is_held(path)
        assert artifact.read_manifest(path) is None  # looking does no harm
        process.communicate("\n", timeout=20)
    assert process.returncode == 0
    assert list(whole(path).files) == ["result"]
    make(path)


def test_a_killed_holder_leaves_no_lock(path: Path) -> None:
    with other_process(HOLD, path) as process:
        process.send_signal(signal.SIGKILL)
        process.wait(20)
    assert not artifact.is_held(path)
    assert make(path) is True


def test_looking_while_another_process_swaps_leaves_it_alone(path: Path) -> None:
    make(path, OLD)
    with other_process(HOLD_IN_SWAP, path) as process:
        assert artifact.read_manifest(path) is None
        with pytest.raises(UserError, match="no finished things"):
            artifact.open_artifact(path, KIND)
        process.communicate("\n", timeout=20)
    assert process.returncode == 0
    assert whole(path).settings == SETTINGS
    assert [file.name for file in path.parent.iterdir()] == [KIND]


def test_a_reader_that_may_not_write_changes_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(path, OLD)
    shutil.copytree(path, path.with_name(f".{KIND}.old"))
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert whole(path).settings == OLD
    assert path.with_name(f".{KIND}.old").exists()
    monkeypatch.undo()
    whole(path)
    assert not path.with_name(f".{KIND}.old").exists()


# --- small file habits ---


@given(JSON)
def test_canonical_is_json_and_one_spelling(value: Any) -> None:
    text = files.canonical(value)
    assert files.canonical(json.loads(text)) == text
    assert json.loads(text) == value
    assert len(text.splitlines()) <= 1 or any(mark in text for mark in "\x85\u2028\u2029")


@given(st.dictionaries(st.text(), JSON, min_size=2, max_size=4), st.randoms(use_true_random=False))
def test_the_order_of_keys_does_not_matter(value: dict[str, Any], random: Any) -> None:
    items = list(value.items())
    random.shuffle(items)
    assert files.sha256_json(dict(items)) == files.sha256_json(value)


@given(JSON, JSON)
def test_different_values_have_different_hashes(one: Any, other: Any) -> None:
    same = json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)
    assert (files.sha256_json(one) == files.sha256_json(other)) == same


def test_a_failed_write_leaves_the_old_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "deep" / "file.json"
    files.write_json(path, {"a": 1})

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        files.write_json(path, {"a": 2})
    assert files.read_json(path) == {"a": 1}


def test_files_are_readable_by_others_as_the_umask_says(tmp_path: Path) -> None:
    """safetensors writes with mode 0600; a server under another user must read an export."""
    with artifact.create(tmp_path / KIND, KIND, {}, {}) as build:
        build.file("weights").touch(0o600)
    mask = os.umask(0)
    os.umask(mask)
    assert (tmp_path / KIND / "weights").stat().st_mode & 0o777 == 0o666 & ~mask
