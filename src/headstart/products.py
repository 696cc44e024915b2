"""float32 matrix products on the CPU by oneDNN, where MKL is slow.

MKL uses AVX-512 on Intel's processors alone: on AMD's Zen 5 it does 110 GFLOP/s a core, oneDNN 250. PyTorch 2.9 to 2.13 gives
float32 products to oneDNN when its mode for `mkldnn.matmul` is "bf16" (aten/src/ATen/native/mkldnn/Matmul.cpp), which means "may be
computed in bfloat16" and is so on processors with AMX, and on no other (oneDNN, "Primitive attributes: floating-point math mode").
So it is asked for only where a product is then still as exact as float32 is.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, cast

import torch

_onednn: Any = cast(Any, torch.backends.mkldnn).matmul  # its attributes are made as it is imported

CPUINFO = Path("/proc/cpuinfo")
EXACT = 2e-6  # relative error of a float32 product over 576 terms is 3e-7, of a bfloat16 one 3e-3


def use_fast_products(device: torch.device) -> bool:
    """Have this process compute float32 products the fast way, where `device` is a CPU that has one; whether it does."""
    if device.type != "cpu" or not _mkl_is_slow():
        return False
    _ask("bf16")
    if _error() < EXACT:
        return True
    _ask("none")
    return False


@contextmanager
def own_products() -> Iterator[None]:
    """PyTorch's own choice inside: for many small products, whose shapes change from step to step. oneDNN copies their operands,
    and makes a kernel for each new shape."""
    asked = _onednn.fp32_precision
    _ask("none")
    try:
        yield
    finally:
        _ask(asked)


def for_rows(count: int) -> AbstractContextManager[None]:
    """Around products of `count` rows with weights: for a single one MKL is the faster of the two."""
    return own_products() if count == 1 else nullcontext()


def _mkl_is_slow() -> bool:
    try:
        vendors = [line for line in CPUINFO.read_text().splitlines() if line.startswith("vendor_id")]
    except OSError:
        return False
    return torch.backends.mkl.is_available() and bool(vendors) and "GenuineIntel" not in vendors[0]


def _ask(mode: str) -> None:
    _onednn.fp32_precision = mode


def _error() -> float:
    """Relative error of a float32 product against float64."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(64, 576, generator=generator) for _ in range(2))
    right = a.double() @ b.double().T
    return float((a @ b.T - right).norm() / right.norm())
