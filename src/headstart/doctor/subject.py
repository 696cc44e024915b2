"""What `doctor` and `inspect` are asked about: a hub id, a folder, a JSON file of any name, or a run's TOML file.

Nothing is executed that a model ships, no weights are read, nothing is asked on stdin.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from headstart import files
from headstart.config import Run, load
from headstart.errors import UserError
from headstart.target import quantization, source
from headstart.target.anatomy import Anatomy, anatomy_of
from headstart.target.beside import CONFIG, Beside, read_object
from headstart.target.spellings import find_text
from headstart.target.tokenizer_files import TokenizerFiles

_CONFIGURATIONS = Path(__file__).parents[1] / "recipes" / "targets"


@dataclass(frozen=True)
class Subject:
    """A target whose configuration was found. top, text: its whole configuration and the text model's part; quant: that
    of its quantisation. folder: where its other files are; None for a lone file. run: the settings, when a run was named.
    """

    name: str
    anatomy: Anatomy
    top: Mapping[str, Any]
    text: Mapping[str, Any]
    quant: Mapping[str, Any]
    folder: Path | None
    run: Run | None = None

    @property
    def tokenizer(self) -> TokenizerFiles | None:
        return TokenizerFiles(self.folder) if self.folder else None


def open_subject(model: str, settings: Sequence[str] = ()) -> Subject:
    """Find the configuration of `model`, on this disk before the hub is asked.

    Raises:
        UserError: it cannot be found or read, or describes no language model.
    """
    path = files.home(model)
    if path.suffix == ".toml":
        run = load(path, settings)
        return replace(_read(_config_file(run.target.model, run.target.revision), run.target.model), run=run)
    if settings:
        raise UserError("settings need a run's TOML file", do=f"headstart doctor run.toml -s {settings[0]}")
    return _read(_config_file(model), model)


def python_of(model: str | None) -> str | None:
    """target.python of a run's TOML file; None for anything else."""
    return load(files.home(model)).target.python if model and model.endswith(".toml") else None


def _config_file(model: str, revision: str | None = None) -> Path:
    path = files.home(model)
    if path.is_file() or path.suffix == ".json":
        return path
    if not path.exists() and (found := _cached(model, revision) or _shipped(model, revision)):
        return found
    return source.resolve(model, revision, weights=False) / CONFIG


def _cached(model: str, revision: str | None) -> Path | None:
    """The config.json of a hub id that was downloaded before; the hub is not asked."""
    if model.count("/") != 1:
        return None
    from huggingface_hub import try_to_load_from_cache  # noqa: PLC0415 (slow to import)
    from huggingface_hub.errors import HFValidationError  # noqa: PLC0415

    try:
        found = try_to_load_from_cache(model, CONFIG, revision=revision)
    except HFValidationError:
        return None
    return Path(found) if isinstance(found, str) else None


def _shipped(model: str, revision: str | None) -> Path | None:
    """The configuration of a recipe's target as it was published, so that the hub need not be asked about it."""
    file = _CONFIGURATIONS / f"{model.replace('/', '--')}.json"
    return file if revision is None and model.count("/") == 1 and file.is_file() else None


def _read(file: Path, name: str) -> Subject:
    if file.parent == _CONFIGURATIONS:
        name += " (the configuration that headstart ships)"
    top, beside = read_object(file), Beside.of(file)
    text_path, text = find_text(top, str(file))
    quant, _ = quantization.locate(top, text, f"{text_path}." if text_path else "", *beside.quantization)
    return Subject(name, anatomy_of(top, beside, str(file)), top, text, quant, beside.folder)
