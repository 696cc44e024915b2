"""Finding the decoder layers inside a live model, whatever is around them, and reading their states by hooks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from headstart.errors import GateError, UserError

FINAL_NORMS = ("norm", "final_layernorm", "final_layer_norm", "final_norm", "ln_f", "norm_f", "embedding_norm")

# A list of blocks under one of these names sees pictures or sound, or predicts beyond the next token.
_TOWERS = ("vision", "visual", "image", "img", "vit", "video", "audio", "speech", "sound", "talker", "code2wav", "mtp")
_MIXERS = ("attn", "attention", "mixer", "mamba", "linear_attn", "temporal_block", "conv", "ffn", "mlp", "feed_forward")


@dataclass(frozen=True)
class Decoder:
    """The text decoder of a model: its layers, their path, and the norm between the last one and the output head."""

    path: str
    layers: nn.ModuleList
    final_norm: nn.Module

    @property
    def num_layers(self) -> int:
        return len(self.layers)


def find_decoder(model: nn.Module, num_layers: int | None, layers_path: str | None = None) -> Decoder:
    """Find the decoder layers of `model`: at `layers_path` when given, else the one list that looks like them.

    `num_layers` (what the text configuration says) decides between several lists.

    Raises:
        UserError: nothing fits, or several do; names what was looked for and found.
    """
    path = layers_path or _search(model, num_layers)
    layers = _at(model, path)
    if not isinstance(layers, nn.ModuleList):
        raise UserError(
            f"target.layers_path = {path!r} leads to {'nothing' if layers is None else type(layers).__name__}",
            looked_for=f"a list of decoder layers, such as {', '.join(module_lists(model)) or '(this model has none)'}",
            do="correct it, or leave it out",
        )
    return Decoder(path, layers, _final_norm(model, path))


def _search(model: nn.Module, num_layers: int | None) -> str:
    fitting = {path: layers for path, layers in module_lists(model).items() if looks_like_decoder(path, layers)}
    if num_layers is not None and any(len(layers) == num_layers for layers in fitting.values()):
        fitting = {path: layers for path, layers in fitting.items() if len(layers) == num_layers}
    longest = max((len(layers) for layers in fitting.values()), default=0)
    best = [path for path, layers in fitting.items() if len(layers) == longest]
    if len(best) == 1:
        return best[0]
    found = ", ".join(f"{path} ({len(layers)})" for path, layers in module_lists(model).items()) or "none"
    raise UserError(
        f"the decoder layers of {type(model).__name__} were not found" + (f": {best} fit alike" if best else ""),
        looked_for=f"one list of {num_layers or 'decoder'} blocks outside vision and audio towers; found {found}",
        do="set target.layers_path to the right one",
    )


def module_lists(model: nn.Module) -> dict[str, nn.ModuleList]:
    """All outermost lists of modules by path (a list inside a layer, such as experts, is not one)."""
    found: dict[str, nn.ModuleList] = {}
    for path, module in model.named_modules():
        inside = any(path.startswith(f"{outer}.") for outer in found)
        if isinstance(module, nn.ModuleList) and len(module) and not inside:
            found[path] = module
    return found


def looks_like_decoder(path: str, layers: nn.ModuleList) -> bool:
    """Whether a list of blocks mixes tokens and stands outside vision, audio and multi-token-prediction parts."""
    words = path.lower().replace(".", "_").split("_")
    if any(word.startswith(tower) for word in words for tower in _TOWERS):
        return False
    # A layer that another pipeline rank holds has no children here.
    block = next((layer for layer in layers if any(True for _ in layer.children())), layers[0])
    children = [name for name, _ in block.named_children()]
    return any(mixer in name for name in children for mixer in _MIXERS)


def _final_norm(model: nn.Module, path: str) -> nn.Module:
    owner = model.get_submodule(path.rpartition(".")[0])
    for name in FINAL_NORMS:
        norm = getattr(owner, name, None)
        if isinstance(norm, nn.Module):
            return norm
    beside = ", ".join(name for name, _ in owner.named_children())
    raise UserError(
        f"the final norm beside {path} was not found", looked_for=", ".join(FINAL_NORMS), do=f"it is none of: {beside}"
    )


def _at(model: nn.Module, path: str) -> nn.Module | None:
    try:
        return model.get_submodule(path)
    except AttributeError:
        return None


@dataclass
class Captured:
    """What the hooks of one forward pass saw: [batch, tokens, d] by boundary, and how often each fired."""

    states: dict[int, Tensor] = field(default_factory=dict)
    fired: dict[int, int] = field(default_factory=dict)

    def put(self, boundary: int, value: Any) -> None:
        state = value[0] if isinstance(value, tuple) else value
        self.states[boundary] = state
        self.fired[boundary] = self.fired.get(boundary, 0) + 1

    def check(self, boundaries: Sequence[int], shape: tuple[int, int, int]) -> None:
        """Raises GateError unless every boundary was seen exactly once with `shape`."""
        for boundary in boundaries:
            count = self.fired.get(boundary, 0)
            if count != 1:
                raise GateError(f"boundary {boundary} was reached {count} times in one forward pass, not once")
            found = tuple(self.states[boundary].shape)
            if found != shape:
                raise GateError(f"the states at boundary {boundary} have shape {found}, not {shape}")


@contextmanager
def capturing(layers: nn.ModuleList, boundaries: Sequence[int]) -> Iterator[Captured]:
    """Hook the layers for as long as the context lasts. Run one forward pass in it, then `check` and read `states`."""
    captured = Captured()
    with ExitStack() as stack:
        for boundary in sorted(set(boundaries)):
            stack.enter_context(_removing(_hook(layers, boundary, captured)))
        yield captured


def _hook(layers: nn.ModuleList, boundary: int, captured: Captured) -> torch.utils.hooks.RemovableHandle:
    def before(_: nn.Module, args: tuple, kwargs: dict) -> None:
        captured.put(boundary, args[0] if args else kwargs["hidden_states"])

    def after(_: nn.Module, args: tuple, output: Any) -> None:
        del args
        captured.put(boundary, output)

    if boundary == 0:
        return layers[0].register_forward_pre_hook(before, with_kwargs=True)
    return layers[boundary - 1].register_forward_hook(after)


@contextmanager
def _removing(handle: torch.utils.hooks.RemovableHandle) -> Iterator[None]:
    try:
        yield
    finally:
        handle.remove()
