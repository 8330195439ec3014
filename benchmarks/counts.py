"""What does not depend on the machine: ops dispatched, host reads, tensors looked at, bytes kept."""

from __future__ import annotations

import ctypes
import gc
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd import profiler

import nanhunt

from . import models, pairs
from .models import Program
from .pairs import Step

COUNTED = ("gpt", "resnet", "tiny gpt2")
# `_defer` makes a CPU keep ranges in slots, as an accelerator does: its reads are then those of a drain.
WAYS: dict[str, dict[str, Any] | None] = {
    "bare": None,
    "nanhunt, module": {"detail": "module"},
    "nanhunt, auto": {"detail": "auto"},
    "nanhunt, auto, slots as on an accelerator": {"detail": "auto", "_defer": True},
    "nanhunt, op": {"detail": "op"},
}


def ops(step: Step) -> Counter[str]:
    """How often each op was dispatched in a step, forward and backward, those inside other ops included.

    Counted in C++, below every Python mode: what hides from a `TorchDispatchMode` does not hide here.
    """
    with profiler.profile(use_kineto=False) as seen:
        step()
    return Counter({e.key: e.count for e in seen.key_averages() if e.key.startswith("aten::")})


@contextmanager
def lists() -> Iterator[list[int]]:
    """Counts `Tensor.tolist`, a host read that dispatches no op. The list holds one number for each call."""
    calls: list[int] = []
    original = Tensor.tolist

    def tolist(tensor: Tensor) -> Any:
        calls.append(tensor.numel())
        return original(tensor)

    Tensor.tolist = tolist  # type: ignore[method-assign, assignment]
    try:
        yield calls
    finally:
        Tensor.tolist = original  # type: ignore[method-assign]


def watching(program: Program, options: dict[str, Any] | None) -> AbstractContextManager[Any]:
    if options is None:
        return nullcontext()
    return nanhunt.watch(program.model, program.optimizer, **options)


def row(program: Program, way: str, options: dict[str, Any] | None) -> dict[str, Any]:
    """The counts of one training step, after one that warms up."""
    step = program.step("train")
    step()
    with watching(program, options) as watch:
        step()
        before = watch.seen if watch is not None else 0
        with lists() as read:
            found = ops(step)
        looked = watch.seen - before if watch is not None else 0
    return {
        "model": program.name,
        "way": way,
        "ops": sum(found.values()),
        "looked_at": looked,
        "reads": found["aten::_local_scalar_dense"] + len(read),
        "reductions": found["aten::aminmax"] + found["aten::sum"],
    }


# --- memory ---------------------------------------------------------------------------------------


class _MallInfo(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
    ]


def heap() -> int | None:
    """Bytes that are allocated now, tensors on the CPU included; None where the C library does not tell."""
    try:
        mallinfo: Callable[[], _MallInfo] = ctypes.CDLL(None).mallinfo2
    except (OSError, AttributeError, TypeError):
        return None
    mallinfo.restype = _MallInfo  # type: ignore[attr-defined]
    found = mallinfo()
    return int(found.uordblks + found.hblkhd)


def tensor_bytes() -> int:
    """Bytes of all tensors that Python can reach, each storage once."""
    storages: dict[int, int] = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), Tensor) and thing.layout is torch.strided and thing.device.type != "meta":
            try:
                storage = thing.untyped_storage()
            except (RuntimeError, NotImplementedError):
                continue
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def kept(program: Program, options: dict[str, Any] | None, *, steps: int) -> dict[str, Any]:
    """Bytes that a watch holds after a step, what it adds with each further step, and what is left after it."""
    step = program.step("train")
    step()
    gc.collect()
    tracemalloc.start()
    try:
        base, python = tensor_bytes(), tracemalloc.get_traced_memory()[0]
        with watching(program, options):
            step()
            step()
            gc.collect()
            first, first_python, first_heap = tensor_bytes(), tracemalloc.get_traced_memory()[0], heap()
            for _ in range(steps):
                step()
            gc.collect()
            last, last_python, last_heap = tensor_bytes(), tracemalloc.get_traced_memory()[0], heap()
        gc.collect()
        left = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    growth = None if first_heap is None or last_heap is None else round((last_heap - first_heap) / steps)
    return {
        "tensor_bytes": first - base,
        "python_bytes": first_python - python,
        "tensor_bytes_per_step": round((last - first) / steps),
        "python_bytes_per_step": round((last_python - first_python) / steps),
        "heap_bytes_per_step": growth,
        "python_bytes_left": left - python,
    }


def measure(names: list[str], *, quick: bool = False) -> list[dict[str, Any]]:
    """A row for each model and way."""
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for name in names:
        if models.missing(name) is not None:
            continue
        for way, options in WAYS.items():
            program = models.build(name, quick=quick)
            with pairs.settled():
                rows.append(row(program, way, options) | kept(program, options, steps=2 if quick else 5))
    return rows
