"""What can be checked cheaply is checked before anything expensive starts: settings that a late stage would refuse."""

from __future__ import annotations

from headstart.config import Run
from headstart.data.vocab import pick_size
from headstart.evaluation.prompts import check_names
from headstart.target.anatomy import inspect
from headstart.target.layers import check_boundaries
from headstart.target.source import resolve


def check(run: Run) -> None:
    """Compare the settings with the target's configuration; needs no weights.

    Raises:
        UserError: aux layers or a draft vocabulary that the target does not have, or prompt sets that do not exist.
    """
    target = inspect(resolve(run.target.model, run.target.revision, weights=False))
    check_boundaries(run.capture.aux_layers, target.required("num_layers"))
    pick_size(run.vocab.size, target.required("vocab_size"))
    check_names(run.evaluate.prompts)
