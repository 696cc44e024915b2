"""`vocab`: choose the draft vocabulary from the training answers, and say what it costs on held-out ones."""

from __future__ import annotations

from dataclasses import asdict

from headstart.data import rows, vocab
from headstart.data.templates import Template
from headstart.pipeline import Context
from headstart.target import source
from headstart.target.anatomy import inspect


def run(context: Context) -> None:
    """Make the artifact `vocab`.

    Raises:
        UserError: `vocab.size` does not fit the target.
        GateError: a sample or the pool holds ids that the target does not have.
    """
    target = context.run.target
    folder = source.resolve(target.model, target.revision, weights=False, progress=context.events.say)
    total = inspect(folder).required("vocab_size")
    size = vocab.pick_size(context.run.vocab.size, total)
    template = Template.load(folder, trust_remote_code=target.trust_remote_code)
    samples_file = context.parent("conversations").file("samples.parquet")
    pool = rows.read_pool(context.parent("prompts").file("pool.parquet"))
    with context.create() as build:
        seen = vocab.count_supervised(rows.read_samples(samples_file, "train"), total)
        pooled = vocab.spread(*pool, total)
        forced = {*template.end_ids, *template.structure_ids}
        chosen = vocab.choose(size, seen, pooled, forced, template.early_merges())
        chosen.vocab.write(build.file(vocab.FILE))
        coverage = vocab.measure(rows.read_samples(samples_file, "validation"), chosen.vocab)
        build.counts |= {
            "size": size,
            "target_vocab_size": total,
            "distinct_seen": int((seen > 0).sum()),
            "training_tokens": int(seen.sum()),
            "filled": chosen.filled,
            "rule": vocab.RULE,
            "forced": sorted(forced),
            "coverage": asdict(coverage),
        }
    context.events.say(describe(chosen, coverage))


def describe(chosen: vocab.Chosen, coverage: vocab.Coverage) -> str:
    """One or two lines for a person."""
    made, parts = chosen.vocab, ", ".join(f"{count} {name}" for name, count in chosen.filled.items() if count)
    first = f"draft vocabulary: {made.size:,} of {made.target_vocab_size:,} tokens ({parts})"
    if coverage.overall is None:
        return f"{first}\nits coverage is unknown: no validation conversations"
    by_source = ", ".join(f"{name} {100 * share:.2f} %" for name, share in coverage.by_source.items())
    ceiling = f"{100 * coverage.overall:.2f} % of {coverage.tokens:,} held-out answer tokens"
    return (
        f"{first}\nit covers {ceiling} ({by_source}): no draft can be accepted more often at its first token, greedily"
    )
