"""The end of the target: embedding, final norm and output head, so that logits can be rebuilt from stored last states.

Exact for what families do there: gains of 1+w (Gemma), mean-centred norms (Cohere, GPT-NeoX), a tanh soft cap (Gemma)
and a logit scale (Cohere, Granite). What a norm module computes is found by probing the live module, not by its name.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

from headstart import files
from headstart.errors import UserError
from headstart.target import families

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TENSORS = "head.safetensors"
FACTS = "head.json"

NormKind = Literal["rms", "layer"]


@dataclass(frozen=True)
class TargetHead:
    """embed [Ve, d], rows as stored, without a family's embedding scale; lm_head [V, d], the same tensor when tied.

    The norm's gain is norm_weight + norm_offset; `scale` multiplies the logits, then `softcap` c makes c*tanh(x/c).
    """

    embed: Tensor
    lm_head: Tensor
    norm_weight: Tensor
    norm_eps: float
    norm_offset: float = 0.0
    norm_kind: NormKind = "rms"
    norm_bias: Tensor | None = None
    lm_bias: Tensor | None = None
    softcap: float | None = None
    scale: float = 1.0

    @property
    def hidden_size(self) -> int:
        return self.lm_head.shape[1]

    @property
    def vocab_size(self) -> int:
        return self.lm_head.shape[0]

    @property
    def tied(self) -> bool:
        return self.embed.data_ptr() == self.lm_head.data_ptr() and self.embed.shape == self.lm_head.shape

    def norm(self, last: Tensor) -> Tensor:
        """The final norm of `last` [..., d], computed in float32, returned in the dtype of `last`."""
        x = last.float()
        if self.norm_kind == "layer":
            x = x - x.mean(-1, keepdim=True)
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.norm_eps)
        x = x * (self.norm_weight.float() + self.norm_offset)
        if self.norm_bias is not None:
            x = x + self.norm_bias.float()
        return x.to(last.dtype)

    def logits(self, last: Tensor, rows: Tensor | None = None) -> Tensor:
        """float32 [..., V] of states `last` [..., d] before the final norm; only of vocabulary ids `rows` when given.

        For the same rows again and again, `restricted(rows).logits(last)` gathers them once.
        """
        if rows is not None:
            return self.restricted(rows).logits(last)
        normed = self.norm(last).to(self.lm_head.dtype)
        return self._shape(functional.linear(normed, self.lm_head, self.lm_bias).float())

    def restricted(self, rows: Tensor) -> TargetHead:
        """The same head over the vocabulary ids `rows` alone."""
        rows = rows.to(self.lm_head.device)
        bias = None if self.lm_bias is None else self.lm_bias[rows]
        return replace(self, lm_head=self.lm_head[rows], lm_bias=bias)

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> TargetHead:
        """A copy elsewhere; a tied head stays tied."""
        moved = {name: tensor.to(device=device, dtype=dtype) for name, tensor in self._tensors()}
        if self.tied:
            moved["lm_head"] = moved["embed"]
        return replace(self, **moved)

    def save(self, folder: Path) -> None:
        """Write head.safetensors and head.json; a tied head is stored once."""
        tensors = dict(self._tensors())
        if self.tied:
            del tensors["lm_head"]
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, folder / TENSORS)
        files.write_json(folder / FACTS, {"tied": self.tied, **self._facts()})

    @classmethod
    def read(cls, folder: Path) -> TargetHead:
        """Open what `save` wrote; tensors stay on disk, memory-mapped, until they are used.

        Raises:
            UserError: a file is missing or is not one of ours.
        """
        try:
            facts = files.read_json(folder / FACTS)
            tensors: dict[str, Any] = load_file(folder / TENSORS)
            if facts.pop("tied"):
                tensors["lm_head"] = tensors["embed"]
            return cls(**tensors, **facts)
        except (OSError, KeyError, TypeError, json.JSONDecodeError) as error:
            raise UserError(f"the target head in {folder} cannot be read: {error}", do="capture again") from None

    @classmethod
    def from_model(cls, model: PreTrainedModel, final_norm: nn.Module) -> TargetHead:
        """Take the tensors of a live model (shared with it, not copied).

        Raises:
            UserError: the model has no output head, or its final norm computes something unknown.
        """
        output, embedding = model.get_output_embeddings(), model.get_input_embeddings()
        if output is None:
            raise UserError(f"{type(model).__name__} has no output head", looked_for="get_output_embeddings()")
        text = model.config.get_text_config(decoder=True).to_dict()
        weight, bias = cast(Tensor, output.weight).detach(), getattr(output, "bias", None)
        return cls(
            embed=cast(Tensor, embedding.weight).detach(),
            lm_head=weight,
            lm_bias=None if bias is None else bias.detach(),
            softcap=families.softcap(text)[0],
            scale=families.logit_scale(text)[0] or 1.0,
            **_probe_norm(final_norm, weight),
        )

    def _shape(self, logits: Tensor) -> Tensor:
        """Logit scale, then soft cap, of float32 logits."""
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        for name in ("embed", "lm_head", "norm_weight", "norm_bias", "lm_bias"):
            tensor = getattr(self, name)
            if tensor is not None:
                yield name, tensor

    def _facts(self) -> dict[str, Any]:
        names = ("norm_kind", "norm_eps", "norm_offset", "softcap", "scale")
        return {name: getattr(self, name) for name in names}


def _probe_norm(module: nn.Module, lm_head: Tensor) -> dict[str, Any]:
    """What `module` computes, as fields of `TargetHead`."""
    parameters = _norm_parameters(module, lm_head)
    probe = torch.Generator().manual_seed(0)
    x = torch.randn(8, lm_head.shape[1], generator=probe) * 3 + 1  # off centre, so that subtracting the mean shows
    with torch.no_grad():
        output = copy.deepcopy(module).cpu().float()(x)
    return known_norm(parameters, x, output, type(module).__name__)


def known_norm(parameters: dict[str, Any], x: Tensor, output: Tensor, name: str) -> dict[str, Any]:
    """`parameters` (norm_weight, norm_bias, norm_eps) with the kind and offset that make `output` [n, d] of `x` [n, d].

    Both float32 on the CPU. Raises UserError when no known form does; `name` is that of the norm's class.
    """
    for kind, offset in (("rms", 0.0), ("rms", 1.0), ("layer", 0.0), ("layer", 1.0)):
        fields = {**parameters, "norm_kind": kind, "norm_offset": offset}
        cpu: dict[str, Any] = {
            name: value.cpu() if isinstance(value, Tensor) else value for name, value in fields.items()
        }
        if torch.allclose(TargetHead(embed=x, lm_head=x, **cpu).norm(x), output, rtol=1e-4, atol=1e-4):
            return fields
    raise UserError(
        f"the final norm {name} computes something that is not known",
        looked_for="RMSNorm or LayerNorm with gain w or 1+w",
    )


def _norm_parameters(module: nn.Module, lm_head: Tensor) -> dict[str, Any]:
    eps = next(
        (getattr(module, name) for name in ("variance_epsilon", "eps", "epsilon") if hasattr(module, name)), None
    )
    if not isinstance(eps, float):
        raise UserError(f"the epsilon of the final norm {type(module).__name__} was not found", looked_for="eps")
    weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
    shared = {"norm_eps": eps, "norm_bias": None if bias is None else bias.detach()}
    if weight is None:  # OLMo's norm has no gain
        return {"norm_weight": lm_head.new_ones(lm_head.shape[1]), **shared}
    return {"norm_weight": weight.detach(), **shared}
