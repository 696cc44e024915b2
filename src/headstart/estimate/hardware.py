"""The machine that a run is for: measured here, or given as figures by `--hardware`."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, fields

from headstart.errors import UserError
from headstart.estimate.target import TargetCost

# What is assumed where a figure is not given. Rough, and said to be.
PREFILL_SHARE = 0.3  # of the peak FLOP/s of the GPUs that hold the target; the best published prefill reaches 0.44
TRAIN_SHARE = 0.2  # of one GPU's peak FLOP/s
BANDWIDTH_SHARE = 0.4  # of the memory bandwidth, while weights are read for a step
DECODE_SHARE = 0.1  # tokens/s of a full batch, of the prefill rate, where no bandwidth is known
SINGLE_SHARE = 0.002  # tokens/s of one sequence alone, of the prefill rate, where no bandwidth is known
LOADING = 2e9  # bytes/s of weights from a local disk into place

# Memory, bytes/s of it and dense bfloat16 FLOP/s of one GPU, as in NVIDIA's data sheets.
GPUS: dict[str, tuple[float, float, float]] = {
    "a100": (80e9, 2.0e12, 312e12),
    "l40s": (48e9, 0.864e12, 362e12),
    "4090": (24e9, 1.008e12, 165e12),
    "h100": (80e9, 3.35e12, 989e12),
    "h200": (141e9, 4.8e12, 989e12),
    "b200": (180e9, 7.7e12, 2250e12),
}
EXAMPLE = "8xH200, or gpus=8,memory=141GB,prefill=40k"
_PEAKS = ("flops", "bandwidth")  # of one GPU; the rates are derived from them
_UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "p": 1e15}
_NUMBER = re.compile(r"([0-9.]+(?:e[0-9]+)?)\s*([kmgtp]?)b?", re.IGNORECASE)
_NAMED = re.compile(r"(?:([0-9]+)\s*x\s*)?([a-z0-9]+)", re.IGNORECASE)
_SMALLEST, _LARGEST = 1e-6, 1e21  # of any figure; a mistyped unit is outside
_MOST_GPUS = 100_000


@dataclass(frozen=True)
class Hardware:
    """gpus: 0 on a CPU. memory: bytes of one GPU, or of the machine without. disk: bytes free where the run will be, None
    where that is not known.

    prefill, decode, single: the target's tokens/s through the engine: of long inputs, of a full batch of answers (their prompts
    included), of one answer alone.
    train: FLOP/s that training reaches on one device. verify: seconds of a step over K+1 tokens, in plain steps. draft: of a
    draft's step, in plain steps. loading: bytes/s of weights. assumed: names of the figures that were derived.
    """

    gpus: int
    memory: float
    disk: float | None
    prefill: float
    decode: float
    single: float
    train: float
    verify: float = 1.1
    draft: float = 0.08
    loading: float = LOADING
    assumed: tuple[str, ...] = ()


@dataclass(frozen=True)
class Load:
    """What the machine is for: the target, the GPUs that share it (target.tensor_parallel), sequences decoded together."""

    target: TargetCost
    ranks: int = 1
    batch: int = 64


def parse(text: str, load: Load) -> Hardware:
    """The machine that `figures` describes."""
    given = figures(text)
    rates = _derived(given, load)
    told = {name: value for name, value in given.items() if name not in _PEAKS}
    assumed = tuple(sorted(rates.keys() - told.keys()))
    return Hardware(**{"disk": None, **rates, **told, "gpus": int(told["gpus"]), "assumed": assumed})


def figures(text: str) -> dict[str, float]:
    """Read `8xH200`, `gpus=8,memory=141GB,prefill=40k`, or a name with figures after it that count instead of its own.

    Keys are those of `Hardware`, and `flops` and `bandwidth` of one GPU.

    Raises:
        UserError: an unknown key or GPU, no number, or nothing that the prefill rate follows from.
    """
    given: dict[str, float] = {}
    for part in (part.strip() for part in text.split(",") if part.strip()):
        said = _pair(part) if "=" in part else _gpu(part)
        if "gpus" in said and "gpus" in given:
            raise UserError(f"--hardware: {part!r} is a second machine", do="give one")
        given |= said
    known = [field.name for field in fields(Hardware) if field.name != "assumed"] + list(_PEAKS)
    if unknown := given.keys() - set(known):
        raise UserError(f"--hardware: {', '.join(sorted(unknown))} is no figure", looked_for=", ".join(known))
    if given.get("gpus", 0) > _MOST_GPUS:
        raise UserError(f"--hardware: {given['gpus']:.0f} GPUs cannot be", looked_for=f"at most {_MOST_GPUS}")
    if missing := [name for name in ("gpus", "memory") if name not in given]:
        raise UserError(f"--hardware: {', '.join(missing)} is missing", do=f"e.g. --hardware {EXAMPLE}")
    if not given.keys() & {"prefill", "flops"}:
        raise UserError("--hardware: prefill is missing, or flops, which it follows from", do=f"e.g. {EXAMPLE}")
    return given


def _derived(given: dict[str, float], load: Load) -> dict[str, float]:
    """The rates that follow from the figures that are given."""
    ranks, peak = max(min(load.ranks, int(given["gpus"])), 1), given.get("flops")
    prefill = given.get("prefill") or PREFILL_SHARE * ranks * (peak or 0.0) / load.target.flops
    train = TRAIN_SHARE * peak if peak else prefill * load.target.flops / ranks
    if "bandwidth" not in given:
        return {"prefill": prefill, "train": train, "decode": DECODE_SHARE * prefill, "single": SINGLE_SHARE * prefill}
    reading = BANDWIDTH_SHARE * ranks * given["bandwidth"]
    steps = load.batch * reading / load.target.read(load.batch)
    decode = 1 / (1 / min(steps, prefill) + 1 / prefill)  # a prompt token is read for every answer token, about
    return {"prefill": prefill, "train": train, "decode": decode, "single": reading / load.target.read(1)}


def _gpu(part: str) -> dict[str, float]:
    found = _NAMED.fullmatch(part)
    if found is None or found[2].lower() not in GPUS:
        raise UserError(f"--hardware: {part!r} is no figure and no GPU that is known", looked_for=", ".join(GPUS))
    if found[1] and not float(found[1]):
        raise UserError(f"--hardware: {part!r} is no machine", looked_for=f"one GPU at least, as in {EXAMPLE}")
    memory, bandwidth, flops = GPUS[found[2].lower()]
    return {"gpus": float(found[1] or 1), "memory": memory, "bandwidth": bandwidth, "flops": flops}


def _pair(part: str) -> dict[str, float]:
    name, _, text = part.partition("=")
    found = _NUMBER.fullmatch(text.strip())
    if found is None:
        raise UserError(f"--hardware: {part!r} is no figure", looked_for=EXAMPLE)
    try:
        number = float(found[1])
    except ValueError:
        raise UserError(f"--hardware: {text.strip()!r} is no number", looked_for=EXAMPLE) from None
    value = number * _UNITS[found[2].lower()]
    if not math.isfinite(value) or (name.strip() == "gpus" and value % 1):
        raise UserError(f"--hardware: {part!r} cannot be", looked_for="a finite number, and of GPUs a whole one")
    if value <= 0 and name.strip() != "gpus":
        raise UserError(f"--hardware: {name.strip()} must be above 0")
    if value and not _SMALLEST <= value <= _LARGEST:
        raise UserError(f"--hardware: {part!r} cannot be", looked_for=f"{_SMALLEST:g} to {_LARGEST:g}")
    return {name.strip(): value}
