"""Finding the text decoder inside any live vLLM model: its layers, final norm, embedding and output head.

The paths are those of vLLM 0.11 to 0.32 (every text and multimodal class of `vllm/model_executor/models` and
`vllm/models`); a model that fits none is searched for the longest list of decoder-like blocks. Runs inside vLLM's
processes, yet knows modules only by attribute and class name: it imports no vLLM.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from headstart.engines.hooks import FINAL_NORMS, looks_like_decoder, module_lists
from headstart.errors import UserError

# Seen from the language model or from the whole model; what stands first wins.
LAYER_PATHS = (
    "model.layers",
    "layers",
    "transformer.h",
    "transformer.encoder.layers",
    "transformer.blocks",
    "backbone.layers",
    "model.decoder.layers",
    "model.decoder.model.layers",
    "model.text_model.layers",
    "model.language_model.layers",
    "model.layers.layers",
    "model.model.layers",
    "language_model.model.layers",
    "language_model.layers",
    "llm.model.layers",
    "text.blocks",
    "decoder.model.layers",
    "decoder.layers",
    "gpt_neox.layers",
)

_NORMS = (*FINAL_NORMS, "post_ln")
_EMBEDDINGS = (
    "embed_tokens",
    "wte",
    "word_embeddings",
    "embedding",
    "embeddings",
    "tok_embeddings",
    "embed_in",
    "token_embedding",
)
_HEADS = ("lm_head", "output_layer", "embed_out", "output", "proj_out", "head")
_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_TEXT_CONFIGS = ("text_config", "llm_config", "language_config", "thinker_config", "wrapped_model_config", "decoder")


@dataclass(frozen=True)
class TextModel:
    """The text decoder of a live model. What a rank or a class does not have is None.

    path: of the layers, from the outermost model. holder: the module that owns them. lm_head: None where the model
    multiplies with its embedding instead (tied, e.g. Gemma-2, Cohere). layers: all of the model, under pipeline
    parallelism with placeholders for those of other ranks (`present` says which are here).
    """

    path: str
    model: nn.Module
    holder: nn.Module
    layers: nn.ModuleList
    final_norm: nn.Module | None
    embed: nn.Module | None
    lm_head: nn.Module | None
    logits_processor: nn.Module | None

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def present(self) -> tuple[int, ...]:
        """Indices of the layers that this rank holds."""
        return tuple(index for index, layer in enumerate(self.layers) if not is_missing(layer))

    @property
    def layer_class(self) -> str:
        return type(self.layers[self.present[0]]).__name__ if self.present else ""


def is_missing(module: object) -> bool:
    """True for what stands in for a module of another rank or of a skipped component."""
    return type(module).__name__ in ("PPMissingLayer", "StageMissingLayer")


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside vLLM's CUDA-graph and micro-batch wrappers, which are no modules of it."""
    unwrap = getattr(type(model), "unwrap", None)
    return model if isinstance(model, nn.Module) or unwrap is None else unwrapped(unwrap(model))


def find_text_model(model: nn.Module, layers_path: str | None = None) -> TextModel:
    """The text decoder of `model`, a model object as vLLM's runner holds it.

    layers_path: dotted, from the outermost model; overrides every rule.

    Raises:
        UserError: no list of layers fits, or several do; says what was looked for and what the model has.
    """
    root = unwrapped(model)
    path = _own(root, _given(root, layers_path) if layers_path else _known(root) or _searched(root))
    owner = path.rpartition(".")[0]
    scopes = list(_outwards(root, owner))
    layers = root.get_submodule(path)
    assert isinstance(layers, nn.ModuleList)
    return TextModel(
        path=path,
        model=root,
        holder=scopes[0],
        layers=layers,
        final_norm=_named(scopes, _NORMS),
        embed=_named(scopes, _EMBEDDINGS) or _typed(scopes, "VocabParallelEmbedding"),
        lm_head=_named(scopes, _HEADS, "ParallelLMHead") or _typed(scopes, "ParallelLMHead"),
        logits_processor=_named(scopes, ("logits_processor",)) or _typed(scopes, "LogitsProcessor"),
    )


def language_model(model: nn.Module) -> nn.Module:
    """What a multimodal wrapper says is its language model; the model itself where it says nothing.

    `get_language_model` exists on every multimodal class but raises where nothing was marked (vLLM 0.15 to 0.32).
    """
    ask = getattr(model, "get_language_model", None)
    if ask is None:
        return model
    try:
        inner = ask()
    except (NotImplementedError, AttributeError):
        return model
    return inner if isinstance(inner, nn.Module) else model


def layer_count(model: nn.Module) -> int | None:
    """The number of decoder layers by the model's own configuration; None where it does not say."""
    config = getattr(language_model(model), "config", None) or getattr(model, "config", None)
    for part in (config, *(_field(config, name) for name in _TEXT_CONFIGS)):
        for name in _COUNTS:
            count = _field(part, name)
            if isinstance(count, int):
                return count
    return None


def _field(config: Any, name: str) -> Any:
    return config.get(name) if isinstance(config, dict) else getattr(config, name, None)


def _own(root: nn.Module, path: str) -> str:
    """The path that the class itself has, where `path` leads through an alias of ours (`drafting`)."""
    registered = {name for name, _ in root.named_modules(remove_duplicate=False)}
    return path if path in registered else _path_of(root, root.get_submodule(path))


def _given(root: nn.Module, path: str) -> str:
    if isinstance(_at(root, path), nn.ModuleList):
        return path
    found = _at(root, path)
    raise UserError(
        f"target.layers_path = {path!r} leads to {'nothing' if found is None else type(found).__name__}",
        looked_for=f"a list of decoder layers in {type(root).__name__}, such as {_lists_said(root)}",
        do="correct it, or leave it out",
    )


def _known(root: nn.Module) -> str | None:
    """The first known path that leads to as many decoder-like blocks as the configuration says."""
    count = layer_count(root)
    found = [path for path in _known_paths(root) if looks_like_decoder(path, _list_at(root, path))]
    fitting = [path for path in found if count in (None, len(_list_at(root, path)))]
    return next(iter(fitting), None)


def _known_paths(root: nn.Module) -> Iterator[str]:
    inner = _path_of(root, language_model(root))
    for prefix in dict.fromkeys((inner, "")):
        for known in LAYER_PATHS:
            path = f"{prefix}.{known}" if prefix else known
            if isinstance(_at(root, path), nn.ModuleList):
                yield path


def _searched(root: nn.Module) -> str:
    count = layer_count(root)
    lists = {path: len(layers) for path, layers in module_lists(root).items() if looks_like_decoder(path, layers)}
    lists = {path: length for path, length in lists.items() if length == count} or lists
    best = [path for path, length in lists.items() if length == max(lists.values())]
    if len(best) == 1:
        return best[0]
    raise UserError(
        f"the decoder layers of {type(root).__name__} were not found" + (f": {best} fit alike" if best else ""),
        looked_for=f"{', '.join(LAYER_PATHS)}; then one list of {count or 'decoder'} blocks outside towers and MTP. "
        f"Found {_lists_said(root)}; its attributes: {', '.join(name for name, _ in root.named_children()) or 'none'}",
        do="set target.layers_path to the right one",
    )


def _lists_said(root: nn.Module) -> str:
    return ", ".join(f"{path} ({len(layers)})" for path, layers in module_lists(root).items()) or "no list of modules"


def _at(root: nn.Module, path: str) -> nn.Module | None:
    try:
        return root.get_submodule(path)
    except AttributeError:
        return None


def _list_at(root: nn.Module, path: str) -> nn.ModuleList:
    layers = root.get_submodule(path)
    assert isinstance(layers, nn.ModuleList)
    return layers


def _path_of(root: nn.Module, part: nn.Module) -> str:
    return next((path for path, module in root.named_modules() if module is part), "")


def _outwards(root: nn.Module, path: str) -> Iterator[nn.Module]:
    """The module at `path`, then each that contains it, up to the root."""
    while path:
        yield root.get_submodule(path)
        path = path.rpartition(".")[0]
    yield root


def _named(scopes: list[nn.Module], names: tuple[str, ...], kind: str = "") -> nn.Module | None:
    """The first child with one of the names, nearest to the layers. `kind`: part of its class's name."""
    children = (getattr(scope, name, None) for scope in scopes for name in names)
    fitting = (child for child in children if isinstance(child, nn.Module) and _is_kind(child, kind))
    return next((child for child in fitting if not is_missing(child)), None)


def _is_kind(module: nn.Module, kind: str) -> bool:
    return any(kind in base.__name__ for base in type(module).__mro__)


def _typed(scopes: list[nn.Module], kind: str) -> nn.Module | None:
    """The first module of a class (by name, no subclass) nearest to the layers."""
    modules = (module for scope in scopes for module in scope.modules())
    return next((module for module in modules if type(module).__name__ == kind), None)
