"""The functions of torch.distributed that move tensors between ranks, wrapped while several ranks are watched."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterable
from typing import Any, Protocol

import torch


class CollectiveListener(Protocol):
    """What is told of collectives: the tensors that go in and those that come out. It never raises."""

    def before(self, given: Iterable[Any], received: Iterable[Any]) -> Any: ...
    def after(self, name: str, given: Any, received: Iterable[Any], work: Any) -> None: ...


# What each is called in words, and which of its arguments are read and written, by place and by name; a functional
# one returns what it writes.
_Argument = tuple[int, str] | None
_TENSOR, _OUTPUT, _INPUT = (0, "tensor"), (0, "output"), (1, "input")
_COLLECTIVES: dict[str, tuple[str, _Argument, _Argument]] = {
    "all_reduce": ("the all-reduce", _TENSOR, _TENSOR),
    "reduce": ("the reduce", _TENSOR, _TENSOR),
    "broadcast": ("the broadcast", _TENSOR, _TENSOR),
    "recv": ("the recv", None, _TENSOR),
    "all_gather": ("the all-gather", (1, "tensor"), (0, "tensor_list")),
    "all_gather_single": ("the all-gather", (1, "input_tensor"), (0, "output_tensor")),
    "all_gather_into_tensor": ("the all-gather", (1, "input_tensor"), (0, "output_tensor")),
    "gather": ("the gather", _TENSOR, (1, "gather_list")),
    "scatter": ("the scatter", (1, "scatter_list"), _TENSOR),
    "reduce_scatter": ("the reduce-scatter", (1, "input_list"), _OUTPUT),
    "reduce_scatter_single": ("the reduce-scatter", _INPUT, _OUTPUT),
    "reduce_scatter_tensor": ("the reduce-scatter", _INPUT, _OUTPUT),
    "all_to_all": ("the all-to-all", (1, "input_tensor_list"), (0, "output_tensor_list")),
    "all_to_all_single": ("the all-to-all", _INPUT, _OUTPUT),
}
_FUNCTIONAL = (
    "all_reduce",
    "broadcast",
    "all_gather_single",
    "all_gather_tensor",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "all_to_all_single",
)
_eyes: tuple[CollectiveListener, ...] = ()
_moved: list[tuple[Any, str, Any]] = []
_lock = threading.RLock()


class _Nested(threading.local):
    running = False


_inside = _Nested()  # of one collective that is made of another, the outer one counts


def wrap(listener: CollectiveListener) -> None:
    """Have collectives told to one more."""
    global _eyes
    with _lock:
        _eyes = (*_eyes, listener)
        if len(_eyes) > 1:
            return
        from torch.distributed import _functional_collectives, distributed_c10d

        for name, (words, given, received) in _COLLECTIVES.items():
            original = getattr(distributed_c10d, name, None)
            if original is None:  # a name of another torch
                continue
            watched = _watched(original, words, given, received)
            for place in (torch.distributed, distributed_c10d):
                if getattr(place, name, None) is original:
                    _moved.append((place, name, original))
                    setattr(place, name, watched)
        for name in _FUNCTIONAL:
            original = getattr(_functional_collectives, name, None)
            if original is not None:
                words = _COLLECTIVES.get(name.replace("_tensor", "_single"), ("a collective",))[0]
                _moved.append((_functional_collectives, name, original))
                setattr(_functional_collectives, name, _watched(original, words, (0, "self"), None))


def unwrap(listener: CollectiveListener) -> None:
    """No longer; with the last one, torch.distributed is as it was."""
    global _eyes
    with _lock:
        _eyes = tuple(one for one in _eyes if one is not listener)
        if not _eyes:
            for place, name, original in reversed(_moved):
                setattr(place, name, original)
            _moved.clear()


def _watched(run: Any, words: str, given: _Argument, received: _Argument) -> Any:
    @functools.wraps(run)
    def watched(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or _inside.running:
            return run(*args, **kwargs)
        buffers = _argument(received, args, kwargs) if received is not None else []
        told = [(eye, eye.before(_argument(given, args, kwargs), buffers)) for eye in _eyes]
        _inside.running = True
        try:
            out = run(*args, **kwargs)
        finally:
            _inside.running = False
        work = out if hasattr(out, "is_completed") and received is not None else None
        for eye, before in told:
            if before is not None:
                eye.after(words, before, buffers if received is not None else [out], work)
        return out

    return watched


def _argument(at: _Argument, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The tensors of one argument of a collective."""
    if at is None:
        return []
    found = args[at[0]] if len(args) > at[0] else kwargs.get(at[1])
    return list(found) if isinstance(found, (list, tuple)) else [] if found is None else [found]
