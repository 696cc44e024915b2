"""The hooks rung: whose each row is, through chunks, many requests, preemption and decoding; what makes it refuse."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import vllm_small as small
from headstart.engines.vllm.layer_hooks import OUTPUT, SAVE, LayerHooks, batch_of, refuse, spans
from headstart.engines.vllm.rope import check_rope, live_theta
from headstart.engines.vllm.taps import Taps
from headstart.engines.vllm.tree import TextModel
from headstart.errors import GateError

WIDTH, LAYERS = 4, 3


class Layer(nn.Module):
    """Adds one to each row, in the two parts that vLLM's layers return."""

    def forward(self, hidden: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return torch.ones_like(hidden), hidden if residual is None else hidden + residual


class Runner:
    """A V1 model runner of three layers, whose row for token t is (t, t, t, t) + the boundary. `order`: of its batch."""

    def __init__(self, fires: bool = True) -> None:
        self.layers, self.fires = nn.ModuleList(Layer() for _ in range(LAYERS)), fires
        self.input_batch = SimpleNamespace(req_ids=[], num_reqs=0)
        self.input_ids = SimpleNamespace(gpu=torch.zeros(64, dtype=torch.int32))
        self.tokens: dict[str, list[int]] = {}

    def execute_model(self, step: Any) -> str:
        rows = []
        for request in self.input_batch.req_ids[: self.input_batch.num_reqs]:
            start = step.starts[request]
            rows += self.tokens[request][start : start + step.num_scheduled_tokens[request]]
        self.input_ids.gpu[: len(rows)] = torch.tensor(rows)
        hidden = torch.tensor(rows, dtype=torch.float32)[:, None].expand(-1, WIDTH)
        residual = None
        for layer in self.layers:
            forward = layer if self.fires else layer.forward  # a compiled layer is not called, its code runs
            hidden, residual = forward(hidden, residual)
        return "the result"


def step_of(runner: Runner, *parts: tuple[str, int, int], new: Sequence[str] = (), **extra: Any) -> Any:
    """One scheduler step of (request, computed before, computed now), with the batch in another order than the schedule."""
    names = [name for name, _, _ in parts]
    runner.input_batch = SimpleNamespace(req_ids=[*reversed(names), None, None], num_reqs=len(names))
    starts = {name: start for name, start, _ in parts}
    cached = [name for name in names if name not in new]
    return SimpleNamespace(
        num_scheduled_tokens={name: count for name, _, count in parts},
        total_num_scheduled_tokens=sum(count for _, _, count in parts),
        scheduled_new_reqs=[_new(runner, name, starts[name], **extra.get(name, {SAVE: name})) for name in new],
        scheduled_cached_reqs=SimpleNamespace(req_ids=cached, num_computed_tokens=[starts[name] for name in cached]),
        starts=starts,
    )


def _new(runner: Runner, name: str, computed: int, **asked: Any) -> Any:
    params = SimpleNamespace(extra_args=asked or None, max_tokens=3)
    prompt = runner.tokens[name][:-2] if OUTPUT in asked else runner.tokens[name]
    return SimpleNamespace(req_id=name, prompt_token_ids=prompt, num_computed_tokens=computed, sampling_params=params)


def hooks_on(runner: Runner, folder: Path, boundaries: tuple[int, ...] = (1, 3)) -> LayerHooks:
    model = nn.Module()
    model.layers = runner.layers
    text = TextModel("layers", model, model, runner.layers, None, None, None, None)
    hooks = LayerHooks(runner, Taps(text, boundaries), folder)
    hooks.install()
    return hooks


def check(folder: Path, name: str, ids: Sequence[int]) -> None:
    found = load_file(folder / f"{name}.safetensors")
    assert found["token_ids"].tolist() == list(ids)
    expected = torch.tensor(ids)[:, None, None] + torch.tensor([1, 3])[:, None]
    assert torch.equal(found["hidden_states"], expected.expand(-1, -1, WIDTH).float())


# --- whose the rows are ---


def test_rows_stand_in_the_order_of_the_batch() -> None:
    runner = Runner()
    runner.tokens = {"a": [1, 2], "b": [3, 4, 5]}
    found = spans(step_of(runner, ("a", 0, 2), ("b", 1, 2), new=["a"]), ["b", "a"])
    assert [(span.request, span.row, span.position, span.count) for span in found] == [("b", 0, 1, 2), ("a", 2, 0, 2)]
    with pytest.raises(GateError, match=r"the batch holds \['b'\], scheduled were \['a'\]"):
        spans(step_of(runner, ("a", 0, 2), new=["a"]), ["b"])


def test_chunks_requests_and_preemption(tmp_path: Path) -> None:
    """`long` comes in chunks, is preempted after two, and starts again; `quiet` did not ask to be recorded."""
    runner = Runner()
    runner.tokens = {"long": list(range(10, 17)), "short": [1, 2], "quiet": [7, 8, 9]}
    hooks_on(runner, tmp_path)
    assert runner.execute_model(step_of(runner, ("long", 0, 3), ("short", 0, 2), new=["long", "short"])) == "the result"
    check(tmp_path, "short", [1, 2])  # there before its request ends
    runner.execute_model(step_of(runner, ("quiet", 0, 3), ("long", 3, 2), new=["quiet"], quiet={}))
    runner.tokens["long"][:2] = [50, 51]  # other ids than before: rows of the first try must not stay
    runner.execute_model(step_of(runner, ("long", 0, 4)))
    assert not (tmp_path / "long.safetensors").exists()
    runner.execute_model(step_of(runner, ("quiet", 3, 0), ("long", 4, 3)))
    check(tmp_path, "long", runner.tokens["long"])
    assert {path.name for path in tmp_path.iterdir()} == {"short.safetensors", "long.safetensors"}


def test_rows_of_generated_tokens_are_written_by_flush(tmp_path: Path) -> None:
    runner = Runner()
    runner.tokens = {"a": [1, 2, 3, 4, 5]}  # a prompt of three and two answers fed back; the third is never computed
    hooks = hooks_on(runner, tmp_path)
    asked = {SAVE: "a", OUTPUT: True}
    runner.execute_model(step_of(runner, ("a", 0, 3), new=["a"], a=asked))
    runner.execute_model(step_of(runner, ("a", 3, 1)))
    assert not list(tmp_path.iterdir())
    runner.execute_model(step_of(runner, ("a", 0, 4)))  # preempted: prompt and answer are computed again
    runner.execute_model(step_of(runner, ("a", 4, 1)))
    assert hooks.flush() == {}
    check(tmp_path, "a", [1, 2, 3, 4, 5])


def test_removed_hooks_leave_the_runner_as_it_was(tmp_path: Path) -> None:
    runner = Runner()
    runner.tokens = {"a": [1]}
    before = runner.execute_model
    hooks = hooks_on(runner, tmp_path)
    hooks.remove()
    assert runner.execute_model == before
    runner.execute_model(step_of(runner, ("a", 0, 1), new=["a"]))
    assert not list(tmp_path.iterdir())


# --- what is refused ---


def test_layers_that_call_no_hooks_are_a_fault_not_an_empty_file(tmp_path: Path) -> None:
    runner = Runner(fires=False)
    runner.tokens = {"a": [1, 2]}
    hooks = hooks_on(runner, tmp_path)
    runner.execute_model(step_of(runner, ("a", 0, 2), new=["a"]))
    assert "boundary 1 was reached 0 times" in hooks.flush()["a"]
    assert not list(tmp_path.iterdir())


def test_rows_that_never_passed_are_a_fault_of_that_request_alone(tmp_path: Path) -> None:
    runner = Runner()
    runner.tokens = {"cached": [1, 2, 3], "whole": [4, 5], "ended": [6, 7]}
    hooks = hooks_on(runner, tmp_path)
    parts = (("cached", 2, 1), ("whole", 0, 2), ("ended", 0, 1))
    runner.execute_model(step_of(runner, *parts, new=["cached", "whole", "ended"]))
    check(tmp_path, "whole", [4, 5])
    assert hooks.flush() == {
        "cached": "rows 0 to 1 never passed the layers (a cached prefix, or a shared one)",
        "ended": "1 of 2 rows passed the layers",
    }
    assert hooks.flush() == {}


def test_a_runner_that_hides_its_batch_is_refused() -> None:
    """V2 before 0.18 keeps a bare tuple; since then a state whose input_batch has the order."""
    ids = torch.arange(4)
    state = SimpleNamespace(input_batch=SimpleNamespace(req_ids=["a"], num_reqs=1, input_ids=ids))
    assert batch_of(SimpleNamespace(execute_model_state=state)).order == ["a"]
    with pytest.raises(GateError, match="neither input_batch nor"):
        batch_of(SimpleNamespace(execute_model_state=(ids, ids, None)))


@pytest.mark.parametrize(
    ("part", "name", "value", "why"),
    [
        ("model_config", "enforce_eager", False, "compiled layers call no hooks"),
        ("cache_config", "enable_prefix_caching", True, "cached prefixes do not pass the layers"),
        ("cache_config", "kv_sharing_fast_prefill", True, "shared caches skip rows"),
        ("parallel_config", "pipeline_parallel_size", 2, "a rank holds only some layers"),
        (None, "speculative_config", object(), "drafted tokens have rows too"),
    ],
)
def test_engines_that_lose_or_repeat_rows_are_refused(part: str | None, name: str, value: object, why: str) -> None:
    config = SimpleNamespace(
        model_config=SimpleNamespace(enforce_eager=True),
        cache_config=SimpleNamespace(enable_prefix_caching=False),
        parallel_config=SimpleNamespace(pipeline_parallel_size=1),
        speculative_config=None,
    )
    refuse(config)
    setattr(getattr(config, part) if part else config, name, value)
    with pytest.raises(GateError, match=why):
        refuse(config)


# --- the rotary base ---


@pytest.mark.parametrize(
    ("live", "written", "named", "stops"),
    [
        (1e4, 5e5, "rope_parameters.rope_theta", True),
        (1e4, 5e5, "text_config.rope_parameters.rope_theta", True),
        (5e5, 5e5, "rope_parameters.rope_theta", False),
        (None, 5e5, "rope_parameters.rope_theta", False),
        (1e4, 5e5, "rope_parameters.full_attention.rope_theta", False),
        (1e4, 5e5, "known default of llama", False),
    ],
)
def test_a_rotary_base_that_the_engine_reads_otherwise(
    live: float | None, written: float, named: str, stops: bool
) -> None:
    anatomy: Any = SimpleNamespace(rope_theta=written, evidence={"rope_theta": named})
    facts = {"version": "0.16.0", "transformers": "4.57.6", "model": {"rope_theta": live}}
    with pytest.raises(GateError, match="reads RoPE base 10000") if stops else nullcontext():
        check_rope(anatomy, facts)


def test_the_rotary_base_of_a_live_configuration() -> None:
    assert live_theta(SimpleNamespace(rope_theta=7.0)) == 7.0
    assert live_theta(SimpleNamespace(rope_parameters={"rope_theta": 8.0}, rope_theta=7.0)) == 8.0
    assert live_theta(SimpleNamespace(rope_parameters={"full_attention": {"rope_theta": 8.0}}, rope_theta=7.0)) is None


# --- in the real engine ---


@pytest.fixture(autouse=True)
def _extensions_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)


@pytest.mark.slow
def test_hooks_see_bit_for_bit_what_vllm_extracts(tmp_path: Path) -> None:
    """30 requests over the same passes of one engine: the connector's file and the hooks' file of each are equal."""
    samples = small.thirty()
    host = small.start(small.save_target(tmp_path / "target"), tmp_path, "Beside")
    try:
        native = small.captured(host, samples, sampling={"max_tokens": small.ANSWER})  # answers lead to preemption
    finally:
        host.close()
    hooked = {tuple(load["token_ids"].tolist()): load for load in map(load_file, tmp_path.glob("*.safetensors"))}
    for sample in samples:
        ours, theirs = hooked[tuple(sample.input_ids.tolist())], native[sample.id]
        assert torch.equal(ours["token_ids"], theirs["token_ids"])
        assert torch.equal(ours["hidden_states"], theirs["hidden_states"])
    assert small.preempted(tmp_path) > 0


@pytest.mark.slow
def test_the_hooks_rung_in_the_newest_engine(tmp_path: Path) -> None:
    small.check_hooks_rung(small.save_target(tmp_path / "target"), tmp_path)
