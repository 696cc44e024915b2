"""The choice of matrix products: as exact as float32 whatever is chosen, and never where a product is not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headstart import products

CPU = torch.device("cpu")
onednn = products._onednn


@settings(max_examples=30, deadline=None)
@given(rows=st.integers(1, 70), inner=st.integers(1, 600), columns=st.integers(1, 300), turned=st.booleans())
def test_products_are_float32s(rows: int, inner: int, columns: int, turned: bool) -> None:
    products.use_fast_products(CPU)
    a = torch.randn(inner, rows).T if turned else torch.randn(rows, inner)
    b = torch.randn(columns, inner).T
    right = a.double() @ b.double()
    torch.testing.assert_close((a @ b).double(), right, rtol=0, atol=2e-6 * inner**0.5 * float(b.abs().max()) * 4)


def test_coarse_products_are_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a processor with AMX, where the same mode computes in bfloat16."""
    onednn.fp32_precision = "none"
    monkeypatch.setattr(products, "_mkl_is_slow", lambda: True)
    monkeypatch.setattr(products, "_error", lambda: 3e-3)
    assert not products.use_fast_products(CPU)
    assert onednn.fp32_precision == "none"


@pytest.mark.parametrize(("vendor", "slow"), [("GenuineIntel", False), ("AuthenticAMD", True), (None, False)])
def test_who_needs_them_is_read_from_the_processor(
    vendor: str | None, slow: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    if vendor:
        cpuinfo.write_text(f"processor\t: 0\nvendor_id\t: {vendor}\nflags\t: fpu\n")
    monkeypatch.setattr(products, "CPUINFO", cpuinfo)
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    assert products._mkl_is_slow() == slow


def test_a_gpu_changes_nothing() -> None:
    onednn.fp32_precision = "none"
    assert not products.use_fast_products(torch.device("cuda"))
    assert onednn.fp32_precision == "none"


def test_one_row_is_left_to_pytorch_and_the_choice_comes_back() -> None:
    onednn.fp32_precision = "bf16"
    with products.for_rows(1):
        assert onednn.fp32_precision == "none"
    assert onednn.fp32_precision == "bf16"
    with products.for_rows(2):
        assert onednn.fp32_precision == "bf16"
