"""Which rows the unrolled training needs: response-only rows, packed documents, and the exact mask.

Row t of a document at TTT step i reads token x_{t+1+i}, and learns the target's distribution of x_{t+2+i}. A packed batch is a
row of documents side by side; a row counts only where its mask is live, and a row whose mask is dead at every later step is not
computed at all. Of the other positions only the step-0 keys and values are needed (`context`), and none after the last live row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

MaskKind = Literal["exact", "label"]


class Run(NamedTuple):
    """Neighbouring rows of one document: context rows [low, high), which see their document from `start` up to themselves; queries
    begin at `at`. reach: the rows that each sees at most, its own among them; None where that takes nothing away."""

    start: int
    low: int
    high: int
    at: int
    reach: int | None = None

    @property
    def pairs(self) -> int:
        """Queries times the keys that each sees."""
        first, rows = self.low - self.start + 1, self.high - self.low
        rising = rows if self.reach is None else min(max(self.reach - first, 0), rows)
        return rising * first + rising * (rising - 1) // 2 + (rows - rising) * (self.reach or 0)


@dataclass(frozen=True)
class StepRows:
    """The rows of one TTT step, R of them, ascending.

    rows: [R] indices into the context. parent: [R] indices into the rows of the step before. inputs: [R] indices of the packed
    tokens read. labels: [R] indices into the teacher rows. live: bool [R], False for rows that only feed later steps.
    """

    rows: Tensor
    parent: Tensor
    inputs: Tensor
    labels: Tensor
    live: Tensor
    runs: tuple[Run, ...]


@dataclass(frozen=True)
class RowPlan:
    """context: [C] packed token index of each context row; positions: [C] inside its document; document: [C] which one;
    teacher: [U] packed token index whose last hidden state gives a label; whole: the runs that cover every context row."""

    context: Tensor
    positions: Tensor
    document: Tensor
    teacher: Tensor
    whole: tuple[Run, ...]
    steps: tuple[StepRows, ...]

    def to(self, device: torch.device | str) -> RowPlan:
        steps = tuple(
            replace(step, **{name: getattr(step, name).to(device) for name in _TENSORS}) for step in self.steps
        )
        moved = {name: getattr(self, name).to(device) for name in ("context", "positions", "document", "teacher")}
        return replace(self, steps=steps, **moved)


def within(runs: Sequence[Run], reach: int, piece: int = 256) -> tuple[Run, ...]:
    """The same rows where each sees at most `reach`: runs are cut into pieces of so many rows, or of `piece` where that is more,
    each with the context it needs."""
    found, piece = [], max(reach, piece)
    for run in runs:
        if run.high - run.start <= reach:
            found.append(run)
            continue
        for low in range(run.low, run.high, piece):
            high, start = min(low + piece, run.high), max(run.start, low - reach + 1)
            found.append(Run(start, low, high, run.at + low - run.low, reach if high - start > reach else None))
    return tuple(found)


_TENSORS = ("rows", "parent", "inputs", "labels", "live")


def live_mask(supervised: np.ndarray, steps: int, kind: MaskKind = "exact") -> np.ndarray:
    """Where a row has a loss: bool [steps, tokens] for one document.

    exact: m_i(t) = prod_{j=1..i+2} l_{t+j}, the rows that inference can meet: x_{t+1} was generated, and all up to the label.
    label: m_i(t) = l_{t+2+i}, every row whose label was generated.
    """
    length = len(supervised)
    mask = np.zeros((steps, length), dtype=bool)
    for i in range(min(steps, max(length - 2, 0))):
        count = length - 2 - i
        mask[i, :count] = supervised[2 + i :]
        if kind == "exact":
            mask[i, :count] &= supervised[1 : 1 + count] if i == 0 else mask[i - 1, :count]
    return mask


def plan_rows(documents: Sequence[np.ndarray], steps: int, kind: MaskKind = "exact") -> RowPlan:
    """The plan for documents packed in this order; each is the bool array `supervised` [tokens] of one sample."""
    masks = [live_mask(supervised, steps, kind) for supervised in documents]
    needed = [np.logical_or.accumulate(mask[::-1])[::-1] for mask in masks]
    used = [int(need[0].nonzero()[0][-1]) + 1 if need[0].any() else 0 for need in needed]
    token_starts = np.cumsum([0, *(len(document) for document in documents)])
    context_starts = np.cumsum([0, *used])
    positions = np.concatenate([np.arange(count) for count in used]) if used else np.zeros(0, int)
    context = np.concatenate([start + np.arange(count) for start, count in zip(token_starts, used, strict=False)])
    need = np.concatenate([n[:, :count] for n, count in zip(needed, used, strict=True)], axis=1)
    live = np.concatenate([m[:, :count] for m, count in zip(masks, used, strict=True)], axis=1)
    owner = np.repeat(context_starts[:-1], used)
    labels = [context[live[i]] + 1 + i for i in range(steps)]
    teacher = np.unique(np.concatenate(labels))
    planned, before = [], np.arange(len(context))
    for i in range(steps):
        rows = need[i].nonzero()[0]
        inputs = context[rows] + 1 + i
        planned.append(
            StepRows(
                rows=_tensor(rows),
                parent=_tensor(np.searchsorted(before, rows)),
                inputs=_tensor(inputs),
                labels=_tensor(np.minimum(np.searchsorted(teacher, inputs), max(len(teacher) - 1, 0))),
                live=torch.from_numpy(live[i, rows]),
                runs=_runs(rows, owner),
            )
        )
        before = rows
    whole = _runs(np.arange(len(context)), owner)
    document = np.repeat(np.arange(len(used)), used)
    return RowPlan(_tensor(context), _tensor(positions), _tensor(document), _tensor(teacher), whole, tuple(planned))


def _runs(rows: np.ndarray, owner: np.ndarray) -> tuple[Run, ...]:
    if not len(rows):
        return ()
    breaks = (np.diff(rows) != 1) | (np.diff(owner[rows]) != 0)
    firsts = np.concatenate([[0], breaks.nonzero()[0] + 1])
    lasts = np.concatenate([firsts[1:], [len(rows)]]) - 1
    spans = zip(owner[rows[firsts]], rows[firsts], rows[lasts] + 1, firsts, strict=True)
    return tuple(Run(*(int(value) for value in span)) for span in spans)


def _tensor(values: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.int64))
