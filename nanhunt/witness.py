"""Takes the evidence of a birth while the operands are still in hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from . import internals, probe, sites
from .evidence import Evidence, Lost, Row
from .makers import Makers
from .runs import Operand, Place, Run

Tensor = torch.Tensor

_MOST = 300  # births that are looked at in full
_MOST_ALIKE = 3  # of the same op on the same line
_MOST_AGAIN = 1 << 24  # elements: larger operands are not computed again
_ROWS = frozenset("softmax log_softmax safe_softmax logsumexp".split())
_COUNTED = frozenset("mean std std_mean var var_mean sum".split())


class Witness:
    """Gathers `Evidence`: numbers and names only, no tensor is kept."""

    def __init__(self, makers: Makers) -> None:
        self._makers = makers
        self._alike: dict[Any, list[Evidence]] = {}
        self._full = 0

    def source(self, operand: Operand, phase: str, name: str) -> Evidence:
        """Of a tensor that was bad before anybody looked."""
        self._full += 1
        if self._full > _MOST:
            return Evidence(op="", phase=phase, kinds=operand.kinds)
        whole = operand.live._base  # of a weight that is read transposed, the weight as the user knows it
        same = whole is not None and whole.numel() == operand.live.numel() and operand.tensor is operand.live
        stats = probe.stats(whole if same and whole is not None else operand.tensor, operand.role, name)
        bad = (stats.nan or 0) + (stats.pos_inf or 0) + (stats.neg_inf or 0)
        return Evidence(
            op="", phase=phase, kinds=operand.kinds, tensors=(stats,), bad=bad, of=stats.numel, where=stats.first_bad,
            dtype=stats.dtype,
        )  # fmt: skip

    def gather(
        self,
        run: Run,
        place: Place,
        operands: list[Operand],
        position: int,
        out: Tensor,
        kinds: tuple[str, ...],
        *,
        literals: dict[str, float],
        inherited: bool,
        loss_scale: float | None,
        dropped: tuple[str, ...],
    ) -> Evidence:
        """Of an op that made something bad. Many births alike, as in a loop, share what was seen first."""
        key = (run.schema.name, place.site, place.module, kinds)
        alike = self._alike.setdefault(key, [])
        if alike and (len(alike) >= _MOST_ALIKE or self._full >= _MOST):
            return alike[-1]
        self._full += 1
        base = run.schema.base
        bad, of, where = _first(out, kinds)
        at: dict[str, float] = {}
        for operand in operands:
            value = _number_at(operand.tensor, out.shape, where)
            if value is not None:
                at[operand.role] = value
        scalars = {k: float(v) for k, v in run.arguments() if isinstance(v, (int, float)) and not isinstance(v, bool)}
        exact, magnitude = _exact(run, out, position, where)
        zero = self._zero(operands, at)
        maker = self._makers.of(zero) if zero is not None else None
        given, autocast = self._cast(operands)
        found = Evidence(
            op=base, phase=place.phase, kinds=kinds, forward=place.base, dtype=_name(out.dtype),
            tensors=_table(operands, out, place), bad=bad, of=of, where=where, at=at, scalars=scalars | literals,
            exact=exact, magnitude=magnitude, inherited=inherited,
            whole=tuple(o.role for o in operands if _whole(o.tensor)),
            lost=self._makers.lost(zero) if zero is not None else None,
            zero_from=maker.base if maker is not None else None,
            row=_row(run, operands), autocast=autocast, given=given, loss_scale=loss_scale,
            scaling=place.phase == "forward" and sites.scaling_loss(), absorbed_by=dropped,
            count=_count(base, operands, out), user_code=place.user_code,
        )  # fmt: skip
        alike.append(found)
        return found

    def _zero(self, operands: list[Operand], at: dict[str, float]) -> Tensor | None:
        """The last operand that is zero behind the first bad number: a divisor comes after what it divides."""
        for operand in reversed(operands):
            t = operand.live
            if t.layout is torch.strided and not t.is_nested and at.get(operand.role) == 0:
                return t
        return None

    def _cast(self, operands: list[Operand]) -> tuple[str | None, str | None]:
        """The dtype that operands had, and the one which autocast chose for this op."""
        if internals.autocast_depth() > 0:
            for operand in operands:
                t = operand.live
                if t.layout is torch.strided and not t.is_nested:
                    before = self._makers.narrowed(t)
                    if before is not None and before.itemsize > t.dtype.itemsize:
                        return _name(before), _name(t.dtype)
            for operand in operands:
                # A region with enabled=False is open too, but casts nothing.
                if internals.autocast_dtype(operand.live) and internals.autocast_depth() in self._makers.cast_at:
                    return None, _name(operand.live.dtype)
        return None, None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _table(operands: list[Operand], out: Tensor, place: Place) -> tuple[Any, ...]:
    rows = [probe.stats(o.tensor, o.role, o.name) for o in operands[:8]]
    return (*rows, probe.stats(out, "gradient" if place.phase == "backward" else "output", place.tensor))


# --- the op once more --------------------------------------------------------------------------------------------


def rerun(run: Run, change: Callable[[Tensor], Tensor], *, wide: bool) -> Any:
    """The op on operands that `change` gives; `wide`: dtype arguments in float64. None when it can't be run again."""
    schema = run.schema
    if schema.random or schema.collective or schema.per_item or schema.reads:
        return None

    def swap(value: Any, name: str = "") -> Any:
        if isinstance(value, Tensor):
            before = run.before(value)
            if before is None:
                raise RuntimeError("overwritten")
            return change(before)
        if type(value) is list or type(value) is tuple:
            return type(value)(swap(item) for item in value)
        if wide and isinstance(value, torch.dtype) and (value.is_floating_point or value.is_complex):
            return torch.complex128 if value.is_complex else torch.float64
        return False if name == "half_to_float" else value

    try:
        with torch.no_grad():
            args = tuple(swap(value, role) for role, value in zip(schema.roles, run.args))
            return run.func(*args, **{key: swap(value, key) for key, value in run.kwargs.items()})
    except Exception:  # no float64 kernel, or operands that must agree in some other way
        return None


def small(t: Tensor) -> bool:
    return t.numel() <= _MOST_AGAIN


def calmed(t: Tensor) -> Tensor:
    """A copy in which everything bad is 1/2: hardly an op makes NaN or Inf of that."""
    if not (t.is_floating_point() or t.is_complex()):
        return t.detach().clone()
    return torch.where(torch.isfinite(t.detach()), t.detach(), 0.5)


def _in_double(t: Tensor) -> Tensor:
    """A copy, for ops that write to it too."""
    if t.is_floating_point():
        return t.detach().to(torch.float64, copy=True)
    if t.is_complex():
        return t.detach().to(torch.complex128, copy=True)
    return t.detach().clone()


def output_at(out: Any, position: int) -> Any:
    if isinstance(out, (list, tuple)):
        return out[position] if position < len(out) else None
    return out if position == 0 else None


def _exact(run: Run, out: Tensor, position: int, where: tuple[int, ...] | None) -> tuple[float | None, float | None]:
    """What float64 makes of the same operands: at the first bad number, and the largest of all the bad ones."""
    if where is None or not small(out) or not all(small(t) for t in run.tensors):
        return None, None
    result = output_at(rerun(run, _in_double, wide=True), max(position, 0))
    if not isinstance(result, Tensor) or result.shape != out.shape or result.dtype == out.dtype:
        return None, None
    try:
        if result.is_complex():
            spoiled = ~torch.isfinite(torch.view_as_real(out.resolve_conj())).all(-1)
            result = torch.view_as_real(result.resolve_conj()).abs().amax(-1)
        else:
            spoiled = ~torch.isfinite(out)
        values = result[spoiled].abs()
        values = values[torch.isfinite(values)]
        return float(result[where]), float(values.amax()) if values.numel() else None
    except RuntimeError:
        return None, None


# --- readings ----------------------------------------------------------------------------------------------------


def _first(out: Tensor, kinds: tuple[str, ...]) -> tuple[int | None, int | None, tuple[int, ...] | None]:
    """How many numbers of these kinds there are, of how many, and the index of the first."""
    numbers = probe.payload(out)
    if numbers is None:
        return None, None, None
    numbers = numbers.detach()
    if out.is_complex():
        mask = ~torch.isfinite(numbers).all(-1)
    elif kinds[0] == "nan":
        mask = torch.isnan(numbers)
    else:
        mask = torch.isinf(numbers)
    if mask.shape != out.shape:  # sparse or nested: the index would be of another shape
        return int(mask.sum()), mask.numel(), None
    place, index = int(mask.reshape(-1).to(torch.uint8).argmax()), []
    for size in reversed(mask.shape):
        place, i = divmod(place, size)
        index.append(i)
    return int(mask.sum()), mask.numel(), tuple(reversed(index))


def _number_at(t: Tensor, shape: torch.Size, index: tuple[int, ...] | None) -> float | None:
    """The number of `t` that stands at `index` of `shape`, when `t` spreads to that shape."""
    if index is None or t.layout is not torch.strided or t.is_nested:
        return None
    try:
        value = t.detach().expand(shape)[index]
        if value.is_complex():
            value = torch.view_as_real(value.to(torch.complex64)).abs().amax()
        return float(value)
    except (RuntimeError, IndexError, TypeError):
        return None


def _whole(t: Tensor) -> bool:
    """Whether all numbers are whole and none is negative, as those of counts, lengths and masks are."""
    if not t.is_floating_point():
        return not t.is_complex()
    if t.layout is not torch.strided or t.is_nested or not t.numel():
        return False
    part = t.detach().reshape(-1)[: 1 << 16].to(torch.float64)
    finite = part[torch.isfinite(part)]
    return bool(((finite == finite.round()) & (finite >= 0)).all())


def _row(run: Run, operands: list[Operand]) -> Row | None:
    """Of a softmax: how many slices hold nothing but -inf, and how many a +inf."""
    base = run.schema.base
    if base in _ROWS and operands and operands[0].tensor.dim():
        t = operands[0].tensor
        given = run.args[1] if len(run.args) > 1 else -1
        return _rows(t, [given] if isinstance(given, int) else list(given))
    if base.startswith("scaled_dot_product"):
        for operand in operands:
            if operand.role in ("attn_mask", "attn_bias"):
                t = operand.tensor
                if t.dtype is torch.bool:
                    t = torch.zeros(t.shape, device=t.device).masked_fill(~t, -math.inf)
                return _rows(t, [-1])
    return None


def _rows(t: Tensor, dims: list[int]) -> Row:
    dims = [d % t.dim() for d in dims]
    empty, hot = t.detach() == -math.inf, t.detach() == math.inf
    for d in sorted(dims, reverse=True):
        empty, hot = empty.all(d), hot.any(d)
    return Row(
        length=math.prod(t.shape[d] for d in dims),
        all_neg_inf=int(empty.sum()),
        first=tuple(empty.nonzero()[0].tolist()) if empty.any() else None,
        dims=tuple(-1 if d == t.dim() - 1 else d for d in dims),
        pos_inf=int(hot.sum()),
        rows=max(1, empty.numel()),
    )


def _count(base: str, operands: list[Operand], out: Tensor) -> int | None:
    """How many numbers went into each result of a reduction."""
    if base in _COUNTED and operands and out.numel():
        return operands[0].tensor.numel() // out.numel()
    return None


__all__ = ["Lost", "Witness", "calmed", "output_at", "rerun", "small"]
