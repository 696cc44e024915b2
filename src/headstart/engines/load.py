"""Opening the engine that the settings name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headstart.config import Target
from headstart.errors import UserError

if TYPE_CHECKING:
    from headstart.engines.base import Engine, Use


def open_engine(target: Target, use: Use) -> Engine:
    """The target in the engine `target.engine`, ready for what `use` says.

    Raises:
        UserError: the model cannot be had, or the engine cannot load it or take images; says why.
        GateError: the engine holds it in a way that would give wrong numbers.
    """
    if target.engine == "vllm":
        from headstart.engines.vllm.engine import VllmEngine  # noqa: PLC0415 (each engine brings libraries of its own)

        return VllmEngine(target, use)
    if use.media:
        raise UserError(
            "the conversations have images, which target.engine = 'transformers' does not read",
            do="set target.engine = 'vllm'",
        )
    from headstart.engines.transformers import TransformersEngine  # noqa: PLC0415

    return TransformersEngine(target, use.batch_size)
