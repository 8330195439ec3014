"""Module calls and gradients as they come: each tensor looked at once, told to the judge in order."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from . import dynamo, frames, hooks, internals, probe, traces
from .arrivals import Arrivals
from .calls import Calls
from .collectives import Collectives
from .errors import NonFiniteError
from .internals import batched, dispatch_modes, function_modes, graph_task, tracing, transforms
from .looks import Looks
from .naming import Names
from .numerics import headroom_bits
from .regions import Regions
from .verdict import Call, Rec

if TYPE_CHECKING:
    from .finding import Finding
    from .judge import Judge
    from .rerun import Shadow

TRAIL = 21  # calls that a report shows before the fault
_USERS = 64  # calls remembered for one tensor
_PLAIN = (int, float, str, bool, type(None))
_OUTPUT = ("output", "")
_ARGUMENT = [(i, "") for i in range(64)]
_INF = math.inf
_Tensor = torch.Tensor

Taken = tuple[Call, list[Rec] | tuple[Rec, ...], list[Rec] | tuple[Rec, ...]]  # a call, what it took, what it gave


class Observer(Looks):
    """Turns what the hooks see into `Call`s and `Rec`s. Its methods return None and never raise by accident."""

    def __init__(
        self,
        names: Names,
        judge: Judge,
        *,
        sites: bool,
        defer: bool,
        at_once: bool,
        backward: bool,
        failed: Callable[[Exception], None],
    ) -> None:
        super().__init__(defer=defer, at_once=at_once, backward=backward)
        self.on = False
        self.names, self.judge = names, judge
        self.roots = 0  # calls of the model from outside
        self.calls = Calls(names, sites=sites)
        self.trail: deque[Taken] = deque(maxlen=TRAIL)
        self.param_takers: dict[int, list[Call]] = {}
        self.shadow: Shadow | None = None  # while a module is run again: its calls are not the program's
        self.aside = False  # a hunt inside runs its step once more: that is not the program's
        self.own_modes = 0  # dispatch modes that are ours
        self.partial = False  # modules are left out
        self.hidden = False  # modes of the program are taken off for as long as we look
        self.halt: Finding | None = None  # of another rank that has stopped: this one stops at its next hook
        self.obey: Callable[[], None] = lambda: None
        self.renew: Callable[[], object] = names.refresh  # and hang on what has come into the model since
        self.arrivals = Arrivals(self)
        self.collectives = Collectives(self)
        self.regions = Regions(self)
        self.failed = failed

    def attach(self, attachment: hooks.Attachment) -> None:
        self.attachment = attachment
        self.bring = self.on_gradient

    # --- what torch calls -------------------------------------------------------------------------

    def on_pre(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if (
            dispatch_modes() > self.own_modes
            or function_modes()
            or self.shadow is not None
            or self.aside
            or transforms() is not None
            or tracing() is not None
        ):
            if self.shadow is not None and self.shadow.thread == threading.get_ident():
                self.shadow.on_pre(module, args, frames.call_kwargs())
            else:
                self.guarded(self._enter, module, args)
            return
        try:
            self._enter(module, args)
        except NonFiniteError:
            raise
        except Exception as failure:
            self.failed(failure)

    # On an exception torch calls it without kwargs, as on_post(module, args, None).
    def on_post(self, module: nn.Module, args: Any, kwargs: Any, out: Any = hooks.RAISED) -> None:
        if (
            dispatch_modes() > self.own_modes
            or function_modes()
            or self.shadow is not None
            or self.aside
            or transforms() is not None
            or tracing() is not None
        ):
            if self.shadow is not None and self.shadow.thread == threading.get_ident():
                self.shadow.on_post(module)
            else:
                self.guarded(self._leave, module, args, kwargs, out)
            return
        try:
            self._leave(module, args, kwargs, out)
        except NonFiniteError:
            raise
        except Exception as failure:
            self.failed(failure)

    def on_gradient(self, rec: Rec, grad: torch.Tensor | None) -> None:
        if not self.on or grad is None or self.shadow is not None:
            return
        if (
            dispatch_modes() > self.own_modes
            or function_modes()
            or self.aside
            or transforms() is not None
            or tracing() is not None
        ):
            self.guarded(self._gradient, rec, grad)
            return
        try:
            self._gradient(rec, grad)
        except NonFiniteError:
            raise
        except Exception as failure:
            self.failed(failure)

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
                    self.hidden = True
                    try:
                        event(*args)
                    finally:
                        self.hidden = False
            else:
                event(*args)
        except NonFiniteError:
            raise
        except Exception as failure:
            self.failed(failure)

    # --- module calls -----------------------------------------------------------------------------

    def _enter(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if self.halt is not None:
            self.obey()
        calls, thread = self.calls, self.calls.thread
        task = graph_task()
        if task != thread.task:
            thread.turn(task)
        running = thread.running
        entry = calls.entries.get(id(module))
        if entry is None:
            entry = calls.newcomer(module) if running else None
            if entry is None:
                return
        if traces.traces:
            self.regions.collect()
        again = task != -1
        outermost = not running and not again  # a checkpoint's recomputation was judged the first time
        if outermost:
            if frames.rehearsed():
                return
            self.roots += 1
            if self.on or self.judge.stepped_back:
                self.judge.outermost()
            calls.ran = True
            self.prune()
        if not self.on:
            return
        call = calls.begin(entry, running, again)
        if not entry.looked and not outermost:
            call.looked = False
            return
        recs = call.taken = []
        bad, parent = False, call.parent
        for i, arg in enumerate(args):
            kind = type(arg)
            if kind is _Tensor and i < 64:
                rec = self.look(arg, _ARGUMENT[i], parent, None, again)
                if rec is not None:
                    rec.takers.append(call)
                    if len(rec.takers) > _USERS:
                        del rec.takers[0]
                    recs.append(rec)
                    bad = bad or rec.bad
            elif kind not in _PLAIN:
                for name, tensor in _tensors(arg, i, deep=outermost):
                    bad = self._take(tensor, name, call, recs, again) or bad
        kwargs: dict[str, Any] = {}
        if entry.kwargs or not args:
            kwargs = frames.call_kwargs()
            entry.kwargs = bool(kwargs)
            for key, value in kwargs.items():
                if type(value) not in _PLAIN:
                    for name, tensor in _tensors(value, key, deep=outermost):
                        bad = self._take(tensor, name, call, recs, again) or bad
        if outermost:
            self.judge.batch(recs, args, kwargs)
        if (bad or self.judge.alert or self._defer or self.slots.waiting) and not again:
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
        calls, thread = self.calls, self.calls.thread
        task = graph_task()
        if task != thread.task:
            thread.turn(task)
        running = thread.running
        if not running:
            return
        if traces.traces:
            self.regions.collect()
        again = task != -1
        call: Call | None = running[-1]
        if len(running) > 1 and running[-1].module_id == id(module):
            del running[-1]
        else:
            call = calls.end(module, running)
        if call is None or not self.on:
            return
        taken, call.taken = call.taken, ()  # which bear the call themselves: nothing is to wait for a collection
        if out is hooks.RAISED:
            self.judge.broken(call)
            return
        if kwargs and isinstance(kwargs, dict):
            calls.met_kwargs(call)
        outermost = not running and not again
        if not call.looked:
            return
        recs: list[Rec] = []
        bad = False
        if type(out) is _Tensor:
            rec = self.look(out, _OUTPUT, call.parent, call, again)
            if rec is not None:
                recs.append(rec)
                bad = rec.bad
                if outermost or rec.makers[-1:] != [call]:  # a child made it, or it was handed in
                    self._give(rec, call, outermost)
        else:
            for name, tensor in probe.leaves(out):
                if not isinstance(tensor, nn.Parameter):
                    rec = self.look(tensor, ("output", name), call.parent, call, again)
                    if rec is not None:
                        recs.append(rec)
                        bad = bad or rec.bad
                        self._give(rec, call, outermost)
        if not again:
            self.trail.append((call, taken, recs))
            calls.given[call.path] = call, recs
            if bad or outermost or self.judge.alert or self._defer or self.slots.waiting:
                self.tell(
                    bad or outermost,
                    self.judge.left,
                    (call, recs, outermost),
                    module,
                    (out, args, kwargs),
                    always=outermost,
                )
        if outermost:
            self.drain()

    @staticmethod
    def _give(rec: Rec, call: Call, outermost: bool) -> None:
        if call.parent is not None:
            rec.scope = call.parent  # what a child made and its parent hands on lives outside the parent
        if outermost:
            rec.exits = True
        if call not in rec.makers:
            _remember(rec.makers, call)

    # --- gradients --------------------------------------------------------------------------------

    def _gradient(self, rec: Rec, grad: torch.Tensor) -> None:
        # Its own reading: the same tensor gets a gradient in each backward over the graph.
        told = self.judge.alert or self._defer or self.slots.waiting  # to the judge, whatever it is
        if type(grad) is _Tensor and grad.dtype in probe.DIRECT and grad.is_cpu and not (told or batched(grad)):
            try:
                lo, hi = probe.limits(grad)
            except (RuntimeError, IndexError):  # empty, sparse, nested
                lo, hi = _INF, -_INF
            if lo > -_INF and hi < _INF:
                self.seen += 1
                size = -lo if -lo > hi else hi
                for call in rec.makers:
                    if call.grad is None or not call.grad >= size:
                        call.grad = size
                    call.incoming += size * grad.numel()
                return
        self.arrivals.settle()  # what came before it is judged before it
        reading = self.reading(grad, rec)
        if reading is not None:
            if reading.bad or self.deferring or self.judge.alert:
                self.tell(True, self.judge.gradient, (rec, reading), None, grad)
            else:
                rec.came_back(reading.absmax, reading.numel)

    def forget(self) -> None:
        """The watch is over: hold nothing of the model."""
        self.on = False
        self.calls.interrupted()
        self.arrivals.forget()
        self.regions.close()
        self.names.forget()

    # --- telling ----------------------------------------------------------------------------------

    def tell(
        self,
        worth: bool,
        event: Callable[..., None],
        args: tuple[Any, ...],
        module: nn.Module | None,
        hand: Any,
        *,
        always: bool = False,
    ) -> None:
        """Pass an event on: at once with the tensors in hand, or, when ranges wait on a device, later without.

        `always`: also when no range turns out to be bad.
        """
        if self._defer or self.slots.waiting:
            self.slots.events.append((always, event, args))
        elif worth or self.judge.alert:
            event(*args, module, hand)

    def drain(self) -> None:
        """Read the device, if anything waits there, and judge what was read."""
        if traces.traces:
            self.regions.collect()
        if (self.slots.waiting or self.slots.events) and not (
            torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
        ):
            self.slots.drain(self.judge.alert)

    def ranges(self) -> dict[str, float]:
        """The largest numbers of each module in the running step, else in the one before: see `Watch.ranges`."""
        found: dict[str, float] = {}
        for path, (call, recs) in (self.calls.given or self.calls.given_before).items():
            name = path or "(the model itself)"
            if recs and not any(rec.bad for rec in recs):
                largest = max(rec.absmax for rec in recs)
                found[f"{name}/absmax"] = largest
                rooms = [headroom_bits(rec.absmax, str(rec.dtype).removeprefix("torch.")) for rec in recs]
                found |= {f"{name}/headroom_bits": min(room) for room in [[r for r in rooms if r is not None]] if room}
            if call.grad is not None and call.grad < _INF:
                found[f"{name}/grad.absmax"] = call.grad
        return found

    def new_step(self) -> None:
        super().new_step()
        self.calls.new_step()
        self.regions.forget()
        self.param_takers.clear()
        self.arrivals.new_step()
        self.collectives.new_step()


# The backward of a step that is compiled as a whole runs where dynamo would compile the hooks too.
dynamo.run_plainly(Observer.on_gradient)


def _remember(calls: list[Call], call: Call) -> None:
    """The last users of a tensor: one that a server keeps for ever must not collect calls for ever."""
    calls.append(call)
    if len(calls) > _USERS:
        del calls[0]


def _tensors(arg: Any, at: int | str, *, deep: bool) -> Iterator[tuple[Any, torch.Tensor]]:
    """((position or keyword, path inside), tensor) of one argument of a call."""
    if issubclass(type(arg), torch.Tensor):
        yield (at, ""), arg
    else:
        for path, tensor in probe.leaves(arg, deep=deep):
            yield (at, path), tensor
