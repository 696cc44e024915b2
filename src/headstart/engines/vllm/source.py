"""Python sources read without importing them: modules, classes, what names stand for, ancestors.

Works on a folder and on a zip archive (a wheel) alike. Nothing is executed, so a tree of another Python or of another
platform can be read.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from importlib.resources.abc import Traversable

Function = ast.FunctionDef | ast.AsyncFunctionDef


class Tree:
    """A package's sources. `root`: the folder of the package, for instance `.../site-packages/vllm`."""

    def __init__(self, root: Traversable, package: str = "vllm") -> None:
        self._root, self._package = root, package
        self._modules: dict[str, Module | None] = {}

    def module(self, name: str) -> Module | None:
        """A module by its full name, None when it is not part of the tree."""
        if name not in self._modules:
            self._modules[name] = self._open(name)
        return self._modules[name]

    def digest(self, *folders: str) -> str:
        """A hash of all sources in some folders of the package, names included."""
        found = hashlib.sha256()
        for folder in folders:
            for path, text in _sources(self._root.joinpath(folder), folder):
                found.update(f"{path}\0{len(text)}\0".encode() + text)
        return found.hexdigest()[:16]

    def _open(self, name: str) -> Module | None:
        head, *rest = name.split(".")
        if head != self._package:
            return None
        place = self._root.joinpath(*rest) if rest else self._root
        for file, is_package in ((f"{'/'.join(rest)}.py", False), ("__init__.py", True)):
            path = place.joinpath(file) if is_package else self._root.joinpath(file)
            if path.is_file():
                return Module(self, name, is_package, path.read_text(encoding="utf-8"))
        return None


@dataclass(eq=False)
class Module:
    """One source file. Of several definitions of a name the last counts, but no other platform's hides that of CUDA."""

    tree: Tree
    name: str
    is_package: bool
    text: str

    @cached_property
    def names(self) -> dict[str, Class | tuple[str, str] | ast.expr]:
        """What each top-level name stands for: a class, (module, name there) of an import, or an assigned expression."""
        found: dict[str, Class | tuple[str, str] | ast.expr] = {}
        for node in _statements(ast.parse(self.text).body):
            if isinstance(node, ast.ClassDef):
                found[node.name] = Class(self, node)
            elif isinstance(node, ast.ImportFrom):
                origin = self._origin(node)
                for alias in node.names:
                    name = alias.asname or alias.name
                    if not (name in found and _hides(origin, found[name])):
                        found[name] = origin, alias.name
            elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                found[node.targets[0].id] = node.value
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value:
                found[node.target.id] = node.value
        return found

    def find(self, name: str, depth: int = 8) -> Class | None:
        """The class that a name stands for here, through imports and plain renamings; None when it is not a class."""
        there = self.names.get(name)
        if isinstance(there, Class) or there is None or depth == 0:
            return there if isinstance(there, Class) else None
        if isinstance(there, ast.expr):
            return self.find(there.id, depth - 1) if isinstance(there, ast.Name) else None
        module = self.tree.module(there[0])
        return module.find(there[1], depth - 1) if module else None

    def _origin(self, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        parts = self.name.split(".") + ([""] if self.is_package else [])
        return ".".join(filter(None, (*parts[: -node.level], node.module)))


@dataclass(eq=False)
class Class:
    module: Module
    node: ast.ClassDef

    @property
    def name(self) -> str:
        return self.node.name

    @property
    def label(self) -> str:
        """Module and name, as in `llama:LlamaModel`; packages of vLLM's own keep their inner path."""
        short = self.module.name.removeprefix("vllm.model_executor.models.").removeprefix("vllm.models.")
        return f"{short}:{self.name}"

    @cached_property
    def lineage(self) -> tuple[Class, ...]:
        """The class and its ancestors in the tree, nearest first (depth first, each once: near enough to the MRO)."""
        found: dict[int, Class] = {}
        for one in self._walk(16):
            found.setdefault(id(one.node), one)
        return tuple(found.values())

    @cached_property
    def ancestry(self) -> frozenset[str]:
        """Names of the class and all ancestors, those from outside the tree included."""
        return frozenset(name for one in self.lineage for name in (one.name, *map(last_name, one.node.bases)))

    @cached_property
    def methods(self) -> dict[str, Function]:
        """Own methods only."""
        return {node.name: node for node in self.node.body if isinstance(node, Function)}

    def method(self, name: str) -> tuple[Class, Function] | None:
        """The nearest definition of a method, and the class it stands in."""
        return next(((one, one.methods[name]) for one in self.lineage if name in one.methods), None)

    def _walk(self, depth: int) -> Iterator[Class]:
        yield self
        for base in self.node.bases if depth else ():
            if parent := self.module.find(last_name(base)):
                yield from parent._walk(depth - 1)


def _sources(folder: Traversable, path: str) -> Iterator[tuple[str, bytes]]:
    for item in sorted(folder.iterdir(), key=lambda item: item.name) if folder.is_dir() else ():
        if item.is_dir():
            yield from _sources(item, f"{path}/{item.name}")
        elif item.name.endswith(".py"):
            yield f"{path}/{item.name}", item.read_bytes()


def _hides(origin: str, before: object) -> bool:
    """Whether an import would put another platform's class, or the generic one, in the place of CUDA's."""
    parts = origin.split(".")
    cuda_before = isinstance(before, tuple) and "nvidia" in before[0].split(".")
    return (cuda_before and "nvidia" not in parts) or any(part in ("amd", "xpu", "cpu") for part in parts)


def last_name(node: ast.AST | None) -> str:
    """The last name of `a.b.C`, also under a subscript; "" for anything else."""
    if isinstance(node, ast.Subscript):
        return last_name(node.value)
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Top-level statements, those inside `if`, `try` and `with` included, in the order of the text."""
    for node in body:
        yield node
        for part in ("body", "handlers", "orelse", "finalbody"):
            inside = getattr(node, part, ()) if isinstance(node, ast.If | ast.Try | ast.With) else ()
            for item in inside:
                yield from _statements(item.body) if isinstance(item, ast.ExceptHandler) else _statements([item])
