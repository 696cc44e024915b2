"""The page: words, tables and figures put into the template. Everything but the figures' SVG is escaped by it."""

from __future__ import annotations

from typing import NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from headstart.report import figures, serving, tables, verdict, words
from headstart.report.numbers import Numbers

TEMPLATE = "page.html.j2"
# Which figures stand in which section, and what each is drawn from.
_SECTIONS: tuple[tuple[str, str, dict[str, str]], ...] = (
    ("training", "Training", {"loss": "draft", "selection": "draft", "accuracy": "draft"}),
    ("acceptance", "Acceptance and vocabulary", {"positions": "scores", "coverage": "vocab"}),
    ("sizes", "Lengths and speed", {"lengths": "conversations", "rates": "events"}),
)


class Figure(NamedTuple):
    name: str
    caption: str
    svg: Markup


class Section(NamedTuple):
    """A heading with figures; missing: a sentence for each figure that cannot be drawn."""

    name: str
    title: str
    figures: list[Figure]
    missing: list[str]


def render(numbers: Numbers) -> str:
    """The whole page as one string of HTML without references to anything outside it."""
    environment = Environment(
        loader=PackageLoader("headstart", "report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(TEMPLATE).render(
        target=numbers.run.target.model,
        directory=numbers.root.name,
        verdict=verdict.verdict(numbers, serving.fault(numbers)),
        paragraphs=words.paragraphs(numbers),
        missing=verdict.missing(numbers),
        first_tables=[
            tables.stages(numbers),
            tables.scores(numbers),
            *serving.tables(numbers),
            tables.costs(numbers),
        ],
        sections=sections(numbers),
        last_tables=[
            make(numbers)
            for make in (tables.rates, tables.drops, tables.identity, tables.exports, tables.settings, tables.versions)
        ],
        serve=numbers.facts("export").get("serve"),
    )


def sections(numbers: Numbers) -> list[Section]:
    drawn = {
        drawing.name: Figure(drawing.name, drawing.caption, Markup(drawing.svg))
        for drawing in figures.draw_all(numbers)
    }
    made = []
    for name, title, wanted in _SECTIONS:
        missing = [_why_not(numbers, key, source) for key, source in wanted.items() if key not in drawn]
        made.append(Section(name, title, [drawn[key] for key in wanted if key in drawn], list(dict.fromkeys(missing))))
    return made


def _why_not(numbers: Numbers, figure: str, source: str) -> str:
    if source in numbers.artifacts or source == "events":
        return f"Not drawn: {figure}. This run has no numbers for it."
    return f"Missing: {source} ({numbers.damaged.get(source) or numbers.status(source).why})."
