"""What lies beside a model's config.json: generation config, quantisation, weights. No torch.

All of it is optional. Only files that are there are read; what they do not say stays None.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from headstart.errors import UserError

CONFIG, GENERATION = "config.json", "generation_config.json"
# ModelOpt before 0.31, AutoGPTQ and AutoAWQ keep what config.json lacks here (vLLM 0.32, transformers_utils/config.py).
QUANTIZATION = ("hf_quant_config.json", "quantize_config.json", "quant_config.json")


def read_object(file: Path) -> dict[str, Any]:
    """A JSON object. Raises UserError when the file cannot be read or holds something else."""
    try:
        value = json.loads(file.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror}", looked_for="the config.json of a model") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise UserError(f"{file} holds a {type(value).__name__}", looked_for="a JSON object")
    return value


def read_optional(folder: Path, name: str) -> dict[str, Any]:
    """The JSON object in that file of the folder; {} where there is no such file. Raises UserError when it is damaged."""
    return read_object(folder / name) if (folder / name).is_file() else {}


@dataclass(frozen=True)
class Beside:
    """The files around one config.json. folder None: nothing is around it, as with a lone JSON file of another name."""

    folder: Path | None

    @classmethod
    def of(cls, file: Path) -> Beside:
        """What belongs to the configuration in `file`."""
        return cls(file.parent if file.name == CONFIG else None)

    @cached_property
    def generation(self) -> Mapping[str, Any]:
        return read_optional(self.folder, GENERATION) if self.folder else {}

    @cached_property
    def quantization(self) -> tuple[Mapping[str, Any], str]:
        """What a quantisation file says, and where; ({}, "") where there is none."""
        for name in QUANTIZATION if self.folder else ():
            if found := read_optional(self.folder or Path(), name):
                inner = found.get("quantization")
                return (inner, f"{name}: quantization") if isinstance(inner, Mapping) else (found, name)
        return {}, ""

    @cached_property
    def weights_bytes(self) -> tuple[int | None, str]:
        """Bytes of all weights, and where that is known from: the safetensors index, else the files' own sizes."""
        if self.folder is None:
            return None, "unknown: no folder"
        for index in sorted(self.folder.glob("*.safetensors.index.json")):
            metadata = read_object(index).get("metadata")
            total = metadata.get("total_size") if isinstance(metadata, Mapping) else None
            if isinstance(total, (int, float)) and total > 0:
                return int(total), f"{index.name}: metadata.total_size"
        sizes = [path.stat().st_size for path in self.folder.glob("*.safetensors")]
        return (sum(sizes), f"size of {len(sizes)} safetensors files") if sizes else (None, "unknown: no weights here")


ALONE = Beside(None)
