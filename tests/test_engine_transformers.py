"""The Transformers engine against Transformers itself: hidden states, log-probabilities, generation, sessions."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

import fixtures_models
from headstart.config import Target
from headstart.engines.hooks import Captured
from headstart.engines.sampling import sample
from headstart.engines.transformers import TransformersEngine, batches_by_length
from headstart.errors import GateError, UserError
from headstart.target import source
from headstart.types import Completion, Prompt, Sample, Sampling

GREEDY = Sampling(max_new_tokens=20, temperature=0.0, top_p=1.0, seed=0, end_ids=(7, 9, 11, 30, 40, 50, 60, 70))
LENGTHS = (5, 40, 17, 33, 2, 21)  # the windows of the Gemma-like model are 16 wide


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {kind: save(root / kind) for kind, save in fixtures_models.KINDS.items()}


@pytest.fixture(scope="module", params=fixtures_models.KINDS)
def engine(request: pytest.FixtureRequest, folders: dict[str, Path]) -> TransformersEngine:
    return opened(folders[request.param])


@pytest.fixture(scope="module")
def llama(folders: dict[str, Path]) -> TransformersEngine:
    return opened(folders["llama"])


def opened(folder: Path, batch_size: int = 4, **changes: object) -> TransformersEngine:
    return TransformersEngine(Target.model_validate({"model": str(folder), **changes}), batch_size)


def reference(engine: TransformersEngine, ids: tuple[int, ...]) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    """Transformers' own hidden states and logits of one unpadded sequence, attention computed plainly."""
    model = engine.model
    used = model.config.get_text_config(decoder=True)._attn_implementation
    model.set_attn_implementation("eager")
    with torch.no_grad():
        output = model(input_ids=torch.tensor([ids]), output_hidden_states=True)
    model.set_attn_implementation(used)
    return tuple(state[0] for state in output.hidden_states), output.logits[0]


def random_ids(length: int, seed: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(3, 390, length).tolist())


def samples(lengths: tuple[int, ...] = LENGTHS) -> list[Sample]:
    return [as_sample(f"s{seed}", random_ids(length, seed)) for seed, length in enumerate(lengths)]


def as_sample(name: str, ids: tuple[int, ...]) -> Sample:
    return Sample(name, "c", "x", "train", np.array(ids, dtype=np.int32), np.ones(len(ids), bool), "stop")


def prompts(count: int = 11) -> list[Prompt]:
    return [
        Prompt(f"p{i}", random_ids(length, i))
        for i, length in zip(range(count), itertools.cycle(LENGTHS), strict=False)
    ]


def test_top_log_probs_are_the_best_of_the_row(llama: TransformersEngine) -> None:
    found, rows = llama.top_log_probs([5, 6, 7], 4), llama.log_probs([5, 6, 7])
    assert found.ids.shape == found.values.shape == (3, 4)
    assert torch.equal(found.values, rows.gather(-1, found.ids))
    assert torch.equal(found.ids[:, 0], rows.argmax(-1))


def test_states_are_those_of_transformers(engine: TransformersEngine) -> None:
    n, head = engine.info.num_layers, engine.head()
    boundaries = (0, 1, n - 1, n)
    given_ids = {item.id: tuple(item.input_ids.tolist()) for item in samples()}
    seen = Counter()
    for states in engine.capture(samples(), boundaries, batch_tokens=80):
        seen[states.id] += 1
        hidden, _ = reference(engine, states.ids)
        assert states.ids == given_ids[states.id]
        assert states.aux.shape == (len(states.ids), 4, engine.info.hidden_size)
        assert states.aux.is_contiguous()
        for column, boundary in enumerate(boundaries[:-1]):
            torch.testing.assert_close(states.aux[:, column], hidden[boundary], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(head.norm(states.last), hidden[n], rtol=1e-4, atol=1e-4)
        assert torch.equal(states.aux[:, -1], states.last)
    assert seen == Counter(given_ids.keys())


def test_rebuilt_log_probabilities_are_the_engines_own(engine: TransformersEngine) -> None:
    for one in samples():
        states = next(engine.capture([one], (1,), batch_tokens=1))
        own = engine.log_probs(states.ids)
        rebuilt = engine.head().logits(states.last).log_softmax(-1)
        torch.testing.assert_close(rebuilt, own, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(own, reference(engine, states.ids)[1].log_softmax(-1), rtol=1e-4, atol=1e-4)


def test_generation_is_that_of_transformers(engine: TransformersEngine) -> None:
    found = {item.id: item for item in engine.generate(prompts(), GREEDY)}
    assert len(found) == len(prompts())
    for prompt in prompts():
        ids = torch.tensor([prompt.ids])
        whole = engine.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=GREEDY.max_new_tokens,
            do_sample=False,
            eos_token_id=list(GREEDY.end_ids),
            pad_token_id=0,
        )
        answer = tuple(whole[0, len(prompt.ids) :].tolist())
        stopped = answer[-1] in GREEDY.end_ids
        assert found[prompt.id] == Completion(prompt.id, answer, "stop" if stopped else "length")


def test_rows_leave_and_enter(llama: TransformersEngine) -> None:
    """What a prompt gets does not depend on how many are decoded at once, nor on who finishes when."""
    wanted = sorted(llama.generate(prompts(17), GREEDY), key=lambda item: item.id)
    assert {item.finish for item in wanted} == {"stop", "length"}
    for size in (1, 2, 5, 17):
        llama.batch_size = size
        assert sorted(llama.generate(prompts(17), GREEDY), key=lambda item: item.id) == wanted
    llama.batch_size = 4


def test_sampling_depends_on_seed_and_prompt_alone(llama: TransformersEngine) -> None:
    sampling = Sampling(12, temperature=1.0, top_p=0.9, seed=1, end_ids=())
    found = {item.id: item.ids for item in llama.generate(prompts(6), sampling)}
    alone = {item.id: item.ids for prompt in prompts(6) for item in llama.generate([prompt], sampling)}
    other = {item.id: item.ids for item in llama.generate(prompts(6), Sampling(12, 1.0, 0.9, 2, ()))}
    assert found == alone
    assert all(found[name] != other[name] for name in found)
    twins = [Prompt(name, prompts(1)[0].ids) for name in ("first", "second")]
    assert len({item.ids for item in llama.generate(twins, sampling)}) == 2


def test_generation_stays_inside_the_context(llama: TransformersEngine) -> None:
    sampling = Sampling(50, 0.0, 1.0, 0, ())
    (completion,) = llama.generate([Prompt("long", random_ids(500, 1))], sampling)
    assert (len(completion.ids), completion.finish) == (12, "length")
    with pytest.raises(UserError, match="has 512 tokens; the target reads 512"):
        list(llama.generate([Prompt("full", random_ids(512, 1))], sampling))


def test_a_session_in_pieces_equals_one_pass(engine: TransformersEngine) -> None:
    ids, boundaries = random_ids(40, 3), (1, 2, engine.info.num_layers)
    states = next(engine.capture([as_sample("s", ids)], boundaries, 100))
    session = engine.session(boundaries)
    pieces = [session.extend(ids[start:end]) for start, end in ((0, 1), (1, 22), (22, 23), (23, 40))]
    logits, aux = (torch.cat(parts) for parts in zip(*pieces, strict=True))
    torch.testing.assert_close(aux, states.aux, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(logits.log_softmax(-1), engine.log_probs(ids), rtol=1e-4, atol=1e-4)
    assert logits.dtype == torch.float32


def test_a_session_can_be_rewound(engine: TransformersEngine) -> None:
    """Also beyond what a sliding window keeps."""
    ids, other = random_ids(40, 4), random_ids(12, 5)
    session = engine.session((2,))
    session.extend(ids)
    for length in (38, 5, 0):
        session.rewind(length)
        assert session.length == length
        logits, _ = session.extend(other)
        wanted = engine.log_probs(ids[:length] + other)[length:]
        torch.testing.assert_close(logits.log_softmax(-1), wanted, rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="cannot rewind"):
        session.rewind(13)


def test_a_recurrent_target_is_rewound_by_reading_again(tmp_path: Path) -> None:
    from test_head import CONFIGS

    engine = opened(fixtures_models.save(fixtures_models.build(CONFIGS["qwen3_next"]), tmp_path))
    ids = tuple(i % 90 + 3 for i in random_ids(20, 1))
    session = engine.session((1,))
    session.extend(ids)
    session.rewind(9)
    logits, _ = session.extend(ids[:4])
    torch.testing.assert_close(logits.log_softmax(-1), engine.log_probs(ids[:9] + ids[:4])[9:], rtol=1e-4, atol=1e-4)
    asked = [Prompt(f"p{i}", ids[i : i + 8 + i % 3]) for i in range(7)]
    found = {item.id: item.ids for item in engine.generate(asked, Sampling(9, 0.0, 1.0, 0, ()))}
    alone = {item.id: item.ids for one in asked for item in engine.generate([one], Sampling(9, 0.0, 1.0, 0, ()))}
    assert found == alone


def test_a_wrapper_has_the_states_of_the_model_inside(folders: dict[str, Path], llama: TransformersEngine) -> None:
    wrapped = opened(folders["wrapper"])
    assert wrapped.info.layers_path == "model.language_model.layers"
    assert llama.info.layers_path == "model.layers"
    inner = {item.id: item for item in llama.capture(samples(), (2, 3, 4), 100)}
    for states in wrapped.capture(samples(), (2, 3, 4), 100):
        assert torch.equal(states.aux, inner[states.id].aux)
        assert torch.equal(states.last, inner[states.id].last)
    assert list(wrapped.generate(prompts(4), GREEDY)) == list(llama.generate(prompts(4), GREEDY))


def test_what_it_says_of_itself(llama: TransformersEngine, folders: dict[str, Path]) -> None:
    info = llama.info
    assert (info.name, info.dtype, info.device) == ("transformers", "float32", "cpu")
    assert (info.num_layers, info.hidden_size, info.vocab_size) == (7, 64, 512)
    assert llama.folder == folders["llama"]
    half = opened(folders["llama"], dtype="bfloat16")
    assert half.info.dtype == "bfloat16"
    assert next(half.capture(samples((9,)), (1,), 10)).last.dtype == torch.bfloat16


def test_gradients_and_hooks_do_not_stay(llama: TransformersEngine) -> None:
    state = next(llama.capture(samples((4,)), (0, 2), 10))
    assert torch.is_grad_enabled()
    assert not state.last.requires_grad
    assert not state.last.is_inference()
    assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer in llama.decoder.layers)


@given(st.lists(st.integers(1, 60), max_size=30), st.integers(1, 128))
@settings(deadline=None)
def test_batches_hold_all_and_fit(lengths: list[int], batch_tokens: int) -> None:
    sequences = {str(i): (0,) * length for i, length in enumerate(lengths)}
    batches = list(batches_by_length(sequences, batch_tokens))
    assert Counter(name for batch in batches for name in batch) == Counter(sequences.keys())
    for batch in batches:
        assert len(batch) == 1 or len(batch) * max(map(len, batch.values())) <= batch_tokens


@given(st.integers(0, 2**32), st.sampled_from([0.1, 0.5, 0.9, 0.999]))
@settings(deadline=None, max_examples=30)
def test_a_nucleus_is_the_smallest_set_of_enough_mass(seed: int, top_p: float) -> None:
    weights = torch.rand(1, 12, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) ** 3
    probabilities = weights / weights.sum()
    ranked = sorted(range(12), key=lambda i: -probabilities[0, i].item())
    mass = list(itertools.accumulate(probabilities[0, i].item() for i in ranked))
    nucleus = ranked[: next(count for count, total in enumerate(mass, 1) if total >= top_p)]
    grid = (torch.arange(4000, dtype=torch.float64) + 0.5) / 4000
    drawn = Counter(sample(probabilities.expand(4000, -1), top_p, grid).tolist())
    assert set(drawn) <= set(nucleus)
    kept = sum(probabilities[0, i].item() for i in nucleus)
    for token in nucleus:
        assert drawn[token] / 4000 == pytest.approx(probabilities[0, token].item() / kept, abs=1 / 2000)


def test_tokens_of_no_mass_are_never_drawn() -> None:
    probabilities = torch.tensor([[0.0, 0.5, 0.0, 0.5, 0.0]], dtype=torch.float64)
    edges = torch.tensor([0.0, 0.5, 1 - 1e-16], dtype=torch.float64)
    assert sample(probabilities.expand(3, -1), 1.0, edges).tolist() == [1, 3, 3]


@pytest.mark.parametrize("boundaries", [(2, 2, 1), (-1, 2, 3), (2, 3, 9), ()])
def test_boundaries_are_checked(llama: TransformersEngine, boundaries: tuple[int, ...]) -> None:
    with pytest.raises(UserError, match="aux layers"):
        next(llama.capture(samples(), boundaries, 100))
    with pytest.raises(UserError, match="aux layers"):
        llama.session(boundaries)


@pytest.mark.parametrize("ids", [(), (3, 512), (-1, 3)])
def test_ids_are_checked(llama: TransformersEngine, ids: tuple[int, ...]) -> None:
    for run in (lambda: llama.log_probs(ids), lambda: list(llama.generate([Prompt("p", ids)], GREEDY))):
        with pytest.raises(UserError, match=r"no tokens|holds token id"):
            run()


def test_hooks_that_fire_wrongly_are_noticed() -> None:
    captured = Captured()
    with pytest.raises(GateError, match="reached 0 times"):
        captured.check([2], (1, 3, 4))
    captured.put(2, torch.zeros(1, 3, 4))
    captured.check([2], (1, 3, 4))
    with pytest.raises(GateError, match="have shape"):
        captured.check([2], (1, 2, 4))
    captured.put(2, torch.zeros(1, 3, 4))
    with pytest.raises(GateError, match="reached 2 times"):
        captured.check([2], (1, 3, 4))


@pytest.mark.slow
def test_a_real_model_in_a_batch_answers_as_alone() -> None:
    engine = TransformersEngine(Target.model_validate({"model": source.SHIPPED}))
    texts = (
        "Where is the port of Hamburg?",
        "Write a haiku about rain.",
        "List three prime numbers, and explain why each is one.",
    )
    tokenizer = AutoTokenizer.from_pretrained(engine.folder)
    asked = [Prompt(text, chat_ids(tokenizer, text)) for text in texts]
    found = {item.id: item for item in engine.generate(asked, Sampling(40, 0.0, 1.0, 0, (2,)))}
    for prompt in asked:
        ids = torch.tensor([prompt.ids])
        whole = engine.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=40, do_sample=False)
        assert found[prompt.id].ids == tuple(whole[0, len(prompt.ids) :].tolist())
    (states,) = engine.capture([as_sample("s", asked[0].ids)], (2, 15, 27), 100)
    rebuilt = engine.head().logits(states.last).log_softmax(-1)
    torch.testing.assert_close(rebuilt, engine.log_probs(asked[0].ids), rtol=1e-5, atol=1e-4)


def chat_ids(tokenizer: Any, text: str) -> tuple[int, ...]:
    message = [{"role": "user", "content": text}]
    return tuple(tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=False))
