"""What all tests share: one torch thread (the machines are small and shared), no hub, a cache that lasts."""

from __future__ import annotations

import os

from hypothesis import settings

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")

settings.register_profile("shared", deadline=None)  # how long an example takes says nothing on a busy machine
settings.load_profile("shared")
