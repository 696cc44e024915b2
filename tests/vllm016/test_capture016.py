"""`headstart capture` in the real vLLM 0.16.0, which has no way to hand over hidden states: Kimi-K2.5, LLaVA, SmolLM2.

The night that this product exists for: KimiK25ForConditionalGeneration is served by 0.16 and lacks the EAGLE-3 interface.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from wrappers016 import save_kimi, save_llava

from headstart import artifact, config
from headstart.data.rows import read_samples
from headstart.data.store import StateStore, label_rows
from headstart.engines.transformers import TransformersEngine
from headstart.target import smollm2

PYTHON016 = os.environ["HEADSTART_VLLM016"]
REPOSITORY = Path(__file__).parents[2]

WORDS = "the harbour was quiet and a small boat came in with the tide while the water was cold and clear"

# In float32, against Transformers: as a share of the largest value at that boundary.
CLOSE = 1e-4


@dataclass(frozen=True)
class Captured:
    """A finished `capture`: what its manifest says, and the states by sample, [tokens, n_aux + 1, d], the last one last."""

    root: Path
    facts: dict
    states: dict[str, list[torch.Tensor]]  # by boundary: [tokens, d], of the last one the label rows alone


def run(verb: str, file: Path) -> str:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY / "src")}
    command = [sys.executable, "-m", "headstart", verb, str(file)]
    end = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600, check=False)
    assert end.returncode == 0, end.stderr
    return end.stderr


def captured(root: Path, target: Path, conversations: int, aux: tuple[int, ...]) -> Captured:
    """Prepare, keep the answers, capture: as a person would, from a TOML file."""
    root.mkdir(parents=True, exist_ok=True)
    write_chats(root / "chats.jsonl", conversations)
    (root / "run.toml").write_text(
        f"""
        directory = "{root}/run"
        [target]
        model = "{target}"
        engine = "vllm"
        python = "{PYTHON016}"
        [data]
        sources = ["chats.jsonl"]
        answers = "keep"
        decontaminate = []
        max_length = 240
        [capture]
        aux_layers = {list(aux)}
        batch_tokens = 128
        shard_tokens = 1000
        """
    )
    for verb in ("prepare", "regenerate", "capture"):
        run(verb, root / "run.toml")
    made = artifact.open_artifact(root / "run" / "states", "states")
    opened = StateStore.open(made)
    states = {}
    for entry in opened.entries:
        stored = opened.read(entry)
        states[entry.id] = [*stored.aux.unbind(1), stored.last]
    return Captured(root / "run", made.facts, states)


def write_chats(path: Path, count: int) -> None:
    """Conversations of 20 to 200 tokens, so that passes of 128 hold several, and cut the longer ones."""
    words = WORDS.split()
    with path.open("w") as file:
        for index in range(count):
            said = [words[(index * 7 + step * 3) % len(words)] for step in range(5 + 11 * index % 60)]
            messages = [
                {"role": "user", "content": f"{index}: {' '.join(said[:9])}?"},
                {"role": "assistant", "content": f"{' '.join(said)} {index * index}."},
            ]
            file.write(json.dumps({"messages": messages}) + "\n")


def difference_from_transformers(made: Captured, target: Path) -> dict[int, float]:
    """The largest absolute difference by column, and no larger than CLOSE allows."""
    samples = [s for s in read_samples(made.root / "conversations" / "samples.parquet") if s.id in made.states]
    masks = {sample.id: sample.supervised for sample in samples}
    engine = TransformersEngine(config.Target(model=str(target), device="cpu"))
    worst: dict[int, float] = {}
    try:
        for expected in engine.capture(samples, made.facts["aux_layers"], 2048):
            labels = torch.from_numpy(label_rows(masks[expected.id]))
            whole = [*expected.aux.unbind(1), expected.last[labels]]
            for column, (found, wanted) in enumerate(zip(made.states[expected.id], whole, strict=True)):
                gap = (found - wanted).abs().max().item()
                assert gap <= CLOSE * wanted.abs().max().item()
                worst[column] = max(gap, worst.get(column, 0.0))
    finally:
        engine.close()
    return worst


@pytest.fixture(scope="module")
def kimi(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return save_kimi(tmp_path_factory.mktemp("kimi"))


@pytest.fixture(scope="module")
def smol(tmp_path_factory: pytest.TempPathFactory) -> Captured:
    return captured(tmp_path_factory.mktemp("smol"), smollm2.materialize(), 24, (2, 15, 27))


def test_vllm_016_says_that_kimi_has_no_interface(kimi: tuple[Path, Path]) -> None:
    """Asked of the class itself, as every tool does once the weights are loaded."""
    asked = (
        "from vllm.model_executor.models.interfaces import supports_eagle3\n"
        "from vllm.model_executor.models.kimi_k25 import KimiK25ForConditionalGeneration as Kimi\n"
        "import vllm\n"
        "print(vllm.__version__, supports_eagle3(Kimi))"
    )
    end = subprocess.run([PYTHON016, "-c", asked], capture_output=True, text=True, check=True)
    assert end.stdout.splitlines()[-1] == "0.16.0 False"


def test_kimi_is_captured(kimi: tuple[Path, Path], tmp_path: Path, record_property) -> None:
    wrapped, bare = kimi
    made = captured(tmp_path, wrapped, 24, (2, 3, 4))
    engine = made.facts["engine"]
    assert engine["version"].startswith("0.16.0")
    assert engine["layers_path"] == "language_model.model.layers"
    assert (engine["num_layers"], engine["hidden_size"]) == (6, 128)
    assert engine["details"]["rung"] == "hooks"
    assert "no EAGLE-3 interface" in engine["details"]["why"]
    assert engine["details"]["self_check"]["rule"] == "sum"
    assert made.facts["identity"]["argmax_agreement"] == 1.0
    assert len(made.states) == 24
    record_property("max_abs_difference", worst := difference_from_transformers(made, bare))
    assert max(worst.values()) < 1e-3


def test_smollm2_is_captured(smol: Captured, record_property) -> None:
    assert smol.facts["engine"]["details"]["rung"] == "hooks"
    assert len(smol.states) == 24
    record_property("max_abs_difference", difference_from_transformers(smol, smollm2.materialize()))


def test_smollm2_inside_a_llava_has_the_bare_models_states(smol: Captured, tmp_path: Path, record_property) -> None:
    wrapped = save_llava(tmp_path / "llava", smollm2.materialize())
    made = captured(tmp_path / "made", wrapped, 24, (2, 15, 27))
    assert made.facts["engine"]["details"]["architecture"] == "LlavaForConditionalGeneration"
    assert made.facts["engine"]["layers_path"] == "language_model.model.layers"
    assert made.states.keys() == smol.states.keys()
    pairs = (zip(made.states[name], smol.states[name], strict=True) for name in smol.states)
    gaps = [(one - other).abs().max().item() for pair in pairs for one, other in pair]
    record_property("max_abs_difference", max(gaps))
    assert max(gaps) == 0.0
