"""Loading a target's weights with Transformers: the right class, whole, quiet, and no foreign code unasked."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMultimodalLM,
    PreTrainedConfig,
)
from transformers import __version__ as version
from transformers.models.auto import modeling_auto
from transformers.utils import logging

from headstart.config import Target
from headstart.errors import UserError
from headstart.target import families
from headstart.target.source import not_loaded

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_AUTO = (
    (modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM),
    (modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, AutoModelForImageTextToText),
    (modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING, AutoModelForMultimodalLM),
)


def pick_device(name: str) -> torch.device:
    """`auto` is the first GPU where there is one, else the CPU. Raises UserError for a device that is not here."""
    if name == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    device = parse_device(name)
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise _no_device(name, error) from None
    return device


def parse_device(name: str) -> torch.device:
    """The device of that name, be it here or not. Raises UserError for what names none."""
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise _no_device(name, error) from None


def _no_device(name: str, error: Exception) -> UserError:
    what = f"target.device = {name!r} cannot be used: {str(error).splitlines()[0]}"
    return UserError(what, do="set it to auto, cpu, cuda, cuda:1, ...; auto takes a GPU where there is one")


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """`auto` is float32 on the CPU, where half precision is slow and coarse, and bfloat16 elsewhere."""
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    return getattr(torch, name)


def load_model(folder: Path, target: Target, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """The model in `folder`, ready to run, every weight of it read from the folder.

    Raises:
        UserError: it needs code of its own and may not run it, no class fits, a weight is missing, or loading fails.
    """
    with _quiet():
        config = _from_folder(AutoConfig, folder, target)
        _check_config(config, target)
        asked = {"dtype": dtype, "output_loading_info": True, **_attention(config)}
        model, report = _from_folder(_auto_class(config), folder, target, **asked)
    _check_whole(target, report)
    return model.to(device).eval().requires_grad_(False)


def _from_folder(auto: Any, folder: Path, target: Target, **asked: Any) -> Any:
    """`from_pretrained`, whose own code, and the model's, raise whatever a wrong value in a file makes them stumble over."""
    try:
        return auto.from_pretrained(folder, **asked, **_trust(target))
    except MemoryError:
        raise
    except Exception as error:
        raise not_loaded(
            folder,
            f"{target.model} (by Transformers {version})",
            error,
            looked_for=f"config.json and weights in {folder} that it knows",
            do="mend or download the folder again; a newer model needs a newer Transformers, or target.engine = 'vllm'",
        ) from error


def _trust(target: Target) -> dict[str, Any]:
    """False, not absent: Transformers would ask on the terminal."""
    return {"trust_remote_code": target.trust_remote_code, "local_files_only": True}


def _auto_class(config: PreTrainedConfig) -> Any:
    for mapping, auto in _AUTO:
        if type(config) in mapping or auto.__name__ in (getattr(config, "auto_map", None) or {}):
            return auto
    raise UserError(
        f"Transformers has no language model for {config.model_type} ({type(config).__name__})",
        looked_for=", ".join(auto.__name__ for _, auto in _AUTO),
    )


def _check_config(config: PreTrainedConfig, target: Target) -> None:
    if getattr(config, "is_encoder_decoder", False):
        raise UserError(f"{target.model} is an encoder-decoder; drafts are trained for decoder-only targets")
    text = config.get_text_config(decoder=True)
    if not isinstance(text, PreTrainedConfig):  # Transformers hands on whatever stands under `text_config` and its like
        raise UserError(f"config.json of {target.model} has {text!r} for its text model", looked_for="an object")


def _attention(config: PreTrainedConfig) -> dict[str, str]:
    """Fused attention leaves a soft cap inside attention out without a word (Gemma-2): eager computes it."""
    value, _ = families.attention_softcap(config.get_text_config(decoder=True).to_dict())
    return {"attn_implementation": "eager"} if value is not None else {}


def _check_whole(target: Target, report: dict[str, Any]) -> None:
    """Transformers fills a missing weight with random numbers and goes on; the result would look like a model."""
    missing = sorted(report["missing_keys"])
    if missing:
        shown = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        raise UserError(f"the folder of {target.model} lacks {len(missing)} weights: {shown}", do="download it again")


@contextmanager
def _quiet() -> Iterator[None]:
    """No progress bars or advice while loading; errors are raised all the same."""
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
