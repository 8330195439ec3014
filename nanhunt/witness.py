"""Takes the evidence of a birth while the operands are still in hand."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from . import evidence as ev
from . import internals, probe, sites
from .evidence import Evidence, Lost, Operand
from .makers import Makers

if TYPE_CHECKING:
    from .tracer import _Place, _Run

Tensor = torch.Tensor

_MOST = 300  # births that are looked at in full
_MOST_ALIKE = 3  # of the same op on the same line
_ROWS = {"softmax", "log_softmax", "safe_softmax", "logsumexp", "sdpa"}
_COUNTED = {"mean", "std", "std_mean", "var", "var_mean", "sum", "amax", "amin"}


class Witness:
    def __init__(self, makers: Makers) -> None:
        self._makers = makers
        self._alike: dict[Any, list[Evidence]] = {}
        self._full = 0

    def source(self, operand: Operand, phase: str, name: str) -> Evidence:
        """Of a tensor that was bad before anybody looked."""
        stats = probe.stats(operand.tensor, operand.role, name) if self._full < _MOST else None
        self._full += 1
        kinds = operand.kinds
        if stats is None:
            return Evidence(op="", phase=phase, kinds=kinds)
        bad = (stats.nan or 0) + (stats.pos_inf or 0) + (stats.neg_inf or 0)
        return Evidence(
            op="", phase=phase, kinds=kinds, tensors=(stats,), bad=bad, of=stats.numel, where=stats.first_bad,
            dtype=stats.dtype,
        )  # fmt: skip

    def gather(
        self,
        run: _Run,
        place: _Place,
        operands: list[Operand],
        result: Any,
        position: int,
        out: Tensor,
        kinds: tuple[str, ...],
        *,
        literals: dict[str, float],
        inherited: bool,
        fresh: Tensor | None,
        loss_scale: float | None,
        dropped: tuple[str, ...],
    ) -> Evidence:
        key = (run.schema.name, place.site, place.module, kinds)
        alike = self._alike.setdefault(key, [])
        if alike and (len(alike) >= _MOST_ALIKE or self._full >= _MOST):
            return alike[-1]
        self._full += 1
        found = self._gather(
            run, place, operands, position, out, kinds, literals, inherited, fresh, loss_scale, dropped
        )
        alike.append(found)
        return found

    def _gather(
        self,
        run: _Run,
        place: _Place,
        operands: list[Operand],
        position: int,
        out: Tensor,
        kinds: tuple[str, ...],
        literals: dict[str, float],
        inherited: bool,
        fresh: Tensor | None,
        loss_scale: float | None,
        dropped: tuple[str, ...],
    ) -> Evidence:
        schema = run.schema
        bad, of, where = _first(out, kinds)
        at: dict[str, float] = {}
        if where is not None:
            for operand in operands:
                value = ev.number_at(operand.tensor, out.shape, where)
                if value is not None:
                    at[operand.role] = value
        scalars = ev.numbers_of(run.args, schema.roles, run.kwargs) | literals
        exact = magnitude = None
        if where is not None and not schema.per_item:
            exact, magnitude = ev.exact_at(
                run.func, schema, run.args, run.kwargs, run.before, out, max(position, 0), where
            )
        lost, autocast, given = None, None, None
        for operand in operands:
            t = operand.tensor
            if t.layout is not torch.strided or t.is_nested:
                continue
            value = at.get(operand.role)
            if lost is None and (value == 0 or (value is None and t.numel() and bool((t == 0).any()))):
                lost = self._makers.lost(t)
            before = self._makers.narrowed(t)
            if internals.autocast_depth() and before is not None and before.itemsize > t.dtype.itemsize:
                autocast = str(t.dtype).removeprefix("torch.")
                given = str(before).removeprefix("torch.")
        whole = tuple(o.role for o in operands if o.tensor.numel() and _is_whole(o.tensor))
        base = place.base if place.phase == "backward" else None
        return Evidence(
            op=schema.base, phase=place.phase, kinds=kinds, forward=base,
            dtype=str(out.dtype).removeprefix("torch."),
            tensors=ev.table(operands, out, "output" if place.phase != "backward" else "gradient", None),
            bad=bad, of=of, where=where, at=at, scalars=scalars, exact=exact, magnitude=magnitude,
            inherited=inherited, whole=whole, lost=lost or _eps_of(schema.base, scalars, operands),
            row=_row(schema.base, run, operands), autocast=autocast, given=given, loss_scale=loss_scale,
            scaling=place.phase == "forward" and sites.scaling_loss(), absorbed_by=dropped,
            count=_count(schema.base, operands, out), user_code=place.user_code,
        )  # fmt: skip


def _is_whole(t: Tensor) -> bool:
    try:
        return ev.whole(t)
    except RuntimeError:
        return False


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
    if numbers.shape[: mask.dim()] != out.shape:
        return int(mask.sum()), mask.numel(), None
    place, index = int(mask.reshape(-1).to(torch.uint8).argmax()), []
    for size in reversed(mask.shape):
        place, i = divmod(place, size)
        index.append(i)
    return int(mask.sum()), mask.numel(), tuple(reversed(index))


def _row(base: str, run: _Run, operands: list[Operand]) -> ev.Row | None:
    if base in _ROWS and operands:
        t = operands[0].tensor
        dims = run.args[1] if len(run.args) > 1 else -1
        dims = [dims] if isinstance(dims, int) else list(dims)
        if t.dim():
            return ev.rows_of(t, [d % t.dim() for d in dims])
    if base.startswith("scaled_dot_product"):
        for operand in operands:
            if operand.role in ("attn_mask", "attn_bias"):
                t = operand.tensor
                if t.dtype is torch.bool:
                    t = torch.zeros(t.shape).masked_fill(~t, -torch.inf)
                return ev.rows_of(t, [t.dim() - 1])
    return None


def _count(base: str, operands: list[Operand], out: Tensor) -> int | None:
    """How many numbers went into each result of a reduction."""
    if not operands:
        return None
    t = operands[0].tensor
    if base in _COUNTED and out.numel():
        return t.numel() // out.numel()
    return None


def _eps_of(base: str, scalars: dict[str, float], operands: list[Operand]) -> Lost | None:
    """The op's own eps, when it has one and it is zero."""
    eps = scalars.get("eps")
    if eps is not None and eps == 0 and operands:
        return Lost(op=base, value=0.0, dtype=str(operands[0].tensor.dtype).removeprefix("torch."), becomes=0.0)
    return None
