"""The serving check from end to end: export, serve without and with the draft, compare, and look for the cause."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headstart import files
from headstart.config import Run
from headstart.drafts.eagle3 import Eagle3
from headstart.engines.base import Engine, Use
from headstart.engines.load import open_engine
from headstart.engines.vllm import served
from headstart.engines.vllm.records import Served
from headstart.engines.vllm.served import Asked, Drafting
from headstart.evaluation import faults, serving
from headstart.evaluation.bench import NO_DRAFT, Answer
from headstart.evaluation.faults import Fault, Replayed
from headstart.evaluation.prompts import EvalPrompt
from headstart.evaluation.replay import capture_sequences, off_devices, on_spare_device
from headstart.evaluation.serving import NO_FAULT, Cause, Reference
from headstart.events import Events
from headstart.formats import vllm
from headstart.formats.facts import target_facts
from headstart.target import anatomy
from headstart.target.anatomy import Anatomy
from headstart.target.source import resolve

TRAINED, UNTRAINED = "trained", "untrained"
_CHATS = 4  # prompts whose messages vLLM renders too
_EXAMINED = 48  # prompts whose states are captured to look for a cause
_JUDGED = 8  # changed answers for which the target is asked how near a tie it was


@dataclass(frozen=True)
class ServingCheck:
    """One check. drafts: the trained one and, where it is measured, the untrained. scratch: keeps what was served over
    a kill."""

    run: Run
    prompts: Sequence[EvalPrompt]
    end_ids: tuple[int, ...]
    drafts: Mapping[str, Eagle3]
    scratch: Path
    events: Events

    def measure(self, reference: Reference) -> dict[str, Any]:
        """The `serving` part of scores.json.

        Raises:
            UserError: vLLM cannot serve the target with a draft, or dies.
            GateError: vLLM did not use the draft.
        """
        settings = self.run.evaluate
        off_devices(self.drafts)
        folder = self.scratch / "served-draft"
        vllm.write(folder, self.drafts[TRAINED], target_facts(self.run))
        plain = self._serve("plain", None)
        drafted = self._serve("drafted", Drafting(folder, settings.draft_tokens))
        found = serving.section(plain, drafted, reference, settings.draft_tokens, settings.seed)
        found["other_prompts"] = serving.other_prompts([prompt.ids for prompt in self.prompts], plain)
        apart, differs = serving.mismatches(plain, drafted), found["agreement"]["verdict"] == "differs"
        examined = self._examine(plain, drafted, apart, differs) if apart or differs else ([], ())
        found["mismatches"], causes = examined
        return found | {"causes": [cause.as_json() for cause in causes]}

    def _serve(self, name: str, drafting: Drafting | None) -> Served:
        """Answers that an earlier attempt got of the same prompts are not asked for again."""
        kept, of = self.scratch / f"{name}.json", files.sha256_json([prompt.key for prompt in self.prompts])
        try:
            raw = files.read_json(kept)
            if raw["of"] == of:
                return Served.from_json(raw["served"])
        except (OSError, ValueError, KeyError, TypeError):  # not served yet, or cut short
            pass
        words = "with the draft" if drafting else "without a draft"
        self.events.say(f"  starting vLLM {words}")
        total = self.run.evaluate.max_new_tokens * len(self.prompts)
        with self.events.progress(f"vLLM {words}", total, "tokens") as progress:
            made = served.serve(self.run.target, self._asked(), drafting, progress.advance)
        files.write_json(kept, {"of": of, "served": made.as_json()})
        return made

    def _asked(self) -> Asked:
        return Asked(
            prompts=tuple(prompt.as_prompt() for prompt in self.prompts),
            chats=tuple(prompt.messages for prompt in self.prompts[:_CHATS] if prompt.messages),
            max_new_tokens=self.run.evaluate.max_new_tokens,
            end_ids=self.end_ids,
            latent=self.drafts[TRAINED].shape.latent is not None,
        )

    def _examine(
        self, plain: Served, drafted: Served, apart: Sequence[tuple[int, int]], differs: bool
    ) -> tuple[list[dict[str, Any]], tuple[Cause, ...]]:
        """Open the target again: how near a tie each changed answer was, and which fault explains another tau."""
        self.events.say("  vLLM differs: looking for the reason in the target's states")
        target = self.run.target
        shape = anatomy.inspect(resolve(target.model, target.revision, weights=False))
        boundaries = faults.needed(self._known(shape)) if differs else None
        engine = open_engine(target, self._use(boundaries))
        try:
            judged = [
                self._judge(engine if number < _JUDGED else None, plain, drafted, *place)
                for number, place in enumerate(apart)
            ]
            if not differs:
                return judged, ()
            on_spare_device(self.drafts)
            return judged, self._causes(engine, drafted, self._known(shape))
        finally:
            engine.close()

    def _use(self, boundaries: tuple[int, ...] | None) -> Use:
        longest = max(len(prompt.ids) for prompt in self.prompts) + self.run.evaluate.max_new_tokens
        batch_tokens = self.run.capture.batch_tokens
        return Use(longest, batch_tokens=batch_tokens, boundaries=boundaries)

    def _judge(
        self, engine: Engine | None, plain: Served, drafted: Served, index: int, position: int
    ) -> dict[str, Any]:
        prompt, answer, gap = self.prompts[index], plain.answers[index], None
        if engine is not None:
            values = engine.top_log_probs([*prompt.ids, *answer.ids[:position]], 2).values[-1]
            gap = float(values[0] - values[1])
        found = serving.judge(answer, drafted.answers[index], position, gap, plain.dtype)
        return {"set": prompt.set, "prompt": prompt.id, **found}

    def _known(self, shape: Anatomy) -> list[Fault]:
        """The draft as it is, then every fault that is looked for."""
        drafts = self.drafts
        factor = (shape.rope_scaling or {}).get("factor")
        others = faults.candidates(
            drafts[TRAINED],
            shape.required("num_layers"),
            thetas=[shape.rope_theta] if shape.rope_theta else [],
            factors=[float(factor)] if isinstance(factor, (int, float)) else [],
            untrained=drafts.get(UNTRAINED),
            lowest=1 if self.run.target.engine == "vllm" else 0,  # some of its classes have no state before layer 0
        )
        return [faults.no_fault(drafts[TRAINED]), *others]

    def _causes(self, engine: Engine, drafted: Served, known: Sequence[Fault]) -> tuple[Cause, ...]:
        """Every fault replayed on the states of the very answers that vLLM gave."""
        chosen = range(min(len(self.prompts), _EXAMINED))
        logs = faults.walk_all(known, self._sequences(engine, drafted, known, chosen), self.run.evaluate.draft_tokens)
        keys = [self.prompts[index].key for index in chosen]
        found = [
            (fault.kind, _words(fault), [by_key[key] for key in keys])
            for fault, by_key in zip(known, logs, strict=True)
        ]
        return serving.likely([drafted.answers[index] for index in chosen], found, self.run.evaluate.seed)

    def _sequences(
        self, engine: Engine, drafted: Served, known: Sequence[Fault], chosen: Sequence[int]
    ) -> Iterator[Replayed]:
        lengths = {self.prompts[index].key: len(self.prompts[index].ids) for index in chosen}
        wanted = {self.prompts[i].key: (*self.prompts[i].ids, *drafted.answers[i].ids) for i in chosen}
        boundaries = faults.needed(known)
        for states in capture_sequences(engine, wanted, boundaries, self.run.capture.batch_tokens):
            yield Replayed(states.id, states.ids, lengths[states.id], states.aux)


def reference_of(answers: Sequence[Answer], how: str) -> Reference:
    """Our decoder's greedy answers with the trained draft, in the order of the prompts. how: see `Reference`."""
    greedy = [answer for answer in answers if answer.temperature == 0]
    plain = [answer.ids for answer in greedy if answer.draft == NO_DRAFT]
    return Reference(how, tuple(plain), tuple(answer.log for answer in greedy if answer.draft == TRAINED))


def _words(fault: Fault) -> str:
    if fault.kind != NO_FAULT:
        return fault.says
    return "on vLLM's own answers when all is right: the target answers differently there than in the reference"
