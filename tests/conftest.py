"""What all tests share: one torch thread (the machines are small and shared), no hub, a cache that lasts."""

from __future__ import annotations

import os
import sys

import pytest
from hypothesis import settings

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")

settings.register_profile("shared", deadline=None)  # how long an example takes says nothing on a busy machine
settings.load_profile("shared")


@pytest.fixture(autouse=True)
def _products_of_pytorch() -> None:
    """An engine chooses products for its whole process, also that of a module's fixture. A test that compares with another process
    must not inherit that: so before each test, once wider fixtures are made."""
    products = sys.modules.get("headstart.products")
    if products is not None:
        products._onednn.fp32_precision = "none"
