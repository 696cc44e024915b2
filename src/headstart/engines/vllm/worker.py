"""What our commands reach inside vLLM's workers: `worker_extension_cls="headstart.engines.vllm.worker.HeadstartWorker"`.

vLLM mixes the class into its worker (0.11 to 0.32), so every name begins with `headstart_`; methods are called on all ranks by
`collective_rpc` and return plain values only, since anything richer would need pickles. vLLM imports this module before it
loads the model.
"""

from __future__ import annotations

import copy
import os
from dataclasses import asdict
from importlib import metadata
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from headstart.engines.vllm import plugin, rope, taps, tree
from headstart.engines.vllm.layer_hooks import HookedWorker
from headstart.errors import GateError


class HeadstartWorker(HookedWorker):
    """Mixed into the worker; `model_runner`, `rank` and `device` are the worker's."""

    model_runner: Any
    rank: int
    device: torch.device

    def headstart_find(self, layers_path: str | None) -> str:
        """Find the text model once and for all; returns the path of its layers."""
        self._headstart_text = tree.find_text_model(self.model_runner.get_model(), layers_path)
        return self._headstart_text.path

    def headstart_facts(self) -> dict[str, Any]:
        text, model = self._headstart_text, self.model_runner.get_model()
        return {
            "pid": os.getpid(),
            "rank": self.rank,
            "plugin": plugin.state(),
            **{name: _version(name) for name in ("torch", "transformers")},
            "version": _version("vllm"),
            "device": str(self.model_runner.device),  # the CPU worker of 0.16 has no device of its own
            "model": {
                "architecture": type(model).__name__,
                "layers_path": text.path,
                "num_layers": text.num_layers,
                "hidden_size": _rows(text.embed).shape[1],
                "vocab_size": vocab_size(output_of(text)),
                "rope_theta": rope.live_theta(self.model_runner.model_config.hf_text_config),
            },
        }

    def headstart_check_start(self, boundaries: list[int] | None) -> None:
        """Watch one forward pass: how the layers are to be read (None), or then what they hold at `boundaries`."""
        text = self._headstart_text
        if boundaries is None:
            self._headstart_probe = taps.Probe(text)
            self._headstart_probe.__enter__()
        else:
            self._headstart_taps = taps.Taps(text, boundaries, self._headstart_rule, self._headstart_passes)
            self._headstart_taps.install()

    def headstart_check_stop(self, file: str | None) -> dict[str, Any]:
        """The rule of the residual, with its proof; or, with the file of a capture, its relative difference by boundary."""
        if file is None:
            self._headstart_probe.__exit__()
            return self._headstart_judge(self._headstart_probe)
        captured = load_file(file)["hidden_states"]
        seen = self._headstart_taps.take(len(captured))
        self._headstart_taps.remove()
        return {str(b): relative(captured[:, i], seen[:, i]) for i, b in enumerate(self._headstart_taps.here)}

    def _headstart_judge(self, probe: taps.Probe) -> dict[str, Any]:
        try:
            found = asdict(probe.result())
        except GateError as error:
            found = {"rule": None, "refused": str(error)}
        self._headstart_rule, self._headstart_passes = found["rule"], found.get("passes", 1)
        return found

    def headstart_export_head(self, path: str) -> dict[str, Any]:
        """Rank 0 writes embedding, output head and norm to `path`; returns its numbers. All ranks take part in the gather."""
        text = self._headstart_text
        output, norm = output_of(text), text.final_norm
        if norm is None or text.embed is None:
            raise ValueError("the final norm or the embedding of the text model was not found")
        tied = _rows(text.embed).data_ptr() == _rows(output).data_ptr()
        tensors = {"embed": gathered(text.embed)}
        if not tied:
            tensors["lm_head"] = gathered(output)
        bias = getattr(output, "bias", None)
        if isinstance(bias, Tensor):
            whole = gathered(output, bias)  # on every rank, whatever the first one finds then
            if adds_bias(self.model_runner.get_model(), tensors["embed"][:1]):
                tensors["lm_bias"] = whole
        tensors |= norm_probe(norm, tensors["embed"].shape[1])
        if self.rank == 0:
            save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, path)
        processor = text.logits_processor
        return {
            "path": path,
            "tied": tied,
            "norm_eps": norm_eps(norm),
            "norm": type(norm).__name__,
            "softcap": getattr(processor, "soft_cap", None),
            "scale": float(getattr(processor, "scale", 1.0)),
        }


def relative(found: Tensor, expected: Tensor) -> float:
    """Of the row [d] that differs most: the length of the difference over that of the row. A wrong layer is above 1e-2 even
    where one huge value, the same in all layers, hides it in the largest difference."""
    wanted = expected.cpu().float()
    return float(((found.float() - wanted).norm(dim=-1) / wanted.norm(dim=-1).clamp_min(1e-30)).max())


def output_of(text: tree.TextModel) -> nn.Module:
    """The output head: the embedding where the model has no other."""
    output = text.embed if text.lm_head is None else text.lm_head
    if output is None:
        raise ValueError("the text model has neither an output head nor an embedding on this rank")
    return output


def vocab_size(embedding: nn.Module) -> int:
    """Rows that stand for tokens, without the padding that makes them divisible."""
    return int(getattr(embedding, "org_vocab_size", _rows(embedding).shape[0]))


def gathered(embedding: nn.Module, rows: Tensor | None = None) -> Tensor:
    """All rows of a vocabulary-parallel tensor, from every rank, the padding cut off."""
    from vllm.distributed import get_tensor_model_parallel_world_size, tensor_model_parallel_all_gather  # noqa: PLC0415

    rows = _rows(embedding) if rows is None else rows
    shared = hasattr(embedding, "org_vocab_size") and get_tensor_model_parallel_world_size() > 1
    whole = tensor_model_parallel_all_gather(rows.detach().contiguous(), dim=0) if shared else rows.detach()
    return whole[: vocab_size(embedding)]


def adds_bias(model: Any, like: Tensor) -> bool:
    """Whether the model's logits have the bias of its head: PhiMoE and Moondream-3 load one and leave it out (vLLM 0.32)."""
    logits = model.compute_logits(torch.zeros_like(like))
    return logits is None or bool((logits[logits.isfinite()] != 0).any())


def norm_probe(norm: nn.Module, width: int) -> dict[str, Tensor]:
    """The parameters of the final norm, and what it makes of random rows in float32: norm_probe, norm_output [8, d]."""
    x = (
        torch.randn(8, width, generator=torch.Generator().manual_seed(0)) * 3 + 1
    )  # off centre: subtracting the mean shows
    alone = copy.deepcopy(norm).cpu().float()
    with torch.no_grad():
        output = getattr(alone, "forward_native", alone.forward)(x.clone())
    found = {"norm_probe": x, "norm_output": output[0] if isinstance(output, tuple) else output}
    for name in ("weight", "bias"):
        value = getattr(norm, name, None)
        if isinstance(value, Tensor):
            found[f"norm_{name}"] = value
    return found


def norm_eps(norm: nn.Module) -> float | None:
    return next(
        (float(getattr(norm, name)) for name in ("variance_epsilon", "eps", "epsilon") if hasattr(norm, name)), None
    )


def _rows(embedding: nn.Module | None) -> Tensor:
    weight = getattr(embedding, "weight", None)
    if not isinstance(weight, Tensor):
        raise ValueError(f"{type(embedding).__name__} has no weight: a quantised embedding or head cannot be exported")
    return weight


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return metadata.version(f"{name}-cpu")
