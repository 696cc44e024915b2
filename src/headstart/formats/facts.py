"""What the exported folders say of the target, read from its config.json."""

from __future__ import annotations

from pathlib import Path

from headstart import files
from headstart.config import Run, Target
from headstart.formats import common
from headstart.formats.common import ExportFacts
from headstart.target.source import SHIPPED, resolve
from headstart.target.spellings import find_text


def target_facts(run: Run) -> ExportFacts:
    """The facts for an export of this run. Raises UserError when the target cannot be found."""
    settings = run.target
    folder = resolve(settings.model, settings.revision, weights=False)
    config = files.read_json(folder / common.CONFIG)
    _, text = find_text(config, settings.model)
    ends = text.get("eos_token_id", config.get("eos_token_id"))
    return ExportFacts(
        target=_served_name(settings, folder),
        architectures=tuple(config.get("architectures") or ()),
        target_type=text.get("model_type") or config["model_type"],
        bos_id=text.get("bos_token_id", config.get("bos_token_id")),
        eos_ids=tuple(ends) if isinstance(ends, list) else () if ends is None else (ends,),
        draft_tokens=run.evaluate.draft_tokens,
        embed_tokens=run.export.embed_tokens,
    )


def _served_name(settings: Target, folder: Path) -> str:
    local = settings.model == SHIPPED or Path(settings.model).expanduser().exists()
    return str(folder) if local else settings.model
