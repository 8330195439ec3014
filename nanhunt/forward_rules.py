"""Rules for what an op makes of its operands, most telling first."""

from __future__ import annotations

import math
from typing import NamedTuple

from . import phrases
from .evidence import Evidence
from .families import (
    AVERAGES,
    CASTS,
    DIVIDES,
    DOMAINS,
    EXPONENTIALS,
    GUARDS,
    LINALG,
    LOGS,
    LOSSES,
    NORMS,
    PRODUCTS,
    SOFTMAX,
    SUMS,
    VANISH,
)
from .finding import TensorStats
from .numerics import bits_over, fmt, format_of
from .phrases import many, would_be


class Ruling(NamedTuple):
    """A cause, why, and the situations that `advice` has something special to say about."""

    cause: str
    why: str
    special: tuple[str, ...] = ()


def rows(e: Evidence) -> Ruling | None:
    """Softmax over a row with nothing in it, or with a +inf."""
    if e.row is None or "nan" not in e.kinds:
        return None
    if e.row.pos_inf and e.op in SOFTMAX:
        return Ruling("inf_arithmetic", f"{e.op}: {fmt(e.row.pos_inf)} rows hold a +inf, and inf - inf is NaN.")
    if e.row.all_neg_inf:
        held = f"{fmt(e.row.all_neg_inf)} of {fmt(e.row.rows)} rows hold nothing but -inf ({e.row.length} numbers each)"
        return Ruling("masked_row", f"{e.op}: {held}: {many(e)}.")
    return None


def divided(e: Evidence) -> Ruling | None:
    """Something over zero; the zero may be a count, an eps that was lost, or just zero."""
    role = "self" if e.op == "pow" and _exponent(e) < 0 else DIVIDES.get(e.op)
    if role is None or e.at.get(role, e.scalars.get(role)) != 0:
        return None
    above = e.at.get("tensor1" if e.op == "addcdiv" else "self")
    top = "1" if role == "self" else fmt(above)
    divisor = next((t for t in e.tensors if t.role == role), None)
    what, zeros = f"{top} / 0: {many(e)}.", _zeros(divisor)
    if GUARDS.intersection(e.absorbed_by):
        return Ruling("singular_gradient", f"{what} {zeros}.", ("where",))
    if e.lost is not None:
        why = f"{what} The zero is an eps that was rounded away: {phrases.lost(e)}."
        return Ruling("underflow", why, ("update" if e.phase == "optimizer" else "eps",))
    if role in e.whole and divisor is not None and divisor.zero != divisor.numel:
        return Ruling("zero_division", f"{what} {zeros} and all are whole numbers: a count of nothing.", ("count",))
    if e.zero_from in VANISH:
        zeros += f"; it comes from {e.zero_from}, which rounds small results to 0"
    named = divisor is not None and divisor.name is not None
    special: tuple[str, ...] = ("constant" if named else "divisor",)
    if role == "self":
        positive = e.op == "rsqrt" or (divisor is not None and divisor.min is not None and divisor.min >= 0)
        special = ("pow" if e.op == "pow" else "root" if positive else "signed",)
    return Ruling("zero_division", f"{what} {zeros}.", special)


def _zeros(divisor: TensorStats | None) -> str:
    if divisor is None or divisor.zero is None or divisor.numel in (None, 1):
        return "The divisor is 0"
    name = f" ({divisor.name})" if divisor.name else ""
    return f"The divisor{name} is 0 in {fmt(divisor.zero)} of {fmt(divisor.numel)} places"


def _exponent(e: Evidence) -> float:
    return e.at.get("exponent", e.scalars.get("exponent", math.nan))


def logged(e: Evidence) -> Ruling | None:
    edge = LOGS.get(e.op)
    values = [v for v in e.at.values() if edge is not None and v <= edge]
    if edge is None or not values:
        return None
    if values[0] < edge:
        return Ruling("domain", f"{e.op} of {fmt(values[0])} is not defined: {many(e)}.", ("log",))
    if e.lost is not None:
        return Ruling("underflow", f"{e.op} of {fmt(edge)}: {many(e)}; {phrases.lost(e)}.", ("eps",))
    made = f" The zero comes from {e.zero_from}." if e.zero_from in VANISH else ""
    return Ruling("domain", f"{e.op} of {fmt(edge)}: {many(e)}.{made}", ("log",))


def domain(e: Evidence) -> Ruling | None:
    value = e.at.get("self")
    if e.op in DOMAINS and value is not None:
        lo, hi = DOMAINS[e.op]
        if not lo <= value <= hi or (value in (lo, hi) and e.op not in ("sqrt", "rsqrt")):
            beyond = min(abs(value - lo), abs(value - hi))
            edge = "exactly at the edge" if beyond == 0 else f"{fmt(beyond)} outside"
            ends = f"from {fmt(lo)} to {fmt(hi)}" if hi < math.inf else f"from {fmt(lo)} on"
            why = f"{e.op} of {fmt(value)}: it is defined {ends}, this is {edge} ({many(e)})."
            return Ruling("domain", why, (e.op,))
    if e.op == "pow" and "nan" in e.kinds and value is not None and value < 0:
        why = f"{fmt(value)} to the power of {fmt(_exponent(e))} is not a real number: {many(e)}."
        return Ruling("domain", why, ("pow",))
    if e.op.startswith(LINALG) and not e.inherited and phrases.largest_operand(e) < 1e18:
        why = f"{e.op} of a matrix that is singular, or not of the kind it needs: {many(e)}."
        return Ruling("domain", why, ("linalg",))
    if e.op.endswith("ctc_loss") and not e.inherited:
        why = f"{e.op}: no alignment exists; a target (with the blanks between repeats) is longer than its input."
        return Ruling("domain", why, ("ctc",))
    return None


def empty(e: Evidence) -> Ruling | None:
    """An average over nothing, a deviation of one."""
    if "nan" not in e.kinds or e.inherited:
        return None
    nothing = bool(e.tensors) and e.tensors[0].numel == 0
    if e.op in AVERAGES and (nothing or (e.count == 1 and e.op != "mean")):
        why = f"{e.op} over {'no numbers' if nothing else 'one number'} is not defined"
        why += "." if nothing else " (the unbiased form divides by n - 1 = 0)."
        return Ruling("empty_reduction", why, ("mean" if nothing else "std",))
    if e.op in LOSSES and phrases.largest_operand(e) < 1e30:
        why = f"{e.op.removesuffix('_forward')} averages over no elements: every target is ignored, or there are none."
        return Ruling("empty_reduction", why, ("loss",))
    if e.op == "native_batch_norm" and e.tensors and e.tensors[0].shape is not None:
        shape = e.tensors[0].shape
        if len(shape) > 1 and math.prod(shape) == shape[1]:
            why = f"{e.op} over one number a channel: its unbiased variance divides by n - 1 = 0."
            return Ruling("empty_reduction", why, ("std",))
    return None


def normed(e: Evidence) -> Ruling | None:
    if e.op == "weight_norm_interface" and not e.inherited:
        return Ruling("zero_division", f"g * v / ||v|| with a row of v that is zero: {many(e)}.", ("weight_norm",))
    if e.op not in NORMS or e.inherited or "nan" not in e.kinds:
        return None
    eps = e.scalars.get("eps", 0.0)
    var = next((t for t in e.tensors if t.role == "running_var"), None)
    if var is not None and var.min is not None and eps + var.min < 0:
        why = f"{e.op}: {var.name or 'running_var'} is negative ({fmt(var.min)})."
        return Ruling("domain", why, ("variance",))
    if phrases.largest_operand(e) > 1e18:
        why = f"{e.op}: the squares of {fmt(phrases.largest_operand(e))} leave the range."
        return Ruling("overflow", why, ("squares",))
    why = f"{e.op} of a constant row: variance 0, eps = {fmt(eps)}: 0 / 0 ({many(e)})."
    return Ruling("zero_division", why, ("norm_eps",))


def met_inf(e: Evidence) -> Ruling | None:
    if not (e.inherited and "nan" in e.kinds):
        return None
    if _multiplies(e):
        how = "0 * inf" if 0.0 in e.at.values() else "0 * inf or inf - inf"
    else:
        how = {"div": "inf / inf", "sub": "inf - inf", "add": "inf - inf"}.get(e.op, "what it makes of that")
    return Ruling("inf_arithmetic", f"{e.op} met an Inf ({phrases.operands(e)}), and {how} is NaN: {many(e)}.")


def exponential(e: Evidence) -> Ruling | None:
    base, form = EXPONENTIALS.get(e.op), format_of(e.dtype)
    if base is None or form is None or e.inherited:
        return None
    limit = math.log(form.max) / math.log(base)
    why = f"{e.op} of {fmt(e.at.get('self'))}: {e.dtype} holds {e.op}(x) up to x = {limit:.2f} ({many(e)})."
    return Ruling("overflow", why, ("exp",))


def cast(e: Evidence) -> Ruling | None:
    if e.op not in CASTS or e.inherited:
        return None
    size, form = next(iter(e.at.values()), e.magnitude), format_of(e.dtype)
    if form is None:
        return Ruling("overflow", f"{e.op} to a dtype that is too small: {many(e)}.", ("cast",))
    over = bits_over(size, e.dtype)
    by = f", {over:.2g} bits below" if over is not None and over > 0 else ""
    why = f"{fmt(size)} was cast to {e.dtype}, which ends at {fmt(form.max)}{by}: {many(e)}."
    return Ruling("overflow", why, ("cast",))


def large(e: Evidence) -> Ruling | None:
    """Finite operands, and a result or a step on the way that the dtype can't hold."""
    if e.inherited:
        return None
    if e.scaling:
        return Ruling("loss_scale", f"the loss times the loss scale left the range: {would_be(e)}.")
    infinite = "nan" not in e.kinds
    if infinite or phrases.too_large(e) or ((_multiplies(e) or e.op in SUMS) and e.exact is None):
        what = "left the range" if infinite else "left the range on the way"
        why = f"{e.op} {what}: {would_be(e)} ({phrases.operands(e)}; {many(e)})."
        return Ruling("overflow", why, (_family(e),))
    return None


def _family(e: Evidence) -> str:
    if _multiplies(e):
        return "range" if e.op in ("prod", "cumprod") else "product"
    if e.op in SUMS:
        return "squares" if "norm" in e.op or e.op.startswith(("var", "std")) else "sum"
    return "mask" if _masks(e) else "range"


def _multiplies(e: Evidence) -> bool:
    return e.op in PRODUCTS or e.op.startswith("scaled_dot_product")


def _masks(e: Evidence) -> bool:
    """Whether the dtype's own lowest number was added: a mask made of finfo.min."""
    form = format_of(e.dtype)
    return e.op in ("add", "sub") and form is not None and any(abs(v) >= 0.999 * form.max for v in e.at.values())


def last(e: Evidence) -> Ruling | None:
    if e.inherited:
        return None
    if e.exact is not None and math.isfinite(e.exact):
        why = f"{e.op}: float64 gives {fmt(e.exact)}, {e.dtype} rounds to zero on the way ({many(e)})."
        return Ruling("underflow", why)
    if "nan" in e.kinds:
        return Ruling("domain", f"{e.op} is not defined for {phrases.operands(e)}: {many(e)}.")
    return None


RULES = (rows, divided, logged, domain, empty, normed, met_inf, exponential, cast, large, last)
