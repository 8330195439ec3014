"""From an autograd node back to the forward op that made it, without anomaly mode."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from . import internals, sites
from .runs import Run, wrapped
from .sites import Site

if TYPE_CHECKING:
    from .verdict import Call

_MOST = 200_000
_BACK = 50  # numbers to search downwards: some nodes are numbered after their op


class Made(NamedTuple):
    """A forward op that made a node: what a fault in that node's backward is called."""

    op: str
    base: str
    call: Call | None
    site: Site | None


class Nodes:
    """Forward ops by the number of the node they made. Numbers are counted per thread."""

    def __init__(self, current_call: Callable[[], Call | None]) -> None:
        self._current_call = current_call
        self._of: dict[int, dict[int, Made]] = {}
        self._task = -1
        self.scale: float | None = None  # the constant that the running backward began with

    def note(self, run: Run) -> None:
        """An op is about to run: remember it under the newest node. Ops that make none share the previous number."""
        if run.task != -1 and run.task != self._task:
            self._task = run.task
            self._guess_scale(run)
        if not any(t.requires_grad for t in run.tensors):
            return
        number = internals.newest_node()
        table = self._of.setdefault(threading.get_ident(), {})
        if number >= 0 and number not in table:
            if run.task != -1 and not torch.is_grad_enabled() and not sites.inside_backward().again:
                return  # a derivative; but a recomputation runs the forward of the user's own function without grad
            table[number] = self._made(run)
            if len(table) > _MOST:
                del table[next(iter(table))]

    def _made(self, run: Run) -> Made:
        if run.task != -1:
            inside = sites.inside_backward()
            if not inside.again:  # a backward that will be differentiated: all of it belongs to the first forward op
                first = self.forward_of(internals.running_node())
                return first or Made(run.schema.name, run.schema.base, None, inside.site)
            return Made(run.schema.name, run.schema.base, self.call_again(), inside.site)
        return Made(run.schema.name, run.schema.base, self._current_call(), sites.user_site())

    def call_again(self) -> Call | None:
        """The module whose forward runs once more: where a checkpoint holds a mere function, that of the first time."""
        call = self._current_call()
        if call is None:
            made = self.forward_of(internals.running_node())
            call = made.call if made is not None else None
        return call

    def forward_of(self, node: Any) -> Made | None:
        """The forward op whose derivative `node` is."""
        if node is None:
            return None
        number, name = internals.number_of(node), node.name()
        if number < 0 or number >= internals.ACCUMULATE:
            return None
        if name == "CopySlices":  # numbered after the op whose result it copies
            number -= 1
        plain = name.lower().replace("_", "")
        own = self._of.get(threading.get_ident())
        tables = ([own] if own is not None else []) + [t for t in self._of.values() if t is not own]
        best: Made | None = None
        for table in tables:
            made = next((table[n] for n in range(number, number - _BACK, -1) if n in table), None)
            if made is not None:
                # Among several threads, the one whose name fits.
                if len(tables) == 1 or plain.startswith(made.base.replace("_", "")[:6]):
                    return made
                best = best or made
        return best

    def _guess_scale(self, run: Run) -> None:
        """A backward that begins with a product by a power of two: most likely a loss scale."""
        self.scale = None
        node = internals.running_node()
        if run.schema.base != "mul" or node is None or not node.name().startswith("MulBackward"):
            return
        for value in run.args[1:2]:
            if isinstance(value, torch.Tensor) and (
                wrapped(value) or (value.dim() == 0 and value.device.type == "cpu")
            ):
                value = float(value)
            if isinstance(value, float) and value >= 16 and math.frexp(value)[0] == 0.5:
                self.scale = value
