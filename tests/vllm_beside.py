"""Worker extensions for test_vllm_hooks: hooks beside vLLM's own extraction, and hooks that count preemptions."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headstart.engines.vllm.layer_hooks import LayerHooks, Recording, Span
from headstart.engines.vllm.taps import Taps
from headstart.engines.vllm.worker import HeadstartWorker

FOLDER, BOUNDARIES = "BESIDE_FOLDER", "BESIDE_BOUNDARIES"
RESTARTS = "restarts"  # a file in FOLDER: how many requests started again


class Counting(LayerHooks):
    """Counts the recorded requests that start again."""

    restarts = 0

    def _put(self, span: Span, *rows: Any) -> None:
        if span.position == 0 < self._recordings[span.request].length:
            self.restarts += 1
            (Path(os.environ[FOLDER]) / RESTARTS).write_text(str(self.restarts))
        super()._put(span, *rows)


class Every(Counting):
    """Records the prompt of every request, asked or not; one that starts again is written again."""

    def _admit(self, step: Any) -> None:
        for new in step.scheduled_new_reqs:
            if new.req_id not in self._recordings:
                self._recordings[new.req_id] = Recording(new.req_id, len(new.prompt_token_ids), with_output=False)

    def _put(self, span: Span, *rows: Any) -> None:
        recording = self._recordings[span.request]
        if span.position < recording.wanted:
            super()._put(span, *rows)
            self._recordings[span.request] = recording


class Beside(HeadstartWorker):
    """With vLLM's own extraction; the hooks come before the first request."""

    def headstart_find(self, layers_path: str | None) -> str:
        found = super().headstart_find(layers_path)
        boundaries = [int(b) for b in os.environ[BOUNDARIES].split(",")]
        Every(self.model_runner, Taps(self._headstart_text, boundaries), Path(os.environ[FOLDER])).install()
        return found


class Alone(HeadstartWorker):
    """The hooks rung, counting."""

    def headstart_hooks_install(self, boundaries: Sequence[int], folder: str) -> None:
        super().headstart_hooks_install(boundaries, folder)
        assert self._headstart_hooks is not None
        self._headstart_hooks.__class__ = Counting
