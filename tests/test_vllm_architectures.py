"""Every kind of model goes through the real engine: what it captures must be what Transformers computes with the same weights.

The models are tiny and random (`vllm_models`). CI takes those of `CHOSEN`: every layers path, every way in which a layer returns
its state, every kind of attention and mixture. With HEADSTART_ARCHITECTURES=FOLDER all are measured, those that cannot run here
must still fail as they say, and each leaves its row in FOLDER: tools/make_architectures.py makes the table in the docs.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

from headstart.config import Target
from headstart.data.identity import check_identity
from headstart.engines.base import Refused, Use
from headstart.engines.hooks import capturing, find_decoder
from headstart.engines.load import open_engine
from headstart.errors import GateError, UserError
from headstart.target import smollm2
from headstart.types import Sample
from vllm_dressed import save_grafted
from vllm_models import BARE, models, save_model

pytestmark = pytest.mark.slow

RECORD = "HEADSTART_ARCHITECTURES"
LENGTHS = (40, 23, 7)
BATCH_TOKENS = 32  # fewer than the longest sample: its prompt is read in chunks

TEXT = ("gemma2", "cohere", "stablelm", "phimoe", "exaone4", "granitehybrid", "minicpm", "deepseek3")
PATHS = ("opt", "gpt2", "dbrx", "mamba2", "chatglm", "plamo3", "gptneox", "falconh1")
WRAPPERS = (
    "llava",
    "qwen3_vl",
    "internvl",
    "gemma3_mm",
    "idefics3",
    "aria",
    "kimi_k25",
    "ovis",
    "minicpmv",
    "moondream3",
)
CHOSEN = (*TEXT, *PATHS, *WRAPPERS)


def samples() -> list[Sample]:
    """Sequences of unlike lengths, of ids that every vocabulary here has."""
    return [_sample([(7 * i * i + 3 * i + 11 * length) % 390 for i in range(length)]) for length in LENGTHS]


def _sample(ids: list[int]) -> Sample:
    return Sample(f"{len(ids)} tokens", "c", "made", "train", np.array(ids, np.int32), np.ones(len(ids), bool), "given")


def reference(model: Any, asked: Sequence[Sample], boundaries: Sequence[int]) -> dict[str, Tensor]:
    """Transformers' states [tokens, boundaries, d] by sample; the last layer's is before the final norm."""
    layers = find_decoder(model, model.config.get_text_config(decoder=True).num_hidden_layers).layers
    states = {}
    for sample in asked:
        ids = torch.from_numpy(sample.input_ids).long()[None]
        with torch.no_grad(), capturing(layers, boundaries) as captured:
            model(input_ids=ids, use_cache=False)
        states[sample.id] = torch.stack([captured.states[boundary][0] for boundary in boundaries], dim=1)
    return states


def load_reference(folder: Path) -> Any:
    """The model in `folder`, or the bare one that it is made of, opened by Transformers."""
    chosen = folder / BARE if (folder / BARE).is_dir() else folder
    wrapped = hasattr(transformers.AutoConfig.from_pretrained(chosen), "vision_config")
    auto = transformers.AutoModelForImageTextToText if wrapped else transformers.AutoModelForCausalLM
    return auto.from_pretrained(chosen, dtype=torch.float32, attn_implementation="eager").eval()


def capture(folder: Path, boundaries: tuple[int, ...], trust: bool = False) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """States [tokens, boundaries, d] by sample, through vLLM, after the identity check; and what the engine says of itself."""
    asked, aux = samples(), boundaries[:-1]
    target = Target(model=str(folder), engine="vllm", dtype="float32", trust_remote_code=trust)
    use = Use(longest=max(LENGTHS), batch_size=len(LENGTHS), batch_tokens=BATCH_TOKENS, boundaries=aux)
    with closing(open_engine(target, use)) as engine:
        identity = check_identity(engine, engine.head(), asked, aux, BATCH_TOKENS)
        found = list(engine.capture(asked, aux, BATCH_TOKENS))
        details = {**engine.info.details, "layers_path": engine.info.layers_path, "identity": identity.max_dp}
    assert not [answer for answer in found if isinstance(answer, Refused)]
    return {states.id: torch.cat([states.aux, states.last[:, None]], dim=1) for states in found}, details


def compare(name: str, folder: Path, model: Any, boundaries: tuple[int, ...], trust: bool = False) -> dict[str, Any]:
    """A row of the table: how `folder` was captured, and how far that is from `model`, which Transformers runs."""
    wanted = reference(model, samples(), boundaries)
    found, details = capture(folder, boundaries, trust)
    return {
        "model": name,
        "architecture": json.loads((folder / "config.json").read_text())["architectures"][0],
        "layers_path": details["layers_path"],
        "rung": details["rung"],
        "rule": details["self_check"]["rule"],
        "reference": type(model).__name__,
        "magnitude": max(states.abs().max().item() for states in wanted.values()),
        "difference": max((found[name] - states).abs().max().item() for name, states in wanted.items()),
        "identity": details["identity"],
    }


def measure(name: str, folder: Path) -> dict[str, Any]:
    """The row of the model called `name`, written into `folder`. Raises what the engine or its checks raise."""
    model = models()[name]
    save_model(name, folder)
    trust = bool(model.options.get("trust_remote_code"))
    bare = load_reference(folder)
    layers = bare.config.get_text_config(decoder=True).num_hidden_layers
    return compare(name, folder, bare, tuple(range(1, layers + 1)), trust) | {
        "traits": list(model.traits),
        "note": model.note,
    }


def leave(row: dict[str, Any]) -> None:
    if folder := os.environ.get(RECORD):
        Path(folder, f"{row['model']}.json").write_text(json.dumps(row, indent=2))


RUNNING = [name for name, model in models().items() if not model.cannot]
FAILING = [name for name, model in models().items() if model.cannot]


@pytest.mark.parametrize("name", RUNNING if os.environ.get(RECORD) else CHOSEN)
def test_the_states_of_every_layer(name: str, tmp_path: Path) -> None:
    row = measure(name, tmp_path / "model")
    leave(row)
    assert row["difference"] <= models()[name].tolerance * row["magnitude"]
    assert row["layers_path"] == models()[name].layers_path


def test_real_weights_in_a_wrapper(tmp_path: Path) -> None:
    """SmolLM2 inside a LLaVA has the states of SmolLM2."""
    bare = smollm2.materialize()
    folder = save_grafted(bare, tmp_path / "model")
    row = compare("smollm2_in_llava", folder, load_reference(bare), (2, 15, 27, 30))
    leave(row | {"traits": ["wrapper", "real weights"]})
    assert row["difference"] <= 5e-6 * row["magnitude"]
    assert row["layers_path"] == "language_model.model.layers"


@pytest.mark.skipif(RECORD not in os.environ, reason="nothing of ours is at work here")
@pytest.mark.parametrize("name", FAILING)
def test_what_vllm_itself_cannot_run_here(name: str, tmp_path: Path) -> None:
    save_model(name, tmp_path / "model")
    with pytest.raises((UserError, GateError)) as caught:
        capture(tmp_path / "model", (1, 2, 3, 4))
    assert models()[name].cannot in str(caught.value)
    model = models()[name]
    leave({"model": name, "architecture": model.architecture, "cannot": model.cannot, "note": model.note})
