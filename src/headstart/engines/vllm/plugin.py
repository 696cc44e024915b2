"""The entry point `headstart` of the group `vllm.general_plugins`.

vLLM calls `register` in each of its processes (API server, engine core, workers, and the subprocess in which the registry
inspects a class), and goes on without it when it fails: `state` is how a worker proves that it ran. Without the
environment variable nothing happens.
"""

from __future__ import annotations

import os
from typing import Any

from headstart.engines.vllm.variables import SHIM

_ALL = "all"

_state: dict[str, Any] = {"loaded": False, "pid": None, "vllm": None, "shims": [], "unknown": []}


def state() -> dict[str, Any]:
    """What `register` did in this process: loaded, pid, vllm (version), shims and unknown (architectures)."""
    return {**_state, "shims": list(_state["shims"]), "unknown": list(_state["unknown"])}


def register() -> None:
    """Called by vLLM in each of its processes, in some more than once."""
    wanted = [name.strip() for name in os.environ.get(SHIM, "").split(",") if name.strip()]
    _state.update(loaded=True, pid=os.getpid())
    if wanted:
        _register(wanted)


def _register(wanted: list[str]) -> None:
    from vllm import ModelRegistry, __version__  # noqa: PLC0415 (importing this module must stay free)

    from headstart.engines.vllm import shims  # noqa: PLC0415

    shims.only_where_lacking = _ALL in wanted
    names = _decoders(set(ModelRegistry.models)) if _ALL in wanted else wanted
    for name in names:
        if name in ModelRegistry.models and name not in shims.originals:
            # Taken out first: older releases warn of a name that they know already.
            shims.originals[name] = ModelRegistry.models.pop(name)
            ModelRegistry.register_model(name, f"{shims.__name__}:{shims.name_of(name, __version__)}")
    _state.update(vllm=__version__, shims=sorted(shims.originals), unknown=sorted(set(names) - set(shims.originals)))


def _decoders(registered: set[str]) -> list[str]:
    """The architectures that generate text, by vLLM's own tables (the same two in 0.11 to 0.32)."""
    from vllm.model_executor.models import registry  # noqa: PLC0415

    return sorted(registered & {*registry._TEXT_GENERATION_MODELS, *registry._MULTIMODAL_MODELS})
