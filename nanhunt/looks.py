"""Each tensor looked at once: its range, its record, and the hook that brings its gradient.

This and `observer.py` are the hot path: what runs for every module of every step. What can be decided
when the watch is opened is decided there; here each step is a few operations, without a tensor kept.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable
from typing import Any

import torch

from . import hooks, internals, probe
from .errors import NonFiniteWarning
from .probe import DIRECT, limits
from .recorder import Slots
from .verdict import Call, Rec

_INF = math.inf
_Tensor = torch.Tensor
_CAPTURED = "a CUDA graph was captured under the watch: nothing in it is looked at; run the step without the graph"


_VIEWS = 64  # remembered for one piece of memory
_View = tuple[int | torch.SymInt, int, Any, Rec]  # offset, numel, shape and strides where it is not contiguous


class _Bring(functools.partial):  # type: ignore[type-arg]
    """What hangs on a tensor: the record, numbers and names only, and the word that it is not to be saved with it."""

    __torch_unserializable__ = True


class Looks:
    """Takes ranges at once on a CPU, into slots that are read later on an accelerator (`defer`: everywhere)."""

    def __init__(self, *, defer: bool, at_once: bool, backward: bool) -> None:
        self.seen = 0  # tensors looked at
        self.seen_before = 0  # this step
        self.serial = 0  # of the step
        self.slots = Slots()
        self.blind: set[str] = set()
        self.dtypes: set[torch.dtype] = set()  # met in this step
        self.attachment: hooks.Attachment | None = None
        self.bring: Callable[[Rec, torch.Tensor | None], None]  # a gradient has come
        self._defer, self._at_once = defer, at_once
        self.backward = backward  # False: forward and the loss alone
        self._dtype: torch.dtype | None = None  # met last
        self._key = next(hooks.keys)  # of our hook among those of a tensor
        self._known: dict[int, tuple[internals.Storage, list[_View]]] = {}  # memory -> what was looked at in it
        self._known_limit = 4096

    # --- one tensor -------------------------------------------------------------------------------

    def look(self, tensor: torch.Tensor, name: Any, scope: Call | None, maker: Call | None, again: bool) -> Rec | None:
        """The record of a tensor: the one made before, or a new one with one reduction and one hook."""
        if type(tensor) is not _Tensor:
            return self._look_at_subclass(tensor, name, scope, maker, again)
        if not (self.backward and tensor.requires_grad):
            return self._look_unhooked(tensor, name, scope, maker, again)
        version = tensor._version
        others = tensor._backward_hooks
        if others is not None:
            mine: Any = others.get(self._key)
            if mine is not None and mine.args[0].version == version and not mine.args[0].leaf:
                return mine.args[0]  # type: ignore[no-any-return]
            known = self._among(others, tensor)
            if known is not None:
                return known
        dtype = tensor.dtype
        rec = Rec(name, dtype, scope, maker)
        if again or self._defer or dtype not in DIRECT or not tensor.is_cpu:
            if not self._measured(tensor, rec, again):
                return None
        else:
            try:
                rec.lo, rec.hi = lo, hi = limits(tensor)
                if not (lo > -_INF and hi < _INF):
                    rec.bad = True
            except (RuntimeError, IndexError):  # empty, sparse, nested
                if not self._measured(tensor, rec, again):
                    return None
        self._hook(tensor, others, rec, version, again)
        return rec

    def _hook(self, tensor: torch.Tensor, others: Any, rec: Rec, version: int, again: bool) -> None:
        self.seen += 1
        if rec.dtype is not self._dtype:
            self._dtype = rec.dtype
            self.dtypes.add(rec.dtype)
        rec.version = version
        node = tensor.grad_fn
        if node is None:
            rec.leaf = not again  # a checkpoint detaches what it recomputes from
            rec.serial = self.serial
        if self.attachment is not None:
            self.attachment.gradient(tensor, node, others, self._key, _Bring(self.bring, rec))

    def _look_unhooked(
        self, tensor: torch.Tensor, name: Any, scope: Call | None, maker: Call | None, again: bool
    ) -> Rec | None:
        memory = _memory(tensor)
        views = self._known.get(memory._cdata) if memory is not None else None
        if views is not None:
            known = _the_same(views[1], tensor)
            if known is not None:
                return known
        dtype = tensor.dtype
        rec = Rec(name, dtype, scope, maker)
        plain = type(tensor) is _Tensor and dtype in DIRECT and tensor.is_cpu and not (again or self._defer)
        try:
            if plain:
                rec.measured(*limits(tensor))
        except (RuntimeError, IndexError):  # empty, sparse, nested
            plain = False
        if not plain and not self._measured(tensor, rec, again):
            return None
        self.seen += 1
        self.dtypes.add(dtype)
        if memory is not None:
            rec.version = tensor._version
            if views is None:
                self._known[memory._cdata] = views = (internals.Storage(memory), [])
            views[1].append((tensor.storage_offset(), tensor.numel(), _spread(tensor), rec))
            if len(views[1]) > _VIEWS:
                del views[1][0]
        return rec

    def _look_at_subclass(
        self, tensor: torch.Tensor, name: Any, scope: Call | None, maker: Call | None, again: bool
    ) -> Rec | None:
        try:
            with torch._C.DisableTorchFunctionSubclass():  # what a subclass does to calls is not for ours
                if not (self.backward and tensor.requires_grad):
                    return self._look_unhooked(tensor, name, scope, maker, again)
                others = tensor._backward_hooks
                known = None if others is None else self._among(others, tensor)
                if known is not None:
                    return known
                rec = Rec(name, tensor.dtype, scope, maker)
                if not self._measured(tensor, rec, again):
                    return None
                self._hook(tensor, others, rec, tensor._version, again)
                return rec
        except Exception as failure:
            self.blind.add(f"{type(tensor).__name__} cannot be looked at ({type(failure).__name__})")
            return None

    def _measured(self, tensor: torch.Tensor, rec: Rec, again: bool) -> bool:
        """Take the range of any tensor there is; False when there are no numbers to look at."""
        numbers = probe.payload(tensor)
        if numbers is None or internals.batched(tensor):
            return False
        if not again and self.measure(numbers, rec):
            rec.node = type(tensor.grad_fn).__name__
        return True

    def known(self, tensor: torch.Tensor) -> Rec | None:
        """The record of a tensor that was looked at in this step.

        One that wants a gradient bears our hook, and the record with it. Of the others the memory is known: no
        weak reference to a tensor of the user's, which torch.utils.swap_tensors would refuse.
        """
        if self.backward and tensor.requires_grad:
            return self._among(tensor._backward_hooks or {}, tensor)
        memory = _memory(tensor)
        views = self._known.get(memory._cdata) if memory is not None else None
        return _the_same(views[1], tensor) if views is not None else None

    def _among(self, hooks: Any, tensor: torch.Tensor) -> Rec | None:
        """Of the tensor as it is: in-place ops leave hooks of what it was. A leaf is looked at in each step."""
        version = tensor._version
        mine = hooks.get(self._key)
        rec: Rec
        if mine is not None:
            rec = mine.args[0]
            if rec.version == version and (not rec.leaf or rec.serial == self.serial):
                return rec
            if len(hooks) == 1:
                return None
        for hook in hooks.values():
            if type(hook) is _Bring and hook.func is self.bring:
                rec = hook.args[0]
                if rec.version == version and (not rec.leaf or rec.serial == self.serial):
                    return rec
        return None

    def measure(self, numbers: torch.Tensor, rec: Rec) -> bool:
        """Take the range of a payload: at once, or (True) into a slot that is read later."""
        if numbers.is_cuda and torch.cuda.is_current_stream_capturing():
            self._captured()
            return False
        if self.waits(numbers):
            self.slots.put(numbers, rec)
            return True
        rec.measured(*limits(numbers))
        return False

    def waits(self, numbers: torch.Tensor) -> bool:
        """True when a range is not read at once, but later with the others."""
        return self._defer or not (numbers.is_cpu or self._at_once)

    def _captured(self) -> None:
        """What a CUDA graph replays runs no hook, and while it is recorded nothing may be read."""
        if _CAPTURED not in self.blind:
            self.blind.add(_CAPTURED)
            warnings.warn(f"nanhunt: {_CAPTURED}", NonFiniteWarning, stacklevel=2)

    def reading(self, grad: torch.Tensor, of: Rec | None = None) -> Rec | None:
        """The range of a gradient; None where there is nothing to look at."""
        if type(grad) is not torch.Tensor:
            with torch._C.DisableTorchFunctionSubclass():
                return self._read(grad, of)
        return self._read(grad, of)

    def _read(self, grad: torch.Tensor, of: Rec | None) -> Rec | None:
        numbers = None if internals.batched(grad) else probe.payload(grad)
        if numbers is None:
            return None
        self.seen += 1
        reading = Rec("grad", grad.dtype, None, None)
        reading.numel, reading.of = numbers.numel(), of
        self.measure(numbers, reading)
        return reading

    # --- many tensors -----------------------------------------------------------------------------

    @property
    def deferring(self) -> bool:
        """True while ranges wait on a device: what happens now must wait behind them."""
        return self._defer or bool(self.slots.waiting)

    def peak(self, numbers: torch.Tensor) -> float:
        """The largest |number| of a payload, infinity when it is not finite."""
        self.seen += 1
        lo, hi = limits(numbers)
        return max(-lo, hi) if lo > -_INF and hi < _INF else _INF

    def peak_together(self, tensors: list[torch.Tensor]) -> float:
        """The same of many small plain tensors at once; infinity also where they must be looked at one by one."""
        groups: dict[torch.dtype, list[torch.Tensor]] = {}
        for tensor in tensors:
            groups.setdefault(tensor.dtype, []).append(tensor)
        self.seen += len(tensors) - len(groups)
        try:
            with torch.no_grad():
                return max((self.peak(internals.flat(group)) for group in groups.values()), default=0.0)
        except RuntimeError:  # one has moved to another device since
            return _INF

    # --- steps ------------------------------------------------------------------------------------

    def new_step(self) -> None:
        self.serial += 1
        self.seen_before = self.seen
        self._known.clear()
        self.dtypes.clear()
        self._dtype = None
        self.slots.forget()
        if self.attachment is not None:
            self.attachment.drop_leaves()

    def prune(self) -> None:
        """Forget the memory that is gone, when much has been remembered within one step."""
        if len(self._known) > self._known_limit:
            self._known = {k: v for k, v in self._known.items() if not v[0].gone()}
            self._known_limit = max(4096, 2 * len(self._known))


def _memory(tensor: torch.Tensor) -> Any:
    """The storage of a tensor; None where it does not tell a tensor and its contents from every other."""
    if tensor.is_inference():  # which counts no versions
        return None
    try:
        return tensor.untyped_storage()
    except (RuntimeError, NotImplementedError):  # a sparse one has none
        return None


def _the_same(views: list[_View], tensor: torch.Tensor) -> Rec | None:
    for offset, numel, spread, rec in views:
        if (
            rec.version == tensor._version
            and offset == tensor.storage_offset()
            and numel == tensor.numel()
            and rec.dtype is tensor.dtype
            and spread == _spread(tensor)
        ):
            return rec
    return None


def _spread(tensor: torch.Tensor) -> Any:
    return None if tensor.is_contiguous() else (tuple(tensor.shape), tensor.stride())
