"""Checks that need a run's settings: lengths, where it writes, and what its states will take."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from headstart import artifact, files
from headstart.config import Run
from headstart.data.packages import SHIPPED
from headstart.doctor import machine
from headstart.doctor.checks import Check
from headstart.doctor.engine import Device
from headstart.doctor.resources import States, check_disk
from headstart.doctor.sizes import BYTES
from headstart.errors import UserError
from headstart.events import size
from headstart.target.anatomy import Anatomy
from headstart.training.shape import shape_for


def run_checks(run: Run, anatomy: Anatomy, device: Device) -> Iterator[Check]:
    """What would end this run later, seen now."""
    yield _inputs(run)
    yield _length(run, anatomy)
    yield from _vocabulary(run, anatomy)
    yield from _parallel(run, anatomy)
    yield _draft(run, anatomy, device)
    yield _outputs(Path(run.directory))
    yield _disk(run, anatomy, device)


def _inputs(run: Run) -> Check:
    """Sources and prompt sets; what they hold is seen when they are read."""
    names = list(dict.fromkeys((*run.data.sources, *run.data.decontaminate, *run.evaluate.prompts)))
    missing = [name for name in names if name not in SHIPPED and not files.matching(name)]
    if not missing:
        return Check("inputs", "go", f"{', '.join(names[:5])}{' and more' if len(names) > 5 else ''}")
    do = "correct data.sources, data.decontaminate, evaluate.prompts; data on a hub must be downloaded first"
    return Check("inputs", "stop", f"there is no file {', no '.join(missing[:3])}", do)


def _length(run: Run, anatomy: Anatomy) -> Check:
    name, asked, limit = "sequence length", run.data.max_length, anatomy.max_positions
    if limit is None:
        return Check(name, "warn", f"the longest sequence of the target is unknown ({asked} asked for)", "see its card")
    if asked > limit:
        return Check(name, "stop", f"data.max_length = {asked}, the target reads {limit}", f"set it to {limit} or less")
    return Check(name, "go", f"{asked} of {limit} positions")


def _vocabulary(run: Run, anatomy: Anatomy) -> Iterator[Check]:
    asked, rows = run.vocab.size, anatomy.vocab_size
    if asked is not None and rows is not None and asked > rows:
        yield Check(
            "draft vocabulary", "stop", f"vocab.size = {asked}, the target has {rows} tokens", "lower vocab.size"
        )


def _parallel(run: Run, anatomy: Anatomy) -> Iterator[Check]:
    parts, heads = run.target.tensor_parallel, anatomy.num_heads
    if run.target.engine == "vllm" and heads is not None and heads % parts:
        what = f"target.tensor_parallel = {parts} does not divide {heads} attention heads"
        yield Check("tensor parallel", "stop", what, "set it to a number that divides them")


def _draft(run: Run, anatomy: Anatomy, device: Device) -> Check:
    """Its shape, as `train` would build it, and the form of attention."""
    name = "draft"
    if run.train.attention_backend == "flex" and device == "cpu":
        return Check(name, "stop", "train.attention_backend = 'flex' has no backward pass on a CPU", "leave it out")
    try:
        shape = shape_for(run.draft, anatomy, run.capture.aux_layers or (0, 1, 2), run.vocab.size or 1)
    except UserError as error:
        return Check(name, "stop", error.what, error.do or "see [draft] in headstart config")
    kind = "MLA" if shape.latent else f"{shape.num_heads} query and {shape.num_kv_heads} key heads of {shape.head_dim}"
    window = f", a sliding window of {shape.sliding_window}" if shape.sliding_window else ""
    return Check(name, "go", f"{shape.num_layers} layer(s) of width {shape.hidden_size}, {kind}{window}")


def _outputs(root: Path) -> Check:
    fault = machine.writable(root)
    if fault:
        return Check(
            "outputs", "stop", f"the run directory {root} cannot be made: {fault}", "set `directory` elsewhere"
        )
    return Check("outputs", "go", f"{root} can be written")


def _disk(run: Run, anatomy: Anatomy, device: Device) -> Check:
    width, layers = anatomy.hidden_size, run.capture.aux_layers
    if width is None:
        return Check("disk", "warn", "the width of the states is unknown", "check the configuration")
    vectors, root = (3 if layers is None else len(layers)) + 1, Path(run.directory)
    tokens, exact = _tokens(run, root)
    free = machine.room(root)
    if tokens is None:
        each = vectors * width * stored_bytes(run, device)
        what = f"{size(each)} of states a token: {int(free / each):,} tokens fit into {size(free)}"
        return Check("disk", "go", f"{what}; how many there will be is known after prepare")
    states = States(tokens, vectors, width, stored_bytes(run, device), exact)
    return check_disk(states, free, str(machine.existing(root)))


def stored_bytes(run: Run, device: Device) -> int:
    """Bytes of one stored number: of capture.dtype, else of the compute type (float32 on the CPU, bfloat16 on GPUs)."""
    automatic = "float32" if device == "cpu" else "bfloat16"
    compute = automatic if run.target.dtype == "auto" else run.target.dtype
    return BYTES[compute if run.capture.dtype == "auto" else run.capture.dtype]


def _tokens(run: Run, root: Path) -> tuple[int | None, bool]:
    """Tokens to capture, and whether they are counted: of the conversations made, else at most so many."""
    made = _counts(root / "conversations")
    if "tokens" in made:
        return int(made["tokens"]), True
    chosen = _counts(root / "prompts").get("kept", run.data.max_conversations)
    return (None if chosen is None else int(chosen) * _longest(run)), False


def _longest(run: Run) -> int:
    """Tokens of the longest sequence that these settings can give."""
    data = run.data
    if data.answers == "regenerate" and data.max_turns == 1 and data.max_prompt_tokens:
        return min(data.max_length, data.max_prompt_tokens + run.regenerate.max_new_tokens)
    return data.max_length


def _counts(folder: Path) -> dict[str, int]:
    try:
        manifest = artifact.read_manifest(folder) if folder.is_dir() else None
    except UserError:
        return {}
    return manifest.counts if manifest else {}
