"""Every setting of a run, in one frozen model: read from TOML, changed by `-s section.key=value`, printed whole.

This module imports neither torch nor transformers. A field's description is its documentation: `headstart config`
prints it.
"""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from headstart import files
from headstart.errors import UserError

Fraction = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[int, Field(gt=0, lt=2**63)]
Beta = Annotated[float, Field(ge=0, lt=1)]
Temperature = Annotated[float, Field(ge=0)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
PositiveFloat = Annotated[float, Field(gt=0)]
LossName = Literal["kl", "tv", "lk", "lk_alpha", "ce"]
Mixture = Annotated[dict[LossName, PositiveFloat], Field(min_length=1)]


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Target(Section):
    """The big model whose decoding is to become faster."""

    model: str = Field(description="hub id, folder, or `smollm2-135m`, the real small model that installs as a package")
    revision: str | None = Field(None, description="hub revision; the newest when absent")
    engine: Literal["transformers", "vllm"] = Field(
        "transformers", description="what generates and captures; `headstart doctor` says whether vLLM can"
    )
    tensor_parallel: Positive = Field(1, description="GPUs that share the target's weights (engine vllm)")
    python: str | None = Field(None, description="Python of the environment that holds vLLM; this one when absent")
    engine_options: dict[str, Any] = Field(
        default_factory=dict, description="further arguments of vllm.LLM, e.g. {gpu_memory_utilization = 0.95}"
    )
    device: str = Field("auto", description="`auto` takes a GPU where there is one, else the CPU")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="compute type; `auto` is float32 on CPU, bfloat16 on GPU"
    )
    layers_path: str | None = Field(None, description="attribute path of the decoder layers, when it cannot be found")
    trust_remote_code: bool = Field(False, description="let Transformers run code that the model's folder ships")


class Data(Section):
    """Which conversations, and how they are cut and split."""

    sources: tuple[str, ...] = Field(
        min_length=1,
        description="JSONL, JSON or Parquet files, or shipped sets such as `sharegpt`; in order of preference",
    )
    max_conversations: Positive | None = Field(None, description="keep at most this many, by share of each source")
    max_turns: Positive = Field(4, description="user turns kept of one conversation, from its start")
    max_length: Positive = Field(2048, description="tokens of one sequence, prompt and answer together")
    max_prompt_tokens: Positive | None = Field(None, description="drop conversations whose first prompt is longer")
    validation_fraction: Fraction = Field(0.05, description="share of conversations held out to select checkpoints")
    role_aliases: dict[str, str] = Field(
        default_factory=dict, description="foreign role names, e.g. {my_model = 'assistant'}"
    )
    max_drop: Fraction = Field(0.2, description="stop when a larger share of the rows read cannot be used")
    answers: Literal["regenerate", "keep"] = Field(
        "regenerate", description="`regenerate`: the target answers anew; `keep`: train on the answers in the data"
    )
    decontaminate: tuple[str, ...] = Field(
        ("mt_bench", "humaneval"), description="evaluation sets whose prompts must not be trained on"
    )
    seed: Seed = Field(0, description="seed of the choice and the split")


class Regenerate(Section):
    """How the target answers the prompts."""

    max_new_tokens: Positive = Field(512, description="tokens of the longest answer")
    temperature: Temperature = Field(0.0, description="sampling temperature; 0 is greedy")
    top_p: float = Field(1.0, gt=0, le=1, description="nucleus that is sampled from, with temperature above 0")
    truncated: Literal["keep", "drop"] = Field("keep", description="what becomes of answers that hit max_new_tokens")
    batch_size: Positive = Field(64, description="prompts that are decoded together")
    seed: Seed = Field(0, description="seed of sampling")


class Vocab(Section):
    """The draft vocabulary: the part of the target's that the draft can propose."""

    size: Positive | None = Field(None, description="tokens in it; the smaller of 32000 and the target's when absent")


class Capture(Section):
    """Hidden states of the target over the conversations."""

    aux_layers: tuple[int, ...] | None = Field(
        None, description="boundary indices b (decoder layers already applied); (2, n//2, n-3) when absent"
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16", "float8"] = Field(
        "auto", description="stored type; `auto` is the compute type; float8 has a scale for each row and layer"
    )
    batch_tokens: Positive = Field(4096, description="tokens per forward pass, padding counted")
    shard_tokens: Positive = Field(32768, description="tokens per shard; a killed capture loses at most one")
    max_bad_fraction: Fraction = Field(0.01, description="stop when a larger share of the samples fails a gate")


class Draft(Section):
    """The draft model. Sizes that are absent come from the target's shape."""

    algorithm: Literal["eagle3"] = Field("eagle3", description="how the draft is built and trained")
    ttt_steps: Positive = Field(
        5, description="training-time-test steps T: how deep the draft learns to build on itself"
    )
    num_layers: Positive = Field(1, description="decoder layers of the draft")
    attention: Literal["gqa", "mla"] = Field(
        "gqa",
        description="gqa: heads that share keys, as in Llama; mla: multi-head latent attention in the sizes of a target that has "
        'it (DeepSeek, Kimi); export.formats must be ["vllm"], which loads it from 0.18, with fc_norm from 0.22',
    )
    num_heads: Positive | None = Field(None, description="attention heads of the draft")
    num_kv_heads: Positive | None = Field(None, description="key/value heads of the draft")
    head_dim: Positive | None = Field(None, description="width of one head of the draft")
    intermediate_size: Positive | None = Field(None, description="width of the draft's MLP")
    sliding_window: Positive | None = Field(
        None,
        description="tokens that a query of the draft sees at most, its own among them; when absent all, or what all layers of "
        "the target see",
    )
    norm_before_residual: bool = Field(
        False, description="residual after the hidden norm (speculators) or before it (official)"
    )
    fc_norm: bool = Field(True, description="EAGLE-3.1: RMSNorm on each aux state before fc; vLLM loads it from 0.22")
    norm_output: bool = Field(False, description="EAGLE-3.1: feed the normed output to the next step")
    fc: Literal["last_aux", "random"] = Field(
        "last_aux", description="start of the fusion: the last aux state passed through, or random (official)"
    )
    lm_head: Literal["target", "random"] = Field(
        "target", description="start of the draft head: the target's rows, or random"
    )

    @model_validator(mode="after")
    def _sizes_fit_the_attention(self) -> Draft:
        for name in ("num_kv_heads", "head_dim"):
            if self.attention == "mla" and getattr(self, name) is not None:
                raise ValueError(f"draft.{name} cannot be set with draft.attention = 'mla': its sizes are the target's")
        return self

    @model_validator(mode="after")
    def _window_fits(self) -> Draft:
        if self.sliding_window is not None and self.attention == "mla":
            raise ValueError(
                "draft.sliding_window cannot be had with draft.attention = 'mla': vLLM serves no such draft"
            )
        if self.sliding_window is not None and self.sliding_window < self.ttt_steps:
            raise ValueError(
                f"draft.sliding_window = {self.sliding_window} is below draft.ttt_steps = {self.ttt_steps}: "
                "the last step would not see the token that its chain starts from"
            )
        return self


class Train(Section):
    """How the draft is trained."""

    epochs: Positive = Field(3, le=10_000, description="passes over the training conversations")
    max_steps: Positive | None = Field(None, description="end earlier, after this many optimiser steps")
    batch_tokens: Positive = Field(8192, description="tokens packed into one optimiser step")
    optimizer: Literal["muon", "adamw"] = Field("muon", description="muon: Muon on hidden matrices, AdamW on the rest")
    learning_rate: float = Field(4e-4, gt=0, description="learning rate of AdamW at its peak")
    muon_learning_rate: float = Field(0.02, gt=0, description="learning rate of Muon at its peak")
    schedule: Literal["cosine", "linear", "constant"] = Field("cosine", description="how it falls after the warm-up")
    warmup_fraction: Fraction = Field(0.05, description="share of the steps with a rising rate")
    min_lr_fraction: Fraction = Field(0.1, description="rate at the end, as a share of the peak")
    weight_decay: float = Field(0.1, ge=0, description="weight decay of AdamW, on matrices only")
    betas: tuple[Beta, Beta] = Field((0.9, 0.95), description="decay of the two averages of AdamW")
    clip: float = Field(1.0, gt=0, description="gradients are clipped to this norm")
    loss: LossName | Mixture = Field(
        "kl",
        description="kl: forward KL; tv: total variation; lk: their hybrid per position; lk_alpha: -log acceptance; ce: the tokens "
        "themselves; or a mixture such as {kl = 0.9, ce = 0.1}",
    )
    weighting: Literal["token", "sequence"] = Field(
        "token", description="what counts alike in the loss: every row, or every sample"
    )
    step_decay: float = Field(
        0.8, gt=0, le=1, description="weight of TTT step i is step_decay**i; official 0.8, speculators 1.0"
    )
    mask: Literal["exact", "label"] = Field(
        "exact", description="exact: rows inference can meet; label: every row whose label is supervised (speculators)"
    )
    freeze_lm_head: bool = Field(False, description="keep the draft head as it starts")
    noise: float = Field(0.0, ge=0, description="noise on the aux states, as a share of each state's own rms")
    ema: Beta = Field(0.0, description="decay of an average of the weights, which is then what is validated and kept")
    dtype: Literal["float32", "bfloat16"] = Field(
        "float32", description="type of the products; weights, their gradients and the loss stay float32"
    )
    micro_tokens: Positive | None = Field(
        None, description="tokens of one forward pass; a step gathers gradients over several, with the same result"
    )
    recompute: bool = Field(False, description="compute the MLPs anew in the backward pass: less memory, more time")
    compile: bool = Field(False, description="compile layers and loss with torch.compile")
    attention_backend: Literal["auto", "dense", "flex"] = Field(
        "auto",
        description="auto: a flash kernel, merged with the draft's own chain; dense: written out; flex: FlexAttention, on a GPU",
    )
    parallel: Literal["ddp", "fsdp"] = Field(
        "ddp", description="under torchrun: replicate the draft (ddp), or shard its weights and optimiser state (fsdp)"
    )
    trackers: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = Field(
        ("tensorboard",),
        description="where curves are sent beside the events file; in the run directory, or as logged in",
    )
    validate_every: Positive = Field(50, description="steps between validations; the best by acceptance length is kept")
    checkpoint_every: Positive = Field(50, description="steps between checkpoints")
    keep_checkpoints: Positive = Field(2, description="newest checkpoints kept while training")
    seed: Seed = Field(0, description="seed of the first weights and the data order")


class Evaluate(Section):
    """Measuring the draft by decoding with it."""

    prompts: tuple[str, ...] = Field(
        ("mt_bench", "humaneval"), min_length=1, description="held-out prompt sets: shipped names or files"
    )
    max_prompts: Positive = Field(40, description="at most this many prompts of each set")
    max_new_tokens: Positive = Field(128, description="tokens decoded for each prompt")
    draft_tokens: Positive = Field(3, description="K: tokens drafted before each verify step")
    temperatures: tuple[Temperature, ...] = Field(
        (0.0,), min_length=1, description="each is measured; 0 is greedy, with the lossless check"
    )
    engine: Literal["transformers", "vllm"] = Field(
        "transformers", description="`vllm`: also serve the draft in vLLM and compare with the reference decoder"
    )
    baseline: bool = Field(True, description="also measure an untrained draft of the same shape")
    seed: Seed = Field(0, description="seed of sampling and of the bootstrap")


class Export(Section):
    """Folders that serving engines load."""

    formats: tuple[Literal["vllm", "speculators"], ...] = Field(
        ("vllm", "speculators"), min_length=1, description="formats to write, one folder each"
    )
    embed_tokens: bool = Field(True, description="write the target's embedding into the export, byte for byte")


class Run(Section):
    """One whole run: what `run.toml` says, defaults filled in."""

    directory: str = Field(
        "",
        description="run directory; `runs/NAME` beside NAME.toml when absent; paths in a TOML file are relative to it",
    )
    target: Target
    data: Data
    regenerate: Regenerate = Regenerate.model_validate({})
    vocab: Vocab = Vocab.model_validate({})
    capture: Capture = Capture.model_validate({})
    draft: Draft = Draft.model_validate({})
    train: Train = Train.model_validate({})
    evaluate: Evaluate = Evaluate.model_validate({})
    export: Export = Export.model_validate({})

    @model_validator(mode="after")
    def _directory_can_be(self) -> Run:
        if "\0" in self.directory:
            raise ValueError(f"directory = {_short(self.directory)} holds a null character, which no path can")
        return self

    @model_validator(mode="after")
    def _lengths_fit(self) -> Run:
        if self.data.max_prompt_tokens and self.data.max_prompt_tokens >= self.data.max_length:
            raise ValueError(
                f"data.max_prompt_tokens = {self.data.max_prompt_tokens} must be below data.max_length = "
                f"{self.data.max_length}, or no answer fits"
            )
        return self

    @model_validator(mode="after")
    def _evaluation_measures(self) -> Run:
        if self.data.answers == "regenerate" and self.regenerate.max_new_tokens < 2:
            raise ValueError(
                "regenerate.max_new_tokens = 1 leaves nothing to learn: a draft begins at the second token"
            )
        if self.evaluate.max_new_tokens < 2:
            what = "leaves nothing to draft: the first token comes from the prefill; set 2 or more"
            raise ValueError(f"evaluate.max_new_tokens = 1 {what}")
        if len(set(self.evaluate.temperatures)) < len(self.evaluate.temperatures):
            raise ValueError(f"evaluate.temperatures = {list(self.evaluate.temperatures)} holds one twice")
        return self

    @model_validator(mode="after")
    def _steps_fit(self) -> Run:
        if self.draft.ttt_steps >= self.data.max_length:
            raise ValueError(
                f"draft.ttt_steps = {self.draft.ttt_steps} must be below data.max_length = {self.data.max_length}"
            )
        return self

    @model_validator(mode="after")
    def _temperatures_can_be_measured(self) -> Run:
        told = f"evaluate.temperatures = {list(self.evaluate.temperatures)}"
        if self.target.engine == "vllm" and any(self.evaluate.temperatures):
            raise ValueError(f"{told}: drafts of a target that runs in vLLM are measured greedily; set [0.0]")
        if self.evaluate.engine == "vllm" and 0 not in self.evaluate.temperatures:
            raise ValueError(f"{told} has no 0.0, and evaluate.engine = 'vllm' compares greedy answers")
        return self

    @model_validator(mode="after")
    def _export_can_load(self) -> Run:
        if "speculators" in self.export.formats and not self.export.embed_tokens:
            raise ValueError("export.embed_tokens must be true for the speculators format: it loads garbage without it")
        if "speculators" in self.export.formats and self.draft.attention == "mla":
            raise ValueError(
                "draft.attention = 'mla' cannot be exported in the speculators format: set export.formats = ['vllm']"
            )
        return self


# The bound that a value breaks, by pydantic's name of the fault.
_BOUNDS = {
    "greater_than": "above {gt}",
    "greater_than_equal": "at least {ge}",
    "less_than": "below {lt}",
    "less_than_equal": "at most {le}",
    "finite_number": "finite",
    "too_short": "at least {min_length}",
}
_SHOWN = 60  # characters of a value in a message
_LISTING = "headstart config lists every setting"
_TOO_DEEP = "holds lists or tables nested too deeply to be read"


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
        raw = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}", do="headstart config shows every setting") from None
    except ValueError as error:  # no TOML, no UTF-8, or a number of thousands of digits
        raise UserError(f"{path} is not TOML: {error}") from None
    except RecursionError:
        raise UserError(f"{path} {_TOO_DEEP}", do=_LISTING) from None
    raw.setdefault("directory", f"runs/{path.stem}")
    _anchor(raw, path.absolute().parent)
    return build(raw, overrides)


def _anchor(raw: dict[str, Any], base: Path) -> None:
    """Paths in a TOML file are relative to it, wherever the command is given; names that are no files there stay names."""
    if isinstance(raw["directory"], str):
        raw["directory"] = str(base / files.home(raw["directory"]))
    for section, key in (("data", "sources"), ("data", "decontaminate"), ("evaluate", "prompts")):
        values = raw.get(section, {})
        if isinstance(values, dict) and isinstance(values.get(key), list):
            values[key] = [_found(base, name) for name in values[key]]
    target = raw.get("target")
    if isinstance(target, dict) and isinstance(target.get("model"), str) and (base / target["model"]).is_dir():
        target["model"] = str(base / target["model"])


def _found(base: Path, name: Any) -> Any:
    inside = isinstance(name, str) and not files.home(name).is_absolute() and files.matching(str(base / name))
    return str(base / name) if inside else name


def build(raw: dict[str, Any], overrides: Sequence[str] = ()) -> Run:
    """A `Run` from plain values; `raw` is changed by the overrides. Raises UserError as `load` does.

    Values are read strictly, as JSON: `"2"` and `true` are no integers, and a TOML date is its text.
    """
    try:
        for override in overrides:
            _apply(raw, override)
        return Run.model_validate_json(json.dumps(raw, default=str), strict=True)
    except ValidationError as error:
        raise _explain(error) from None
    except RecursionError:
        raise UserError(f"a setting {_TOO_DEEP}", do=_LISTING) from None


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
    """As a person reads it: `list of str`, `int or absent`, `"keep" or "drop"`. Bounds are told by the description."""
    kind, inner = get_origin(annotation), get_args(annotation)
    if kind is Annotated:
        return _type_name(inner[0])
    if kind is Literal:
        return " or ".join(f'"{value}"' for value in inner)
    if kind in (Union, UnionType):
        return " or ".join("absent" if part is type(None) else _type_name(part) for part in inner)
    if kind is tuple:
        return f"list of {_type_name(inner[0])}" if Ellipsis in inner else f"{len(inner)} {_type_name(inner[0])}s"
    if kind is dict:
        return "table" if inner[1] is Any else f"table of {_type_name(inner[1])}"
    return "true or false" if annotation is bool else annotation.__name__


def _toml(value: Any) -> str:
    if value is None:
        return "absent"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (tuple, list)):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {_toml(item)}" for key, item in value.items()) + "}"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else str(value)


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
    except ValueError:
        return text


def _explain(error: ValidationError) -> UserError:
    """The first fault, but an unknown key before all others: misspelt, it is also why another one is missing."""
    faults = error.errors()
    first = next((fault for fault in faults if fault["type"] == "extra_forbidden"), faults[0])
    if isinstance(first["input"], dict) and first["type"] == "literal_error":  # a word or a table: a table was given
        first = faults[min(1, len(faults) - 1)]
    name = _name(first["loc"])
    if first["type"] == "extra_forbidden":
        near = _nearest(name)
        return UserError(f"unknown setting {name}", do=f"did you mean {near}?" if near else _LISTING)
    if first["type"] == "missing" and isinstance(first["loc"][-1], str):
        return UserError(f"the setting {name} is missing", do=_LISTING)
    if first["type"] == "missing":  # in a list that is too short
        name = _name(first["loc"][:-1])
    if first["type"] == "value_error":  # settings that do not go together: it names them
        return UserError(first["msg"].removeprefix("Value error, "), do=_LISTING)
    if not first["loc"]:  # no JSON to pydantic
        deep = "recursion" in first["msg"]
        return UserError(
            f"a setting {_TOO_DEEP}" if deep else f"the settings cannot be read: {first['msg']}", do=_LISTING
        )
    value = "" if first["loc"][-1] == "[key]" else f" = {_short(first['input'])}"
    return UserError(f"{name}{value} is not allowed", looked_for=_allowed(first), do=_LISTING)


def _name(place: Sequence[str | int]) -> str:
    """`train.betas[1]`; what pydantic says of types between the keys is left out."""
    keys = (part for part in place if part != "[key]" and "[" not in str(part))
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in keys).removeprefix(".")


def _short(value: Any) -> str:
    text = _toml(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _allowed(fault: Mapping[str, Any]) -> str:
    """The type of the setting as `headstart config` tells it, and the bound that was broken."""
    place = fault["loc"]
    documented = next((one.type for one in settings() if one.name in (place[0], ".".join(map(str, place[:2])))), None)
    if documented is None:
        return f"a section, [{place[0]}], with settings in it"
    bound = _BOUNDS.get(fault["type"])
    return f"{documented}, {bound.format(**fault.get('ctx', {}))}" if bound else documented


def _nearest(name: str) -> str | None:
    """The known setting that was probably meant: so called in another section, spelt alike, or a section."""
    section, _, key = name.rpartition(".")
    known = {setting.name: setting.name.rpartition(".")[2] for setting in settings()}
    here = {full: last for full, last in known.items() if full.rpartition(".")[0] == section}
    if not section:
        here = {**known, **{top: top for top in Run.model_fields}}
    if elsewhere := [full for full, last in known.items() if last == key]:
        return " or ".join(elsewhere)
    near = difflib.get_close_matches(key, here.values(), n=1)
    return next((full for full, last in here.items() if last in near), None)
