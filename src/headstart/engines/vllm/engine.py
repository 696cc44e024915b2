"""The engine `vllm`: generates and captures through a host process, and hands over the same things as `TransformersEngine`.

Which way the states are had is decided by the ladder before anything is loaded; that they are the right ones is proved on the
live model: by the workers' self-check when they start, and by the identity check of the stage.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from headstart.config import Target
from headstart.engines import base
from headstart.engines.base import EngineInfo, States, TopLogProbs, Use
from headstart.engines.vllm import arguments
from headstart.engines.vllm.launch import Host, Refused
from headstart.engines.vllm.proof import check_layers, check_plugin
from headstart.engines.vllm.rope import check_rope
from headstart.engines.vllm.start import start_of
from headstart.errors import GateError, UserError
from headstart.target.anatomy import Anatomy, inspect
from headstart.target.head import TargetHead, known_norm
from headstart.target.layers import check_boundaries
from headstart.target.source import resolve
from headstart.types import Completion, Media, Prompt, Sample, Sampling


class VllmEngine:
    """Implements `Engine` for what it was opened for: answers only, or the boundaries of `use`.

    Raises:
        UserError: there is no vLLM, no way to capture this target with it, or it cannot load it; says why.
        GateError: the plugin did not load in a worker, or the self-check of the live model failed.
    """

    def __init__(self, target: Target, use: Use) -> None:
        self.folder = resolve(target.model, target.revision)
        self._anatomy = inspect(self.folder)
        self._plan = start_of(self.folder, target, use, self._anatomy)
        self._host = Host(self._plan.python, self._plan.environment)
        with self._closing():
            facts = self._ask("start", **_start(self._plan))
            check_plugin(self._plan, facts)
            check_rope(self._anatomy, facts)
            check_layers(self._plan, facts)
            self.info = _describe(target, self._plan, facts)

    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling, tell: Callable[[str, int], None] | None = None
    ) -> Iterator[Completion | base.Refused]:
        """Completions as they finish.

        Raises:
            GateError: sampling, from an engine that captures: with its drafter vLLM 0.32 repeats tokens, and answers depend
                on their neighbours. Greedy answers are right.
        """
        if self._plan.capture and sampling.temperature > 0:
            raise GateError(
                "vLLM samples wrongly while it extracts hidden states", do="open an engine that only answers"
            )
        requests = [_request(prompt, sampling) for prompt in prompts]
        for event in self._events("generate", requests=requests, sampling=_sampling(sampling)):
            if event["event"] == "grew" and tell is not None:
                for prompt, tokens in event["tokens"].items():
                    tell(prompt, tokens)
            elif event["event"] == "finished":
                read = tuple(event["prompt"]) if "prompt" in event else None
                yield Completion(event["id"], tuple(event["ids"]), event["finish"], read)
            elif event["event"] == "refused":
                yield base.Refused(event["id"], event["why"])

    def capture(
        self, samples: Sequence[Sample], boundaries: Sequence[int], batch_tokens: int
    ) -> Iterator[States | base.Refused]:
        """States in memory, as they are ready. `batch_tokens` was settled when the engine started.

        Raises:
            UserError: a boundary out of range, or one that the engine was not started with.
        """
        del batch_tokens
        columns = self._columns(check_boundaries(boundaries, self.info.num_layers))
        requests = [_again(sample) for sample in samples]
        for event in self._events("capture", requests=requests):
            if event["event"] == "captured":
                yield _read(event["id"], Path(event["path"]), columns)
            elif event["event"] == "refused":
                yield base.Refused(event["id"], event["why"])

    def top_log_probs(self, ids: Sequence[int], k: int) -> TopLogProbs:
        found = self._ask("top_log_probs", ids=list(ids), k=k)
        return TopLogProbs(torch.tensor(found["ids"]), torch.tensor(found["values"]))

    def head(self) -> TargetHead:
        """What the workers hold, with the numbers of the live logits processor; on the GPU where there is room."""
        facts = self._ask("head")
        path = Path(facts["path"])
        tensors = load_file(path)
        path.unlink()
        return _on_gpu(_head(facts, tensors, self._anatomy), self.info.device)

    @property
    def pid(self) -> int:
        """The process that holds vLLM."""
        return self._host.pid

    def close(self) -> None:
        self._host.close()

    def _columns(self, boundaries: Sequence[int]) -> list[int]:
        """Places of the boundaries, and of the last state, among those that are captured."""
        started = list(self._plan.capture["boundaries"]) if self._plan.capture else []
        missing = [boundary for boundary in boundaries if boundary not in started]
        if missing:
            raise UserError(f"vLLM was started to capture the boundaries {started}, not {missing}")
        return [*(started.index(boundary) for boundary in boundaries), len(started) - 1]

    def _ask(self, command: str, **fields: Any) -> dict[str, Any]:
        with self._refusals(command):
            return self._host.ask(command, **fields)

    def _events(self, command: str, **fields: Any) -> Iterator[dict[str, Any]]:
        with self._refusals(command):
            yield from self._host.events(command, **fields)

    @contextmanager
    def _refusals(self, command: str) -> Iterator[None]:
        try:
            yield
        except Refused as refused:
            kind = GateError if str(refused).startswith("GateError") else UserError
            raise kind(f"vLLM failed to {command}: {refused}\n{self._host.tail()}") from None

    @contextmanager
    def _closing(self) -> Iterator[None]:
        """No host stays behind when the start fails."""
        try:
            yield
        except BaseException:
            self._host.kill()
            raise


def _start(plan: arguments.Plan) -> dict[str, Any]:
    return {"arguments": dict(plan.arguments), "capture": plan.capture, "layers_path": plan.layers_path}


def _describe(target: Target, plan: arguments.Plan, facts: dict[str, Any]) -> EngineInfo:
    model, rung = facts["model"], plan.rung
    details = {"torch": facts["torch"], "transformers": facts["transformers"], "architecture": model["architecture"]}
    if rung is not None:
        details |= {"rung": rung.name, "why": rung.why, "self_check": facts["self_check"]}
    return EngineInfo(
        name="vllm",
        version=facts["version"],
        model=target.model,
        dtype=facts["dtype"],
        device=facts["device"],
        layers_path=model["layers_path"],
        num_layers=model["num_layers"],
        hidden_size=model["hidden_size"],
        vocab_size=model["vocab_size"],
        details=details,
    )


def _sampling(sampling: Sampling) -> dict[str, Any]:
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "max_tokens": sampling.max_new_tokens,
        "stop_token_ids": list(sampling.end_ids),
    }


def _request(prompt: Prompt, sampling: Sampling) -> dict[str, Any]:
    request: dict[str, Any] = {"id": prompt.id, "ids": list(prompt.ids), **_images(prompt.media)}
    if sampling.temperature > 0:
        digest = hashlib.sha256(f"{sampling.seed}/{prompt.id}".encode()).digest()
        request["sampling"] = {"seed": int.from_bytes(digest[:7], "little")}
    return request


def _again(sample: Sample) -> dict[str, Any]:
    """The request that makes vLLM read the sample: with images, the ids before their expansion."""
    ids = sample.input_ids if sample.sent is None else sample.sent
    return {"id": sample.id, "ids": ids.tolist(), **_images(sample.media)}


def _images(media: Sequence[Media]) -> dict[str, Any]:
    return {"media": [asdict(item) for item in media]} if media else {}


def _read(name: str, path: Path, columns: list[int]) -> States:
    """The states of one request; its file goes, but stays mapped as long as they are used."""
    tensors = load_file(path)
    path.unlink()
    states = tensors["hidden_states"]
    if states.ndim != 3 or states.shape[1] <= max(columns):
        raise GateError(
            f"the states of {name} have shape {tuple(states.shape)}", looked_for=f"{max(columns) + 1} boundaries"
        )
    *aux, last = columns
    return States(name, tuple(tensors["token_ids"].tolist()), states[:, aux], states[:, last].contiguous())


def _head(facts: dict[str, Any], tensors: dict[str, Tensor], anatomy: Anatomy) -> TargetHead:
    """The head in our terms. A scale of 1 may stand for one that the model applies before its logits processor."""
    probe, output = tensors.pop("norm_probe"), tensors.pop("norm_output")
    weight, bias = tensors.pop("norm_weight", None), tensors.pop("norm_bias", None)
    if facts["norm_eps"] is None:
        raise UserError(f"the epsilon of the final norm {facts['norm']} was not found", looked_for="eps")
    gain = torch.ones(probe.shape[1], dtype=tensors["embed"].dtype) if weight is None else weight
    fields = {"norm_weight": gain, "norm_bias": bias, "norm_eps": facts["norm_eps"]}
    return TargetHead(
        embed=tensors["embed"],
        lm_head=tensors["embed"] if facts["tied"] else tensors["lm_head"],
        lm_bias=tensors.get("lm_bias"),
        softcap=facts["softcap"] or anatomy.softcap,
        scale=facts["scale"] if facts["scale"] != 1 else anatomy.logit_scale or 1.0,
        **known_norm(fields, probe, output, facts["norm"]),
    )


def _on_gpu(head: TargetHead, device: str) -> TargetHead:
    """Rebuilding logits on a CPU would take longer than vLLM takes for the states."""
    if not device.startswith("cuda") or not torch.cuda.is_available():
        return head
    size = sum(tensor.nbytes for tensor in (head.embed, head.lm_head))
    return head.to("cuda") if torch.cuda.mem_get_info()[0] > 3 * size else head
