"""export: the trained draft into folders that serving engines load, each read back and compared before it counts.

Compared are the shape, every tensor bit for bit, and the logits of a draft rebuilt from the folder alone. Which
versions of vLLM would load the folder is told from a table, without vLLM.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from headstart.drafts.checkpoint import load_draft
from headstart.drafts.eagle3 import DraftCache, Eagle3
from headstart.engines.vllm import ladder, releases
from headstart.engines.vllm.variables import SHIM
from headstart.errors import GateError
from headstart.formats import fields, speculators, tensors, vllm
from headstart.formats.common import ExportFacts
from headstart.formats.facts import target_facts
from headstart.pipeline import Context
from headstart.target.head import TargetHead

FORMATS: dict[str, ModuleType] = {"vllm": vllm, "speculators": speculators}
_PROBE_ROWS = 12
NEWEST = "0.32.0"  # the last release in the table of engines/vllm


def run(context: Context) -> None:
    """Make `export/`: one folder for each format.

    Raises:
        UserError: the draft, or what is wanted of its embedding, does not fit a format.
        GateError: a folder does not give back the draft that was written into it.
    """
    formats = list(dict.fromkeys(context.run.export.formats))
    parents = context.parents()
    head = TargetHead.read(parents["states"].path)
    draft = load_draft(parents["draft"].path, head)
    facts = target_facts(context.run)
    with context.create() as build:
        for name in formats:
            folder = build.file(name)
            FORMATS[name].write(folder, draft, facts)
            build.facts[name] = {"read_back": read_back(name, folder, draft, head), "vllm": _verdicts(name, folder)}
            build.counts[f"{name}_bytes"] = sum(file.stat().st_size for file in folder.iterdir())
        build.counts["parameters"] = sum(parameter.numel() for parameter in draft.parameters())
        build.facts["dtype"] = str(draft.fc.weight.dtype).removeprefix("torch.")
        build.facts["serve"] = serve_command(context.path, formats, facts)
        _tell(context, build.counts, build.facts, formats)


def read_back(name: str, folder: Path, draft: Eagle3, head: TargetHead) -> dict[str, Any]:
    """Compare what is in `folder` with the draft. Raises GateError when anything differs; returns what was compared."""
    shape, found = FORMATS[name].read(folder)
    if shape != draft.shape:
        raise GateError(f"the {name} export describes another draft", looked_for=f"{draft.shape}, found {shape}")
    wanted = {**draft.state_dict(), "draft_to_target": draft.draft_to_target}
    kept = found.get("embed_tokens")
    if kept is not None and not _same(kept, head.embed):
        raise GateError(f"the embedding in the {name} export is not the target's")
    for key, tensor in wanted.items():
        if key not in found or not _same(found[key], tensor):
            raise GateError(f"{key} in the {name} export is not the tensor that was written")
    again = probe(tensors.rebuild(shape, found, head.embed))
    if not torch.equal(again, probe(draft)):
        raise GateError(
            f"the draft rebuilt from the {name} export gives other logits", looked_for="equal logits, bit for bit"
        )
    return {"tensors": len(found), "logits_compared": again.numel(), "max_difference": 0.0}


def probe(draft: Eagle3) -> Tensor:
    """Logits [2 * 12, Vd] of random states and tokens: a prefix, then a second step on the draft's own outputs."""
    shape, dtype = draft.shape, draft.fc.weight.dtype
    generator = torch.Generator().manual_seed(0)
    aux = torch.randn(_PROBE_ROWS, len(shape.aux_layers), shape.target_hidden_size, generator=generator).to(dtype)
    ids = torch.randint(len(draft.embed_tokens), (2, _PROBE_ROWS), generator=generator)
    cache = DraftCache()
    with torch.no_grad():
        first = draft.extend(ids[0], draft.fuse(aux), cache)
        second = draft.extend(ids[1], draft.feed(first), cache)
        return draft.logits(torch.cat((first, second)))


def serve_command(path: Path, formats: Sequence[str], facts: ExportFacts) -> str:
    """The shell line that serves the target with this draft."""
    if "vllm" not in formats:
        return shlex.join(["vllm", "serve", str(path.resolve() / "speculators")])
    speculation = {
        "method": "eagle3",
        "model": str(path.resolve() / "vllm"),
        "num_speculative_tokens": facts.draft_tokens,
    }
    line = shlex.join(["vllm", "serve", facts.target, "--speculative-config", json.dumps(speculation)])
    return f"{SHIM}={shlex.quote(facts.architectures[0])} {line}" if needs_shim(facts) else line


def needs_shim(facts: ExportFacts) -> bool:
    """Whether the newest vLLM that is known serves this target with our plugin alone, which has to be installed beside it."""
    if not facts.architectures:
        return False
    inner = ladder.inner_architecture({"model_type": facts.target_type})
    return ladder.serve_rung(releases.known(NEWEST), facts.architectures[0], inner=inner).name == "shim"


def _same(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one.cpu(), other.cpu())


def _verdicts(name: str, folder: Path) -> dict[str, list[str]]:
    """What speaks against each version of vLLM in the table."""
    config, names = fields.read_config(folder), tensors.names_in(folder)
    return {version: FORMATS[name].check(config, version, names) for version in vllm.VERSIONS}


def _tell(context: Context, counts: Mapping[str, Any], facts: Mapping[str, Any], formats: Sequence[str]) -> None:
    for name in formats:
        size, compared = counts[f"{name}_bytes"] / 1e6, facts[name]["read_back"]
        good = [version for version, against in facts[name]["vllm"].items() if not against]
        loads = f"vLLM {good[0]} to {good[-1]} load it" if good else "no version of vLLM loads it"
        context.events.say(f"  {name}: {size:.1f} MB, {compared['tensors']} tensors equal when read back; {loads}")
        against = {said for says in facts[name]["vllm"].values() for said in says}
        for said in sorted(against):
            context.events.say(f"    {said}")
    context.events.say(f"  serve it: {facts['serve']}")
