"""One figure as SVG for an HTML page: the style, the page's colours in place of matplotlib's, ids of its own.

Figures are made without pyplot, so nothing stays open and no state is shared. Equal numbers give equal bytes.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

from matplotlib import style
from matplotlib.figure import Figure

# Colours stand for the page's variables and are replaced by them.
INK, MUTED, LINE, FIRST, SECOND = "#101112", "#707172", "#d0d1d2", "#2060d1", "#b35901"
_VARIABLES = {INK: "--ink", MUTED: "--muted", LINE: "--line", FIRST: "--first", SECOND: "--second"}
_STYLE: dict[str, Any] = {
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.titlelocation": "left",
    "axes.edgecolor": LINE,
    "axes.labelcolor": MUTED,
    "axes.titlecolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.facecolor": "none",
    "figure.facecolor": "none",
    "savefig.facecolor": "none",
    "grid.color": LINE,
    "grid.linewidth": 0.5,
    "xtick.color": LINE,
    "ytick.color": LINE,
    "xtick.labelcolor": MUTED,
    "ytick.labelcolor": MUTED,
    "text.color": INK,
    "text.parse_math": False,  # names of files may hold dollar signs
    "legend.frameon": False,
    "legend.fontsize": 8,
    "lines.linewidth": 1.5,
    "svg.fonttype": "none",
}
WIDTH = 4.6  # inches; on a phone a figure is as wide as the page, and its text still readable


class Drawing(NamedTuple):
    """One figure. name: its anchor; caption: one sentence; svg: an `<svg>` element."""

    name: str
    caption: str
    svg: str


def drawing(name: str, caption: str, height: float, draw: Callable[[Figure], None]) -> Drawing:
    """Let `draw` fill an empty figure of `height` inches, and write it as an SVG element."""
    buffer = io.StringIO()
    with style.context(["default", {**_STYLE, "svg.hashsalt": name}]), warnings.catch_warnings():
        # The browser draws the text: a script that matplotlib's own font lacks is no fault.
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        draw(figure)
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return Drawing(name, caption, _inline(buffer.getvalue(), name))


def _inline(svg: str, name: str) -> str:
    """An SVG file as an element of a page: no header and namespaces, ids of its own, the page's colours and width."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r' xmlns(:\w+)?="[^"]*"', "", svg)
    svg = re.sub(
        r'^<svg[^>]*viewBox="([^"]*)"[^>]*>', rf'<svg viewBox="\1" role="img" aria-labelledby="caption-{name}">', svg
    )
    svg = (
        svg.replace(' id="', f' id="{name}-')
        .replace('xlink:href="#', f'href="#{name}-')
        .replace("url(#", f"url(#{name}-")
    )
    for colour, variable in _VARIABLES.items():
        svg = svg.replace(colour, f"var({variable})")
    return svg
