"""One process or many: who takes which samples, and the few sums and copies that keep them equal.

Started by torchrun, every process plans the same global batches and takes its share of each. Losses are normalised by counts of the
whole global batch, so that gradients summed over processes are those of one process, for any number of them.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from headstart import processes
from headstart.errors import UserError

# Buffers are constant here and not to be sent with every forward pass. Torch 2.13 renamed the option.
_KNOWN = inspect.signature(DistributedDataParallel).parameters
_NO_SYNC: Any = {"forward_sync_buffers" if "forward_sync_buffers" in _KNOWN else "broadcast_buffers": False}
# What gloo and NCCL say when a peer is gone.
_LOST = ("Connection closed by peer", "Connection reset by peer", "remote process exited")


@dataclass(frozen=True)
class World:
    """rank of this process among `size`; device: where it computes."""

    rank: int = 0
    size: int = 1
    device: str = "cpu"

    @property
    def main(self) -> bool:
        """The one process that writes and talks."""
        return self.rank == 0

    def sum(self, values: Tensor) -> Tensor:
        """The sum of a tensor over all processes."""
        if self.size == 1:
            return values
        moved = values.to(self.device)
        dist.all_reduce(moved)
        return moved.to(values.device)

    def any(self, flag: bool) -> bool:
        return (self.size > 1 and bool(self.sum(torch.tensor(float(flag))))) or flag

    def shared(self, value: Any) -> Any:
        """The main process's value, everywhere."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, device=torch.device(self.device))
        return box[0]

    def wrap(self, module: nn.Module, parallel: str) -> nn.Module:
        """`module` so that gradients are means over processes: replicated (ddp), or parameters, gradients and optimiser state
        in shards (fsdp)."""
        if self.size == 1:
            return module
        if parallel == "fsdp":
            mesh = init_device_mesh(torch.device(self.device).type, (self.size,))
            fully_shard(module, mesh=mesh)  # in place
            return module
        return DistributedDataParallel(module, gradient_as_bucket_view=True, **_NO_SYNC)


@contextmanager
def world(device: str) -> Iterator[World]:
    """The processes that torchrun started, joined; a world of one without it.

    device: `cuda` becomes this process's own GPU (LOCAL_RANK). Of several, the process is to end as in
    `processes.ended_at_once`.
    """
    size = processes.count()
    if size == 1:
        yield World(device=device)
        return
    if device.startswith("cuda"):
        device = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.cuda.set_device(device)
    backend = "nccl" if device.startswith("cuda") else "gloo"
    dist.init_process_group(backend)
    try:
        yield World(dist.get_rank(), size, device)
    except RuntimeError as error:
        if not any(sign in str(error) for sign in _LOST):
            raise
        raise UserError(
            f"another process of torchrun ended, and process {dist.get_rank()} with it",
            do="what it told is above or below; the same command continues",
        ) from error
    finally:
        if backend == "nccl":  # gloo's is never freed: `ended_at_once` says why
            dist.destroy_process_group()


@contextmanager
def gathered(module: nn.Module) -> Iterator[None]:
    """Sharded parameters whole on every process, so that each may call the module as often as it likes."""
    if not isinstance(module, FSDPModule):
        yield
        return
    module.unshard()
    try:
        yield
    finally:
        module.reshard()


def share(lengths: Sequence[int], size: int) -> list[list[int]]:
    """Indices of `lengths` dealt to `size` processes, like amounts of tokens each; in their order within a process.

    Longest first, each to the process that has least so far.
    """
    loads, dealt = [0] * size, [[] for _ in range(size)]
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        lightest = loads.index(min(loads))
        loads[lightest] += lengths[index]
        dealt[lightest].append(index)
    return [sorted(indices) for indices in dealt]


def whole(state: Any) -> Any:
    """A state dictionary with sharded tensors gathered, on the CPU: the same for any way and number of processes."""
    if isinstance(state, DTensor):
        return state.full_tensor().cpu()
    if isinstance(state, dict):
        return {key: whole(value) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return type(state)(whole(value) for value in state)
    return state


def like(value: Tensor, wanted: Tensor) -> Tensor:
    """A whole tensor laid out as `wanted` is: on its device, sharded when it is."""
    if isinstance(wanted, DTensor):
        return distribute_tensor(value.to(wanted.device), wanted.device_mesh, wanted.placements)
    return value.to(wanted.device)
