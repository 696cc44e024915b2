"""Subclasses of vLLM's own model classes that speak its EAGLE-3 interface, made when vLLM asks for them.

vLLM's registry is given the string `headstart.engines.vllm.shims:<name>`; nothing is imported until it looks that name
up here (its inspection subprocess does too). The name carries a fingerprint of what it stands for, because vLLM caches
what it learned of a class under that name and the hash of this file alone (registry.py: `_get_cache_filename`).
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from headstart.engines.vllm.drafting import make_draftable
from headstart.engines.vllm.tapped import Tap
from headstart.engines.vllm.tree import find_text_model
from headstart.engines.vllm.variables import LAYERS_PATH

_SEPARATOR = "__"

originals: dict[str, Any] = {}  # by architecture: what the registry held before us
only_where_lacking = False  # leave a class that has the interface as it is
_made: dict[str, type[nn.Module]] = {}


class Shim:
    """The members that `SupportsEagle3` and its users look for (vLLM 0.11 to 0.32; one getter was renamed in 0.18)."""

    supports_eagle3 = True
    has_own_lm_head = False
    has_own_embed_tokens = False
    _headstart_tap: Tap | None = None

    def set_aux_hidden_state_layers(self, layers: tuple[int, ...]) -> None:
        """From now on forward returns (hidden states, [aux]): aux by rising boundary, [tokens, d] each."""
        if self._headstart_tap is not None:
            self._headstart_tap.remove()
        self._headstart_tap = Tap(_text(self), layers)

    def get_eagle3_default_aux_hidden_state_layers(self) -> tuple[int, ...]:
        count = _text(self).num_layers
        return (2, count // 2, count - 3)

    def get_eagle3_aux_hidden_state_layers(self) -> tuple[int, ...]:
        return self.get_eagle3_default_aux_hidden_state_layers()


def __getattr__(name: str) -> type[nn.Module]:
    architecture, separator, _ = name.partition(_SEPARATOR)
    if not separator or architecture not in originals:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if architecture not in _made:
        original = originals[architecture].load_model_cls()
        native = only_where_lacking and getattr(original, "supports_eagle3", False)
        _made[architecture] = original if native else shim(original)
    return _made[architecture]


def name_of(architecture: str, version: str) -> str:
    """Under which name this module offers the shim of an architecture whose original is known."""
    original = originals[architecture]
    facts = [version, only_where_lacking, *_where(original)]
    return f"{architecture}{_SEPARATOR}{hashlib.sha256(repr(facts).encode()).hexdigest()[:12]}"


def shim(original: Any) -> type[nn.Module]:
    """A subclass of a vLLM model class with the interface; until ids are set it does what the original does.

    It keeps the class's name, by which vLLM's proposer tells wrappers apart.
    """

    @functools.wraps(original.__init__)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original.__init__(self, *args, **kwargs)
        _prepare(self, kwargs)

    def __new__(cls: Any, *args: Any, **kwargs: Any) -> Any:
        made = original.__new__(cls, *args, **kwargs)
        if not isinstance(made, original):  # MiniCPM-V and -O choose their class here, and have built it
            made.__class__ = shim(type(made))
            _prepare(made, kwargs)
        return made

    @functools.wraps(original.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Tensor | tuple[Tensor, list[Tensor]]:
        output = original.forward(self, *args, **kwargs)
        tap = self._headstart_tap
        return output if tap is None else (output, tap.take(output.shape[0]))

    members = {"__init__": __init__, "forward": forward, "__module__": original.__module__, "__doc__": original.__doc__}
    if original.__new__ is not object.__new__:
        members["__new__"] = __new__
    return type(original)(original.__name__, (Shim, original), members)


def _prepare(model: nn.Module, given: dict[str, Any]) -> None:
    config = given.get("vllm_config")
    if getattr(config, "speculative_config", None) is not None:
        make_draftable(model, config)


def _text(model: Any) -> Any:
    return find_text_model(model, os.environ.get(LAYERS_PATH) or None)


def _where(original: Any) -> list[Any]:
    """What identifies the class behind a registry entry, without importing it: names, file, its time and size."""
    module = getattr(original, "module_name", None)
    if module is None:
        return [repr(original.model_cls)]
    spec = importlib.util.find_spec(module)
    path = Path(spec.origin) if spec and spec.origin else None
    state = path.stat() if path and path.is_file() else None
    return [module, original.class_name, str(path), state and (state.st_mtime_ns, state.st_size)]
