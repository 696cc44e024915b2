"""Whether disk, memory and GPUs are enough. Each check is a pure function of numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headstart.doctor.checks import Check
from headstart.doctor.machine import Gpu
from headstart.doctor.sizes import Weights, states_bytes
from headstart.events import size

USABLE = 0.9  # of a GPU's memory, as vLLM's gpu_memory_utilization; the rest is for what is not counted here
WORKING = 2_000_000_000  # bytes beside the weights: activations and the cache of a few sequences
BOUND_MARGIN = 4  # answers seldom fill their longest length: a bound so many times too large is surely too large


@dataclass(frozen=True)
class States:
    """What a capture would store. vectors: aux states and the last one; exact: counted, not an upper bound."""

    tokens: int
    vectors: int
    width: int
    itemsize: int
    exact: bool = False

    @property
    def bytes(self) -> int:
        return states_bytes(self.tokens, self.vectors, self.width, self.itemsize)


def check_disk(states: States, free: int, where: str) -> Check:
    """Whether the states fit on the disk. A bound stops only when a fourth of it would not fit either."""
    about = "about" if states.exact else "at most about"
    finding = (
        f"states: {states.tokens:,} tokens x {states.vectors} vectors x {states.width} x {states.itemsize} bytes = "
        f"{about} {size(states.bytes)}; {size(free)} free in {where}"
    )
    if states.bytes <= free:
        return Check("disk", "go", finding)
    surely = states.exact or states.bytes > BOUND_MARGIN * free
    return Check("disk", "stop" if surely else "warn", finding, _smaller(states, free))


def _smaller(states: States, free: int) -> str:
    """Alternatives that would fit: fewer tokens, fewer bytes a number, or another disk."""
    each = states.bytes / states.tokens
    options = [f"keep {int(0.95 * free / each):,} tokens (data.max_conversations, data.max_length)"]
    if states.itemsize > 2:
        options.append("set capture.dtype to bfloat16, which halves it")
    return "; ".join([*options, f"set `directory` to a disk with {size(states.bytes)} free"])


def check_gpus(
    weights: Weights, found: Sequence[Gpu], ranks: int | None, *, needed: bool, instead: str | None = None
) -> Check:
    """Whether weights fit into the GPUs. ranks: tensor_parallel, all of them when None; needed: the run is to be here; instead:
    what can be done where there is no GPU."""
    name, needs = "GPU memory", weights.bytes
    if not found:
        what, wanted = f"nvidia-smi shows no GPU here; the target has {weights.told}", _wanted(needs)
        do = f"{instead}; on GPUs {wanted}" if instead and wanted else instead or wanted
        return Check(name, "stop" if needed else "warn", what, do)
    count = ranks or len(found)
    if count > len(found):
        return Check(name, "stop", f"tensor parallel {count}, {len(found)} GPUs here", "set target.tensor_parallel")
    free = min(gpu.free for gpu in found[:count])
    finding = f"{weights.told} on {count} of {len(found)} x {found[0].name}, {size(free)} free on the fullest"
    if needs is None:
        return Check(name, "warn", f"{finding}: not compared", "give a folder with the safetensors index")
    if needs / count + WORKING > USABLE * free:
        return Check(name, "stop" if needed else "warn", f"{finding}: too little", _wanted(needs, free))
    return Check(name, "go", finding)


def _wanted(weights: int | None, free: int | None = None) -> str | None:
    if weights is None:
        return None
    sizes = [free] if free else [80_000_000_000, 141_000_000_000]
    counts = ((_ranks(weights, each), size(each)) for each in sizes)
    fits = [f"{count} GPU{'s' * (count > 1)} with {room} free" for count, room in counts]
    return f"a capture needs {', or '.join(fits)} (target.tensor_parallel)"


def _ranks(weights: int, free: int) -> int:
    """The least power of two (heads are split evenly) whose shares fit."""
    count = 1
    while weights / count + WORKING > USABLE * free and count < 1024:
        count *= 2
    return count


def check_memory(weights: Weights, available: int | None, *, needed: bool) -> Check:
    """Whether the weights fit into main memory, where the CPU computes."""
    if weights.bytes is None or available is None:
        what = weights.told if weights.bytes is None else "this system does not tell its free memory"
        return Check("memory", "warn", what, "watch the memory of the first stage")
    finding = f"{weights.told}, {size(available)} of memory available"
    if weights.bytes + WORKING <= available:
        return Check("memory", "go", finding)
    return Check(
        "memory", "stop" if needed else "warn", f"{finding}: too little", "use a machine with more memory or a GPU"
    )
