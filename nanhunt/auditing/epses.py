"""Rules for an eps in the program's own arithmetic: what its format makes of it, and who relies on it.

From pytorch#32137 (F.normalize in half: 1e-12 is 0), pytorch#40497 (clamp(p, eps, 1 - eps) in half does nothing) and
ultralytics/yolov5#2376 (1 + 1e-9 is 1 in float32); the formats are those of IEEE 754, in `numerics`.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import torch

from ..numerics import fmt
from ..remarks import RISK, Line, Sheet
from .grain import form, stored, usable_eps
from .norms import saved_in_half
from .ops import FORWARD, Marks, Op

Tensor = torch.Tensor

_TAKES = frozenset(
    "add sub rsub clamp clamp_min clamp_max maximum minimum full full_like new_full fill masked_fill "
    "scalar_tensor".split()
)
_SUMS, _DIFFERENCES = frozenset(("add",)), frozenset(("sub", "rsub"))
# Ops whose result is 0 where their operand is: an eps that was lost stays lost.
_THROUGH = frozenset(
    "add neg mul div sqrt pow abs clamp clamp_min clamp_max maximum minimum to_copy clone copy where sum mean "
    "linalg_vector_norm lift_fresh cat stack relu".split()
)
_SAME = frozenset("neg to_copy clone copy where abs clamp clamp_min clamp_max".split())  # whose result is 1 as well
# Who divides by an operand, and which it is; who takes a logarithm; whose domain ends at 1.
_DIVIDES = {"div": 1, "true_divide": 1, "divide": 1, "floor_divide": 1, "reciprocal": 0, "rsqrt": 0}
_LOGS = frozenset("log log2 log10 xlogy".split())
_EDGES = frozenset("log1p atanh acos asin erfinv logit special_logit".split())
_NORMS = {"native_layer_norm": 2, "native_group_norm": 2}  # the output that holds 1 / sqrt(var + eps)

ZERO, ONE, TINY = "zero", "one", "tiny"


@dataclass(frozen=True, slots=True)
class _Eps:
    """An eps that is of no use: it became 0 (ZERO), it left a 1 at exactly 1 (ONE), or it is subnormal (TINY)."""

    what: str
    value: float
    held: float  # what is left of it
    dtype: torch.dtype
    op: str
    place: str
    at: Line
    near_one: bool = False  # the tensor may be 1 because of it, not 0


def fate(value: float, dtype: torch.dtype) -> tuple[str, float] | None:
    """What becomes of a constant in a format, where that is worth a word."""
    known = form(dtype)
    if known is None or value == 0 or not abs(value) <= known.max:
        return None
    held = stored(value, dtype)
    if held == 0:
        return ZERO, 0.0
    if abs(held) == 1 and held != value:
        return ONE, held
    if abs(value) < known.smallest_normal:
        return TINY, held
    return None


class Epses:
    """Follows each eps that its format has taken away, to the op that needed it."""

    def __init__(self, sheet: Sheet) -> None:
        self._sheet = sheet
        self._marks: Marks[tuple[_Eps, ...]] = Marks()

    def before(self, op: Op) -> None:
        """Nothing: what an op takes shows in what it gives."""

    def finish(self) -> None:
        """Nothing is open."""

    def after(self, op: Op) -> None:
        if op.phase != FORWARD or op.run.schema.views:
            return
        if op.base in _NORMS:
            self._norm(op)
        self._needed(op)
        marks = self._taken(op) + self._handed(op)
        for t in op.outs:
            if marks and t.is_floating_point():
                self._marks.put(t, marks)
            else:
                self._marks.clear(t)

    # --- where it is lost -------------------------------------------------------------------------

    def _taken(self, op: Op) -> tuple[_Eps, ...]:
        if not op.outs or not (op.base in _TAKES or op.base == "to_copy"):
            return ()
        dtype = op.outs[0].dtype
        found = []
        for value in op.constants() if op.base in _TAKES else _cast_number(op):
            become = fate(value, dtype)
            if become is not None:
                near_one = become[0] == ONE and op.base not in _SUMS | _DIFFERENCES
                found.append(_Eps(*become[:1], value, become[1], dtype, op.base, op.place, at=op.at, near_one=near_one))
        return tuple(found)

    def _handed(self, op: Op) -> tuple[_Eps, ...]:
        if not (op.base in _THROUGH or op.base in _DIFFERENCES):
            return ()
        found = (self._next(mark, op) for t in op.run.tensors for mark in self._marks.of(t) or ())
        return tuple({mark.at[0]: mark for mark in found if mark is not None}.values())

    def _next(self, mark: _Eps, op: Op) -> _Eps | None:
        """The mark as the result of the op bears it."""
        if mark.near_one:
            if op.base in _SUMS | _DIFFERENCES:  # 1 - p
                return dataclasses.replace(mark, near_one=False)
            return mark if op.base in _SAME else None
        if mark.what == TINY:
            if op.base == "sqrt":
                return dataclasses.replace(mark, held=math.sqrt(abs(mark.held)))
            return mark if op.base in _SAME or op.base == "lift_fresh" else None
        if op.base in _DIFFERENCES and mark.what == ZERO:
            return None  # 1 - x is not 0 because x is
        if op.base in _SUMS and op.constants() and mark.op not in ("scalar_tensor", "to_copy"):
            return None  # another constant keeps it from 0
        return mark

    # --- where it is needed -----------------------------------------------------------------------

    def _needed(self, op: Op) -> None:
        for mark in self._marks.of(_at_risk(op)) or ():
            if mark.near_one != (op.base in _EDGES):
                continue
            if mark.what == TINY:
                self._too_small(mark, op)
            else:
                self._lost(mark, op)

    def _too_small(self, mark: _Eps, op: Op) -> None:
        known = form(mark.dtype)
        if known is None or mark.held >= known.smallest_normal or op.base not in _DIVIDES or op.base == "rsqrt":
            return
        inverse = 1 / abs(mark.held)
        over = f", and {known.name} ends at {fmt(known.max)}" if inverse > known.max else ""
        self._sheet.add(
            "eps_subnormal",
            mark.place,
            f"the {fmt(mark.value)} given to {mark.op} is {fmt(mark.held)} in {known.name}, below its smallest normal "
            f"number {fmt(known.smallest_normal)}, and {op.base}{_elsewhere(mark, op)} divides by it where the rest "
            f"is 0: 1 / eps is {fmt(inverse)}{over}.",
            f"use an eps of {usable_eps(mark.dtype)} or more, or compute this in float32.",
            severity=RISK,
            at=mark.at,
        )

    def _lost(self, mark: _Eps, op: Op) -> None:
        known = form(mark.dtype)
        assert known is not None
        divides = op.base in _DIVIDES or op.base == "pow"
        does = "divides by what it guards" if divides else f"takes {op.base} of what it guards"
        if mark.what == ZERO:
            lost = f"the {fmt(mark.value)} given to {mark.op} is 0 in {known.name}, whose smallest number is "
            lost += fmt(known.smallest_subnormal)
            least = usable_eps(mark.dtype)
        else:
            lost = f"the {mark.value!r} given to {mark.op} is {mark.held:g} in {known.name}, whose step there is "
            lost += fmt(known.eps)
            least = fmt(2 * known.eps)
        self._sheet.add(
            "eps_lost",
            mark.place,
            f"{lost}: this eps does nothing, and {op.base}{_elsewhere(mark, op)} {does}.",
            f"use an eps of {least} or more, or compute this in a wider format.",
            at=mark.at,
        )

    def _norm(self, op: Op) -> None:
        """torch's norms when all they are given is half: what they keep for backward is half too."""
        eps, position = op.run.args[-1] if op.run.args else None, _NORMS[op.base]
        if isinstance(eps, float) and isinstance(op.out, tuple) and len(op.out) > position:
            dtype = op.out[position].dtype
            if dtype in (torch.float16, torch.bfloat16):
                name = op.base.removeprefix("native_")
                saved_in_half(self._sheet, op.place, name, eps, dtype, at=op.at)


def _cast_number(op: Op) -> list[float]:
    """An eps that is a tensor of its own: `torch.tensor(1e-12).half()`, a buffer."""
    t = op.run.args[0] if op.run.args else None
    if not isinstance(t, Tensor) or t.numel() != 1 or not t.is_floating_point() or t.is_meta or t.requires_grad:
        return []
    return [float(t)]


def _at_risk(op: Op) -> object:
    """The operand that must not be 0, or not be 1."""
    args, base = op.run.args, op.base
    if base in _DIVIDES:
        return args[_DIVIDES[base]] if len(args) > _DIVIDES[base] else None
    if base == "xlogy":
        return args[-1]
    if base in _LOGS or base in _EDGES:
        return args[0] if args else None
    if base == "pow" and len(args) > 1 and isinstance(args[1], (int, float)) and args[1] < 0:
        return args[0]
    return None


def _elsewhere(mark: _Eps, op: Op) -> str:
    """The line of the op, where it is another than the eps stands on."""
    site = op.site
    if site is None or f"{site[0]}:{site[1]}" == mark.at[0]:
        return ""
    return f" ({site[0].rpartition('/')[2]}:{site[1]})"
