"""Making a model's decoder hand out aux hidden states as results of its forward pass, eager and compiled.

A compiled region returns only what its graph returns: hooks that leave tensors in a list outside of it are lost in an
ahead-of-time artefact. So the class of the region (what `@support_torch_compile` decorates, else the owner of the
layers) is replaced on the instance by a subclass whose `forward` collects in hooks on the layers and returns
`(output, aux)`, as vLLM's own EAGLE-3 models do, and whose `__call__`, outside the graph, takes aux off again: the code
around the region, which may work on the hidden states, sees what it always saw. Read in 0.32: compilation/decorators.py,
wrapper.py, caching.py.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

from torch import Tensor, nn

from headstart.engines.vllm import taps
from headstart.engines.vllm.taps import Rule
from headstart.engines.vllm.tree import TextModel
from headstart.errors import GateError, UserError

_KEY = "headstart_aux"  # in vLLM's additional_config, which enters the hash of compiled artefacts


class Tap:
    """Aux states of one model. Made before the first forward pass: a graph traced earlier knows nothing of it."""

    def __init__(self, text: TextModel, boundaries: Sequence[int]) -> None:
        taps.check_boundaries(boundaries, text.num_layers)
        if len(text.present) < text.num_layers:
            raise UserError(
                f"{type(text.model).__name__} is split over pipeline stages: its aux hidden states cannot be collected",
                do="use tensor parallelism alone (pipeline_parallel_size = 1)",
            )
        self.boundaries = tuple(sorted(set(boundaries)))
        self._region: Any = region_of(text)
        self._undo = ExitStack()
        self._undo.callback(setattr, self._region, "__class__", type(self._region))
        if delivers(text.holder):
            text.holder._set_aux_hidden_state_layers(self.boundaries)  # type: ignore[operator]
            replace_class(self._region, forward=None)
            enter_key(self._region, ",".join(map(str, self.boundaries)))
        else:
            self._collect(text, taps.known_rule(text.layer_class))

    def take(self, rows: int) -> list[Tensor]:
        """The aux states [rows, d] of the pass that has just ended, by rising boundary; once.

        Raises:
            GateError: the pass did not come through the layers, or they held another number of rows (sequence-parallel
                experts share them out between ranks).
        """
        aux, self._region._headstart_aux = getattr(self._region, "_headstart_aux", None) or [], None
        if [state.shape[0] for state in aux] != [rows] * len(self.boundaries):
            raise GateError(
                f"{type(self._region).__name__} gave aux hidden states with {[state.shape[0] for state in aux]} rows",
                looked_for=f"{rows} rows for each of the boundaries {list(self.boundaries)}",
                do="capture this model by the hooks rung; for serving, without expert parallelism",
            )
        return aux

    def remove(self) -> None:
        """Leave the model as it was, before another Tap is put on it."""
        self._undo.close()

    def _collect(self, text: TextModel, rule: Rule) -> None:
        region, count = self._region, len(self.boundaries)

        def put(state: Tensor) -> None:
            region._headstart_seen.append(state)

        said = f"{','.join(map(str, self.boundaries))} {rule}"
        replace_class(region, collecting(type(region), count, said))
        for boundary in self.boundaries:
            self._undo.callback(taps.attach(text, boundary, rule, put).remove)
        enter_key(region, said)
        recompile(region)


def region_of(text: TextModel) -> nn.Module:
    """The outermost compiled module around the layers, else the owner of the layers."""
    around = [module for module in _containing(text) if hasattr(module, "do_not_compile")]
    return around[-1] if around else text.holder


def delivers(holder: nn.Module) -> bool:
    """Whether the owner of the layers has an aux path of its own that takes every boundary: vLLM's mixin, and used.

    MiMoModel inherits the mixin beside a forward that knows nothing of it (0.18 to 0.32); DeepSeek's classes have a path
    without the mixin, which fails at boundary 0 and, before 0.25, at n.
    """
    code = inspect.unwrap(type(holder).forward).__code__
    used = any("aux_hidden" in name for name in (*code.co_names, *code.co_varnames))
    return used and hasattr(holder, "_set_aux_hidden_state_layers")


def collecting(base: type[nn.Module], count: int, said: str) -> Callable[..., Any]:
    """A `forward` for a subclass of `base` that returns (output, aux). `said`: enters the key of compiled artefacts."""

    @functools.wraps(base.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> tuple[Any, list[Tensor]]:
        self._headstart_seen = []
        output = self._headstart_forward(*args, **kwargs)
        aux = self._headstart_seen[-count:]  # a looped stack passes the layers several times: the last pass counts
        self._headstart_seen = None
        return output, aux

    forward.__qualname__ = f"{base.__qualname__}.forward[{said}]"
    return forward


def replace_class(region: nn.Module, forward: Callable[..., Any] | None) -> None:
    """Give one instance a class of its own that takes aux off its result; with another `forward` where one is given."""
    base = type(region)
    called = base.__call__

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        output, self._headstart_aux = called(self, *args, **kwargs)
        return output

    members: dict[str, Any] = {"__call__": call, "__module__": base.__module__, "__qualname__": base.__qualname__}
    if forward is not None:
        members |= {"forward": forward, "_headstart_forward": base.forward}
    region.__class__ = type(base.__name__, (base,), members)


def enter_key(region: Any, said: str) -> None:
    """Let the hash of compiled artefacts tell apart what is collected: ids from `eagle_config` or by default do not
    enter it by themselves (0.32, SpeculativeConfig.compute_hash)."""
    config: Any = getattr(region, "vllm_config", None)
    if isinstance(getattr(config, "additional_config", None), dict):
        config.additional_config = {**config.additional_config, _KEY: said}


def recompile(region: Any) -> None:
    """Point the region's compiled callable, made when it was built, to its new forward."""
    if getattr(region, "do_not_compile", True):
        return
    from vllm.compilation.wrapper import TorchCompileWithNoGuardsWrapper as Wrapper  # noqa: PLC0415 (vLLM's processes)
    from vllm.config import set_current_vllm_config  # noqa: PLC0415

    names = inspect.signature(Wrapper.__init__).parameters
    given = {name: getattr(region, f"_{name}") for name in names if hasattr(region, f"_{name}")}
    if hasattr(region, "cleanup"):
        region.cleanup()
    with set_current_vllm_config(region.vllm_config):
        Wrapper.__init__(region, **given)


def _containing(text: TextModel) -> Iterator[nn.Module]:
    """The owner of the layers and what contains it, outwards, without the model itself."""
    path = text.path.rpartition(".")[0]
    while path:
        yield text.model.get_submodule(path)
        path = path.rpartition(".")[0]
