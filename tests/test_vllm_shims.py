"""Architectures without vLLM's EAGLE-3 interface, captured and served in the real vLLM through our shims.

More were run by hand with `vllm_shim_run.py`, eager and compiled; here run one residual
trap, one with its layers elsewhere (compiled), and one multimodal wrapper around an inner model that has the interface.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from vllm_models import models, save_model
from vllm_shim_run import ENVIRONMENT

pytestmark = pytest.mark.slow
RUNS = [("stablelm", "eager"), ("opt", "compiled"), ("llava_next", "eager")]


def run(name: str, mode: str, folder: Path) -> dict[str, Any]:
    target, out = save_model(name, folder / name), folder / "out" / "result.json"
    script = Path(__file__).with_name("vllm_shim_run.py")
    environment = {
        **os.environ,
        **ENVIRONMENT,
        "VLLM_CACHE_ROOT": str(folder / "cache"),
        "HEADSTART_SHIM": models()[name].architecture,
    }
    ended = subprocess.run(
        [sys.executable, str(script), str(target), str(out), mode],
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert ended.returncode == 0, (ended.stdout + ended.stderr)[-4000:]
    return json.loads(out.read_text())


@pytest.mark.parametrize(("name", "mode"), RUNS)
def test_a_shimmed_model_is_captured_and_serves_the_draft_that_was_trained_on_it(
    name: str, mode: str, tmp_path: Path
) -> None:
    """States as Transformers has them (boundaries 0, 1, 2 and n); an overfitted draft has every token accepted."""
    result = run(name, mode, tmp_path)
    assert result["path"] == models()[name].layers_path
    assert result["self_check"] < 1e-5
    assert result["difference"] < 1e-4
    assert result[mode]["identical"]
    assert result[mode]["accepted"] == result[mode]["drafted"] > 0
