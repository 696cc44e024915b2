r"""Raw records of a source: JSONL, JSON array or Parquet files (globs too), or a set that ships as a package.

A record that cannot be read is told with its reason and place; it never ends the reading. Rows count from 1: in JSONL
they are line numbers, and only `\n` ends a line, since real strings hold U+2028 and U+0085.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from headstart import files
from headstart.data.packages import SHIPPED, ShippedSet
from headstart.errors import UserError

TRUNCATED = "truncated JSON"
NOT_JSON = "not JSON"
NOT_UTF8 = "not UTF-8"
CONTINUATION = "continuation"
_SHIPPED_REASONS = {"cut off": TRUNCATED, "continuation": CONTINUATION}
_BOM = b"\xef\xbb\xbf"
_NEAR_END = 8  # characters: a cut escape such as \u12 leaves a few of them
_WORDS = ("true", "false", "null", "NaN", "Infinity", "-Infinity")
_PARQUET_ROWS = 1024

Tell = Callable[[int], None]  # told how many bytes were read since the last call


@dataclass(frozen=True)
class Record:
    """One record: its value, or the reason (`problem`) why there is none.

    row: counts from 1 over the whole source, all its files together; 0 when the record has no known place.
    place: the row as a person looks it up, with the file's name where a source has several.
    folder: of the file, which paths in the record are relative to.
    """

    row: int
    place: str
    value: Any = None
    problem: str = ""
    folder: Path | None = None


class Source(Protocol):
    """Something to read records from, known to exist."""

    @property
    def name(self) -> str: ...

    @property
    def size(self) -> int:
        """Bytes to be read; 0 when that is not known beforehand."""
        ...

    def records(self, tell: Tell) -> Iterator[Record]: ...

    def facts(self) -> dict[str, Any]:
        """Format and checksums of what is read."""
        ...


def find(name: str) -> Source:
    """The source called `name`: a shipped set, else a file, else a glob.

    Raises:
        UserError: nothing of that name exists, or it is a folder.
    """
    if name in SHIPPED:
        return ShippedSource(name, SHIPPED[name])
    path = files.home(name)
    if path.is_dir():
        raise UserError(f"the source {name or repr(name)} is a folder", do=f"name its files, e.g. {path / '*.jsonl'}")
    paths = tuple(files.matching(name))
    if not paths:
        raise UserError(
            f"the source {name} does not exist",
            looked_for=f"a file, a glob, or one of {', '.join(SHIPPED)}",
            do="correct data.sources or data.decontaminate; data on a hub must be downloaded first",
        )
    return FileSource(name, paths)


@dataclass(frozen=True)
class ShippedSource:
    """A set out of a pinned package."""

    name: str
    shipped: ShippedSet
    size: int = 0

    def records(self, tell: Tell) -> Iterator[Record]:
        del tell
        left_out: Counter[str] = Counter()
        for row, value in enumerate(self.shipped.rows(dropped=left_out), start=1):
            yield Record(row, str(row), value)
        for reason, count in left_out.items():
            for _ in range(count):
                yield Record(0, "", problem=_SHIPPED_REASONS[reason])

    def facts(self) -> dict[str, Any]:
        return {"format": "shipped", "package": self.shipped.package, "sha256": self.shipped.sha256}


@dataclass(frozen=True)
class FileSource:
    """One file, or several that are read as one, in the order of their names."""

    name: str
    paths: tuple[Path, ...]

    @property
    def size(self) -> int:
        return sum(path.stat().st_size for path in self.paths)

    def records(self, tell: Tell) -> Iterator[Record]:
        before = 0
        for path in self.paths:
            prefix = f"{path.name}:" if len(self.paths) > 1 else ""
            last = 0
            for row, value, problem in _read(path, tell):
                last = row
                yield Record(before + row, f"{prefix}{row}", value, problem, path.parent)
            before += last

    def facts(self) -> dict[str, Any]:
        formats = sorted({_READERS[_format(path)][0] for path in self.paths})
        return {"format": " + ".join(formats), "sha256": {path.name: files.sha256_file(path) for path in self.paths}}


Raw = tuple[int, Any, str]  # row within its file, value, problem


def _read(path: Path, tell: Tell) -> Iterator[Raw]:
    try:
        yield from _READERS[_format(path)][1](path, tell)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from None


def _format(path: Path) -> str:
    """`parquet`, `array` or `lines`, by the file's first bytes: names lie, `.json` files of JSON lines are common."""
    try:
        with path.open("rb") as file:
            head = file.read(4096)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    if head.startswith(b"PAR1") or path.suffix == ".parquet":
        return "parquet"
    return "array" if head.removeprefix(_BOM).lstrip().startswith(b"[") else "lines"


def _read_lines(path: Path, tell: Tell) -> Iterator[Raw]:
    with path.open("rb") as file:
        for row, line in enumerate(file, start=1):  # a binary file ends its lines at \n alone
            tell(len(line))
            if line.strip(b" \t\r\n"):
                yield row, *_parse(line.removeprefix(_BOM) if row == 1 else line)


def _parse(line: bytes) -> tuple[Any, str]:
    try:
        text = line.decode("utf-8")
        return json.loads(text), ""
    except UnicodeDecodeError:
        return None, NOT_UTF8
    except json.JSONDecodeError as error:
        return None, _json_problem(error)
    except (RecursionError, ValueError):  # nested beyond reason; a number of thousands of digits
        return None, NOT_JSON


def _json_problem(error: json.JSONDecodeError) -> str:
    """Truncated when what is left from the error on could go on to be right JSON."""
    rest = error.doc[error.pos :].rstrip()
    in_word = any(word.startswith(rest) for word in _WORDS)  # also when nothing is left
    in_number = not rest.strip(".eE+-")
    in_escape = "escape" in error.msg and len(rest) <= _NEAR_END
    in_text = error.msg.startswith("Unterminated string")
    return TRUNCATED if in_word or in_number or in_escape or in_text else NOT_JSON


def _read_array(path: Path, tell: Tell) -> Iterator[Raw]:
    """Records of one JSON array, to where the file breaks off: what is cut there is one problem.

    Bytes that are not UTF-8 become lone surrogates, which no text of a usable conversation may hold (see `sources`).

    Raises:
        UserError: the array is broken before its end, so what follows cannot be told apart.
    """
    text = path.read_bytes().removeprefix(_BOM).decode("utf-8", errors="surrogateescape")
    size, decode = path.stat().st_size, json.JSONDecoder().raw_decode
    position, row = text.index("[") + 1, 0
    while (position := _skip(text, position, " \t\r\n,")) < len(text) and text[position] != "]":
        row += 1
        try:
            value, end = decode(text, position)
        except json.JSONDecodeError as error:
            if _json_problem(error) == NOT_JSON:
                raise _broken(path, row, f"{error.msg} (line {error.lineno})") from None
            yield row, None, TRUNCATED
            return
        except (RecursionError, ValueError) as error:  # nested beyond reason; a number of thousands of digits
            raise _broken(path, row, str(error)) from None
        tell(int(size * (end - position) / len(text)))
        position = end
        yield row, value, ""
    if position >= len(text):  # it broke off between two records
        yield row + 1, None, TRUNCATED


def _skip(text: str, position: int, what: str) -> int:
    while position < len(text) and text[position] in what:
        position += 1
    return position


def _broken(path: Path, row: int, why: str) -> UserError:
    return UserError(
        f"{path} is not JSON at record {row}: {why}",
        looked_for="an array of whole records",
        do="mend that record, or store one record a line, so that only the bad one is lost",
    )


def _read_parquet(path: Path, tell: Tell) -> Iterator[Raw]:
    size, row = path.stat().st_size, 0
    try:
        with pq.ParquetFile(path) as file:
            total = max(file.metadata.num_rows, 1)
            for batch in file.iter_batches(batch_size=_PARQUET_ROWS):
                tell(int(size * batch.num_rows / total))
                for value, problem in _values(batch):
                    row += 1
                    yield row, value, problem
    except pa.ArrowException as error:
        raise UserError(f"{path} is not a whole Parquet file: {str(error).splitlines()[0]}") from None


def _values(batch: pa.RecordBatch) -> list[tuple[Any, str]]:
    try:
        return [(value, "") for value in batch.to_pylist()]
    except UnicodeDecodeError:  # Parquet does not check its strings: find the rows one by one
        if batch.num_rows == 1:
            return [(None, NOT_UTF8)]
        return [pair for row in range(batch.num_rows) for pair in _values(batch.slice(row, 1))]


_READERS: dict[str, tuple[str, Callable[[Path, Tell], Iterator[Raw]]]] = {
    "lines": ("jsonl", _read_lines),
    "array": ("json", _read_array),
    "parquet": ("parquet", _read_parquet),
}
