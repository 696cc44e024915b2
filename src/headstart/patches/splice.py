"""Puts our capture code into speculators' `custom_worker.py`, and leaves the rest of that file as it is.

The template beside this file (`custom_worker.py.txt`) is a module of the same shape. Of the original, its forward
replacement gives way to the template's functions, and the method that installed it to the template's methods; the
docstring of the class changes, and imports that nothing uses any more go.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from importlib import resources

CLASS = "HiddenStatesWorkerExtension"
REPLACED_FUNCTION = "_patched_forward"
REPLACED_METHOD = "_setup_hidden_states_capture"

Definition = ast.FunctionDef | ast.ClassDef


def spliced(original: str) -> str:
    """The text of `custom_worker.py` with our capture in it.

    Raises:
        ValueError: a definition that is to be replaced is not there; names it. Also what `ast.parse` raises.
    """
    tree, ours, lines = ast.parse(original), ast.parse(template()), template().splitlines(keepends=True)
    worker, our_class = _definition(tree, CLASS), _definition(ours, CLASS)
    support = lines[_imports(ours)[-1].end_lineno : our_class.lineno - 1]
    docstring, *methods = our_class.body
    edits = [
        (_definition(tree, REPLACED_FUNCTION), _text(support)),
        (worker.body[0], _text(lines[docstring.lineno - 1 : docstring.end_lineno])),
        (_definition(worker, REPLACED_METHOD), _text(lines[methods[0].lineno - 1 : methods[-1].end_lineno])),
    ]
    if ast.get_docstring(worker) is None:
        del edits[1]
    return _with_imports(_replaced(original, edits), [*_imports(tree), *_imports(ours)])


@cache
def template() -> str:
    return resources.files("headstart.patches").joinpath("custom_worker.py.txt").read_text(encoding="utf-8")


def after_docstring(text: str, addition: str) -> str:
    """`text` of a module with whole lines added behind its docstring (at its start without one)."""
    tree = ast.parse(text)
    end = (tree.body[0].end_lineno or 0) if ast.get_docstring(tree) is not None else 0
    lines = text.splitlines(keepends=True)
    return "".join([*lines[:end], addition, *lines[end:]])


def _definition(owner: ast.Module | Definition, name: str) -> Definition:
    for node in owner.body:
        if isinstance(node, Definition) and node.name == name:
            return node
    raise ValueError(f"{name} is not in it")


def _imports(tree: ast.Module) -> list[ast.Import | ast.ImportFrom]:
    return [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]


def _replaced(text: str, edits: Iterable[tuple[ast.stmt, str]]) -> str:
    """`text` with the lines of each statement replaced."""
    lines = text.splitlines(keepends=True)
    for node, new in sorted(edits, key=lambda edit: -edit[0].lineno):
        lines[node.lineno - 1 : node.end_lineno] = [new]
    return "".join(lines)


def _text(lines: list[str]) -> str:
    """The lines without blank ones around them."""
    return "".join(lines).strip("\n") + "\n"


def _with_imports(text: str, wanted: list[ast.Import | ast.ImportFrom]) -> str:
    """`text` with, in place of its imports, those of `wanted` that it uses."""
    tree = ast.parse(text)
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    first, *others = _imports(tree)
    lines = text.splitlines(keepends=True)
    for node in reversed(others):
        start = node.lineno - 1
        while not lines[start - 1].strip():  # the blank line between two groups
            start -= 1
        del lines[start : node.end_lineno]
    lines[first.lineno - 1 : first.end_lineno] = ["\n".join(_import_lines(wanted, used))]
    return "".join(lines)


def _import_lines(wanted: list[ast.Import | ast.ImportFrom], used: set[str]) -> Iterator[str]:
    """Sorted as import sorters do: the standard library, a blank line, the others."""
    names: dict[tuple[bool, bool, str], set[str]] = {}
    for node in wanted:
        for alias in node.names:
            if (alias.asname or alias.name).partition(".")[0] in used:
                bound = alias.name + (f" as {alias.asname}" if alias.asname else "")
                plain = isinstance(node, ast.Import)
                module = bound if plain else "." * node.level + (node.module or "")
                names.setdefault((_is_foreign(module), not plain, module), set()).add(bound)
    standard = True
    for (foreign, is_from, module), bound in sorted(names.items()):
        if foreign and standard:
            yield ""
            standard = False
        yield f"from {module} import {', '.join(sorted(bound))}" if is_from else f"import {module}"
    yield ""


def _is_foreign(module: str) -> bool:
    return module.partition(".")[0] not in sys.stdlib_module_names
