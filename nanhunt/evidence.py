"""What can be read off the operands while they are still there, as plain numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from . import probe
from .evidence_record import Evidence, Lost, Row
from .finding import TensorStats
from .schemas import Schema

Tensor = torch.Tensor

# More elements than this are not computed again in float64.
MOST_AGAIN = 1 << 24


@dataclass(slots=True)
class Operand:
    """A tensor argument as it was before the op ran."""

    role: str
    tensor: Tensor
    name: str | None = None
    kinds: tuple[str, ...] = ()


def numbers_of(values: tuple[Any, ...], roles: tuple[str, ...], kwargs: dict[str, Any]) -> dict[str, float]:
    """Python numbers among the arguments, by the name the schema gives them."""
    pairs = [*zip(roles, values), *kwargs.items()]
    found: dict[str, float] = {}
    for role, value in pairs:
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            found[role] = float(value)
    return found


def rerun(
    func: Any,
    schema: Schema,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    change: Callable[[Tensor], Tensor],
    wide: bool,
) -> Any:
    """The op once more, on operands that `change` gives; `wide`: in float64. None when that is not possible."""
    if schema.random or schema.collective or schema.per_item or schema.reads:
        return None

    def swap(value: Any, name: str = "") -> Any:
        if isinstance(value, Tensor):
            return change(value)
        if isinstance(value, (list, tuple)):
            return type(value)(swap(item) for item in value) if type(value) in (list, tuple) else value
        if wide and isinstance(value, torch.dtype) and (value.is_floating_point or value.is_complex):
            return torch.complex128 if value.is_complex else torch.float64
        return False if name == "half_to_float" else value

    try:
        with torch.no_grad():
            new_args = tuple(swap(value, role) for role, value in zip(schema.roles, args))
            return func(*new_args, **{key: swap(value, key) for key, value in kwargs.items()})
    except Exception:  # an op that has no float64 kernel, or wants its operands to agree
        return None


def small(t: Tensor) -> bool:
    return t.numel() <= MOST_AGAIN


def in_double(t: Tensor) -> Tensor:
    """A copy in float64, for ops that write to it too."""
    if t.is_floating_point():
        return t.detach().to(torch.float64, copy=True)
    if t.is_complex():
        return t.detach().to(torch.complex128, copy=True)
    return t.detach().clone()


def calmed(t: Tensor) -> Tensor:
    """A copy in which everything bad is 1/2: no op of one operand makes NaN or Inf of that."""
    if not (t.is_floating_point() or t.is_complex()):
        return t.detach().clone()
    return torch.where(torch.isfinite(t.detach()), t.detach(), 0.5)


def output_at(out: Any, index: int) -> Any:
    if isinstance(out, (list, tuple)):
        return out[index] if index < len(out) else None
    return out if index == 0 else None


def number_at(t: Tensor, shape: torch.Size, index: tuple[int, ...]) -> float | None:
    """The number of `t` that stands at `index` of `shape`, when `t` spreads to that shape."""
    try:
        value = t.detach().expand(shape)[index]
        if value.is_complex():
            value = torch.view_as_real(value.to(torch.complex64)).abs().amax()
        return float(value)
    except (RuntimeError, IndexError, TypeError):
        return None


def exact_at(
    func: Any,
    schema: Schema,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    before: Callable[[Tensor], Tensor],
    out: Tensor,
    position: int,
    index: tuple[int, ...] | None,
) -> tuple[float | None, float | None]:
    """What float64 makes of the same operands: at the first bad index, and the largest of all bad ones."""
    operands = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]
    if index is None or not all(small(t) for t in operands) or not small(out):
        return None, None
    again = rerun(func, schema, args, kwargs, lambda t: in_double(before(t)), True)
    result = output_at(again, position)
    if not isinstance(result, Tensor) or result.shape != out.shape or result.dtype == out.dtype:
        return None, None
    try:
        if result.is_complex():
            result = torch.view_as_real(result).abs().amax(-1)
            spoiled = ~torch.isfinite(torch.view_as_real(out.to(torch.complex64))).all(-1)
        else:
            spoiled = ~torch.isfinite(out)
        values = result[spoiled].abs()
        values = values[torch.isfinite(values)]
        largest = float(values.amax()) if values.numel() else None
        return float(result[index]), largest
    except RuntimeError:
        return None, None


def rows_of(x: Tensor, dims: list[int]) -> Row:
    """How many slices of `x` along `dims` hold nothing but -inf, and how many a +inf."""
    length = math.prod(x.shape[d] for d in dims)
    neg, pos = x.detach() == -math.inf, x.detach() == math.inf
    empty, hot = neg, pos
    for d in sorted(dims, reverse=True):
        empty, hot = empty.all(d), hot.any(d)
    return Row(length=length, all_neg_inf=int(empty.sum()), pos_inf=int(hot.sum()), rows=max(1, empty.numel()))


def whole(t: Tensor) -> bool:
    """Whether all numbers are whole, as those of counts, lengths and masks are."""
    if not t.is_floating_point():
        return not t.is_complex()
    part = t.detach().reshape(-1)[: 1 << 16]
    finite = part[torch.isfinite(part)]
    return bool((finite == finite.round()).all()) and bool((finite >= 0).all())


def table(operands: list[Operand], out: Tensor, role: str, name: str | None) -> tuple[TensorStats, ...]:
    """Statistics of every operand and of the output; at most eight operands."""
    rows = [probe.stats(o.tensor, o.role, o.name) for o in operands[:8]]
    return (*rows, probe.stats(out, role, name))
