"""Rules for masks and casts: constants that their format cannot hold, and what falls out of it at its lower end.

From huggingface/transformers#17306 and #17437 (finfo.min plus a score below -16 is -inf in float16, and a row of these
is NaN), and from torch itself, which refuses masked_fill and full with a constant that the dtype cannot hold.
"""

from __future__ import annotations

import torch

from .. import probe
from ..numerics import fmt
from ..remarks import RISK, Sheet
from .grain import form, name_of
from .ops import FORWARD, Op

Tensor = torch.Tensor

_WRITES = frozenset("masked_fill fill full full_like new_full scalar_tensor constant_pad_nd".split())
_MIXES = frozenset("add sub rsub mul div where maximum minimum".split())
_SUMS = frozenset("add sub baddbmm".split())
_MASKED = "A row that is masked as a whole is then NaN after softmax"
_LOWEST = 0.99  # of the lowest number of a format: what stands for it


class Masks:
    """Looks at constants before an op runs, for it may refuse them, and at what became infinite after it."""

    def __init__(self, sheet: Sheet, parameters: dict[int, str]) -> None:
        self._sheet = sheet
        self._parameters = parameters  # address of the numbers -> name
        self._lows: tuple[float, ...] | None = None  # of the operands of a sum

    def before(self, op: Op) -> None:
        self._lows = None
        if op.phase != FORWARD:
            return
        if op.base in _WRITES:
            self._written(op)
        elif op.base in _SUMS:
            self._lows = self._lowest(op)

    def finish(self) -> None:
        """Nothing is open."""

    def after(self, op: Op) -> None:
        if op.phase != FORWARD or not op.outs or not op.outs[0].is_floating_point():
            return
        if op.base == "to_copy":
            self._cast(op)
        elif op.base in _MIXES and any(self._beyond(value, op.outs[0].dtype) for value in op.constants()):
            self._mixed(op)
        if self._lows is not None:
            self._summed(op, self._lows)

    @staticmethod
    def _beyond(value: float, dtype: torch.dtype) -> bool:
        known = form(dtype)
        return known is not None and abs(value) > known.max

    def _written(self, op: Op) -> None:
        dtype = op.run.kwargs.get("dtype")
        if dtype is None and op.run.tensors:
            dtype = op.run.tensors[0].dtype
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            return
        for value in op.constants():
            if self._beyond(value, dtype):
                if op.base == "scalar_tensor":
                    self._told(op, value, dtype, f"it becomes -Inf or Inf there. {_MASKED}")
                else:
                    self._told(
                        op, value, dtype, f"torch refuses {op.base} with it (cannot be converted without overflow)"
                    )

    def _mixed(self, op: Op) -> None:
        out = op.outs[0]
        numbers = probe.payload(out)
        if numbers is None or not probe.bad(*probe.limits(numbers)):
            return
        value = next(value for value in op.constants() if self._beyond(value, out.dtype))
        count = int(out.isinf().sum())
        self._told(
            op, value, out.dtype, f"{op.base} makes {fmt(count)} of {fmt(out.numel())} numbers infinite. {_MASKED}"
        )

    def _told(self, op: Op, value: float, dtype: torch.dtype, what: str) -> None:
        known = form(dtype)
        assert known is not None
        self._sheet.add(
            "mask_overflow",
            op.place,
            f"the constant {fmt(value)} does not fit into {known.name}, which ends at {fmt(known.max)}: {what}.",
            "use torch.finfo(x.dtype).min, or -inf where no row is masked as a whole; or build it in float32.",
            at=op.at,
        )

    def _lowest(self, op: Op) -> tuple[float, ...] | None:
        """The smallest number of each operand that may be a mask; None where one is bad already."""
        lows = []
        operands = op.floats
        for t in operands[:1] if op.base == "baddbmm" else operands:
            numbers = probe.payload(t)
            if numbers is None:
                return None
            low, high = probe.limits(numbers)
            if probe.bad(low, high):
                return None
            lows.append(low)
        return tuple(lows) if len(operands) > 1 else None

    def _summed(self, op: Op, lows: tuple[float, ...]) -> None:
        out = op.outs[0]
        known = form(out.dtype)
        if known is None or min(lows) > -_LOWEST * known.max:
            return
        numbers = probe.payload(out)
        if numbers is None or not probe.bad(*probe.limits(numbers)):
            return
        gone = out == float("-inf")
        rows = gone.all(-1) if out.dim() else gone
        whole = int(rows.sum())
        step = known.max * known.eps / 4
        two = sum(low <= -_LOWEST * known.max for low in lows) > 1
        what = "two masks of the lowest number are added" if two else f"what is added to it is below {fmt(-step)}"
        then = (
            f"{fmt(whole)} of {fmt(rows.numel())} rows are -inf as a whole, and softmax of those is NaN"
            if whole
            else "a row in which that happens everywhere is NaN after softmax"
        )
        self._sheet.add(
            "mask_sum",
            op.place,
            f"{op.base} of {fmt(min(lows))}, the lowest number of {known.name}, gives -inf in {fmt(int(gone.sum()))} "
            f"of {fmt(out.numel())} numbers ({what}): {then}.",
            "combine masks with & before they become numbers, write the mask with masked_fill after the scores are "
            f"computed, or use a constant with room below it, such as {fmt(-known.max / 2)}.",
            severity="fault" if whole else RISK,
            at=op.at,
        )

    def _cast(self, op: Op) -> None:
        source = op.run.args[0] if op.run.args else None
        out = op.outs[0]
        if not isinstance(source, Tensor) or not source.is_floating_point():
            return
        own, target = form(source.dtype), form(out.dtype)
        if own is None or target is None or target.max >= own.max:
            return
        after, before = probe.payload(out), probe.payload(source)
        if after is None or before is None or not probe.bad(*probe.limits(after)):
            return
        low, high = probe.limits(before)
        if probe.bad(low, high):
            return
        size, count = max(abs(low), abs(high)), int(out.isinf().sum())
        name = self._parameters.get(source.data_ptr())
        if name is not None:
            self._sheet.add(
                "weight_overflow",
                name,
                f"{name} ({name_of(source.dtype)}) holds {fmt(size)}: cast to {target.name}, which ends at "
                f"{fmt(target.max)}, {fmt(count)} of its {fmt(out.numel())} numbers become infinite.",
                "rescale it, run its module in float32 (torch.autocast(..., enabled=False)), or use bfloat16.",
            )
        elif high <= 0 or source.numel() == 1:
            self._told(
                op, low if high <= 0 else high, out.dtype, f"the cast makes {fmt(count)} numbers infinite. {_MASKED}"
            )
        else:
            self._sheet.add(
                "cast_overflow",
                op.place,
                f"the cast from {own.name} to {target.name} makes {fmt(count)} of {fmt(out.numel())} numbers "
                f"infinite: they go up to {fmt(size)}, and {target.name} ends at {fmt(target.max)}.",
                "scale before the cast, or keep this in float32 or bfloat16.",
                at=op.at,
            )
