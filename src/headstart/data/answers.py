"""The answers of a target, appended to disk as they come, so that a killed `regenerate` asks nothing twice."""

from __future__ import annotations

import json
import operator
import os
from collections.abc import Iterable
from pathlib import Path

from headstart import files
from headstart.types import Completion, Prompt


class AnswerLog:
    """One JSON line per answer: id, a digest of what was asked, ids, finish. Ids are kept as sampled.

    `salt` names all that shapes an answer beside the prompt (the target's fingerprint): an answer counts as done only
    for the same prompt ids and salt. A last line that a kill cut short is taken away when the file is opened.
    """

    def __init__(self, path: Path, salt: str) -> None:
        self.path = path
        self._salt = salt
        self._done: dict[str, tuple[str, Completion]] = {}
        self._load()

    def __len__(self) -> int:
        return len(self._done)

    def get(self, prompt: Prompt) -> Completion | None:
        """The answer to this very prompt, or None. Prompts are told apart by id, so equal texts are both asked."""
        asked, completion = self._done.get(prompt.id, (None, None))
        return completion if asked == self._digest(prompt) else None

    def append(self, answered: Iterable[tuple[Prompt, Completion]]) -> None:
        """Write answers; they are on disk when this returns."""
        lines = [self._record(prompt, completion) for prompt, completion in answered]
        with self.path.open("ab") as file:
            file.write("".join(lines).encode())
            file.flush()
            os.fsync(file.fileno())

    def _record(self, prompt: Prompt, completion: Completion) -> str:
        asked = self._digest(prompt)
        self._done[prompt.id] = (asked, completion)
        row = {"id": prompt.id, "asked": asked, "ids": completion.ids, "finish": completion.finish}
        if completion.prompt is not None:
            row["prompt"] = completion.prompt
        return json.dumps(row) + "\n"

    def _digest(self, prompt: Prompt) -> str:
        images = [[item.sha256 for item in prompt.media]] if prompt.media else []
        return files.sha256_json([self._salt, prompt.ids, *images])[:16]

    def _load(self) -> None:
        if not self.path.exists():
            return
        whole = 0  # bytes of the lines that can be read
        for line in self.path.read_bytes().splitlines(keepends=True):
            if not line.endswith(b"\n") or not self._take(line):
                break
            whole += len(line)
        with self.path.open("rb+") as file:
            file.truncate(whole)

    def _take(self, line: bytes) -> bool:
        try:
            row = json.loads(line)
            read = tuple(map(operator.index, row["prompt"])) if "prompt" in row else None
            completion = Completion(row["id"], tuple(map(operator.index, row["ids"])), row["finish"], read)
            self._done[completion.id] = (row["asked"], completion)
        except (ValueError, KeyError, TypeError):
            return False
        return True
