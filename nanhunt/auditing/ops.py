"""One op as the rules see it: where it runs, in which phase, with which constants; and marks on what it made."""

from __future__ import annotations

import math
from typing import Any, Generic, TypeVar

import torch

from .. import sites
from ..internals import Storage
from ..remarks import OUTSIDE, Line
from ..runs import Run
from ..verdict import Call

Tensor = torch.Tensor

FORWARD, BACKWARD, UPDATE = "forward", "backward", "update"

# Matrix products: what autocast computes in half, and what a model mostly does.
PRODUCTS = frozenset("mm bmm addmm baddbmm addbmm addmv mv dot convolution linear".split())

_MOST = 8192  # tensors that bear a mark
_PLAIN = (Tensor, torch.nn.Parameter)


class Op:
    """One op, from before it runs to after."""

    __slots__ = ("_site", "_sited", "base", "call", "depth", "graph", "out", "outs", "phase", "run")

    def __init__(self, run: Run, call: Call | None, phase: str, *, depth: int, graph: bool) -> None:
        self.run, self.call, self.phase = run, call, phase
        self.depth = depth  # how many autocast regions are open, such as one inside another that switches it off
        self.graph = graph  # whether the program records a graph for backward
        self.base = run.schema.base
        self.out: Any = None
        self.outs: list[Tensor] = []
        self._site: sites.Site | None = None
        self._sited = False

    @property
    def place(self) -> str:
        return self.call.path if self.call is not None else OUTSIDE

    @property
    def site(self) -> sites.Site | None:
        """The line of the user's code that runs it."""
        if not self._sited:
            self._site, self._sited = sites.user_site(), True
        return self._site

    @property
    def at(self) -> Line:
        """The same as a remark has it."""
        return sites.text(self.site)

    @property
    def floats(self) -> list[Tensor]:
        """The floating tensors among the arguments."""
        return [t for t in self.run.tensors if t.is_floating_point()]

    def constants(self) -> list[float]:
        """The finite numbers among the arguments, written as such or as a tensor that holds one."""
        found = []
        for _, value in self.run.arguments():
            if type(value) in (float, int) or (isinstance(value, Tensor) and is_number(value)):
                found.append(float(value))
        return [value for value in found if math.isfinite(value)]


def is_number(t: Tensor) -> bool:
    """A number that was made a tensor: one element without dimensions, on the host, that nothing is learned about."""
    return t.dim() == 0 and t.is_floating_point() and t.device.type == "cpu" and not t.requires_grad


Mark = TypeVar("Mark")


class Marks(Generic[Mark]):
    """A mark on the memory of some tensors, so that views of them bear it too. Keeps no tensor alive."""

    def __init__(self) -> None:
        self._of: dict[int, tuple[Storage, Mark]] = {}

    def put(self, t: Tensor, mark: Mark) -> None:
        if not _plain(t):
            return
        storage = Storage(t.untyped_storage())
        self._of.pop(storage.key, None)
        self._of[storage.key] = storage, mark
        if len(self._of) > _MOST:
            del self._of[next(iter(self._of))]

    def of(self, t: Any) -> Mark | None:
        if not self._of or not isinstance(t, Tensor) or not _plain(t):
            return None
        found = self._of.get(t.untyped_storage()._cdata)
        return found[1] if found is not None else None

    def clear(self, t: Tensor) -> None:
        if self._of and _plain(t):
            self._of.pop(t.untyped_storage()._cdata, None)


def _plain(t: Tensor) -> bool:
    return type(t) in _PLAIN and t.layout is torch.strided and not t.is_nested
