"""Drafts as the safetensors file that vLLM and speculators share, but for the first layer's name.

The vocabulary goes out as offsets, int64 [Vd] (target id = draft id + offset), and as a bool mask [V]; a full one not
at all, since vLLM from 0.30 has no place for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from headstart.drafts.eagle3 import Eagle3
from headstart.drafts.shape import DraftShape
from headstart.errors import UserError

TENSORS = "model.safetensors"
OFFSETS, KEPT, EMBED = "d2t", "t2d", "embed_tokens.weight"
_WEIGHTS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_IDS = (torch.int32, torch.int64)
_MASKS = (torch.bool, torch.uint8, *_IDS)


def outward(draft: Eagle3, first_layer: str, *, embed: bool) -> dict[str, Tensor]:
    """The draft's tensors under foreign names, in the types they have; the target's embedding only when asked for.

    first_layer: what stands for `layers.0`.
    """
    shape = draft.shape
    tensors = {foreign_name(name, first_layer): tensor for name, tensor in draft.state_dict().items()}
    if shape.draft_vocab_size != shape.target_vocab_size:
        kept = draft.draft_to_target.cpu()
        tensors[OFFSETS] = kept - torch.arange(len(kept))
        tensors[KEPT] = torch.zeros(shape.target_vocab_size, dtype=torch.bool).index_fill_(0, kept, True)
    if embed:
        tensors[EMBED] = draft.embed_tokens
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}


def write(folder: Path, tensors: dict[str, Tensor]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / TENSORS, metadata={"format": "pt"})


def names_in(folder: Path) -> list[str]:
    """Names of the tensors in a folder, without reading any."""
    try:
        with safe_open(folder / TENSORS, framework="pt") as file:
            return list(file.keys())
    except (OSError, SafetensorError) as error:
        raise UserError(f"{folder / TENSORS} cannot be read: {error}") from None


def inward(folder: Path, shape: DraftShape, first_layer: str) -> dict[str, Tensor]:
    """The tensors of a folder under our names: weights, `draft_to_target`, and `embed_tokens` when it is there.

    Raises:
        UserError: a tensor is missing, unknown or not as the config has it, or the vocabulary is impossible.
    """
    tensors = _load(folder / TENSORS)
    if shape.num_layers > len(tensors):  # before so many are built
        raise UserError(
            f"{folder / TENSORS} has {len(tensors)} tensors, too few for the {shape.num_layers} layers of its config.json"
        )
    found = {"draft_to_target": _vocabulary(tensors, shape, folder)}
    for name, tensor in tensors.items():
        _check_weight(name, tensor, folder)
    embed = tensors.pop(EMBED, None)
    if embed is not None:
        found["embed_tokens"] = embed
    wanted = dict(_wanted(shape))
    names = {foreign_name(name, first_layer): name for name in wanted}
    _same_names(set(tensors), set(names), folder)
    found |= {names[name]: tensor for name, tensor in tensors.items()}
    wanted["embed_tokens"] = torch.Size((shape.target_vocab_size, shape.target_hidden_size))
    for name, tensor in found.items():
        if tensor.shape != wanted.get(name, tensor.shape):
            raise UserError(
                f"{name} in {folder / TENSORS} is {list(tensor.shape)}",
                looked_for=f"{list(wanted[name])}, by its config.json",
            )
    return found


def rebuild(shape: DraftShape, tensors: Mapping[str, Tensor], embed: Tensor) -> Eagle3:
    """A draft from what a format's `read` gave; `embed` is the target's, used when the folder has none."""
    weights = dict(tensors)
    draft = Eagle3(shape, weights.pop("embed_tokens", embed))
    vocabulary = weights.pop("draft_to_target")
    draft.load_state_dict(weights, assign=True)
    draft.draft_to_target = vocabulary
    return draft.eval().requires_grad_(False)


def foreign_name(name: str, first_layer: str) -> str:
    return name.replace("layers.0.", f"{first_layer}.").replace("fc_norms.", "fc_norm.")


def _load(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None


def _wanted(shape: DraftShape) -> Iterator[tuple[str, torch.Size]]:
    with torch.device("meta"):
        draft = Eagle3(shape, torch.empty(1, shape.target_hidden_size))
    yield from ((name, tensor.shape) for name, tensor in draft.state_dict().items())


def _vocabulary(tensors: dict[str, Tensor], shape: DraftShape, folder: Path) -> Tensor:
    """Absolute target ids, int64 [Vd], strictly rising; takes both maps out of `tensors`."""
    offsets, mask = tensors.pop(OFFSETS, None), tensors.pop(KEPT, None)
    count, total = shape.draft_vocab_size, shape.target_vocab_size
    if offsets is None and count != total:
        raise UserError(
            f"{folder} has {count} of {total} tokens and no map of them", looked_for=f"{OFFSETS} in {TENSORS}"
        )
    kept = torch.arange(count)
    if offsets is not None:
        _check_map(OFFSETS, offsets, count, _IDS, folder)
        kept = kept + offsets.to(torch.int64)
    if not (bool((kept.diff() > 0).all()) and int(kept.min()) >= 0 and int(kept.max()) < total):
        raise UserError(
            f"{OFFSETS} in {folder / TENSORS} is no vocabulary", looked_for=f"strictly rising ids from 0 to {total - 1}"
        )
    if mask is not None:
        _check_map(KEPT, mask, total, _MASKS, folder)
        if not torch.equal(mask.nonzero()[:, 0], kept):
            raise UserError(f"{KEPT} and {OFFSETS} in {folder / TENSORS} name different tokens")
    return kept


def _check_map(name: str, found: Tensor, count: int, types: tuple[torch.dtype, ...], folder: Path) -> None:
    if found.shape != (count,):
        raise UserError(
            f"{name} in {folder / TENSORS} has {list(found.shape)} entries", looked_for=f"[{count}], by its config.json"
        )
    _check_type(name, found, types, folder)


def _check_weight(name: str, found: Tensor, folder: Path) -> None:
    _check_type(name, found, _WEIGHTS, folder)
    if not bool(found.isfinite().all()):
        raise UserError(f"{name} in {folder / TENSORS} has values that are not finite", looked_for="numbers alone")


def _check_type(name: str, found: Tensor, types: tuple[torch.dtype, ...], folder: Path) -> None:
    if found.dtype not in types:
        known = ", ".join(str(kind).removeprefix("torch.") for kind in types)
        raise UserError(
            f"{name} in {folder / TENSORS} is {str(found.dtype).removeprefix('torch.')}", looked_for=f"one of {known}"
        )


def _same_names(found: set[str], wanted: set[str], folder: Path) -> None:
    for what, names in (("lacks", wanted - found), ("has unknown tensors", found - wanted)):
        if names:
            raise UserError(
                f"{folder / TENSORS} {what}: {', '.join(sorted(names)[:5])}",
                looked_for="one tensor for each of the draft's",
            )
