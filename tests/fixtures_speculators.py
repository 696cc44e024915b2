"""Stand-ins for vLLM's modules, with the tree shapes and layer conventions of real ones, and a worker around an extension.

`StandIn.truth` is the residual stream after each layer of the last pass, which a decoder here computes beside what it does as
vLLM does it: norms that add the residual and write into both of their arguments, a decorated `__call__`, further arguments.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

WIDTH = 16
LAYERS = 6
ROWS = 5


class FusedNorm(nn.Module):
    """Like vLLM's RMSNorm: with a residual, both arguments are overwritten in place."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH) + 0.5)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Any:
        if residual is None:
            return self._normed(x)
        residual += x
        x.copy_(self._normed(residual))
        return x, residual

    def _normed(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


class IgnoringNorm(FusedNorm):
    """Like Cohere's LayerNorm of vLLM: takes a residual, and only hands it back."""

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Any:
        return self._normed(x), residual


class Layer(nn.Module):
    """With the arguments of DeepSeek's in vLLM 0.16, a further one among them; the default of that changes what comes out.

    `kind` says what it returns (see `Decoder`).
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.input_layernorm = FusedNorm()
        self.self_attn = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Linear(WIDTH, WIDTH)

    def forward(
        self, positions: Tensor, hidden_states: Tensor, residual: Tensor | None, llama_4_scaling: Tensor | None = None
    ) -> Any:
        alone = residual is None or self.kind == "inside"
        stream = hidden_states if alone else hidden_states + residual
        change = self.mlp(torch.tanh(self.self_attn(self.input_layernorm(stream.clone())))) + positions[:, None]
        if llama_4_scaling is not None:
            change = change * llama_4_scaling
        if self.kind == "pair":
            return change, stream
        if self.kind == "inside":
            return stream + change, stream
        return (stream + change, None) if self.kind == "none" else stream + change


class Decoder(nn.Module):
    """kind: "pair" (change, stream before), "inside" (stream, stream before), "none" (stream, None) or "tensor" (stream).

    layers, embed: how it names its layers and its way to embed ids. scaling: the further argument of its layers.
    """

    def __init__(
        self, kind: str = "pair", layers: str = "layers", embed: str = "embed_input_ids", scaling: float | None = None
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self._scaling = None if scaling is None else torch.tensor(scaling)
        self.kind = kind
        self.embed_tokens = nn.Embedding(32, WIDTH)
        setattr(self, layers, nn.ModuleList(Layer(kind) for _ in range(LAYERS)))
        self._layers = layers
        self.norm = IgnoringNorm() if kind == "inside" else FusedNorm()
        self.start_layer, self.end_layer = 0, LAYERS
        self.truth: list[Tensor] = []
        setattr(self, embed, self.embed_tokens)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As @support_torch_compile: straight to forward, past all hooks of this module."""
        return self.forward(*args, **kwargs)

    def forward(
        self, input_ids: Tensor | None, positions: Tensor, inputs_embeds: Tensor | None = None, **extra: Any
    ) -> Any:
        hidden = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        residual, self.truth = None, []
        for layer in getattr(self, self._layers):
            out = layer(positions, hidden, residual, self._scaling)
            hidden, residual = (out, None) if isinstance(out, Tensor) else out
            self.truth.append(hidden.clone() if residual is None or self.kind != "pair" else hidden + residual)
        out = self.norm(hidden, residual)
        return out if isinstance(out, Tensor) else out[0]


class CausalLM(nn.Module):
    """A text model with its head, such as LlamaForCausalLM."""

    def __init__(self, decoder: nn.Module, *, eagle3: bool = False) -> None:
        super().__init__()
        self.model = decoder
        self.lm_head = nn.Linear(WIDTH, 32)
        if eagle3:
            self.supports_eagle3 = True

    def forward(self, input_ids: Tensor, positions: Tensor, **extra: Any) -> Any:
        return self.model(input_ids, positions, **extra)


class Tower(nn.Module):
    """A vision tower with more blocks, also named `layers`, than the text model."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(WIDTH, 2, WIDTH) for _ in range(LAYERS + 2))
        self.norm = FusedNorm()


class Wrapper(nn.Module):
    """A multimodal wrapper without `get_language_model`: a tower and, at `path`, the text model."""

    def __init__(self, text: nn.Module, path: str = "language_model", tower: str = "vision_tower") -> None:
        super().__init__()
        setattr(self, tower, Tower())
        *outer, last = path.split(".")
        owner: nn.Module = self
        for name in outer:
            setattr(owner, name, nn.Module())
            owner = getattr(owner, name)
        setattr(owner, last, text)
        self._text = [text]

    def forward(self, input_ids: Tensor, positions: Tensor, **extra: Any) -> Any:
        embeds = next(m for m in self._text[0].modules() if isinstance(m, nn.Embedding))(input_ids)
        return self._text[0](None, positions, inputs_embeds=embeds, deepstack_input_embeds=None, **extra)


class ToldWrapper(Wrapper):
    """With it, as every multimodal class of vLLM has it."""

    def get_language_model(self) -> nn.Module:
        return self._text[0]


class UnmarkedWrapper(Wrapper):
    """As vLLM >= 0.15 answers where no child was marked as the language model."""

    def get_language_model(self) -> nn.Module:
        raise NotImplementedError("No language model found")


SHAPES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "Llama": lambda text: CausalLM(text, eagle3=True),
    "DeepseekV3 of 0.16": CausalLM,
    "Kimi-K2.5 of 0.15": ToldWrapper,
    "Kimi-K2.5 of 0.16": lambda text: ToldWrapper(CausalLM(text)),
    "Qwen-VL": lambda text: ToldWrapper(CausalLM(text), tower="visual"),
    "unmarked": lambda text: UnmarkedWrapper(CausalLM(text)),
    "Transformers-like": lambda text: Wrapper(text, "model.language_model", "model_vision"),
    "found by search": lambda text: Wrapper(text, "speaker.core.decoder"),
    "bare": lambda text: text,
}


def shaped(name: str, kind: str = "pair", **decoder: Any) -> nn.Module:
    """A model whose tree is that of the real one named."""
    return SHAPES[name](Decoder(kind, **decoder))


def decoder_of(model: nn.Module) -> Decoder:
    return next(module for module in model.modules() if isinstance(module, Decoder))


def fake_vllm() -> dict[str, ModuleType]:
    """What custom_worker.py, old or patched, imports of vLLM: one rank that has all, the EAGLE-3 flag."""
    names = ("vllm", "vllm.distributed", "vllm.sequence", "vllm.model_executor", "vllm.model_executor.models")
    modules = {name: ModuleType(name) for name in (*names, "vllm.model_executor.models.interfaces")}
    rank = SimpleNamespace(rank_in_group=0, is_first_rank=True, is_last_rank=True)
    for getter in ("get_tp_group", "get_pp_group"):
        setattr(modules["vllm.distributed"], getter, lambda: rank)
    modules["vllm.distributed"].rank = rank  # type: ignore[attr-defined]
    modules["vllm.sequence"].IntermediateTensors = dict  # type: ignore[attr-defined]
    flag = modules["vllm.model_executor.models.interfaces"]
    flag.supports_eagle3 = lambda model: hasattr(model, "supports_eagle3")  # type: ignore[attr-defined]
    return modules


def load(text: str) -> ModuleType:
    """The module of a custom_worker.py; fake_vllm must be in sys.modules."""
    module = ModuleType("custom_worker")
    exec(compile(text, "custom_worker.py", "exec"), module.__dict__)
    return module


class Engine:
    """A worker with the extension mixed in, driven as the generator of its version drives it."""

    def __init__(self, module: ModuleType, model: nn.Module, *, eager: bool = True) -> None:
        batch = SimpleNamespace(req_id_to_index={})
        worker = type("Worker", (module.HiddenStatesWorkerExtension,), {})()
        worker.model_runner = SimpleNamespace(model=model, input_batch=batch)
        worker.model_config = SimpleNamespace(enforce_eager=eager)
        self.worker, self.model, self.batch = worker, model, batch

    @property
    def decoder(self) -> Decoder:
        return decoder_of(self.model)

    def setup(self, layer_ids: list[int]) -> None:
        self.worker._setup_hidden_states_capture(layer_ids)

    def run(self, *steps: dict[str, int]) -> Any:
        """One pass for each step, of so many prompt tokens by request, in the engine's order; then what was captured."""
        self.worker._reset_capture()
        for step in steps:
            if hasattr(self.worker, "_set_request_metadata"):
                self.batch.req_id_to_index = {name: index for index, name in enumerate(step)}
                self.worker._set_request_metadata(dict(reversed(step.items())))
            self.forward(sum(step.values()))
        return self.worker._get_captured_states()

    def forward(self, rows: int) -> None:
        with torch.inference_mode():
            dtype = next(self.model.parameters()).dtype
            self.model(torch.arange(rows) % 32, torch.arange(rows, dtype=dtype) / rows)

    def states(self, rows: int = ROWS) -> list[Tensor]:
        """Those of one request in one pass."""
        found = self.run({"only": rows})
        return found["only"] if isinstance(found, dict) else found


def installed_fakes(monkeypatch: Any) -> dict[str, ModuleType]:
    modules = fake_vllm()
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return modules
