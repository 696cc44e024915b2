"""What can be checked cheaply is checked before anything expensive starts: settings that a late stage would refuse."""

from __future__ import annotations

import os
import shutil

from headstart.config import Run
from headstart.data.vocab import pick_size
from headstart.drafts import attention
from headstart.engines.weights import pick_device
from headstart.errors import UserError
from headstart.evaluation.prompts import check_names
from headstart.target.anatomy import Anatomy, inspect
from headstart.target.layers import check_boundaries
from headstart.target.source import resolve
from headstart.training.shape import shape_for


def check(run: Run) -> None:
    """Compare the settings with the target's configuration and this machine; needs no weights.

    Raises:
        UserError: a device that is not here or has not the form of attention or the compiler asked for, sequences longer than
            the target reads, aux layers or a draft vocabulary that it does not have, a draft whose heads do not fit, prompt sets
            that do not exist.
    """
    _check_compiler(run)
    attention.backend(pick_device(run.target.device), name=run.train.attention_backend)
    check_names(run.evaluate.prompts)
    target = inspect(resolve(run.target.model, run.target.revision, weights=False))
    _check_length(run, target)
    _check_parallel(run, target)
    aux = check_boundaries(run.capture.aux_layers, target.required("num_layers"))
    shape_for(run.draft, target, aux, pick_size(run.vocab.size, target.required("vocab_size")))


def _check_compiler(run: Run) -> None:
    """torch.compile makes C++ for a CPU, by CXX or g++ (torch/_inductor/cpp_builder.py)."""
    compiler = os.environ.get("CXX") or "g++"
    if run.train.compile and pick_device(run.target.device).type == "cpu" and shutil.which(compiler) is None:
        raise UserError(
            "train.compile = true needs a C++ compiler on a CPU",
            looked_for=f"{compiler}, in PATH",
            do="install it, set CXX, or leave train.compile out",
        )


def _check_length(run: Run, target: Anatomy) -> None:
    limit = target.required("max_positions")
    if run.data.max_length > limit:
        raise UserError(
            f"data.max_length = {run.data.max_length} is more than the target can read",
            looked_for=f"at most {limit} ({target.evidence['max_positions']})",
            do=f"set data.max_length to {limit} or less",
        )


def _check_parallel(run: Run, target: Anatomy) -> None:
    heads, parts = target.required("num_heads"), run.target.tensor_parallel
    if run.target.engine == "vllm" and heads % parts:
        raise UserError(
            f"target.tensor_parallel = {parts} does not divide the target's {heads} attention heads",
            looked_for="a number that divides them, since each part of the weights holds whole heads",
        )
