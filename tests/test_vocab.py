"""The draft vocabulary: what is always inside, how it is filled, what is refused. Cases C24 and C25."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from fixtures_models import save_llama
from fixtures_text import T_PLAIN, save_tokenizer
from headstart import artifact, pipeline
from headstart.config import build
from headstart.data import rows
from headstart.data.templates import Template
from headstart.data.vocab import DraftVocab, choose, count_supervised, measure, pick_size, spread
from headstart.errors import GateError, UserError
from headstart.events import Events, read
from headstart.types import Sample, Split

TARGET = 512  # lm_head rows: more than the tokenizer's 400 ids
EOS, START, END = 396, 397, 398


def sample_of(ids: list[int], mask: list[int] | None = None, *, source: str = "a", split: Split = "train") -> Sample:
    supervised = np.array([1] * len(ids) if mask is None else mask, dtype=bool)
    return Sample("s", "c", source, split, np.array(ids, dtype=np.int32), supervised, "length")


def zeros(**counts: int) -> np.ndarray:
    made = np.zeros(TARGET, dtype=np.int64)
    for token, count in counts.items():
        made[int(token[1:])] = count
    return made


def test_c24_few_ids_seen_and_end_of_turn_never(tmp_path: Path):
    """60 distinct ids, draft size 128, two end ids, answers truncated; the pool knows 20 more ids."""
    template = Template.load(save_tokenizer(tmp_path, T_PLAIN, end_ids=[EOS, END]))
    seen = count_supervised([sample_of(list(range(100, 160)) * 3)], TARGET)
    pool = spread(np.arange(150, 180), np.full(30, 5), TARGET)
    forced = {*template.end_ids, *template.structure_ids}
    chosen = choose(128, seen, pool, forced, template.early_merges())
    ids = chosen.vocab.draft_to_target
    assert len(ids) == 128
    assert (np.diff(ids) > 0).all()
    assert ids.dtype == np.int64
    assert {EOS, START, END} <= set(ids.tolist())
    assert set(range(100, 180)) <= set(ids.tolist())
    assert chosen.filled == {"forced": 3, "answers": 60, "pool": 20, "merges": 45, "rest": 0}
    # the rest are the 45 merges learned first, not the lowest ids (single bytes, hardly ever used)
    assert set(ids.tolist()) - forced - set(range(100, 180)) == set(range(256, 301))


def test_ranking_is_by_answers_then_pool_then_merges_then_id():
    seen, pool = zeros(t7=3, t9=3, t11=5), zeros(t9=1, t4=2, t300=1, t11=9)
    order = [choose(size, seen, pool, [2], merges=[260, 6]).vocab for size in range(1, 10)]
    gained = [order[0].draft_to_target[0]] + [
        (set(after.draft_to_target) - set(before.draft_to_target)).pop() for before, after in pairwise(order)
    ]
    assert gained == [2, 11, 9, 7, 4, 300, 260, 6, 0]


def test_whole_vocabulary_is_the_identity():
    chosen = choose(TARGET, zeros(t5=1), zeros(), [3], [260])
    assert (chosen.vocab.draft_to_target == np.arange(TARGET)).all()
    assert chosen.vocab.mask.all()


def test_size_by_default_and_out_of_range():
    assert pick_size(None, 151_936) == 32_000
    assert pick_size(None, 400) == pick_size(400, 400) == 400
    with pytest.raises(UserError, match="larger than the target's"):
        pick_size(401, 400)
    with pytest.raises(UserError, match="too small"):
        choose(2, zeros(), zeros(), [1, 2, 3], [])
    with pytest.raises(UserError, match="do not belong together"):
        choose(8, zeros(), zeros(), [1, TARGET], [])


def test_only_supervised_tokens_count_and_foreign_ids_stop():
    assert count_supervised([sample_of([1, 2, 2, 3], [0, 1, 1, 0])], 5).tolist() == [0, 0, 2, 0, 0]
    with pytest.raises(GateError, match=f"sample s holds token id {TARGET}"):
        count_supervised([sample_of([1, TARGET])], TARGET)
    with pytest.raises(GateError, match="the pool of the prompts"):
        spread(np.array([TARGET]), np.array([1]), TARGET)


def test_coverage_by_hand():
    vocab = DraftVocab(np.array([1, 2, 3]), 10)
    coverage = measure(
        [sample_of([1, 9, 2, 9], [1, 1, 1, 0], source="b"), sample_of([3, 3, 3, 8, 8], source="a")], vocab
    )
    assert coverage.tokens == 8
    assert coverage.overall == 5 / 8
    assert coverage.by_source == {"a": 0.6, "b": pytest.approx(2 / 3, abs=1e-6)}
    assert measure([], vocab).overall is None


def test_written_and_read_back(tmp_path: Path):
    made = DraftVocab(np.array([0, 5, 9]), 10)
    made.write(tmp_path / "vocab.safetensors")
    assert (DraftVocab.read(tmp_path / "vocab.safetensors", 10).draft_to_target == made.draft_to_target).all()
    with pytest.raises(UserError, match="made for a target of 10 tokens, not 12"):
        DraftVocab.read(tmp_path / "vocab.safetensors", 12)


@pytest.mark.parametrize(
    ("tensors", "problem"),
    [
        ({"draft_to_target": np.array([0, 2, 2])}, "strictly rising"),
        ({"draft_to_target": np.array([0, 3, 2])}, "strictly rising"),
        ({"draft_to_target": np.array([0, 3, 10])}, "holds ids 0 to 10; the target has 10"),
        ({"draft_to_target": np.array([-1, 3])}, "holds ids -1 to 3"),
        ({"draft_to_target": np.array([0, 3], dtype=np.int32)}, "int32"),
        ({"draft_to_target": np.zeros((2, 2), dtype=np.int64)}, r"\[2, 2\]"),
        ({"draft_to_target": np.zeros(0, dtype=np.int64)}, r"\[0\]"),
        ({"other": np.array([1])}, "cannot be read"),
    ],
)
def test_c25_bad_maps_are_refused_with_the_reason(tmp_path: Path, tensors: dict[str, np.ndarray], problem: str):
    save_file(tensors, tmp_path / "vocab.safetensors")
    with pytest.raises(UserError, match=problem):
        DraftVocab.read(tmp_path / "vocab.safetensors", 10)


def test_c25_missing_or_broken_map(tmp_path: Path):
    for data in (None, b"", b"not safetensors at all"):
        if data is not None:
            (tmp_path / "vocab.safetensors").write_bytes(data)
        with pytest.raises(UserError, match="cannot be read"):
            DraftVocab.read(tmp_path / "vocab.safetensors", 10)


def test_a_map_that_breaks_the_rules_cannot_be_made():
    with pytest.raises(GateError, match="rising"):
        DraftVocab(np.array([2, 1]), 10)


_counts = st.dictionaries(st.integers(0, 39), st.integers(1, 9), max_size=30)


@settings(max_examples=150, deadline=None)
@given(_counts, _counts, st.sets(st.integers(0, 39), max_size=5), st.integers(5, 40), st.permutations(range(10, 30)))
def test_invariants(seen: dict[int, int], pool: dict[int, int], forced: set[int], size: int, merges: list[int]):
    seen_counts, pool_counts = (np.array([counts.get(i, 0) for i in range(40)]) for counts in (seen, pool))
    chosen = choose(size, seen_counts, pool_counts, forced, merges)
    inside = set(chosen.vocab.draft_to_target.tolist())
    assert len(inside) == size
    assert forced <= inside
    assert sum(chosen.filled.values()) == size
    if size < 40:
        best_outside = max((seen.get(i, 0), pool.get(i, 0)) for i in set(range(40)) - inside)
        assert all((seen.get(i, 0), pool.get(i, 0)) >= best_outside for i in inside - forced)
    # no set of that size with the forced ids covers more of the training tokens
    wanted = Counter({i: n for i, n in seen.items() if i not in forced}).most_common(size - len(forced))
    assert sum(seen_counts[list(inside)]) == sum(n for _, n in wanted) + sum(seen.get(i, 0) for i in forced)


def test_stage(tmp_path: Path):
    """Padded target (512 rows, 400 ids): chosen from training answers alone, measured on the held-out ones."""
    folder = save_tokenizer(save_llama(tmp_path / "target"), T_PLAIN, end_ids=[EOS, END])
    raw = {"target": {"model": str(folder)}, "data": {"sources": ["a.jsonl"]}, "vocab": {"size": 64}}
    events, root = Events(tmp_path / "events.jsonl", quiet=True), tmp_path / "run"
    run = build(raw)
    samples = [
        sample_of(list(range(100, 140))),
        sample_of(list(range(130, 150)), source="b", split="validation"),
        sample_of([100, 399], source="c", split="validation"),
    ]
    for folder_name, verb, parents in (("prompts", "prepare", ()), ("conversations", "regenerate", ("prompts",))):
        opened = {name: artifact.open_artifact(root / name, name) for name in parents}
        settings_of = pipeline.settings_of(run, pipeline.BY_VERB[verb])
        with artifact.create(root / folder_name, folder_name, settings_of, opened) as made:
            rows.write_pool(made.file("pool.parquet"), {7: 3, 8: 2})
            rows.write_samples(made.file("samples.parquet"), samples)
    vocab = pipeline.execute(run, root, "vocab", events)
    ids = DraftVocab.read(vocab.path, TARGET).draft_to_target
    assert set(ids.tolist()) == {*range(100, 140), 7, 8, EOS, START, END, *range(256, 275)}
    assert vocab.counts["filled"] == {"forced": 3, "answers": 40, "pool": 2, "merges": 19, "rest": 0}
    assert vocab.counts["coverage"] == {
        "tokens": 22,
        "overall": pytest.approx(11 / 22),
        "by_source": {"b": 0.5, "c": 0.5},
    }
    assert any("50.00 % of 22 held-out" in event.get("text", "") for event in read(tmp_path / "events.jsonl"))
    with pytest.raises(UserError, match="larger than the target's"):
        pipeline.execute(build(raw, ["vocab.size=513"]), root, "vocab", events)
    whole = pipeline.execute(build(raw, ["vocab.size=512"]), root, "vocab", events)
    assert (DraftVocab.read(whole.path, TARGET).draft_to_target == np.arange(TARGET)).all()
