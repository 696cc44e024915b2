"""Reading an object of a foreign `config.json` field by field: what is of the wrong kind is named, with its file and its value."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from headstart.errors import UserError
from headstart.formats.common import CONFIG, Config
from headstart.target.beside import read_object

_PLAIN = "a plain Llama layer, or one with plain MLA"
_WIDEST = 2**18  # far above any model's; no product of three that torch is asked for passes 64 bits


def read_config(folder: Path) -> Config:
    """The object in `config.json`. Raises UserError when there is none."""
    return read_object(folder / CONFIG)


@dataclass(frozen=True)
class Fields:
    """An object of a config.json; `prefix` is where it stands in the file. Null means absent, as it does to the engines."""

    raw: Mapping[str, Any]
    file: Path
    prefix: str = ""

    def get(self, name: str, default: Any) -> Any:
        """The value, whatever it is."""
        value = self.raw.get(name)
        return default if value is None else value

    def part(self, name: str) -> Fields:
        """The object under a name, empty where there is none."""
        value = self.raw.get(name)
        if value is not None and not isinstance(value, Mapping):
            self.wrong(name, "an object, or nothing")
        return Fields(value or {}, self.file, f"{self.prefix}{name}.")

    def size(self, name: str, default: int | None = None, *, most: int = _WIDEST) -> int:
        """A whole number above 0. Without a default it must be there."""
        value = self.raw.get(name)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
            self.wrong(name, f"a whole number from 1 to {most}")
        return value

    def number(self, name: str, default: float | None = None, *, least: float = math.ulp(0.0)) -> float:
        """A finite number, above 0 unless `least` says otherwise."""
        value = self.raw.get(name)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value < 1e30:
            self.wrong(name, "a number of at least 0" if least == 0 else "a number above 0")
        return float(value)

    def switch(self, name: str) -> bool:
        value = self.raw.get(name)
        if value is not None and not isinstance(value, bool):
            self.wrong(name, "true or false")
        return bool(value)

    def text(self, name: str) -> str:
        value = self.raw.get(name)
        if not isinstance(value, str) or not value:
            self.wrong(name, "a name")
        return value

    def listed(self, name: str, kind: type) -> tuple[Any, ...]:
        """The values of one kind in a list, or the one that stands without it; none where there is nothing."""
        value = self.raw.get(name)
        values = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(one, kind) and not isinstance(one, bool) for one in values):
            self.wrong(name, f"{'names' if kind is str else 'whole numbers'}, or nothing")
        return tuple(values)

    def wrong(self, name: str, looked_for: str) -> NoReturn:
        """Raises UserError: the value is not of its kind."""
        raise UserError(f"{self.file} has {self._said(name)}", looked_for=looked_for)

    def strange(self, name: str, looked_for: str = _PLAIN) -> NoReturn:
        """Raises UserError: with this value a draft computes what `Eagle3` has no switch for."""
        what = f"the draft in {self.file.parent} has {self._said(name)}, which headstart has no draft for"
        raise UserError(what, looked_for=looked_for)

    def _said(self, name: str) -> str:
        return f"{self.prefix}{name} = {reprlib.repr(self.raw.get(name))}"
