"""Everything that a report shows, read from a run directory: manifests, scores, curves, lengths, rates."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from headstart import artifact, events, files, pipeline, rundir
from headstart.artifact import Artifact
from headstart.config import Run
from headstart.errors import UserError
from headstart.pipeline import STAGES, Status

ALL = "all"  # the row of scores.json over all prompt sets together
NO_DRAFT, TRAINED, UNTRAINED = "none", "trained", "untrained"  # the drafts of its rows


@dataclass(frozen=True)
class Lengths:
    """Tokens per sample, int64 [samples]: `read` was given to the target (with the template), `answered` it made."""

    read: np.ndarray
    answered: np.ndarray


@dataclass(frozen=True)
class Rate:
    """Work of one kind: what was counted, how much of it, and the seconds it took."""

    label: str
    tokens: int
    seconds: float

    @property
    def per_second(self) -> float:
        return self.tokens / self.seconds


@dataclass(frozen=True)
class Headline:
    """The rows of scores.json that the verdict is about: all prompt sets together, at the lowest temperature."""

    temperature: float
    drafts: dict[str, dict[str, Any]]
    draft_tokens: int

    @property
    def trained(self) -> dict[str, Any] | None:
        return self.drafts.get(TRAINED)

    @property
    def untrained(self) -> dict[str, Any] | None:
        return self.drafts.get(UNTRAINED)


@dataclass(frozen=True)
class Numbers:
    """One run directory. `damaged`: why an artifact that has a manifest cannot be used, by folder."""

    root: Path
    run: Run
    statuses: tuple[Status, ...]
    artifacts: dict[str, Artifact]
    damaged: dict[str, str]
    events: list[dict[str, Any]]

    def counts(self, folder: str) -> dict[str, Any]:
        """The counts of an artifact; none when it is missing."""
        return self.artifacts[folder].counts if folder in self.artifacts else {}

    def facts(self, folder: str) -> dict[str, Any]:
        return self.artifacts[folder].facts if folder in self.artifacts else {}

    def status(self, folder: str) -> Status:
        return next(status for status in self.statuses if status.folder == folder)

    @cached_property
    def scores(self) -> dict[str, Any] | None:
        if "scores" not in self.artifacts:
            return None
        return files.read_json(self.artifacts["scores"].file("scores.json"))

    @cached_property
    def headline(self) -> Headline | None:
        return None if self.scores is None else headline(self.scores)

    @cached_property
    def curves(self) -> list[dict[str, Any]]:
        """The records of training, oldest first."""
        if "draft" not in self.artifacts:
            return []
        lines = self.artifacts["draft"].file("curves.jsonl").read_text(encoding="utf-8").splitlines()
        return [json.loads(line) for line in lines if line]

    def records(self, kind: str) -> list[dict[str, Any]]:
        return [record for record in self.curves if record["kind"] == kind]

    @cached_property
    def lengths(self) -> Lengths | None:
        if "conversations" not in self.artifacts:
            return None
        return _lengths(self.artifacts["conversations"].file("samples.parquet"))

    @cached_property
    def rates(self) -> list[Rate]:
        """Tokens per second of the work that made the artifacts, in the order of the stages."""
        logged = [_logged(self.events, verb, kind, label) for verb, kind, label in _LOGGED]
        decoded = _decoded(self.artifacts["scores"].file("prompts.parquet")) if "scores" in self.artifacts else []
        return [rate for rate in (*logged, *decoded) if rate and rate.tokens and rate.seconds > 0]


# The files that are read here, by artifact; of the others the manifest is enough.
_READ = {
    "conversations": ("samples.parquet",),
    "draft": ("curves.jsonl",),
    "scores": ("scores.json", "prompts.parquet"),
}


def gather(root: Path) -> Numbers:
    """Open what there is. Raises UserError when `root` is no run directory or a manifest cannot be read."""
    run = rundir.recorded(root)
    statuses = tuple(pipeline.status(run, root))
    artifacts, damaged = {}, {}
    for status in statuses:
        if status.manifest is None:
            continue
        try:
            made = artifact.open_artifact(root / status.folder, status.folder)
            artifact.verify(made, _READ.get(status.folder, ()))
            artifacts[status.folder] = made
        except UserError as error:
            damaged[status.folder] = error.what
    return Numbers(root, run, statuses, artifacts, damaged, events.read(root / rundir.EVENTS))


def headline(scores: dict[str, Any]) -> Headline | None:
    """The rows to judge by; None when there are none."""
    rows = scores["rows"]
    whole = [row for row in rows if row["set"] == ALL] or rows
    if not whole:
        return None
    temperature = min(row["temperature"] for row in whole)
    chosen = {row["draft"]: row for row in whole if row["temperature"] == temperature}
    return Headline(temperature, chosen, scores["draft_tokens"])


def next_stage(numbers: Numbers) -> str | None:
    """The first stage without a usable artifact."""
    return next((stage.verb for stage in STAGES if stage.folder not in numbers.artifacts), None)


_LOGGED = (
    ("regenerate", "generated", "regenerate: answer tokens"),
    ("capture", "captured", "capture: tokens read"),
    ("train", "train-step", "train: tokens learned from"),
)
_DECODED = {NO_DRAFT: "evaluate: no draft", UNTRAINED: "evaluate: untrained draft", TRAINED: "evaluate: trained draft"}


def _logged(log: list[dict[str, Any]], verb: str, kind: str, label: str) -> Rate:
    """The events of all attempts that led to the newest artifact: a new start after an end begins another one."""
    tokens, seconds, ended = 0, 0.0, False
    for event in log:
        if event.get("event") == "stage-end" and event.get("stage") == verb:
            ended = True
        elif event.get("event") == "stage-start" and event.get("stage") == verb and ended:
            tokens, seconds, ended = 0, 0.0, False
        elif event.get("event") == kind:
            tokens, seconds = tokens + event["tokens"], seconds + event["seconds"]
    return Rate(label, tokens, seconds)


def _decoded(path: Path) -> list[Rate]:
    """Decoding with and without drafts; the token that the prefill gives and the prefill's time are not counted."""
    rows = pq.read_table(path, columns=["draft", "tokens", "seconds"]).to_pylist()
    found = []
    for draft, label in _DECODED.items():
        own = [row for row in rows if row["draft"] == draft]
        found.append(Rate(label, sum(row["tokens"] - 1 for row in own), sum(row["seconds"] for row in own)))
    return found


def _lengths(path: Path) -> Lengths:
    total, answered = [], []
    with pq.ParquetFile(path) as file:
        for batch in file.iter_batches(columns=["supervised"]):
            column = batch.column("supervised")
            offsets = column.offsets.to_numpy()
            sums = np.concatenate([[0], np.cumsum(column.values.to_numpy(zero_copy_only=False))])
            total.append(np.diff(offsets))
            answered.append(sums[offsets[1:]] - sums[offsets[:-1]])
    whole, own = (
        np.concatenate(parts).astype(np.int64) if parts else np.zeros(0, np.int64) for parts in (total, answered)
    )
    return Lengths(whole - own, own)
