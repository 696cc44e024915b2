"""The reference decoder on real tiny models: lossless when greedy, the target's distribution when sampled, and its
bookkeeping."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import fixtures_models
from headstart import config
from headstart.drafts.eagle3 import DraftCache, Eagle3
from headstart.drafts.rows import live_mask
from headstart.drafts.shape import DraftShape
from headstart.engines.transformers import TransformersEngine
from headstart.evaluation.acceptance import walk
from headstart.evaluation.choice import Drafted, Greedy, Sampled, acceptance_probability, draw, residual
from headstart.evaluation.decode import Decoded, Limits, first_mismatch, plain_decode, speculative_decode

AUX = (1, 2, 3)
PROMPT = (5, 17, 3, 250, 99, 7)
NEVER: frozenset[int] = frozenset()


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> TransformersEngine:
    folder = fixtures_models.save_llama(tmp_path_factory.mktemp("llama"), num_hidden_layers=4)
    return TransformersEngine(config.Target.model_validate({"model": str(folder), "device": "cpu"}))


def make_draft(engine: TransformersEngine, vocabulary: Sequence[int], layers: int = 1, **flags: bool) -> Eagle3:
    """A draft with random weights; its head begins with the target's rows, so that some drafts are accepted."""
    head = engine.head()
    shape = DraftShape(
        hidden_size=64, target_hidden_size=64, aux_layers=AUX, num_layers=layers, num_heads=4, num_kv_heads=2,
        head_dim=16, intermediate_size=96, target_vocab_size=head.vocab_size, draft_vocab_size=len(vocabulary),
        rms_norm_eps=1e-5, rope_theta=1e4, max_positions=512,
        **({"norm_before_residual": False, "fc_norm": False, "norm_output": False} | flags),
    )  # fmt: skip
    torch.manual_seed(3)
    draft = Eagle3(shape, head.embed)
    draft.draft_to_target = torch.tensor(vocabulary)
    with torch.no_grad():
        draft.fc.weight.copy_(torch.cat([torch.zeros(64, 128), torch.eye(64)], dim=1))
        draft.lm_head.weight.copy_(head.lm_head[draft.draft_to_target])
        draft.norm.weight.copy_(head.norm_weight)
    return draft


def decode(
    engine: TransformersEngine, draft: Eagle3, prompt: Sequence[int], limits: Limits, k: int = 3
) -> tuple[Decoded, Decoded]:
    session = engine.session(draft.shape.aux_layers)
    plain = plain_decode(session, prompt, Greedy(), limits)
    return plain, speculative_decode(session, draft, prompt, Greedy(), limits, draft_tokens=k)


def greedy_by_transformers(engine: TransformersEngine, prompt: Sequence[int], count: int) -> tuple[int, ...]:
    """An independent source: no cache, no session, the whole sequence anew for every token."""
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            ids.append(int(engine.model(torch.tensor([ids])).logits[0, -1].argmax()))
    return tuple(ids[len(prompt) :])


@pytest.mark.parametrize(
    ("vocabulary", "layers", "flags"),
    [
        (range(512), 1, {}),
        (range(0, 512, 3), 1, {"norm_before_residual": True}),
        ([7, 11], 1, {}),
        (range(512), 2, {"fc_norm": True, "norm_output": True}),
    ],
)
@pytest.mark.parametrize("k", [1, 4])
def test_greedy_is_the_targets_own(engine: TransformersEngine, vocabulary, layers: int, flags: dict, k: int) -> None:
    draft = make_draft(engine, list(vocabulary), layers, **flags)
    plain, found = decode(engine, draft, PROMPT, Limits(24, NEVER), k)
    assert plain.ids == greedy_by_transformers(engine, PROMPT, 24)
    assert found.ids == plain.ids
    assert (found.finish, plain.finish) == ("length", "length")
    assert found.log.emitted == 23  # the first token came from the prefill
    assert found.costs.verify.steps == found.log.steps
    assert found.costs.draft.steps == k * found.log.steps
    assert plain.costs.plain.steps == 23
    assert found.costs.whole.steps == plain.costs.whole.steps == 23


class Oracle(Eagle3):
    """A draft whose logits point at a known answer, read off the position in its cache."""

    answer: tuple[int, ...] = ()
    wrong_at: frozenset[int] = frozenset()

    def extend(self, ids: Tensor, hidden: Tensor, cache: DraftCache) -> Tensor:
        self.position = cache.length + len(ids) + 1  # of the token that the last row drafts
        return super().extend(ids, hidden, cache)

    def logits(self, out: Tensor) -> Tensor:
        index = self.position - len(PROMPT)
        token = self.answer[index] if index < len(self.answer) else 0
        wanted = token if index not in self.wrong_at else (token + 1) % 512
        return torch.nn.functional.one_hot(torch.tensor([wanted]), 512).float()


def oracle(engine: TransformersEngine, answer: tuple[int, ...], wrong_at: Sequence[int] = ()) -> Oracle:
    draft = make_draft(engine, range(512))
    draft.__class__ = Oracle
    assert isinstance(draft, Oracle)
    draft.answer, draft.wrong_at = answer, frozenset(wrong_at)
    return draft


def test_a_perfect_draft_emits_k_plus_one_and_is_cut_at_the_limit(engine: TransformersEngine) -> None:
    answer = greedy_by_transformers(engine, PROMPT, 20)
    _, found = decode(engine, oracle(engine, answer), PROMPT, Limits(12, NEVER), k=3)
    assert found.ids == answer[:12]  # 1 from the prefill, then 4 + 4 + 3
    assert found.log.accepted.tolist() == [3, 3, 2]
    assert found.log.drafted.tolist() == [3, 3, 2]


def test_a_miss_ends_the_run_and_the_chain_starts_anew(engine: TransformersEngine) -> None:
    answer = greedy_by_transformers(engine, PROMPT, 20)
    _, found = decode(engine, oracle(engine, answer, wrong_at=[3, 4]), PROMPT, Limits(10, NEVER), k=3)
    assert found.ids == answer[:10]
    # 0 by prefill | 1, 2 right, 3 wrong | 4 wrong | 5, 6, 7 right, 8 own | 9 cut
    assert found.log.accepted.tolist() == [2, 0, 3, 0]
    assert found.log.drafted.tolist() == [3, 3, 3, 0]


def test_end_of_turn_inside_an_accepted_run(engine: TransformersEngine) -> None:
    answer = greedy_by_transformers(engine, PROMPT, 20)
    end = next(i for i in range(2, 20) if answer[i] not in answer[:i] and i % 4 not in (0, 1))
    limits = Limits(20, frozenset({answer[end]}))
    plain, found = decode(engine, oracle(engine, answer), PROMPT, limits, k=3)
    assert found.ids == plain.ids == answer[: end + 1]
    assert (found.finish, plain.finish) == ("stop", "stop")
    assert found.log.emitted == end
    assert found.log.accepted[-1] == found.log.drafted[-1] == (end - 1) % 4


def test_an_answer_of_one_token_has_no_verify_step(engine: TransformersEngine) -> None:
    first = greedy_by_transformers(engine, PROMPT, 1)
    plain, found = decode(engine, make_draft(engine, range(512)), PROMPT, Limits(9, frozenset(first)))
    assert plain.ids == found.ids == first
    assert found.log.steps == 0
    assert found.costs.draft.steps == 0


PROMPTS = st.lists(st.integers(0, 511), min_size=1, max_size=9)


@settings(max_examples=16, deadline=None)
@given(
    PROMPTS,
    st.integers(1, 5),
    st.integers(2, 24),
    st.fixed_dictionaries({"trimmed": st.booleans(), "normed": st.booleans()}),
)
def test_offline_walk_equals_the_decoder(
    engine: TransformersEngine, prompt: list[int], k: int, length: int, kind: dict
) -> None:
    """Acceptance from a stored conversation is, step for step, what decoding it does."""
    draft = make_draft(engine, list(range(0, 512, 2) if kind["trimmed"] else range(512)), norm_output=kind["normed"])
    last = greedy_by_transformers(engine, prompt, 12)[-1]
    plain, found = decode(engine, draft, prompt, Limits(length, frozenset({last})), k)
    accept, live = forced_accepts(engine, draft, prompt, plain.ids, k)
    offline = walk(accept, live)
    assert offline.accepted.tolist() == found.log.accepted.tolist()
    assert offline.drafted.tolist() == found.log.drafted.tolist()


def test_drafts_are_the_chain_of_the_training(engine: TransformersEngine) -> None:
    """Also where they are not accepted: the tokens of the first verify step, for a draft that feeds on its normed
    output."""
    draft, seen = make_draft(engine, range(512), norm_output=True), []

    class Watched(Greedy):
        def verify(self, logits: Tensor, drafted: Drafted) -> tuple[int, int]:
            seen.append(drafted.tokens)
            return super().verify(logits, drafted)

    found = speculative_decode(engine.session(AUX), draft, PROMPT, Watched(), Limits(2, NEVER), draft_tokens=5)
    expected, cache, ids = [], DraftCache(), torch.tensor([*PROMPT[1:], found.ids[0]])
    with torch.no_grad():
        out = draft.extend(ids, draft.fuse(engine.session(AUX).extend(PROMPT)[1]), cache)[-1:]
        for _ in range(5):
            expected.append(int(draft.lm_head(draft.norm(out)).argmax()))
            out = draft.extend(torch.tensor(expected[-1:]), draft.norm(out), cache)
    assert seen == [tuple(expected)]


def forced_accepts(
    engine: TransformersEngine, draft: Eagle3, prompt: Sequence[int], answer: Sequence[int], k: int
) -> tuple[np.ndarray, np.ndarray]:
    """Every row's chain over ground truth, made one by one from one pass of the target: what the unrolled training
    computes."""
    ids = torch.tensor([*prompt, *answer])
    supervised = np.array([False] * len(prompt) + [True] * len(answer))
    live = live_mask(supervised, k).T
    accept = np.zeros_like(live)
    with torch.no_grad():
        hidden = draft.fuse(engine.session(AUX).extend(ids.tolist())[1])
        for row, step in zip(*live.nonzero(), strict=True):
            cache = DraftCache()
            out = draft.extend(ids[1 : row + 2], hidden[: row + 1], cache)[-1:]
            for i in range(1, step + 1):
                out = draft.extend(ids[row + 1 + i : row + 2 + i], draft.feed(out), cache)
            accept[row, step] = draft.draft_to_target[draft.logits(out)[0].argmax()] == ids[row + 2 + step]
    return accept, live


def test_some_drafts_of_the_random_draft_are_accepted(engine: TransformersEngine) -> None:
    """Otherwise the tests above would hold for a decoder that never accepts."""
    draft = make_draft(engine, range(512))
    accepted = sum(decode(engine, draft, (i, i + 1), Limits(24, NEVER))[1].log.accepted.sum() for i in range(8))
    assert accepted > 0


# --- sampling ---

DISTRIBUTIONS = st.lists(st.floats(0, 1), min_size=5, max_size=5).filter(lambda values: sum(values) > 0.01)


def normalised(values: list[float]) -> Tensor:
    tensor = torch.tensor(values, dtype=torch.float64)
    return tensor / tensor.sum()


@given(DISTRIBUTIONS, DISTRIBUTIONS)
def test_accept_or_residual_gives_exactly_the_target(p_values: list[float], q_values: list[float]) -> None:
    p, q = normalised(p_values), normalised(q_values)
    accepted = q * acceptance_probability(p, q)
    torch.testing.assert_close(accepted, torch.minimum(p, q))
    torch.testing.assert_close(accepted + (1 - accepted.sum()) * residual(p, q), p, atol=1e-12, rtol=0)
    assert not (residual(p, q)[p == 0] > 0).any()


@given(DISTRIBUTIONS, st.floats(0, 1, exclude_max=True))
def test_draw_inverts_the_cumulated_distribution(values: list[float], uniform: float) -> None:
    p = normalised(values)
    token = draw(p, uniform)
    assert p[token] > 0
    below = float(p[:token].sum())
    assert below - 1e-12 <= uniform <= below + float(p[token]) + 1e-12


def chi_square(counts: np.ndarray, expected: np.ndarray) -> float:
    """Distance in standard deviations of the statistic, by the Wilson-Hilferty cube root; cells below 5 are put
    together."""
    rare = expected < 5
    if rare.any():
        counts = np.append(counts[~rare], counts[rare].sum())
        expected = np.append(expected[~rare], expected[rare].sum())
    if expected[-1] < 5:
        counts, expected = counts[:-1], expected[:-1]
    freedom = len(expected) - 1
    statistic = ((counts - expected) ** 2 / expected).sum()
    spread = 2 / (9 * freedom)
    return float(((statistic / freedom) ** (1 / 3) - (1 - spread)) / spread**0.5)


def test_verify_emits_the_joint_distribution_of_the_target() -> None:
    """Two drafts and one more token over a vocabulary of 4, against the product of conditionals; the draft never says
    token 3."""
    generator = torch.Generator().manual_seed(11)
    target = torch.randn(5, 4, generator=generator)  # logits after: the prompt, and after each token (a Markov chain)
    draft = torch.cat([torch.randn(5, 3, generator=generator), torch.full((5, 1), -torch.inf)], dim=1)
    choice, rounds = Sampled(0.8, seed=5), 12000
    counts = np.zeros((4, 4, 4))
    for _ in range(rounds):
        state, tokens, distributions = 0, [], []
        for _ in range(2):
            token, distribution = choice.pick(draft[state])
            tokens.append(token)
            distributions.append(distribution)
            state = token + 1
        logits = target[torch.tensor([0, *(token + 1 for token in tokens)])]
        accepted, own = choice.verify(logits, Drafted(tuple(tokens), tuple(distributions)))
        emitted = [*tokens[:accepted], own]
        while len(emitted) < 3:
            emitted.append(choice.pick(target[emitted[-1] + 1])[0])
        counts[tuple(emitted)] += 1
    p = (target.double() / 0.8).softmax(-1)
    expected = (p[0][:, None, None] * p[1:][:, :, None] * p[1:][None]).numpy() * rounds
    assert abs(chi_square(counts.ravel(), expected.ravel())) < 3.5


def test_sampled_decoding_has_the_targets_distribution(tmp_path: Path) -> None:
    """End to end: caches, features, a trimmed draft vocabulary; answers of three tokens from a model with 6 words."""
    folder = fixtures_models.save_llama(
        tmp_path, vocab_size=6, num_hidden_layers=4, hidden_size=16, intermediate_size=16, bos_token_id=None,
        eos_token_id=None, pad_token_id=None, initializer_range=0.35, num_attention_heads=2, num_key_value_heads=2,
    )  # fmt: skip
    engine = TransformersEngine(config.Target.model_validate({"model": str(folder), "device": "cpu"}))
    draft = small_draft(engine)
    session, prompt, rounds, temperature = engine.session(AUX), (1, 4), 600, 1.3
    counts = np.zeros((6, 6, 6))
    taken = 0
    for seed in range(rounds):
        choice, k = Sampled(temperature, seed), 1 + seed % 2  # one draft: the third token is the target's own
        found = speculative_decode(session, draft, prompt, choice, Limits(3, NEVER), draft_tokens=k)
        counts[found.ids] += 1
        taken += int(found.log.accepted.sum())
    assert rounds * 0.2 < taken  # drafts did take part
    expected = np.zeros((6, 6, 6))
    for first, second in itertools.product(range(6), repeat=2):
        rows = (engine.log_probs([*prompt, first, second]).double() / temperature).softmax(-1)
        expected[first, second] = (rows[1, first] * rows[2, second] * rows[3]).numpy() * rounds
    # the first token comes from the prefill; what follows it is judged over all of its values
    assert abs(chi_square(counts.sum(0).ravel(), expected.sum(0).ravel())) < 3.5


def small_draft(engine: TransformersEngine) -> Eagle3:
    head = engine.head()
    shape = DraftShape(
        hidden_size=16, target_hidden_size=16, aux_layers=AUX, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8,
        intermediate_size=16, target_vocab_size=6, draft_vocab_size=4, rms_norm_eps=1e-5, rope_theta=1e4,
        max_positions=64,
        norm_before_residual=False, fc_norm=False, norm_output=False,
    )  # fmt: skip
    torch.manual_seed(0)
    draft = Eagle3(shape, head.embed)
    draft.draft_to_target = torch.tensor([0, 2, 3, 5])
    return draft


def test_sampled_answers_repeat_by_seed(engine: TransformersEngine) -> None:
    draft, session = make_draft(engine, range(512)), engine.session(AUX)
    found = [
        speculative_decode(session, draft, PROMPT, Sampled(1.0, seed), Limits(16, NEVER), draft_tokens=3).ids
        for seed in ("a", "a", "b")
    ]
    assert found[0] == found[1] != found[2]


# --- mismatches ---


def test_identical_answers_have_no_mismatch(engine: TransformersEngine) -> None:
    assert first_mismatch(engine.session(AUX), PROMPT, (1, 2), (1, 2), 4) is None


def test_a_real_mismatch_is_not_called_a_tie(engine: TransformersEngine) -> None:
    answer = greedy_by_transformers(engine, PROMPT, 8)
    wrong = (*answer[:5], (answer[5] + 1) % 512, *answer[6:])
    found = first_mismatch(engine.session(AUX), PROMPT, answer, wrong, 4)
    assert found is not None
    assert (found.position, found.expected, found.found) == (5, answer[5], wrong[5])
    logits = engine.log_probs([*PROMPT, *answer[:5]])[-1]
    gap = float(logits.topk(2).values.diff().abs())
    assert found.gap == pytest.approx(gap, abs=1e-4)
    assert found.noise < 1e-3
    assert not found.tie


def test_a_tie_is_named(engine: TransformersEngine) -> None:
    """Two output rows made equal: whichever the kernels choose first, the gap is within rounding."""
    answer = greedy_by_transformers(engine, PROMPT, 8)
    twin = (answer[5] + 1) % 512
    weight = engine.model.lm_head.weight
    kept = weight[twin].clone()
    with torch.no_grad():
        weight[twin] = weight[answer[5]]
        found = first_mismatch(engine.session(AUX), PROMPT, answer, (*answer[:5], twin), 4)
        weight[twin] = kept
    assert found is not None
    assert found.tie
    assert found.gap == 0


def test_an_answer_that_stops_early_is_a_mismatch(engine: TransformersEngine) -> None:
    answer = greedy_by_transformers(engine, PROMPT, 4)
    found = first_mismatch(engine.session(AUX), PROMPT, answer, answer[:2], 4)
    assert found is not None
    assert (found.position, found.expected, found.found) == (2, answer[2], None)


@pytest.mark.parametrize(
    ("prompt", "limit", "k", "message"),
    [((), 4, 2, "prompt"), ((1,), 0, 2, "max_new_tokens"), ((1,), 4, 0, "draft_tokens")],
)
def test_misuse_is_refused(engine: TransformersEngine, prompt, limit: int, k: int, message: str) -> None:
    draft = make_draft(engine, range(512))
    with pytest.raises(ValueError, match=message):
        speculative_decode(engine.session(AUX), draft, prompt, Greedy(), Limits(limit, NEVER), draft_tokens=k)


def test_temperature_zero_is_greedy_not_sampled() -> None:
    with pytest.raises(ValueError, match="Greedy"):
        Sampled(0.0, 1)
