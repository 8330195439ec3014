"""Rules for what is born in backward and in the update; arithmetic that both share is judged by the forward rules."""

from __future__ import annotations

import math

from . import phrases
from .evidence import Evidence
from .families import DIVIDES, GUARDS, LOGS, PRODUCTS, SINGULAR
from .forward_rules import Ruling
from .numerics import fmt, format_of
from .phrases import many, would_be

# What to do about a derivative, where it is not what is done about the op itself.
_POINTS = {
    "std": "constant_std", "std_mean": "constant_std", "atan2": "origin", "hypot": "origin",
    "linalg_eigh": "spectrum", "linalg_eig": "spectrum", "linalg_svd": "spectrum",
    "linalg_qr": "linalg", "linalg_cholesky_ex": "linalg", "linalg_inv_ex": "linalg", "linalg_det": "linalg",
    "linalg_solve_ex": "linalg", "linalg_slogdet": "linalg", "log_softmax": "logsumexp", "softmax": "logsumexp",
    "weight_norm_interface": "weight_norm", "log2": "log", "log10": "log", "log1p": "log",
}  # fmt: skip
_DIVISIONS = ("div", "reciprocal", "true_divide", "divide")


def optimizer(e: Evidence) -> Ruling | None:
    """A learning rate, or another number of the update, that is not finite."""
    if e.phase != "optimizer":
        return None
    odd = ", ".join(f"{role} = {fmt(value)}" for role, value in e.scalars.items() if not math.isfinite(value))
    if not odd:
        return None
    why = f"{e.op} of the update was given {odd}: the learning rate, or a number made from it, is not finite."
    return Ruling("optimizer", why)


def accumulated(e: Evidence) -> Ruling | None:
    """Finite gradients whose sum in `.grad` is not."""
    if e.phase != "backward" or e.forward is not None or e.op != "add" or e.user_code or e.inherited:
        return None
    parts = " and ".join(fmt(v) for v in e.at.values()) or "finite parts"
    return Ruling("overflow", f"each gradient is finite ({parts}), their sum is not: {would_be(e)}.", ("accumulate",))


def singular(e: Evidence) -> Ruling | None:
    """The derivative is not defined at this point."""
    if e.phase != "backward" or e.forward is None or not _singular(e):
        return None
    if e.forward in _DIVISIONS:
        if GUARDS.intersection(e.absorbed_by):
            return Ruling("singular_gradient", f"the divisor is 0 there: {many(e)}.", ("where",))
        why = f"the derivative of {e.forward} divides by a zero: {many(e)}."
        return Ruling("zero_division", why, ("divisor",))
    point = SINGULAR.get(e.forward, "at this point")
    why = f"the derivative of {e.forward} is not defined {point}: {many(e)}."
    if e.op in DIVIDES and e.at.get("self") == 0 and "nan" in e.kinds:
        why += " The gradient that came back there is 0, and 0 * inf is NaN."
    if e.lost is not None:
        why += f" The zero: {phrases.lost(e)}."
    special = ("double", e.forward) if GUARDS.intersection(e.absorbed_by) else (_POINTS.get(e.forward, e.forward),)
    return Ruling("singular_gradient", why, ("eps", *special) if e.lost is not None else special)


def _singular(e: Evidence) -> bool:
    assert e.forward is not None
    below = DIVIDES.get(e.op)
    if below is not None and e.at.get(below) == 0:
        return True
    if (e.op == "pow" or e.op in LOGS) and e.at.get("self") == 0:
        return True
    if e.forward in SINGULAR and e.forward not in ("prod",):
        if e.inherited and "nan" in e.kinds:
            return True
        # Decompositions have a backward of their own, which divides inside.
        if e.forward.startswith("linalg_") or e.op.endswith("backward"):
            return not phrases.too_large(e)
    return False


def met_inf(e: Evidence) -> Ruling | None:
    if e.phase == "backward" and e.inherited and "nan" in e.kinds:
        return Ruling("inf_arithmetic", f"{phrases.op(e)} met an Inf ({phrases.operands(e)}): {many(e)}.")
    return None


def gradient_overflow(e: Evidence) -> Ruling | None:
    """A gradient left the range; with a loss scale, perhaps only because of that."""
    if e.phase != "backward" or e.forward is None or e.inherited:
        return None
    if "nan" in e.kinds and not (phrases.too_large(e) or e.op in PRODUCTS):
        return None
    size, form = phrases.largest_exact(e), format_of(e.dtype)
    if e.loss_scale and size is not None and form is not None:
        worst = max(abs(size), e.magnitude or 0.0)
        if worst / e.loss_scale <= form.max:
            plain = fmt(size / e.loss_scale)
            why = f"{phrases.op(e)}: {would_be(e)}. Without the loss scale of {fmt(e.loss_scale)} it would be {plain}."
            return Ruling("loss_scale", why)
    return Ruling("overflow", f"{phrases.op(e)} left the range: {would_be(e)} ({many(e)}).", ("gradient",))


RULES = (optimizer, accumulated, singular, met_inf, gradient_overflow)
