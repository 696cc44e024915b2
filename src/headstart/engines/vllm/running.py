"""How a model class of vLLM runs its decoder layers, and whether it hands over auxiliary hidden states.

Read from the holder's `forward`: what a layer's result is unpacked into, what the final norm is given after the loop.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, replace

from headstart.engines.vllm.arch import Arch, Output, Residual
from headstart.engines.vllm.source import Class, Function, last_name
from headstart.engines.vllm.stacks import Stack, is_self

# The layer returns (hidden, residual) and the final norm takes both, but the residual is already inside hidden: the
# norm class is the family's own and does not add. Read in each module's LayerNorm and layer (0.11 to 0.32).
INSIDE = frozenset(("commandr", "cohere2_moe", "cohere_compass"))
# The final norm stands one level above the owner of the layers. Read in plamo2.py and plamo3.py.
ADDED_ABOVE = frozenset(("plamo2", "plamo3"))
# Several lanes of residual stream (hyper-connections; AltUp in gemma3n), or an update that the next layer applies
# (inkling): what one layer returns is not the stream.
LANES = ("deepseek_v4", "deepseek_v41", "gemma3n", "glm5next", "hy_v4", "inkling", "kimi_k3", "qwen4_exp")
AUX = ("aux_hidden_state", "_maybe_add_hidden_state")


@dataclass(frozen=True)
class Loop:
    """The loop over the layers. targets: what a layer's result is unpacked into. nested: inside another loop. end: the
    last line of it in `method`."""

    targets: tuple[str, ...]
    nested: bool
    method: Function
    end: int


def facts(arch: Arch, cls: Class, stack: Stack | None) -> Arch:
    """The architecture with what its class and its decoder stack say."""
    arch = replace(
        arch,
        eagle3="SupportsEagle3" in cls.ancestry,
        hybrid=bool(cls.ancestry & {"IsHybrid", "IsAttentionFree"}),
        pp="SupportsPP" in cls.ancestry,
        delivers=arch.table == "transformers" and "SupportsEagle3" in cls.ancestry,
    )
    if stack is None:
        return arch
    arch = replace(arch, layers_path=stack.path, registered=stack.registered)
    if stack.holder is None:
        return replace(arch, delivers=None if arch.eagle3 else False)
    return _with_decoder(arch, cls, stack.holder, stack)


def _with_decoder(arch: Arch, cls: Class, holder: Class, stack: Stack) -> Arch:
    forwards = _forwards(holder)
    loop = loop_of(holder, stack.path.rpartition(".")[2])
    output = _output(loop)
    return replace(
        arch,
        inner=holder.label,
        delivers=arch.eagle3 and _delivers(cls, holder, forwards),
        last_layer=any(map(_after_last, (*forwards, *_methods(holder)))),
        enc_dec=_crosses(holder, stack.layer),
        layer_output=output,
        residual=_residual(holder, loop, output, stack.layer),
        loops=bool(loop and loop.nested),
        lanes=any(f".{name}" in holder.module.name for name in LANES),
        stacks=2 if "_module." in stack.path else 1,
    )


def _forwards(holder: Class) -> list[Function]:
    """The `forward` that runs, and those that it calls by `super().forward`."""
    found = []
    for one in holder.lineage:
        if method := one.methods.get("forward"):
            found.append(method)
            if not _calls_super(method):
                break
    return found


def _calls_super(method: Function) -> bool:
    return any(
        isinstance(node, ast.Attribute)
        and node.attr == "forward"
        and last_name(getattr(node.value, "func", node)) == "super"
        for node in ast.walk(method)
    )


def _delivers(cls: Class, holder: Class, forwards: list[Function]) -> bool:
    """Whether asking for auxiliary states works: they can be set, and the forward that runs hands them over."""
    own = cls.method("set_aux_hidden_state_layers")
    settable = "EagleModelMixin" in holder.ancestry or (own is not None and own[0].name != "SupportsEagle3")
    return settable and any(_mentions(method, AUX) for method in forwards)


def _names(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Name | ast.Attribute):
            yield last_name(node)


def _methods(holder: Class) -> Iterator[Function]:
    """All methods that run, the nearest definition of each."""
    found = {name: method for one in reversed(holder.lineage) for name, method in one.methods.items()}
    yield from found.values()


def _after_last(method: Function) -> bool:
    """Whether a wanted index is compared with one that lies behind a layer (`idx + 1`), so that the last counts."""
    for node in ast.walk(method):
        text = ast.unparse(node) if isinstance(node, ast.Call | ast.Compare) and _mentions(node, AUX) else ""
        if any(behind in text for behind in ("+ 1", "end_layer", "len(self.layers)")):
            return True
    return False


def _mentions(node: ast.AST, words: tuple[str, ...]) -> bool:
    return any(word in name for name in _names(node) for word in words)


def _crosses(holder: Class, layer: Class | None) -> bool:
    """Layers that also attend to an encoder's states."""
    methods = [*_forwards(holder), *(_forwards(layer) if layer else ())]
    return any("encoder_hidden_states" in (a.arg for a in method.args.args) for method in methods)


def loop_of(holder: Class, attribute: str) -> Loop | None:
    """The loop of the holder's forward over its layers, None when there is none to be seen."""
    for method in (*_forwards(holder), *_methods(holder)):
        for node, nested in _loops(method, False):
            if (targets := _unpacked(node, attribute)) is not None:
                return Loop(targets, nested, method, node.end_lineno or node.lineno)
    return None


def _loops(node: ast.AST, nested: bool) -> Iterator[tuple[ast.For, bool]]:
    for child in ast.iter_child_nodes(node):
        looping = isinstance(child, ast.For | ast.While)
        yield from _loops(child, nested or looping)
        if isinstance(child, ast.For):
            yield child, nested


def _unpacked(loop: ast.For, attribute: str) -> tuple[str, ...] | None:
    """Names that the result of a layer is bound to in the body of the loop, None when no layer is called in it."""
    layers = _layer_names(loop, attribute)
    for node in ast.walk(loop):
        if not (isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)):
            continue
        if _is_layer(node.value.func, layers, attribute):
            target = node.targets[0]
            return tuple(map(ast.unparse, target.elts if isinstance(target, ast.Tuple) else [target]))
    return None


def _layer_names(loop: ast.For, attribute: str) -> set[str]:
    """Names that stand for a layer: what the loop over the layers binds, and what is taken out by an index."""
    over = any(is_self(node, attribute) for node in ast.walk(loop.iter))
    bound: list[ast.AST] = [loop.target] if over else []
    for node in ast.walk(loop):
        if isinstance(node, ast.Assign) and _is_layer(node.value, set(), attribute):
            bound += node.targets
    return {node.id for target in bound for node in ast.walk(target) if isinstance(node, ast.Name)}


def _is_layer(node: ast.expr, layers: set[str], attribute: str) -> bool:
    if isinstance(node, ast.Subscript):
        return is_self(node.value, attribute)
    return isinstance(node, ast.Name) and node.id in layers


def _output(loop: Loop | None) -> Output | None:
    if loop is None:
        return None
    return {1: "single", 2: "pair"}.get(len(loop.targets), "other")  # pyright: ignore[reportReturnType]


def _residual(holder: Class, loop: Loop | None, output: Output | None, layer: Class | None) -> Residual:
    module = holder.module.name.rpartition(".")[2]
    if loop is None or output == "other":
        return "unknown"
    if output == "single" or (layer and _second_is_none(layer)):
        return "none"
    if module in ADDED_ABOVE:
        return "add"
    return "inside" if module in INSIDE else _behind(loop)


def _second_is_none(layer: Class) -> bool:
    """All returns of the layer's forward are `(something, None)`."""
    method = layer.method("forward")
    returns = [node.value for node in ast.walk(method[1]) if isinstance(node, ast.Return)] if method else []
    return bool(returns) and all(
        isinstance(value, ast.Tuple) and isinstance(last := value.elts[-1], ast.Constant) and last.value is None
        for value in returns
    )


def _behind(loop: Loop) -> Residual:
    """What happens to the pair behind the loop: they are added, the final norm takes both, or hidden goes alone."""
    hidden, residual = loop.targets
    norms: list[Residual] = []
    for node in ast.walk(loop.method):
        if getattr(node, "lineno", 0) <= loop.end:
            continue
        if isinstance(node, ast.BinOp) and {ast.unparse(node.left), ast.unparse(node.right)} == {hidden, residual}:
            return "add"
        if isinstance(node, ast.Call) and _is_norm(last_name(node.func)):
            given = {ast.unparse(part) for part in (*node.args, *(word.value for word in node.keywords))}
            norms.append("add" if residual in given else "inside")
    if "add" in norms:
        return "add"
    return norms[0] if norms else "unknown"


def _is_norm(name: str) -> bool:
    return "norm" in name or name == "ln_f"
