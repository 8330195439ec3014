"""One op as it runs: its arguments as they were, its results, and where in the user's terms it stands."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from . import probe
from .schemas import Schema
from .sites import Site

if TYPE_CHECKING:
    from .verdict import Call

Tensor = torch.Tensor

_SAVED = 1 << 26  # elements that one op which writes to its operands may have copied first


class Run:
    """One op, from before it runs to after."""

    __slots__ = ("_saved", "args", "func", "kwargs", "schema", "task", "tensors")

    def __init__(self, func: Any, schema: Schema, args: Any, kwargs: Any, task: int) -> None:
        self.func, self.schema, self.args, self.kwargs, self.task = func, schema, args, kwargs, task
        self.tensors = tensors((*args, *kwargs.values()))
        self._saved: dict[int, Tensor | None] = {}

    def arguments(self) -> list[tuple[str, Any]]:
        return [*zip(self.schema.roles, self.args), *self.kwargs.items()]

    def save(self) -> None:
        """Copy what the op is about to write to, so that it can't hide its own operand."""
        room = _SAVED
        for role, value in self.arguments():
            if role in self.schema.writes and role not in self.schema.overwrites:
                for t in tensors((value,)):
                    if probe.payload(t) is not None:
                        room -= t.numel()
                        self._saved[id(t)] = t.detach().clone() if room >= 0 else None

    def before(self, t: Tensor) -> Tensor | None:
        """`t` as it was before the op wrote to it; None when it was too large to be copied."""
        return self._saved.get(id(t), t)

    def outputs(self, out: Any) -> list[tuple[int, Tensor]]:
        """Results by position. What was written but not returned stands at -1; in an op over lists, at its item."""
        if isinstance(out, Tensor):
            found = [(0, out)]
        elif isinstance(out, (list, tuple)):
            found = [(i, one) for i, one in enumerate(out) if isinstance(one, Tensor)]
        else:
            found = []
        if self.schema.writes:
            seen = {id(t) for _, t in found}
            for role, value in self.arguments():
                if role in self.schema.writes:
                    for i, t in enumerate(tensors((value,))):
                        if id(t) not in seen:
                            found.append((i if self.schema.per_item else -1, t))
        return found

    def operands(self, item: int | None) -> list[Operand]:
        """Tensor arguments as they were; of an op over lists those of one item. What is overwritten is left out."""
        found: list[Operand] = []
        for role, value in self.arguments():
            if role in self.schema.overwrites:
                continue
            if isinstance(value, Tensor):
                found.append(Operand(role, value, value))
            elif type(value) in (list, tuple):
                for i, one in enumerate(value):
                    if isinstance(one, Tensor) and (item is None or i == item):
                        found.append(Operand(role if item is not None else f"{role}[{i}]", one, one))
        kept = []
        for operand in found:
            before = self.before(operand.live)
            if before is None:
                continue
            if probe.payload(before) is not None or not before.is_floating_point() or not before.numel():
                operand.tensor = before
                kept.append(operand)
        return kept

    def bad_numbers(self) -> dict[str, float]:
        """Python numbers among the arguments that are NaN or Inf."""
        found = {}
        for role, value in self.arguments():
            for one in value if type(value) in (list, tuple) else (value,):
                if isinstance(one, (float, complex)) and not abs(one) < math.inf:
                    found[role] = one if isinstance(one, float) else math.nan
        return found

    def constants(self) -> tuple[float, ...]:
        """The Python numbers among the arguments, also those that torch has wrapped in a tensor."""
        found = []
        for value in (*self.args, *self.kwargs.values()):
            if type(value) is float:
                found.append(value)
            elif isinstance(value, Tensor) and wrapped(value):
                found.append(float(value))
            elif type(value) is list and value and type(value[0]) is float:
                found.append(value[0])
        return tuple(found)


@dataclass(slots=True)
class Operand:
    """A tensor argument: as it stands now (`live`), and as it was before the op ran (`tensor`)."""

    role: str
    live: Tensor
    tensor: Tensor
    name: str | None = None
    kinds: tuple[str, ...] = ()


class Place:
    """Where in the user's terms an op ran."""

    __slots__ = ("base", "call", "module", "module_type", "op", "optimizer", "phase", "site", "tensor", "user_code")

    def __init__(self, phase: str, op: str | None, call: Call | None, site: Site | None) -> None:
        self.phase, self.op, self.call, self.site = phase, op, call, site
        self.base: str | None = None  # in backward: the forward op
        self.module: str | None = call.path if call is not None else None
        self.module_type: str | None = call.type_name if call is not None else None
        self.tensor: str | None = None
        self.user_code = False  # in backward: the user's own function or hook
        self.optimizer: torch.optim.Optimizer | None = None


def tensors(values: Any) -> list[Tensor]:
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif type(value) in (list, tuple):
            found.extend(one for one in value if isinstance(one, Tensor))
    return found


def wrapped(t: Tensor) -> bool:
    """A Python number that torch has wrapped in a tensor: 0-dimensional, float64, on the host."""
    return t.dim() == 0 and t.dtype is torch.float64 and t.device.type == "cpu" and not t.requires_grad


def in_order(kinds: set[str]) -> tuple[str, ...]:
    return tuple(kind for kind in ("nan", "+inf", "-inf") if kind in kinds)
