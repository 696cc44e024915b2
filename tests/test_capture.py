"""capture: states are Transformers' own; every silent fault has its gate; shards are whole and resumed one by one."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from fixtures_models import save_gemma, save_llama, save_shallow, save_wrapper
from fixtures_states import AUX, answered, open_tiny
from headstart import artifact, config
from headstart.data import store
from headstart.data.gates import fault
from headstart.data.identity import check_identity, what_is
from headstart.data.rows import write_samples
from headstart.data.store import StateStore
from headstart.engines.base import Refused, States
from headstart.engines.transformers import TransformersEngine
from headstart.errors import GateError, UserError
from headstart.events import Events
from headstart.pipeline import BY_VERB, Context
from headstart.stages import capture
from headstart.types import Sample


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> TransformersEngine:
    return open_tiny(save_llama(tmp_path_factory.mktemp("target")))


@pytest.fixture(scope="module")
def samples(engine: TransformersEngine) -> list[Sample]:
    return answered(engine, 12, 12)


def context_for(root: Path, target: Path, samples: Sequence[Sample], *overrides: str) -> Context:
    """A run whose conversations/ hold `samples`."""
    raw = {
        "target": {"model": str(target), "device": "cpu"},
        "data": {"sources": ["x"]},
        "capture": {"shard_tokens": 60},
    }
    run = config.build(raw, overrides)
    if not (root / "conversations").exists():
        with artifact.create(root / "conversations", "conversations", {}, {}) as build:
            write_samples(build.file("samples.parquet"), samples)
    return Context(run, BY_VERB["capture"], root, Events(quiet=True))


def states_of(root: Path) -> tuple[artifact.Artifact, StateStore]:
    made = artifact.open_artifact(root / "states", "states")
    return made, StateStore.open(made)


@pytest.mark.parametrize("save", [save_llama, save_gemma])
def test_stored_states_are_transformers_own(save, tmp_path: Path) -> None:
    target = save(tmp_path / "target")
    engine = open_tiny(target)
    aux = (1, 2, 3)
    samples = answered(engine, 6, 9)
    capture.run(context_for(tmp_path, target, samples, "capture.aux_layers=[1, 2, 3]"))
    made, opened = states_of(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32, attn_implementation="eager").eval()
    for entry, sample in zip(opened.entries, samples, strict=True):
        stored = opened.read(entry)
        with torch.no_grad():
            out = model(torch.from_numpy(sample.input_ids[None].astype(np.int64)), output_hidden_states=True)
        expected = torch.stack([out.hidden_states[b][0] for b in aux], dim=1)
        torch.testing.assert_close(stored.aux, expected, atol=2e-5, rtol=1e-5)
        rows = torch.from_numpy(store.label_rows(sample.supervised))  # the others teach nothing, and are not stored
        normed, logits = out.hidden_states[-1][0][rows], out.logits[0][rows].float()
        torch.testing.assert_close(opened.head().norm(stored.last), normed, atol=2e-5, rtol=1e-5)
        torch.testing.assert_close(stored.log_normalizer, logits.logsumexp(-1), atol=1e-4, rtol=1e-5)
        assert torch.equal(stored.top1.long(), logits.argmax(-1))
        assert stored.input_ids.tolist() == sample.input_ids.tolist()
        assert stored.supervised.bool().tolist() == sample.supervised.tolist()
    assert made.facts["identity"]["argmax_agreement"] == 1.0
    assert made.facts["aux_layers"] == list(aux)
    assert made.counts["tokens"] == sum(len(sample.input_ids) for sample in samples)


def test_a_wrapper_gives_the_bare_models_states(tmp_path: Path) -> None:
    """Case C29, for the embedded engine: the text model inside a multimodal wrapper."""
    bare, wrapped = open_tiny(save_llama(tmp_path / "bare")), save_wrapper(tmp_path / "wrapped")
    samples = answered(bare, 4, 8)
    capture.run(context_for(tmp_path / "run", wrapped, samples))
    made, opened = states_of(tmp_path / "run")
    assert made.facts["engine"]["layers_path"] == "model.language_model.layers"
    for states in bare.capture(samples, opened.facts["aux_layers"], 512):
        entry = next(entry for entry in opened.entries if entry.id == states.id)
        torch.testing.assert_close(opened.read(entry).aux, states.aux, atol=1e-6, rtol=1e-6)


class Tampering:
    """A real engine whose captured states are changed on the way out."""

    def __init__(self, engine: TransformersEngine, change) -> None:
        self.engine, self.change = engine, change
        self.info, self.folder = engine.info, engine.folder

    def capture(self, samples: Sequence[Sample], boundaries: Sequence[int], batch_tokens: int) -> Iterator[States]:
        for states in self.engine.capture(samples, boundaries, batch_tokens):
            yield self.change(states)

    def __getattr__(self, name: str):
        return getattr(self.engine, name)

    def close(self) -> None:
        """The real engine is shared by the tests."""


def post_norm(engine: TransformersEngine):
    return lambda s: replace(s, last=engine.head().norm(s.last))


def one_early(engine: TransformersEngine):
    n = engine.info.num_layers

    def change(states: States) -> States:
        sample = Sample(
            states.id, "", "", "train", np.array(states.ids, np.int32), np.zeros(len(states.ids), bool), "stop"
        )
        return replace(states, last=next(iter(engine.capture([sample], (n - 1,), 512))).aux[:, 0])

    return change


@pytest.mark.parametrize(("plant", "named"), [(post_norm, "post-norm"), (one_early, "one layer early")])
def test_identity_names_the_wrong_state(engine: TransformersEngine, samples: list[Sample], plant, named: str) -> None:
    """Case C28."""
    with pytest.raises(GateError) as refused:
        check_identity(Tampering(engine, plant(engine)), engine.head(), samples[:3], AUX, 512)  # type: ignore[arg-type]
    assert f"is {named}" in str(refused.value)


def test_identity_finds_rows_of_another_request(engine: TransformersEngine, samples: list[Sample]) -> None:
    """Ids that are right say nothing of the rows beside them: an engine that mixes up its slots knows the ids by the request."""

    class Mixing(Tampering):
        def capture(self, samples, boundaries, batch_tokens):
            found = list(self.engine.capture(samples, boundaries, batch_tokens))
            for mine, other in zip(found, [*found[1:], found[0]], strict=True):
                rows = min(len(mine.ids), len(other.ids)) // 2
                yield replace(mine, last=torch.cat([other.last[:rows], mine.last[rows:]]))

    check_identity(engine, engine.head(), samples[:4], AUX, 512)
    with pytest.raises(GateError, match="not the target's own"):
        check_identity(Mixing(engine, None), engine.head(), samples[:4], AUX, 512)  # type: ignore[arg-type]


def test_an_id_that_two_samples_have_is_refused(
    engine: TransformersEngine, samples: list[Sample], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capture, "open_engine", lambda *_: pytest.fail("loaded"))
    doubled = [*samples[:3], replace(samples[3], id=samples[0].id)]
    with pytest.raises(GateError, match="2 samples have the id p000"):
        capture.run(context_for(tmp_path, engine.folder, doubled))


def test_identity_passes_and_names_the_right_state(engine: TransformersEngine, samples: list[Sample]) -> None:
    found = check_identity(engine, engine.head(), samples[:3], AUX, 512)
    assert found.max_dp < 1e-5
    assert found.argmax_agreement == 1.0
    n = engine.info.num_layers
    assert what_is(next(iter(engine.capture(samples[:1], (n - 1, n), 512))), engine.head()) == "pre-norm final"


def test_identity_finds_a_wrong_head(engine: TransformersEngine, samples: list[Sample]) -> None:
    head = engine.head()
    wrong = replace(head, norm_weight=head.norm_weight + 1)
    with pytest.raises(GateError, match="not the target's own"):
        check_identity(engine, wrong, samples[:2], AUX, 512)


def zeros(states: States) -> States:
    return replace(states, aux=torch.cat([states.aux[:3], torch.zeros_like(states.aux[3:])]))


def nan(states: States) -> States:
    last = states.last.clone()
    last[2, 5] = float("nan")
    return replace(states, last=last)


def short(states: States) -> States:
    return replace(states, aux=states.aux[:-3], last=states.last[:-3])


def foreign(states: States) -> States:
    return replace(states, ids=(*states.ids[:-1], states.ids[-1] + 1))


def constant(states: States) -> States:
    return replace(states, aux=states.aux[:1].expand_as(states.aux))


def twice(states: States) -> States:
    return replace(states, aux=states.aux[:, [0, 0, 2]])


FAULTS = {
    zeros: "aux is zero at token 3",
    nan: "last is not finite at token 2",
    short: "rows for",
    foreign: "belongs to another request: token",
    constant: "aux is the same at every token",
    twice: "one layer was captured twice",
}


@pytest.mark.parametrize("plant", FAULTS, ids=lambda plant: plant.__name__)
def test_each_gate_names_its_fault(engine: TransformersEngine, samples: list[Sample], plant) -> None:
    """Case C27."""
    for states in engine.capture(samples[:2], (2, 3, 4), 512):
        sample = next(sample for sample in samples if sample.id == states.id)
        assert fault(sample, states) is None
        assert FAULTS[plant] in (fault(sample, plant(states)) or "")


def test_ids_that_differ_are_named_with_their_place(engine: TransformersEngine, samples: list[Sample]) -> None:
    """Case C16, a mismatch that is forced: the place and both tokens."""
    (states,) = engine.capture(samples[:1], AUX, 512)
    ids = samples[0].input_ids.tolist()
    said = fault(samples[0], replace(states, ids=(*ids[:5], ids[5] + 1, *ids[6:])))
    assert said == f"belongs to another request: token 5 is {ids[5] + 1}, not {ids[5]}"


def planted(plant, victims: set[str]):
    return lambda states: plant(states) if states.id in victims else states


@pytest.mark.parametrize("plant", FAULTS, ids=lambda plant: plant.__name__)
def test_bad_samples_below_the_budget_are_left_out_by_name(
    engine: TransformersEngine, samples: list[Sample], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plant
) -> None:
    tampering = Tampering(engine, planted(plant, {"p007"}))
    monkeypatch.setattr(capture, "open_engine", lambda *_: tampering)
    capture.run(context_for(tmp_path, engine.folder, samples, "capture.max_bad_fraction=0.1"))
    made, opened = states_of(tmp_path)
    assert set(made.counts["dropped"]) == {"p007"}
    assert FAULTS[plant] in made.counts["dropped"]["p007"]
    assert [entry.id for entry in opened.entries] == [sample.id for sample in samples if sample.id != "p007"]


def test_rows_of_another_request_under_the_right_ids_are_found(
    engine: TransformersEngine, samples: list[Sample], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cache that hands over other blocks: ids, shapes and numbers look right; the greedy answer is not what the states say."""

    def shifted(states: States) -> States:
        return replace(states, aux=states.aux.roll(9, 0), last=states.last.roll(9, 0))

    tampering = Tampering(engine, planted(shifted, {"p007"}))
    monkeypatch.setattr(capture, "open_engine", lambda *_: tampering)
    capture.run(context_for(tmp_path, engine.folder, samples, "capture.max_bad_fraction=0.1"))
    made, opened = states_of(tmp_path)
    assert set(made.counts["dropped"]) == {"p007"}
    assert "not those of its answer" in made.counts["dropped"]["p007"]
    assert "p007" not in {entry.id for entry in opened.entries}


def test_bad_samples_above_the_budget_stop_the_run(
    engine: TransformersEngine, samples: list[Sample], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tampering = Tampering(engine, planted(nan, {"p007", "p008"}))
    monkeypatch.setattr(capture, "open_engine", lambda *_: tampering)
    with pytest.raises(GateError, match="2 of 12 samples") as refused:
        capture.run(context_for(tmp_path, engine.folder, samples, "capture.max_bad_fraction=0.1"))
    assert "p007: last is not finite" in str(refused.value)
    assert not (tmp_path / "states").exists()


def test_an_engine_that_loses_a_sample_is_found_out(
    engine: TransformersEngine, samples: list[Sample], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Losing(Tampering):
        def capture(self, samples, boundaries, batch_tokens):
            return (states for states in self.engine.capture(samples, boundaries, batch_tokens) if states.id != "p003")

    monkeypatch.setattr(capture, "open_engine", lambda *_: Losing(engine, None))
    monkeypatch.setattr(capture, "PROBES", 2)
    with pytest.raises(GateError, match="p003: the engine returned nothing"):
        capture.run(context_for(tmp_path, engine.folder, samples))


def test_a_sample_that_the_engine_refuses_is_left_out_with_its_reason(
    engine: TransformersEngine, samples: list[Sample], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Refusing(Tampering):
        def capture(self, samples, boundaries, batch_tokens):
            for states in self.engine.capture(samples, boundaries, batch_tokens):
                yield Refused(states.id, "too long") if states.id == "p007" else states

    monkeypatch.setattr(capture, "open_engine", lambda *_: Refusing(engine, None))
    capture.run(context_for(tmp_path, engine.folder, samples, "capture.max_bad_fraction=0.1"))
    made, opened = states_of(tmp_path)
    assert made.counts["dropped"] == {"p007": "the engine refused it: too long"}
    assert len(opened.entries) == len(samples) - 1


def test_a_refused_probe_stops_before_the_first_shard(
    engine: TransformersEngine, samples: list[Sample], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Refusing(Tampering):
        def capture(self, samples, boundaries, batch_tokens):
            return iter([Refused(samples[0].id, "no room")])

    monkeypatch.setattr(capture, "open_engine", lambda *_: Refusing(engine, None))
    with pytest.raises(GateError, match="refused the probe p000: no room"):
        capture.run(context_for(tmp_path, engine.folder, samples))


def test_an_engine_with_fixed_boundaries_still_says_that_the_state_is_wrong(
    engine: TransformersEngine, samples: list[Sample]
) -> None:
    class Fixed(Tampering):
        def capture(self, samples, boundaries, batch_tokens):
            if tuple(boundaries) != AUX:
                raise UserError("started with others")
            return super().capture(samples, boundaries, batch_tokens)

    with pytest.raises(GateError, match="captures no other boundary"):
        check_identity(Fixed(engine, post_norm(engine)), engine.head(), samples[:2], AUX, 512)  # type: ignore[arg-type]


@pytest.mark.parametrize("damage", ["missing", "cut", "empty"])
def test_only_the_damaged_shard_is_captured_again(
    engine: TransformersEngine, samples: list[Sample], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    context = context_for(tmp_path, engine.folder, samples)
    monkeypatch.setattr(capture, "open_engine", lambda *_: Tampering(engine, lambda states: states))
    monkeypatch.setattr(capture, "_finish", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        capture.run(context)
    monkeypatch.undo()
    victim = tmp_path / ".states.partial" / store.shard_name(1)
    intact = (tmp_path / ".states.partial" / store.shard_name(0)).stat().st_mtime_ns
    data = victim.read_bytes()
    victim.unlink()
    if damage != "missing":
        victim.write_bytes(data[: len(data) // 2] if damage == "cut" else b"")
    asked: list[str] = []

    def noting(states: States) -> States:
        asked.append(states.id)
        return states

    monkeypatch.setattr(capture, "open_engine", lambda *_: Tampering(engine, noting))
    capture.run(context)
    made, opened = states_of(tmp_path)
    assert (made.path / store.shard_name(0)).stat().st_mtime_ns == intact
    again = {entry.id for entry in opened.entries if entry.shard == store.shard_name(1)}
    assert set(asked) == again | {sample.id for sample in samples[: capture.PROBES]}
    assert (made.path / store.shard_name(1)).read_bytes() == data


@pytest.mark.parametrize(
    ("aux", "said"),
    [("[1, 2, 9]", "9 is not a boundary"), ("[1, 2, 2]", "repeated"), ("[3, 1]", "comes after"), ("[-1, 2]", "-1")],
)
def test_wrong_aux_layers_are_refused_before_the_target_is_loaded(
    engine: TransformersEngine,
    samples: list[Sample],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    aux: str,
    said: str,
) -> None:
    monkeypatch.setattr(capture, "open_engine", lambda *_: pytest.fail("loaded"))
    with pytest.raises(UserError, match=said):
        capture.run(context_for(tmp_path, engine.folder, samples, f"capture.aux_layers={aux}"))


def test_a_shallow_target_is_told_which_layers_it_has(tmp_path: Path, samples: list[Sample]) -> None:
    """Case C30."""
    target = save_shallow(tmp_path / "target")
    with pytest.raises(UserError, match=r"capture\.aux_layers") as refused:
        capture.run(context_for(tmp_path, target, samples))
    suggestion = json.loads("[" + str(refused.value).split("instance to [")[1].split("]")[0] + "]")
    elsewhere = (
        "regenerate.temperature=1"  # the answers are another model's, so no gate may hold its own choice against them
    )
    capture.run(context_for(tmp_path, target, samples, f"capture.aux_layers={suggestion}", elsewhere))
    assert states_of(tmp_path)[0].facts["aux_layers"] == suggestion


def test_a_full_disk_is_refused_before_the_target_is_loaded(
    engine: TransformersEngine, samples: list[Sample], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capture, "open_engine", lambda *_: pytest.fail("loaded"))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9, 1000))  # type: ignore[attr-defined]
    with pytest.raises(UserError, match=r"1\.0 kB are free") as refused:
        capture.run(context_for(tmp_path, engine.folder, samples))
    assert "capture.dtype" in str(refused.value)


@pytest.mark.parametrize(("share", "enough"), [(0.9, False), (1.1, True)])
def test_the_disk_estimate_is_that_of_the_stored_type(
    engine: TransformersEngine,
    samples: list[Sample],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    share: float,
    enough: bool,
) -> None:
    """float32 on this CPU: 4 vectors of 64 numbers of 4 bytes for each token."""
    needed = sum(len(sample.input_ids) for sample in samples) * 4 * 64 * 4
    free = int(needed * share)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(free, 0, free))  # type: ignore[attr-defined]
    context = context_for(tmp_path, engine.folder, samples, "target.device=auto")
    if enough:
        capture.run(context)
    else:
        with pytest.raises(UserError, match="are free"):
            capture.run(context)


def test_a_state_that_overflows_the_stored_type_is_found(
    engine: TransformersEngine, samples: list[Sample], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    huge = Tampering(engine, planted(lambda states: replace(states, aux=states.aux * 1e6), {"p007"}))
    monkeypatch.setattr(capture, "open_engine", lambda *_: huge)
    capture.run(context_for(tmp_path, engine.folder, samples, "capture.dtype=float16", "capture.max_bad_fraction=0.1"))
    assert "aux is not finite" in states_of(tmp_path)[0].counts["dropped"]["p007"]


def test_a_shard_of_which_nothing_is_left_still_says_why(
    engine: TransformersEngine, samples: list[Sample], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capture, "PROBES", 1)
    monkeypatch.setattr(capture, "open_engine", lambda *_: Tampering(engine, planted(nan, {"p001"})))
    capture.run(
        context_for(tmp_path, engine.folder, samples[:3], "capture.shard_tokens=1", "capture.max_bad_fraction=0.5")
    )
    made, opened = states_of(tmp_path)
    assert set(made.counts["dropped"]) == {"p001"}
    assert made.counts["supervised"] == sum(sample.supervised.sum() for sample in (samples[0], samples[2]))
    assert [entry.id for entry in opened.entries] == ["p000", "p002"]


def test_the_normaliser_of_a_half_precision_target_makes_probabilities_sum_to_one(tmp_path: Path) -> None:
    """The teacher of the training is float32; with a bfloat16 normaliser its whole mass was 0.92 to 1.07."""
    target = save_llama(tmp_path / "target")
    wide = open_tiny(target)
    samples = answered(wide, 6, 9)
    capture.run(context_for(tmp_path, target, samples, "target.dtype=bfloat16"))
    _, opened = states_of(tmp_path)
    head = opened.head()
    assert head.lm_head.dtype == torch.bfloat16
    for entry in opened.entries:
        stored = opened.read(entry)
        logits = head.norm(stored.last.float()) @ head.lm_head.float().T
        mass = (logits - stored.log_normalizer[:, None]).exp().sum(-1)
        torch.testing.assert_close(mass, torch.ones_like(mass), atol=1e-4, rtol=0)


def test_stored_dtype_is_the_one_asked_for(engine: TransformersEngine, samples: list[Sample], tmp_path: Path) -> None:
    capture.run(context_for(tmp_path, engine.folder, samples, "capture.dtype=bfloat16"))
    _, opened = states_of(tmp_path)
    stored = opened.read(opened.entries[0])
    assert stored.aux.dtype == stored.last.dtype == torch.bfloat16
    expected = next(iter(engine.capture(samples[:1], opened.facts["aux_layers"], 512)))
    assert torch.equal(stored.aux, expected.aux.bfloat16())
