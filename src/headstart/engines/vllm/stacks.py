"""Where a model class of vLLM keeps its decoder layers, read from its source.

The rules follow how vLLM's classes are written (0.11 to 0.32): a layer list is made by `make_layers` or is an
`nn.ModuleList`; a wrapper builds its text model in `__init__`, by class or by `init_vllm_registered_model`.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TypeGuard

from headstart.engines.vllm.source import Class, Function, last_name

# Names under which a decoder is kept, the first that is there wins; towers of other modalities have other names.
CHILDREN = (
    *("language_model", "llm", "text_model", "text", "model", "transformer", "backbone", "gpt_neox", "decoder"),
    *("H_module", "layers", "encoder"),
)
LISTS = ("layers", "h", "blocks")
REGISTERED = ("init_vllm_registered_model", "initialize_model")
USUAL = "model.layers"

Lookup = Callable[[str], Class | None]


@dataclass(frozen=True)
class Stack:
    """A list of decoder layers. path: from the class asked. holder: the class that owns the list (None: the
    configuration decides). layer: the class of its items. registered: architectures asked of the registry on the way.
    """

    path: str
    holder: Class | None
    layer: Class | None = None
    registered: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Scope:
    """Where an expression stands. cls: the class whose object is built; owner: the class that spells the method."""

    cls: Class
    owner: Class
    method: Function

    def local(self, name: str) -> Iterator[ast.expr]:
        """What a local name is assigned in the method."""
        for node in ast.walk(self.method):
            if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == name for t in node.targets):
                yield node.value

    def argument(self, name: str) -> Iterator[tuple[_Scope, ast.expr]]:
        """What a parameter is given: by a subclass that calls this method, else its default."""
        for one in self.cls.lineage:
            for method in one.methods.values():
                for node in ast.walk(method):
                    if isinstance(node, ast.keyword) and node.arg == name and last_name(node.value) != name:
                        yield _Scope(self.cls, one, method), node.value
        arguments = self.method.args
        positional = [*arguments.posonlyargs, *arguments.args]
        given = [*zip(reversed(positional), reversed(arguments.defaults), strict=False)]
        given += [*zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)]
        yield from ((self, default) for parameter, default in given if parameter.arg == name and default)


def find(cls: Class, lookup: Lookup, depth: int = 6) -> Stack | None:
    """The decoder stack of a model class, None when there is none. `lookup`: the class of a registered architecture."""
    if several := [find(one, lookup, depth - 1) for one in _stand_ins(cls)]:
        return _common([one for one in several if one])
    made = _attributes(cls)
    for name in LISTS:
        for scope, expression in made.get(name, ()):
            if (item := _item(expression)) is not None:
                return Stack(name, cls, next(iter(_classes(item, scope)), None))
    for name in CHILDREN if depth else ():
        for scope, expression in made.get(name, ()):
            if stack := _inside(expression, scope, lookup, depth):
                return replace(stack, path=f"{name}.{stack.path}")
    return None


def _inside(expression: ast.expr, scope: _Scope, lookup: Lookup, depth: int) -> Stack | None:
    """The stack inside what an expression builds."""
    for built in _built(expression, scope):
        if isinstance(built, Class):
            if stack := find(built, lookup, depth - 1):
                return stack
            continue
        names = tuple(dict.fromkeys(name for name in _strings(*built) if lookup(name)))
        inner = lookup(names[0]) if names else None
        stack = find(inner, lookup, depth - 1) if inner else Stack(USUAL, None)
        return replace(stack, registered=names) if stack else None
    return None


def _common(several: list[Stack]) -> Stack | None:
    """One stack for classes that the configuration chooses from: without a holder unless all agree on it."""
    holders = {id(one.holder): one.holder for one in several}
    if len(holders) == 1 or not several:
        return next(iter(several), None)
    return Stack(several[0].path, None)


def _stand_ins(cls: Class) -> list[Class]:
    """The classes of a table in the module that `__new__` chooses from by the configuration."""
    method = cls.methods.get("__new__")
    names = {node.id for node in ast.walk(method) if isinstance(node, ast.Name)} if method else set()
    tables = [there for name in sorted(names) if isinstance(there := cls.module.names.get(name), ast.Dict)]
    values = [last_name(value) for table in tables for value in table.values]
    return [found for name in values if (found := cls.module.find(name)) and found is not cls]


def _attributes(cls: Class) -> dict[str, list[tuple[_Scope, ast.expr]]]:
    """What `__init__` assigns to attributes of self, nearest class first, as far as `super().__init__` goes on."""
    found: dict[str, list[tuple[_Scope, ast.expr]]] = {}
    for owner in cls.lineage:
        if (method := owner.methods.get("__init__")) is None:
            continue
        for scope in (_Scope(cls, owner, method), *_setup(cls, method)):
            for name, value in _assigned(scope.method):
                found.setdefault(name, []).append((scope, value))
        if not _goes_on(method):
            break
    return found


def _setup(cls: Class, method: Function) -> Iterator[_Scope]:
    """Methods of self that `__init__` calls as statements, such as `self._init_layers(...)`."""
    for node in ast.walk(method):
        call = node.value if isinstance(node, ast.Expr) else None
        if isinstance(call, ast.Call) and is_self(call.func) and (found := cls.method(call.func.attr)):
            yield _Scope(cls, *found)


def _assigned(method: Function) -> Iterator[tuple[str, ast.expr]]:
    for node in ast.walk(method):
        if isinstance(node, ast.Assign):
            flat = (item for target in node.targets for item in getattr(target, "elts", (target,)))
            yield from ((item.attr, node.value) for item in flat if is_self(item))
        elif isinstance(node, ast.AnnAssign) and node.value and is_self(node.target):
            yield node.target.attr, node.value


def _goes_on(method: Function) -> bool:
    """`super().__init__(...)` with arguments reaches a model class; without, it reaches torch's Module."""
    calls = (node for node in ast.walk(method) if isinstance(node, ast.Call) and (node.args or node.keywords))
    return any(_is_super_init(call.func) for call in calls)


def _is_super_init(func: ast.expr) -> bool:
    of = func.value if isinstance(func, ast.Attribute) and func.attr == "__init__" else None
    return isinstance(of, ast.Call) and last_name(of.func) == "super"


def _item(expression: ast.expr) -> ast.expr | None:
    """What makes one item of a list of layers, None when the expression is not such a list."""
    if not isinstance(expression, ast.Call):
        return None
    kind = last_name(expression.func)
    if kind == "make_layers":
        named = [word.value for word in expression.keywords if word.arg == "layer_fn"]
        return (named or expression.args[1:2] or [expression])[0]
    if kind == "ModuleList":
        listed = next(iter(expression.args), expression)
        return listed.elt if isinstance(listed, ast.ListComp | ast.GeneratorExp) else listed
    return None


def _built(expression: ast.expr, scope: _Scope, depth: int = 5) -> Iterator[Class | tuple[ast.Call, _Scope]]:
    """Classes that an expression builds an object of; calls that ask the registry are handed back as they are."""
    if depth == 0:
        return
    if isinstance(expression, ast.IfExp):
        for part in (expression.body, expression.orelse):
            yield from _built(part, scope, depth - 1)
    elif isinstance(expression, ast.Name):
        for value in scope.local(expression.id):
            yield from _built(value, scope, depth - 1)
    elif isinstance(expression, ast.Call):
        if last_name(expression.func) in REGISTERED:
            named = [word.value for word in expression.keywords if word.arg == "model_class"]
            yield from _classes(named[0], scope) if named else [(expression, scope)]
        elif is_self(expression.func):
            yield from _returned(expression.func.attr, scope, depth)
            yield from _class_attribute(expression.func.attr, scope.cls)
        else:
            yield from _classes(expression.func, scope)


def _returned(name: str, scope: _Scope, depth: int) -> Iterator[Class | tuple[ast.Call, _Scope]]:
    if found := scope.cls.method(name):
        owner, method = found
        for node in ast.walk(method):
            if isinstance(node, ast.Return) and node.value is not None:
                yield from _built(node.value, _Scope(scope.cls, owner, method), depth - 1)


def _class_attribute(name: str, cls: Class) -> Iterator[Class]:
    """The class that a class attribute names, as in `model_cls = DeepseekV2Model`."""
    for one in cls.lineage:
        for node in one.node.body:
            target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
            named = getattr(node, "value", None) if last_name(target) == name else None
            if isinstance(named, ast.Name) and (found := one.module.find(named.id)):
                yield found


def _classes(expression: ast.expr, scope: _Scope, depth: int = 6) -> Iterator[Class]:
    """The classes that an expression may stand for, or that calling it builds."""
    if depth == 0:
        return
    for part, where in _parts(expression, scope):
        if isinstance(part, ast.Name) and (found := where.owner.module.find(part.id)):
            yield found
        else:
            yield from _classes(part, where, depth - 1)


def _parts(expression: ast.expr, scope: _Scope) -> Iterator[tuple[ast.expr, _Scope]]:
    if isinstance(expression, ast.Call):
        yield expression.func, scope
    elif isinstance(expression, ast.Lambda):
        yield expression.body, scope
    elif isinstance(expression, ast.Subscript):
        yield expression.value, scope
    elif isinstance(expression, ast.IfExp):
        yield from ((part, scope) for part in (expression.body, expression.orelse))
    elif isinstance(expression, ast.Dict):
        yield from ((part, scope) for part in expression.values if part)
    elif isinstance(expression, ast.List):
        yield from ((part, scope) for part in expression.elts)
    elif isinstance(expression, ast.Name):
        yield from _meanings(expression, scope)


def _meanings(name: ast.Name, scope: _Scope) -> Iterator[tuple[ast.expr, _Scope]]:
    """What a name stands for that is not a class itself: a global table, a local, an inner function, a parameter."""
    module = scope.owner.module
    if module.find(name.id):
        yield name, scope
        return
    if isinstance(there := module.names.get(name.id), ast.expr):
        yield there, scope
    yield from ((value, scope) for value in scope.local(name.id))
    for node in ast.walk(scope.method):
        if isinstance(node, Function) and node.name == name.id and node is not scope.method:
            yield from ((r.value, scope) for r in ast.walk(node) if isinstance(r, ast.Return) and r.value)
    yield from ((value, where) for where, value in scope.argument(name.id))


def _strings(call: ast.Call, scope: _Scope) -> Iterator[str]:
    """String constants in a call, those of local names given to it included."""
    names = (node.id for node in ast.walk(call) if isinstance(node, ast.Name))
    for part in (call, *(value for name in names for value in scope.local(name))):
        for node in ast.walk(part):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def is_self(node: ast.AST, name: str | None = None) -> TypeGuard[ast.Attribute]:
    """Whether the node is `self.<name>` (any name when None)."""
    return (
        isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
        and name in (None, node.attr)
    )
