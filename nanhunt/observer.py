"""Module calls and gradients as they come: each tensor looked at once, told to the judge in order."""

from __future__ import annotations

import functools
import itertools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from . import frames, hooks, probe
from .calls import Calls
from .errors import NonFiniteError
from .naming import Names
from .recorder import Slots
from .verdict import Call, Rec

if TYPE_CHECKING:
    from .judge import Judge
    from .rerun import Shadow

TRAIL = 21  # calls that a report shows before the fault


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
        self._known: dict[int, tuple[weakref.ref[torch.Tensor], int, Rec]] = {}
        self._known_limit = 4096

    # --- module calls -----------------------------------------------------------------------------

    def on_pre(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if self.shadow is not None and self.shadow.thread == threading.get_ident():
            self.shadow.on_pre(module, args, frames.call_kwargs())
            return
        if hooks.skip_here():
            self.blind.add("inside torch.func transforms or while a graph is traced nothing is looked at")
            return
        try:
            self._enter(module, args)
        except NonFiniteError:
            raise
        except Exception as failure:
            self._failed(failure)

    def on_post(self, module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        if self.shadow is not None and self.shadow.thread == threading.get_ident():
            self.shadow.on_post(module)
            return
        if hooks.skip_here():
            return
        try:
            self._leave(module, args, kwargs, out)
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
            self.param_takers.setdefault(id(tensor), []).append(call)
            return False
        rec = self.look(tensor, name, call.parent, None, again)
        if rec is None:
            return False
        rec.takers.append(call)
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
            rec.scope = call.parent  # a tensor that a child made and its parent hands on lives outside the parent
            rec.exits = rec.exits or outermost
            if call not in rec.makers:
                rec.makers.append(call)
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
        try:
            version = tensor._version
        except RuntimeError:  # inference tensors do not count versions
            version = -1
        known = self._known.get(id(tensor))
        if known is not None and known[1] == version and version >= 0 and known[0]() is tensor:
            return known[2]
        numbers = probe.payload(tensor)
        if numbers is None:
            return None
        self.seen += 1
        rec = Rec(name, tensor.dtype, scope, maker)
        self.dtypes.add(tensor.dtype)
        if not again and self.measure(numbers, rec):
            rec.node = type(tensor.grad_fn).__name__
        if tensor.requires_grad and self.attachment is not None:
            rec.leaf = tensor.grad_fn is None
            self.attachment.gradient(tensor, functools.partial(self.on_gradient, rec))
        self._known[id(tensor)] = (weakref.ref(tensor), version, rec)
        return rec

    def known(self, tensor: torch.Tensor) -> Rec | None:
        """The record of a tensor that was looked at in this step."""
        found = self._known.get(id(tensor))
        return found[2] if found is not None and found[0]() is tensor else None

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

    def on_gradient(self, rec: Rec, grad: torch.Tensor) -> None:
        if not self.on or self.shadow is not None or hooks.skip_here():
            return
        try:
            # Its own reading: the same tensor gets a gradient in each backward over the graph.
            reading = self._reading(grad)
            if reading is None:
                return
            if reading.bad or self.deferring or self.judge.alert:
                self.tell(True, self.judge.gradient, (rec, reading), None, grad)
            else:
                rec.came_back(reading)
        except NonFiniteError:
            raise
        except Exception as failure:
            self._failed(failure)

    def on_parameter(self, name: str, param: torch.Tensor) -> None:
        if not self.on or param.grad is None:
            return
        try:
            numbers = probe.payload(param.grad)
            self.judge.touched.add(id(param))
            if numbers is None or (id(param) not in self.judge.bad_grads and self.fine(numbers)):
                return
            reading = self._reading(param.grad)
            if reading is not None:
                self.tell(reading.bad, self.judge.parameter, (name, id(param), reading), None, param.grad)
        except NonFiniteError:
            raise
        except Exception as failure:
            self._failed(failure)

    def _reading(self, grad: torch.Tensor) -> Rec | None:
        numbers = probe.payload(grad)
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
        self._known.clear()
        self.param_takers.clear()
        self.dtypes.clear()
        self.slots.forget()
        if self.attachment is not None:
            self.attachment.drop_leaves()

    def _prune(self) -> None:
        self._known = {k: v for k, v in self._known.items() if v[0]() is not None}
        self._known_limit = max(4096, 2 * len(self._known))


def _arguments(args: tuple[Any, ...], *, deep: bool) -> Iterator[tuple[Any, torch.Tensor]]:
    """((position, path inside), tensor) of the arguments of a call."""
    for i, arg in zip(itertools.count(), args):
        if isinstance(arg, torch.Tensor):
            yield (i, ""), arg
        elif not isinstance(arg, (int, float, str, bool, type(None))):
            for path, tensor in probe.leaves(arg, deep=deep):
                yield (i, path), tensor
