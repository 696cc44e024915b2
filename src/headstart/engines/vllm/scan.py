"""The model registry of a vLLM source tree, and the facts of each architecture in it (see `arch.Arch`).

Only what an architecture needs is parsed, when it is asked for: a few files for one, all for a census.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from functools import cached_property
from importlib.resources.abc import Traversable

from headstart.engines.vllm import running, stacks
from headstart.engines.vllm.arch import Arch, Table
from headstart.engines.vllm.source import Class, Tree
from headstart.errors import UserError

REGISTRY = "vllm.model_executor.models.registry"
TABLES: dict[str, Table] = {
    "_TEXT_GENERATION_MODELS": "text",
    "_MULTIMODAL_MODELS": "multimodal",
    "_TRANSFORMERS_SUPPORTED_MODELS": "transformers",
    "_TRANSFORMERS_BACKEND_MODELS": "transformers",
}
NOT_GENERATING = ("Embedding", "SequenceClassification")  # in the names of the Transformers backend's classes


class Registry(Mapping[str, Arch]):
    """The architectures of one source tree, scanned when asked for.

    Raises (on the first look): UserError when the tree has no model registry.
    """

    def __init__(self, root: Traversable) -> None:
        self._tree = Tree(root)
        self._scanned: dict[str, Arch] = {}

    @cached_property
    def digest(self) -> str:
        """A hash of all model sources: two trees with the same one have the same architectures."""
        return self._tree.digest("model_executor/models", "models")

    @cached_property
    def entries(self) -> dict[str, tuple[Table, str, str]]:
        """Table, module and class by architecture."""
        module = self._tree.module(REGISTRY)
        if module is None:
            raise UserError("these are not vLLM's sources", looked_for=REGISTRY.replace(".", "/") + ".py")
        found: dict[str, tuple[Table, str, str]] = {}
        for name, table in TABLES.items():
            for arch, where, cls in _entries(module.names.get(name)):
                if not any(word in cls for word in NOT_GENERATING):
                    found.setdefault(arch, (table, where, cls))
        return found

    def __getitem__(self, name: str) -> Arch:
        if name not in self._scanned:
            self._scanned[name] = self._scan(name, *self.entries[name])
        return self._scanned[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def lookup(self, name: str) -> Class | None:
        """The class that serves an architecture, None when it is not registered or not found in the tree."""
        if name not in self.entries:
            return None
        _, where, cls = self.entries[name]
        full = where if where.startswith("vllm.") else f"vllm.model_executor.models.{where}"
        module = self._tree.module(full)
        return module.find(cls) if module else None

    def _scan(self, name: str, table: Table, where: str, cls: str) -> Arch:
        found = self.lookup(name)
        if found is None:
            return Arch(name, table, where, cls)
        stack = None if table == "transformers" else stacks.find(found, self.lookup)
        return running.facts(Arch(name, table, where, cls), found, stack)


def _entries(table: object) -> Iterator[tuple[str, str, str]]:
    """(architecture, module, class) of a registry dictionary; entries computed from other tables are left out."""
    for key, value in zip(table.keys, table.values, strict=True) if isinstance(table, ast.Dict) else ():
        words = [node.value for node in ast.walk(value) if isinstance(node, ast.Constant)]
        if isinstance(key, ast.Constant) and len(words) == 2:
            yield str(key.value), str(words[0]), str(words[1])
