"""What the numbers of a run mean, in plain words: a paragraph for each thing that was measured.

Every sentence follows from numbers of the run; what was not measured is said to be unknown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from headstart.report import serving
from headstart.report.numbers import TRAINED, Headline, Numbers
from headstart.report.verdict import broken, changed, compare, interval

CLOSE = 0.05  # relative difference of two speeds that counts as none
LOW_CEILING = 0.9  # coverage below this is called a limit
FEW = 10  # prompts; fewer make a bootstrap interval that is itself uncertain
EXPENSIVE = 0.3  # plain steps: from here on a part of a round's cost is named as a reason


class Paragraph(NamedTuple):
    title: str
    text: str


def paragraphs(numbers: Numbers) -> list[Paragraph]:
    """What each number means, in the order of importance; parts without numbers are left out."""
    makers: tuple[tuple[str, Callable[[Numbers], Iterator[str]]], ...] = (
        ("Same answers?", _lossless),
        ("Acceptance length", _tau),
        ("In vLLM", serving.paragraph),
        ("By position", _positions),
        ("Speed", _speed),
        ("Vocabulary ceiling", _ceiling),
        ("Simulated and decoded", _agreement),
        ("Training", _training),
    )
    made = ((title, " ".join(maker(numbers))) for title, maker in makers)
    return [Paragraph(title, text) for title, text in made if text]


def _lossless(numbers: Numbers) -> Iterator[str]:
    head = numbers.headline
    if head is None:
        return
    judged = [(name, row) for name, row in head.drafts.items() if row["lossless"]]
    if not judged and (numbers.scores or {}).get("method") == "walk":
        yield "Not checked here: the target runs in vLLM alone, and acceptance comes from the states of its own answers."
        return
    if not judged:
        yield "Not checked: no prompt was decoded greedily, so nothing says that answers stay the same."
        return
    same, total = (sum(row["lossless"][i] for _, row in judged) for i in (0, 1))
    names = " and ".join(name for name, _ in judged)
    if same == total:
        yield (
            f"Yes. All {total} greedy answers with the {names} draft are, token by token, what the target gives alone."
        )
        yield "Speculation may change how fast an answer comes, never the answer."
        return
    yield from (broken(name, row) for name, row in judged if changed(row))
    yield (
        "The prompts are listed below the scores. The numbers that follow describe these answers, not the target's own."
    )


def _tau(numbers: Numbers) -> Iterator[str]:
    head = numbers.headline
    if head is None or head.trained is None:
        return
    trained, most = head.trained, head.draft_tokens + 1
    yield (
        f"The draft proposes {head.draft_tokens} tokens, then the target checks them in one step. Tau is how "
        "many tokens one such "
        f"step yields: 1.00 is no help, {most}.00 is the most. Here tau is {trained['tau']:.3f} over "
        f"{trained['steps']:,} steps."
    )
    if trained["interval"]:
        low, high = trained["interval"]
        yield (
            f"Judged by how much the {trained['prompts']} prompts differ, it lies between {low:.3f} and "
            f"{high:.3f} (95 % interval)."
        )
        if trained["prompts"] < FEW:
            yield "So few prompts make a rough interval."
    else:
        yield "There is no interval: it takes at least two prompts to see how much prompts differ."
    yield from _against_untrained(head)
    yield from _other_rows(numbers, head)


def _against_untrained(head: Headline) -> Iterator[str]:
    trained, untrained = head.trained, head.untrained
    assert trained is not None
    if untrained is None:
        yield "No untrained draft was measured (evaluate.baseline), so what training added is unknown."
        return
    before = f"The same draft before training has {untrained['tau']:.3f}{interval(untrained)}"
    match compare(trained, untrained):
        case "above":
            yield (
                f"{before}: the intervals are apart, so the gain comes from training and not from the choice "
                "of prompts."
            )
        case "below":
            yield f"{before}, which is better: look at the loss curve and the data before anything else."
        case "overlap":
            yield (
                f"{before}: the intervals overlap, so a gain is not proven. More prompts narrow them; more "
                "training may part them."
            )
        case "unknown":
            yield f"{before}; without intervals nothing is proven."


def _other_rows(numbers: Numbers, head: Headline) -> Iterator[str]:
    """The trained draft by prompt set, and at other temperatures."""
    assert numbers.scores is not None
    rows = [row for row in numbers.scores["rows"] if row["draft"] == TRAINED and row is not head.trained]
    sets = [f"{row['tau']:.2f} on {row['set']}" for row in rows if row["temperature"] == head.temperature]
    if sets:
        yield f"It is {' and '.join(sets)}."
    assert head.trained is not None
    hot = [row for row in rows if row["set"] == head.trained["set"] and row["temperature"] != head.temperature]
    if hot:
        yield (
            "When sampling it is "
            + ", ".join(f"{row['tau']:.2f} at temperature {row['temperature']:g}" for row in hot)
            + "."
        )


def _positions(numbers: Numbers) -> Iterator[str]:
    head = numbers.headline
    if head is None or head.trained is None:
        return
    own, whole = (head.trained["per_position"][kind] for kind in ("conditional", "unconditional"))
    yield f"The first drafted token is accepted in {_percent(whole[0])} of the steps."
    judged = [(place, value) for place, value in enumerate(own[1:], start=2) if value is not None]
    if not judged:
        return
    given = ", ".join(f"token {place} in {_percent(value)}" for place, value in judged)
    yield f"Where all before were right: {given}. All {len(whole)} are accepted in {_percent(whole[-1])}."
    first, last = own[0], judged[-1][1]
    if first is None:
        return
    if last < 0.5 * first:
        yield (
            "It falls quickly: the draft is weak when it builds on its own guesses, and fewer draft tokens "
            "would cost little."
        )
    elif last > 0.9 * first:
        yield "It holds over the chain: the draft builds on its own guesses about as well as on true states."


def _speed(numbers: Numbers) -> Iterator[str]:
    head = numbers.headline
    if head is None or head.trained is None:
        return
    row, costs = head.trained, head.trained["costs"]
    if row["modelled_speedup"] is None or row["measured_speedup"] is None:
        if (numbers.scores or {}).get("method") == "walk":
            yield "Not measured here: the target runs in vLLM. evaluate.engine = 'vllm' measures it there."
            return
        yield "Nothing was timed: no answer had a step after the prefill, with and without a draft."
        return
    verify, drafting = costs["verify_ratio"], head.draft_tokens * costs["draft_ratio"]
    yield (
        f"Checking {head.draft_tokens + 1} tokens took {verify:.2f} times as long as a plain step of the target, and "
        f"{head.draft_tokens} draft steps together {drafting:.2f} times. So a round costs "
        f"{verify + drafting:.2f} plain steps, and pays "
        f"when tau is above that. Tau is {row['tau']:.2f}: the modelled speed-up is {row['modelled_speedup']:.2f}."
    )
    if verify < 1 - CLOSE:
        yield (
            "More tokens cannot take less time than one: something else ran on this machine meanwhile. "
            "Take nothing from the times; tau does not depend on them."
        )
    yield from _measured(row["modelled_speedup"], row["measured_speedup"])
    if row["measured_speedup"] < 1:
        yield f"Decoding with this draft is slower than without on this machine{_why_slow(numbers, verify, drafting)}"
    yield "A serving engine has other costs: what counts is its speed at your load."


def _measured(modelled: float, measured: float) -> Iterator[str]:
    yield f"The clock says {measured:.2f}, with everything counted."
    if measured < modelled * (1 - CLOSE):
        yield (
            "That is less than modelled, since the model leaves out what happens between the steps: choosing "
            "tokens, cutting caches back."
        )
    elif measured > modelled * (1 + CLOSE):
        yield "That is more than modelled: times of single steps scatter, most of all on a machine that others use too."
    else:
        yield "Both come from the same clock; that they are close says that little time goes into what lies between the steps."


def _why_slow(numbers: Numbers, verify: float, drafting: float) -> str:
    device = (numbers.scores or {}).get("target", {}).get("device", "")
    reasons = []
    if numbers.headline and verify > numbers.headline.draft_tokens + 1:
        reasons.append("checking the tokens together takes longer here than one by one would")
    elif verify - 1 >= EXPENSIVE and device.startswith("cpu"):
        reasons.append("a CPU computes several tokens in clearly more time than one; a GPU with few requests does not")
    elif verify - 1 >= EXPENSIVE:
        reasons.append("a step over several tokens is dearer here than a step over one")
    if drafting >= EXPENSIVE:
        reasons.append(
            "the draft is expensive beside this target; beside a larger one the same single layer weighs less"
        )
    return f": {'; and '.join(reasons)}." if reasons else ": tau is too low for what a round costs."


def _ceiling(numbers: Numbers) -> Iterator[str]:
    counts = numbers.counts("vocab")
    if not counts:
        return
    yield f"The draft can propose {counts['size']:,} of the target's {counts['target_vocab_size']:,} tokens."
    share = counts["coverage"]["overall"]
    if share is None:
        yield "How much of held-out text they cover is unknown: no conversation was held out."
        return
    yield (
        f"They are {_percent(share)} of {counts['coverage']['tokens']:,} held-out answer tokens, so on such "
        "text no training brings "
        "the first drafted token above that, greedily."
    )
    if share < LOW_CEILING:
        yield "That is low: a larger vocab.size, or more answers to count tokens in, would lift it."
    yield from _room(numbers, share)


def _room(numbers: Numbers, share: float) -> Iterator[str]:
    head = numbers.headline
    if head is None or head.trained is None:
        return
    first = head.trained["per_position"]["unconditional"][0]
    if first > share:
        yield f"The evaluation prompts are other text: there {_percent(first)} were accepted."
    elif first > 0.9 * share:
        yield f"With {_percent(first)} accepted the draft is close to it: the vocabulary is now what limits it."
    else:
        yield f"With {_percent(first)} accepted the draft is far below it: the vocabulary is not what limits it."


def _agreement(numbers: Numbers) -> Iterator[str]:
    head, offline = numbers.headline, (numbers.scores or {}).get("offline", {}).get(TRAINED)
    if head is None or head.trained is None or offline is None:
        return
    if not offline["samples"]:
        yield "Nothing was simulated: no conversation was held out."
        return
    walk = offline["walk"]
    yield (
        f"Replayed over {offline['samples']:,} held-out samples without decoding, tau is "
        f"{walk['tau']:.3f}{interval(walk)}; "
        f"decoding the evaluation prompts gave {head.trained['tau']:.3f}{interval(head.trained)}."
    )
    if compare(walk, head.trained) == "unknown":
        yield "One of them has no interval, so whether they agree is not known."
    elif compare(walk, head.trained) == "overlap":
        yield "The intervals overlap: the two agree."
    else:
        yield (
            "The intervals are apart: they do not agree. The texts differ (training sources and evaluation "
            "prompts), which is the "
            "usual reason; if both were alike, it would be a fault."
        )
    yield from _caveat(numbers)


def _caveat(numbers: Numbers) -> Iterator[str]:
    if numbers.run.data.answers == "keep":
        yield (
            "The held-out answers are not the target's own (data.answers = 'keep'), so the simulation is "
            "only a rough guide."
        )
    elif numbers.run.regenerate.temperature > 0:
        yield "The held-out answers were sampled, so the simulation is of greedy choices along sampled text."


def _training(numbers: Numbers) -> Iterator[str]:
    counts, records = numbers.counts("draft"), numbers.records("validation")
    if not counts:
        return
    if not records:
        yield "No conversation was held out, so the last step was kept and nothing says whether it is the best."
        return
    best, last, steps = counts["best_step"], records[-1], counts["steps"]
    depth = len(last["joint"])
    yield (
        f"Of {steps:,} steps, step {best:,} was kept: held-out tau {counts['best_tau']:.3f}, simulated over "
        f"chains of {depth} drafts."
    )
    if best == 0:
        yield "That is the draft before training: nothing learned held up on held-out text."
    elif best == last["step"]:
        yield "It is the last one: longer training would probably still help."
    else:
        yield f"After it tau went to {last['tau']:.3f} at step {last['step']:,}{_loss_meanwhile(records, best)}."


def _loss_meanwhile(records: list[dict[str, Any]], best: int) -> str:
    """Whether the held-out loss told the same story as acceptance."""
    kept = next((record for record in records if record["step"] == best), None)
    if kept is None:
        return ""
    before, after = (sum(record["loss"]) / len(record["loss"]) for record in (kept, records[-1]))
    if after < before:
        return ", although the held-out loss still fell: selecting by loss would have kept a worse draft"
    return ", and the held-out loss rose: from there on it learned the training text by heart"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
