"""Parameters, buffers, optimizer state: what was bad before a step, and what a step has done to them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from . import probe
from .moved import Moved, is_small
from .naming import Names
from .ranks import grouped
from .verdict import Call, Origin, Rec, settle

if TYPE_CHECKING:
    from .judge import Judge

_Named = Iterable[tuple[str, str, torch.Tensor]]  # name, path of the module that owns it, tensor

_INF = float("inf")
_GRADIENT = 1e12  # its square, summed over any number of steps, is far below what a float32 or bfloat16 can hold
_OFTEN = 16  # steps after which the optimizer state is looked at, also when it cannot have gone bad


class State:
    """Looks at a tensor only when it was written since the last look: torch counts the versions."""

    def __init__(self, names: Names, judge: Judge) -> None:
        self._names, self._judge = names, judge
        self._seen: dict[str, tuple[int, int]] = {}  # name -> (id, version) at the last look
        self._kinds: dict[str, tuple[str, ...]] = {}  # what is bad, by name; optimizer state too
        self._bad_moments: set[tuple[str, str | None]] = set()  # optimizer state that was bad once
        self._at_start: set[str] = set()  # names of what was bad when it was first looked at
        self._told: set[str] = set()
        self._fresh = self._last = self.looked = False
        self._replaced = False  # a parameter is another object than when the model was read: fully_shard does that
        self.optimizer_ran = False  # in this step
        self._plans: dict[int, Moved] = {}  # by id of the optimizer
        self._updates: dict[int, tuple[int, int]] = {}  # id of an optimizer -> (id of its state, updates seen)
        self._unseen = False  # a gradient of this step has passed no hook
        self._largest = _INF  # |number| of the parameters after the last update

    def forget(self) -> None:
        """The watch is over: hold nothing of the model."""
        self._plans.clear()

    # --- parameters and buffers -------------------------------------------------------------------

    def look(self, *, fresh: bool = False, last: bool = False) -> None:
        """Look at all that was written since the last look, between two runs of the model.

        `fresh`: nobody was looking until now, so what is bad has been so before. `last`: there is no later look that
        would show what was written through `.data`, which counts no version.
        """
        self._fresh, self._last, self.looked = fresh, last, True
        self._look(self._names.parameters(), "parameter")
        self._look(self._buffers(), "buffer")
        self._fresh = self._last = False
        if self._replaced:
            self._replaced = False
            self._judge.observer.renew()

    def look_at_buffers(self, call: Call) -> None:
        """Look at the buffers that a forward (its outermost call) has written."""
        self._look(self._buffers(), "buffer", call)

    def _uncounted(self, owner: str) -> bool:
        """Running statistics: a norm in training writes them without counting a version (torch 2.13)."""
        module = self._names.by_path.get(owner)
        return (
            module is not None
            and module.training
            and getattr(module, "running_mean", None) is not None
            and owner in self._judge.observer.calls.last
        )

    def bad_before(self, call: Call, value: tuple[str, ...] = ("nan",)) -> tuple[str, str, tuple[str, ...], str] | None:
        """(name, owner, kinds, what) of a parameter, or of a buffer with a NaN, that the call's own code may read.

        An infinity in a buffer may stand there on purpose; one in a parameter never does. What belongs to a
        child that ran inside the call was read there, and would have shown in what that child gave back. What is to
        be explained is a `value` of these kinds: a NaN that was read does not give an Inf.
        """
        prefix = call.path + "." if call.path else ""
        takers = self._judge.observer.param_takers
        handed = {n for key, calls in takers.items() if call in calls for n, _ in self._names.owners.get(key, [])}
        for name, kinds in self._bad():
            if not (name.startswith(prefix) or name in handed):
                continue
            buffer = name in self._names.buffers
            if ("nan" in kinds and "nan" not in value) or (buffer and "nan" not in kinds):
                continue
            owner = name.rpartition(".")[0]
            child = self._judge.observer.calls.last.get(owner)
            if owner == call.path or name in handed or child is None or not child.inside(call):
                return name, owner, kinds, "buffer" if buffer else "parameter"
        return None

    def meant(self, call: Call) -> bool:
        """True when a buffer of the call's own module holds an infinity: it may stand there on purpose."""
        return any(
            "nan" not in kinds and name.rpartition(".")[0] == call.path and name in self._names.buffers
            for name, kinds in self._bad()
        )

    def _bad(self) -> list[tuple[str, tuple[str, ...]]]:
        """The parameters and buffers that are bad, in the order of the model."""
        return [(name, self._kinds[name]) for name in self._seen if name in self._kinds] if self._kinds else []

    def _found(self, name: str, kinds: tuple[str, ...]) -> None:
        if kinds:
            self._kinds[name] = kinds
        else:
            self._kinds.pop(name, None)

    def standing(self) -> None:
        """At the end of a step: what was bad before it, and that no value of the step has shown.

        An unread row of an embedding, the running variance of a norm in training: nothing is harmed yet.
        """
        judge = self._judge
        for name, kinds in self._bad():
            buffer = name in self._names.buffers
            if name in self._told or (buffer and "nan" not in kinds):
                continue
            if name not in self._at_start or (buffer and self._is_scratch(name)):
                continue
            self._told.add(name)
            owner = name.rpartition(".")[0]
            if judge.faulted():
                continue
            tensor = self._tensor(name)
            origin = Origin("state", judge.user_of(id(tensor), name), kinds, name, owner=owner)
            origin.facts["what"] = "buffer" if buffer else "parameter"
            judge.confirm(judge.born(origin, None, tensor, None, None))  # no op of the step has shown it

    def _is_scratch(self, name: str) -> bool:
        """A buffer that is not saved: a cache made with torch.empty holds what the memory held, until it is written."""
        owner, _, short = name.rpartition(".")
        return short in getattr(self._names.by_path.get(owner), "_non_persistent_buffers_set", ())

    def _tensor(self, name: str) -> torch.Tensor | None:
        owner, _, short = name.rpartition(".")
        found = getattr(self._names.by_path.get(owner), short, None)
        return found if isinstance(found, torch.Tensor) else None

    def _buffers(self) -> _Named:
        for name, (module, short) in self._names.buffers.items():
            b = module._buffers.get(short)
            if b is not None:
                yield name, name.rpartition(".")[0], b

    def _look(self, tensors: _Named, what: str, call: Call | None = None) -> None:
        seen, observer = self._seen, self._judge.observer
        written = []
        small: list[torch.Tensor] = []
        for name, owner, tensor in tensors:
            version = _version(tensor)
            unchanged = seen.get(name) == (id(tensor), version) and not self._last
            if unchanged and (call is None or what == "parameter" or not self._uncounted(owner)):
                continue
            written.append((name, owner, tensor, version))
            if what == "parameter" and id(tensor) not in self._names.owners:
                self._replaced = True
            if is_small(tensor) and name not in self._kinds:
                small.append(tensor)
        calm = len(small) > 1 and not observer.deferring and not self._judge.alert
        if calm and observer.peak_together(small) < _INF:
            fine = {id(tensor) for tensor in small}
            seen.update((name, (id(tensor), version)) for name, _, tensor, version in written if id(tensor) in fine)
            written = [one for one in written if id(one[2]) not in fine]
        for name, owner, tensor, version in written:
            numbers = probe.payload(tensor)
            if numbers is None:
                continue
            rec = Rec(name, tensor.dtype, None, None)
            observer.measure(numbers, rec)
            first = name not in seen
            seen[name] = id(tensor), version
            before = name in self._kinds
            if rec.bad or first or before or observer.deferring:
                args = (name, owner, rec, what, first or self._fresh, call)
                observer.tell(True, self._changed, args, None, tensor, always=before)

    def _changed(
        self, name: str, owner: str, rec: Rec, what: str, at_start: bool, call: Call | None, module: Any, tensor: Any
    ) -> None:
        judge = self._judge
        kinds = judge.kinds(rec, tensor) if rec.bad else ()
        before = self._kinds.get(name, ())
        self._found(name, kinds)
        if at_start and kinds:
            self._at_start.add(name)
        if at_start or not kinds or set(kinds) <= set(before) or "nan" in before:
            return
        if what == "buffer" and "nan" not in kinds and not judge.origins:
            return  # an observer's range, a best score: an infinity that is meant
        if call is not None:  # a buffer that this forward has poisoned
            origin = settle(kinds, judge.origins)
            if origin is None:
                maker = judge.observer.calls.last.get(owner) or call
                origin = judge.born(Origin("forward", maker, kinds, name, owner=owner), rec, tensor, None, None)
            judge.confirm(origin, tensor)
        elif (judge.stepped_back or self.optimizer_ran or judge.turns) and not judge.faulted():
            # An update written by hand, or what is done between the steps: an average of the weights, a clamp.
            origin = Origin("optimizer", None, kinds, name, owner=owner)
            origin.facts["late"] = not (judge.stepped_back or self.optimizer_ran)
            judge.confirm(judge.born(origin, rec, tensor, None, None), tensor)

    # --- the optimizer's step ---------------------------------------------------------------------

    def concerns(self, optimizer: torch.optim.Optimizer) -> bool:
        """True when the optimizer moves a parameter of the watched model."""
        owners = self._names.owners
        return any(id(p) in owners for group in optimizer.param_groups for p in group["params"])

    def before_update(self, optimizer: torch.optim.Optimizer) -> None:
        """Look at the gradients that no hook has seen: FSDP1, torch.autograd.grad, gradients written by hand."""
        touched = self._judge.touched
        self._unseen = False
        for p, _ in self._moved(optimizer).pairs:
            if p.grad is not None and id(p) not in touched:
                self._unseen = True
                self._judge.result(p, p.grad)

    def after_update(self, optimizer: torch.optim.Optimizer) -> None:
        """Look at the parameters that were moved, and at what the optimizer keeps of them."""
        self.optimizer_ran = True
        moved = self._moved(optimizer)
        if self._all_fine(moved, self._moments(optimizer, moved)):
            return
        self._largest = _INF
        rates = [g.get("lr") for g in optimizer.param_groups]
        for p, name in moved.pairs:
            self._updated(name, None, p, p, rates)
        for p, name in moved.pairs:
            for key, value in optimizer.state.get(p, {}).items():
                if isinstance(value, torch.Tensor) and value.dim():
                    self._updated(name, key, value, p, rates)

    def _moved(self, optimizer: torch.optim.Optimizer) -> Moved:
        known = self._plans.get(id(optimizer))
        if known is None or not known.fits(optimizer, self._names):
            known = self._plans[id(optimizer)] = Moved(optimizer, self._names)
        return known

    def _all_fine(self, moved: Moved, moments: list[torch.Tensor]) -> bool:
        """True when nothing is bad after an update. Then nobody needs to be told, and it took the fewest looks."""
        observer = self._judge.observer
        if observer.deferring or self._judge.alert or self._bad_moments or self._kinds:
            return False
        large, small = moved.large, moved.small
        if moments:
            large = large + [value for value in moments if not is_small(value)]
            small = small + [value for value in moments if is_small(value)]
        largest = 0.0
        for tensor in large:
            numbers = probe.payload(tensor)
            if numbers is not None:
                largest = max(largest, observer.peak(numbers) if numbers.is_cpu else _INF)
                if largest == _INF:
                    return False
        largest = max(largest, observer.peak_together(small))
        if largest == _INF:
            return False
        self._largest = largest
        self._seen.update((name, (id(p), _version(p))) for p, name in moved.pairs)
        return True

    def _moments(self, optimizer: torch.optim.Optimizer, moved: Moved) -> list[torch.Tensor]:
        """The optimizer state that must be looked at: none where it cannot have gone bad without its parameter.

        What torch's own optimizers keep is made of the gradient, its square, and decay times the parameter. While
        these are small, no square can overflow, and a NaN would show in the parameter it moves. The state is looked
        at in the first update, when it was loaded anew, now and then, and always for other optimizers.
        """
        state = optimizer.state
        known, times = self._updates.get(id(optimizer), (0, 0))
        self._updates[id(optimizer)] = id(state), times + 1
        if (
            known == id(state)
            and times % _OFTEN
            and type(optimizer).__module__.startswith("torch.optim.")
            and self._judge.observer.arrivals.largest < _GRADIENT
            and self._largest < _GRADIENT
            and moved.wide
            and not self._unseen
        ):
            return []
        kept = [value for p, _ in moved.pairs for value in state.get(p, {}).values()]
        return [value for value in kept if isinstance(value, torch.Tensor) and value.dim()]

    def _updated(self, name: str, key: str | None, tensor: torch.Tensor, p: torch.Tensor, rates: list[Any]) -> None:
        """Look at a parameter (`key` None), or at a tensor of its optimizer state, after the update."""
        observer = self._judge.observer
        numbers = probe.payload(tensor)
        if numbers is None:
            return
        rec = Rec(name, tensor.dtype, None, None)
        observer.measure(numbers, rec)
        label = name if key is None else f"optimizer state {key} of {name}"
        before = self._kinds.get(label, ())
        if key is None:
            self._seen[label] = id(tensor), _version(tensor)
        if rec.bad or before or observer.deferring:
            if rec.bad or before:
                self._bad_moments.add((name, key))
            args = (label, name, before, rec, rates, p)
            observer.tell(True, self._update_seen, args, None, tensor, always=bool(before))

    def _update_seen(
        self,
        label: str,
        name: str,
        before: tuple[str, ...],
        rec: Rec,
        rates: list[Any],
        p: torch.Tensor,
        module: Any,
        tensor: Any,
    ) -> None:
        judge = self._judge
        kinds = judge.kinds(rec, tensor) if rec.bad else ()
        self._found(label, kinds)
        if not kinds or set(kinds) <= set(before) or "nan" in before:
            return
        pending = judge.scaling.pending
        if pending:  # the scaler let the step through, so those gradients did it
            judge.confirm(pending[0], tensor)
            return
        if judge.faulted():
            return  # the consequence of a fault that was reported
        origin = Origin("optimizer", None, kinds, label, owner=name.rpartition(".")[0])
        origin.facts["rates"] = rates
        origin.facts["together"] = grouped()
        origin.facts["sent"] = judge.observer.arrivals.sizes.get(id(p))
        origin.facts["parameter"] = p if tensor is not None else None
        judge.confirm(judge.born(origin, rec, tensor, None, None), tensor)


def _version(tensor: torch.Tensor) -> int:
    try:
        return tensor._version
    except RuntimeError:  # inference tensors do not count versions
        return -1
