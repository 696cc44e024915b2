"""The same weights and the same batch in speculators 0.9.0: equal logits at every step, equal loss, equal gradients.

Their model is loaded from our export, so the format is tested with it.

Masks: at step i their row t counts when l_{t+1+i} is set, ours (kind `label`) when l_{t+2+i} is: the label's own token.
So our document gets one token more and its flags stand one place later; then the same rows count. Where every token is
supervised, the exact mask counts these rows too. Only single documents are compared: packed, they score the last rows
of a document against the labels of the next.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from fixtures_drafts import random_draft
from fixtures_models import VOCAB, save_llama, save_tied
from headstart.drafts.eagle3 import Eagle3
from headstart.drafts.losses import Teacher, fused_divergence
from headstart.drafts.rows import MaskKind, RowPlan, plan_rows
from headstart.drafts.ttt import unroll
from headstart.formats import speculators, tensors
from headstart.formats.common import ExportFacts
from headstart.target.head import TargetHead

if TYPE_CHECKING:
    import oracle_speculators as oracle

pytestmark = pytest.mark.slow

TOKENS, WIDTH = 40, 64
FLAGS: dict[str, dict[str, Any]] = {
    "official": {},
    "norm before residual": {"norm_before_residual": True},
    "eagle 3.1": {"fc_norm": True, "norm_output": True},
    "four aux, wide heads": {"aux_layers": (0, 2, 5, 7), "head_dim": 24},
    "full vocabulary": {"draft_vocab_size": VOCAB},
}
MASKS = {"all": (0, TOKENS), "answer": (12, TOKENS), "answer inside": (9, 26)}


@pytest.fixture(scope="module")
def theirs() -> Any:
    import oracle_speculators

    return oracle_speculators


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("target"))


def read_head(folder: Path) -> TargetHead:
    found = load_file(folder / "model.safetensors")
    embed = found["model.embed_tokens.weight"]
    return TargetHead(embed, found.get("lm_head.weight", embed), found["model.norm.weight"], 1e-5)


def exported(folder: Path, target: Path, **changes: Any) -> Eagle3:
    """A random draft, written for speculators with `target` as its verifier."""
    draft = random_draft(embed=read_head(target).embed, **changes)
    facts = ExportFacts(str(target), ("LlamaForCausalLM",), "llama", 1, (2,), 3, True)
    speculators.write(folder, draft, facts)
    return draft


def random_document(theirs: Any, draft: Eagle3, supervised: tuple[int, int]) -> oracle.Document:
    generator = torch.Generator().manual_seed(5)
    mask = torch.zeros(TOKENS, dtype=torch.bool)
    mask[slice(*supervised)] = True
    return theirs.Document(
        input_ids=torch.randint(VOCAB, (TOKENS,), generator=generator),
        aux=torch.randn(TOKENS, len(draft.shape.aux_layers), WIDTH, generator=generator),
        last=torch.randn(TOKENS, WIDTH, generator=generator),
        mask=mask,
    )


@dataclass(frozen=True)
class Recipe:
    """T, and the weight decay**i of step i."""

    steps: int
    decay: float


@dataclass(frozen=True)
class Ours:
    plan: RowPlan
    logits: list[Tensor]
    loss: Tensor
    losses: list[Tensor]


def train_step(draft: Eagle3, head: TargetHead, document: oracle.Document, recipe: Recipe, kind: MaskKind) -> Ours:
    """Our forward and backward; the mean of each step divides by its count + 1e-5, as theirs does."""
    supervised = np.append(False, document.mask.numpy())
    tokens = torch.cat((document.input_ids, torch.zeros(1, dtype=torch.int64)))
    plan = plan_rows([supervised], recipe.steps, kind)
    outs = unroll(draft, document.aux[plan.context], tokens, plan)
    rows = draft.draft_to_target
    last = document.last[plan.teacher]
    teacher = Teacher(head.norm(last), head.restricted(rows).lm_head, head.logits(last).logsumexp(-1))
    hidden = draft.norm(torch.cat(outs))
    labels = torch.cat([step.labels for step in plan.steps])
    means = [step.live / (step.live.sum() + 1e-5) * recipe.decay**index for index, step in enumerate(plan.steps)]
    loss, stats = fused_divergence(hidden, draft.lm_head.weight, labels, torch.cat(means), teacher)
    loss.backward()
    counts = [len(step.rows) for step in plan.steps]
    losses = [(part * mean).sum() for part, mean in zip(stats.loss.split(counts), means, strict=True)]
    return Ours(plan, [draft.logits(out).detach() for out in outs], loss.detach(), losses)


@pytest.mark.parametrize("flags", FLAGS.values(), ids=FLAGS)
@pytest.mark.parametrize("recipe", [Recipe(3, 1.0), Recipe(7, 0.8)], ids=["T=3", "T=7"])
@pytest.mark.parametrize("mask", MASKS)
def test_one_step(*, tmp_path: Path, theirs: Any, target: Path, mask: str, recipe: Recipe, flags: dict) -> None:
    draft, head = exported(tmp_path, target, **flags), read_head(target)
    document = random_document(theirs, draft, MASKS[mask])
    want = theirs.train_step(theirs.load(tmp_path), document, recipe.steps, recipe.decay)
    got = train_step(draft, head, document, recipe, "label")
    for index, step in enumerate(got.plan.steps):
        rows = got.plan.context[step.rows]
        torch.testing.assert_close(got.logits[index], want.logits[index][rows], rtol=1e-4, atol=2e-5)
        counted = document.mask[1 + index :].nonzero()[:, 0]
        assert rows[step.live].tolist() == counted.tolist()
        torch.testing.assert_close(got.losses[index], want.losses[index], rtol=1e-5, atol=0)
    torch.testing.assert_close(got.loss, want.loss, rtol=1e-5, atol=0)
    compare_gradients(draft, want.gradients)


def test_the_first_step_of_a_draft_with_a_sliding_window(tmp_path: Path, theirs: Any, target: Path) -> None:
    """They read the window from our export. Their mask of later steps does not move with the step, as serving does and ours."""
    draft, head = exported(tmp_path, target, sliding_window=6), read_head(target)
    document = random_document(theirs, draft, MASKS["answer"])
    want = theirs.train_step(theirs.load(tmp_path), document, 1, 1.0)
    got = train_step(draft, head, document, Recipe(1, 1.0), "label")
    torch.testing.assert_close(
        got.logits[0], want.logits[0][got.plan.context[got.plan.steps[0].rows]], rtol=1e-4, atol=2e-5
    )
    torch.testing.assert_close(got.loss, want.loss, rtol=1e-5, atol=0)
    compare_gradients(draft, want.gradients)


def compare_gradients(draft: Eagle3, want: dict[str, Tensor]) -> None:
    got = {tensors.foreign_name(name, "layers.0"): parameter.grad for name, parameter in draft.named_parameters()}
    assert set(got) == set(want)
    for name, gradient in got.items():
        assert gradient is not None
        assert float((gradient - want[name]).norm() / want[name].norm()) < 1e-5, name


def test_exact_mask_counts_the_same_rows_where_all_is_supervised(tmp_path: Path, theirs: Any, target: Path) -> None:
    draft, head = exported(tmp_path, target), read_head(target)
    document = random_document(theirs, draft, MASKS["all"])
    want = theirs.train_step(theirs.load(tmp_path), document, 3, 1.0)
    got = train_step(draft, head, document, Recipe(3, 1.0), "exact")
    torch.testing.assert_close(got.loss, want.loss, rtol=1e-5, atol=0)
    compare_gradients(draft, want.gradients)


def test_packed_documents_of_ours_equal_single_ones_of_theirs(tmp_path: Path, theirs: Any, target: Path) -> None:
    """Ours may pack: logits of both documents in one batch equal theirs of each alone."""
    draft = exported(tmp_path, target)
    documents = [random_document(theirs, draft, MASKS[name]) for name in ("answer", "answer inside")]
    model = theirs.load(tmp_path)
    alone = [theirs.train_step(model, document, 3, 1.0).logits for document in documents]
    supervised = [np.append(document.mask.numpy()[1:], False) for document in documents]
    plan = plan_rows(supervised, 3, "label")
    aux, tokens = (torch.cat([getattr(document, name) for document in documents]) for name in ("aux", "input_ids"))
    with torch.no_grad():
        outs = unroll(draft, aux[plan.context], tokens, plan)
        for index, step in enumerate(plan.steps):
            places = plan.context[step.rows]
            want = torch.stack([alone[int(place) // TOKENS][index][int(place) % TOKENS] for place in places])
            torch.testing.assert_close(draft.logits(outs[index]), want, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("flags", [*FLAGS.values(), {"sliding_window": 6}], ids=[*FLAGS, "sliding window"])
@pytest.mark.parametrize("save", [save_llama, save_tied])
def test_our_export_is_a_checkpoint_of_theirs(tmp_path: Path, theirs: Any, save: Any, flags: dict) -> None:
    """Offline, as any of theirs is loaded: every tensor in its place, nothing left to chance."""
    draft = exported(tmp_path / "draft", save(tmp_path / "target"), **flags)
    model = theirs.load_plain(tmp_path / "draft")
    written = tensors.outward(draft, "layers.0", embed=True)
    loaded = {name: tensor for name, tensor in model.state_dict().items() if not name.startswith("verifier_")}
    assert set(loaded) == set(written)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in written.items())
    config = model.config
    assert config.eagle_aux_hidden_state_layer_ids == list(draft.shape.aux_layers)
    assert config.norm_before_residual is draft.shape.norm_before_residual
    assert config.speculators_config.proposal_methods[0].speculative_tokens == 3
    model.save_pretrained(tmp_path / "again")
    shape, found = speculators.read(tmp_path / "again")
    assert shape == draft.shape
    assert all(torch.equal(found[name], tensor) for name, tensor in draft.state_dict().items())
