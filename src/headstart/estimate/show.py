"""An estimate as tables for people."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group
from rich.markup import escape
from rich.table import Table

from headstart.estimate.examine import Estimate
from headstart.events import duration, size


def estimate(found: Estimate) -> Group:
    """What is known, the stages, the totals, and what to change."""
    return Group(_given(found), "", _stages(found), "", *_conclusion(found))


def _given(found: Estimate) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_row("target", f"{escape(found.name)}: {_parameters(found)}")
    table.add_row("work", escape(found.counted.told))
    table.add_row("machine", f"{_machine(found)}; {_disk(found)}")
    table.add_row("rates", _rates(found))
    return table


def _parameters(found: Estimate) -> str:
    cost = found.target
    used = f", {_count(cost.active)} of them used for a token" if cost.active < cost.total else ""
    return f"{_count(cost.total)} parameters{used}; {size(cost.weights)} of weights ({cost.origin})"


def _machine(found: Estimate) -> str:
    at = found.machine
    return (
        f"{at.gpus} GPU{'s' * (at.gpus > 1)} of {size(at.memory)}" if at.gpus else f"CPU, {size(at.memory)} of memory"
    )


def _disk(found: Estimate) -> str:
    free = found.machine.disk
    return "free disk not known: disk=... compares it" if free is None else f"{size(free)} free on the disk"


def _rates(found: Estimate) -> str:
    at = found.machine
    rates = (
        f"{at.prefill:,.0f} tokens/s read, {at.decode:,.0f} answered in batches, {at.single:,.0f} alone, "
        f"training {at.train / 1e12:,.3g} TFLOP/s"
    )
    origin = "measured" if found.measured else f"assumed: {', '.join(at.assumed)}" if at.assumed else "as given"
    return f"{rates} ({origin})"


def _stages(found: Estimate) -> Table:
    table = Table("stage", "disk", "memory", "time", box=None, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
        column.no_wrap = True
    for stage in found.stages:
        room = size(stage.disk) + (f" (+ {size(stage.peak)} meanwhile)" if stage.peak > stage.disk else "")
        table.add_row(stage.verb, room, size(stage.memory) if stage.memory else "-", duration(stage.seconds))
    table.add_row("all", size(found.disk), "", duration(found.seconds))
    return table


def _conclusion(found: Estimate) -> Iterator[str]:
    yield "memory: of one device; disk: what stays, and at the end the most that lies there at any time"
    if found.fits:
        yield "[green]it fits[/]"
    else:
        yield "[red]it does not fit[/]"
        yield from map(escape, found.advice)


def _count(number: float) -> str:
    """Parameters, as models are named by them: 135 M, 8.19 B, 1.03 T."""
    for unit, each in (("T", 1e12), ("B", 1e9)):
        if number >= each:
            return f"{number / each:.3g} {unit}"
    return f"{number / 1e6:.3g} M"
