"""The hooks rung: states read off the decoder layers of a running vLLM, and each row given to the request it belongs to.

The only way on vLLM <= 0.16, and for whatever has no other. It runs inside rank 0 of the workers: hooks on the layers see
the rows of one scheduler step, all requests together, and `execute_model` of the model runner is wrapped to learn whose rows
they were. What the wrapper relies on, read in 0.11.2, 0.16.0 and 0.32.0:

- `SchedulerOutput` says which requests are new (`scheduled_new_reqs`), how many of their tokens were computed before this
  step (there, and in `scheduled_cached_reqs.num_computed_tokens`), and how many it computes (`num_scheduled_tokens`).
  A preempted request comes back with 0 computed tokens: its rows start again.
- The rows stand in the order of `input_batch.req_ids` of the V1 runner, which keeps it until the next step. The V2 runner has
  it in `execute_model_state.input_batch` (0.18 on; a bare tuple before, which is refused).

Compiled layers never call hooks, cached prefixes never pass the layers: both are refused at the start, and again by counting.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from headstart.engines.vllm.taps import Rule, Taps
from headstart.engines.vllm.tree import TextModel
from headstart.errors import GateError

# In SamplingParams.extra_args. SAVE: name of the request's file; requests without it are not recorded. OUTPUT: True for the rows
# of generated tokens too, which `flush` writes.
SAVE, OUTPUT = "headstart_save", "headstart_output"


@dataclass(frozen=True)
class Span:
    """Consecutive rows of one step that belong to one request; `position` is that of the first in the request."""

    request: str
    row: int
    position: int
    count: int


def spans(step: Any, order: Sequence[str]) -> list[Span]:
    """Whose the rows of a step are. `step`: vLLM's SchedulerOutput; `order`: the requests as their rows stand.

    Raises:
        GateError: the requests of the batch are not those that were scheduled.
    """
    if set(order) != set(step.num_scheduled_tokens):
        raise GateError(f"the batch holds {sorted(order)}, scheduled were {sorted(step.num_scheduled_tokens)}")
    cached = step.scheduled_cached_reqs
    computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    computed |= {new.req_id: new.num_computed_tokens for new in step.scheduled_new_reqs}
    found: list[Span] = []
    row = 0
    for request in order:
        count = step.num_scheduled_tokens[request]
        found.append(Span(request, row, computed[request], count))
        row += count
    return found


@dataclass
class Recording:
    """The rows of one request by position: states [wanted, n_ids, d] on the CPU, ids int64 [wanted], `length` of them known."""

    name: str
    wanted: int
    with_output: bool
    length: int = 0
    states: Tensor | None = None
    ids: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.ids = torch.empty(self.wanted, dtype=torch.int64)

    def put(self, position: int, states: Tensor, ids: Tensor) -> None:
        """Rows from `position` on; what was known from there on is replaced (a preempted request starts again).

        Raises:
            GateError: rows before `position` never came.
        """
        if position > self.length:
            raise GateError(
                f"rows {self.length} to {position - 1} never passed the layers (a cached prefix, or a shared one)"
            )
        if self.states is None:
            self.states = states.new_empty((self.wanted, *states.shape[1:]))
        count = min(len(ids), self.wanted - position)
        self.states[position : position + count] = states[:count]
        self.ids[position : position + count] = ids[:count]
        self.length = position + count

    def save(self, folder: Path) -> None:
        """Write `<name>.safetensors`, whole or not at all: hidden_states [tokens, n_ids, d], token_ids int64 [tokens]."""
        assert self.states is not None
        tensors = {"hidden_states": self.states[: self.length].contiguous(), "token_ids": self.ids[: self.length]}
        part = folder / f"{self.name}.part"
        save_file(tensors, part)
        part.replace(folder / f"{self.name}.safetensors")


class LayerHooks:
    """Records the requests that ask for it, from `install` to `remove`."""

    def __init__(self, runner: Any, taps: Taps, folder: Path) -> None:
        self._runner, self._taps, self._folder = runner, taps, folder
        self._execute: Callable[..., Any] = runner.execute_model
        self._recordings: dict[str, Recording] = {}
        self._faults: dict[str, str] = {}

    def install(self) -> None:
        self._taps.install()
        self._runner.execute_model = self._step

    def remove(self) -> None:
        self._taps.remove()
        self._runner.execute_model = self._execute
        self._recordings.clear()

    def flush(self) -> dict[str, str]:
        """Write what is left of requests that have ended; call it when the engine is idle.

        Returns why others have no file, by the name they asked for, and forgets it.
        """
        for recording in self._recordings.values():
            if recording.with_output and recording.length:
                recording.save(self._folder)
            else:
                why = f"{recording.length} of {recording.wanted} rows passed the layers"
                self._faults.setdefault(recording.name, why)
        self._recordings.clear()
        faults, self._faults = self._faults, {}
        return faults

    def _step(self, step: Any, *args: Any, **kwargs: Any) -> Any:
        """In place of the runner's execute_model: one scheduler step."""
        self._admit(step)
        self._taps.clear()
        result = self._execute(step, *args, **kwargs)
        if any(request in self._recordings for request in step.num_scheduled_tokens):
            self._record(step)
        return result

    def _admit(self, step: Any) -> None:
        for new in step.scheduled_new_reqs:
            asked = getattr(new.sampling_params, "extra_args", None) or {}
            if SAVE not in asked or new.req_id in self._recordings:
                continue
            with_output = bool(asked.get(OUTPUT))
            rows = len(new.prompt_token_ids) + (new.sampling_params.max_tokens - 1 if with_output else 0)
            self._recordings[new.req_id] = Recording(asked[SAVE], rows, with_output)

    def _record(self, step: Any) -> None:
        tokens = step.total_num_scheduled_tokens
        try:
            batch = batch_of(self._runner)
            placed = [span for span in spans(step, batch.order) if span.request in self._recordings]
            states = self._taps.take(tokens)
            ids = batch.ids(tokens)
        except GateError as fault:
            for request in self._recordings.keys() & step.num_scheduled_tokens.keys():
                self._fail(request, fault)
            return
        for span in placed:
            rows = slice(span.row, span.row + span.count)
            self._put(span, states[rows].cpu(), ids[rows])

    def _put(self, span: Span, states: Tensor, ids: Tensor) -> None:
        recording = self._recordings[span.request]
        try:
            recording.put(span.position, states, ids)
        except GateError as fault:
            self._fail(span.request, fault)
            return
        if recording.length == recording.wanted and not recording.with_output:
            recording.save(self._folder)
            del self._recordings[span.request]

    def _fail(self, request: str, fault: GateError) -> None:
        self._faults[self._recordings.pop(request).name] = fault.what


class HookedWorker:
    """The part of the worker extension that serves this rung; called on every rank, at work on the first alone."""

    vllm_config: Any
    model_runner: Any
    rank: int
    _headstart_text: TextModel
    _headstart_rule: Rule | None = None  # what the self-check found, before the table
    _headstart_passes: int = 1
    _headstart_hooks: LayerHooks | None = None

    def headstart_hooks_install(self, boundaries: Sequence[int], folder: str) -> None:
        """Record requests from now on, states by rising boundary.

        Raises:
            GateError: the engine is such that rows could be missing or of another request.
        """
        refuse(self.vllm_config)
        if self.rank == 0:
            taps = Taps(self._headstart_text, boundaries, self._headstart_rule, self._headstart_passes)
            self._headstart_hooks = LayerHooks(self.model_runner, taps, Path(folder))
            self._headstart_hooks.install()

    def headstart_hooks_flush(self) -> dict[str, str]:
        return self._headstart_hooks.flush() if self._headstart_hooks else {}


def refuse(config: Any) -> None:
    """Raises GateError for an engine that this rung cannot read: each of these loses or repeats rows without a word."""
    wrong = {
        "the engine is compiled, and compiled layers call no hooks: enforce_eager=True": not config.model_config.enforce_eager,
        "cached prefixes do not pass the layers: enable_prefix_caching=False": config.cache_config.enable_prefix_caching,
        "shared caches skip rows: kv_sharing_fast_prefill=False": getattr(
            config.cache_config, "kv_sharing_fast_prefill", False
        ),
        "a rank holds only some layers: pipeline_parallel_size=1": config.parallel_config.pipeline_parallel_size > 1,
        "drafted tokens have rows too: no speculative_config": config.speculative_config is not None,
    }
    if found := [what for what, so in wrong.items() if so]:
        raise GateError(f"states cannot be read by layer hooks: {'; '.join(found)}")


@dataclass(frozen=True)
class Batch:
    """The step that has just run: its requests in the order of their rows, and the ids it computed on."""

    order: Sequence[str]
    input_ids: Tensor

    def ids(self, tokens: int) -> Tensor:
        return self.input_ids[:tokens].to("cpu", torch.int64)


def batch_of(runner: Any) -> Batch:
    """Raises GateError for a runner whose batch cannot be read."""
    if hasattr(runner, "input_batch"):
        batch = runner.input_batch
        return Batch(list(batch.req_ids[: batch.num_reqs]), runner.input_ids.gpu)
    batch = getattr(getattr(runner, "execute_model_state", None), "input_batch", None)
    if batch is None:
        raise GateError(f"{type(runner).__module__}.{type(runner).__name__} has neither input_batch nor a state of one")
    return Batch(list(batch.req_ids[: batch.num_reqs]), batch.input_ids)
