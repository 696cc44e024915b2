"""Serving with a draft, as measured: what vLLM answers, how long it takes, and what its counters say.

One request at a time, greedy: nothing but the draft differs between two runs, and the counters belong to one prompt.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from headstart.config import Target
from headstart.engines.base import Use
from headstart.engines.vllm import arguments, ladder, releases
from headstart.engines.vllm.arguments import Plan
from headstart.engines.vllm.ladder import Device, Rung
from headstart.engines.vllm.launch import Host, Refused
from headstart.engines.vllm.proof import check_plugin
from headstart.engines.vllm.records import Counters, Served, ServedAnswer
from headstart.engines.vllm.rope import check_rope
from headstart.engines.vllm.start import device_of, text_config
from headstart.errors import UserError
from headstart.target import anatomy
from headstart.target.anatomy import Anatomy
from headstart.target.source import resolve
from headstart.types import Message, Prompt

_WARM_UP = 8  # tokens decoded and thrown away, so that first calls are not timed
_PREFIX = "vllm:spec_decode_num_"


@dataclass(frozen=True)
class Asked:
    """What is to be answered. chats: the messages of the first prompts. end_ids end an answer, and nothing else does. latent: the
    draft's attention is MLA, and the target is read the same way with it and without."""

    prompts: tuple[Prompt, ...]
    chats: tuple[tuple[Message, ...], ...]
    max_new_tokens: int
    end_ids: tuple[int, ...]
    latent: bool = False

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt with its answer."""
        return max(len(prompt.ids) for prompt in self.prompts) + self.max_new_tokens


@dataclass(frozen=True)
class Drafting:
    """A draft to serve with: its folder, in vLLM's format, and K."""

    folder: Path
    draft_tokens: int


@dataclass(frozen=True)
class Way:
    """How a target is served with a draft."""

    folder: Path
    anatomy: Anatomy
    rung: Rung
    device: Device


def way_of(target: Target) -> Way:
    """Read from the target's config.json and the installed vLLM's sources, in seconds; no weights are needed.

    Raises:
        UserError: there is no vLLM, or it cannot serve this target with an EAGLE-3 draft; says why.
    """
    release = releases.installed(target.python)
    if release is None:
        raise UserError(
            f"evaluate.engine = 'vllm', but there is no vLLM in {target.python or 'this Python'}",
            do=f"{target.python or sys.executable} -m pip install vllm; or set target.python to a Python that has it",
        )
    folder = resolve(target.model, target.revision, weights=False)
    shape, device = anatomy.inspect(folder), device_of(target, release)
    inner = ladder.inner_architecture(text_config(folder))
    rung = ladder.serve_rung(release, str(shape.architecture), device=device, inner=inner)
    if not rung.works:
        raise UserError(
            f"{target.model} cannot be served with a draft in vLLM {release.version}: {rung.why}",
            do="headstart doctor says what can; or set evaluate.engine = 'transformers'",
        )
    return Way(folder, shape, rung, device)


def plan_of(target: Target, way: Way, asked: Asked, drafting: Drafting | None) -> Plan:
    """How vLLM is started. Raises UserError for an engine option that cannot be, or too long prompts."""
    longest = asked.longest + (drafting.draft_tokens if drafting else 0)
    use = Use(longest, batch_size=1, batch_tokens=longest)
    found = arguments.base_arguments(way.folder, target, use, way.anatomy, way.device)
    found["enable_prefix_caching"] = False  # every prompt is read whole, with and without the draft
    found["skip_tokenizer_init"] = not asked.chats or drafting is not None
    environment = arguments.base_environment(target, use, way.anatomy, way.device)
    if asked.latent:
        environment = {name: value for name, value in environment.items() if name not in arguments.MLA_AS_HEADS}
    if way.rung.name == "transformers":
        found["hf_overrides"] = {"architectures": [arguments.BACKEND[way.anatomy.wrapper]]}
    if drafting:
        model, depth = str(drafting.folder), drafting.draft_tokens
        found["speculative_config"] = {"method": "eagle3", "model": model, "num_speculative_tokens": depth}
        if way.rung.name == "shim":
            environment |= arguments.shim_environment(target, way.anatomy)
    found = arguments.with_options(found, target, capturing=False)
    return Plan(target.python, environment, found, target.layers_path)


def serve(target: Target, asked: Asked, drafting: Drafting | None, tell: Callable[[int], None]) -> Served:
    """Start vLLM with or without a draft, answer every prompt, stop it.

    tell: hears how many tokens each answer has.

    Raises:
        UserError: vLLM cannot serve this target with a draft, does not start, dies, or refuses a prompt; shows why.
        GateError: the plugin did not load in a worker, or vLLM reads another rotary base than the target has.
    """
    way = way_of(target)
    way = replace(way, folder=resolve(target.model, target.revision))
    plan = plan_of(target, way, asked, drafting)
    host = Host(plan.python, plan.environment)
    try:
        facts = host.ask("start", arguments=dict(plan.arguments), layers_path=plan.layers_path)
        check_plugin(plan, facts)
        check_rope(way.anatomy, facts)
        _answer(host, asked, asked.prompts[0], _WARM_UP)
        answers = []
        for prompt in asked.prompts:
            answers.append(_timed(host, asked, prompt, counted=drafting is not None))
            tell(len(answers[-1].ids))
        chat_ids = () if plan.arguments["skip_tokenizer_init"] else _chat(host, asked)
    except Refused as refused:
        raise UserError(f"vLLM cannot serve this: {refused}\n{host.tail()}") from None
    finally:
        host.close()
    return Served(facts["version"], way.rung.name, way.rung.why, facts["dtype"], tuple(answers), chat_ids)


def _timed(host: Host, asked: Asked, prompt: Prompt, *, counted: bool) -> ServedAnswer:
    before = _counters(host) if counted else None
    started = time.perf_counter()
    ids = _answer(host, asked, prompt, asked.max_new_tokens)
    seconds = time.perf_counter() - started
    return ServedAnswer(ids, seconds, _counters(host).since(before) if before else None)


def _answer(host: Host, asked: Asked, prompt: Prompt, max_new_tokens: int) -> tuple[int, ...]:
    sampling = {"temperature": 0.0, "max_tokens": max_new_tokens, "stop_token_ids": list(asked.end_ids)}
    request = {"id": prompt.id, "ids": list(prompt.ids)}
    ids: tuple[int, ...] = ()
    for event in host.events("generate", requests=[request], sampling=sampling):
        if event["event"] == "finished":
            ids = tuple(event["ids"])
        elif event["event"] == "refused":
            raise Refused(f"prompt {prompt.id}: {event['why']}")
    return ids


def _counters(host: Host) -> Counters:
    found = host.ask("metrics")["counters"]
    per_position = found.get(f"{_PREFIX}accepted_tokens_per_pos") or ()
    return Counters(
        drafts=int(found.get(f"{_PREFIX}drafts", 0)),
        draft_tokens=int(found.get(f"{_PREFIX}draft_tokens", 0)),
        accepted=int(found.get(f"{_PREFIX}accepted_tokens", 0)),
        per_position=tuple(map(int, per_position)),
    )


def _chat(host: Host, asked: Asked) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(ids) for ids in host.ask("chat", chats=[list(chat) for chat in asked.chats])["ids"])
