"""What is a fault: from readings to origins, and from origins to hits, or to what was no fault after all."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from . import hooks, literals, probe
from .naming import Names
from .verdict import Call, Origin, Rec, blame, settle

if TYPE_CHECKING:
    from .observer import Observer
    from .scene import Scene

_GAIN = 4096.0  # more than a healthy module multiplies a gradient by

# A state tensor is (name, owner path, tensor).
_State = tuple[str, str, torch.Tensor]


class Judge:
    """Follows bad values through one step at a time.

    `alert` is True from the first bad value of a step on: until then the observer need not tell of calls
    in which nothing was bad. `hit(origin)` is called once for each origin that is a fault,
    `cleared(origin, why)` for one that was none.
    """

    def __init__(
        self,
        names: Names,
        *,
        hit: Callable[[Origin], None],
        cleared: Callable[[Origin, str], None],
        turn: Callable[[], None],
        stop_first: bool,
    ) -> None:
        self.names = names
        self.observer: Observer
        self.scene: Scene
        self.alert = False
        self.stepped_back = False  # a backward has run in this step
        self.origins: list[Origin] = []
        self.outside: list[Origin] = []  # origins that have left the model in this step
        self._hit, self._cleared, self._turn, self._stop_first = hit, cleared, turn, stop_first
        self._first: Origin | None = None  # of the backward that runs
        self._pending: list[Origin] = []  # overflows that wait for the scaler's decision
        self._scaler: Any = None
        self._scaled: dict[int, bool] = {}
        self._scale_before = math.nan
        self._optimizer_ran = False
        self.touched: set[int] = set()  # parameters whose gradient was looked at in this backward
        self.bad_grads: set[int] = set()
        self._state: dict[str, tuple[int, int, tuple[str, ...]]] = {}  # name -> (id, version, kinds)
        self._bad_moments: set[tuple[str, str | None]] = set()  # optimizer state that was bad once
        self._depth = 0
        self._twice = False  # a gradient of this step is differentiated again

    # --- forward ----------------------------------------------------------------------------------

    def outermost(self) -> None:
        """The model is entered from outside: a step may begin, and state may have changed meanwhile."""
        if self.stepped_back:
            self._turn()
        if self.observer.on:
            self._look_at_state(self._parameters(), "parameter")
            self._look_at_state(self._buffers(), "buffer")

    def batch(self, recs: list[Rec], args: Any, kwargs: Any) -> None:
        self.scene.batch(recs, args, kwargs)

    def entered(self, call: Call, recs: list[Rec], module: nn.Module | None, hand: Any) -> None:
        for rec in recs:
            if not rec.bad:
                continue
            self.alert = True
            if rec.origin is None:
                tensor = self.scene.find(rec, hand)
                kinds = _kinds(rec, tensor)
                parent = call.parent
                if parent is None:
                    rec.origin = settle(kinds, self.outside) or self._handed(rec, kinds, tensor, module)
                else:
                    rec.origin = settle(kinds, parent.own) or self._made(
                        parent, rec, kinds, tensor, module, hand, before=call
                    )
            if rec.origin not in call.own:
                call.own.append(rec.origin)

    def left(self, call: Call, recs: list[Rec], outermost: bool, module: nn.Module | None, hand: Any) -> None:
        for rec in recs:
            if not rec.bad:
                continue
            self.alert = True
            if rec.origin is None:
                tensor = self.scene.find(rec, hand)
                kinds = _kinds(rec, tensor)
                rec.origin = settle(kinds, call.own) or self._made(call, rec, kinds, tensor, module, hand)
            above = self.outside if call.parent is None else call.parent.own
            if rec.origin not in above:
                above.append(rec.origin)
        if outermost:
            self._look_at_state(self._buffers(), "buffer", call)
            for rec in recs:
                if rec.origin is not None and (rec.lo != rec.lo or not rec.origin.literal):
                    self._confirm(rec.origin)

    def _handed(self, rec: Rec, kinds: tuple[str, ...], tensor: Any, module: Any) -> Origin:
        """A bad tensor given to the outermost call: a batch, or what code around the model has made."""
        made = tensor is not None and tensor.grad_fn is not None
        origin = Origin("forward" if made else "input", None, kinds, "output" if made else "input")
        origin.literal = "nan" not in kinds
        return self._born(origin, rec, tensor, module, None)

    def _made(
        self,
        call: Call | None,
        rec: Rec,
        kinds: tuple[str, ...],
        tensor: Any,
        module: Any = None,
        hand: Any = None,
        *,
        before: Call | None = None,
    ) -> Origin:
        """Nothing bad had reached this code: it made the value, unless its weights were bad already."""
        if call is not None:
            state = self._bad_state(call)
            if state is not None:
                name, owner, state_kinds, what = state
                origin = Origin("state", call, state_kinds, name, owner=owner)
                origin.facts["what"] = what
                return self._born(origin, rec, tensor, module, hand)
        origin = Origin("forward", call, kinds, "output" if before is None else "input")
        origin.facts["before"] = before
        builtin = before is None and call is not None and call.builtin
        origin.literal = literals.intended(tensor, kinds, builtin, rec.node)
        return self._born(origin, rec, tensor, module, hand)

    def _born(self, origin: Origin, rec: Rec | None, tensor: Any, module: Any, hand: Any) -> Origin:
        origin.rec = rec
        self.origins.append(origin)
        self.scene.take(origin, rec, tensor, module, hand)
        if self._stop_first and not origin.literal:
            self._confirm(origin)
        return origin

    # --- state ------------------------------------------------------------------------------------

    def _parameters(self) -> Iterable[_State]:
        for path, module in self.names.by_path.items():
            prefix = path + "." if path else ""
            for name, p in module._parameters.items():
                if p is not None:
                    yield prefix + name, path, p

    def _buffers(self) -> Iterable[_State]:
        for name, (module, short) in self.names.buffers.items():
            b = module._buffers.get(short)
            if b is not None:
                yield name, name.rpartition(".")[0], b

    def _look_at_state(self, tensors: Iterable[_State], what: str, call: Call | None = None) -> None:
        """Look at the parameters or buffers that were written since the last look."""
        for name, owner, tensor in tensors:
            version = _version(tensor)
            before = self._state.get(name)
            if before is not None and before[0] == id(tensor) and before[1] == version:
                continue
            numbers = probe.payload(tensor)
            if numbers is None:
                continue
            rec = Rec(name, tensor.dtype, None, None)
            self.observer.measure(numbers, rec)
            self._state[name] = (id(tensor), version, before[2] if before else ())

            if rec.bad or before is None or before[2] or self.observer.deferring:
                args = (name, owner, rec, what, before is None, call)
                self.observer.tell(True, self._state_changed, args, None, tensor)

    def _state_changed(
        self, name: str, owner: str, rec: Rec, what: str, at_start: bool, call: Call | None, module: Any, tensor: Any
    ) -> None:
        kinds = _kinds(rec, tensor) if rec.bad else ()
        key, version, before = self._state[name]
        self._state[name] = (key, version, kinds)
        if at_start or not kinds or set(kinds) <= set(before):
            return
        if "nan" in before or (what == "buffer" and "nan" not in kinds and not self.origins):
            return  # an infinity that stands in a buffer on purpose: an observer's range, a best score
        self.alert = True
        if call is not None:  # a buffer that this forward has poisoned
            maker = self.observer.last_call.get(owner) or call
            origin = settle(kinds, self.origins)
            if origin is None:
                origin = self._born(Origin("forward", maker, kinds, name, owner=owner), rec, tensor, None, None)
            self._confirm(origin)
        elif self.stepped_back or self._optimizer_ran:
            origin = Origin("optimizer", None, kinds, name, owner=owner)
            self._confirm(self._born(origin, rec, tensor, None, None))

    def _bad_state(self, call: Call) -> tuple[str, str, tuple[str, ...], str] | None:
        """A parameter (any infinity) or buffer (a NaN) that the call's own code may have read."""
        prefix = call.path + "." if call.path else ""
        for name, (_, _, kinds) in self._state.items():
            if not kinds or not name.startswith(prefix):
                continue
            owner = name.rpartition(".")[0]
            if name in self.names.buffers and "nan" not in kinds:
                continue
            child = self.observer.last_call.get(owner)
            if owner == call.path or child is None or not child.inside(call):
                return name, owner, kinds, "buffer" if name in self.names.buffers else "parameter"
        return None

    # --- backward ---------------------------------------------------------------------------------

    def backward_begins(self, roots: Iterable[Any], create_graph: bool) -> None:
        self._depth += 1
        self._twice = self._twice or create_graph
        if self._depth > 1 or hooks.graph_task() != -1:
            return
        self._first = None
        self.touched.clear()
        self.stepped_back = True
        for root in roots:
            if isinstance(root, torch.Tensor):
                rec = self.observer.look(root, ("loss", ""), None, None, False)
                if rec is not None:
                    scaled = self._scaled.get(id(root), False)
                    self.observer.tell(rec.bad, self._loss, (rec, scaled), None, root)

    def _loss(self, rec: Rec, scaled_from_finite: bool, module: Any, tensor: Any) -> None:
        if not rec.bad:
            return
        self.alert = True
        kinds = _kinds(rec, tensor)
        if scaled_from_finite:
            origin = Origin("backward", None, kinds, "loss")
            origin.facts["scaled"] = True
            self._first = self._born(origin, rec, tensor, None, None)
            return
        if rec.origin is None:
            rec.origin = settle(kinds, self.outside) or self._made(None, rec, kinds, tensor)
        self._confirm(rec.origin)

    def gradient(self, rec: Rec, reading: Rec, module: Any, grad: Any) -> None:
        rec.came_back(reading)
        if not reading.bad:
            return
        self.alert = True
        if self._first is None:
            kinds = _kinds(reading, grad)
            self._first = self._in_backward(blame(rec, kinds), rec, kinds, reading, grad, "grad_input")
        if rec.leaf:
            self._harmful(self._first)

    def parameter(self, name: str, key: int, reading: Rec, module: Any, grad: Any) -> None:
        if not reading.bad:
            self.bad_grads.discard(key)
            return
        self.alert = True
        if self._first is None:
            if key in self.bad_grads:  # still bad from an earlier backward of this step
                return
            call = self._user_of(key, name)
            kinds = _kinds(reading, grad)
            if self._twice and "nan" in kinds and call is not None and call.steady:
                call = None  # of a linear map only the derivative of its own gradient can be undefined
            self._first = self._in_backward(call, None, kinds, reading, grad, f"grad of {name}")
        self.bad_grads.add(key)
        self._harmful(self._first)

    def _user_of(self, key: int, name: str) -> Call | None:
        """The call that used a parameter: it was handed it, or owns it, or holds the module that owns it."""
        takers = self.observer.param_takers.get(key)
        if takers:
            return takers[-1]
        ran = [self.observer.last_call.get(owner) for _, owner in self.names.owners.get(key, [])]
        used = [c for c in ran if c is not None]
        if used:
            return max(used, key=lambda c: c.grad if c.grad is not None else -1.0)
        owner = name.rpartition(".")[0]
        while owner:
            owner = owner.rpartition(".")[0]
            if owner in self.observer.last_call:
                return self.observer.last_call[owner]
        return self.observer.last_call.get("")

    def _in_backward(
        self, call: Call | None, rec: Rec | None, kinds: tuple[str, ...], reading: Rec, grad: Any, tensor: str
    ) -> Origin:
        for origin in self.origins:  # the derivative reads a value that forward had thrown away
            if origin.settled or origin.literal or origin.phase == "backward":
                continue
            if call is not None and origin.call is call:
                return origin
            if origin.rec is not None and call is not None and call in origin.rec.takers:
                return origin
        origin = Origin("backward", call, kinds, tensor)
        return self._born(origin, rec, grad, None, reading)

    def _harmful(self, origin: Origin) -> None:
        """A gradient that somebody will use is bad. A scaler, where there is one, may yet skip the step."""
        if origin.settled or origin in self._pending:
            return
        if self._scaler is not None and origin.phase == "backward" and self._curable(origin):
            self._pending.append(origin)
            return
        self._confirm(origin)

    def _curable(self, origin: Origin) -> bool:
        """True when a smaller loss scale might help: what came in was large enough to overflow on its way through.

        A derivative that is undefined (sqrt at 0) gives an infinity whatever comes in. The step from one to the
        other is a gain: no healthy module turns a gradient of 16 into one beyond 65 504. A parameter's gradient
        sums over the whole batch, so there only the scale itself can tell, once it has fallen to 1.
        """
        if origin.facts.get("scaled") or origin.tensor.startswith("grad of"):
            return True
        incoming = origin.call.grad if origin.call is not None else float(self._scaler.get_scale())
        limit = 65504.0 if torch.float16 in self.observer.dtypes else torch.finfo(torch.float32).max
        return incoming is None or not incoming * _GAIN < limit

    def backward_ends(self, given: tuple[Any, ...], grads: Any) -> None:
        self._depth = max(0, self._depth - 1)
        if self._depth or hooks.graph_task() != -1:
            return
        if isinstance(grads, (tuple, list)):  # torch.autograd.grad: its results pass no parameter hook
            for i, grad in enumerate(grads):
                if isinstance(grad, torch.Tensor) and not isinstance(grad, nn.Parameter):
                    self._result(given[i] if i < len(given) else None, grad)
        self.observer.drain()

    def _result(self, of: Any, grad: torch.Tensor) -> None:
        """A gradient that passed no hook: what torch.autograd.grad gives, or a `.grad` nobody saw being written."""
        numbers = probe.payload(grad)
        if numbers is None:
            return
        reading = Rec("grad", grad.dtype, None, None)
        self.observer.measure(numbers, reading)
        owners = self.names.owners.get(id(of), [])
        self.observer.tell(reading.bad, self._bad_result, (id(of), owners, reading), None, grad)

    def _bad_result(self, key: int, owners: list[tuple[str, str]], reading: Rec, module: Any, grad: Any) -> None:
        if not reading.bad:
            return
        self.alert = True
        if self._first is None:
            name = f"grad of {owners[0][0]}" if owners else "grad_input"
            call = self._user_of(key, owners[0][0]) if owners else None
            self._first = self._in_backward(call, None, _kinds(reading, grad), reading, grad, name)
        self._harmful(self._first)

    # --- optimizer --------------------------------------------------------------------------------

    def concerns(self, optimizer: torch.optim.Optimizer) -> bool:
        """True when the optimizer moves a parameter of the watched model."""
        owners = self.names.owners
        return any(id(p) in owners for group in optimizer.param_groups for p in group["params"])

    def optimizer_begins(self, optimizer: torch.optim.Optimizer) -> None:
        for p, _name in self._moved(optimizer):
            if p.grad is not None and id(p) not in self.touched:  # FSDP1, autograd.grad, hand-written gradients
                self._result(p, p.grad)

    def optimizer_ends(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer_ran = True
        rates = [g.get("lr") for g in optimizer.param_groups]
        for p, name in self._moved(optimizer):
            self._updated(name, None, p, p, rates)
            for key, value in optimizer.state.get(p, {}).items():
                if isinstance(value, torch.Tensor) and value.dim():
                    self._updated(name, key, value, p, rates)

    def _moved(self, optimizer: torch.optim.Optimizer) -> Iterable[tuple[torch.Tensor, str]]:
        for i, group in enumerate(optimizer.param_groups):
            for j, p in enumerate(group["params"]):
                owners = self.names.owners.get(id(p))
                yield p, owners[0][0] if owners else f"param_groups[{i}]['params'][{j}]"

    def _updated(self, name: str, key: str | None, tensor: torch.Tensor, p: torch.Tensor, rates: list[Any]) -> None:
        """Look at a parameter (`key` None), or at a tensor of its optimizer state, after the update."""
        numbers = probe.payload(tensor)
        if numbers is None:
            return
        if key is not None and (name, key) not in self._bad_moments and self.observer.fine(numbers):
            return
        rec = Rec(name, tensor.dtype, None, None)
        self.observer.measure(numbers, rec)
        label = name if key is None else f"optimizer state {key} of {name}"
        before = self._state[label][2] if label in self._state else ()
        if key is None:
            self._state[label] = (id(tensor), _version(tensor), before)
        if rec.bad or before or self.observer.deferring:
            args = (label, name, before, rec, rates, p)
            self._bad_moments.add((name, key))
            self.observer.tell(True, self._update_seen, args, None, tensor)

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
        kinds = _kinds(rec, tensor) if rec.bad else ()
        known = self._state.get(label, (0, -1, ()))
        if kinds or known[2]:
            self._state[label] = (known[0], known[1], kinds)
        if not kinds or set(kinds) <= set(before) or "nan" in before:
            return
        self.alert = True
        if self._pending:
            self._confirm(self._pending[0])
            return
        if any(o.settled and "handled" not in o.facts for o in self.origins):
            return  # the consequence of a fault that was reported
        origin = Origin("optimizer", None, kinds, label, owner=name.rpartition(".")[0])
        origin.facts["rates"] = rates
        origin.facts["parameter"] = p if tensor is not None else None
        self._confirm(self._born(origin, rec, tensor, None, None))

    # --- loss scale -------------------------------------------------------------------------------

    @property
    def scaler(self) -> Any:
        return self._scaler

    def scaler_event(self, scaler: Any, what: str, given: Any, out: Any) -> None:
        if what == "scale" and scaler.is_enabled():
            self._scaler = scaler
            if isinstance(given, torch.Tensor) and isinstance(out, torch.Tensor) and given.device.type == "cpu":
                numbers = probe.payload(given)
                self._scaled = {id(out): numbers is not None and not probe.bad(*probe.limits(numbers))}
        elif what == "update:before" and scaler is self._scaler:
            self.observer.drain()
            if self._pending:
                self._scale_before = float(scaler.get_scale())
        elif what == "update" and scaler is self._scaler:
            self._decide()
            self._scaler = None
            self._turn()

    def _decide(self) -> None:
        pending, self._pending = self._pending, []
        for origin in pending:
            origin.facts["loss_scale"] = self._scale_before
            if self._optimizer_ran or self._scale_before <= 1.0:
                self._confirm(origin)
            else:
                self._clear(origin, "loss_scale")

    # --- the end of a step ------------------------------------------------------------------------

    def end_step(self) -> None:
        """Settle what is left: nothing has confirmed it, so it was absorbed."""
        for origin in self._pending:
            self._clear(origin, "loss_scale")
        for origin in self.origins:
            if not origin.settled:
                self._clear(origin, "absorbed")
        self.alert = self.stepped_back = self._optimizer_ran = False
        self.origins.clear()
        self.outside.clear()
        self._pending.clear()
        self._scaled.clear()
        self.bad_grads.clear()
        self._first = None
        self._depth = 0
        self._twice = False

    def leaving(self) -> None:
        """The watch ends inside a step: look once more at what may have been written since."""
        if self.observer.on and (self.stepped_back or self.origins):
            self._look_at_state(self._parameters(), "parameter")
            self._look_at_state(self._buffers(), "buffer")

    def suspect(self) -> Origin | None:
        """The origin to name when the program itself dies: the first that nobody meant."""
        loose = [o for o in self.origins if not o.settled and not o.literal]
        return loose[0] if loose else None

    def _confirm(self, origin: Origin) -> None:
        if origin.settled:
            return
        origin.settled = True
        self._hit(origin)

    def _clear(self, origin: Origin, why: str) -> None:
        if origin.settled:
            return
        origin.settled = True
        origin.facts["handled"] = why
        self._cleared(origin, why)


def _version(tensor: torch.Tensor) -> int:
    try:
        return tensor._version
    except RuntimeError:  # inference tensors do not count versions
        return -1


def _kinds(rec: Rec, tensor: Any) -> tuple[str, ...]:
    """What is bad in a tensor: a full look where it is in hand, else what its range shows."""
    if tensor is not None:
        found = probe.kinds(tensor)
        if found:
            return found
    if rec.lo != rec.lo:
        return ("nan",)
    return tuple(k for k, there in (("+inf", rec.hi == math.inf), ("-inf", rec.lo == -math.inf)) if there)
