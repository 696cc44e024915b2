"""This process among those that torchrun started. No torch here."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager


def count() -> int:
    """How many torchrun started; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank() -> int:
    """The number of this one among them, from 0; 0 without torchrun."""
    return int(os.environ.get("RANK", "0"))


@contextmanager
def ended_at_once() -> Iterator[None]:
    """Around all that one of several processes does: it ends with the body, by the exit code that Python would have given it, but
    without Python's own end.

    A thread of gloo may still hold a tensor whose last owner was Python, and needs the interpreter's lock to free it. While Python
    ends that aborts the process (pytorch issue 190489), and whoever frees the process group with the lock in hand waits forever
    for that thread. So the group is never freed, and Python never ends.
    """
    if count() == 1:
        yield
        return
    try:
        yield
        code = 0
    except SystemExit as end:
        code = end.code or 0
        if not isinstance(code, int):
            sys.stderr.write(f"{code}\n")
            code = 1
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
