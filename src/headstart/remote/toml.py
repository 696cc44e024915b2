"""Settings as TOML text. Python reads TOML but does not write it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def dumps(values: Mapping[str, Any]) -> str:
    """A TOML document of plain values and one level of tables; what is None is left out, tables further in are inline."""
    here = {key: value for key, value in values.items() if not isinstance(value, Mapping)}
    tables = {key: value for key, value in values.items() if isinstance(value, Mapping)}
    parts = [_pairs(here), *(f"[{_key(key)}]\n{_pairs(table)}" for key, table in tables.items())]
    return "\n".join(part for part in parts if part)


def _pairs(values: Mapping[str, Any]) -> str:
    return "".join(f"{_key(key)} = {_value(value)}\n" for key, value in values.items() if value is not None)


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        inside = (f"{_key(key)} = {_value(item)}" for key, item in value.items() if item is not None)
        return "{" + ", ".join(inside) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_value, value)) + "]"
    return _text(value) if isinstance(value, str) else json.dumps(value)


def _key(key: str) -> str:
    return key if key.isascii() and key.replace("_", "").replace("-", "").isalnum() else _text(key)


def _text(value: str) -> str:
    """JSON's escapes are TOML's, but for DEL, which TOML wants escaped, too."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
