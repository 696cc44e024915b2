"""Which way a model goes in a vLLM release: for capture of hidden states, and for serving an EAGLE-3 draft.

The ladder, best first: `native` (vLLM's own EAGLE-3 interface and extract_hidden_states, with our connector), `shim`
(the same, with the interface added by our plugin), `transformers` (vLLM's Transformers backend, asked for), `hooks`
(eager hooks on the layers), `refused`. Rules by version are in `rules.py`, facts of architectures in `releases.py`.
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from headstart.engines.vllm import rules
from headstart.engines.vllm.arch import Arch
from headstart.engines.vllm.releases import Release

Name = Literal["native", "shim", "transformers", "hooks", "refused"]
Device = Literal["cpu", "cuda"]
BACKEND = "TransformersForCausalLM"


@dataclass(frozen=True)
class Rung:
    """One step of the ladder, and why it is this one, in one line for people."""

    name: Name
    why: str

    @property
    def works(self) -> bool:
        return self.name != "refused"


@dataclass(frozen=True)
class Entry:
    """An architecture in a census."""

    arch: Arch
    capture: Rung
    serve: Rung


@dataclass(frozen=True)
class Census:
    """Every architecture of a release that generates text. decoders: those that are decoder language models (no
    encoder-decoder, no diffusion) and that vLLM itself runs on the device; `share` of them can be captured."""

    version: str
    device: Device
    entries: tuple[Entry, ...]
    decoders: tuple[Entry, ...]

    @property
    def share(self) -> float:
        return sum(entry.capture.works for entry in self.decoders) / max(len(self.decoders), 1)

    def totals(self, use: Literal["capture", "serve"]) -> dict[str, int]:
        """How many architectures are on each rung."""
        return dict(Counter(getattr(entry, use).name for entry in self.entries).most_common())


def capture_rung(
    release: Release, architecture: str, *, device: Device = "cuda", inner: str | None = None, pipeline: int = 1
) -> Rung:
    """The way to this model's hidden states.

    inner: the architecture of the text model inside a wrapper, where the configuration says so (`inner_architecture`).
    pipeline: the pipeline-parallel size that is asked for.
    """
    if (arch := release.archs.get(architecture)) is None:
        return _unknown(release, architecture)
    if pipeline > 1:
        return Rung("refused", rules.PIPELINE)
    if why := rules.no_capture(arch, release, device):
        return Rung("refused", why)
    if not release.at_least(rules.SANE_EXTRACTION):
        return Rung("hooks", f"{_says(release, arch, inner)}; {rules.before_extraction(release)}")
    found = _interface(release, arch, inner)
    if found.name == "native" and not _decoder(release, arch, inner).last_layer:
        return Rung("shim", f"{arch.cls} does not hand over the state behind its last layer; headstart's plugin does")
    return found


def serve_rung(
    release: Release, architecture: str, *, device: Device = "cuda", inner: str | None = None, pipeline: int = 1
) -> Rung:
    """The way to serve an EAGLE-3 draft beside this model. Arguments as of `capture_rung`."""
    if (arch := release.archs.get(architecture)) is None:
        return _unknown(release, architecture)
    if why := rules.no_serving(arch, release, device, pipeline):
        return Rung("refused", why)
    found = _interface(release, arch, inner)
    if release.at_least(rules.ANY_MODEL_TYPE):
        return found
    if found.name == "shim":
        return Rung("refused", f"{_says(release, arch, inner)}; {rules.FIXED_LIST}")
    return Rung("native", f"{found.why}, if its model_type is on the list that vLLM checks before 0.22")


def census(release: Release, device: Device = "cuda") -> Census:
    """Every architecture that generates text, with its rungs."""
    names = [arch.name for arch in release.archs.values() if arch.name not in rules.BACKENDS]
    entries = tuple(
        Entry(release.archs[name], capture_rung(release, name, device=device), serve_rung(release, name, device=device))
        for name in names
    )
    decoders = (e for e in entries if not (rules.not_a_decoder(e.arch) or rules.not_served(e.arch, release, device)))
    return Census(release.version, device, entries, tuple(decoders))


def inner_architecture(text: Mapping[str, Any]) -> str | None:
    """The architecture that a wrapper's text configuration stands for, None when it does not say."""
    names = text.get("architectures")
    if isinstance(names, list) and names:
        return str(names[0])
    return rules.ARCHITECTURE_OF.get(str(text.get("model_type")))


def _interface(release: Release, arch: Arch, inner: str | None) -> Rung:
    """Native where vLLM's own interface works, else our shim."""
    says = _says(release, arch, inner)
    if delivers(release, arch, inner):
        return Rung("native", says)
    passes = "; its layers run several times for one token, the last pass counts" if arch.loops else ""
    return Rung("shim", f"{says}; headstart's plugin adds it{passes}")


def delivers(release: Release, arch: Arch, inner: str | None = None) -> bool:
    """Whether vLLM's own EAGLE-3 interface works for it; False where that hangs on an unknown text model."""
    if arch.delivers is None:
        within = release.archs.get(inner or "")
        return bool(within and within.delivers)
    return arch.delivers


def _decoder(release: Release, arch: Arch, inner: str | None) -> Arch:
    return release.archs.get(inner or "", arch) if arch.inner is None else arch


def _says(release: Release, arch: Arch, inner: str | None) -> str:
    """What the release's class can do, in words."""
    version = f"vLLM {release.version}"
    if delivers(release, arch, inner):
        through = " through its Transformers backend" if arch.table == "transformers" else ""
        return f"{version} serves {arch.name}{through} with the EAGLE-3 interface"
    if arch.delivers is None:
        within = (
            f"its text model {inner} does not deliver" if inner else "its text model is chosen by the configuration"
        )
        return f"{arch.cls} of {version} passes the EAGLE-3 interface on, but {within}"
    if arch.eagle3:
        return f"{arch.cls} of {version} carries the EAGLE-3 flag, but {arch.inner} hands over no states"
    return f"{arch.cls} of {version} has no EAGLE-3 interface"


def _unknown(release: Release, architecture: str) -> Rung:
    missing = f"vLLM {release.version} does not know {architecture}"
    backend = release.archs.get(BACKEND)
    if not rules.like_a_decoder(architecture):
        return Rung("refused", f"{missing}, and by its name it is not a decoder language model")
    if backend and backend.delivers and release.at_least(rules.SANE_EXTRACTION):
        return Rung("transformers", f"{missing}; its Transformers backend runs what Transformers itself knows")
    near = difflib.get_close_matches(architecture, release.archs, n=3, cutoff=0.6)
    return Rung("refused", missing + (f"; it has {', '.join(near)}" if near else ""))
