"""What is a fault: from readings to origins, and from origins to hits, or to what was no fault after all."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from . import internals, literals, probe
from .naming import Names
from .scaling import Scaling
from .state import State
from .verdict import KINDS, Call, Origin, Rec, blame, settle

if TYPE_CHECKING:
    from .observer import Observer
    from .oplevel import OpLevel
    from .scene import Scene


_KEPT = 100  # origins that are kept where no step ends


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
        self.ops: OpLevel | None = None
        self.state, self.scaling = State(names, self), Scaling(self)
        self.alert = False
        self.stepped_back = False  # a backward has run in this step
        self.fresh = False  # the step before was not watched
        self.turns = 0  # steps that have ended
        self.has_optimizer = False  # one that moves this model is known
        self.origins: list[Origin] = []
        self.outside: list[Origin] = []  # origins that have left the model in this step
        self._hit, self._cleared, self.turn, self._stop_first = hit, cleared, turn, stop_first
        self._first: Origin | None = None  # of the backward that runs
        self.touched: set[int] = set()  # parameters whose gradient was looked at in this backward
        self.bad_grads: set[int] = set()
        self._compiled: list[tuple[Call, str, int, Rec, Any]] = []  # bad gradients that a compiled backward gave back
        self._broken: list[Origin] = []  # what had reached the calls that an exception has ended
        self._depth = 0
        self._loss_inside = False  # the backward that runs begins at an output of the model
        self._reported = False  # a fault of this step, by an earlier call of the model
        self._twice = False  # a gradient of this step is differentiated again

    # --- forward ----------------------------------------------------------------------------------

    def outermost(self) -> None:
        """The model is entered from outside: a step may begin, and state may have changed meanwhile."""
        if self.observer.on and (self.observer.backward or not self.state.looked):
            # What an update written by hand has done belongs to the step that is over.
            self.state.look(fresh=self.fresh)
            self.fresh = False
        self._broken.clear()
        if not self.stepped_back:  # a call that no backward follows is judged on its own
            self._reported = self.faulted()
            self.origins = [o for o in self.origins if not o.settled or o.allowed][-_KEPT:]
            self.outside = [o for o in self.outside if not o.settled or o.allowed][-_KEPT:]
        if self.stepped_back and not self.has_optimizer:  # with one, the step ends when it has moved the weights
            self.turn()
        if self.observer.on and self.fresh:
            self.state.look(fresh=True)
            self.fresh = False

    def batch(self, recs: list[Rec], args: Any, kwargs: Any) -> None:
        self.scene.batch(recs, args, kwargs)

    def entered(self, call: Call, recs: list[Rec], module: nn.Module | None, hand: Any) -> None:
        for rec in self._bad_ones(recs):
            if rec.origin is None:
                tensor = self.scene.find(rec, hand)
                kinds = self.kinds(rec, tensor)
                parent = call.parent
                if parent is None:
                    rec.origin = settle(kinds, self.outside) or self._handed(rec, kinds, tensor, module)
                else:
                    rec.origin = settle(kinds, parent.own) or self._made(
                        parent, rec, kinds, tensor, module, hand, before=call
                    )
            call.reached(rec.origin)

    def left(self, call: Call, recs: list[Rec], outermost: bool, module: nn.Module | None, hand: Any) -> None:
        for rec in self._bad_ones(recs):
            if rec.origin is None:
                tensor = self.scene.find(rec, hand)
                kinds = self.kinds(rec, tensor)
                rec.origin = settle(kinds, call.own) or self._made(call, rec, kinds, tensor, module, hand)
            if call.parent is not None:
                call.parent.reached(rec.origin)
            elif rec.origin not in self.outside:
                self.outside.append(rec.origin)
        if outermost:
            self.state.look_at_buffers(call)
            for rec in recs:
                if rec.bad and rec.origin is not None:
                    tensor = self.scene.find(rec, hand)
                    self._explain(rec.origin, tensor)
                    if rec.lo != rec.lo or not rec.origin.literal:
                        self.confirm(rec.origin, tensor)

    def _bad_ones(self, recs: list[Rec]) -> Iterator[Rec]:
        for rec in recs:
            if rec.bad:
                self.alert = True
                yield rec

    def _handed(self, rec: Rec, kinds: tuple[str, ...], tensor: Any, module: Any) -> Origin:
        """A bad tensor given to the outermost call: a batch, or what code around the model has made."""
        made = tensor is not None and tensor.grad_fn is not None
        origin = Origin("forward" if made else "input", None, kinds, "output" if made else "input")
        origin.literal = "nan" not in kinds
        return self.born(origin, rec, tensor, module, None)

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
            if not self.observer.backward:  # nobody has looked at the weights since
                self.state.look()
            state = self.state.bad_before(call, kinds)
            if state is not None:
                return self._bad_state(call, state, rec, tensor, module, hand)
        origin = Origin("forward", call, kinds, "output" if before is None else "input")
        origin.facts["before"] = before
        builtin = before is None and call is not None and call.builtin
        origin.literal = literals.intended(tensor, kinds, builtin, rec.node) or (
            call is not None and before is None and "nan" not in kinds and self.state.meant(call)
        )
        return self.born(origin, rec, tensor, module, hand)

    def _bad_state(
        self,
        call: Call | None,
        state: tuple[str, str, tuple[str, ...], str],
        rec: Rec | None,
        tensor: Any,
        module: Any = None,
        hand: Any = None,
    ) -> Origin:
        name, owner, kinds, what = state
        origin = Origin("state", call, kinds, name, owner=owner)
        origin.facts["what"] = what
        return self.born(origin, rec, tensor, module, hand)

    def _suspect(self, call: Call) -> bool:
        """True for a call that something bad had reached in forward, or that reads bad weights."""
        judged = self.observer.calls.first_run(call) or call
        return any(not o.literal for o in judged.own) or self.state.bad_before(judged) is not None

    def born(self, origin: Origin, rec: Rec | None, tensor: Any, module: Any, hand: Any) -> Origin:
        """Take the numbers of a new origin while its tensors are in hand."""
        self.alert = True
        origin.rec = rec
        self.observer.collectives.note(origin, tensor, self.origins)
        self.origins.append(origin)
        self.scene.take(origin, rec, tensor, module, hand)
        if self._stop_first and not origin.literal:
            self._explain(origin, tensor)
            if not origin.literal:
                self.confirm(origin, tensor)
        return origin

    # --- backward ---------------------------------------------------------------------------------

    def backward_begins(self, roots: Iterable[Any], create_graph: bool) -> None:
        self._depth += 1
        self._twice = self._twice or create_graph
        if self._depth > 1 or internals.graph_task() != -1:
            return
        self.observer.regions.collect()
        if not self.observer.calls.ran:
            return  # another model's
        self._first = None
        self._compiled.clear()
        self.touched.clear()
        self.stepped_back = True
        if not self.observer.on:
            return
        self.observer.arrivals.backward_begins()
        for root in roots:
            if isinstance(root, torch.Tensor):
                rec = self.observer.look(root, ("loss", ""), None, None, False)
                if rec is not None:
                    self._loss_inside = rec.exits
                    self.observer.collectives.given = rec if rec.exits and root.numel() > 1 else None
                    scaled = self.scaling.made_it(root)
                    self.observer.tell(rec.bad, self._loss, (rec, scaled), None, root)

    def _loss(self, rec: Rec, scaled_from_finite: bool, module: Any, tensor: Any) -> None:
        if not rec.bad:
            return
        self.alert = True
        kinds = self.kinds(rec, tensor)
        if scaled_from_finite:
            origin = Origin("backward", None, kinds, "loss")
            origin.facts["scaled"] = True
            self._first = self.born(origin, rec, tensor, None, None)
            return
        if rec.origin is None:
            rec.origin = settle(kinds, self.outside) or self._made(None, rec, kinds, tensor)
        self.confirm(rec.origin, tensor)

    def gradient(self, rec: Rec, reading: Rec, module: Any, grad: Any) -> None:
        rec.came_back(reading.absmax, reading.numel)
        if not reading.bad:
            return
        self.alert = True
        self._settle_compiled()
        if self._first is None:
            kinds = self.kinds(reading, grad)
            self._first = self._in_backward(
                blame(rec, kinds, self._suspect, loss_inside=self._loss_inside), rec, kinds, reading, grad, "grad_input"
            )
        if rec.leaf:
            self._harmful(self._first, grad)

    def parameter(self, name: str, key: int, reading: Rec, module: Any, grad: Any) -> None:
        if not reading.bad:
            self.bad_grads.discard(key)
            return
        self.alert = True
        if self._first is None:
            if key in self.bad_grads:  # still bad from an earlier backward of this step
                return
            call = self.user_of(key, name)
            if call is not None and call.traced:
                self._compiled.append((call, name, key, reading, grad))
                return
            kinds = self.kinds(reading, grad)
            if self._twice and "nan" in kinds and call is not None and call.steady:
                call = None  # of a linear map only the derivative of its own gradient can be undefined
            self._first = self._in_backward(call, None, kinds, reading, grad, f"grad of {name}")
        self.bad_grads.add(key)
        self._harmful(self._first, grad)

    def _settle_compiled(self) -> None:
        """Judge the gradients of parameters inside compiled graphs, which come all at once when a graph has run.

        Of the calls with a bad one, the call that ran last in forward is the first in backward.
        """
        found, self._compiled = sorted(self._compiled, key=lambda one: -one[0].traced), []
        for call, name, key, reading, grad in found:
            if self._first is None:
                same = [self.kinds(other[3], other[4]) for other in found if other[0] is call]
                kinds = tuple(kind for kind in KINDS if any(kind in one for one in same))
                culprit = self._fed_by(call, kinds)
                self._first = self._in_backward(culprit, None, kinds, reading, grad, f"grad of {name}")
            self.bad_grads.add(key)
            self._harmful(self._first, grad)

    def _fed_by(self, call: Call, kinds: tuple[str, ...]) -> Call | None:
        """The call whose backward made what the parameters of `call` show.

        A linear map makes no NaN of finite gradients: then the calls that took its output come first in backward.
        """
        culprit: Call | None = call
        passed: list[Call] = []
        while culprit is not None and culprit.steady and "nan" in kinds and culprit not in passed:
            passed.append(culprit)
            gave = self.observer.regions.gave.get(culprit)
            if not gave:
                return call
            culprit = blame(gave[0], kinds, self._suspect, loss_inside=self._loss_inside)
        return call if culprit in passed else culprit

    def user_of(self, key: int, name: str) -> Call | None:
        """The call that used a parameter: it was handed it, or owns it, or holds the module that owns it."""
        takers = self.observer.param_takers.get(key)
        if takers:
            return takers[-1]
        ran = [self.observer.calls.last.get(owner) for _, owner in self.names.owners.get(key, [])]
        used = [c for c in ran if c is not None]
        if used:  # a module of torch.nn reads what it owns; a container may only have handed it to a child
            return max(used, key=lambda c: (c.builtin, c.grad if c.grad is not None else -1.0))
        owner = name.rpartition(".")[0]
        while owner:
            if owner in self.observer.calls.last:
                return self.observer.calls.last[owner]
            owner = owner.rpartition(".")[0]
        return self.observer.calls.last.get("")

    def _in_backward(
        self, call: Call | None, rec: Rec | None, kinds: tuple[str, ...], reading: Rec, grad: Any, tensor: str
    ) -> Origin:
        # The derivative may read a value that forward had thrown away: then that one is the first.
        judged = self.observer.calls.first_run(call)
        near: Sequence[Origin] = judged.own if judged is not None else self.outside
        for known in (*near, *self.origins):
            if (known.settled and not known.allowed) or known.literal or known.phase == "backward":
                continue
            if judged is None or known in judged.own or known.call is judged:
                return known
        state = self.state.bad_before(judged) if judged is not None else None
        if state is not None:
            return self._bad_state(judged, state, rec, grad)
        origin = Origin("backward", call, kinds, tensor)
        return self.born(origin, rec, grad, None, reading)

    def _harmful(self, origin: Origin, tensor: Any) -> None:
        """A gradient that somebody will use is bad. A scaler, where there is one, may yet skip the step."""
        self._explain(origin, tensor)
        if not origin.settled and not self.scaling.holds(origin):
            self.confirm(origin, tensor)

    def read_by_host(self, tensor: torch.Tensor, phase: str, kinds: tuple[str, ...], fields: dict[str, Any]) -> None:
        """The program looks at a bad number, and may go another way because of it."""
        origin = Origin(phase, None, kinds, str(fields.get("tensor")))
        origin.facts["op_level"] = fields
        self._harmful(self.born(origin, None, None, None, None), tensor)

    def backward_ends(self, given: tuple[Any, ...], grads: Any) -> None:
        self._depth = max(0, self._depth - 1)
        if self._depth or internals.graph_task() != -1 or not self.observer.on:
            return
        self.observer.arrivals.settle()
        # What torch.autograd.grad gives passes no parameter hook.
        if isinstance(grads, (tuple, list)) and self.observer.backward:
            for i, grad in enumerate(grads):
                if isinstance(grad, torch.Tensor) and not isinstance(grad, nn.Parameter):
                    self.result(given[i] if i < len(given) else None, grad)
        self.observer.drain()
        self._settle_compiled()

    def result(self, of: Any, grad: torch.Tensor) -> None:
        """A gradient that passed no hook: what torch.autograd.grad gives, or a `.grad` nobody saw being written."""
        reading = self.observer.reading(grad)
        if reading is None:
            return
        owners = self.names.owners.get(id(of), [])
        self.observer.tell(reading.bad, self._bad_result, (id(of), owners, reading), None, grad)

    def _bad_result(self, key: int, owners: list[tuple[str, str]], reading: Rec, module: Any, grad: Any) -> None:
        if not reading.bad:
            return
        self.alert = True
        if self._first is None:
            name = f"grad of {owners[0][0]}" if owners else "grad_input"
            call = self.user_of(key, owners[0][0]) if owners else None
            if call is not None and call.traced:
                self._compiled.append((call, owners[0][0], key, reading, grad))
                return
            self._first = self._in_backward(call, None, self.kinds(reading, grad), reading, grad, name)
        self._harmful(self._first, grad)

    # --- the end of a step ------------------------------------------------------------------------

    def end_step(self) -> None:
        """Settle what is left: nothing has confirmed it, so it was absorbed."""
        if self.observer.on and self.observer.calls.ran:
            self.state.standing()
        self.scaling.end_step()
        for origin in self.origins:
            if not origin.settled:
                self.clear(origin, "absorbed")
        self.turns += 1
        self.alert = self.stepped_back = self.state.optimizer_ran = False
        self.origins.clear()
        self.outside.clear()
        self.bad_grads.clear()
        self._first = None
        self._depth = 0
        self._twice = self._reported = False

    def leaving(self) -> None:
        """The watch ends inside a step: look once more at what may have been written since."""
        if self.observer.on and self.observer.backward and (self.stepped_back or self.origins):
            self.state.look(last=self.stepped_back)

    def returned(self, rec: Rec, module: Any, tensor: Any) -> None:
        """A tensor that the step gives back to its caller."""
        if not rec.bad:
            return
        kinds = self.kinds(rec, tensor)
        if rec.origin is None:
            rec.origin = settle(kinds, self.outside) or self._made(None, rec, kinds, tensor)
        if "nan" in kinds or not rec.origin.literal:
            self.confirm(rec.origin, tensor)

    def faulted(self) -> bool:
        """True when a fault of this step has been reported."""
        return self._reported or any(o.settled and "handled" not in o.facts for o in self.origins)

    def broken(self, call: Call) -> None:
        """An exception has ended a call: what had reached its code may be why."""
        self._broken += [o for o in call.own if o not in self._broken]

    def suspect(self) -> Origin | None:
        """The origin to name when the program dies: one that had reached the code which died."""
        loose = [o for o in self._broken + self.outside if not o.settled and not o.literal]
        return loose[0] if loose else None

    def _explain(self, origin: Origin, tensor: Any) -> None:
        """Ask the op level, where there is one, for the birth behind the bad tensor that was noticed."""
        if self.ops is None or not isinstance(tensor, torch.Tensor) or "op_level" in origin.facts:
            return
        fields = self.ops.fields(tensor)
        if fields is not None:
            origin.facts["op_level"] = fields
            origin.literal = fields["literal"]

    def confirm(self, origin: Origin, tensor: Any = None) -> None:
        """Report a fault, once."""
        if origin.settled:
            return
        # It follows from the fault of this step that was reported.
        if origin.phase in ("backward", "optimizer") and self.faulted():
            origin.settled = True
            origin.facts["handled"] = "follows"
            return
        self._explain(origin, tensor)
        origin.settled = True
        self._hit(origin)

    def clear(self, origin: Origin, why: str) -> None:
        if origin.settled:
            return
        origin.settled = True
        origin.facts["handled"] = why
        self._cleared(origin, why)

    @staticmethod
    def kinds(rec: Rec, tensor: Any) -> tuple[str, ...]:
        """What is bad in a tensor: a full look where it is in hand, else what its range shows."""
        if tensor is not None:
            found = probe.kinds(tensor)
            if found:
                return found
        if rec.lo != rec.lo:
            return ("nan",)
        return tuple(k for k, there in (("+inf", rec.hi == math.inf), ("-inf", rec.lo == -math.inf)) if there)
