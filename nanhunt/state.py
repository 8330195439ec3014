"""Parameters, buffers, optimizer state: what was bad before a step, and what a step has done to them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from . import probe
from .naming import Names
from .verdict import Call, Origin, Rec, settle

if TYPE_CHECKING:
    from .judge import Judge

_Named = Iterable[tuple[str, str, torch.Tensor]]  # name, path of the module that owns it, tensor


_SMALL = 1 << 14  # numbers: below, a call costs more than the copy into one tensor


class State:
    """Looks at a tensor only when it was written since the last look: torch counts the versions."""

    def __init__(self, names: Names, judge: Judge) -> None:
        self._names, self._judge = names, judge
        self._seen: dict[str, tuple[int, int, tuple[str, ...]]] = {}  # name -> (id, version, kinds)
        self._bad_moments: set[tuple[str, str | None]] = set()  # optimizer state that was bad once
        self._at_start: set[str] = set()  # names of what was bad when it was first looked at
        self._told: set[str] = set()
        self._fresh = self._last = False
        self.optimizer_ran = False  # in this step

    # --- parameters and buffers -------------------------------------------------------------------

    def look(self, *, fresh: bool = False, last: bool = False) -> None:
        """Look at all that was written since the last look, between two runs of the model.

        `fresh`: nobody was looking until now, so what is bad has been so before. `last`: there is no later look that
        would show what was written through `.data`, which counts no version.
        """
        self._fresh, self._last = fresh, last
        self._look(self._names.parameters(), "parameter")
        self._look(self._buffers(), "buffer")
        self._fresh = self._last = False

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
        for name, (_, _, kinds) in self._seen.items():
            if not kinds or not (name.startswith(prefix) or name in handed):
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
            kinds and "nan" not in kinds and name.rpartition(".")[0] == call.path and name in self._names.buffers
            for name, (_, _, kinds) in self._seen.items()
        )

    def standing(self) -> None:
        """At the end of a step: what was bad before it, and that no value of the step has shown.

        An unread row of an embedding, the running variance of a norm in training: nothing is harmed yet.
        """
        judge = self._judge
        for name, (_, _, kinds) in list(self._seen.items()):
            buffer = name in self._names.buffers
            if not kinds or name in self._told or (buffer and "nan" not in kinds):
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
        observer = self._judge.observer
        for name, owner, tensor in tensors:
            version = _version(tensor)
            before = self._seen.get(name)
            unchanged = before is not None and before[0] == id(tensor) and before[1] == version
            if unchanged and not self._last and (call is None or what == "parameter" or not self._uncounted(owner)):
                continue
            numbers = probe.payload(tensor)
            if numbers is None:
                continue
            rec = Rec(name, tensor.dtype, None, None)
            observer.measure(numbers, rec)
            self._seen[name] = (id(tensor), version, before[2] if before else ())
            if rec.bad or before is None or before[2] or observer.deferring:
                args = (name, owner, rec, what, before is None or self._fresh, call)
                observer.tell(True, self._changed, args, None, tensor)

    def _changed(
        self, name: str, owner: str, rec: Rec, what: str, at_start: bool, call: Call | None, module: Any, tensor: Any
    ) -> None:
        judge = self._judge
        kinds = judge.kinds(rec, tensor) if rec.bad else ()
        key, version, before = self._seen[name]
        self._seen[name] = (key, version, kinds)
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
        for p, _name in self._moved(optimizer):
            if p.grad is not None and id(p) not in self._judge.touched:
                self._judge.result(p, p.grad)

    def after_update(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer_ran = True
        rates = [g.get("lr") for g in optimizer.param_groups]
        moments = []
        for p, name in self._moved(optimizer):
            self._updated(name, None, p, p, rates)
            for key, value in optimizer.state.get(p, {}).items():
                if isinstance(value, torch.Tensor) and value.dim():
                    moments.append((name, key, value, p))
        small = [one for one in moments if _is_small(one[2])]
        if self._bad_moments or not self._judge.observer.fine_together([one[2] for one in small]):
            small = []
        passed = {id(one[2]) for one in small}
        for name, key, value, p in moments:
            if id(value) not in passed:
                self._updated(name, key, value, p, rates)

    def _moved(self, optimizer: torch.optim.Optimizer) -> Iterable[tuple[torch.Tensor, str]]:
        for i, group in enumerate(optimizer.param_groups):
            for j, p in enumerate(group["params"]):
                owners = self._names.owners.get(id(p))
                yield p, owners[0][0] if owners else f"param_groups[{i}]['params'][{j}]"

    def _updated(self, name: str, key: str | None, tensor: torch.Tensor, p: torch.Tensor, rates: list[Any]) -> None:
        """Look at a parameter (`key` None), or at a tensor of its optimizer state, after the update."""
        observer = self._judge.observer
        numbers = probe.payload(tensor)
        if numbers is None:
            return
        if key is not None and (name, key) not in self._bad_moments and observer.fine(numbers):
            return
        rec = Rec(name, tensor.dtype, None, None)
        observer.measure(numbers, rec)
        label = name if key is None else f"optimizer state {key} of {name}"
        before = self._seen[label][2] if label in self._seen else ()
        if key is None:
            self._seen[label] = (id(tensor), _version(tensor), before)
        if rec.bad or before or observer.deferring:
            self._bad_moments.add((name, key))
            observer.tell(True, self._update_seen, (label, name, before, rec, rates, p), None, tensor)

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
        known = self._seen.get(label, (0, -1, ()))
        if kinds or known[2]:
            self._seen[label] = (known[0], known[1], kinds)
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
        origin.facts["parameter"] = p if tensor is not None else None
        judge.confirm(judge.born(origin, rec, tensor, None, None), tensor)


def _is_small(tensor: torch.Tensor) -> bool:
    plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided and tensor.is_floating_point()
    return plain and tensor.numel() <= _SMALL and tensor.element_size() > 1


def _version(tensor: torch.Tensor) -> int:
    try:
        return tensor._version
    except RuntimeError:  # inference tensors do not count versions
        return -1
