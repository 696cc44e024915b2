#!/usr/bin/env python3
"""The layer rules of the package, read from its imports. Prints each breach and exits 1 when there is one.

1. No torch, transformers, numpy or other heavy import is reachable from the light modules (`--help`, `inspect`, `status`).
2. Stages do not import stages.
3. There is no import cycle.
4. vLLM is imported only in engines/vllm.
5. Foreign spellings of other projects' files live only in formats/ and engines/.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent / "src"
LIGHT = ("cli", "config", "errors", "events", "files", "artifact", "pipeline", "rundir", "target.anatomy", "target.layers")
HEAVY = {"torch", "transformers", "tokenizers", "datasets", "vllm", "matplotlib", "pyarrow", "numpy", "safetensors"}
FOREIGN = re.compile(r"\b(t2d|d2t|eagle_aux_hidden_state_layer_ids|midlayer|speculators_model_type)\b")
MAY_SPELL = ("headstart/formats/", "headstart/engines/")


def main() -> int:
    sources = {_name(path): path for path in sorted(ROOT.rglob("*.py"))}
    imports = {name: set(_imports(path)) for name, path in sources.items()}
    inner = {name: {hit for item in found if (hit := _own(item, sources))} - {name} for name, found in imports.items()}
    breaches = [*_heavy(imports, inner), *_stages(sources, inner), *_cycles(inner), *_vllm(sources), *_foreign(sources)]
    for breach in breaches:
        print(f"layers: {breach}", file=sys.stderr)
    print(f"layers: {len(sources)} modules, {len(breaches)} breaches")
    return 1 if breaches else 0


def _heavy(imports: dict[str, set[str]], inner: dict[str, set[str]]) -> Iterator[str]:
    for light in LIGHT:
        start = f"headstart.{light}"
        for name in sorted(_reachable(start, inner)):
            heavy = {item.partition(".")[0] for item in imports[name]} & HEAVY
            if heavy:
                yield f"{start} reaches {', '.join(sorted(heavy))} through {name}"


def _stages(sources: dict[str, Path], inner: dict[str, set[str]]) -> Iterator[str]:
    for name in sources:
        if name.startswith("headstart.stages."):
            for other in sorted(inner[name]):
                if other.startswith("headstart.stages."):
                    yield f"stage {name} imports stage {other}"


def _cycles(inner: dict[str, set[str]]) -> Iterator[str]:
    for name in sorted(inner):
        if any(name in _reachable(other, inner) for other in inner[name]):
            yield f"{name} is part of an import cycle"


def _vllm(sources: dict[str, Path]) -> Iterator[str]:
    for name, path in sources.items():
        if not name.startswith("headstart.engines.vllm") and "vllm" in {i.partition(".")[0] for i in _imports(path, deep=True)}:
            yield f"{name} imports vllm"


def _foreign(sources: dict[str, Path]) -> Iterator[str]:
    for name, path in sources.items():
        if any(part in path.as_posix() for part in MAY_SPELL):
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), start=1):
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


def _imports(path: Path, *, deep: bool = False) -> Iterator[str]:
    """Imported names at module level (everywhere with `deep`), leaving out `if TYPE_CHECKING`."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree) if deep else _top(tree.body):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _top(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        if isinstance(node, ast.If) and "TYPE_CHECKING" not in ast.dump(node.test):
            yield from _top(node.body + node.orelse)
        elif isinstance(node, ast.Try):
            yield from _top(node.body)
        else:
            yield node


def _own(item: str, sources: dict[str, Path]) -> str | None:
    """The module of ours that an imported name belongs to."""
    while item:
        if item in sources:
            return item
        item = item.rpartition(".")[0]
    return None


def _name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


if __name__ == "__main__":
    raise SystemExit(main())
