"""The class of a model whose configuration names none, as Transformers' own tables have it, read without importing it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib import util
from pathlib import Path

_TABLES = (
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",  # the one that vLLM looks in as well (transformers_utils/config.py)
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    "MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES",
)
OF_VLLM = _TABLES[0]


def architecture_of(model_type: str | None) -> tuple[str, str] | None:
    """(class, name of the table) for a model type; None when no installed Transformers knows it."""
    for file in _tables():
        tables = dict(_mappings(ast.parse(file.read_text(encoding="utf-8"))))
        for table in _TABLES:
            if found := tables.get(table, {}).get(model_type or ""):
                return found, table
    return None


def _tables() -> Iterator[Path]:
    spec = util.find_spec("transformers")
    for place in (spec and spec.submodule_search_locations) or ():
        file = Path(place, "models", "auto", "modeling_auto.py")
        if file.is_file():
            yield file


def _mappings(tree: ast.Module) -> Iterator[tuple[str, dict[str, str]]]:
    """`NAME = OrderedDict([("model_type", "Class"), ...])`; of several classes of one type the first."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and isinstance(node.value, ast.Call):
            listed = node.value.args[0] if node.value.args else None
            if isinstance(listed, ast.List):
                yield node.targets[0].id, dict(filter(None, map(_pair, listed.elts)))


def _pair(entry: ast.expr) -> tuple[str, str] | None:
    try:
        kind, named = ast.literal_eval(entry)
    except (ValueError, TypeError):
        return None
    first = named if isinstance(named, str) else named[0] if named else ""
    return (kind, first) if first else None
