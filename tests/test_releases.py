"""The scanner of vLLM's sources, the shipped table made by it, and finding an installed vLLM. Nothing imports vLLM."""

from __future__ import annotations

import sys
import zipfile
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from headstart.engines.vllm import releases
from headstart.engines.vllm.arch import Arch
from headstart.engines.vllm.scan import Registry
from headstart.engines.vllm.table import Row, pack, unpack
from headstart.errors import UserError

needs_vllm = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")

REGISTRY = """
_TEXT_GENERATION_MODELS = {
    "PlainForCausalLM": ("plain", "PlainForCausalLM"),
    "HeirForCausalLM": ("heir", "HeirForCausalLM"),
    "MuteForCausalLM": ("heir", "MuteForCausalLM"),
    "LoopForCausalLM": ("loop", "LoopForCausalLM"),
}
_EMBEDDING_MODELS = {"PlainForCausalLM": ("plain", "PlainEmbedding")}
_MULTIMODAL_MODELS = {
    # a wrapper that asks the registry, one that leaves it to the configuration, one that chooses by the configuration
    "NamedForConditionalGeneration": ("wrap", "NamedForConditionalGeneration"),
    "OpenForConditionalGeneration": ("wrap", "OpenForConditionalGeneration"),
    "ManyForConditionalGeneration": ("wrap", "ManyForConditionalGeneration"),
}
_TRANSFORMERS_SUPPORTED_MODELS = {"FarForCausalLM": ("transformers", "TransformersForCausalLM")}
"""
INTERFACES = """
class EagleModelMixin: ...
class SupportsEagle3:
    def set_aux_hidden_state_layers(self, layers): ...
class SupportsPP: ...
class IsHybrid: ...
"""
PLAIN = """
from .interfaces import EagleModelMixin, SupportsEagle3, SupportsPP
from .utils import make_layers

class PlainLayer:
    def __init__(self): ...
    def forward(self, positions, hidden_states, residual):
        return hidden_states, residual

class PlainModel(EagleModelMixin):
    def __init__(self, *, vllm_config, layer_type=PlainLayer):
        super().__init__()
        self.start, self.end, self.layers = make_layers(4, lambda prefix: layer_type(), prefix="layers")

    def forward(self, positions, hidden_states):
        aux = self._maybe_add_hidden_state([], 0, hidden_states, None)
        for idx, layer in enumerate(islice(self.layers, self.start, self.end)):
            hidden_states, residual = layer(positions, hidden_states, residual)
            self._maybe_add_hidden_state(aux, idx + 1, hidden_states, residual)
        hidden_states, _ = self.norm(hidden_states, residual)
        return hidden_states, aux

class PlainForCausalLM(SupportsEagle3, SupportsPP):
    def __init__(self, *, vllm_config, prefix=""):
        super().__init__()
        self.vision_tower = Tower()
        self.model = self._init_model(vllm_config=vllm_config)

    def _init_model(self, vllm_config):
        return PlainModel(vllm_config=vllm_config)
"""
HEIR = """
from vllm.model_executor.models.plain import PlainForCausalLM as Base, PlainLayer, PlainModel
from .interfaces import IsHybrid

class HeirLayer(PlainLayer): ...

class HeirModel(PlainModel):
    def __init__(self, *, vllm_config):
        super().__init__(vllm_config=vllm_config, layer_type=HeirLayer)

class HeirForCausalLM(Base, IsHybrid):
    def _init_model(self, vllm_config):
        return HeirModel(vllm_config=vllm_config)

class MuteModel(PlainModel):
    def forward(self, positions, hidden_states):
        for layer in self.layers:
            hidden_states, residual = layer(positions, hidden_states, residual)
        return self.norm(hidden_states)

class MuteForCausalLM(Base):
    model_cls = MuteModel

    def __init__(self, *, vllm_config):
        Base.__init__(self)
        self.model = self.model_cls(vllm_config=vllm_config)
"""
LOOP = """
class LoopModel:
    def __init__(self):
        self.h = nn.ModuleList([Block() for _ in range(4)])

    def forward(self, hidden_states):
        for _ in range(3):
            for i in range(4):
                hidden_states = self.h[i](hidden_states)
        return self.ln_f(hidden_states)

class LoopForCausalLM:
    def __init__(self):
        self.transformer = LoopModel()
"""
WRAP = """
from .interfaces import SupportsEagle3
from .plain import PlainForCausalLM
from .heir import HeirForCausalLM

class NamedForConditionalGeneration:
    def __init__(self, *, vllm_config):
        with self._mark_language_model(vllm_config):
            names = ["PlainForCausalLM"]
            self.language_model = init_vllm_registered_model(vllm_config=vllm_config, architectures=names)

class OpenForConditionalGeneration(SupportsEagle3):
    def __init__(self, *, vllm_config):
        self.language_model = init_vllm_registered_model(vllm_config=vllm_config, hf_config=config.text_config)

_BY_VERSION = {1: PlainForCausalLM, 2: HeirForCausalLM}

class ManyForConditionalGeneration:
    def __new__(cls, *, vllm_config):
        return _BY_VERSION[1]
"""
SOURCES = {
    "registry": REGISTRY,
    "interfaces": INTERFACES,
    "plain": PLAIN,
    "heir": HEIR,
    "loop": LOOP,
    "wrap": WRAP,
    "transformers": "from .interfaces import SupportsEagle3\nclass TransformersForCausalLM(SupportsEagle3): ...",
}
MADE: dict[str, dict[str, Any]] = {
    "PlainForCausalLM": {
        "eagle3": True,
        "delivers": True,
        "pp": True,
        "layers_path": "model.layers",
        "layer_output": "pair",
        "residual": "add",
    },
    "HeirForCausalLM": {"delivers": True, "hybrid": True, "inner": "heir:HeirModel", "layers_path": "model.layers"},
    "MuteForCausalLM": {"eagle3": True, "delivers": False, "inner": "heir:MuteModel", "residual": "inside"},
    "LoopForCausalLM": {"layers_path": "transformer.h", "layer_output": "single", "residual": "none", "loops": True},
    "NamedForConditionalGeneration": {
        "eagle3": False,
        "delivers": False,
        "layers_path": "language_model.model.layers",
        "registered": ("PlainForCausalLM",),
        "inner": "plain:PlainModel",
    },
    "OpenForConditionalGeneration": {"eagle3": True, "delivers": None, "inner": None, "registered": ()},
    "ManyForConditionalGeneration": {"inner": None, "layers_path": "model.layers"},
    "FarForCausalLM": {"table": "transformers", "eagle3": True, "delivers": True, "layers_path": None},
}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    folder = tmp_path / "vllm" / "model_executor" / "models"
    folder.mkdir(parents=True)
    for name, text in SOURCES.items():
        (folder / f"{name}.py").write_text(text, encoding="utf-8")
    return tmp_path / "vllm"


@pytest.mark.parametrize("name", MADE)
def test_facts_are_read_across_modules(tree: Path, name: str) -> None:
    arch = Registry(tree)[name]
    assert {fact: getattr(arch, fact) for fact in MADE[name]} == MADE[name]


def test_an_archive_is_read_like_a_folder(tree: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "vllm.whl", "w") as archive:
        for path in tree.rglob("*.py"):
            archive.write(path, path.relative_to(tmp_path))
    with zipfile.ZipFile(tmp_path / "vllm.whl") as archive:
        packed = Registry(zipfile.Path(archive, "vllm/"))
        assert dict(packed) == dict(Registry(tree))
        assert packed.digest == Registry(tree).digest


def test_a_changed_source_changes_the_digest(tree: Path) -> None:
    before = Registry(tree).digest
    (tree / "model_executor/models/loop.py").write_text(LOOP + "\n", encoding="utf-8")
    assert Registry(tree).digest != before


def test_a_folder_without_a_registry_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not vLLM's sources"):
        len(Registry(tmp_path))


def test_a_packed_table_comes_back_whole() -> None:
    a, b, c = (Arch(f"{name}ForCausalLM", "text", "m", name) for name in "ABC")
    later = Arch("AForCausalLM", "text", "m", "A", eagle3=True, delivers=None, registered=("X", "Y"))
    rows = [Row("0.1.0", "x", {a.name: a, b.name: b}), Row("0.2.0", "y", {a.name: later, c.name: c})]
    assert unpack(pack(rows)) == rows


def test_the_table_covers_all_minor_versions() -> None:
    minors = {releases.number(version)[1] for version in releases.shipped()}
    assert minors == set(range(11, 33))
    assert releases.known("0.31.7").source == "the shipped table of vLLM 0.31.0, the nearest before 0.31.7"
    assert releases.known("0.16.0+cpu").version == "0.16.0"
    with pytest.raises(UserError, match="older than what is known"):
        releases.known("0.10.2")
    with pytest.raises(UserError, match="not a version"):
        releases.known("main")


KIMI = [  # version, path, flag, whether it delivers
    ("0.15.1", "language_model.layers", False, False),
    ("0.16.0", "language_model.model.layers", False, False),
    ("0.18.0", "language_model.model.layers", True, True),
    ("0.32.0", "language_model.model.layers", True, True),
]


@pytest.mark.parametrize(("version", "path", "flag", "delivers"), KIMI)
def test_kimi_through_the_versions(version: str, path: str, flag: bool, delivers: bool) -> None:
    arch = releases.known(version).archs["KimiK25ForConditionalGeneration"]
    assert (arch.layers_path, arch.eagle3, arch.delivers) == (path, flag, delivers)


@pytest.mark.parametrize(("version", "last"), [("0.24.0", False), ("0.25.0", True)])
def test_deepseek_hands_over_its_last_layer_since_0_25(version: str, last: bool) -> None:
    assert releases.known(version).archs["DeepseekV3ForCausalLM"].last_layer is last


CHECKED: dict[str, dict[str, Any]] = {  # read by hand in the sources of 0.32.0
    "LlamaForCausalLM": {"delivers": True, "last_layer": True, "inner": "llama:LlamaModel", "layer_output": "pair"},
    "MistralForCausalLM": {"delivers": True, "last_layer": True, "inner": "mistral:MistralModel"},
    "DeepseekV3ForCausalLM": {"delivers": True, "last_layer": True, "inner": "deepseek_v2:DeepseekV2Model"},
    "DeepseekV32ForCausalLM": {
        "delivers": True,
        "last_layer": False,
        "inner": "deepseek_v32.nvidia.model:DeepseekV32Model",
    },
    "Gemma2ForCausalLM": {"eagle3": False, "delivers": False, "layers_path": "model.layers", "residual": "add"},
    "CohereForCausalLM": {"eagle3": False, "layer_output": "pair", "residual": "inside"},
    "Exaone4ForCausalLM": {"layer_output": "pair", "residual": "inside"},
    "PhiMoEForCausalLM": {"layer_output": "pair", "residual": "inside"},
    "StableLmForCausalLM": {"layer_output": "pair", "residual": "inside"},
    "GraniteMoeHybridForCausalLM": {"hybrid": True, "residual": "inside"},
    "BailingMoeForCausalLM": {"residual": "add"},
    "MiniCPM3ForCausalLM": {"eagle3": True, "layer_output": "pair", "residual": "none"},
    "GPT2LMHeadModel": {"layers_path": "transformer.h", "layer_output": "single", "residual": "none"},
    "ChatGLMModel": {"layers_path": "transformer.encoder.layers", "layer_output": "single"},
    "DbrxForCausalLM": {"layers_path": "transformer.blocks"},
    "OPTForCausalLM": {"layers_path": "model.decoder.layers"},
    "FalconMambaForCausalLM": {"layers_path": "backbone.layers", "hybrid": True},
    "Plamo3ForCausalLM": {"layers_path": "model.layers.layers", "residual": "add"},
    "MiMoForCausalLM": {"eagle3": True, "delivers": False, "inner": "mimo:MiMoModel"},
    "IQuestLoopCoderForCausalLM": {"loops": True},
    "HrmTextForCausalLM": {"stacks": 2},
    "DeepseekV4ForCausalLM": {"lanes": True, "layer_output": "other", "delivers": True},
    "Gemma3nForCausalLM": {"lanes": True, "delivers": False},
    "LlavaForConditionalGeneration": {"eagle3": True, "delivers": None, "inner": None},
    "Exaone4_5_ForConditionalGeneration": {"eagle3": True, "delivers": False, "registered": ("Exaone4ForCausalLM",)},
    "Llama4ForConditionalGeneration": {"delivers": True, "inner": "llama4:Llama4Model"},
    "Idefics3ForConditionalGeneration": {"layers_path": "model.text_model.layers", "eagle3": False},
    "AriaForConditionalGeneration": {"layers_path": "language_model.layers"},
    "HfMoondream": {"layers_path": "text.blocks"},
    "MiniCPMV": {"layers_path": "llm.model.layers", "inner": None},
    "MiDashengLMModel": {"layers_path": "decoder.model.layers"},
    "FireRedASR2ForConditionalGeneration": {"layers_path": "model.decoder.model.layers", "enc_dec": False},
    "WhisperForConditionalGeneration": {"enc_dec": True},
}


@pytest.mark.parametrize("name", CHECKED)
def test_facts_of_0_32(name: str) -> None:
    arch = releases.known("0.32.0").archs[name]
    assert {fact: getattr(arch, fact) for fact in CHECKED[name]} == CHECKED[name]


# Every entry of the two tables counts, also names that the table of embedding models repeats (4 in 0.32, 7 in 0.16).
TOTALS = {
    "0.16.0": {"text": (29, 128), "multimodal": (11, 87), "transformers": (6, 6)},
    "0.32.0": {"text": (49, 118), "multimodal": (37, 122), "transformers": (26, 26)},
}


@pytest.mark.parametrize("version", TOTALS)
def test_totals(version: str) -> None:
    archs = releases.known(version).archs.values()
    every, flagged = Counter(a.table for a in archs), Counter(a.table for a in archs if a.eagle3)
    assert {table: (flagged[table], count) for table, count in every.items()} == TOTALS[version]
    assert all(arch.layers_path for arch in archs if arch.table != "transformers")


@needs_vllm
def test_the_installed_vllm_is_found_without_importing_it() -> None:
    before = "vllm" in sys.modules
    found = releases.installed()
    assert found is not None
    assert found.root is not None
    assert "+" not in found.version
    assert found.archs["LlamaForCausalLM"].delivers
    assert ("vllm" in sys.modules) == before


@needs_vllm
def test_another_interpreter_is_asked(tmp_path: Path) -> None:
    (tmp_path / "vllm.py").write_text("raise SystemExit('imported')", encoding="utf-8")
    here = releases.installed()
    assert here is not None
    assert releases.installed(str(Path(sys.prefix, "bin", "python3"))) == here


@needs_vllm
@pytest.mark.slow
def test_the_table_is_what_the_installed_sources_say() -> None:
    found = releases.installed()
    assert found is not None
    assert found.root is not None
    if found.version not in releases.shipped():
        pytest.skip(f"vLLM {found.version} is not in the table")
    assert dict(Registry(found.root)) == dict(releases.known(found.version).archs)
    assert not isinstance(found.archs, Registry), "the sources are those of the release, so the table answers"


def test_an_interpreter_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="could not be asked"):
        releases.installed(str(tmp_path / "python"))


@pytest.mark.parametrize("text", ["0.32.0; rm", "١.٢", "0", "latest", "0.32.0 0.16.0", ""])
def test_what_is_no_version_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="is not a version"):
        releases.number(text)


@pytest.mark.parametrize("text", ["0.32.0", "v0.32", "0.32.0+cpu", "0.32.0rc1", "0.32.0.dev12+g1a2b"])
def test_versions_as_packages_spell_them(text: str) -> None:
    assert releases.number(text) == (0, 32, 0)
