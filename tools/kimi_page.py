"""docs/kimi-k2.5.md: the words of kimi_page.md.in, and what doctor and estimate print for that recipe."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from typer.testing import CliRunner

from headstart.cli import app
from headstart.config import Data
from headstart.doctor import doctor, environment, machine, subject
from headstart.engines.vllm import releases
from headstart.estimate import counting, draft, hardware
from headstart.estimate.examine import examine
from headstart.events import Events

ROOT = Path(__file__).resolve().parent.parent
RECIPE, LATENT_RECIPE = "recipes/kimi-k2.5.toml", "recipes/kimi-k2.5-mla.toml"
WORDS = Path(__file__).with_name("kimi_page.md.in")
VERSIONS = ("0.16.0", "0.18.0", "0.22.0", "0.25.0", "0.32.0")
GPU = machine.Gpu("NVIDIA H200", 143_771 * machine.MIB, 143_200 * machine.MIB)
TB = 10**12
QUIET = Events(quiet=True)
LOOK = counting.look
READ: dict[str, Any] = {}


def page(note: str) -> str:
    with _elsewhere():
        asked = ["doctor", RECIPE, "--engine-version", "0.16.0", "-s", "directory=/data/kimi"]
        figures = ["--hardware", "8xH200,disk=4TB", "--answer-tokens", "500"]
        small = ["--hardware", "8xH200,disk=300GB", "--answer-tokens", "500"]
        found, latent = (examine(recipe, (), figures[1], QUIET, 500) for recipe in (RECIPE, LATENT_RECIPE))
        return WORDS.read_text(encoding="utf-8").format(
            note=note,
            doctor=_printed(asked),
            versions="\n".join(map(_row, VERSIONS)),
            estimate=_printed(["estimate", "-q", RECIPE, *figures]),
            advice=_printed(["estimate", "-q", RECIPE, *small]).partition("it does not fit\n")[2],
            draft=f"{draft.parameters(found.shape).total / 1e9:.2f} B",
            latent=f"{draft.parameters(latent.shape).total / 1e9:.2f} B",
            prefill_share=hardware.PREFILL_SHARE,
            train_share=hardware.TRAIN_SHARE,
            bandwidth_share=hardware.BANDWIDTH_SHARE,
        )


def _row(version: str) -> str:
    found = doctor.examine(subject.open_subject(RECIPE), version, "cuda")
    rungs, serve = found.engine, next(check for check in found.checks if check.name == "serve")
    told = "no" if not rungs.serve.works else rungs.serve.name if serve.verdict == "go" else serve.finding
    return f"| {version} | {rungs.capture.name} | {told} |"


def _printed(arguments: list[str]) -> str:
    """What the command prints, without the spaces that fill its columns."""
    with mock.patch.dict(os.environ, COLUMNS="130"):
        shown = CliRunner().invoke(app, arguments, prog_name="headstart")
    assert shown.exit_code in (0, 3), shown.output
    return "\n".join(line.rstrip() for line in shown.stdout.split("\n")).strip("\n")


def _read_once(data: Data, events: Events) -> Any:
    key = data.model_dump_json()
    if key not in READ:
        READ[key] = LOOK(data, events)
    return READ[key]


@contextmanager
def _elsewhere() -> Iterator[None]:
    """As on a machine with eight H200 and room on /data, no vLLM, no tokenizer of the target; the sources are read here, once."""
    bare = environment.Environment("3.12", {"torch": "2.10.0", "transformers": "5.19.0"})
    rooms = {"gpus": lambda: (GPU,) * 8, "room": lambda _: 4 * TB, "existing": lambda _: Path("/data")}
    before = Path.cwd()
    with (
        mock.patch.multiple(machine, **rooms, writable=lambda _: None),
        mock.patch.object(environment, "look", return_value=bare),
        mock.patch.object(releases, "installed", return_value=None),
        mock.patch.object(counting, "template_of", return_value=None),
        mock.patch.object(counting, "look", _read_once),
    ):
        os.chdir(ROOT)
        try:
            yield
        finally:
            os.chdir(before)
