"""`headstart patch-speculators` where it is meant to help: the real vLLM 0.16.0, Kimi-K2.5's wrapper, the released files."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from wrappers016 import save_kimi

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[1]
DRIVER = HERE / "drive_speculators.py"
PYTHON016 = os.environ["HEADSTART_VLLM016"]
LENGTHS = (7, 60, 190)
# The generator reads config.json by Transformers, which knows this type only from the files of the model.
CONFIGURATION = """from transformers import DeepseekV3Config, PretrainedConfig
class KimiConfig(PretrainedConfig):
    model_type = "kimi_k25"
    def __init__(self, text_config=None, **settings):
        self.text_config = DeepseekV3Config(**(text_config or {}))
        super().__init__(**settings)
"""


@pytest.fixture(scope="module")
def kimi(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    wrapped, bare = save_kimi(tmp_path_factory.mktemp("kimi"))
    (wrapped / "configuration_kimi.py").write_text(CONFIGURATION)
    config = json.loads((wrapped / "config.json").read_text())
    named = {"auto_map": {"AutoConfig": "configuration_kimi.KimiConfig"}}
    (wrapped / "config.json").write_text(json.dumps(config | named))
    return wrapped, bare


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    numbers = random.Random(1)
    path = tmp_path_factory.mktemp("prompts") / "prompts.json"
    path.write_text(json.dumps([[numbers.randrange(3, 500) for _ in range(length)] for length in LENGTHS]))
    return path


@pytest.fixture(scope="module")
def truth(kimi: tuple[Path, Path], prompts: Path) -> list[Tensor]:
    """Transformers' states of the bare text model after layers 0 and 2, [tokens, 2, d]; it norms those of the last."""
    model = AutoModelForCausalLM.from_pretrained(kimi[1], dtype=torch.float32, attn_implementation="eager").eval()
    with torch.inference_mode():
        states = [model(torch.tensor([ids]), output_hidden_states=True) for ids in json.loads(prompts.read_text())]
    return [torch.stack([one.hidden_states[1][0], one.hidden_states[3][0]], dim=1) for one in states]


def site(folder: Path, version: str) -> Path:
    """A release's files, for PYTHONPATH."""
    told = subprocess.run(
        [sys.executable, str(REPOSITORY / "tools" / "old_speculators.py")], capture_output=True, text=True, check=True
    )
    released = dict(line.split("\t") for line in told.stdout.splitlines())
    return Path(shutil.copytree(released[version], folder / f"speculators {version}"))


def patch(folder: Path) -> list[str]:
    """By the command, as a person would; the environment is that of the real vLLM."""
    command = [sys.executable, "-m", "headstart", "patch-speculators", "--python", PYTHON016]
    done = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(folder)}, check=True
    )
    return done.stdout.splitlines()


def drive(way: str, folder: Path, model: Path, prompts: Path) -> subprocess.CompletedProcess[str]:
    """Leaves `folder`/out.safetensors."""
    environment = os.environ | {
        "PYTHONPATH": f"{folder}:{REPOSITORY / 'src'}",
        "OMP_NUM_THREADS": "1",
        "VLLM_MLA_DISABLE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # our hooks and theirs in one process
    }
    command = [PYTHON016, str(DRIVER), way, str(model), str(prompts), str(folder / "out.safetensors")]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600, check=False)


@pytest.mark.parametrize("version", ["0.3.0", "0.4.0.1"])
def test_through_llm_states_are_those_of_our_own_hooks(
    version: str, kimi: tuple[Path, Path], prompts: Path, truth: list[Tensor], tmp_path: Path, record_property
) -> None:
    folder = site(tmp_path, version)
    assert patch(folder)[0].endswith(f": speculators {version}, vLLM 0.16.0+cpu")
    end = drive("llm", folder, kimi[0], prompts)
    assert end.returncode == 0, end.stderr[-3000:]
    assert "KimiK25ForConditionalGeneration, text model at get_language_model().model" in end.stdout + end.stderr
    found = load_file(folder / "out.safetensors")
    for index, length in enumerate(LENGTHS):
        assert found[f"theirs.{index}"].shape == (length, 3, 128)
        assert torch.equal(found[f"theirs.{index}"], found[f"ours.{index}"])
    record_property("max_abs_difference", _difference(found, truth))


def test_through_speculators_own_generator(
    kimi: tuple[Path, Path], prompts: Path, truth: list[Tensor], tmp_path: Path, record_property
) -> None:
    folder = site(tmp_path, "0.4.0.1")
    assert patch(folder)[-1] == "Patched custom_worker.py to handle multimodal wrappers"
    end = drive("generator", folder, kimi[0], prompts)
    assert end.returncode == 0, end.stderr[-3000:]
    found = load_file(folder / "out.safetensors")
    assert [len(found[f"theirs.{index}"]) for index in range(3)] == list(LENGTHS)
    record_property("max_abs_difference", _difference(found, truth))


def test_the_released_03_refuses_kimi_once_it_is_loaded(kimi: tuple[Path, Path], prompts: Path, tmp_path: Path) -> None:
    """The night: 27 minutes of loading on eight GPUs, and then this."""
    end = drive("llm", site(tmp_path, "0.3.0"), kimi[0], prompts)
    assert end.returncode != 0
    assert "Model KimiK25ForConditionalGeneration does not support hidden state extraction" in end.stderr


def _difference(found: dict[str, Tensor], truth: list[Tensor]) -> float:
    """The largest from Transformers', which float32 explains."""
    worst = max((found[f"theirs.{index}"][:, :2] - wanted).abs().max().item() for index, wanted in enumerate(truth))
    assert worst <= 1e-4 * max(wanted.abs().max().item() for wanted in truth)
    return worst
