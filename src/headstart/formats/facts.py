"""What the exported folders say of the target, read from its config.json."""

from __future__ import annotations

from pathlib import Path

from headstart import files
from headstart.config import Run, Target
from headstart.formats.common import CONFIG, ExportFacts
from headstart.formats.fields import Fields, read_config
from headstart.target.source import SHIPPED, resolve
from headstart.target.spellings import find_text


def target_facts(run: Run) -> ExportFacts:
    """The facts for an export of this run. Raises UserError when the target cannot be found, or says them wrongly."""
    settings = run.target
    folder = resolve(settings.model, settings.revision, weights=False)
    config = read_config(folder)
    path, text = find_text(config, settings.model)
    top, inner = Fields(config, folder / CONFIG), Fields(text, folder / CONFIG, f"{path}." if path else "")
    begins = _of(inner, top, "bos_token_id").listed("bos_token_id", int)
    return ExportFacts(
        target=_served_name(settings, folder),
        architectures=top.listed("architectures", str),
        target_type=(inner if text.get("model_type") else top).text("model_type"),
        bos_id=begins[0] if begins else None,
        eos_ids=_of(inner, top, "eos_token_id").listed("eos_token_id", int),
        draft_tokens=run.evaluate.draft_tokens,
        embed_tokens=run.export.embed_tokens,
    )


def _of(inner: Fields, top: Fields, name: str) -> Fields:
    """Where the field counts that may stand in both."""
    return inner if name in inner.raw else top


def _served_name(settings: Target, folder: Path) -> str:
    local = settings.model == SHIPPED or files.home(settings.model).exists()
    return str(folder) if local else settings.model
