"""The figures of a report, each drawn from the numbers of a run, or left out where there are none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from headstart.report.drawing import FIRST, MUTED, SECOND, Drawing, drawing
from headstart.report.numbers import TRAINED, UNTRAINED, Numbers, Rate

NAME = 24  # characters of a source's name
SMOOTHED = 40  # points that a training curve is thinned to


def draw_all(numbers: Numbers) -> list[Drawing]:
    """Every figure that the run has numbers for, in the order of the page."""
    makers = (loss, selection, accuracy, positions, coverage, lengths, rates)
    return [drawn for maker in makers if (drawn := maker(numbers)) is not None]


def loss(numbers: Numbers) -> Drawing | None:
    """Training loss of every TTT step."""
    records = numbers.records("train")
    if not records:
        return None

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        _per_step(axes, records, "loss")
        axes.set(xlabel="optimiser step", ylabel="loss", title="Training loss by TTT step")

    thinned = len(records) > 2 * SMOOTHED
    means = f", each point the mean of about {len(records) / SMOOTHED:.0f} optimiser steps" if thinned else ""
    caption = f"Loss of each TTT step on the training conversations{means}."
    return drawing("loss", caption, 3.0, draw)


def selection(numbers: Numbers) -> Drawing | None:
    """Loss and acceptance length on held-out conversations, and the step that was kept."""
    records = numbers.records("validation")
    if not records:
        return None
    best = numbers.counts("draft").get("best_step")

    def draw(figure: Figure) -> None:
        above, below = figure.subplots(2, 1, sharex=True)
        _line(above, records, "loss")
        training = _stretches(numbers.records("train"), "loss")
        if len(training):
            above.plot(training[:, 0], training[:, 1:].mean(axis=1), color=MUTED, linestyle="--", label="training")
            above.legend(loc="upper right")
        _line(below, records, "tau")
        _mark(above, below, records, best)
        _whole(below.xaxis)
        above.set(ylabel="loss", title="Held-out loss (mean of TTT steps)")
        below.set(xlabel="optimiser step", ylabel="tau", title="Held-out acceptance length, simulated")

    caption = "The draft that is kept is the one with the best acceptance length, not the lowest loss."
    return drawing("selection", caption, 5.6, draw)


def accuracy(numbers: Numbers) -> Drawing | None:
    """Held-out acceptance at every TTT step."""
    records = numbers.records("validation")
    if not records:
        return None

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        _per_step(axes, records, "accuracy", marker="o")
        axes.set(xlabel="optimiser step", ylabel="share", title="Held-out: the draft's first choice is the target's")
        axes.set_ylim(0, 1.25 * axes.get_ylim()[1])  # room for the legend

    caption = "By TTT step: step 1 reads true hidden states, each later one the draft's own output of the step before."
    return drawing("accuracy", caption, 3.0, draw)


def positions(numbers: Numbers) -> Drawing | None:
    """Acceptance by position in real decoding, trained beside untrained."""
    head = numbers.headline
    rows = [] if head is None else [(name, row) for name in (TRAINED, UNTRAINED) if (row := head.drafts.get(name))]
    if not rows:
        return None

    def draw(figure: Figure) -> None:
        panels = figure.subplots(1, 2, sharey=True)
        for axes, kind, title in zip(
            panels, ("conditional", "unconditional"), ("given all before", "with all before"), strict=True
        ):
            _bars(axes, [(name, row["per_position"][kind]) for name, row in rows])
            axes.set(title=title, xlabel="draft position", ylim=(0, 1))
        panels[0].set_ylabel("accepted")
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=len(rows))

    caption = (
        "Share of drafted tokens that the target accepted. Left: of those it got to judge; right: of all verify steps."
    )
    return drawing("positions", caption, 3.0, draw)


def coverage(numbers: Numbers) -> Drawing | None:
    """Share of held-out answer tokens that the draft vocabulary holds."""
    found = numbers.counts("vocab").get("coverage") or {}
    if found.get("overall") is None:
        return None
    shares = list(found["by_source"].items())[::-1]

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        _labelled(axes, [(_short(name), 100 * share, f"{100 * share:.1f} %") for name, share in shares])
        axes.axvline(
            100 * found["overall"],
            color=SECOND,
            linestyle="--",
            label=f"ceiling, all sources: {100 * found['overall']:.1f} %",
        )
        axes.set(
            xlabel="% of held-out answer tokens",
            xlim=(0, 122),
            xticks=range(0, 101, 20),
            title="Draft vocabulary coverage",
        )
        figure.legend(loc="outside lower center")

    return drawing(
        "coverage", "A token outside the draft vocabulary can never be proposed.", 1.3 + 0.3 * len(shares), draw
    )


def lengths(numbers: Numbers) -> Drawing | None:
    """How long prompts and answers are."""
    found = numbers.lengths
    if found is None or not len(found.read):
        return None

    def draw(figure: Figure) -> None:
        panels = figure.subplots(1, 2)
        for axes, values, title in zip(
            panels, (found.read, found.answered), ("prompt tokens", "answer tokens"), strict=True
        ):
            axes.hist(values, bins=min(24, int(np.ptp(values)) + 1), color=FIRST)
            axes.axvline(float(np.median(values)), color=SECOND, linestyle="--")
            _whole(axes.xaxis, axes.yaxis)
            axes.set(title=f"{title}, median {np.median(values):.0f}", xlabel="tokens of a sample")
        panels[0].set_ylabel("samples")

    caption = (
        f"{len(found.read):,} samples. Prompt tokens are those that the target read (template included); "
        "answer tokens it produced."
    )
    return drawing("lengths", caption, 2.8, draw)


def rates(numbers: Numbers) -> Drawing | None:
    """Tokens per second of the stages that process tokens."""
    found: Sequence[Rate] = numbers.rates[::-1]
    if not found:
        return None

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        _labelled(axes, [(rate.label, rate.per_second, f"{rate.per_second:,.0f}") for rate in found])
        axes.set(
            xlabel="tokens per second",
            title="Speed of the stages",
            xlim=(0, 1.2 * max(rate.per_second for rate in found)),
        )

    caption = "The stages count different work: regenerate decodes many prompts together, evaluate one at a time."
    return drawing("rates", caption, 1.1 + 0.3 * len(found), draw)


def _stretches(records: Sequence[dict[str, Any]], key: str) -> np.ndarray:
    """Records as [points, 1 + TTT steps]: step, then the values of `key`; many are averaged over stretches."""
    values = np.array([[record["step"], *np.atleast_1d(record[key])] for record in records], dtype=np.float64)
    if len(values) <= 2 * SMOOTHED:
        return values
    return np.array([part.mean(axis=0) for part in np.array_split(values, SMOOTHED)])


def _per_step(axes: Axes, records: Sequence[dict[str, Any]], key: str, marker: str | None = None) -> None:
    """One line per TTT step, paler the deeper it is."""
    points = _stretches(records, key)
    depth = points.shape[1] - 1
    for index in range(depth):
        label = f"step {index + 1}" if index in (0, depth - 1) or depth <= 5 else None
        axes.plot(
            points[:, 0],
            points[:, index + 1],
            color=FIRST,
            alpha=1 - 0.75 * index / max(depth, 1),
            label=label,
            marker=marker,
            markersize=3,
        )
    _whole(axes.xaxis)
    axes.legend(loc="best", ncols=2)


def _whole(*sides: Axis) -> None:
    """Ticks at whole numbers."""
    for side in sides:
        side.set_major_locator(MaxNLocator(nbins=5, integer=True))


def _line(axes: Axes, records: Sequence[dict[str, Any]], key: str) -> None:
    points = [(record["step"], float(np.mean(record[key]))) for record in records]
    axes.plot(*zip(*points, strict=True), color=FIRST, marker="o", markersize=3, label="held-out")


def _mark(above: Axes, below: Axes, records: Sequence[dict[str, Any]], best: int | None) -> None:
    """The best step, through both panels."""
    for axes in (above, below):
        if best is not None:
            axes.axvline(best, color=SECOND, linewidth=1)
    for record in records:
        if record["step"] == best:
            below.plot(
                [record["step"]],
                [record["tau"]],
                "o",
                color=SECOND,
                label=f"best: step {best}, tau {record['tau']:.3f}",
            )
            below.legend(loc="lower right")


def _bars(axes: Axes, groups: Sequence[tuple[str, Sequence[float | None]]]) -> None:
    """Bars beside each other, one colour per draft; a position that was never judged has none."""
    width = 0.8 / len(groups)
    for index, (name, values) in enumerate(groups):
        at = np.arange(len(values)) + 1 + (index - (len(groups) - 1) / 2) * width
        heights = [np.nan if value is None else value for value in values]
        axes.bar(at, heights, width=0.9 * width, color=FIRST if name == TRAINED else SECOND, label=name)
        for x, height in zip(at, heights, strict=True):
            if not np.isnan(height):
                axes.text(x, height, f"{100 * height:.0f}", ha="center", va="bottom", fontsize=7)
    most = max(len(values) for _, values in groups)
    axes.set(xticks=range(1, most + 1), xlim=(0.4, most + 0.6))
    axes.grid(visible=False, axis="x")


def _labelled(axes: Axes, rows: Sequence[tuple[str, float, str]]) -> None:
    """Horizontal bars by place, not by name, since two names may be equal once cut."""
    axes.barh(range(len(rows)), [value for _, value, _ in rows], height=0.6, color=FIRST)
    axes.set_yticks(range(len(rows)), [name for name, _, _ in rows])
    axes.set_ylim(-0.6, len(rows) - 0.4)
    axes.grid(visible=False, axis="y")
    for place, (_, value, text) in enumerate(rows):
        axes.annotate(text, (value, place), (3, 0), textcoords="offset points", va="center", fontsize=8)


def _short(name: str) -> str:
    return name if len(name) <= NAME else f"...{name[3 - NAME :]}"
