"""Checks of the target alone: its name, its vocabulary, its template, its ends, what cannot be known before it is loaded."""

from __future__ import annotations

from collections.abc import Iterator

from headstart.doctor.checks import Check
from headstart.doctor.subject import Subject
from headstart.target.anatomy import Anatomy


def target_checks(subject: Subject) -> Iterator[Check]:
    """All of them that the files at hand allow."""
    anatomy = subject.anatomy
    yield _architecture(anatomy)
    yield _shape(anatomy)
    yield _head(anatomy)
    if subject.folder is None:
        what = "a lone configuration: tokenizer, chat template, generation config and weights were not looked at"
        yield Check("files", "warn", what, "give the model's folder or its hub id")
    else:
        yield _vocabulary(anatomy)
        yield _template(subject)
        yield _ends(anatomy)
    if anatomy.remote_code:
        yield _remote_code(subject)


def _architecture(anatomy: Anatomy) -> Check:
    name, evidence = "architecture", anatomy.evidence["architecture"]
    if anatomy.architecture is None:
        what = f"the configuration names no class, and none is known for model_type {anatomy.model_type}"
        return Check(name, "stop", what, "add `architectures` to config.json")
    around = f" around {anatomy.text_architecture}" if anatomy.text_architecture else ""
    if evidence == "architectures":
        return Check(name, "go", f"{anatomy.architecture}{around}")
    fix = f'target.engine_options = {{hf_overrides = {{architectures = ["{anatomy.architecture}"]}}}}'
    return Check(name, "warn", f"{anatomy.architecture}: {evidence}", f"add it to config.json, or set {fix}")


def _shape(anatomy: Anatomy) -> Check:
    unknown = [name for name in ("num_layers", "hidden_size", "vocab_size") if getattr(anatomy, name) is None]
    if unknown:
        return Check("shape", "stop", f"unknown: {', '.join(unknown)}", "give the whole configuration")
    special = {"MLA": anatomy.mla, "mixture of experts": anatomy.moe, "hybrid layers": anatomy.hybrid}
    kinds = ", ".join(name for name, there in special.items() if there)
    where = f", {anatomy.quantization} in {anatomy.evidence['quantization']}" if anatomy.quantization else ""
    sizes = f"{anatomy.num_layers} layers of width {anatomy.hidden_size} at {anatomy.layers_path}"
    return Check("shape", "go", f"{sizes}, vocabulary {anatomy.vocab_size}{', ' if kinds else ''}{kinds}{where}")


def _head(anatomy: Anatomy) -> Check:
    """What the identity check will rest on."""
    scale = "" if anatomy.logit_scale is None else f", logits times {anatomy.logit_scale:g}"
    cap = "" if anatomy.softcap is None else f", logits capped at {anatomy.softcap:g}"
    if anatomy.norm == "unknown":
        what = f"the final norm of model_type {anatomy.model_type} is not known from its files{scale}{cap}"
        return Check("head", "warn", what, "it is probed when the target is loaded; the identity check decides")
    tied = {True: "tied to the embedding", False: "of its own", None: "tied or not: unknown"}[anatomy.tied_head]
    return Check("head", "go", f"final norm {anatomy.norm}, head {tied}{scale}{cap}")


def _vocabulary(anatomy: Anatomy) -> Check:
    name, rows, known = "vocabulary", anatomy.vocab_size, anatomy.tokenizer_size
    if rows is None or known is None:
        why = anatomy.evidence["vocab_size" if rows is None else "tokenizer_size"]
        return Check(name, "warn", f"not compared: {why}", "put tokenizer.json into the model's folder")
    if known > rows:
        what = f"the tokenizer knows {known:,} ids, the model has {rows:,} rows"
        return Check(name, "warn", what, "ids without a row must not occur: check added tokens of the tokenizer")
    padding = f", {rows - known:,} of them padding" if rows > known else ""
    return Check(name, "go", f"{rows:,} rows{padding}")


def _template(subject: Subject) -> Check:
    assert subject.tokenizer is not None
    source, file = subject.tokenizer.template
    if source is None:
        verdict = "stop" if subject.run else "warn"
        what = "there is no chat template in the folder"
        return Check("chat template", verdict, what, "use the instruction-tuned model, or put its template beside it")
    try:
        from headstart.doctor import template  # noqa: PLC0415 (needs jinja2)
    except ModuleNotFoundError:
        return Check("chat template", "warn", f"{file}: not checked, jinja2 is missing", "pip install jinja2")
    return template.check(source, file, subject.tokenizer.special)


def _ends(anatomy: Anatomy) -> Check:
    if anatomy.eos_ids:
        return Check("end of turn", "go", f"ids {', '.join(map(str, anatomy.eos_ids))} ({anatomy.evidence['eos_ids']})")
    return Check("end of turn", "warn", "no file names an id that ends a text", "add generation_config.json")


def _remote_code(subject: Subject) -> Check:
    """Whether it is needed shows only when model and tokenizer are loaded: engines know many such models by themselves."""
    name, what = "remote code", "the model's folder ships Python code of its own (auto_map); doctor runs none of it"
    if subject.run is None:
        return Check(name, "go", f"{what}, and a run only with target.trust_remote_code = true")
    if subject.run.target.trust_remote_code:
        return Check(name, "go", f"{what}, the run may: target.trust_remote_code = true")
    return Check(
        name,
        "warn",
        f"{what}, nor does the run: it stops where model or tokenizer cannot be loaded without",
        "if it stops: read the folder's .py files, and where you trust them set target.trust_remote_code = true",
    )
