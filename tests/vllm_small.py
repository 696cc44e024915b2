"""A vLLM with little room, in which prompts are cut in chunks and requests preempt one another; and what must come out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from fixtures_models import save_llama
from headstart.config import Target
from headstart.engines.base import Use
from headstart.engines.transformers import TransformersEngine
from headstart.engines.vllm.launch import Host
from headstart.engines.vllm.start import start_of
from headstart.target.anatomy import inspect
from headstart.types import Sample
from vllm_beside import BOUNDARIES, FOLDER, RESTARTS

AUX = (2, 3, 4)
TAPPED = (*AUX, 7)
ANSWER = 24  # tokens generated where answers are wanted
USE = Use(longest=224, batch_size=12, batch_tokens=64, boundaries=AUX)
SMALL = {"block_size": 32, "num_gpu_blocks_override": 15, "max_num_batched_tokens": 64}  # room for two long requests
EXTRACTION = ("speculative_config", "kv_transfer_config")


def save_target(folder: Path) -> Path:
    """Heads of 32: the smallest that vLLM's CPU attention takes."""
    return save_llama(folder, hidden_size=128)


def thirty() -> list[Sample]:
    """Of 1 to 200 tokens."""
    rng = np.random.default_rng(0)
    lengths = [1, 200, 199, *rng.integers(2, 200, 27).tolist()]
    return [_sample(f"s{number:02d}", rng.integers(3, 512, length)) for number, length in enumerate(lengths)]


def start(target: Path, folder: Path, extension: str, python: str | None = None) -> Host:
    """A host with an extension of vllm_beside: Alone for the hooks rung, else the ladder's. folder: for the extension."""
    settings = Target(model=str(target), engine="vllm", device="cpu", engine_options=SMALL, python=python)
    plan = start_of(target, settings, USE, inspect(target))
    arguments = dict(plan.arguments) | {"worker_extension_cls": f"vllm_beside.{extension}"}
    capture = dict(plan.capture or {})
    if extension == "Alone":
        arguments["enable_prefix_caching"], capture["rung"] = False, "hooks"
        arguments = {name: value for name, value in arguments.items() if name not in EXTRACTION}
    beside = {FOLDER: str(folder), BOUNDARIES: ",".join(map(str, TAPPED))}
    host = Host(python, dict(plan.environment) | beside)
    host.ask("start", arguments=arguments, capture=capture, layers_path=None)
    return host


def captured(host: Host, samples: Sequence[Sample], **fields: Any) -> dict[str, dict[str, Tensor]]:
    return dict(_captured(host, samples, **fields))


def _captured(host: Host, samples: Sequence[Sample], **fields: Any) -> Iterator[tuple[str, dict[str, Tensor]]]:
    requests = [{"id": sample.id, "ids": sample.input_ids.tolist()} for sample in samples]
    for event in host.events("capture", requests=requests, **fields):
        assert event["event"] in ("captured", "done"), event
        if event["event"] == "captured":
            yield event["id"], load_file(event["path"])
            Path(event["path"]).unlink()


def check_hooks_rung(target: Path, folder: Path, python: str | None = None) -> None:
    """Alone, without vLLM's extraction, against Transformers: prompts, then answers whose rows come among other prefills."""
    samples = thirty()
    host = start(target, folder, "Alone", python)
    try:
        prompts = captured(host, samples)
        answers = captured(host, samples, include_output=True, sampling={"max_tokens": ANSWER})
    finally:
        host.close()
    engine = TransformersEngine(Target(model=str(target), device="cpu"))
    compare(engine, samples, prompts)
    assert all(len(answers[sample.id]["token_ids"]) == len(sample.input_ids) + ANSWER - 1 for sample in samples)
    compare(engine, [_sample(name, load["token_ids"].numpy()) for name, load in answers.items()], answers)
    assert preempted(folder) > 0


def compare(engine: TransformersEngine, samples: Sequence[Sample], found: dict[str, dict[str, Tensor]]) -> None:
    for states in engine.capture(samples, AUX, 2048):
        assert tuple(found[states.id]["token_ids"].tolist()) == states.ids
        whole = torch.cat([states.aux, states.last[:, None]], dim=1)
        difference = (found[states.id]["hidden_states"] - whole).norm(dim=-1) / whole.norm(dim=-1)
        assert difference.max() < 1e-4


def preempted(folder: Path) -> int:
    """How many requests started again; none means that the cache of SMALL is too large for its purpose."""
    file = folder / RESTARTS
    return int(file.read_text()) if file.exists() else 0


def _sample(name: str, ids: np.ndarray) -> Sample:
    return Sample(name, name, "test", "train", ids.astype(np.int32), np.ones(len(ids), bool), "given")
