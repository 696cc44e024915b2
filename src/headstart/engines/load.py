"""Opening the engine that the settings name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headstart.config import Target

if TYPE_CHECKING:
    from headstart.engines.transformers import TransformersEngine


def open_engine(target: Target, batch_size: int = 64) -> TransformersEngine:
    """Load the target. `batch_size`: prompts that `generate` decodes together (`regenerate.batch_size`).

    Raises:
        UserError: the model cannot be had, or cannot be loaded; says why.
    """
    from headstart.engines.transformers import TransformersEngine  # noqa: PLC0415 (slow to import)

    return TransformersEngine(target, batch_size)
