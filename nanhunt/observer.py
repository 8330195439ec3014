"""Module calls and gradients as they come: each tensor looked at once, told to the judge in order."""

from __future__ import annotations

import functools
import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from . import frames, hooks, internals, probe
from .calls import Calls
from .errors import NonFiniteError
from .naming import Names
from .recorder import Slots
from .verdict import Call, Rec

if TYPE_CHECKING:
    from .judge import Judge
    from .rerun import Shadow

TRAIL = 21  # calls that a report shows before the fault
_USERS = 64  # calls remembered for one tensor
_PLAIN = (int, float, str, bool, type(None))


class Observer:
    """Turns what the hooks see into `Call`s and `Rec`s. Its methods return None and never raise by accident."""

    def __init__(
        self,
        names: Names,
        judge: Judge,
        *,
        sites: bool,
        defer: bool,
        at_once: bool,
        failed: Callable[[Exception], None],
    ) -> None:
        self.on = False
        self.names, self.judge, self.slots = names, judge, Slots()
        self.attachment: hooks.Attachment | None = None
        self.seen = 0  # tensors looked at
        self.roots = 0  # calls of the model from outside
        self.calls = Calls(names, sites=sites)
        self.trail: deque[tuple[Call, list[Rec], list[Rec]]] = deque(maxlen=TRAIL)
        self.param_takers: dict[int, list[Call]] = {}
        self.blind: set[str] = set()
        self.shadow: Shadow | None = None  # while a module is run again: its calls are not the program's
        self.dtypes: set[torch.dtype] = set()  # met in this step
        self._defer, self._failed, self._at_once = defer, failed, at_once
        self._lock = threading.Lock()
        self.aside = False  # a hunt inside runs its step once more: that is not the program's
        self.serial = 0  # of the step
        self.own_modes = 0  # dispatch modes that are ours
        self._known: dict[Any, tuple[internals.Storage, Rec]] = {}
        self._known_limit = 4096

    # --- module calls -----------------------------------------------------------------------------

    def on_pre(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if self.shadow is not None and self.shadow.thread == threading.get_ident():
            self.shadow.on_pre(module, args, frames.call_kwargs())
        else:
            self.guarded(self._enter, module, args)

    def on_post(self, module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        if self.shadow is not None and self.shadow.thread == threading.get_ident():
            self.shadow.on_post(module)
        else:
            self.guarded(self._leave, module, args, kwargs, out)

    def guarded(self, event: Callable[..., None], *args: Any) -> None:
        """Run an event unseen by the user's modes. Only the deliberate stop leaves it."""
        if self.aside:
            return
        if internals.transformed() or internals.recording():
            self.blind.add("inside torch.func transforms or while a graph is traced nothing is looked at")
            return
        try:
            if internals.foreign_modes(self.own_modes):
                with internals.unseen_by_modes():
                    event(*args)
            else:
                event(*args)
        except NonFiniteError:
            raise
        except Exception as failure:
            self._failed(failure)

    def _enter(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        running, again = self.calls.running()
        entry = self.calls.known(module, running)
        if entry is None:
            return
        outermost = not running and not again  # a checkpoint's recomputation was judged the first time
        if outermost:
            self.roots += 1
            self.judge.outermost()
            self.calls.ran = True
            if len(self._known) > self._known_limit:
                self._prune()
        if not self.on:
            return
        call, recs = self.calls.begin(module, entry, running, again)
        bad = False
        for name, tensor in _arguments(args, deep=outermost):
            bad |= self._take(tensor, name, call, recs, again)
        kwargs: dict[str, Any] = {}
        if entry.kwargs or not args:
            kwargs = frames.call_kwargs()
            entry.kwargs = bool(kwargs)
            for key, value in kwargs.items():
                for name, tensor in _arguments((value,), deep=outermost):
                    bad |= self._take(tensor, (key, name[1]), call, recs, again)
        if outermost:
            self.judge.batch(recs, args, kwargs)
        if not again:
            self.tell(bad, self.judge.entered, (call, recs), module, (args, kwargs))

    def _take(self, tensor: torch.Tensor, name: Any, call: Call, recs: list[Rec], again: bool) -> bool:
        if isinstance(tensor, nn.Parameter):
            _remember(self.param_takers.setdefault(id(tensor), []), call)
            return False
        rec = self.look(tensor, name, call.parent, None, again)
        if rec is None:
            return False
        _remember(rec.takers, call)
        recs.append(rec)
        return rec.bad

    def _leave(self, module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        running, again = self.calls.running()
        ended = self.calls.end(module, running)
        if ended is None or not self.on:
            return
        call, taken = ended
        if out is hooks.RAISED:
            self.judge.broken(call)
            return
        if isinstance(kwargs, dict) and kwargs:
            self.calls.met_kwargs(call)
        outermost = not running and not again
        recs: list[Rec] = []
        bad = False
        for name, tensor in probe.leaves(out):
            if isinstance(tensor, nn.Parameter):
                continue
            rec = self.look(tensor, ("output", name), call.parent, call, again)
            if rec is None:
                continue
            rec.scope = call.parent or rec.scope  # what a child made and its parent hands on lives outside the parent
            rec.exits = rec.exits or outermost
            if call not in rec.makers:
                _remember(rec.makers, call)
            recs.append(rec)
            bad |= rec.bad
        if not again:
            self.trail.append((call, taken, recs))
            self.tell(bad or outermost, self.judge.left, (call, recs, outermost), module, (out, args, kwargs))
        if outermost:
            self.drain()

    # --- tensors ----------------------------------------------------------------------------------

    def look(self, tensor: torch.Tensor, name: Any, scope: Call | None, maker: Call | None, again: bool) -> Rec | None:
        """The record of a tensor: the one made before, or a new one with one reduction and one hook."""
        if type(tensor) is not torch.Tensor:
            try:
                with torch._C.DisableTorchFunctionSubclass():  # what a subclass does to calls is not for ours
                    return self._look(tensor, name, scope, maker, again)
            except Exception as failure:
                self.blind.add(f"{type(tensor).__name__} cannot be looked at ({type(failure).__name__})")
                return None
        return self._look(tensor, name, scope, maker, again)

    def _look(self, tensor: torch.Tensor, name: Any, scope: Call | None, maker: Call | None, again: bool) -> Rec | None:
        known = self.known(tensor)
        if known is not None:
            return known
        numbers = probe.payload(tensor)
        if numbers is None or internals.batched(tensor):
            return None
        self.seen += 1
        rec = Rec(name, tensor.dtype, scope, maker)
        self.dtypes.add(tensor.dtype)
        if not again and self.measure(numbers, rec):
            rec.node = type(tensor.grad_fn).__name__
        if tensor.requires_grad and self.attachment is not None:
            rec.leaf = tensor.grad_fn is None and not again  # a checkpoint detaches what it recomputes from
            self.attachment.gradient(tensor, _GradientHook(self, rec, tensor._version))
        else:
            key = _identity(tensor)
            if key is not None:
                self._known[key] = (internals.Storage(tensor.untyped_storage()), rec)
        return rec

    def known(self, tensor: torch.Tensor) -> Rec | None:
        """The record of a tensor that was looked at in this step.

        One that wants a gradient bears our hook, and the record with it. Of the others the memory is known: no
        weak reference to a tensor of the user's, which torch.utils.swap_tensors would refuse.
        """
        if tensor.requires_grad:
            for hook in (tensor._backward_hooks or {}).values():
                if type(hook) is _GradientHook and hook.observer is self and hook.fits(tensor._version, self.serial):
                    return hook.rec
            return None
        key = _identity(tensor)
        found = self._known.get(key) if key is not None else None
        return found[1] if found is not None else None

    def measure(self, numbers: torch.Tensor, rec: Rec) -> bool:
        """Take the range of a payload: at once, or (True) into a slot that is read later."""
        if self._defer or (numbers.device.type != "cpu" and not self._at_once):

            def take(lo: float, hi: float) -> None:
                rec.lo, rec.hi = lo, hi

            with self._lock:
                self.slots.put(numbers, take)
            return True
        rec.lo, rec.hi = probe.limits(numbers)
        return False

    def fine(self, numbers: torch.Tensor) -> bool:
        """True when a payload was looked at, is finite, and nothing that happened before waits to be judged."""
        if self._defer or self.judge.alert or self.slots.waiting or numbers.device.type != "cpu":
            return False  # on an accelerator a look is never for free
        self.seen += 1
        return not probe.bad(*probe.limits(numbers))

    def fine_together(self, tensors: list[torch.Tensor]) -> bool:
        """The same of many small tensors at once: False when one is bad, or when they must be looked at singly."""
        groups: dict[Any, list[torch.Tensor]] = {}
        for tensor in tensors:
            groups.setdefault((tensor.device, tensor.dtype), []).append(tensor)
        for group in groups.values():
            numbers = probe.payload(torch.cat([tensor.detach().reshape(-1) for tensor in group]))
            if numbers is None or not self.fine(numbers):
                return False
            self.seen += len(group) - 1
        return True

    def on_gradient(self, rec: Rec, grad: torch.Tensor | None) -> None:
        if self.on and grad is not None and self.shadow is None:
            self.guarded(self._gradient, rec, grad)

    def _gradient(self, rec: Rec, grad: torch.Tensor) -> None:
        reading = self.reading(grad)  # its own: the same tensor gets a gradient in each backward over the graph
        if reading is None:
            return
        if reading.bad or self.deferring or self.judge.alert:
            self.tell(True, self.judge.gradient, (rec, reading), None, grad)
        else:
            rec.came_back(reading)

    def on_parameter(self, name: str, param: torch.Tensor) -> None:
        if self.on and param.grad is not None:
            self.guarded(self._parameter, name, param, param.grad)

    def _parameter(self, name: str, param: torch.Tensor, grad: torch.Tensor) -> None:
        self.judge.touched.add(id(param))
        if type(grad) is torch.Tensor and id(param) not in self.judge.bad_grads and not internals.batched(grad):
            numbers = probe.payload(grad)
            if numbers is None or self.fine(numbers):
                return
        reading = self.reading(grad)
        if reading is not None:
            self.tell(reading.bad, self.judge.parameter, (name, id(param), reading), None, grad)

    def reading(self, grad: torch.Tensor) -> Rec | None:
        """The range of a gradient; None where there is nothing to look at."""
        if type(grad) is not torch.Tensor:
            with torch._C.DisableTorchFunctionSubclass():
                return self._read(grad)
        return self._read(grad)

    def _read(self, grad: torch.Tensor) -> Rec | None:
        numbers = None if internals.batched(grad) else probe.payload(grad)
        if numbers is None:
            return None
        self.seen += 1
        reading = Rec("grad", grad.dtype, None, None)
        reading.numel = numbers.numel()
        self.measure(numbers, reading)
        return reading

    # --- telling ----------------------------------------------------------------------------------

    @property
    def deferring(self) -> bool:
        """True while ranges wait on a device: what happens now must wait behind them."""
        return self._defer or bool(self.slots.waiting)

    def tell(
        self, worth: bool, event: Callable[..., None], args: tuple[Any, ...], module: nn.Module | None, hand: Any
    ) -> None:
        """Pass an event on: at once with the tensors in hand, or, when ranges wait on a device, later without."""
        if self._defer or self.slots.waiting:
            self.slots.events.append(functools.partial(event, *args, None, None))
        elif worth or self.judge.alert:
            event(*args, module, hand)

    def drain(self) -> None:
        """Read the device, if anything waits there, and judge what was read."""
        if self.slots.waiting or self.slots.events:
            self.slots.drain()

    # --- steps ------------------------------------------------------------------------------------

    def new_step(self) -> None:
        self.calls.new_step()
        self.serial += 1
        self._known.clear()
        self.param_takers.clear()
        self.dtypes.clear()
        self.slots.forget()
        if self.attachment is not None:
            self.attachment.drop_leaves()

    def _prune(self) -> None:
        self._known = {k: v for k, v in self._known.items() if not v[0].gone()}
        self._known_limit = max(4096, 2 * len(self._known))


class _GradientHook:
    """What hangs on a tensor: numbers and names only, and the word that it is not to be saved with it."""

    __slots__ = ("observer", "rec", "serial", "version")
    __torch_unserializable__ = True

    def __init__(self, observer: Observer, rec: Rec, version: int) -> None:
        self.observer, self.rec, self.version, self.serial = observer, rec, version, observer.serial

    def fits(self, version: int, serial: int) -> bool:
        """True for the tensor as it was when it was looked at; a leaf that the user holds is looked at each step."""
        return version == self.version and (serial == self.serial or not self.rec.leaf)

    def __call__(self, grad: torch.Tensor | None) -> None:
        self.observer.on_gradient(self.rec, grad)


def _identity(tensor: torch.Tensor) -> Any:
    """What tells a piece of memory and its contents from every other; None where there is no such thing."""
    try:
        memory = tensor.untyped_storage()._cdata
        spread = None if tensor.is_contiguous() else (tuple(tensor.shape), tensor.stride())
        return memory, tensor._version, tensor.storage_offset(), tensor.numel(), tensor.dtype, spread
    except (RuntimeError, NotImplementedError):  # inference tensors count no versions; sparse ones have no storage
        return None


def _remember(calls: list[Call], call: Call) -> None:
    """The last users of a tensor: one that a server keeps for ever must not collect calls for ever."""
    calls.append(call)
    if len(calls) > _USERS:
        del calls[0]


def _arguments(args: tuple[Any, ...], *, deep: bool) -> Iterator[tuple[Any, torch.Tensor]]:
    """((position, path inside), tensor) of the arguments of a call."""
    for i, arg in zip(itertools.count(), args):
        kind = type(arg)
        if issubclass(kind, torch.Tensor):
            yield (i, ""), arg
        elif kind not in _PLAIN:
            for path, tensor in probe.leaves(arg, deep=deep):
                yield (i, path), tensor
