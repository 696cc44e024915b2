"""The engine `vllm` on the real SmolLM2, against Transformers on the same weights: one start captures and answers."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from fixtures_models import save_llama
from headstart import artifact, config, pipeline
from headstart.config import Target
from headstart.data.gates import fault
from headstart.data.identity import check_identity
from headstart.data.store import StateStore, label_rows
from headstart.engines.base import Refused, States, Use
from headstart.engines.transformers import TransformersEngine
from headstart.engines.vllm.engine import VllmEngine
from headstart.errors import GateError, StageFailed, UserError
from headstart.events import Events
from headstart.target.source import SHIPPED
from headstart.types import Prompt, Sample, Sampling

pytestmark = pytest.mark.slow

AUX = (2, 15, 27)
LENGTHS = (300, 20, 150, 64, 63, 65, 1, 250, 33, 90, 128, 5)
USE = Use(longest=300, batch_size=4, batch_tokens=96, boundaries=AUX)  # several requests at once, the long in chunks


@pytest.fixture(scope="module")
def reference() -> TransformersEngine:
    return TransformersEngine(Target(model=SHIPPED, device="cpu"))


@pytest.fixture(scope="module")
def engine() -> Iterator[VllmEngine]:
    running = VllmEngine(Target(model=SHIPPED, engine="vllm", device="cpu"), USE)
    yield running
    running.close()


@pytest.fixture(scope="module")
def samples() -> list[Sample]:
    rng = np.random.default_rng(0)
    return [sample(f"s{number:02d}", rng.integers(3, 49000, length)) for number, length in enumerate(LENGTHS)]


def sample(name: str, ids: np.ndarray) -> Sample:
    return Sample(name, name, "test", "train", ids.astype(np.int32), np.ones(len(ids), bool), "stop")


def captured(engine: VllmEngine, samples: list[Sample]) -> dict[str, States]:
    found: dict[str, States] = {}
    for states in engine.capture(samples, AUX, 96):
        assert isinstance(states, States)
        assert states.id not in found
        found[states.id] = states
    return found


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Of the row that differs most: the length of the difference over that of the row."""
    return float(((found - wanted).norm(dim=-1) / wanted.norm(dim=-1)).max())


def assert_same_states(running: VllmEngine, reference: TransformersEngine, samples: list[Sample]) -> None:
    found = {states.id: states for states in running.capture(samples, (2, 3, 4), 48)}
    for wanted in reference.capture(samples, (2, 3, 4), 512):
        states = found[wanted.id]
        assert isinstance(states, States)
        assert relative(states.last, wanted.last) < 1e-4
        assert relative(states.aux.movedim(1, 0), wanted.aux.movedim(1, 0)) < 1e-4


def test_states_are_those_of_transformers(
    engine: VllmEngine, reference: TransformersEngine, samples: list[Sample]
) -> None:
    """Twelve requests at once, four at a time, in chunks of 96 tokens; then again, when prefixes are cached."""
    wanted = {states.id: states for states in reference.capture(samples, AUX, 2048)}
    for _ in range(2):
        found = captured(engine, samples)
        assert found.keys() == wanted.keys()
        for item in samples:
            assert found[item.id].ids == tuple(item.input_ids.tolist())
            assert fault(item, found[item.id]) is None or len(item.input_ids) == 1
        for name, states in found.items():
            assert states.last.dtype == torch.float32
            assert relative(states.last, wanted[name].last) < 1e-4
            assert relative(states.aux.movedim(1, 0), wanted[name].aux.movedim(1, 0)) < 1e-4


def test_boundaries_come_in_the_order_asked(engine: VllmEngine, samples: list[Sample]) -> None:
    (some,) = engine.capture(samples[1:2], (15, 27), 96)
    (all_,) = engine.capture(samples[1:2], AUX, 96)
    assert isinstance(some, States)
    assert isinstance(all_, States)
    assert torch.equal(some.aux, all_.aux[:, 1:])
    with pytest.raises(UserError, match=r"boundaries \[2, 15, 27, 30\], not \[29\]"):
        list(engine.capture(samples[:1], (2, 29), 96))


def test_the_head_is_the_targets(engine: VllmEngine, reference: TransformersEngine) -> None:
    own, wanted = engine.head(), reference.head()
    assert own.tied
    assert torch.equal(own.embed, wanted.embed)
    assert torch.equal(own.norm_weight, wanted.norm_weight)
    assert (own.norm_kind, own.norm_offset, own.norm_eps) == ("rms", 0.0, wanted.norm_eps)
    assert (own.softcap, own.scale) == (None, 1.0)


def test_identity_and_what_it_rests_on(engine: VllmEngine, samples: list[Sample]) -> None:
    found = check_identity(engine, engine.head(), samples[:4], AUX, 96)
    assert found.max_dp < 1e-4
    assert found.argmax_agreement == 1.0
    details = engine.info.details
    assert details["rung"] == "native"
    assert details["self_check"]["rule"] == "sum"
    assert details["self_check"]["difference"] < 1e-5
    assert set(details["self_check"]["boundaries"]) == {"2", "15", "27", "30"}
    assert max(details["self_check"]["boundaries"].values()) == 0.0
    assert (engine.info.layers_path, engine.info.num_layers, engine.info.dtype) == ("model.layers", 30, "float32")


def test_log_probabilities_are_those_of_transformers(
    engine: VllmEngine, reference: TransformersEngine, samples: list[Sample]
) -> None:
    ids = samples[3].input_ids.tolist()
    found, wanted = engine.top_log_probs(ids, 5), reference.top_log_probs(ids, 5)
    assert found.ids.shape == (64, 5)
    assert torch.equal(found.ids, wanted.ids)
    torch.testing.assert_close(found.values, wanted.values, atol=1e-3, rtol=0)


def test_answers_are_those_of_transformers(
    engine: VllmEngine, reference: TransformersEngine, samples: list[Sample]
) -> None:
    prompts = [Prompt(item.id, tuple(item.input_ids[:40].tolist())) for item in samples]
    sampling = Sampling(max_new_tokens=16, temperature=0.0, top_p=1.0, seed=0, end_ids=(2,))
    grown: dict[str, int] = {}

    def tell(prompt: str, tokens: int) -> None:
        grown[prompt] = grown.get(prompt, 0) + tokens

    found = {answer.id: answer for answer in engine.generate(prompts, sampling, tell)}
    assert found == {answer.id: answer for answer in reference.generate(prompts, sampling)}
    assert grown == {name: len(answer.ids) for name, answer in found.items() if not isinstance(answer, Refused)}


def test_sampling_while_capturing_is_refused(engine: VllmEngine) -> None:
    """With the extracting drafter vLLM 0.32 repeats the first sampled token for ever, in some requests of a batch."""
    with pytest.raises(GateError, match="samples wrongly"):
        next(engine.generate([Prompt("a", (5, 6))], Sampling(8, 1.0, 0.9, 0, ())))


def test_a_request_that_is_too_long_is_refused_alone(engine: VllmEngine, samples: list[Sample]) -> None:
    long = sample("long", np.full(400, 9))
    answers = {answer.id: answer for answer in engine.capture([samples[1], long, samples[3]], AUX, 96)}
    assert isinstance(answers["s01"], States)
    assert isinstance(answers["s03"], States)
    assert isinstance(answers["long"], Refused)
    assert "400" in answers["long"].why


def test_nothing_stays_in_memory(engine: VllmEngine) -> None:
    left = [path.name for path in engine._host.scratch.iterdir()]
    assert sorted(left) == ["packages", "vllm.log"]


def test_the_engines_death_is_told_with_its_log(engine: VllmEngine, samples: list[Sample]) -> None:
    """The last one: it ends the shared engine."""
    stream = engine.capture(samples, AUX, 96)
    next(stream)
    os.killpg(engine._host.pid, signal.SIGKILL)
    with pytest.raises(UserError, match=r"vLLM ended \(signal SIGKILL\) during capture") as died:
        list(stream)
    assert "lines of its log:\n" in died.value.what
    assert "continues where it stopped" in str(died.value.do)


def test_two_ranks_hand_over_the_states_and_the_whole_head(tmp_path: Path) -> None:
    """Tensor parallel on the CPU; 515 rows of vocabulary are padded and split."""
    folder = save_llama(tmp_path / "target", head_dim=32, vocab_size=515)
    reference = TransformersEngine(Target(model=str(folder), device="cpu"))
    rng = np.random.default_rng(0)
    samples = [sample(f"s{length}", rng.integers(3, 500, length)) for length in (30, 64, 7)]
    running = VllmEngine(
        Target(model=str(folder), engine="vllm", device="cpu", tensor_parallel=2), Use(64, 4, 48, (2, 3, 4))
    )
    try:
        assert_same_states(running, reference, samples)
        head = running.head()
        assert torch.equal(head.embed, reference.head().embed)
        assert torch.equal(head.lm_head, reference.head().lm_head)
    finally:
        running.close()


QUESTIONS = ("Name three colours.", "Who wrote Hamlet?", "What do bees make?", "What is a noun?", "Name a large river.")
QUESTIONS += ("What is two plus two?", "Tell me a joke about cats.", "How many legs does a spider have?")


def test_a_run_continues_after_the_engine_died(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """prepare to capture with vLLM; the engine dies after the first shard, and the same command captures the rest."""
    chats = tmp_path / "chats.jsonl"
    turns = [[{"role": "user", "content": text}, {"role": "assistant", "content": "."}] for text in QUESTIONS]
    chats.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in turns))
    run = config.build(
        {
            "target": {"model": SHIPPED, "engine": "vllm", "device": "cpu"},
            "data": {"sources": [str(chats)], "max_length": 96, "validation_fraction": 0.25},
            "regenerate": {"max_new_tokens": 12, "temperature": 1.0},
            "vocab": {"size": 512},
            "capture": {"shard_tokens": 150},
        }
    )
    root = tmp_path / "run"
    read, answer = VllmEngine.capture, VllmEngine.generate
    engines: list[VllmEngine] = []

    def twice(self: VllmEngine, prompts: list[Prompt], sampling: Sampling, tell: Any = None) -> Iterator[Any]:
        """What is sampled depends on the seed and the prompt, not on the neighbours in the batch."""
        found = {item.id: item for item in answer(self, prompts, sampling, tell)}
        assert {item.id: item for item in answer(self, prompts[3:], sampling)}.items() <= found.items()
        other = {item.id: item for item in answer(self, prompts, replace(sampling, seed=1))}
        assert other != found
        yield from found.values()

    def dying(self: VllmEngine, samples: list[Sample], *rest: Any) -> Iterator[Any]:
        """Killed once a shard is there and another has begun."""
        for states in read(self, samples, *rest):
            yield states
            if list((root / ".states.partial").glob("shard-*.safetensors")):
                engines.append(self)
                os.killpg(self._host.pid, signal.SIGKILL)

    with monkeypatch.context() as patched:
        patched.setattr(VllmEngine, "capture", dying)
        patched.setattr(VllmEngine, "generate", twice)
        with pytest.raises(StageFailed, match=r"stage capture failed: vLLM ended"):
            pipeline.execute_all(run, root, Events(quiet=True), until="capture")
    assert engines
    first = root / ".states.partial" / "shard-00000.safetensors"
    written = first.stat().st_mtime_ns
    pipeline.execute_all(run, root, Events(quiet=True), until="capture")
    made = artifact.open_artifact(root / "states", "states")
    assert (made.path / first.name).stat().st_mtime_ns == written
    assert made.facts["engine"]["name"] == "vllm"
    assert made.facts["engine"]["details"]["rung"] == "native"
    assert made.facts["identity"]["argmax_agreement"] == 1.0
    assert made.counts["samples"] == len(QUESTIONS)
    assert made.counts["dropped"] == {}
    _same_as_transformers(made, AUX)


def _same_as_transformers(made: artifact.Artifact, aux: tuple[int, ...]) -> None:
    """What is stored is what the embedded engine would have stored."""
    opened = StateStore.open(made)
    assert opened.facts["aux_layers"] == list(aux)
    reference = TransformersEngine(Target(model=SHIPPED, device="cpu"))
    stored = {entry.id: opened.read(entry) for entry in opened.entries}
    samples = [sample(name, item.input_ids.numpy()) for name, item in stored.items()]
    for states in reference.capture(samples, aux, 2048):
        rows = label_rows(stored[states.id].supervised.numpy().astype(bool))
        assert relative(stored[states.id].last, states.last[torch.from_numpy(rows)]) < 1e-4
        assert relative(stored[states.id].aux.movedim(1, 0), states.aux.movedim(1, 0)) < 1e-4
    head = load_file(made.path / "head.safetensors")
    assert torch.equal(head["embed"], reference.head().embed)


@pytest.mark.slow
def test_an_architecture_that_vllm_does_not_know_goes_through_its_transformers_backend(tmp_path: Path) -> None:
    folder = save_llama(tmp_path / "target", head_dim=32)
    reference = TransformersEngine(Target(model=str(folder), device="cpu"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["ShinyNewForCausalLM"]}))
    samples = [sample(f"s{length}", np.random.default_rng(length).integers(3, 390, length)) for length in (40, 17)]
    running = VllmEngine(Target(model=str(folder), engine="vllm", device="cpu"), Use(64, 4, 48, (2, 3, 4)))
    try:
        assert running.info.details["rung"] == "transformers"
        assert_same_states(running, reference, samples)
    finally:
        running.close()
