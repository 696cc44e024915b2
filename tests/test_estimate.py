"""Disk, memory and time before anything starts: against published figures, and against a demo that ran."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from headstart import config
from headstart.data.footprint import IDS, LABEL
from headstart.doctor.sizes import states_bytes
from headstart.drafts.eagle3 import Eagle3
from headstart.drafts.rows import Run, within
from headstart.drafts.shape import DraftShape
from headstart.errors import UserError
from headstart.estimate import advice, draft, estimate, hardware, work
from headstart.estimate.target import TargetCost
from headstart.target.anatomy import Anatomy, anatomy_of
from headstart.training.shape import shape_for

GB = 10**9
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": False,
}  # fmt: skip
SMOL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 576, "intermediate_size": 1536,
    "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152,
    "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 100000.0, "tie_word_embeddings": True,
}  # fmt: skip


def _shape(target: Anatomy, vocab: int, **settings: object) -> DraftShape:
    return shape_for(config.Draft.model_validate(settings), target, (2, 16, 29), vocab)


KIMI_LATENT = {
    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
}  # fmt: skip


def _run(**sections: dict) -> config.Run:
    given = {"target": {"model": "x"}, "data": {"sources": ["x.jsonl"]}}
    return config.build({name: given.get(name, {}) | sections.get(name, {}) for name in {*given, *sections}})


@pytest.mark.parametrize(("steps", "gflop"), [(7, 16.4), (3, 7.2)])
def test_training_costs_what_is_published(steps: int, gflop: float) -> None:
    """Of Llama-3.1-8B, every token trained, the teacher's logits not counted."""
    shape = _shape(anatomy_of(LLAMA), 32000)
    cost = draft.training_cost(shape, steps, 2048).live - 2 * 4096 * 32000
    assert cost / 1e9 == pytest.approx(gflop, rel=0.01)


def test_states_take_what_is_published() -> None:
    """Bytes of a token: Llama-8B, Kimi-K2.5 in bfloat16, SmolLM2 in bfloat16."""
    sizes = [states_bytes(1, 4, width, 2) - IDS - LABEL for width in (4096, 7168, 576)]
    assert sizes == [32768, 57344, 4608]


@pytest.mark.parametrize("settings", [{}, {"fc_norm": False, "num_layers": 2}, {"num_heads": 4, "head_dim": 32}])
def test_parameters_are_those_of_a_draft_that_is_built(settings: dict) -> None:
    shape = _shape(anatomy_of(SMOL), 8192, **settings)
    built = Eagle3(shape, None)  # type: ignore[arg-type]
    assert draft.parameters(shape).total == sum(p.numel() for p in built.parameters())


def test_parameters_of_a_draft_with_mla() -> None:
    """In the sizes of Kimi-K2.5; values narrower than keys cost less attention too."""
    target = anatomy_of({**LLAMA, **KIMI_LATENT, "model_type": "deepseek_v3", "num_key_value_heads": 32})
    shape = _shape(target, 32000, attention="mla", num_layers=2)
    assert (shape.num_heads, shape.head_dim, shape.value_dim) == (32, 192, 128)
    with torch.device("meta"):
        built = Eagle3(shape, None)  # type: ignore[arg-type]
    assert draft.parameters(shape).total == sum(p.numel() for p in built.parameters())
    longer = (draft.training_cost(shape, 1, length).live for length in (2048, 1024))
    assert next(longer) - next(longer) == 3 * 2 * 32 * (192 + 128) * 1024
    lite = anatomy_of({**LLAMA, **KIMI_LATENT, "model_type": "deepseek_v2", "q_lora_rank": None})
    with pytest.raises(UserError, match="no q_lora_rank"):
        _shape(lite, 32000, attention="mla")


def test_a_sliding_window_costs_what_is_seen_through_it() -> None:
    shape = _shape(anatomy_of(LLAMA), 32000, sliding_window=512)
    whole, seen = (draft.training_cost(one, 3, 4096).live for one in (replace(shape, sliding_window=None), shape))
    (run,) = within([Run(0, 0, 4096, 0)], 512, piece=4096)
    fewer = (Run(0, 0, 4096, 0).pairs - run.pairs) / 4096
    assert whole - seen == pytest.approx(3 * 3 * 4 * 32 * 128 * fewer, rel=1e-3)


def test_a_sliding_window_needs_keys_as_wide_as_the_targets() -> None:
    with pytest.raises(UserError, match="keys are 512 wide, the target's 1024"):
        _shape(anatomy_of(LLAMA), 32000, sliding_window=512, num_kv_heads=4)
    with pytest.raises(UserError, match=r"latent \(MLA\)"):
        _shape(anatomy_of({**LLAMA, **KIMI_LATENT, "model_type": "deepseek_v3"}), 32000, sliding_window=512)


def test_a_draft_takes_the_window_that_all_layers_of_its_target_have() -> None:
    """As vLLM gives it to a draft that names none; not one that is of some layers."""
    assert _shape(anatomy_of({**LLAMA, "model_type": "mistral", "sliding_window": 4096}), 32000).sliding_window == 4096
    assert _shape(anatomy_of({**LLAMA, "model_type": "mistral", "sliding_window": None}), 32000).sliding_window is None
    assert _shape(anatomy_of({**LLAMA, "model_type": "gemma2", "sliding_window": 4096}), 32000).sliding_window is None
    kinds = {"layer_types": ["sliding_attention"] * LLAMA["num_hidden_layers"], "sliding_window": 512}
    assert _shape(anatomy_of({**LLAMA, **kinds}), 32000).sliding_window == 512
    kinds["layer_types"][0] = "full_attention"
    assert _shape(anatomy_of({**LLAMA, **kinds}), 32000).sliding_window is None
    with pytest.raises(UserError, match=r"below draft\.ttt_steps"):
        _shape(anatomy_of({**LLAMA, "model_type": "mistral", "sliding_window": 2}), 32000)
    with pytest.raises(UserError, match="more than the target reads"):
        _shape(anatomy_of(LLAMA), 32000, sliding_window=10**12)


def test_rows_without_a_label_and_a_frozen_head_cost_less() -> None:
    shape = _shape(anatomy_of(LLAMA), 32000)
    whole, frozen = (draft.training_cost(shape, 5, 2048, freeze_head=frozen) for frozen in (False, True))
    assert whole.live - frozen.live == 5 * 2 * 4096 * 32000
    assert whole.dead < 0.05 * whole.live
    assert whole.total(2, 1) == 2 * whole.live + whole.dead


# A `headstart demo` that ran on two CPU cores: its counts, sizes and seconds. Rates are what could have been measured ahead:
# of the target's passes, and of the first 20 of 198 training steps.
DEMO = {"samples": {"train": 395, "validation": 25}, "tokens": 65517, "supervised_tokens": 37538}
DEMO_MACHINE = hardware.Hardware(
    gpus=0, memory=24e9, disk=100e9, prefill=526.0, decode=175.0, single=21.2, train=114e9, verify=1.53, draft=0.08
)
# It stored a last state for every token, 2,312 bytes with its labels; now only the 37,538 label rows have one.
DEMO_BYTES = {"capture": 718_007_650 - 27_979 * 2312, "train": 78_668_268, "export": 305_224_607}
DEMO_SECONDS = {"regenerate": 215.1, "capture": 128.1, "train": 167.8, "evaluate": 440.9}


def _demo() -> estimate.Subject:
    sections: dict[str, dict] = {
        "target": {"device": "cpu"}, "draft": {"ttt_steps": 3}, "train": {"batch_tokens": 1024, "validate_every": 60},
        "evaluate": {"max_prompts": 16, "max_new_tokens": 64},
    }  # fmt: skip
    anatomy = anatomy_of(SMOL)
    return estimate.Subject(_run(**sections), anatomy, _shape(anatomy, 8192), 538e6, work.counted(DEMO))


def test_the_demo_takes_what_was_estimated() -> None:
    stages = {stage.verb: stage for stage in estimate.estimate(_demo(), DEMO_MACHINE)}
    for verb, size in DEMO_BYTES.items():
        assert stages[verb].disk == pytest.approx(size, rel=0.05)
    for verb, seconds in DEMO_SECONDS.items():
        assert stages[verb].seconds == pytest.approx(seconds, rel=0.25)
    assert sum(stage.seconds for stage in stages.values()) == pytest.approx(966, rel=0.25)
    assert sum(stage.disk for stage in stages.values()) == pytest.approx(1_102_400_000 - 27_979 * 2312, rel=0.05)


def test_the_disk_of_a_training_in_progress_counts() -> None:
    stages = [estimate.Stage("a", 5, 0, 0), estimate.Stage("b", 1, 0, 0, peak=10), estimate.Stage("c", 3, 0, 0)]
    assert estimate.disk_needed(stages) == 16


def test_the_work_before_there_are_answers_is_a_bound() -> None:
    run = _run(data={"max_conversations": 100, "max_length": 1000}, regenerate={"max_new_tokens": 512})
    assert work.bounded(run, 1000, 200.0) == work.Work(100, 20_000, 51_200, 0.05, exact=False)
    assert work.bounded(run, 10, 900.0).answer_tokens == 1000
    assert work.bounded(run, 10, 200.0, answers=256).answer_tokens == 2560
    kept = _run(data={"answers": "keep", "max_length": 1000})
    assert work.bounded(kept, 10, 200.0).answer_tokens == 8000


def test_steps_end_where_they_are_told_to() -> None:
    done = work.Work(10, 1000, 9000, 0.0, exact=True)
    assert done.steps(_run(train={"batch_tokens": 1000, "epochs": 2})) == 24
    assert done.steps(_run(train={"batch_tokens": 1000, "epochs": 2, "max_steps": 5})) == 5


# A target of 32 B parameters in use, as Kimi-K2.5 has: 64 GFLOP a token.
SPARSE = TargetCost(flops=64e9, total=1_000_000, active=32_000, weights=600 * GB, origin="", experts=384, chosen=8)
LOAD = hardware.Load(SPARSE, ranks=8, batch=256)


def test_hardware_in_figures() -> None:
    machine = hardware.parse("gpus=8, memory=141GB, prefill=40k", LOAD)
    assert (machine.gpus, machine.memory, machine.disk, machine.prefill) == (8, 141e9, None, 40e3)
    assert machine.train == 40e3 * 64e9 / 8
    assert machine.assumed == ("decode", "single", "train")
    assert hardware.parse("gpus=0,memory=24g,prefill=526,decode=175,disk=1e9", LOAD).disk == 1e9


def test_hardware_by_name() -> None:
    """What is not given follows from a GPU's data sheet, by shares of its peaks."""
    machine = hardware.parse("8xH200, decode=5k", LOAD)
    assert (machine.gpus, machine.memory, machine.decode) == (8, 141e9, 5e3)
    assert machine.prefill == pytest.approx(0.3 * 8 * 989e12 / 64e9)
    assert machine.train == 0.2 * 989e12
    assert machine.single == pytest.approx(0.4 * 8 * 4.8e12 / (600 * GB * 0.032))
    assert machine.assumed == ("prefill", "single", "train")
    few = hardware.parse("8xH200", hardware.Load(SPARSE, ranks=8, batch=8))
    many = hardware.parse("8xH200", LOAD)
    assert few.decode < many.decode < many.prefill
    assert hardware.parse("1xh200", hardware.Load(SPARSE, ranks=8)).train == machine.train


def test_a_step_reads_the_experts_that_it_meets() -> None:
    assert SPARSE.read(1) == pytest.approx(600 * GB * 0.032)
    assert SPARSE.read(10_000) == pytest.approx(600 * GB)
    dense = replace(SPARSE, experts=0, chosen=0)
    assert dense.read(1) == 600 * GB


@pytest.mark.parametrize(("text", "said"), [
    ("gpus=8,memory=141GB", "prefill is missing"),
    ("prefill=40k", "gpus, memory is missing"),
    ("8xTPU", "no GPU that is known"),
    ("gpus=8,memory=much,prefill=1", "is no figure"),
    ("gpus=8,memory=1.2.3,prefill=1", "is no number"),
    ("gpus=8,memory=0,prefill=1", "above 0"),
    ("gpus=8,memory=1e400GB,prefill=1", "finite"),
    ("gpus=2.5,memory=1GB,prefill=1", "a whole one"),
    ("0xH200", "one GPU at least"),
    ("8xH200,8xA100", "second machine"),
    ("9999999xH200", "GPUs cannot be"),
    (f"{'9' * 5000}xH200", "GPUs cannot be"),
    ("\u0668xH200", "no GPU that is known"),
    ("8xH200,verify=1e308", "1e-06 to 1e"),
    (f"gpus=1,memory=141GB,prefill=0.{'0' * 320}1", "cannot be"),
    ("gpus=8,memory=1,prefill=1,colour=3", "colour is no figure"),
])  # fmt: skip
def test_hardware_that_cannot_be_read(text: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        hardware.parse(text, LOAD)


def test_what_fits_needs_no_advice() -> None:
    subject = _demo()
    assert advice.advice(subject, DEMO_MACHINE, estimate.estimate(subject, DEMO_MACHINE)) == []


def test_a_disk_that_is_too_small() -> None:
    subject, machine = _demo(), replace(DEMO_MACHINE, disk=0.9 * GB)
    said = advice.advice(subject, machine, estimate.estimate(subject, machine))
    assert said[0].startswith("disk: 1.1 GB needed, 900.0 MB free")
    changes = (("dtype = bfloat16", True), ("dtype = float8", True), ("aux_layers = [16, 29]", False))
    assert subject.shape.aux_layers == (2, 16, 29)
    for line, (change, enough) in zip(said[1:4], changes, strict=True):
        assert f"capture.{change}" in line or not enough
        assert ("still too much" in line) is not enough
    number = int(said[4].split("=")[1].split(":")[0])
    assert 100 < number < 420


def test_gpus_that_are_too_small() -> None:
    subject = replace(_demo(), weights=595e9)
    machine = replace(DEMO_MACHINE, gpus=8, memory=141e9)
    said = "\n".join(advice.advice(subject, machine, estimate.estimate(subject, machine)))
    assert "target.tensor_parallel = 8\n" in said
    small = replace(machine, memory=40e9)
    said = "\n".join(advice.advice(subject, small, estimate.estimate(subject, small)))
    assert "target.tensor_parallel = 32, of the 8 GPUs there" in said


def test_micro_batches_and_averages_change_the_memory_of_training() -> None:
    def memory(**settings: object) -> float:
        run = _demo().run
        changed = run.model_copy(update={"train": run.train.model_copy(update=settings)})
        stages = estimate.estimate(replace(_demo(), run=changed), DEMO_MACHINE)
        return next(stage.memory for stage in stages if stage.verb == "train")

    weights = draft.parameters(_demo().shape).bytes
    assert memory(ema=0.99) == pytest.approx(memory() + weights)
    assert memory(micro_tokens=256) < memory() - 50e6
    assert memory(micro_tokens=4096) == memory()
