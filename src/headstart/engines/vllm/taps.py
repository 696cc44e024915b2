"""Reading the residual stream between the decoder layers of a live vLLM model, by hooks on its layers (eager only).

Boundary b is the residual stream that enters layer b: b=0 what the first layer receives, b=k what layer k-1 leaves, b=n
what the final norm will receive. Most of vLLM's layers return the stream in two parts `(h, residual)` to be added; some
return a second part that is within the first already. A table knows them, and `Probe` proves the choice on the model
itself: its own final norm, applied to our reading of the last boundary, must give what the model got from it.

Hooks sit on the layers: a class under `@support_torch_compile` calls `self.forward` directly, so hooks on it never
fire, not even in eager mode (`vllm/compilation/decorators.py`, 0.11 to 0.32). States are copied at once, since fused
norms write into their arguments.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from headstart.engines.vllm.tree import TextModel
from headstart.errors import GateError

Rule = Literal["sum", "inside"]  # of a pair (h, residual): the stream is h + residual, or h alone

# Layers whose second item must not be added (read in vLLM 0.16 and 0.32: they add the residual themselves).
RESIDUAL_INSIDE = frozenset(
    {
        "CohereDecoderLayer",
        "Cohere2MoeDecoderLayer",
        "CohereCompassDecoderLayer",
        "Exaone4DecoderLayer",
        "GraniteMoeHybridMambaDecoderLayer",
        "GraniteMoeHybridAttentionDecoderLayer",
        "PhiMoEDecoderLayer",
        "StablelmDecoderLayer",
        "HyperCLOVAXDecoderLayer",
        "MuseGlimmerDecoderLayer",
        "ChameleonSwinDecoderLayer",
    }
)

_HIDDEN_NAMES = ("hidden_states", "x", "hidden_state", "inputs", "input", "input_tensor")

# The largest difference from the model's own norm that rounding explains, relative to the largest value.
_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-8}
_TOLERANCE_HALF = 3e-2


@dataclass(frozen=True)
class SelfCheck:
    """How the last boundary was proved.

    rule: of a pair. evidence: whose output it was held against. difference: the largest, relative. rows: tokens of the
    pass. passes: how often the layers ran in one forward pass (above 1: a looped stack; the last pass counts).
    """

    rule: Rule
    evidence: str
    difference: float
    rows: int
    passes: int


def known_rule(layer_class: str) -> Rule:
    """What the table says of a decoder layer's class; a pair is a sum unless it is listed."""
    return "inside" if layer_class in RESIDUAL_INSIDE else "sum"


def stream(output: Any, rule: Rule) -> Tensor:
    """The residual stream [tokens, d] after a layer, from what the layer returned; a new tensor.

    output: a tensor; a pair (h, residual); a longer tuple, of which the first two count. A residual of None adds nothing.
    """
    hidden, residual = _parts(output)
    return hidden.clone() if residual is None or rule == "inside" else hidden + residual


def entering(layer: nn.Module) -> Callable[[tuple, dict[str, Any]], Tensor]:
    """A reader of the hidden states in a call (args, kwargs) of a layer, whatever their position in its signature.

    Looked up once, ahead: a graph that is being traced cannot inspect signatures. The stream enters the first layer as
    one tensor: the second part of a pair does not exist yet.
    """
    names = list(inspect.signature(layer.forward).parameters)
    name = next((name for name in _HIDDEN_NAMES if name in names), None)
    if name is None:
        raise GateError(
            f"the hidden states that {type(layer).__name__} receives were not found: its arguments are {names}",
            looked_for=f"one of {', '.join(_HIDDEN_NAMES)}",
            do="leave boundary 0 (the embeddings) out of the layers to capture",
        )
    position = names.index(name)

    def read(args: tuple, kwargs: dict[str, Any]) -> Tensor:
        return (kwargs[name] if name in kwargs else args[position]).clone()

    return read


def attach(text: TextModel, boundary: int, rule: Rule, put: Callable[[Tensor], None]) -> Any:
    """Hook the layer that makes a boundary; `put` receives its stream at every pass. Returns the handle."""
    if boundary == 0:
        read = entering(text.layers[0])
        return text.layers[0].register_forward_pre_hook(
            lambda _, args, kwargs: put(_rows(read(args, kwargs))), with_kwargs=True
        )
    return text.layers[boundary - 1].register_forward_hook(lambda _, args, output: put(_rows(stream(output, rule))))


class Taps:
    """Hooks at boundaries for as long as the context lasts (or between `install` and `remove`).

    After each forward pass, `take` checks and hands over what the hooks saw. Under pipeline parallelism only the
    boundaries whose layer this rank holds (`here`) are tapped.
    """

    def __init__(self, text: TextModel, boundaries: Sequence[int], rule: Rule | None = None, passes: int = 1) -> None:
        check_boundaries(boundaries, text.num_layers)
        self.here = tuple(b for b in sorted(set(boundaries)) if max(b - 1, 0) in text.present)
        self._text, self._passes = text, passes
        self._rule: Rule = rule or known_rule(text.layer_class)
        self._states: dict[int, Tensor] = {}
        self._fired: dict[int, int] = {}
        self._handles = ExitStack()

    def install(self) -> None:
        for boundary in self.here:
            self._handles.callback(attach(self._text, boundary, self._rule, self._putter(boundary)).remove)

    def remove(self) -> None:
        self._handles.close()
        self.clear()

    def clear(self) -> None:
        """Forget what was seen, such as a profiling pass."""
        self._states, self._fired = {}, {}

    def take(self, tokens: int) -> Tensor:
        """The states of the last forward pass, [tokens, len(here), d] in the engine's dtype; hands them over once.

        Raises:
            GateError: a hook did not fire as often as a pass runs its layer, or a state has other than `tokens` rows.
        """
        states, fired = self._states, self._fired
        self.clear()
        for boundary in self.here:
            _check_fired(boundary, fired.get(boundary, 0), self._passes)
            shape = tuple(states[boundary].shape)
            if len(shape) != 2 or shape[0] != tokens:
                raise GateError(f"the states at boundary {boundary} have shape {shape} for {tokens} scheduled tokens")
        return torch.stack([states[boundary] for boundary in self.here], dim=1)

    def __enter__(self) -> Taps:
        self.install()
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def _putter(self, boundary: int) -> Callable[[Tensor], None]:
        def put(state: Tensor) -> None:
            self._states[boundary] = state
            self._fired[boundary] = self._fired.get(boundary, 0) + 1

        return put


def check_boundaries(boundaries: Sequence[int], num_layers: int) -> None:
    """Raises GateError for a boundary that the model does not have: vLLM itself dies of one at the first request."""
    wrong = [boundary for boundary in boundaries if not 0 <= boundary <= num_layers]
    if wrong:
        raise GateError(f"boundaries {wrong} do not exist", looked_for=f"0 to {num_layers}, the number of layers")


class Probe:
    """The residual self-check: watches eager forward passes, then judges the last one. A context manager.

    Holds `final_norm(our reading of the last boundary)` against what the model's own call of that norm returned; a
    model that calls no norm in its forward pass (Step-3.5 norms in `compute_logits`) must have returned our reading.
    """

    def __init__(self, text: TextModel) -> None:
        self._text = text
        self._last: Any = None
        self._normed: Tensor | None = None
        self._returned: Any = None
        self._passes = self._passes_before = 0
        self._handles = ExitStack()

    def __enter__(self) -> Probe:
        text = self._text
        hooks = [
            text.layers[-1].register_forward_hook(self._layer_done),
            text.model.register_forward_hook(self._model_done),
        ]
        if text.final_norm is not None:
            hooks.append(text.final_norm.register_forward_hook(self._norm_done))
        for hook in hooks:
            self._handles.callback(hook.remove)
        return self

    def __exit__(self, *_: object) -> None:
        self._handles.close()

    def result(self) -> SelfCheck:
        """Judge the last pass.

        Raises:
            GateError: nothing was seen (a compiled model runs no hooks), or neither reading fits.
        """
        if self._last is None:
            raise GateError(
                f"the residual self-check saw no pass through {self._text.path}",
                looked_for="one eager forward pass (enforce_eager=True: a compiled graph runs no hooks)",
            )
        evidence = "model output" if self._normed is None else "final norm"
        differences: dict[Rule, float] = {rule: self._difference(rule) for rule in self._candidates()}
        rule = min(differences, key=lambda name: differences[name])
        self._judge(evidence, differences, rule)
        passes = (
            self._passes_before or self._passes
        )  # a compiled class (Ernie-4.5) runs no hooks of its own, even eager
        return SelfCheck(rule, evidence, differences[rule], _rows(self._last[0]).shape[0], passes)

    def _candidates(self) -> list[Rule]:
        """The table's rule first: it wins a tie."""
        known = known_rule(self._text.layer_class)
        other: Rule = "inside" if known == "sum" else "sum"
        return [known] if _parts(self._last)[1] is None else [known, other]

    def _difference(self, rule: Rule) -> float:
        state = stream(self._last, rule)
        norm, expected = self._text.final_norm, self._normed
        if expected is None or norm is None:
            return _relative(state, _first(self._returned))
        with torch.inference_mode():
            return _relative(_first(norm.forward(state)), expected)

    def _judge(self, evidence: str, differences: dict[Rule, float], rule: Rule) -> None:
        tolerance = _TOLERANCE.get(_parts(self._last)[0].dtype, _TOLERANCE_HALF)
        if not differences[rule] <= tolerance:  # NaN is no agreement
            said = ", ".join(f"{name} {value:.2g}" for name, value in differences.items())
            raise GateError(
                f"the output of {self._text.layer_class} could not be read: it does not lead to the model's own {evidence}",
                looked_for=f"the residual stream, as h + residual or as h; relative differences: {said}",
                do="this class needs vLLM's own capture (native rung) or the Transformers backend",
            )

    def _layer_done(self, layer: nn.Module, args: tuple, output: Any) -> None:
        del layer, args
        hidden, residual = _parts(output)
        self._last = (hidden.clone(), None if residual is None else residual.clone())
        self._passes += 1

    def _norm_done(self, norm: nn.Module, args: tuple, output: Any) -> None:
        del norm, args
        if self._passes:  # a norm shared with another place may run before the layers do
            self._normed = _first(output).clone()

    def _model_done(self, model: nn.Module, args: tuple, output: Any) -> None:
        del model, args
        self._returned, self._passes_before, self._passes = output, self._passes, 0


def _rows(state: Tensor) -> Tensor:
    """[tokens, d]: in vLLM's Transformers backend the layers see a batch of one, [1, tokens, d]."""
    return state.flatten(0, -2)


def _parts(output: Any) -> tuple[Tensor, Tensor | None]:
    if isinstance(output, Tensor):
        return output, None
    hidden, residual = output[0], output[1] if len(output) > 1 else None
    if not isinstance(hidden, Tensor) or not isinstance(residual, Tensor | None):
        kinds = ", ".join(type(item).__name__ for item in output)
        raise GateError(f"a decoder layer returned ({kinds})", looked_for="hidden states, or (hidden states, residual)")
    return hidden, residual


def _first(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else _first(output[0])


def _relative(found: Tensor, expected: Tensor) -> float:
    """The largest difference over the largest expected value; infinite where shapes differ or nothing is expected."""
    if found.shape != expected.shape or not expected.numel():
        return float("inf")
    scale = expected.abs().max().item()
    return (found.float() - expected.float()).abs().max().item() / scale if scale else float("inf")


def _check_fired(boundary: int, count: int, passes: int) -> None:
    if count != passes:
        why = ": a compiled graph runs no hooks, the engine must be eager" if not count else ""
        raise GateError(f"boundary {boundary} was reached {count} times in one forward pass, not {passes}{why}")
