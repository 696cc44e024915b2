"""What a run needs from this machine: its data files, the images they name, its settings with the paths it will have there.

A data file keeps its place relative to what it is named by: the folder it is in, or the fixed part of a glob. That folder
becomes `inputs/HASH`, by the hash of its path here, so a run that is shipped again finds equal names and continues.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headstart import files
from headstart.config import Run
from headstart.data import media
from headstart.data.content import IMAGE_PARTS, Unusable
from headstart.data.packages import SHIPPED
from headstart.errors import UserError
from headstart.remote import toml

_MAGIC = set("*?[")
_BOM = b"\xef\xbb\xbf"
_ELSEWHERE = ("http:", "https:", "data:")
_IMAGE_KEYS = ("image", "images", "image_url")


@dataclass
class Inputs:
    """files: path under the run's folder there -> path here. text: the run.toml for there. model: a folder that must be there."""

    files: dict[str, Path] = field(default_factory=dict)
    text: str = ""
    model: str | None = None


def collect(run: Run, *, ship_model: bool = False) -> Inputs:
    """Find the files of a run and rewrite its settings.

    Raises:
        UserError: an image is named by a path that would be another one there.
    """
    found, values = Inputs(), run.model_dump(mode="json", exclude_unset=True)
    values["directory"] = "run"
    for section, key in (("data", "sources"), ("data", "decontaminate"), ("evaluate", "prompts")):
        if key in values.get(section, {}):
            values[section][key] = [_data(found, name) for name in values[section][key]]
    folder = files.home(run.target.model)
    if folder.is_dir() and ship_model:
        values["target"]["model"] = _model(found, folder)
    elif folder.is_dir():
        found.model = str(folder)
    found.text = toml.dumps(values)
    return found


def _data(found: Inputs, name: str) -> str:
    """The name there of data that is called `name` here. What is no file here is a shipped set, or a file there."""
    paths = () if name in SHIPPED else files.matching(name)
    if not paths:
        return name
    base, rest = _split(files.home(name).absolute())
    place = _place(base)
    for path in paths:
        _add(found, place, base, path)
        for image in images(path, base):
            _add(found, place, base, image)
    return f"{place}/{rest}"


def _split(path: Path) -> tuple[Path, str]:
    """The folder of a file, or the part of a glob before its first wildcard; and what follows."""
    if path.is_file():
        return path.parent, path.name
    fixed = next(number for number, part in enumerate(path.parts) if _MAGIC & set(part))
    return Path(*path.parts[:fixed]), "/".join(path.parts[fixed:])


def _model(found: Inputs, folder: Path) -> str:
    place = f"{_place(folder)}/{folder.resolve().name}"
    for path in sorted(folder.rglob("*")):
        inside = path.relative_to(folder)
        if path.is_file() and not any(part.startswith(".") for part in inside.parts):
            found.files[f"{place}/{inside.as_posix()}"] = path
    return place


def _add(found: Inputs, place: str, base: Path, path: Path) -> None:
    found.files[f"{place}/{path.relative_to(base).as_posix()}"] = path


def _place(folder: Path) -> str:
    return f"inputs/{hashlib.sha256(str(folder).encode('utf-8', 'surrogateescape')).hexdigest()[:10]}"


# --- images ---


def images(path: Path, base: Path) -> Iterator[Path]:
    """The image files that the rows of a JSONL or JSON file name. Parquet sets hold theirs as bytes.

    Raises:
        UserError: one is named by an absolute path, or lies outside `base`.
    """
    for name in sorted({name for row in _rows(path) for name in _references(row)}):
        try:
            media.find(name, path.parent)
        except Unusable:  # `prepare` tells of it, as it would here
            continue
        inside = Path(os.path.normpath(path.parent / name))
        if Path(name).is_absolute() or name.startswith("file:") or not inside.is_relative_to(base):
            raise UserError(
                f"{path} names the image {name}, which would be another file on another machine",
                looked_for=f"paths relative to the data file, below {base}",
                do="name images so, or put them into the rows as data: URLs",
            )
        yield inside


def _rows(path: Path) -> Iterator[Any]:
    """Rows with the word image in them."""
    with path.open("rb") as file:
        array = file.read(64).removeprefix(_BOM).lstrip().startswith(b"[")
        file.seek(0)
        for text in [file.read()] if array else file:
            if b"image" in text:
                try:
                    yield json.loads(text.removeprefix(_BOM))
                except ValueError:  # also bytes that are no UTF-8
                    continue


def _references(value: Any, image: bool = False) -> Iterator[str]:
    """Texts that stand where a row names an image (see `data.content`)."""
    if isinstance(value, dict):
        part = image or value.get("type") in IMAGE_PARTS
        for key, inner in value.items():
            yield from _references(inner, key in _IMAGE_KEYS or (part and key in ("path", "url")))
    elif isinstance(value, list):
        for inner in value:
            yield from _references(inner, image)
    elif image and isinstance(value, str) and not value.startswith(_ELSEWHERE):
        yield value
