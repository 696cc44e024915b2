"""The facts of one architecture of a vLLM release, as plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Table = Literal["text", "multimodal", "transformers"]
Output = Literal["pair", "single", "other"]
Residual = Literal["add", "inside", "none", "unknown"]


@dataclass(frozen=True)
class Arch:
    """One architecture of the model registry.

    name: as in `architectures` of a config.json. table: where the registry has it; `transformers` are those that vLLM
    routes to its Transformers backend. module, cls: the class that serves it, the module as the registry spells it.
    eagle3: the class carries vLLM's SupportsEagle3. delivers: the decoder really hands over auxiliary hidden states
    when asked (None: the decoder is chosen by the configuration). last_layer: also the one behind the last layer.
    pp: pipeline parallelism. layers_path: of the decoder layers in the live object. inner: the class that holds them
    (`module:Class`); registered: the architectures that a wrapper asks the registry for, empty when the configuration
    names it. layer_output: what one layer returns: (hidden, residual), one tensor, or something else. residual: how
    the residual stream is got from it: hidden + residual, hidden alone since the residual is inside, hidden alone
    since there is none, or unknown. loops: the layers run several times in one pass. lanes: the stream has several
    lanes (hyper-connections). mla: the attention is multi-head latent attention. stacks: number of decoder stacks.
    """

    name: str
    table: Table
    module: str
    cls: str
    eagle3: bool = False
    delivers: bool | None = False
    last_layer: bool = True
    hybrid: bool = False
    enc_dec: bool = False
    pp: bool = False
    layers_path: str | None = None
    inner: str | None = None
    registered: tuple[str, ...] = ()
    layer_output: Output | None = None
    residual: Residual = "unknown"
    loops: bool = False
    lanes: bool = False
    stacks: int = 1
