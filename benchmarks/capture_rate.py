#!/usr/bin/env python3
"""How much capturing hidden states costs the engine: `python benchmarks/capture_rate.py [--model M] [--rounds N] [--json]`.

Two engines on the same target: one only reads prompts (one token of answer: a capture of nothing), the other captures them.
They take turns on the same prompts, new ones each round, so that neither gains by a cache or by a quiet moment of the
machine. A round's states are read into this process, as the stage does.

On a CPU a second is one of processor time of the engine's process: what else the machine does then counts for neither.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from headstart.config import Target
from headstart.engines.base import Use
from headstart.engines.vllm.engine import VllmEngine
from headstart.target.layers import default_boundaries
from headstart.types import Prompt, Sample, Sampling

ONE = Sampling(max_new_tokens=1, temperature=0.0, top_p=1.0, seed=0, end_ids=())
ENOUGH = 0.9  # of the engine's own rate


def main() -> int:
    options = _options()
    target = Target.model_validate({"model": options.model, "engine": "vllm"})
    reading = VllmEngine(target, Use(options.length))
    capturing: VllmEngine | None = None
    try:
        aux = default_boundaries(reading.info.num_layers)
        capturing = VllmEngine(target, Use(options.length, boundaries=aux))
        result = measure(reading, capturing, aux, options)
    finally:
        reading.close()
        if capturing is not None:
            capturing.close()
    print(json.dumps(result) if options.json else _words(result))
    return 0 if result["share"] >= ENOUGH else 1


def measure(reading: VllmEngine, capturing: VllmEngine, aux: tuple[int, ...], options: argparse.Namespace) -> dict:
    """Tokens per second of both, by round; the first round warms up and is left out. share: of the medians."""
    rates: dict[str, list[float]] = {"prefill": [], "capture": []}
    clocks = {"prefill": clock_of(reading), "capture": clock_of(capturing)}
    for number in range(options.rounds + 1):
        rows = prompts(number, options, reading.info.vocab_size)
        asked = [Prompt(str(i), tuple(ids.tolist())) for i, ids in enumerate(rows)]
        samples = [
            Sample(str(i), "", "", "train", ids, np.zeros(len(ids), bool), "given") for i, ids in enumerate(rows)
        ]
        turns: dict[str, Callable[[], int]] = {
            "prefill": lambda asked=asked: len(list(reading.generate(asked, ONE))),
            "capture": lambda samples=samples: len(list(capturing.capture(samples, aux, 4096))),
        }
        for name in sorted(turns, reverse=bool(number % 2)):
            clock = clocks[name]
            began = clock()
            assert turns[name]() == len(rows)
            rates[name].append(sum(map(len, rows)) / (clock() - began))
    kept = {name: values[1:] for name, values in rates.items()}
    median = {name: statistics.median(values) for name, values in kept.items()}
    share = median["capture"] / median["prefill"]
    return {"model": options.model, "aux": aux, "tokens_per_second": median, "rounds": kept, "share": share}


def clock_of(engine: VllmEngine) -> Callable[[], float]:
    if engine.info.device != "cpu":
        return time.perf_counter
    stat, tick = Path(f"/proc/{engine.pid}/stat"), os.sysconf("SC_CLK_TCK")
    return lambda: sum(map(int, stat.read_text().rpartition(")")[2].split()[11:13])) / tick


def prompts(number: int, options: argparse.Namespace, vocabulary: int) -> list[np.ndarray]:
    """Random ids, lengths spread evenly up to the longest."""
    rng = np.random.default_rng(number)
    lengths = np.linspace(options.length // 8, options.length, options.prompts).astype(int)
    return [rng.integers(0, vocabulary, length).astype(np.int32) for length in lengths]


def _words(result: dict) -> str:
    rate = result["tokens_per_second"]
    return (
        f"{result['model']}: prefill {rate['prefill']:,.1f} tokens/s, capture of aux layers {list(result['aux'])} and the last "
        f"{rate['capture']:,.1f} tokens/s: {100 * result['share']:.1f} %"
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=8, help="in a round")
    parser.add_argument("--length", type=int, default=256, help="tokens of the longest prompt")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
