"""The hooks rung in the real vLLM 0.16.0 with little room: chunks, many requests, preemption and decoding."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import vllm_small as small
from fixtures_models import save_llama
from headstart.config import Target
from headstart.engines.vllm.engine import VllmEngine
from headstart.errors import GateError


def test_rows_go_to_their_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(small.__file__).parent), prepend=os.pathsep)
    small.check_hooks_rung(small.save_target(tmp_path / "target"), tmp_path, os.environ["HEADSTART_VLLM016"])


def test_a_rope_base_that_only_transformers_5_reads_is_refused(tmp_path: Path) -> None:
    """Our Transformers writes the base into rope_parameters alone; 0.16's takes the class's default of 10,000 instead."""
    rope = {"rope_type": "default", "rope_theta": 50000.0}
    target = save_llama(tmp_path / "target", hidden_size=128, rope_parameters=rope)
    settings = Target(model=str(target), engine="vllm", device="cpu", python=os.environ["HEADSTART_VLLM016"])
    with pytest.raises(GateError, match=r"vLLM 0\.16\.0.* reads RoPE base 10000, config\.json says 50000"):
        VllmEngine(settings, small.USE)
