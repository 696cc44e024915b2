"""Acceptance metrics against hand-made vectors, brute force, and the identities that the definition promises."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headstart.evaluation import speed
from headstart.evaluation.acceptance import AcceptanceLog, all_starts, bootstrap_interval, remaining, summarise, walk
from headstart.evaluation.speed import Costs, Timing

LOGS = st.lists(
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)).map(sorted), max_size=8).map(
        lambda steps: AcceptanceLog.of([low for low, _ in steps], [high for _, high in steps])
    ),
    min_size=1,
    max_size=6,
).filter(lambda logs: any(log.steps for log in logs))


def answers(lengths: list[tuple[int, int]], tail: int, steps: int) -> np.ndarray:
    """The exact mask [tokens, steps] of prompts and answers in turn, written out from its definition."""
    supervised = [flag for prompt, answer in lengths for flag in [False] * prompt + [True] * answer] + [False] * tail
    live = np.zeros((len(supervised), steps), dtype=bool)
    for t in range(len(supervised)):
        for i in range(steps):
            needed = range(t + 1, t + 3 + i)
            live[t, i] = all(j < len(supervised) and supervised[j] for j in needed)
    return live


@st.composite
def samples(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    lengths = draw(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 9)), min_size=1, max_size=3))
    live = answers(lengths, draw(st.integers(0, 2)), draw(st.integers(1, 4)))
    flat = draw(st.lists(st.booleans(), min_size=live.size, max_size=live.size))
    return np.array(flat, dtype=bool).reshape(live.shape), live


def emitted_from(accept: np.ndarray, live: np.ndarray, row: int) -> int:
    """Tokens that a verify step at `row` emits, one at a time."""
    count = 0
    while row + count < len(live) and live[row + count, 0]:
        count += 1
        if count > accept.shape[1] or not accept[row, count - 1]:
            break
    return count


def test_hand_vectors_c47() -> None:
    accept = np.array([[1, 1, 0], [0, 1, 1], [1, 1, 1]], dtype=bool)
    logs = []
    for row in accept:
        matrix, live = np.zeros((9, 3), dtype=bool), answers([(1, 8)], 0, 3)
        matrix[0] = row
        every = all_starts(matrix, live)
        logs.append(AcceptanceLog(every.accepted[:1], every.drafted[:1]))
    assert [int(log.accepted[0]) for log in logs] == [2, 0, 3]
    found = summarise(logs, 3)
    assert found.tau == pytest.approx(8 / 3)
    assert found.accepted == pytest.approx(5 / 3)
    assert found.conditional == pytest.approx((2 / 3, 2 / 2, 1 / 2))
    assert found.unconditional == pytest.approx((2 / 3, 2 / 3, 1 / 3))
    plain = found.as_json()
    assert plain["accepted_per_step"] == pytest.approx(plain["tau"] - 1)
    assert plain["per_position"]["conditional"] == pytest.approx([2 / 3, 1.0, 0.5])


@given(LOGS)
def test_identities(logs: list[AcceptanceLog]) -> None:
    found = summarise(logs, 4)
    assert found.tau == pytest.approx(found.emitted / found.steps)
    assert found.tau == pytest.approx(1 + sum(found.unconditional))
    assert 1 <= found.tau <= 5
    assert list(found.unconditional) == sorted(found.unconditional, reverse=True)
    assert all(math.isnan(value) or 0 <= value <= 1 for value in found.conditional)
    if found.interval:
        taus = [1 + log.accepted.mean() for log in logs if log.steps]
        assert min(taus) - 1e-9 <= found.interval[0] <= found.interval[1] <= max(taus) + 1e-9


@given(LOGS)
def test_unconditional_is_the_product_of_conditionals_when_no_step_is_cut(logs: list[AcceptanceLog]) -> None:
    whole = [AcceptanceLog(log.accepted, np.full(log.steps, 4)) for log in logs]
    found = summarise(whole, 4)
    known = [value for value in found.conditional if not math.isnan(value)]
    assert np.cumprod(known) == pytest.approx(found.unconditional[: len(known)])
    assert speed.expected_tau(known) == pytest.approx(found.tau)


def test_a_cut_step_gives_no_verdict_on_what_it_never_reached() -> None:
    found = summarise(
        [AcceptanceLog.of([1, 2], [1, 3])], 3
    )  # the first step emitted two tokens, the second one ended the answer
    assert found.tau == 2.5
    assert found.conditional == pytest.approx((2 / 2, 1 / 1, 0 / 1))
    assert found.unconditional == pytest.approx((1, 1 / 2, 0))
    assert summarise([AcceptanceLog.of([0], [3])], 3).as_json()["per_position"]["conditional"] == [0.0, None, None]


@given(samples())
def test_offline_steps_against_brute_force(sample: tuple[np.ndarray, np.ndarray]) -> None:
    accept, live = sample
    every, steps = all_starts(accept, live), walk(accept, live)
    rows = [row for row in range(len(live)) if live[row, 0]]
    assert [accepted + 1 for accepted in every.accepted] == [emitted_from(accept, live, row) for row in rows]
    expected, row = [], 0
    while row < len(live):
        emitted = emitted_from(accept, live, row)
        expected += [emitted] if emitted else []
        row += max(emitted, 1)
    assert [accepted + 1 for accepted in steps.accepted] == expected
    assert steps.emitted == live[:, 0].sum()  # every token after the first of each answer, once


@given(samples())
def test_remaining_counts_the_rest_of_the_answer(sample: tuple[np.ndarray, np.ndarray]) -> None:
    _, live = sample
    for row, count in enumerate(remaining(live)):
        assert all(live[row : row + count, 0])
        assert row + count == len(live) or not live[row + count, 0]


def test_a_perfect_draft_reaches_k_plus_one_and_a_wrong_one_stays_at_one() -> None:
    live = answers([(3, 9)], 0, 3)  # the prefill gives one token; 8 follow, in two steps of 4
    assert walk(np.ones_like(live), live).accepted.tolist() == [3, 3]
    assert walk(np.zeros_like(live), live).accepted.tolist() == [0] * 8


def test_the_label_mask_is_refused() -> None:
    live = answers([(3, 9)], 0, 3)
    live[1, 0] = True  # row 1 has a supervised label, but x_2 belongs to the prompt: inference never starts there
    with pytest.raises(ValueError, match="exact mask"):
        all_starts(np.ones_like(live), live)


def test_interval_is_seeded_and_narrows_with_prompts() -> None:
    emitted, steps = [30, 20, 10, 25], [10, 10, 10, 10]
    assert bootstrap_interval(emitted, steps, seed=1) == bootstrap_interval(emitted, steps, seed=1)
    low, high = bootstrap_interval(emitted, steps, seed=1) or (0.0, 0.0)
    narrow_low, narrow_high = bootstrap_interval(emitted * 20, steps * 20, seed=1) or (0.0, 0.0)
    assert low < narrow_low < 85 / 40 < narrow_high < high
    spread = np.std(np.array(emitted) / 10) / math.sqrt(80)  # steps are equal, so the ratio is a mean of 80
    assert (narrow_high - narrow_low) / 2 == pytest.approx(1.96 * spread, rel=0.1)


def test_one_prompt_has_no_interval() -> None:
    assert summarise([AcceptanceLog.of([1, 0], [3, 3]), AcceptanceLog.of([], [])], 3).interval is None


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: summarise([], 3), "no verify step"),
        (lambda: summarise([AcceptanceLog.of([], [])], 3), "no verify step"),
        (lambda: summarise([AcceptanceLog.of([4], [4])], 3), "more than 3"),
        (lambda: AcceptanceLog.of([4], [3]), "0..drafted"),
        (lambda: AcceptanceLog.of([1, 2], [3]), "must be equal"),
        (lambda: all_starts(np.ones((4, 2), bool), np.ones((4, 3), bool)), "must be equal"),
    ],
)
def test_misuse_is_refused(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_modelled_speedup_by_hand() -> None:
    plain = Costs(plain=Timing(10, 1.0), whole=Timing(10, 1.1))
    speculative = Costs(verify=Timing(4, 0.6), draft=Timing(12, 0.12), whole=Timing(10, 0.8))
    found = speed.compare(plain, speculative, tau=2.5, draft_tokens=3)
    assert found["verify_ratio"] == pytest.approx(1.5)
    assert found["draft_ratio"] == pytest.approx(0.1)
    assert found["modelled_speedup"] == pytest.approx(2.5 / (1.5 + 0.3))
    assert found["measured_speedup"] == pytest.approx(1.1 / 0.8)
    assert speed.compare(Costs(), Costs(), 1.0, 3)["modelled_speedup"] is None


def test_costs_add_up_and_survive_json() -> None:
    one = Costs(plain=Timing(2, 0.5), verify=Timing(1, 0.25))
    assert speed.total([one, Costs.from_json(one.as_json())]) == Costs(plain=Timing(4, 1.0), verify=Timing(2, 0.5))
