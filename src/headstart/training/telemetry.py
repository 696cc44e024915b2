"""What a training tells while it runs: events, TensorBoard and other trackers, its rate against the machine's limit."""

from __future__ import annotations

import importlib
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import torch

from headstart import files
from headstart.config import Train
from headstart.drafts.rows import RowPlan
from headstart.drafts.shape import DraftShape
from headstart.errors import UserError, install
from headstart.events import Events
from headstart.training.flops import step_flops

# Dense half-precision FLOP/s of one device, by a part of its name (vendors' data sheets, without sparsity).
PEAKS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "B200": 2250e12, "L40S": 362e12, "4090": 165e12}


class Tracker(Protocol):
    """Takes numbers by name at a step."""

    def log(self, values: dict[str, float], step: int) -> None: ...

    def close(self) -> None: ...


class _TensorBoard:
    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415 (slow to import)

        self.writer = SummaryWriter(str(folder / "tensorboard"))

    def log(self, values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        self.writer.close()


class _Hosted:
    """W&B, or trackio, which has the same three calls. run_id: a continued training goes on in the same run."""

    def __init__(self, name: str, folder: Path, run_id: str) -> None:
        self.library: Any = importlib.import_module(name)
        known = {"id": run_id, "dir": str(folder)} if name == "wandb" else {}  # trackio tells runs apart by name
        self.library.init(project="headstart", name=f"{folder.resolve().name}-{run_id}", resume="allow", **known)

    def log(self, values: dict[str, float], step: int) -> None:
        self.library.log(values, step=step)

    def close(self) -> None:
        self.library.finish()


def check_trackers(names: Sequence[str]) -> None:
    """Raises UserError for one whose library is not here."""
    for name in names:
        if find_spec(name) is None:
            raise UserError(f"train.trackers names {name}, which is not installed", do=install(name))


def _run_id(scratch: Path) -> str:
    """Kept beside the checkpoints, and gone with them."""
    kept = scratch / "run-id"
    if not kept.exists():
        with files.replacing(kept) as temporary:
            temporary.write_text(uuid.uuid4().hex[:8], encoding="utf-8")
    return kept.read_text(encoding="utf-8")


@dataclass
class Telemetry:
    """A context manager around a training. logs: where trackers write; None: nowhere. scratch: the training's own folder, which a
    continued one finds again. peak: FLOP/s that one process could do at best; None: unknown."""

    events: Events
    settings: Train
    shape: DraftShape
    logs: Path | None
    scratch: Path
    peak: float | None
    trackers: list[Tracker] = field(default_factory=list)

    def __enter__(self) -> Telemetry:
        if self.logs is not None:
            self.trackers = [self._open(name, self.logs) for name in self.settings.trackers]
        return self

    def _open(self, name: str, logs: Path) -> Tracker:
        return _TensorBoard(logs) if name == "tensorboard" else _Hosted(name, logs, _run_id(self.scratch))

    def __exit__(self, *_: object) -> None:
        for tracker in self.trackers:
            tracker.close()

    def step(self, step: int, tokens: int, seconds: float, waited: float, plans: Sequence[RowPlan]) -> None:
        """One optimiser step of `tokens` tokens over all processes, `waited` seconds of it for data; `plans` are this process's."""
        frozen = self.settings.freeze_lm_head
        rate = sum(step_flops(self.shape, plan, frozen_head=frozen) for plan in plans) / seconds
        told = {"tokens_per_second": round(tokens / seconds, 1), "gflops": round(rate / 1e9, 1)}
        if self.peak:
            told["mfu"] = round(rate / self.peak, 4)
        self.events.emit(
            "train-step", step=step, tokens=tokens, seconds=round(seconds, 4), read=round(waited, 4), **told
        )
        self._log({f"speed/{name}": value for name, value in told.items()}, step)

    def curve(self, record: dict[str, Any]) -> None:
        """A record of the curves: per TTT step where it is a list."""
        values: dict[str, float] = {}
        for name, value in record.items():
            if isinstance(value, list):
                values |= {f"{record['kind']}/{name}_{index}": item for index, item in enumerate(value)}
            elif isinstance(value, (int, float)) and name != "step":
                values[f"{record['kind']}/{name}"] = value
        self._log(values, record["step"])

    def _log(self, values: dict[str, float], step: int) -> None:
        for tracker in self.trackers:
            tracker.log(values, step)


def peak_flops(device: str) -> float | None:
    """What a device could do at best: known for some GPUs, measured on a CPU (0.2 s of matrix products of its own threads)."""
    if device.startswith("cuda"):
        name = torch.cuda.get_device_name(device)
        return next((peak for part, peak in PEAKS.items() if part in name), None)
    return measured_gemm()


def measured_gemm(size: int = 1024, seconds: float = 0.2) -> float:
    """FLOP/s of float32 matrix products on this CPU, the best of those that fit into `seconds`."""
    a, b = torch.randn(size, size), torch.randn(size, size)
    out, best, until = torch.empty(size, size), 0.0, time.monotonic() + seconds
    while time.monotonic() < until or not best:
        began = time.perf_counter()
        torch.mm(a, b, out=out)
        best = max(best, 2 * size**3 / (time.perf_counter() - began))
    return best
