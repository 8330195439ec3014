"""What each module's own code loses: it reads the right numbers, and rounding alone is measured beside it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch

from .. import hooks, internals, probe
from .alike import Measured, floor, form, lower, measured, rounded
from .boundaries import Boundaries, Key, Tensors
from .figures import Own
from .passes import Enough, First, Label, Pass
from .references import Kept

Tensor = torch.Tensor
# Sums of halves are accumulated in float32. Those of wider formats in the format itself, so that their error grows
# with the number of summands: as its root, however they are ordered.
_SUMMED_IN_ITSELF = form("float32").eps
_OF_ITSELF = 64  # times the least error of a format: more does not come from rounding in that format
_FEW = 16  # numbers: the mean error of fewer scatters, and more of it is put down to chance


class Alone(Pass):
    """The run with setting `b` in which every module reads the first run's numbers: each makes its own error alone.

    What a call is handed, and what its children give back, is overwritten with what it was in the first run, after
    it was measured. So an error shows once, at the first boundary behind the code that made it: in an output of
    that module, or in what it hands to a child. No gradient is looked at, so the graph may be spoilt.
    """

    def __init__(self, first: First, lower: Callable[[], str | None]) -> None:
        super().__init__()
        self._first, self._lower = first, lower
        self.errors: dict[Label, tuple[Key, Measured]] = {}  # with the call whose code made it, in order
        self.allowed: str | None = None  # format that autocast or TF32 lets a matrix product be computed in
        self.products: set[str] = set()  # paths of the modules whose own code has one in that format
        self.lengths: dict[str, int] = {}  # numbers that a module's own code adds up at most
        self.weights: dict[str, torch.dtype] = {}
        self._lasting: set[int] = set()  # storages of parameters and buffers, which are not to be written
        self._open = self._ended = 0  # calls; outermost calls

    def begin(self, boundaries: Boundaries, attachment: hooks.Attachment) -> None:
        super().begin(boundaries, attachment)
        for name, _, p in boundaries.names.parameters():
            self.weights[name] = p.dtype
        for tensor in (*(p for _, _, p in boundaries.names.parameters()), *boundaries.names.model.buffers()):
            if tensor.layout is torch.strided and not torch.nn.parameter.is_lazy(tensor):
                self._lasting.add(tensor.untyped_storage().data_ptr())

    def on_sum(self, dtype: torch.dtype, length: int, product: bool) -> None:
        """So many numbers were added up in this dtype; `product`: by an op that autocast and TF32 make cheaper."""
        if self.boundaries is None or internals.graph_task() != -1:
            return
        key = self.boundaries.current()
        if key is None:
            return
        self.lengths[key[0]] = max(length, self.lengths.get(key[0], 1))
        if product and self.allowed is not None and self.allowed in ("tf32", str(dtype).removeprefix("torch.")):
            self.products.add(key[0])

    def on_backward_begin(self, roots: tuple[Any, ...], create_graph: bool) -> None:
        if self._open == 0 and self._ended >= len(self._first.outermost):
            raise Enough

    def entered(self, key: Key, parent: Key | None, tensors: Tensors) -> None:
        self._open += 1
        if parent is None:
            self.allowed = self._lower()
        known = self._first.kept.get(key, {})
        for name, tensor in tensors:
            if parent is not None and name in known and known[name].whole:
                self._measure((key, name), parent, known[name], tensor, key[0])
                self._put(self._instead((key, name), known[name], tensor, key[0]), tensor)

    def left(self, key: Key, parent: Key | None, tensors: Tensors) -> None:
        self._open -= 1
        self._ended += parent is None
        known = self._first.kept.get(key, {})
        for name, tensor in tensors:
            if name in known and known[name].whole:
                self._measure((key, name), key, known[name], tensor, key[0])
                self._put(self._instead((key, name), known[name], tensor, key[0]), tensor)

    def _measure(self, label: Label, owner: Key, kept: Kept, tensor: Tensor, path: str) -> None:
        pair = kept.beside(tensor)
        if pair is not None:
            self.errors[label] = owner, measured(*pair)

    def _instead(self, label: Label, kept: Kept, tensor: Tensor, path: str) -> Tensor:
        return kept.number

    def _put(self, number: Tensor, tensor: Tensor) -> None:
        """Write the first run's numbers into a tensor, but for what its dtype cannot hold."""
        if tensor.dtype not in probe.DIRECT or tensor.shape != number.shape or not _writable(tensor):
            return
        if tensor.untyped_storage().data_ptr() in self._lasting:
            return
        number = number.to(tensor.device)
        fit, now = number.to(tensor.dtype), tensor.data
        # A mask's constant stays what it is in this dtype; what overflowed goes on as the largest number there is.
        now = torch.where(number.isfinite(), now.nan_to_num(0.0), now)
        fit = torch.where(number.isfinite() & fit.isfinite(), fit, now)
        with torch.inference_mode(tensor.is_inference()):
            tensor.data.copy_(fit)


class Yardstick(Alone):
    """The run with setting `a` in which every module reads the first run's numbers rounded once: what that makes.

    Each boundary rounds to the format that it had in the second run, but to none that the setting does not allow:
    a module that goes lower in secret is not excused. `carry`: boundaries round what there is, and only the outermost
    are measured, for a second run that nobody could look into.
    """

    def __init__(self, first: First, alone: Alone, limit: Any, *, carry: bool = False) -> None:
        super().__init__(first, lambda: None)
        self._alone, self._limit, self._carry = alone, limit, carry
        self._noise = torch.Generator().manual_seed(0)

    def begin(self, boundaries: Boundaries, attachment: hooks.Attachment) -> None:
        super().begin(boundaries, attachment)
        done: set[int] = set()
        with torch.no_grad():
            for name, owner, p in boundaries.names.parameters():
                if id(p) not in done and p.dtype in probe.DIRECT and _writable(p):
                    done.add(id(p))
                    p.data = rounded(p.data, self._format(self._alone.weights.get(name, p.dtype), owner), self._noise)

    def _format(self, dtype: Any, *paths: str) -> str:
        """The format that a boundary rounds to, given the dtype it had and the modules that stand at it."""
        name = str(dtype).removeprefix("torch.")
        limit = lower(self._limit, self._alone.allowed or self._limit)
        if form(name).eps > limit.eps:
            name = limit.name
        if self._alone.allowed is not None and any(path in self._alone.products for path in paths):
            name = lower(name, self._alone.allowed).name
        return name

    def _at(self, label: Label, tensor: Tensor, *paths: str) -> str:
        known = self._alone.errors.get(label)
        return self._format(tensor.dtype if known is None else known[1].dtype, *paths)

    def _measure(self, label: Label, owner: Key, kept: Kept, tensor: Tensor, path: str) -> None:
        if self._carry and label[0] not in self._first.outermost:
            return
        to = self._at(label, tensor, path, owner[0])
        pair = kept.beside(tensor)
        if pair is not None:
            told = measured(pair[0], rounded(pair[1], to, self._noise))
            least = lower(to, pair[0].dtype)
            smallest = floor(told.size, least)
            off = max(told.error, smallest)
            if least.eps <= _SUMMED_IN_ITSELF:  # of an error that comes from halves, the float32 part alone grows
                summed = min(off, _OF_ITSELF * smallest) * math.sqrt(self._alone.lengths.get(owner[0], 1))
                off = max(off, summed)
            off *= 1 + _FEW / max(told.count, 1)
            self.errors[label] = owner, dataclasses.replace(told, error=off)

    def left(self, key: Key, parent: Key | None, tensors: Tensors) -> None:
        if not self._carry or parent is None:
            super().left(key, parent, tensors)
            return
        self._open -= 1
        for name, tensor in tensors:
            if tensor.dtype in probe.DIRECT:
                self._put(rounded(tensor.detach(), self._at((key, name), tensor, key[0]), self._noise), tensor)

    def _instead(self, label: Label, kept: Kept, tensor: Tensor, path: str) -> Tensor:
        number = kept.number
        return rounded(number, self._at(label, tensor, path), self._noise) if number.dtype in probe.DIRECT else number


def own_errors(alone: Alone, yardstick: Alone) -> list[tuple[Key, Own]]:
    """The error of each call's own code at each boundary, in the order in which it was made."""
    found: list[tuple[Key, Own]] = []
    for label, (owner, was) in alone.errors.items():
        known = yardstick.errors.get(label)
        explained = floor(was.size, lower(was.dtype)) if known is None else known[1].error
        size = was.size or 1.0
        said = label[1] if label[0] == owner else f"{label[1]} of {label[0][0]}"
        found.append((owner, Own(tensor=said, error=was.error / size, explained=explained / size, made=was.made)))
    return found


def _writable(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not any(n > 1 and s == 0 for n, s in zip(tensor.shape, tensor.stride()))
