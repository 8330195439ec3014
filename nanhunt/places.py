"""Forward, backward or optimizer; which module, op and line: where a birth is put."""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType
from typing import TYPE_CHECKING

import torch

from . import internals, sites
from .nodes import Nodes
from .owners import Owners
from .runs import Operand, Place, Run

if TYPE_CHECKING:
    from .verdict import Call


def _holds(outer: CodeType, inner: CodeType) -> bool:
    """Whether a function is written inside another."""
    nested = [one for one in outer.co_consts if isinstance(one, CodeType)]
    return any(one is inner or _holds(one, inner) for one in nested)


class Places:
    """Asked only when something is bad, so that it may look at the whole stack."""

    def __init__(self, nodes: Nodes, owners: Owners, current_call: Callable[[], Call | None]) -> None:
        self._nodes, self._owners, self._current_call = nodes, owners, current_call
        self.after_backward = False  # until a module is called, or the step ends

    def note(self, run: Run) -> None:
        """An op is about to run."""
        if run.task != -1:
            self.after_backward = True
        elif self.after_backward and self._current_call() is not None:
            self.after_backward = False

    def of(self, run: Run, operands: list[Operand]) -> Place:
        if run.task == -1:
            return self._forward(run, operands)
        inside = sites.inside_backward()
        if inside.again:
            return Place("forward", run.schema.name, self._nodes.call_again(), inside.site)
        node = internals.running_node()
        if node is not None and internals.number_of(node) >= internals.ACCUMULATE and inside.site is None:
            return self._accumulated(getattr(node, "variable", None))
        made = self._nodes.forward_of(node)
        call = made.call if made is not None else None
        writer = self._writer(inside.hook, call)
        place = Place("backward", run.schema.name, writer or call, inside.site)
        hook = inside.hook
        if hook is not None and writer is None:  # a hook on what a module was given stands on no call of its own
            only = self._owners.only_one_with(lambda forward: _holds(forward, hook))
            if only is not None:
                place.call, (place.module, place.module_type) = None, only
        place.user_code = inside.site is not None
        if place.site is None:
            place.site = sites.backward_site()
            if made is not None:
                place.op, place.base, place.site = made.op, made.base, made.site
        return place

    def _writer(self, hook: CodeType | None, call: Call | None) -> Call | None:
        """The module in whose forward a hook was written: that may have been put on what a child gave back."""
        while hook is not None and call is not None:
            forward = self._owners.forward_of(call.path)
            if forward is not None and _holds(forward, hook):
                return call
            call = call.parent
        return None

    def _forward(self, run: Run, operands: list[Operand]) -> Place:
        call = self._current_call()
        place = Place("forward", run.schema.name, call, sites.user_site())
        if call is None:
            updating, place.optimizer = sites.optimizer_running()
            if updating and torch.is_grad_enabled():  # a closure's loss, unless it is an update without no_grad
                updating = any(self._owners.of(o.live) is not None for o in operands)
            if updating or (self.after_backward and self._updates(operands)):
                place.phase = "optimizer"
        return place

    def _updates(self, operands: list[Operand]) -> bool:
        return not torch.is_grad_enabled() or any(self._owners.is_gradient(o.live) for o in operands)

    def _accumulated(self, parameter: torch.Tensor | None) -> Place:
        place = Place("backward", "AccumulateGrad", None, sites.backward_site())
        owner = self._owners.of(parameter)
        if owner is not None:
            place.tensor = f"grad of {owner.name}"
            place.module, place.module_type = owner.module, owner.module_type
        return place
