"""The connector that hands over the states which vLLM's `extract_hidden_states` keeps in its cache (0.25 and later).

vLLM's own example connector finds the states by the block table when a request ends, which is right under chunked prefill,
prefix caching and preemption; but it copies through pinned memory on a CUDA stream, so on a CPU it ends the engine, and a reader
has to wait on a lock file. Here the copy works on either device, and a file is renamed to its name when it is whole.
(Read in 0.25 to 0.32: example_hidden_states_connector.py, `_submit_async_write`, `get_finished`.)

Per request, in SamplingParams.extra_args["kv_transfer_params"]: hidden_states_path, include_output_tokens.
The file: hidden_states [tokens, boundaries, d] in the engine's dtype, token_ids int64 [tokens].
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from vllm.distributed.kv_transfer.kv_connector.v1 import example_hidden_states_connector as example


class HeadstartConnector(example.ExampleHiddenStatesConnector):
    """Writes on the first tensor-parallel rank; the others hold the same states."""

    def get_finished_count(self) -> int:
        return 1

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Requests that name no file leave none."""
        if "hidden_states_path" not in (request.kv_transfer_params or {}):
            self._request_filenames.pop(request.request_id, None)
            return False, None
        return super().request_finished(request, block_ids)

    def _submit_async_write(self, pending: Any) -> None:
        if not self._is_tp_rank_zero:
            return
        assert self._kv_cache is not None
        slots = slots_of(pending.block_ids, self._block_size, len(pending.token_ids)).to(self._kv_cache.device)
        states = example.extract_from_kv_cache(self._kv_cache, slots, len(slots))
        copied, done = to_host(states)
        self._req_copy_events[pending.req_id] = done
        tensors = {"hidden_states": copied, "token_ids": pending.token_ids.clone()}
        future = self._executor.submit(write, tensors, done, pending.filename)
        self._req_futures[pending.req_id] = future
        future.add_done_callback(lambda ended: self._on_write_done(pending.req_id, ended))


class Copied:
    """A copy that is complete as soon as it is made; has what is used of torch.cuda.Event."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        """Nothing to wait for."""


def slots_of(block_ids: list[int], block_size: int, tokens: int) -> Tensor:
    """Places in the cache of the first `tokens` tokens of a request, int64 [tokens]."""
    blocks = torch.tensor(block_ids, dtype=torch.long)
    return (blocks[:, None] * block_size + torch.arange(block_size)).flatten()[:tokens]


def to_host(states: Tensor) -> tuple[Tensor, Any]:
    """The states in host memory, and the event that tells when they are there. The gather before it was a copy already."""
    if not states.is_cuda:
        return states.contiguous(), Copied()
    copied = torch.empty(states.shape, dtype=states.dtype, pin_memory=True)
    copied.copy_(states, non_blocking=True)
    done = torch.cuda.Event()
    done.record()
    return copied, done


def write(tensors: dict[str, Tensor], done: Any, filename: str) -> None:
    """Runs in a thread: wait for the copy, then let the file appear whole."""
    done.synchronize()
    part = f"{filename}.part"
    save_file(tensors, part)
    Path(part).replace(filename)
