"""What compiled code has done: its module calls told to the judge as if hooks had seen them run.

A graph has left the largest number of each of its tensors in a slot. At the next hook that Python runs (the compiled
region returns, the module beside it is entered, a backward begins) its script is played: calls begin and end in the
order in which they ran, with the numbers that the slots hold.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from . import traces
from .calls import Running
from .compiled import codes
from .traces import Event, Trace, Value
from .verdict import Call, Rec

if TYPE_CHECKING:
    from .observer import Observer


class _Script:
    """A trace as it ran for one instance of the module around it: layers that are alike share one graph."""

    def __init__(self, trace: Trace, around: nn.Module | None) -> None:
        home = trace.home() if trace.home is not None else None
        self._twin: dict[int, nn.Module] = {}
        if around is not None and home is not None and around is not home and type(around) is type(home):
            for path, module in home.named_modules(remove_duplicate=False):
                try:
                    self._twin[id(module)] = around.get_submodule(path)
                except AttributeError:  # not quite alike: what is missing did not run
                    continue
        self.events: list[tuple[Event, nn.Module]] = []
        for event in trace.events:
            module = event.module()
            if module is not None:
                self.events.append((event, self._twin.get(id(module), module)))
        self.groups: dict[Any, tuple[list[int], list[torch.Tensor]]] = {}  # values and their slots, by device and dtype
        for value in trace.values:
            slot = self._slot(value)
            if slot is not None:
                at, slots = self.groups.setdefault((slot.device, slot.dtype), ([], []))
                at.append(value.index)
                slots.append(slot)

    def _slot(self, value: Value) -> torch.Tensor | None:
        owner = value.owner()
        if owner is None:
            return None
        return getattr(vars(self._twin.get(id(owner), owner)).get(traces.SEAT), value.key, None)


class Regions:
    """Plays the scripts of the graphs that have run, for one watch."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self.view = traces.View(observer.names, observer.calls.current, observer.blind)
        self.played = 0  # graphs
        self.gave: dict[Call, list[Rec]] = {}  # what the calls of this step gave out, inside graphs
        self._scripts: dict[tuple[int, int], _Script] = {}
        self._entered = 0

    def forget(self) -> None:
        """The step is over."""
        self.gave.clear()

    def close(self) -> None:
        self.view.close()
        self._scripts.clear()
        self.gave.clear()

    def hidden(self, call: Call) -> bool:
        """True where the modules inside a call were not seen: it ran code that was compiled before the watch began."""
        module = self._observer.names.by_path.get(call.path)
        if module is None or call.traced or not module._modules:
            return False
        if any(one.inside(call) for one in self._observer.calls.last.values()):
            return False
        return any(traces.strange(code) for code in codes(module))

    def collect(self) -> None:
        """Play what has run since the last look."""
        traces.poll()
        if not self.view.pending:
            return
        pending, self.view.pending = self.view.pending, []
        running, again = self._observer.calls.running()
        if again or not self._observer.on:  # a checkpoint's recomputation was judged the first time
            return
        around = self.view.home()
        for trace in pending:
            key = trace.serial, id(around)
            script = self._scripts.get(key)
            if script is None or len(script.events) != len(trace.events):
                script = self._scripts[key] = _Script(trace, around)
            self._play(trace, script, running)

    def _play(self, trace: Trace, script: _Script, running: Running) -> None:
        observer = self._observer
        calls, judge = observer.calls, observer.judge
        self.played += 1
        recs: list[Rec] = []
        for value in trace.values:
            rec = Rec("output", value.dtype, None, None)
            rec.node = value.node
            recs.append(rec)
            observer.dtypes.add(value.dtype)
        self._measure(script, recs)
        depth = len(running)
        for event, module in script.events:
            if event.enter:
                entry = calls.known(module, running)
                if entry is None:  # of another model
                    continue
                if not running:
                    observer.roots += 1
                    calls.ran = True
                    judge.outermost()
                call = calls.begin(entry, running, False, traced=True)
                self._entered += 1
                call.traced, call.site, call.looked = self._entered, event.site, entry.looked
                taken: list[Rec] = []
                for name, value in event.values:
                    rec = recs[value.index]
                    if not rec.makers and not rec.takers:  # first met here: the code around the call has made it
                        rec.name, rec.scope = name, call.parent
                    rec.takers.append(call)
                    taken.append(rec)
                if not call.looked:  # left out by the user
                    continue
                call.taken = taken
                observer.tell(any(rec.bad for rec in taken), judge.entered, (call, taken), module, None)
                continue
            ended = calls.end(module, running)
            if ended is None:
                continue
            call, was, ended.taken = ended, ended.taken, ()
            outermost = not running
            given = []
            for name, value in event.values:
                rec = recs[value.index]
                if not rec.makers:
                    rec.name = name
                rec.scope = call.parent or rec.scope
                rec.exits = rec.exits or outermost
                rec.makers.append(call)
                given.append(rec)
            self.gave[call] = given
            if not call.looked:
                continue
            observer.trail.append((call, was, given))
            calls.given[call.path] = call, given
            bad = outermost or any(rec.bad for rec in given)
            observer.tell(bad, judge.left, (call, given, outermost), module, None, always=outermost)
        del running[depth:]

    def _measure(self, script: _Script, recs: list[Rec]) -> None:
        observer = self._observer
        for at, slots in script.groups.values():
            observer.seen += len(at)
            largest = torch.stack(slots)
            if observer.waits(largest):
                observer.slots.given(largest, [recs[i] for i in at])
            else:
                for i, number in zip(at, largest.tolist(), strict=True):
                    recs[i].measured(number, number)
