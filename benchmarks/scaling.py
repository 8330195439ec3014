"""How the cost grows: with the number of modules, and with the size of what they return."""

from __future__ import annotations

import contextlib
import ctypes
from typing import Any

import torch

from .models import Times
from .permodule import FLOOR, Links, extra

COMPARED = ("floor: one sum", "floor: one aminmax", "nanhunt, module", "nanhunt, auto")
MODULES = (10, 30, 100, 300, 1000, 3000)
BYTES = (1 << 10, 1 << 14, 1 << 18, 1 << 20, 1 << 22, 1 << 24, 1 << 26)
_SMALL = 1 << 10
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # as malloc.h has them


def row(modules: int, size: int, *, rounds: int, seconds: float) -> dict[str, Any]:
    """Microseconds for one module that returns `size` bytes of float32, forward and backward together."""
    program = Links(modules, Times, torch.randn(size // 4))
    guess = modules * (15e-6 + 4 * size / 5e9)  # of one step: small ops cost calls, large ones memory
    found = extra(program, rounds=rounds, times=max(1, round(seconds / guess)), names=COMPARED)
    return {
        "modules": modules,
        "bytes": size,
        "microseconds": {name: spread.json() for name, spread in found.items()},
        "over_floor": {name: _over(found[name].median, found[FLOOR].median) for name in COMPARED if "nanhunt" in name},
    }


def _over(cost: float, floor: float) -> float | None:
    """None where the floor is lost in the noise."""
    return round(cost / floor, 3) if floor > 0 else None


def _keep_memory() -> None:
    """Have the C library keep what large tensors give back, as the allocators of accelerators do.

    By default it maps and unmaps anew whatever is above 32 MB: page faults would then be all that is measured.
    """
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1)


def measure(quick: bool = False) -> list[dict[str, Any]]:
    """Rows of growing depth at 1 KB, then rows of growing size at as many modules as keep the memory small.

    Best called in a process of its own: the memory allocator is set up for large tensors.
    """
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if quick:
        return [row(10, _SMALL, rounds=2, seconds=1e-4), row(4, 1 << 16, rounds=2, seconds=1e-4)]
    _keep_memory()
    rows = [row(count, _SMALL, rounds=5, seconds=0.05) for count in MODULES]
    for size in BYTES[1:]:
        count = min(100, max(2, (1 << 27) // size))
        rows.append(row(count, size, rounds=4, seconds=0.05))
    return rows
