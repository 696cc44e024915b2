"""The unrolled training against a step-by-step decoder, the masks against their definition, the losses against autograd."""

from __future__ import annotations

import math
import sys
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional
from transformers import DeepseekV2Config, DeepseekV3Config
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Attention, DeepseekV2RotaryEmbedding
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention, DeepseekV3RotaryEmbedding

import fixtures_memory
from headstart.data.store import normalizer_and_top1
from headstart.drafts import attention
from headstart.drafts.eagle3 import DraftCache, Eagle3, _causal
from headstart.drafts.losses import Teacher, fused_divergence
from headstart.drafts.rows import Run, live_mask, plan_rows, within
from headstart.drafts.shape import DraftShape, LatentShape
from headstart.drafts.ttt import unroll
from headstart.target.head import TargetHead

LATENT = {"head_dim": 14, "num_kv_heads": 4, "latent": LatentShape(q_rank=20, kv_rank=18, nope=8, rope=6, value=10)}
AS_WIDE = {**LATENT, "latent": LatentShape(q_rank=20, kv_rank=18, nope=8, rope=6, value=14)}  # values need no padding
BACKENDS = {"dense": attention.dense, "flash_cpu": attention.flash_cpu}


def make_draft(layers: int = 1, seed: int = 0, **changes: Any) -> Eagle3:
    torch.manual_seed(seed)
    sizes = {
        "hidden_size": 32, "target_hidden_size": 24, "aux_layers": (1, 3, 5), "num_layers": layers, "num_heads": 4,
        "num_kv_heads": 2, "head_dim": 12, "intermediate_size": 40, "target_vocab_size": 90, "draft_vocab_size": 50,
        "rms_norm_eps": 1e-5, "rope_theta": 1e4, "max_positions": 4096, "norm_before_residual": False, "fc_norm": False,
        "norm_output": False,
    }  # fmt: skip
    shape = DraftShape(**(sizes | changes))
    draft = Eagle3(shape, torch.randn(90, 24)).double()
    for parameter in draft.parameters():
        torch.nn.init.normal_(parameter, std=0.3) if parameter.ndim > 1 else parameter.data.add_(
            torch.randn_like(parameter) * 0.2
        )
    return draft


def pack(lengths: list[int], supervised: list[np.ndarray], steps: int, seed: int = 1, kind: str = "exact"):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 90, (sum(lengths),), generator=generator)
    aux = torch.randn(sum(lengths), 3, 24, generator=generator, dtype=torch.float64)
    plan = plan_rows(supervised, steps, kind)  # type: ignore[arg-type]
    return tokens, aux, plan


def chain(draft: Eagle3, tokens: torch.Tensor, aux: torch.Tensor, row: int, steps: int) -> list[torch.Tensor]:
    """What decoding computes for the chain that starts at `row` of one document: the true prefix, then its own outputs."""
    cache = DraftCache()
    prefix = draft.fuse(aux[: row + 1])
    out = draft.extend(tokens[1 : row + 2], prefix, cache)[-1:]
    outs = [out]
    for index in range(1, steps):
        out = draft.extend(tokens[row + 1 + index : row + 2 + index], draft.feed(out), cache)
        outs.append(out)
    return outs


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("layers", "flags"),
    [
        (1, {}),
        (1, {"norm_before_residual": True}),
        (2, {"fc_norm": True, "norm_output": True}),
        (3, {}),
        (1, LATENT),
        (2, AS_WIDE | {"fc_norm": True, "norm_output": True}),
        (1, {"sliding_window": 4}),
        (2, {"sliding_window": 7}),
    ],
)
def test_every_row_equals_step_by_step_decoding(backend: str, layers: int, flags: dict) -> None:
    draft, steps = make_draft(layers, **flags), 4
    lengths = [1, 2, 3, 17, 40]
    supervised = [np.ones(length, bool) for length in lengths]
    supervised[4][:20] = False
    supervised[4][28:32] = False
    tokens, aux, plan = pack(lengths, supervised, steps)
    with torch.no_grad():
        outs = unroll(draft, aux[plan.context], tokens, plan, BACKENDS[backend])
        starts = np.cumsum([0, *lengths])
        compared = 0
        for index, step in enumerate(plan.steps):
            for at, context in enumerate(step.rows.tolist()):
                token = int(plan.context[context])
                document = int(np.searchsorted(starts, token, side="right")) - 1
                begin, end = starts[document], starts[document + 1]
                expected = chain(draft, tokens[begin:end], aux[begin:end], token - begin, index + 1)[index][0]
                torch.testing.assert_close(outs[index][at], expected, atol=1e-9, rtol=1e-9)
                compared += 1
    brute = sum(brute_mask(mask, steps).any(axis=0).sum() for mask in supervised)
    assert compared >= brute > 20


V2 = (DeepseekV2Config, DeepseekV2Attention, DeepseekV2RotaryEmbedding)
V3 = (DeepseekV3Config, DeepseekV3Attention, DeepseekV3RotaryEmbedding)
UNSTRETCHED = {"rope_type": "yarn", "factor": 1.0, "mscale": 0.707, "mscale_all_dim": 1.4, "beta_fast": 2}


@pytest.mark.parametrize(
    ("theirs", "rope", "more", "equal"),
    [
        (V2, {"rope_type": "default"}, {}, True),
        (V2, UNSTRETCHED, {}, True),
        (V2, {**UNSTRETCHED, "factor": 4.0}, {}, False),
        (V3, UNSTRETCHED, {"rope_interleave": True}, True),
        (V3, {"rope_type": "default"}, {"rope_interleave": False}, False),
    ],
)
def test_latent_attention_is_that_of_deepseek(theirs: tuple, rope: dict, more: dict, equal: bool) -> None:
    """A second layer's attention, which reads the hidden state alone, against Transformers'. What makes it another function is
    refused when a foreign draft is read (`formats.reading`)."""
    draft = make_draft(2, **LATENT, rope_theta=300.0)
    sizes = {"q_lora_rank": 20, "kv_lora_rank": 18, "qk_nope_head_dim": 8, "qk_rope_head_dim": 6, "v_head_dim": 10}
    config = theirs[0](
        hidden_size=32, num_attention_heads=4, num_key_value_heads=4, **sizes, **more,
        rope_parameters={**rope, "rope_theta": 300.0}, attn_implementation="eager",
    )  # fmt: skip
    attention = theirs[1](config, layer_idx=0).double().eval()
    attention.load_state_dict(draft.layers[1].self_attn.state_dict())
    for module in attention.modules():
        if hasattr(module, "variance_epsilon"):
            module.variance_epsilon = draft.shape.rms_norm_eps
    inputs, positions = torch.randn(9, 32, dtype=torch.float64), torch.arange(9)
    mask = torch.full((9, 9), float("-inf"), dtype=torch.float64).triu(1)[None, None]
    turns = theirs[2](config)(inputs[None], positions[None])
    ours = draft.layers[1].self_attn
    with torch.no_grad():
        expected, _ = attention(inputs[None], attention_mask=mask, position_embeddings=turns)
        found = ours.result(_causal(ours.queries(inputs, positions), *ours.keys_values(inputs, positions)))
    assert torch.allclose(found, expected[0], atol=1e-5, rtol=1e-5) is equal  # their angles are float32


@pytest.mark.parametrize("window", [None, 64, 128])
@pytest.mark.parametrize("backend", BACKENDS)
def test_long_and_short_documents_in_one_pack_equal_decoding(backend: str, window: int | None) -> None:
    """Case C35: lengths around the kernels' block size, mixed in a batch; no NaN, and every chain is the decoder's."""
    draft, lengths = make_draft(sliding_window=window), [1, 2, 127, 128, 129]
    supervised = [np.arange(length) >= length - 9 for length in lengths]
    tokens, aux, plan = pack(lengths, supervised, 4)
    starts = np.cumsum([0, *lengths])
    with torch.no_grad():
        outs = unroll(draft, aux[plan.context], tokens, plan, BACKENDS[backend])
        for document, (begin, end) in enumerate(pairwise(starts)):
            mask = live_mask(supervised[document], 4)
            for row in np.flatnonzero(mask[0]):
                expected = chain(draft, tokens[begin:end], aux[begin:end], int(row), int(mask[:, row].sum()))
                for index, step in enumerate(plan.steps):
                    at = (plan.context[step.rows] == begin + row).nonzero()[:, 0]
                    for found in outs[index][at]:
                        torch.testing.assert_close(found, expected[index][0], atol=1e-9, rtol=1e-9)
    assert sum(len(step.rows) for step in plan.steps) == 3 * (8 + 7 + 6 + 5)  # of 9 answer tokens the first is given
    assert not any(out.isnan().any() for out in outs)


@pytest.mark.parametrize("layers", [1, 2, 3])
@pytest.mark.parametrize("steps", [1, 2, 5, 8])
@pytest.mark.parametrize("lengths", [[1, 2, 63, 64, 65, 127, 128, 129], [1, 2, 63, 64, 65, 1023], [130]])
def test_backends_agree_in_values_and_gradients(lengths: list[int], steps: int, layers: int) -> None:
    both_backends(lengths, steps, layers)


@pytest.mark.parametrize("changes", [LATENT, AS_WIDE], ids=["padded values", "values as wide as keys"])
def test_backends_agree_with_latent_attention(changes: dict) -> None:
    both_backends([1, 2, 63, 64, 65, 129], 4, 2, **changes)


@pytest.mark.parametrize("window", [8, 63, 64, 200])
@pytest.mark.parametrize("layers", [1, 2])
def test_backends_agree_with_a_sliding_window(window: int, layers: int) -> None:
    both_backends([1, 2, 63, 64, 65, 700], 8, layers, sliding_window=window)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("window", [None, 5, 40])
def test_flex_attention_sees_the_same(window: int | None) -> None:
    """Values alone: it has no backward pass on a CPU."""
    draft, lengths = make_draft(2, sliding_window=window), [1, 2, 63, 64, 65, 129]
    rng = np.random.default_rng(0)
    tokens, aux, plan = pack(lengths, [rng.random(length) < 0.6 for length in lengths], 5, kind="label")
    with torch.no_grad():
        found, expected = (
            unroll(draft, aux[plan.context], tokens, plan, attend) for attend in (attention.flex, attention.dense)
        )
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-9, rtol=1e-9)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("form", [*BACKENDS.values(), attention.flash_cuda, attention.flex])
def test_a_step_without_rows(form: attention.Attend) -> None:
    """Every answer is shorter than T."""
    none, context = torch.zeros(0, 4, 12), torch.zeros(7, 2, 12)
    assert form(none, context, context, torch.zeros(2, 0, 2, 12), torch.zeros(2, 0, 2, 12), ()).shape == none.shape


@given(st.integers(0, 9), st.integers(0, 30), st.integers(1, 40), st.integers(1, 45), st.integers(1, 20))
def test_a_reach_is_its_definition(start: int, before: int, rows: int, reach: int, piece: int) -> None:
    """Pieces have every row once, and row t sees the rows above t - reach, from its document's start up to itself."""
    low = start + before
    whole, seen = Run(start, low, low + rows, 100), {}
    for run in within([whole], reach, piece):
        for row, sees in enumerate(attention._seen(run, torch.device("cpu"))):
            assert run.at + row not in seen
            seen[run.at + row] = [run.start + int(key) for key in sees.nonzero()]
        assert run.pairs == int(attention._seen(run, torch.device("cpu")).sum())
    assert seen == {100 + i: list(range(max(start, low + i - reach + 1), low + i + 1)) for i in range(rows)}
    assert whole.pairs == sum(before + i + 1 for i in range(rows))


def both_backends(lengths: list[int], steps: int, layers: int, **changes: Any) -> None:
    rng = np.random.default_rng(0)
    supervised = [rng.random(length) < 0.8 for length in lengths]
    results = {}
    for name, backend in BACKENDS.items():
        draft = make_draft(layers, **changes)
        tokens, aux, plan = pack(lengths, supervised, steps, kind="label")
        aux = aux[plan.context].requires_grad_()
        outs = unroll(draft, aux, tokens, plan, backend)
        sum((out.sin() * (i + 1)).sum() for i, out in enumerate(outs)).backward()
        results[name] = [*outs, aux.grad, *(p.grad for p in draft.parameters() if p.grad is not None)]
    for one, other in zip(*results.values(), strict=True):  # float64: rounding grows with layers, steps and rows
        torch.testing.assert_close(one, other, atol=1e-9 * max(1.0, float(other.detach().abs().max())), rtol=0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="a GPU's kernels need a GPU")
@pytest.mark.parametrize("reach", [None, 50])
@pytest.mark.parametrize("form", [attention.flash_cuda, attention.flex])
def test_forms_of_a_gpu_agree_with_the_dense_one(form: attention.Attend, reach: int | None) -> None:
    """bfloat16 against the dense form in float32, within bfloat16's rounding; runs that begin inside their documents too."""
    rng = np.random.default_rng(0)
    lengths = [1, 2, 63, 64, 65, 1023]
    plan = plan_rows([rng.random(length) < 0.8 for length in lengths], 3, "label").to("cuda")
    step, count = plan.steps[2], len(plan.context)
    make = lambda *shape: torch.randn(*shape, device="cuda", dtype=torch.bfloat16)  # noqa: E731
    rows = len(step.rows)
    narrow = [make(rows, 8, 64), make(count, 2, 64), make(count, 2, 64), make(2, rows, 2, 64), make(2, rows, 2, 64)]
    wide = [x.float().requires_grad_() for x in narrow]
    for x in narrow:
        x.requires_grad_()
    runs = step.runs if reach is None else within(step.runs, reach)
    found, expected = form(*narrow, runs), attention.dense(*wide, runs)
    torch.testing.assert_close(found.float(), expected, atol=2e-2, rtol=2e-2)
    weight = torch.randn_like(expected)
    (found.float() * weight).sum().backward()
    (expected * weight).sum().backward()
    for one, other in zip(narrow, wide, strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert float((one.grad.float() - other.grad).norm() / other.grad.norm()) < 0.02


def brute_mask(supervised: np.ndarray, steps: int) -> np.ndarray:
    """The definition of the exact mask, literally."""
    length = len(supervised)
    mask = np.zeros((steps, length), bool)
    for i in range(steps):
        for t in range(length):
            mask[i, t] = t + i + 2 < length and all(supervised[t + j] for j in range(1, i + 3))
    return mask


@given(st.lists(st.booleans(), max_size=30), st.integers(1, 6))
def test_exact_mask_is_its_definition(bits: list[bool], steps: int) -> None:
    supervised = np.array(bits, dtype=bool)
    np.testing.assert_array_equal(live_mask(supervised, steps), brute_mask(supervised, steps))


@given(st.lists(st.booleans(), max_size=30), st.integers(1, 6))
def test_label_mask_is_its_definition(bits: list[bool], steps: int) -> None:
    found = live_mask(np.array(bits, dtype=bool), steps, "label")
    for i in range(steps):
        for t in range(len(bits)):
            assert found[i, t] == (t + 2 + i < len(bits) and bits[t + 2 + i])


@given(
    st.lists(st.lists(st.booleans(), max_size=20), min_size=1, max_size=5),
    st.integers(1, 5),
    st.sampled_from(["exact", "label"]),
)
@settings(deadline=None)
def test_plan_covers_every_live_row_once_with_the_right_tokens(
    documents: list[list[bool]], steps: int, kind: str
) -> None:
    arrays = [np.array(bits, dtype=bool) for bits in documents]
    plan = plan_rows(arrays, steps, kind)  # type: ignore[arg-type]
    starts = np.cumsum([0, *map(len, arrays)])
    for i, step in enumerate(plan.steps):
        tokens = plan.context[step.rows]
        live = set(tokens[step.live].tolist())
        assert live == {
            int(starts[d] + t) for d, a in enumerate(arrays) for t in np.flatnonzero(live_mask(a, steps, kind)[i])
        }  # type: ignore[arg-type]
        assert torch.equal(step.inputs, tokens + 1 + i)
        assert torch.equal(plan.teacher[step.labels[step.live]], tokens[step.live] + 1 + i)
        covered = [row for run in step.runs for row in range(run.low, run.high)]
        assert covered == step.rows.tolist()
        if i:
            assert torch.equal(plan.steps[i - 1].rows[step.parent], step.rows)


def test_alignment_table() -> None:
    """Case C13: 8 tokens, answer at positions 4..6: (input token, state position, teacher token) for steps 0..2."""
    supervised = np.zeros(8, bool)
    supervised[4:7] = True
    plan = plan_rows([supervised], 3)
    table = [
        [
            (int(t), int(plan.context[r]), int(plan.teacher[y]) + 1)
            for t, r, y in zip(s.inputs, s.rows, s.labels, strict=True)
        ]
        for s in plan.steps
    ]
    # The answer's first token (4) is never drafted: the target itself produces it.
    # 5 and 6 are the teacher once at every step where they can be.
    assert table == [[(4, 3, 5), (5, 4, 6)], [(5, 3, 6)], []]


def test_gradient_reaches_only_what_a_live_row_reads() -> None:
    supervised = np.zeros(10, bool)
    supervised[6:9] = True
    draft = make_draft()
    tokens, aux, plan = pack([10], [supervised], 3)
    aux.requires_grad_()
    outs = unroll(draft, aux[plan.context], tokens, plan)
    sum(out.sum() for out in outs).backward()
    assert aux.grad is not None
    touched = aux.grad.abs().sum((1, 2)) > 0
    assert touched.tolist() == [True] * 7 + [False] * 3  # rows 5 and 6 are live; 0..6 are their keys, nothing after


def make_teacher(rows: int, vocab: int, kept: int, dtype: torch.dtype = torch.float32) -> tuple[Teacher, torch.Tensor]:
    torch.manual_seed(3)
    hidden, head = torch.randn(rows, 16, dtype=dtype), torch.randn(vocab, 16, dtype=dtype)
    logits = hidden @ head.T
    ids = torch.randperm(vocab)[:kept].sort().values
    token = torch.arange(rows) % (kept + 1) - 1  # -1: the token that follows is not in the draft vocabulary
    teacher = Teacher(hidden, head[ids], logits.logsumexp(-1).float(), token=token)
    return teacher, logits.softmax(-1)[:, ids]


def plain_loss(logits: torch.Tensor, p: torch.Tensor, kind: str, token: torch.Tensor) -> torch.Tensor:
    """Each loss as its formula stands, for autograd; `mixture` is {kl: 0.7, ce: 0.3, tv: 0.5}."""
    q = logits.softmax(-1)
    alpha = torch.minimum(p, q).sum(-1)
    kept = p / p.sum(-1, keepdim=True)
    kl = functional.kl_div(logits.log_softmax(-1), kept, reduction="none").sum(-1)
    share = torch.exp(-3 * alpha.detach())
    ce = torch.where(token < 0, 0.0, functional.cross_entropy(logits, token.clamp_min(0), reduction="none"))
    losses = {
        "kl": kl,
        "tv": 1 - alpha,
        "lk": share * kl + (1 - share) * (1 - alpha),
        "lk_alpha": -alpha.log(),
        "ce": ce,
    }
    return losses[kind] if kind in losses else 0.7 * kl + 0.3 * ce + 0.5 * (1 - alpha)


@pytest.mark.parametrize("kind", ["kl", "tv", "lk", "lk_alpha", "ce", "mixture"])
@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_fused_loss_equals_autograd(kind: str, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headstart.drafts.losses.CHUNK_BYTES", {"cpu": chunk * 4 * 20})
    teacher, p = make_teacher(11, 60, 20)
    hidden, weight = torch.randn(30, 12, requires_grad=True), torch.randn(20, 12, requires_grad=True)
    labels, scale = torch.randint(0, 11, (30,)), torch.rand(30)
    asked = {"kl": 0.7, "ce": 0.3, "tv": 0.5} if kind == "mixture" else kind
    total, stats = fused_divergence(hidden, weight, labels, scale, teacher, asked)  # type: ignore[arg-type]
    (total * 1.7).backward()
    found = hidden.grad, weight.grad
    hidden.grad = weight.grad = None
    assert teacher.token is not None
    rows = plain_loss(hidden @ weight.T, p[labels], kind, teacher.token[labels])
    ((rows * scale).sum() * 1.7).backward()
    torch.testing.assert_close(total, (rows * scale).sum(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(stats.loss, rows.detach(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found, (hidden.grad, weight.grad), atol=1e-5, rtol=1e-5)
    q = (hidden @ weight.T).softmax(-1)
    torch.testing.assert_close(stats.alpha, torch.minimum(p[labels], q).sum(-1).detach(), atol=1e-6, rtol=1e-5)
    assert torch.equal(stats.choice, q.argmax(-1))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["kl", "tv", "lk", "lk_alpha", "ce"])
def test_bfloat16_gradients_of_a_good_draft_are_within_one_percent(kind: str) -> None:
    """Overlap 0.98 at a draft vocabulary of 32k, where q - p is smaller than bfloat16 resolves; against float64 autograd."""
    torch.manual_seed(0)
    vocab, width, rows = 32_000, 64, 24
    head = (torch.randn(vocab, width) / 8).bfloat16()
    teacher_states = torch.randn(rows, width) * 3
    states = (teacher_states + 0.03 * torch.randn(rows, width)).bfloat16()
    logits = teacher_states.double() @ head.double().T
    token = logits.argmax(-1)
    teacher = Teacher(teacher_states, head.float(), logits.logsumexp(-1).float(), token=token)
    hidden, weight = states.clone().requires_grad_(), head.float().requires_grad_()
    scale = torch.full((rows,), 1 / rows)
    total, stats = fused_divergence(hidden, weight, torch.arange(rows), scale, teacher, kind)  # type: ignore[arg-type]
    total.backward()
    exact_hidden, exact_weight = states.double().requires_grad_(), head.double().requires_grad_()
    plain_loss(exact_hidden @ exact_weight.T, logits.softmax(-1), kind, token).mean().backward()
    assert float(stats.alpha.mean()) == pytest.approx(0.98, abs=0.01)
    for found, exact in ((hidden.grad, exact_hidden.grad), (weight.grad, exact_weight.grad)):
        assert found is not None
        assert exact is not None
        assert float((found.double() - exact).norm() / exact.norm()) < 0.01


def test_alpha_counts_the_mass_outside_the_draft_vocabulary_as_lost() -> None:
    """A draft equal to the renormalised target accepts with the kept mass at best (theory), not with 1."""
    teacher, p = make_teacher(6, 60, 20)
    weight = torch.eye(20)
    hidden = (p / p.sum(-1, keepdim=True)).log()
    _, stats = fused_divergence(hidden, weight, torch.arange(6), torch.ones(6), teacher)
    torch.testing.assert_close(stats.alpha, p.sum(-1))
    assert stats.loss.abs().max() < 1e-5
    assert (p.sum(-1) < 0.95).any()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is read from /proc")
def test_a_large_vocabulary_needs_little_memory() -> None:
    """Case C37: the normaliser over 150k ids and the loss on 8k of them, without the 1.2 GB of logits in between."""
    torch.manual_seed(0)
    rows, vocab, width = 2048, 150_000, 48
    ids = torch.arange(0, vocab, vocab // 8192)[:8192]
    head = TargetHead(weight := torch.randn(vocab, width) / 3, weight, torch.ones(width), 1e-6)
    last, hidden = torch.randn(rows, width), torch.randn(rows, width, requires_grad=True)
    draft = weight[ids].clone().requires_grad_()
    before = fixtures_memory.held_now()
    normalizer, top1 = normalizer_and_top1(last, head)
    teacher = Teacher(head.norm(last), head.restricted(ids).lm_head, normalizer)
    total, stats = fused_divergence(hidden, draft, torch.arange(rows), torch.full((rows,), 1 / rows), teacher)
    total.backward()
    assert fixtures_memory.peak() - before < 0.4 * 4 * rows * vocab
    plain, alpha = 0.0, []
    for part in torch.arange(rows).split(256):
        logits = head.norm(last[part]).double() @ weight.double().T
        p = logits.softmax(-1)[:, ids]
        q = (hidden[part].double() @ draft.double().T).detach().softmax(-1)
        kept = p / p.sum(-1, keepdim=True)
        plain += float((kept * (kept / q).log()).sum()) / rows
        alpha.append(torch.minimum(p, q).sum(-1))
        torch.testing.assert_close(normalizer[part].double(), logits.logsumexp(-1), rtol=1e-6, atol=0)
        assert torch.equal(top1[part].long(), logits.argmax(-1))
    assert math.isclose(float(total.detach()), plain, rel_tol=1e-5)
    torch.testing.assert_close(stats.alpha.double(), torch.cat(alpha), rtol=1e-4, atol=1e-6)


def test_entropy_bound_of_softcapped_teacher() -> None:
    teacher, _ = make_teacher(5, 60, 60)
    capped = Teacher(teacher.hidden, teacher.head, torch.zeros(5), softcap=2.0)
    assert capped.log_probs(slice(0, 5)).abs().max() <= 2.0
    assert math.isclose(
        float(capped.log_probs(slice(0, 1))[0, 0]),
        math.tanh(float(teacher.hidden[0] @ teacher.head[0]) / 2) * 2,
        abs_tol=1e-5,
    )
