"""What is known of each speculators release with a `custom_worker.py`. All version logic of the patch stands here.

Read in the released files of 0.3.0, 0.4.0 and 0.4.0.1, and in vLLM 0.11 to 0.17 for what the generator calls there.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Release:
    """Versions of speculators with the same `custom_worker.py`.

    sha256: of that file. engines: first and last vLLM on which the generator beside it runs ("0.16" is any 0.16.x).
    cannot: what a changed `custom_worker.py` does not mend.
    """

    versions: tuple[str, ...]
    sha256: str
    engines: tuple[str, str]
    cannot: tuple[str, ...]

    def runs_on(self, vllm: str) -> bool:
        first, last = (_numbers(end) for end in self.engines)
        found = _numbers(vllm)
        return first <= found and found[: len(last)] <= last


_ALWAYS = (
    "pictures and sound: the generator sends token ids alone, so states are those of text",
    "pipeline parallelism: the generator asks one worker only; it is refused",
    "models that repeat their layers, or do something of their own between the last layer and the final norm: refused",
    "hybrids with Mamba or linear attention: the generator puts all layers into one KV cache group",
)
_ORDER = "rows of a batch are told apart by the order of the prompts alone, which the engine may change"

RELEASES = (
    Release(
        versions=("0.3.0",),
        sha256="e9a95cf6422fa3e3efb3edb658e4898ba23ee141619f58d7096ea7fbde8af548",
        engines=("0.11.0", "0.11.0"),  # 0.11.2's scheduler wants block_size, 0.12 takes no kv_cache_specs
        cannot=(_ORDER, *_ALWAYS),
    ),
    Release(
        versions=("0.4.0", "0.4.0.1"),
        sha256="6bc791477d99cc885e9344f47f7a6bcd1f0b1377a453ebb11d368999aa08df1e",
        engines=("0.12", "0.16"),  # 0.17's Request takes no eos_token_id
        cannot=_ALWAYS,
    ),
)

MENDED = (
    "the text model is found in any wrapper: EAGLE-3's path where the model has that interface, get_language_model(),"
    " language_model.model, model.language_model, language_model, then a search of the modules",
    "layers are read by forward hooks and the model's own forward runs, so the name of its embedding (get_input_embeddings,"
    " embed_input_ids) and further arguments of it and of its layers do not matter",
    "layers that return one tensor, or None as residual",
    "layers whose output has the residual inside already: every pass is checked against the final norm",
    "a pass whose rows do not fit its requests stops with an error",
)

LAYER_IDS = (
    "layer ids keep speculators' meaning, the output of a layer: id i is i + 1 among vLLM's aux layer ids and headstart's"
    " boundaries"
)


def known(sha256: str) -> Release | None:
    """The release whose file has this digest."""
    return next((release for release in RELEASES if release.sha256 == sha256), None)


def of_version(version: str | None) -> Release | None:
    return next((release for release in RELEASES if version in release.versions), None)


def not_mended(version: str | None, vllm: str | None) -> tuple[str, ...]:
    """What stays as it was for speculators `version` on `vllm` (None: not installed)."""
    release = of_version(version)
    if release is None:
        return _ALWAYS
    if vllm is None or release.runs_on(vllm):
        return release.cannot
    better = next((f"; that of {other.versions[-1]} does" for other in RELEASES if other.runs_on(vllm)), "")
    engines = " to ".join(dict.fromkeys(release.engines))
    return (f"the generator of {version} runs on vLLM {engines}, not on {vllm}{better}", *release.cannot)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])
