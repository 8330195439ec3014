"""The private corners of torch that the op level leans on, each with what happens when it is missing."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils import _python_dispatch


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
tracing: Callable[[], Any] = _private("_get_tracing_state", None)
transforms: Callable[[], Any] = _private("_functorch.peek_interpreter_stack", None)

grad_mode: Callable[[bool], Any] = getattr(torch._C, "_set_grad_enabled", torch.set_grad_enabled)
dispatch_modes: Callable[[], Any] = _private("_len_torch_dispatch_stack", 0)
function_modes: Callable[[], Any] = _private("_len_torch_function_stack", 0)

ACCUMULATE = 1 << 63  # AccumulateGrad has the number 2**64 - 1: after everything else


def newest_node() -> int:
    """The number of the autograd node that this thread made last: in a dispatch mode, that of the running op."""
    return _next_node() - 1


def sharded(tensor: torch.Tensor) -> bool:
    """True for a DTensor: what stands in it may be the work of all ranks."""
    return hasattr(tensor, "_local_tensor")


def number_of(node: Any) -> int:
    """The number which `node` was given when its forward op ran; -1 where torch does not tell."""
    number = getattr(node, "_sequence_nr", None)
    return int(number()) if number is not None else -1


def transformed() -> bool:
    """True inside a torch.func transform."""
    return transforms() is not None


def recording() -> bool:
    """True while torch.jit.trace records."""
    return tracing() is not None


# True for the tensors of `autograd.grad(is_grads_batched=True)`, which know few ops.
batched: Callable[[torch.Tensor], bool] = getattr(torch._C._functorch, "is_legacy_batchedtensor", lambda tensor: False)


def off_limits() -> bool:
    """Where a dispatch mode must keep its hands off.

    Reading a tensor under forward AD is a segmentation fault; while `torch.jit.trace` records, every op of ours
    would become part of the user's program.
    """
    if getattr(torch.autograd.forward_ad, "_current_level", -1) >= 0:
        return True
    return transformed() or recording()


def autocast_depth() -> int:
    """How many autocast regions are open. Inside an op autocast itself is off, so it can't be asked."""
    depth = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    return int(depth)


def autocast_dtype(t: torch.Tensor) -> bool:
    """Whether autocast is open and `t` has the dtype that it casts to."""
    return autocast_depth() > 0 and t.dtype is torch.get_autocast_dtype(t.device.type)


def foreign_modes(ours: int = 0) -> bool:
    """True when a mode of the user would see what we do with tensors; `ours` dispatch modes are our own."""
    return bool(dispatch_modes() > ours or function_modes() > 0)


@contextlib.contextmanager
def op_by_op() -> Iterator[None]:
    """Keep nn.TransformerEncoder from its one fused op: under a mode it loses autocast and dies (torch 2.13)."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


@contextlib.contextmanager
def unseen_by_modes() -> Iterator[None]:
    """Dispatch and function modes do not see what is done inside."""
    aside = getattr(_python_dispatch, "_disable_current_modes", contextlib.nullcontext)
    with aside(), torch._C.DisableTorchFunction():
        yield


def unseen(look: Callable[..., Any], *args: Any) -> Any:
    """What `look` gives, without a mode of the user, or a subclass's way with calls, seeing its ops."""
    with torch._C.DisableTorchFunctionSubclass():
        if foreign_modes():
            with unseen_by_modes():
                return look(*args)
        return look(*args)


def take_mode_off(mode: Any) -> None:
    """Take a dispatch mode off the stack, also when others were put on it since."""
    pop, push = getattr(_python_dispatch, "_pop_mode", None), getattr(_python_dispatch, "_push_mode", None)
    if pop is None or push is None:
        mode.__exit__(None, None, None)
        return
    above: list[Any] = []
    while dispatch_modes() > 0:
        top = pop()
        if top is mode:
            break
        above.append(top)
    for other in reversed(above):
        push(other)


def flat(tensors: list[torch.Tensor]) -> torch.Tensor:
    """One vector with the numbers of all: a copy, made by one op."""
    one_op = getattr(torch._C._nn, "flatten_dense_tensors", None)
    return one_op(tensors) if one_op is not None else torch.cat([t.reshape(-1) for t in tensors])


class _Eager:
    """Compiled regions run eagerly while anybody holds this. Whoever leaves last puts back what was found."""

    def __init__(self) -> None:
        self._held = 0
        self._lock = threading.Lock()
        self._stance: Any = None

    def hold(self) -> None:
        with self._lock:
            self._held += 1
            # Setting a stance imports the compiler, which replaces functions of torch: not where nobody uses it.
            if self._stance is None and "torch._dynamo" in sys.modules:
                self._stance = torch.compiler.set_stance("force_eager")
                self._stance.__enter__()

    def drop(self) -> None:
        with self._lock:
            self._held -= 1
            if not self._held and self._stance is not None:
                self._stance.__exit__(None, None, None)
                self._stance = None


eager = _Eager()


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
