#!/usr/bin/env python3
"""The layer rules of the package, read from its imports. Prints each breach and exits 1 when there is one.

1. No torch, transformers, numpy or other heavy import is reached by importing a light module (`--help`, `inspect`,
   `status`).
2. Stages do not import stages, nor inside functions.
3. There is no import cycle, nor one that an import inside a function hides.
4. vLLM is imported only in engines/vllm.
5. Foreign spellings of other projects' files live only in formats/ and engines/.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent / "src"
LIGHT = (
    *("cli", "config", "errors", "events", "files", "artifact", "pipeline", "rundir"),
    *("target.anatomy", "target.layers", "target.source", "doctor.doctor", "doctor.show", "remote.command"),
)
HEAVY = {
    *("torch", "transformers", "tokenizers", "datasets", "vllm", "matplotlib", "pyarrow", "numpy", "safetensors"),
    *("huggingface_hub", "jinja2", "gguf"),
}
FOREIGN = re.compile(r"\b(t2d|d2t|eagle_aux_hidden_state_layer_ids|midlayer|speculators_model_type)\b")
MAY_SPELL = ("headstart.formats", "headstart.engines")
MAY_VLLM = "headstart.engines.vllm"
LAZY = ("headstart.cli",)  # verbs import what they need when they run


@dataclass(frozen=True)
class Module:
    """One source file. `imports`: full names imported when it is imported; `all_imports`: also inside functions."""

    name: str
    path: Path

    @cached_property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @cached_property
    def imports(self) -> set[str]:
        return set(self._names(_walk(ast.parse(self.text), functions=False)))

    @cached_property
    def all_imports(self) -> set[str]:
        return set(self._names(_walk(ast.parse(self.text), functions=True)))

    def _names(self, nodes: Iterator[ast.AST]) -> Iterator[str]:
        for node in nodes:
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                base = ".".join(filter(None, (self._above(node.level), node.module)))
                yield from (f"{base}.{alias.name}" for alias in node.names)

    def _above(self, level: int) -> str:
        """What the dots of a relative import stand for."""
        parts = self.name.split(".") + (["__init__"] if self.path.name == "__init__.py" else [])
        return ".".join(parts[:-level]) if level else ""


def main() -> int:
    modules = {module.name: module for module in map(_module, sorted(ROOT.rglob("*.py")))}
    breaches = [rule for check in (_heavy, _stages, _cycles, _vllm, _foreign) for rule in check(modules)]
    for breach in breaches:
        print(f"layers: {breach}", file=sys.stderr)
    print(f"layers: {len(modules)} modules, {len(breaches)} breaches")
    return 1 if breaches else 0


def _heavy(modules: dict[str, Module]) -> Iterator[str]:
    inner = {name: _own(module.imports, modules) | _packages(name) for name, module in modules.items()}
    for light in (f"headstart.{name}" for name in LIGHT):
        if light not in modules:
            yield f"{light} does not exist, but is said to be light"
            continue
        for name in sorted(_reachable(light, inner) & modules.keys()):
            if heavy := _tops(modules[name].imports) & HEAVY:
                yield f"{light} reaches {', '.join(sorted(heavy))} through {name}"


def _stages(modules: dict[str, Module]) -> Iterator[str]:
    for name in sorted(_within(modules, "headstart.stages")):
        others = _own(modules[name].all_imports, modules) - {name, "headstart.stages"}
        yield from (f"stage {name} imports stage {other}" for other in sorted(_within(others, "headstart.stages")))


def _cycles(modules: dict[str, Module]) -> Iterator[str]:
    inner = {name: _own(module.all_imports, modules) - {name} for name, module in modules.items()}
    inner |= {name: set() for name in LAZY}
    for name in sorted(inner):
        if any(name in _reachable(other, inner) for other in inner[name]):
            yield f"{name} is part of an import cycle"


def _vllm(modules: dict[str, Module]) -> Iterator[str]:
    for name in sorted(modules.keys() - _within(modules, MAY_VLLM)):
        if "vllm" in _tops(modules[name].all_imports):
            yield f"{name} imports vllm"


def _foreign(modules: dict[str, Module]) -> Iterator[str]:
    allowed = {name for package in MAY_SPELL for name in _within(modules, package)}
    for name in sorted(modules.keys() - allowed):
        for number, line in enumerate(modules[name].text.split("\n"), start=1):
            if found := FOREIGN.search(line):
                yield f"{name}:{number} spells {found.group()}"


def _reachable(start: str, inner: dict[str, set[str]]) -> set[str]:
    seen, waiting = set(), [start]
    while waiting:
        name = waiting.pop()
        if name not in seen:
            seen.add(name)
            waiting.extend(inner.get(name, ()))
    return seen


def _walk(node: ast.AST, *, functions: bool) -> Iterator[ast.AST]:
    """`node` and all in it, but for what only type checkers read and, unless asked for, the insides of functions."""
    yield node
    for child in _children(node):
        if functions or not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield from _walk(child, functions=functions)


def _children(node: ast.AST) -> Iterable[ast.AST]:
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
        return node.orelse
    return ast.iter_child_nodes(node)


def _own(imported: Iterable[str], modules: Mapping[str, Module]) -> set[str]:
    """The modules of ours that the imported names belong to."""
    return {hit for name in imported if (hit := next((up for up in _upwards(name) if up in modules), None))}


def _packages(name: str) -> set[str]:
    """The packages around a module, whose `__init__` runs before it."""
    return set(_upwards(name)) - {name}


def _upwards(name: str) -> Iterator[str]:
    while name:
        yield name
        name = name.rpartition(".")[0]


def _within(names: Iterable[str], package: str) -> set[str]:
    return {name for name in names if package in _upwards(name)}


def _tops(imported: Iterable[str]) -> set[str]:
    return {name.partition(".")[0] for name in imported}


def _module(path: Path) -> Module:
    return Module(".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"), path)


if __name__ == "__main__":
    raise SystemExit(main())
