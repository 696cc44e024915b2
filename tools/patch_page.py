"""docs/patch-speculators.md: the words of patch_page.md.in, what the command prints, and its diff of a released file."""

from __future__ import annotations

from pathlib import Path

from headstart.patches import environment, releases, speculators
from old_speculators import fetched

SHOWN = "0.4.0.1"
SITE = Path("ENV/lib/python3.11/site-packages/speculators")

WORDS = Path(__file__).with_name("patch_page.md.in")


def page(note: str) -> str:
    original = fetched(SHOWN) / "speculators" / environment.FILE
    installed = environment.Installed("ENV/bin/python", SITE / environment.FILE, SHOWN, "0.16.0")
    before = original.read_bytes()
    after = speculators.patched(before, installed.file)
    change = speculators.Change(installed.file, installed.backup, before, after, keeps=True)
    cannot = releases.not_mended(SHOWN, installed.vllm)
    return WORDS.read_text(encoding="utf-8").format(
        note=note,
        told="\n".join(speculators.told(installed, change)),
        mended="\n".join(f"- {line}" for line in releases.MENDED),
        cannot="\n".join(f"- {line}" for line in cannot),
        version=SHOWN,
        diff=change.diff,
    )
