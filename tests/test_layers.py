"""The layer rules hold, and their check finds what breaks them."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parent.parent
TOOL = REPOSITORY / "tools" / "check_layers.py"


def layers(root: Path) -> tuple[int, str]:
    command = [sys.executable, root / "tools" / TOOL.name]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return ended.returncode, ended.stderr


def test_the_package_keeps_its_layers() -> None:
    assert layers(REPOSITORY) == (0, "")


# What is planted in a file, and what must be told of it.
BREACHES = {
    "config.py": ("import torch", "config reaches torch through headstart.config"),
    "cli.py": ("try:\n    pass\nexcept ImportError:\n    import numpy", "cli reaches numpy through headstart.cli"),
    "files.py": ("from headstart.drafts import heavy", "files reaches torch through headstart.drafts.heavy"),
    "target/__init__.py": ("import pyarrow", "target.anatomy reaches pyarrow through headstart.target"),
    "rundir.py": ("class A:\n    import jinja2", "rundir reaches jinja2 through headstart.rundir"),
    "stages/one.py": (
        "def f():\n    from . import two",
        "stages.one imports stage headstart.stages.two",
    ),
    "stages/three.py": ("from headstart.stages.two import f", "stage headstart.stages.three imports stage"),
    "drafts/heavy.py": ("import torch\nfrom ..data import store", "drafts.heavy is part of an import cycle"),
    "data/store.py": ("def f():\n    from headstart.drafts import heavy", "data.store is part of an import cycle"),
    "engines/load.py": ("def f():\n    import vllm.config", "engines.load imports vllm"),
    "engines/vllm_like.py": ("import vllm", "engines.vllm_like imports vllm"),
    "report/words.py": ("x = 1\ny = 'd2t'", "report.words:2 spells d2t"),
}
ALLOWED = {
    "engines/vllm/engine.py": "import vllm",
    "engines/hooks.py": "# eagle_aux_hidden_state_layer_ids",
    "formats/vllm.py": "d2t = 1",
    "events.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch\nelse:\n    import json",
    "pipeline.py": "def f():\n    import torch",
}


def light_modules() -> tuple[str, ...]:
    spec = importlib.util.spec_from_file_location("check_layers", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclass looks itself up there
    spec.loader.exec_module(module)
    return module.LIGHT


def plant(root: Path, modules: dict[str, str]) -> None:
    """A tiny package beside a copy of the tool."""
    for name in {*modules, *(f"{light.replace('.', '/')}.py" for light in light_modules())}:
        path = root / "src" / "headstart" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(modules.get(name, ""))
    (root / "tools").mkdir()
    shutil.copy(TOOL, root / "tools")


def test_planted_breaches_are_found_and_what_is_allowed_is_not(tmp_path: Path) -> None:
    plant(tmp_path / "good", ALLOWED)
    assert layers(tmp_path / "good") == (0, "")
    plant(tmp_path / "bad", ALLOWED | {name: text for name, (text, _) in BREACHES.items()} | {"stages/two.py": ""})
    code, told = layers(tmp_path / "bad")
    assert code == 1
    for _, expected in BREACHES.values():
        assert expected in told, expected


def test_a_light_module_that_is_gone_is_told(tmp_path: Path) -> None:
    plant(tmp_path, ALLOWED)
    (tmp_path / "src" / "headstart" / "files.py").unlink()
    assert layers(tmp_path) == (1, "layers: headstart.files does not exist, but is said to be light\n")
