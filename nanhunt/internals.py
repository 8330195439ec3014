"""The private corners of torch that the op level leans on, each with what happens when it is missing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def _private(path: str, instead: Any) -> Callable[[], Any]:
    """`torch._C.<path>`, or a function that always gives `instead` where this torch has no such thing."""
    found: Any = torch._C
    for name in path.split("."):
        found = getattr(found, name, None)
    return found if found is not None else lambda: instead


# The node whose backward is running in this thread. Without it a fault in backward has no forward line.
running_node: Callable[[], Any] = _private("_current_autograd_node", None)
# The backward that is running in this thread, -1 in forward. Without it all ops look like forward.
graph_task: Callable[[], int] = _private("_current_graph_task_id", -1)
_next_node: Callable[[], int] = _private("_autograd._get_sequence_nr", 0)
_tracing: Callable[[], Any] = _private("_get_tracing_state", None)
_transforms: Callable[[], Any] = _private("_functorch.peek_interpreter_stack", None)

ACCUMULATE = 1 << 63  # AccumulateGrad has the number 2**64 - 1: after everything else


def newest_node() -> int:
    """The number of the autograd node that this thread made last: in a dispatch mode, that of the running op."""
    return _next_node() - 1


def number_of(node: Any) -> int:
    """The number which `node` was given when its forward op ran; -1 where torch does not tell."""
    number = getattr(node, "_sequence_nr", None)
    return int(number()) if number is not None else -1


def off_limits() -> bool:
    """Where a dispatch mode must keep its hands off.

    Reading a tensor under forward AD is a segmentation fault; while `torch.jit.trace` records, every op of ours
    would become part of the user's program.
    """
    if getattr(torch.autograd.forward_ad, "_current_level", -1) >= 0:
        return True
    return _transforms() is not None or _tracing() is not None


def autocast_depth() -> int:
    """How many autocast regions are open. Inside an op autocast itself is off, so it can't be asked."""
    depth = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    return int(depth)


class Storage:
    """A storage's identity. While this is held, no other storage can have the same `key`."""

    __slots__ = ("_weak", "key")

    def __init__(self, storage: Any) -> None:
        self.key: int = storage._cdata
        self._weak: Any = storage._weak_ref()

    def gone(self) -> bool:
        return bool(torch.UntypedStorage._expired(self._weak))

    def __del__(self, free: Any = torch.UntypedStorage._free_weak_ref) -> None:
        free(self._weak)
