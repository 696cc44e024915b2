"""The report: every planted situation gets its sentence, what is missing is said, nothing from outside gets in."""

from __future__ import annotations

import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from headstart import artifact, config, files, pipeline
from headstart.config import Run
from headstart.data import rows
from headstart.errors import UserError, install
from headstart.events import Events
from headstart.report import report, serving, words
from headstart.report import verdict as verdicts
from headstart.report.numbers import Numbers, gather
from headstart.types import Sample

pytest.importorskip("matplotlib")

EVIL = "<img src=x onerror=alert(1)>$x^$.jsonl"
VOID = {"meta", "br", "img", "link", "hr", "input"}
SECTIONS = (
    *("meaning", "stages", "scores", "costs", "training", "acceptance", "sizes"),
    *("rates", "drops", "identity", "exports", "settings", "versions"),
)


class Page(HTMLParser):
    """Checks that tags nest, and collects ids, references, text and tag names."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.references: list[str] = []
        self.tags: set[str] = set()
        self.text = ""
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(value or "")
            elif name in ("src", "href", "xlink:href", "action", "data"):
                self.references.append(value or "")
            assert not name.startswith("on")
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


# --- planting a run ---


COSTS = {
    "plain_step_seconds": 0.02,
    "verify_step_seconds": 0.03,
    "draft_step_seconds": 0.004,
    "verify_ratio": 1.5,
    "draft_ratio": 0.2,
}


def draft_row(tau: float, interval: tuple[float, float] | None, **changes: Any) -> dict[str, Any]:
    values = {
        "set": "all", "temperature": 0.0, "draft": "trained", "prompts": 12, "tokens": 700, "tau": tau,
        "interval": list(interval) if interval else None, "accepted_per_step": tau - 1,
        "per_position": {"conditional": [0.5, 0.4, None], "unconditional": [0.5, 0.2, 0.0]},
        "steps": 400, "emitted": round(400 * tau), "lossless": [12, 12], "mismatches": [],
        "costs": COSTS,
        "modelled_speedup": tau / 2.1, "measured_speedup": tau / 2.5,
    }  # fmt: skip
    return values | changes


def plain_row() -> dict[str, Any]:
    return draft_row(
        1.0, (1.0, 1.0), draft="none", lossless=None, per_position={"conditional": [], "unconditional": []},
        costs={"plain_step_seconds": 0.02}, modelled_speedup=1.0, measured_speedup=1.0,
    )  # fmt: skip


def usual_rows(**changes: Any) -> list[dict[str, Any]]:
    trained = draft_row(1.7, (1.6, 1.8)) | changes
    return [plain_row(), trained, draft_row(1.02, (1.0, 1.05), draft="untrained")]


def walk(tau: float, interval: tuple[float, float]) -> dict[str, Any]:
    return {"samples": 9, "walk": draft_row(tau, interval), "all_starts": draft_row(tau, interval)}


def scores(found: list[dict[str, Any]], offline: dict[str, Any] | None = None, device: str = "cpu") -> dict[str, Any]:
    return {
        "target": {"device": device},
        "draft_tokens": 3,
        "max_new_tokens": 64,
        "prompts": "the first user turn",
        "sets": {EVIL: {"prompts": 12, "of": 80}},
        "rows": found,
        "offline": {"trained": offline or walk(1.65, (1.55, 1.75))},
    }


def curves(taus: list[float], losses: list[float]) -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = []
    for index, (tau, loss) in enumerate(zip(taus, losses, strict=True)):
        step = 10 * index
        joint = [(tau - 1) / 2] * 2
        made += [
            {"kind": "train", "step": step + i + 1, "loss": [loss, loss + 0.5], "lr": 1e-3, "grad_norm": 1.0}
            for i in range(10)
        ]
        made.append(
            {
                "kind": "validation",
                "step": step,
                "loss": [loss, loss + 0.5],
                "accuracy": [0.4, 0.3],
                "joint": joint,
                "tau": tau,
            }
        )
    return made


@pytest.fixture(scope="module")
def run() -> Run:
    return config.build({"target": {"model": "some/model"}, "data": {"sources": [EVIL]}})


class Planted:
    """A run directory, filled stage by stage with small artifacts that the real writers make."""

    def __init__(self, root: Path, run: Run) -> None:
        self.root, self.run = root, run
        files.write_json(root / "run.json", run.model_dump(mode="json"))
        self.events = Events(root / "events.jsonl", quiet=True)

    def stage(self, verb: str, counts: dict[str, Any], facts: dict[str, Any], contents: dict[str, Any]) -> None:
        context = pipeline.Context(self.run, pipeline.BY_VERB[verb], self.root, self.events)
        with context.create() as build:
            build.counts |= counts
            build.facts |= facts
            for name, write in contents.items():
                write(build.file(name))

    def prepare(self) -> None:
        reason = {"count": 2, "rows": [3, 9], "details": {"<script>alert(2)</script>": 2}}
        splits = {"train": 5, "validation": 1}
        source = {"rows": 8, "kept": 6, "splits": splits, "dropped": {"unknown role": reason}}
        counts = {
            "rows": 8,
            "kept": 6,
            "not_chosen": 4,
            "splits": splits,
            "dropped": {"unknown role": 2},
            "sources": {EVIL: source},
        }
        self.stage("prepare", counts, {}, {})

    def regenerate(self) -> None:
        mask = np.arange(40) >= 30
        samples = [
            Sample(
                f"{i}", f"{i}", EVIL, "train", np.arange(40, dtype=np.int32), mask & (np.arange(40) < 32 + i), "stop"
            )
            for i in range(6)
        ]
        counts = {
            "samples": {"train": 5, "validation": 1},
            "supervised_tokens": 27,
            "tokens": 240,
            "finish": {"length": 1, "stop": 5},
        }
        more = {"dropped": {"prompt leaves no room": 1}, "shortened": {}, "truncated": 1}
        self.stage("regenerate", counts | more, {}, {"samples.parquet": lambda path: rows.write_samples(path, samples)})
        self.events.emit("generated", tokens=100, prompt_tokens=500, asked=6, seconds=2.0)

    def vocab(self, share: float | None = 0.96) -> None:
        coverage = {
            "tokens": 500,
            "overall": share,
            "by_source": {} if share is None else {EVIL: share, "多语言": share},
        }
        self.stage(
            "vocab",
            {
                "size": 100,
                "target_vocab_size": 400,
                "filled": {"forced": 3, "answers": 97, "rest": 0},
                "coverage": coverage,
            },
            {},
            {},
        )

    def capture(self) -> None:
        counts = {
            "samples": 5,
            "tokens": 200,
            "supervised": 27,
            "shards": 1,
            "bytes": 123456,
            "dropped": {"4": "last is zero at token 3"},
        }
        facts = {
            "aux_layers": [2, 15, 27],
            "identity": {"probes": 4, "tokens": 900, "max_dp": 3.2e-6, "argmax_agreement": 1.0},
            "engine": {"name": "transformers", "device": "cpu"},
        }
        self.stage("capture", counts, facts, {})

    def train(self, records: list[dict[str, Any]]) -> None:
        validations = [record for record in records if record["kind"] == "validation"]
        best = max(validations, key=lambda record: record["tau"], default={"step": -1, "tau": 0.0})
        counts = {
            "steps": 40, "samples": 4, "held_out_samples": 1, "parameters": 1_500_000, "best_step": best["step"],
            "best_tau": best["tau"], "last_tau": validations[-1]["tau"] if validations else None,
        }  # fmt: skip
        text = "".join(json.dumps(record) + "\n" for record in records)
        self.stage("train", counts, {}, {"curves.jsonl": lambda path: path.write_text(text)})

    def evaluate(self, found: dict[str, Any]) -> None:
        table = pa.table({"draft": ["none", "trained"], "tokens": [65, 65], "seconds": [1.0, 0.8]})
        contents = {
            "scores.json": lambda path: files.write_json(path, found),
            "prompts.parquet": lambda path: pq.write_table(table, path),
        }
        self.stage("evaluate", {"prompts": 12, "tokens": 2100}, {}, contents)

    def export(self) -> None:
        read_back = {"tensors": 15, "logits_compared": 2400, "max_difference": 0.0}
        facts = {"vllm": {"read_back": read_back, "vllm": {"0.16": ["<b>needs 3 aux layers</b>"], "0.32": []}}}
        self.stage(
            "export",
            {"vllm_bytes": 5_000_000, "parameters": 1_500_000},
            facts | {"serve": "vllm serve x", "dtype": "float32"},
            {},
        )

    def whole(
        self,
        found: dict[str, Any] | None = None,
        records: list[dict[str, Any]] | None = None,
        share: float | None = 0.96,
    ) -> Planted:
        self.prepare()
        self.regenerate()
        self.vocab(share)
        self.capture()
        self.train(curves([1.0, 1.5, 1.6, 1.7], [5.0, 4.0, 3.5, 3.2]) if records is None else records)
        self.evaluate(found or scores(usual_rows()))
        self.export()
        return self

    def numbers(self) -> Numbers:
        return gather(self.root)

    def said(self) -> str:
        numbers = self.numbers()
        return " ".join(
            [verdicts.verdict(numbers).text, *(f"{title}: {text}" for title, text in words.paragraphs(numbers))]
        )


@pytest.fixture
def planted(tmp_path: Path, run: Run) -> Planted:
    return Planted(tmp_path, run)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, run: Run) -> Path:
    """The report of a run that has everything."""
    return report.write(Planted(tmp_path_factory.mktemp("whole"), run).whole().root)


# --- the page ---


def test_page_is_whole_and_alone(whole: Path) -> None:
    html = whole.read_text(encoding="utf-8")
    page = Page(html)
    assert [name for name in SECTIONS if name not in page.ids] == []
    assert len(page.ids) == len(set(page.ids)), "an id occurs twice"
    assert "http:" not in html
    assert "https:" not in html
    assert "@import" not in html
    assert all(reference[0] == "#" and reference[1:] in page.ids for reference in page.references)
    assert all(name in page.ids for name in re.findall(r"url\(#([^)]*)\)", html))
    assert not page.tags & {"script", "img", "b", "link", "iframe"}
    assert html.count("<svg") == html.count("</svg>") == 7
    assert not re.search(r"#(101112|707172|d0d1d2|2060d1|b35901|000000)", html[html.index("<svg") :]), (
        "a colour of a figure is not one of the page's"
    )
    assert "Missing" not in page.text


def test_foreign_text_is_text(whole: Path) -> None:
    page = Page(whole.read_text(encoding="utf-8"))
    for text in (EVIL, "<script>alert(2)</script>", "<b>needs 3 aux layers</b>", "多语言"):
        assert text in page.text


def test_equal_numbers_give_equal_bytes(whole: Path) -> None:
    first = whole.read_bytes()
    assert report.write(whole.parent).read_bytes() == first


def test_tables_hold_the_numbers(whole: Path) -> None:
    text = Page(whole.read_text(encoding="utf-8")).text
    for wanted in (
        "1.600 to 1.800",
        "12/12",
        "3.20e-06",
        "last is zero at token 3",
        "prompt leaves no room",
        "5.0 MB",
        "2, 15, 27",
    ):
        assert wanted in text
    for wanted in (
        "20.00 ms",
        "usable, but not chosen",
        "rows 3, 9",
        "vllm serve x",
        "train.batch_tokens",
        artifact.versions()["python"],
    ):
        assert wanted in text


@pytest.mark.parametrize("done", [0, 1, 2, 4, 5, 6])
def test_partial_run_shows_what_is_there(planted: Planted, done: int) -> None:
    makers = [planted.prepare, planted.regenerate, planted.vocab, planted.capture]
    makers += [
        lambda: planted.train(curves([1.2], [4.0])),
        lambda: planted.evaluate(scores(usual_rows())),
        planted.export,
    ]
    for maker in makers[:done]:
        maker()
    page = Page(report.write(planted.root).read_text(encoding="utf-8"))
    assert [name for name in SECTIONS if name not in page.ids] == []
    for index, stage in enumerate(pipeline.STAGES):
        assert (f"{stage.folder} (made by {stage.verb}) is missing: not made yet." in page.text) == (index >= done)
    if done < 6:
        assert (
            f"No verdict yet: the draft was not measured. The next stage is {pipeline.STAGES[done].verb}." in page.text
        )


@pytest.mark.parametrize(
    "name", ["draft/curves.jsonl", "conversations/samples.parquet", "scores/prompts.parquet", "scores/scores.json"]
)
def test_a_file_of_the_right_size_and_another_content_is_said(planted: Planted, name: str) -> None:
    planted.whole()
    file = planted.root / name
    file.write_bytes(bytes(file.stat().st_size))
    text = Page(report.write(planted.root).read_text(encoding="utf-8")).text
    assert f"{name} was changed after it was written" in text


def test_damaged_artifact_is_said_and_the_rest_shown(planted: Planted) -> None:
    planted.whole()
    (planted.root / "scores" / "scores.json").unlink()
    text = Page(report.write(planted.root).read_text(encoding="utf-8")).text
    assert "scores (made by evaluate) cannot be used:" in text
    assert "scores.json is missing" in text
    assert "No verdict yet" in text
    assert "Identity check" in text


def test_interrupted_stage_is_said(planted: Planted) -> None:
    planted.prepare()
    with pytest.raises(KeyboardInterrupt):
        planted.stage("regenerate", {}, {}, {"samples.parquet": _interrupt})
    assert "conversations (made by regenerate) is missing: was interrupted" in " ".join(
        verdicts.missing(planted.numbers())
    )


def _interrupt(path: Path) -> None:
    raise KeyboardInterrupt


def test_no_run_directory(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not a run directory"):
        report.write(tmp_path)


@pytest.mark.parametrize("library", ["matplotlib", "jinja2"])
def test_library_that_is_not_installed(planted: Planted, monkeypatch: pytest.MonkeyPatch, library: str) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == library or name.startswith("headstart.report.")]:
        monkeypatch.delitem(sys.modules, name)
        if name in ("headstart.report.figures", "headstart.report.page"):
            monkeypatch.delattr(name)
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(UserError) as caught:
        report.write(planted.root)
    assert library in caught.value.what
    assert caught.value.do == install("report")


# --- the sentences ---


def test_good_draft(planted: Planted) -> None:
    verdict = verdicts.verdict(planted.whole(scores(usual_rows(measured_speedup=1.4))).numbers())
    assert verdict.tone == "good"
    assert verdict.text.startswith("Training helped: decoding yields")
    assert "1.70 tokens" in verdict.text
    assert "1.02" in verdict.text
    assert "1.40 times as fast" in verdict.text


def test_overlapping_intervals_prove_nothing(planted: Planted) -> None:
    said = planted.whole(scores(usual_rows(tau=1.04, interval=[0.99, 1.1]))).said()
    assert said.startswith("Not proven to be better")
    assert "the intervals overlap, so a gain is not proven" in said


def test_worse_than_untrained(planted: Planted) -> None:
    planted.whole(scores([draft_row(1.0, (1.0, 1.0)), draft_row(1.3, (1.2, 1.4), draft="untrained")]))
    verdict = verdicts.verdict(planted.numbers())
    assert verdict.tone == "bad"
    assert verdict.text.startswith("Training made the draft worse")


@pytest.mark.parametrize(("tie", "expected"), [(True, "rounding can turn"), (False, "trust no other number here")])
def test_changed_answers_come_first(planted: Planted, tie: bool, expected: str) -> None:
    item = {
        "set": "mt_bench",
        "prompt": EVIL,
        "position": 4,
        "expected": 8,
        "found": None,
        "gap": 0.1,
        "noise": 0.2,
        "tie": tie,
    }
    found = scores([row | {"set": "mt_bench"} for row in usual_rows(lossless=[11, 12], mismatches=[item])])
    planted.whole(found)
    verdict = verdicts.verdict(planted.numbers())
    assert verdict.tone == "bad"
    assert verdict.text.startswith("Not lossless: with the trained draft 1 of 12")
    assert expected in verdict.text
    assert words.paragraphs(planted.numbers())[0].title == "Same answers?"
    assert (
        f"Not identical: mt_bench {EVIL} with the trained draft"
        in Page(report.write(planted.root).read_text(encoding="utf-8")).text
    )


def test_slower_says_so_and_why(planted: Planted) -> None:
    said = planted.whole(scores(usual_rows(measured_speedup=0.7))).said()
    assert "slower than without: 0.70 times the speed" in said
    assert "a CPU computes several tokens" in said
    assert "the draft is expensive beside this target" in said
    assert "a round costs 2.10 plain steps" in said
    assert "less than modelled" in said


def test_slower_on_a_gpu_does_not_blame_a_cpu(planted: Planted) -> None:
    said = planted.whole(scores(usual_rows(measured_speedup=0.7), device="cuda")).said()
    assert "a step over several tokens is dearer here" in said
    assert "CPU" not in said


def test_checking_together_slower_than_one_by_one(planted: Planted) -> None:
    rows_found = usual_rows(measured_speedup=0.2, costs=COSTS | {"verify_ratio": 5.1})
    assert "checking the tokens together takes longer here" in planted.whole(scores(rows_found)).said()


def test_several_tokens_in_less_time_than_one_are_other_work_on_the_machine(planted: Planted) -> None:
    rows_found = usual_rows(costs=COSTS | {"verify_ratio": 0.8})
    assert "Take nothing from the times" in planted.whole(scores(rows_found)).said()
    assert "Take nothing from the times" not in planted.whole(scores(usual_rows())).said()


def test_little_and_few(planted: Planted) -> None:
    said = planted.whole(scores(usual_rows(tau=1.09, interval=[1.07, 1.12], prompts=4))).said()
    assert "That is still little." in said
    assert "So few prompts make a rough interval." in said


def test_nothing_timed(planted: Planted) -> None:
    said = planted.whole(scores(usual_rows(measured_speedup=None, modelled_speedup=None))).said()
    assert "Nothing was timed" in said


def test_no_baseline_and_one_prompt(planted: Planted) -> None:
    said = planted.whole(scores([plain_row(), draft_row(1.7, None, lossless=[1, 1])])).said()
    assert "no untrained draft was measured" in said
    assert "There is no interval" in said
    assert "whether they agree is not known" in said


def test_sampling_only_was_not_checked_for_equal_answers(planted: Planted) -> None:
    hot = [row | {"temperature": 0.8, "lossless": None} for row in usual_rows()]
    assert "Not checked: no prompt was decoded greedily" in planted.whole(scores(hot)).said()


def test_sets_and_temperatures(planted: Planted) -> None:
    own = [row | {"set": name} for name in ("mt_bench", "humaneval") for row in usual_rows(tau=1.5)]
    hot = draft_row(1.3, (1.2, 1.4), temperature=0.8, lossless=None)
    said = planted.whole(scores([*own, *usual_rows(), hot])).said()
    assert "It is 1.50 on mt_bench and 1.50 on humaneval." in said
    assert "1.30 at temperature 0.8" in said


@pytest.mark.parametrize(("interval", "expected"), [((1.55, 1.75), "the two agree"), ((2.0, 2.2), "they do not agree")])
def test_simulated_against_decoded(planted: Planted, interval: tuple[float, float], expected: str) -> None:
    found = scores(usual_rows(), walk(sum(interval) / 2, interval))
    assert expected in planted.whole(found).said()


def test_nothing_held_out(planted: Planted) -> None:
    records = [record for record in curves([1.0, 1.5], [5.0, 4.0]) if record["kind"] == "train"]
    said = planted.whole(scores(usual_rows(), {"samples": 0}), records, share=None).said()
    assert "Nothing was simulated" in said
    assert "the last step was kept" in said
    assert "cover is unknown" in said
    Page(report.write(planted.root).read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("share", "expected"),
    [
        (0.96, "the vocabulary is not what limits it"),
        (0.52, "the vocabulary is now what limits it"),
        (0.4, "the evaluation prompts are other"),
    ],
)
def test_vocabulary_ceiling(planted: Planted, share: float, expected: str) -> None:
    said = planted.whole(share=share).said()
    assert expected.lower() in said.lower()
    assert ("That is low" in said) == (share < 0.9)


@pytest.mark.parametrize(
    ("taus", "losses", "expected"),
    [
        ([1.0, 1.5, 1.6], [5.0, 4.0, 3.0], "It is the last one"),
        ([1.0, 1.6, 1.5], [5.0, 4.0, 3.0], "although the held-out loss still fell"),
        ([1.0, 1.6, 1.5], [5.0, 4.0, 4.5], "and the held-out loss rose"),
        ([1.2, 1.1, 1.1], [5.0, 5.5, 6.0], "That is the draft before training"),
    ],
)
def test_best_step(planted: Planted, taus: list[float], losses: list[float], expected: str) -> None:
    assert expected in planted.whole(records=curves(taus, losses)).said()


def test_stale_scores_are_called_so(planted: Planted) -> None:
    planted.whole()
    changed = config.build(planted.run.model_dump(mode="json"), ["evaluate.draft_tokens=5"])
    files.write_json(planted.root / "run.json", changed.model_dump(mode="json"))
    verdict = verdicts.verdict(planted.numbers())
    assert verdict.tone == "open"
    assert "do not belong to the present settings (evaluate.draft_tokens was 3, is 5)" in verdict.text


# --- the serving check ---


def served(**changes: Any) -> dict[str, Any]:
    """What vLLM measured, in agreement with the scores."""
    found = {
        "engine": "vllm", "version": "0.32.0", "rung": "shim", "why": "<i>no interface</i>", "draft_tokens": 3,
        "prompts": 12, "counters": {"drafts": 400, "draft_tokens": 1200, "accepted": 280, "per_position": [200, 60, 20]},
        "tau": 1.69, "interval": [1.6, 1.8], "tau_by_counters": 1.7,
        "per_position": {"conditional": [0.5, 0.3, 0.33], "unconditional": [0.5, 0.15, 0.05]}, "identical": [12, 12],
        "speed": {"plain": 50.0, "drafted": 70.0, "speedup": 1.4},
        "reference": {"how": "decoder", "tau": 1.7, "interval": [1.6, 1.8], "same_answers": [11, 12]},
        "agreement": {
            "verdict": "agrees", "inside_interval": True, "difference": 0.0, "difference_interval": [-0.01, 0.01],
            "step_for_step": [10, 11],
        },
        "other_prompts": None, "mismatches": [], "causes": [],
    }  # fmt: skip
    return found | changes


def test_agreement_with_vllm(planted: Planted) -> None:
    planted.whole(scores(usual_rows()) | {"serving": served()})
    page = Page(report.write(planted.root).read_text(encoding="utf-8"))
    assert "serving" in page.ids
    assert "Served by vLLM 0.32.0" in page.text
    assert "<i>no interface</i>" in page.text
    assert "10 of 11" in page.text
    said = planted.said()
    assert "They agree, 10 of 11 prompts step for step" in said
    assert "12 of 12 greedy answers are the ones that vLLM gives without the draft" in said
    assert "50.0 tokens per second without the draft and 70.0 with it" in said
    assert serving.fault(planted.numbers()) is None


def test_difference_from_vllm_is_said_first(planted: Planted) -> None:
    differs = served()["agreement"] | {"verdict": "differs", "step_for_step": [0, 11]}
    says = "with its layer ids one too low: 1, 2, 3 for 2, 3, 4"
    cause = {"kind": "layer ids", "says": says, "tau": 1.02, "interval": [1.0, 1.1], "step_for_step": [11, 12]}
    planted.whole(scores(usual_rows()) | {"serving": served(tau=1.02, agreement=differs, causes=[cause])})
    said = planted.said()
    assert "They do not agree" in said
    assert f"vLLM's 1.02 is what the draft gives {says} (step for step in 11 of 12 prompts)." in said
    text = Page(report.write(planted.root).read_text(encoding="utf-8")).text
    taus = "tau 1.02, where 1.70 is right"
    assert f"vLLM does not serve the draft that was trained: {taus}; it is what the draft gives {says}." in text


@pytest.mark.parametrize(
    ("causes", "expected"),
    [
        ([], "no known fault explains it"),
        (
            [{"kind": "none", "says": "on its own answers", "step_for_step": [9, 12]}],
            "the target itself answers otherwise",
        ),
    ],
)
def test_difference_that_no_fault_explains(planted: Planted, causes: list[dict[str, Any]], expected: str) -> None:
    differs = served()["agreement"] | {"verdict": "differs"}
    planted.whole(scores(usual_rows()) | {"serving": served(tau=1.02, agreement=differs, causes=causes)})
    assert expected in (serving.fault(planted.numbers()) or "")


@pytest.mark.parametrize("tie", [True, False])
def test_answers_that_vllm_changes(planted: Planted, tie: bool) -> None:
    item = {"set": "s", "prompt": "q", "position": 3, "expected": 7, "found": 8, "gap": 1e-5, "noise": 1e-3, "tie": tie}
    planted.whole(scores(usual_rows()) | {"serving": served(identical=[11, 12], mismatches=[item])})
    assert "Not identical in vLLM: s q at answer token 3: 8 instead of 7" in planted.said()
    fault = serving.fault(planted.numbers())
    assert (fault is None) == tie
    assert tie or "1 of 12 greedy answers differ" in (fault or "")


def test_a_target_that_only_vllm_decodes(planted: Planted) -> None:
    untimed = {"measured_speedup": None, "modelled_speedup": None, "lossless": None}
    rows = [row | untimed for row in usual_rows()]
    planted.whole(scores(rows) | {"method": "walk"})
    said = planted.said()
    assert "Not checked here: the target runs in vLLM alone" in said
    assert "evaluate.engine = 'vllm' measures it there" in said


# --- reading ---


def test_lengths_of_samples(planted: Planted) -> None:
    planted.prepare()
    planted.regenerate()
    lengths = planted.numbers().lengths
    assert lengths is not None
    assert lengths.answered.tolist() == [2, 3, 4, 5, 6, 7]
    assert lengths.read.tolist() == [38, 37, 36, 35, 34, 33]


def test_rates_are_of_the_attempts_behind_the_artifact(planted: Planted) -> None:
    emit = planted.events.emit
    for tokens in (1000, 40, 60):  # the first one was finished; the second was killed, the third continued it
        emit("stage-start", stage="capture")
        emit("captured", tokens=tokens, seconds=1.0)
        if tokens != 40:
            emit("stage-end", stage="capture")
    (rate,) = planted.numbers().rates
    assert (rate.tokens, rate.seconds, rate.per_second) == (100, 2.0, 50.0)
