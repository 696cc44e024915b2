"""What has to be mended in vLLM's process before vLLM is imported. Standard library only."""

from __future__ import annotations

from typing import Any


def keep_scans_out_of_llvmlite() -> None:
    """Make llvmlite's library object say that it has no `__dict__`.

    vLLM 0.32 on a CPU reads the `__dict__` of every object in every module (triton_utils/dispatcher.py, `_rebind_kernels`).
    That object takes any name for a C function and answers with a wrapper, and the start fails: whenever numba was imported
    before, as the image processor of Kimi-K2.5 does.
    """
    try:
        from llvmlite.binding import ffi  # noqa: PLC0415
    except ImportError:
        return
    library, find = type(ffi.lib), type(ffi.lib).__getattr__

    def __getattr__(self: Any, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return find(self, name)

    library.__getattr__ = __getattr__
