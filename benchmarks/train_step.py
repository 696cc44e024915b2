#!/usr/bin/env python3
"""One EAGLE-3 training step, ours against a peer's: the same weights, the same batch, in alternation, in one run.

    python benchmarks/train_step.py [--tokens 2048] [--steps 7] [--shares 1.0 0.5 0.2] [--rounds 3] [--same-products] [--json FILE]
    python benchmarks/train_step.py --specforge FOLDER ...

The peer is speculators 0.9.0 (requirements/oracle.txt) or, with --specforge, SpecForge 0.2.0, which is no dependency either: get it
with `pip download --no-deps specforge==0.2.0`, unpack it with `python -m zipfile -e specforge-0.2.0-py3-none-any.whl FOLDER`.

Both compute in float32 on this machine's CPU with the threads that OMP_NUM_THREADS gives: ours with the matrix products that
headstart/products.py chooses, the peer with PyTorch's own unless --same-products gives it ours. Ours counts the rows that the peer
counts, and losses must agree to 1e-5 before anything is timed. A step is what the peer's trainer does up to the end of backward;
SpecForge's includes the target's logits over the whole vocabulary (speculators needs none, ours finds their normalizer in the
data), which --compact-teacher, its own option, never holds at once. The document is prompt then answer; `share` is the answer's
part. Printed: median step time with its spread, the ratio of each round, peak memory beyond what the process held before the step
(a process of its own for each), and the rate of our step against this machine's own matrix products, counting only what is needed
(training/flops.py).
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import fixtures_memory
from fixtures_models import save_llama
from headstart.drafts.eagle3 import Eagle3
from headstart.drafts.losses import Teacher, fused_divergence
from headstart.drafts.rows import RowPlan, plan_rows
from headstart.drafts.shape import DraftShape
from headstart.drafts.ttt import unroll
from headstart.formats import speculators, vllm
from headstart.formats.common import ExportFacts
from headstart.products import own_products, use_fast_products
from headstart.target.head import TargetHead
from headstart.training.build import new_draft
from headstart.training.flops import dense_flops, step_flops
from headstart.training.telemetry import measured_gemm

WIDTH, VOCAB, DRAFT_VOCAB = 576, 49_152, 8_192  # SmolLM2-135M's shape, and its demo's draft vocabulary
SHAPE = DraftShape(
    hidden_size=WIDTH, target_hidden_size=WIDTH, aux_layers=(2, 3, 4), num_layers=1, num_heads=9, num_kv_heads=3, head_dim=64,
    intermediate_size=1536, target_vocab_size=VOCAB, draft_vocab_size=DRAFT_VOCAB, rms_norm_eps=1e-5, rope_theta=1e5,
    max_positions=8192, norm_before_residual=False, fc_norm=False, norm_output=False,
)  # fmt: skip
DECAY = 0.8
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Work:
    """One batch: a document of `tokens` tokens, the last `share` of them supervised."""

    tokens: int
    steps: int
    share: float

    @property
    def mask(self) -> Tensor:
        return torch.arange(self.tokens) >= round(self.tokens * (1 - self.share))

    def random(self, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """Token ids [tokens], aux states [tokens, 3, d], last states [tokens, d]."""
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(VOCAB, (self.tokens,), generator=generator)
        aux = torch.randn(self.tokens, 3, WIDTH, generator=generator)
        return ids, aux, torch.randn(self.tokens, WIDTH, generator=generator)


@dataclass(frozen=True)
class Rows:
    """Which rows a peer counts, and how: our plan for them, and what a row's divergence counts for, [rows of all steps]."""

    plan: RowPlan
    scale: Tensor

    @property
    def labels(self) -> Tensor:
        return torch.cat([step.labels for step in self.plan.steps])


@dataclass(frozen=True)
class Peer:
    """step: makes a step that gives the loss, from a folder with `draft` and `target`. write: the draft as it loads it.

    cross_entropy: its loss is that, so larger than the divergence by the entropy of the target's distribution, a constant.
    """

    name: str
    write: Callable[[Path, Eagle3, ExportFacts], None]
    rows: Callable[[Work], Rows]
    step: Callable[[Path, Work], Callable[[], float]]
    cross_entropy: bool = False


def prepare(folder: Path, peer: Peer, work: Work) -> tuple[Eagle3, TargetHead]:
    """The same draft for both. Its vocabulary holds every token that the target finds likeliest in the batch, as a real one nearly
    does: SpecForge counts no other row."""
    target = save_llama(
        folder / "target", hidden_size=WIDTH, vocab_size=VOCAB, num_attention_heads=9, num_key_value_heads=3
    )
    found = load_file(target / "model.safetensors")
    head = TargetHead(found["model.embed_tokens.weight"], found["lm_head.weight"], found["model.norm.weight"], 1e-5)
    likeliest = torch.cat([head.logits(part).argmax(-1) for part in work.random()[2].split(256)]).unique()
    others = torch.arange(VOCAB)[~torch.isin(torch.arange(VOCAB), likeliest)]
    spread = others[:: len(others) // (DRAFT_VOCAB - len(likeliest))][: DRAFT_VOCAB - len(likeliest)]
    vocabulary = torch.cat((likeliest, spread)).sort().values
    draft = new_draft(SHAPE, head, vocabulary, lm_head="target", seed=0)
    peer.write(folder / "draft", draft, ExportFacts(str(target), ("LlamaForCausalLM",), "llama", 1, (2,), 3, True))
    return draft, head


def our_step(draft: Eagle3, head: TargetHead, work: Work, counted: Rows) -> Callable[[], float]:
    ids, aux, last = work.random()
    tokens, plan, labels = torch.cat((ids, torch.zeros(1, dtype=torch.int64))), counted.plan, counted.labels
    rows = head.restricted(draft.draft_to_target)
    normalizer = head.logits(last[plan.teacher]).logsumexp(-1)  # stored at capture, so no part of a step

    def step() -> float:
        draft.zero_grad(set_to_none=True)
        teacher = Teacher(head.norm(last[plan.teacher]), rows.lm_head, normalizer)
        outs = unroll(draft, aux[plan.context], tokens, plan)
        total, _ = fused_divergence(
            draft.norm(torch.cat(outs)), draft.lm_head.weight, labels, counted.scale, teacher, alpha=False
        )
        total.backward()
        return float(total.detach())

    return step


def entropy(draft: Eagle3, head: TargetHead, work: Work, counted: Rows) -> float:
    """Of the target's distribution over the draft vocabulary, summed as the loss is."""
    last = work.random()[2][counted.plan.teacher]
    log_p = head.restricted(draft.draft_to_target).logits(last).log_softmax(-1)
    return float((counted.scale * -(log_p.exp() * log_p).sum(-1)[counted.labels]).sum())


def speculators_rows(work: Work) -> Rows:
    """Its row t of step i counts where l_{t+1+i}, ours (`label`) where l_{t+2+i}; a step's loss is the mean of those."""
    plan = plan_rows([np.append(False, work.mask.numpy())], work.steps, "label")
    means = [s.live.float() * (DECAY**i / (int(s.live.sum()) + 1e-5)) for i, s in enumerate(plan.steps)]
    return Rows(plan, torch.cat(means))


def speculators_step(folder: Path, work: Work) -> Callable[[], float]:
    import oracle_speculators as theirs  # noqa: PLC0415 (slow to import)

    model = theirs.load(folder / "draft")
    ids, aux, last = work.random()
    batch = theirs.collate(theirs.Document(ids, aux, last, work.mask))
    loss_config = theirs.resolve_loss_config("kl_div", "eager")

    def step() -> float:
        model.zero_grad(set_to_none=True)
        _, loss, _ = model(**batch, ttt_steps=work.steps, ttt_step_loss_decay=DECAY, loss_config=loss_config)
        loss.backward()
        return float(loss.detach())

    return step


def specforge_rows(work: Work) -> Rows:
    """Its row t of step i counts where l_{t+i}: two tokens before its label, where ours (`label`) asks for l_{t+2+i}, the label's
    own. So our mask is its mask moved by two. The last token is out: its row would learn from a state after the end. A step's loss
    is the sum over the rows that count, by the number of all rows, the prompt's too."""
    plan = plan_rows([np.append([False, False], work.mask.numpy()[:-1])], work.steps, "label")
    means = [s.live.float() * (DECAY**i / work.tokens) for i, s in enumerate(plan.steps)]
    return Rows(plan, torch.cat(means))


def specforge_step(folder: Path, work: Work, *, compact: bool = False) -> Callable[[], float]:
    import oracle_specforge as theirs  # noqa: PLC0415 (not always there)

    assert theirs.DECAY == DECAY
    found = load_file(folder / "target" / "model.safetensors")
    head = TargetHead(found["model.embed_tokens.weight"], found["lm_head.weight"], found["model.norm.weight"], 1e-5)
    strategy = theirs.load(folder / "draft", folder / "target", work.steps, compact=compact)
    ids, aux, last = work.random()
    mask = work.mask & (torch.arange(work.tokens) < work.tokens - 1)
    batch = theirs.collate(theirs.Document(ids, aux, head.norm(last), mask))

    def step() -> float:
        strategy.trainable_module().zero_grad(set_to_none=True)
        loss = strategy.forward_loss(batch).loss
        loss.backward()
        return float(loss.detach())

    return step


def chosen_peer(options: argparse.Namespace) -> Peer:
    if not options.specforge:
        return Peer("speculators 0.9.0", speculators.write, speculators_rows, speculators_step)
    sys.path.insert(0, str(options.specforge))
    step = partial(specforge_step, compact=options.compact_teacher)
    name = "SpecForge 0.2.0" + (" with a compact teacher" if options.compact_teacher else "")
    return Peer(name, vllm.write, specforge_rows, step, cross_entropy=True)


def with_products(step: Callable[[], float], *, fast: bool) -> Callable[[], float]:
    def run() -> float:
        with nullcontext() if fast else own_products():
            return step()

    return run


def compare(folder: Path, peer: Peer, work: Work, rounds: int, *, same_products: bool) -> dict[str, Any]:
    draft, head = prepare(folder, peer, work)
    counted = peer.rows(work)
    ours = with_products(our_step(draft, head, work, counted), fast=True)
    theirs = with_products(peer.step(folder, work), fast=same_products)
    constant = entropy(draft, head, work, counted) if peer.cross_entropy else 0.0
    losses = ours(), theirs() - constant  # also the warm-up
    if not np.isclose(*losses, rtol=1e-5):
        raise SystemExit(f"the losses differ: ours {losses[0]:.8g}, theirs {losses[1]:.8g}")
    times: dict[str, list[float]] = {"ours": [], "theirs": []}
    for number in range(rounds):
        order = [("ours", ours), ("theirs", theirs)]
        for name, step in order if number % 2 else order[::-1]:
            gc.collect()
            began = time.perf_counter()
            step()
            times[name].append(time.perf_counter() - began)
    gemm, needed = measured_gemm(seconds=1.0), step_flops(SHAPE, counted.plan, frozen_head=False)
    best = min(times["ours"])
    return {
        "peer": peer.name,
        "share": work.share,
        "losses": losses,
        "seconds": times,
        "ratios": [b / a for a, b in zip(times["ours"], times["theirs"], strict=True)],
        "needed_gflop": needed / 1e9,
        "dense_gflop": dense_flops(SHAPE, work.tokens, work.steps) / 1e9,
        "gemm_gflops": gemm / 1e9,
        "of_the_limit": needed / best / gemm,
        "tokens_per_second": work.tokens / best,
    }


def peak_memory(who: str, work: Work, options: argparse.Namespace) -> float:
    """Bytes that one step needs beyond what was held before it, the second step of a process of its own."""
    command = [sys.executable, __file__, "--measure", who, "--tokens", str(work.tokens), "--steps", str(work.steps)]
    if options.specforge:
        command += ["--specforge", str(options.specforge)]
    if options.compact_teacher:
        command += ["--compact-teacher"]
    done = subprocess.run([*command, "--shares", str(work.share)], capture_output=True, text=True, check=True)
    return float(done.stdout.strip().splitlines()[-1])


def measure(who: str, peer: Peer, work: Work) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        draft, head = prepare(folder, peer, work)
        step = our_step(draft, head, work, peer.rows(work)) if who == "ours" else peer.step(folder, work)
        step()
        gc.collect()
        before = fixtures_memory.held_now()
        step()
        print(fixtures_memory.peak() - before)


def show(result: dict[str, Any]) -> None:
    ours, theirs = (result["seconds"][name] for name in ("ours", "theirs"))
    memory = result["memory"]
    print(
        f"{result['share']:>6.0%}  {statistics.median(ours):7.2f} s ({min(ours):.2f}-{max(ours):.2f})"
        f"  {statistics.median(theirs):7.2f} s ({min(theirs):.2f}-{max(theirs):.2f})"
        f"  {statistics.median(result['ratios']):5.1f}x ({min(result['ratios']):.1f}-{max(result['ratios']):.1f})"
        f"  {memory['ours'] / 2**30:5.2f} / {memory['theirs'] / 2**30:.2f} GiB = {memory['ours'] / memory['theirs']:.2f}"
        f"  {result['of_the_limit']:6.0%} of {result['gemm_gflops']:.0f} GFLOP/s  {result['tokens_per_second']:6.0f} tok/s",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--shares", type=float, nargs="+", default=[1.0, 0.5, 0.2])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--same-products", action="store_true", help="the peer with our matrix products too")
    parser.add_argument(
        "--specforge", type=Path, metavar="FOLDER", help="against SpecForge, from this unpacked wheel of 0.2.0"
    )
    parser.add_argument("--compact-teacher", action="store_true", help="SpecForge with its option of that name")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--measure", choices=["ours", "theirs"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    use_fast_products(CPU)
    peer = chosen_peer(options)
    if options.measure:
        return measure(options.measure, peer, Work(options.tokens, options.steps, options.shares[0]))
    print(f"s = {options.tokens}, T = {options.steps}, {torch.get_num_threads()} thread(s)")
    print(f"answer share, ours, {peer.name}, ratio, memory, rate")
    results = []
    for share in options.shares:
        work = Work(options.tokens, options.steps, share)
        with tempfile.TemporaryDirectory() as folder:
            result = compare(Path(folder), peer, work, options.rounds, same_products=options.same_products)
        result["memory"] = {who: peak_memory(who, work, options) for who in ("ours", "theirs")}
        show(result)
        results.append(result)
    if options.json:
        options.json.write_text(json.dumps(results, indent=2))
    return None


if __name__ == "__main__":
    main()
