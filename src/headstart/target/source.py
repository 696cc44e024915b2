"""From the name of a target in the settings to a local folder that holds it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from headstart import files
from headstart.errors import UserError, first_line
from headstart.target import smollm2

SHIPPED = "smollm2-135m"

_CONFIG = "config.json"
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_UNUSED = ["*.pt", "*.pth", "*.gguf", "*.onnx", "*.msgpack", "*.h5", "original/*", "onnx/*", "consolidated*"]


def resolve(
    model: str, revision: str | None = None, *, weights: bool = True, progress: Callable[[str], None] | None = None
) -> Path:
    """The folder of `model`: `smollm2-135m` is made from its package, a folder is itself, a hub id is downloaded.

    With `weights` False a hub model's weights are left out: its configuration, tokenizer and template are small.

    Raises:
        UserError: there is no such folder, it holds no model, or the hub cannot give it.
    """
    if model == SHIPPED:
        return smollm2.materialize(progress=progress)
    folder = files.home(model)
    if folder.exists() or _looks_local(model):
        return _checked(folder)
    return _download(model, revision, weights)


def not_loaded(folder: Path, what: str, error: Exception, *, looked_for: str, do: str) -> UserError:
    """What a library could not load from a target's folder: `what`, with what is to be done about this error, or else `do`."""
    text = str(error)
    if "trust_remote_code" in text or "custom code" in text:
        return UserError(
            f"{what} can only be loaded by code that its folder ships",
            looked_for=f"what Transformers knows by itself, in {folder}",
            do="read that code, then set target.trust_remote_code = true",
        )
    if isinstance(error, ModuleNotFoundError):
        do = f"pip install {error.name}"
    return UserError(f"{what} cannot be loaded: {first_line(error)}", looked_for=looked_for, do=do)


def fingerprint(folder: Path) -> str:
    """A SHA-256 that changes when the model in `folder` does.

    Small files count whole; of weight files name, size and three samples, since reading a big model takes minutes.
    """
    listed = sorted(path for path in folder.iterdir() if path.is_file() and not path.name.startswith("."))
    return files.sha256_json({path.name: files.fingerprint(path) for path in listed})


def _looks_local(model: str) -> bool:
    return model.startswith(("/", "./", "../", "~")) or model.count("/") > 1


def _checked(folder: Path) -> Path:
    if (folder / _CONFIG).is_file():
        return folder.resolve()
    raise UserError(
        f"there is no model in {folder}",
        looked_for=str(folder / _CONFIG),
        do=f"set target.model to a model's folder, a hub id (owner/name), or {SHIPPED}",
    )


def _download(model: str, revision: str | None, weights: bool) -> Path:
    skip = _UNUSED if weights else [f"*{suffix}" for suffix in _WEIGHTS] + _UNUSED
    folder = _snapshot(model, revision, [*skip, "*.bin"])
    if weights and not any(folder.glob("*.safetensors")):
        folder = _snapshot(model, revision, skip)
    return _checked(folder)


def _snapshot(model: str, revision: str | None, skip: list[str]) -> Path:
    from huggingface_hub import snapshot_download  # noqa: PLC0415 (slow to import)
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError  # noqa: PLC0415

    try:
        return Path(snapshot_download(model, revision=revision, ignore_patterns=skip))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(
            f"the model {model} cannot be had: {reason}",
            looked_for=f"a folder of that name, then the hub{f' at revision {revision}' if revision else ''}",
            do=f"check the name and the network (HF_TOKEN for gated models), give a folder, or use {SHIPPED}",
        ) from None
