"""Drafts on disk in our own format: `draft.json` (shape and facts) and one safetensors file of weights."""

from __future__ import annotations

import json
import reprlib
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from headstart import files
from headstart.drafts.eagle3 import Eagle3
from headstart.drafts.shape import DraftShape
from headstart.errors import UserError
from headstart.target.beside import read_object
from headstart.target.head import TargetHead

SHAPE = "draft.json"
TRAINED = "draft.safetensors"
UNTRAINED = "untrained.safetensors"
_VOCABULARY = "draft_to_target"
_SHAPE = TypeAdapter(DraftShape)


def save_weights(path: Path, draft: Eagle3) -> None:
    """Every weight but the target's embedding, and the vocabulary."""
    save_tensors(path, weights_of(draft))


def weights_of(draft: Eagle3) -> dict[str, Tensor]:
    """What `save_weights` saves; sharded tensors as they are."""
    return {**draft.state_dict(), _VOCABULARY: draft.draft_to_target}


def save_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    with files.replacing(path) as temporary:
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, temporary)


def save_shape(folder: Path, shape: DraftShape, facts: dict[str, Any]) -> None:
    files.write_json(folder / SHAPE, {"shape": asdict(shape), **facts})


def load_weights(path: Path, draft: Eagle3) -> None:
    """Fill `draft` with saved weights, all of them and no others.

    Raises:
        UserError: the file is missing, damaged, or of a draft of another shape.
    """
    try:
        fill(draft, load_tensors(path))
    except (KeyError, RuntimeError) as error:
        what = f"{path} does not fit the draft: {str(error).splitlines()[0]}"
        raise UserError(what, do="train again") from None


def load_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a weights file. Raises UserError when it is missing or damaged."""
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path} cannot be read: {str(error).splitlines()[0]}", do="train again") from None


def fill(draft: Eagle3, tensors: dict[str, Tensor]) -> None:
    """Put weights and vocabulary into `draft`. Raises KeyError or RuntimeError when they are not all there."""
    weights = dict(tensors)
    vocabulary = weights.pop(_VOCABULARY)
    draft.load_state_dict(weights)
    draft.draft_to_target = vocabulary.to(draft.embed_tokens.device)


def read_shape(folder: Path) -> tuple[DraftShape, dict[str, Any]]:
    """The shape and the facts stored beside it. Raises UserError when they are not as `save_shape` wrote them."""
    try:
        raw = read_object(folder / SHAPE)
        shape = _SHAPE.validate_json(json.dumps(raw.pop("shape", None)))
    except UserError as error:
        raise UserError(error.what, do="train again") from None
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, ("shape", *first["loc"])))
        what = f"the draft in {folder} cannot be read: {SHAPE} has {place} = {reprlib.repr(first['input'])}: {first['msg']}"
        raise UserError(what, do="train again") from None
    return shape, raw


def load_draft(folder: Path, head: TargetHead, *, untrained: bool = False) -> Eagle3:
    """The draft of a finished `train` stage, on the CPU, ready to decode (no gradients).

    head: the target's, whose embedding the draft reads. untrained: the same draft as it was before the first step.
    """
    shape, _ = read_shape(folder)
    draft = Eagle3(shape, head.embed)
    load_weights(folder / (UNTRAINED if untrained else TRAINED), draft)
    return draft.eval().requires_grad_(False)
