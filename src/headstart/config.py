"""Every setting of a run, in one frozen model: read from TOML, changed by `-s section.key=value`, printed whole.

This module imports neither torch nor transformers. A field's description is its documentation: `headstart config` prints it.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from headstart.errors import UserError

Fraction = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[int, Field(gt=0)]


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Target(Section):
    """The big model whose decoding is to become faster."""

    model: str = Field(description="hub id, folder, or `smollm2-135m`, the real small model that installs as a package")
    revision: str | None = Field(None, description="hub revision; the newest when absent")
    engine: Literal["transformers"] = Field("transformers", description="what generates and captures")
    device: str = Field("auto", description="`auto` takes a GPU where there is one, else the CPU")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="compute type; `auto` is float32 on CPU, bfloat16 on GPU"
    )
    layers_path: str | None = Field(None, description="attribute path of the decoder layers, when it cannot be found")
    trust_remote_code: bool = Field(False, description="let Transformers run code that the model's folder ships")


class Data(Section):
    """Which conversations, and how they are cut and split."""

    sources: tuple[str, ...] = Field(
        min_length=1, description="JSONL, JSON or Parquet files, or shipped sets such as `sharegpt`; in order of preference"
    )
    max_conversations: Positive | None = Field(None, description="keep at most this many, by share of each source")
    max_turns: Positive = Field(4, description="user turns kept of one conversation, from its start")
    max_length: Positive = Field(2048, description="tokens of one sequence, prompt and answer together")
    max_prompt_tokens: Positive | None = Field(None, description="drop conversations whose first prompt is longer")
    validation_fraction: Fraction = Field(0.05, description="share of conversations held out to select checkpoints")
    role_aliases: dict[str, str] = Field(default_factory=dict, description="foreign role names, e.g. {my_model = 'assistant'}")
    max_drop: Fraction = Field(0.2, description="stop when a larger share of the rows read cannot be used")
    answers: Literal["regenerate", "keep"] = Field(
        "regenerate", description="`regenerate`: the target answers anew; `keep`: train on the answers in the data"
    )
    decontaminate: tuple[str, ...] = Field(
        ("mt_bench", "humaneval"), description="evaluation sets whose prompts must not be trained on"
    )
    seed: int = Field(0, description="of the choice and the split")


class Regenerate(Section):
    """How the target answers the prompts."""

    max_new_tokens: Positive = Field(512, description="longest answer")
    temperature: float = Field(0.0, ge=0, description="0 is greedy")
    top_p: float = Field(1.0, gt=0, le=1, description="nucleus sampling, with temperature above 0")
    truncated: Literal["keep", "drop"] = Field("keep", description="answers that hit max_new_tokens")
    batch_size: Positive = Field(64, description="prompts decoded together")
    seed: int = Field(0, description="of sampling")


class Vocab(Section):
    """The draft vocabulary: the part of the target's that the draft can propose."""

    size: Positive | None = Field(None, description="tokens in it; the smaller of 32000 and the target's when absent")


class Capture(Section):
    """Hidden states of the target over the conversations."""

    aux_layers: tuple[int, ...] | None = Field(
        None, description="boundary indices b (decoder layers already applied); (2, n//2, n-3) when absent"
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field("auto", description="stored type; `auto` is the compute type")
    batch_tokens: Positive = Field(4096, description="tokens per forward pass, padding counted")
    shard_tokens: Positive = Field(32768, description="tokens per shard; a killed capture loses at most one")
    max_bad_fraction: Fraction = Field(0.01, description="stop when a larger share of the samples fails a gate")


class Draft(Section):
    """The draft model. Sizes that are absent come from the target's shape."""

    algorithm: Literal["eagle3"] = Field("eagle3", description="how the draft is built and trained")
    ttt_steps: Positive = Field(5, description="training-time-test steps T: how deep the draft learns to build on itself")
    num_layers: Positive = Field(1, description="decoder layers")
    num_heads: Positive | None = Field(None, description="attention heads")
    num_kv_heads: Positive | None = Field(None, description="key/value heads")
    head_dim: Positive | None = Field(None, description="width of one head")
    intermediate_size: Positive | None = Field(None, description="width of the MLP")
    norm_before_residual: bool = Field(False, description="residual after the hidden norm (speculators) or before it (official)")
    fc_norm: bool = Field(False, description="EAGLE-3.1: RMSNorm on each aux state before fc")
    norm_output: bool = Field(False, description="EAGLE-3.1: feed the normed output to the next step")
    lm_head: Literal["target", "random"] = Field("target", description="start of the draft head: the target's rows, or random")


class Train(Section):
    """How the draft is trained."""

    epochs: Positive = Field(3, description="passes over the training conversations")
    max_steps: Positive | None = Field(None, description="end earlier, after this many optimiser steps")
    batch_tokens: Positive = Field(8192, description="tokens packed into one optimiser step")
    learning_rate: float = Field(4e-4, gt=0, description="peak")
    schedule: Literal["cosine", "linear", "constant"] = Field("cosine", description="after the warm-up")
    warmup_fraction: Fraction = Field(0.05, description="share of the steps with a rising rate")
    min_lr_fraction: Fraction = Field(0.1, description="rate at the end, as a share of the peak")
    weight_decay: float = Field(0.0, ge=0, description="AdamW, on matrices only")
    betas: tuple[float, float] = Field((0.9, 0.95), description="AdamW")
    clip: float = Field(1.0, gt=0, description="largest gradient norm")
    loss: Literal["kl", "tv", "lk"] = Field("kl", description="kl: forward KL; tv: total variation; lk: their hybrid per position")
    step_decay: float = Field(0.8, gt=0, le=1, description="weight of TTT step i is step_decay**i; official 0.8, speculators 1.0")
    mask: Literal["exact", "label"] = Field(
        "exact", description="exact: rows inference can meet; label: every row whose label is supervised (speculators)"
    )
    freeze_lm_head: bool = Field(False, description="keep the draft head as it starts")
    validate_every: Positive = Field(50, description="steps between validations; the best by acceptance length is kept")
    checkpoint_every: Positive = Field(50, description="steps between checkpoints")
    keep_checkpoints: Positive = Field(2, description="newest checkpoints kept while training")
    seed: int = Field(0, description="of weights and data order")


class Evaluate(Section):
    """Measuring the draft by decoding with it."""

    prompts: tuple[str, ...] = Field(("mt_bench", "humaneval"), description="held-out prompt sets: shipped names or files")
    max_prompts: Positive = Field(40, description="prompts of each set")
    max_new_tokens: Positive = Field(128, description="tokens decoded for each prompt")
    draft_tokens: Positive = Field(3, description="K: tokens drafted before each verify step")
    temperatures: tuple[float, ...] = Field((0.0,), description="0 is greedy, with the lossless check; others sample")
    baseline: bool = Field(True, description="also measure an untrained draft of the same shape")
    seed: int = Field(0, description="of sampling and of the bootstrap")


class Export(Section):
    """Folders that serving engines load."""

    formats: tuple[Literal["vllm", "speculators"], ...] = Field(("vllm", "speculators"), description="one folder each")
    embed_tokens: bool = Field(True, description="write the target's embedding into the export, byte for byte")


class Run(Section):
    """One whole run: what `run.toml` says, defaults filled in."""

    directory: str = Field("", description="run directory; `runs/NAME` after the TOML file when absent")
    target: Target
    data: Data
    regenerate: Regenerate = Regenerate()
    vocab: Vocab = Vocab()
    capture: Capture = Capture()
    draft: Draft = Draft()
    train: Train = Train()
    evaluate: Evaluate = Evaluate()
    export: Export = Export()

    @model_validator(mode="after")
    def _lengths_fit(self) -> Run:
        if self.data.max_prompt_tokens and self.data.max_prompt_tokens >= self.data.max_length:
            raise ValueError("data.max_prompt_tokens must be below data.max_length, or no answer fits")
        return self


class SettingDoc(NamedTuple):
    """One line of `headstart config`."""

    name: str
    type: str
    default: str
    meaning: str


def load(path: Path, overrides: Sequence[str] = ()) -> Run:
    """Read a run from a TOML file and `section.key=value` overrides (values in TOML syntax, bare words allowed).

    Raises:
        UserError: the file cannot be read, a key is unknown (with the nearest known one), or a value does not fit.
    """
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}", do="headstart config shows every setting") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not TOML: {error}") from None
    raw.setdefault("directory", f"runs/{path.stem}")
    return build(raw, overrides)


def build(raw: dict[str, Any], overrides: Sequence[str] = ()) -> Run:
    """A `Run` from plain values; `raw` is changed by the overrides. Raises UserError as `load` does."""
    for override in overrides:
        _apply(raw, override)
    try:
        return Run.model_validate(raw)
    except ValidationError as error:
        raise _explain(error) from None


def settings() -> Iterator[SettingDoc]:
    """Every setting with type, default and one sentence."""
    for name, info in Run.model_fields.items():
        if isinstance(info.annotation, type) and issubclass(info.annotation, Section):
            for key, inner in info.annotation.model_fields.items():
                yield _document(f"{name}.{key}", inner)
        else:
            yield _document(name, info)


def _document(name: str, info: Any) -> SettingDoc:
    default = "required" if info.is_required() else _toml(info.get_default(call_default_factory=True))
    return SettingDoc(name, _type_name(info.annotation), default, info.description or "")


def _type_name(annotation: Any) -> str:
    text = annotation.__name__ if isinstance(annotation, type) and not hasattr(annotation, "__args__") else str(annotation)
    for noise in ("typing.", "Annotated[", ", FieldInfo(annotation=NoneType, required=True, metadata=[Gt(gt=0)])]"):
        text = text.replace(noise, "")
    return text.replace("NoneType", "None")


def _toml(value: Any) -> str:
    if value is None:
        return "absent"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (tuple, list)):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    return f'"{value}"' if isinstance(value, str) else str(value)


def _apply(raw: dict[str, Any], override: str) -> None:
    name, equals, text = override.partition("=")
    keys = name.strip().split(".")
    if not equals or not all(keys):
        raise UserError(f"cannot read the setting {override!r}", looked_for="section.key=value, e.g. train.epochs=2")
    for key in keys[:-1]:
        raw = raw.setdefault(key, {})
        if not isinstance(raw, dict):
            raise UserError(f"cannot set {name}: {key} is a value, not a section")
    raw[keys[-1]] = _value(text.strip())


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _explain(error: ValidationError) -> UserError:
    first = error.errors()[0]
    name = ".".join(str(part) for part in first["loc"])
    known = [setting.name for setting in settings()] + list(Run.model_fields)
    if first["type"] == "extra_forbidden":
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
        do = f"did you mean {near[0]}?" if near else "headstart config lists every setting"
        return UserError(f"unknown setting {name}", do=do)
    if first["type"] == "missing":
        return UserError(f"the setting {name} is missing", do="headstart config lists every setting")
    message = first["msg"].removeprefix("Value error, ")
    value = f" = {first['input']!r}" if name else ""
    return UserError(f"{name}{value}: {message}" if name else message, do="headstart config lists every setting")
