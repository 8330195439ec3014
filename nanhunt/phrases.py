"""Evidence into phrases: how many, where, by how much."""

from __future__ import annotations

import math

from .evidence import Evidence
from .finding import TensorStats
from .numerics import bits_over, fmt, format_of


def op(e: Evidence) -> str:
    return f"the derivative of {e.forward}" if e.forward else e.op


def many(e: Evidence) -> str:
    """`nan in 3 of 12 numbers, first at [0, 2]`"""
    kinds = " and ".join(e.kinds)
    if e.bad is None or e.of is None or e.of == 1:
        return kinds
    first = f", first at {list(e.where)}" if e.where else ""
    return f"{kinds} in {fmt(e.bad)} of {fmt(e.of)} numbers{first}"


def operands(e: Evidence) -> str:
    """`self = 3, other = 0`, or ranges where no single number stands behind the bad one."""
    parts = [f"{role} = {fmt(value)}" for role, value in e.at.items()]
    if len(parts) < len(e.tensors) - 1:
        rows = [t for t in e.tensors[:-1] if t.absmax is not None]
        parts = [f"{t.name or t.role} within {fmt(t.min)} .. {fmt(t.max)}{_besides(t)}" for t in rows] or parts
    return ", ".join(parts[:4]) or "its operands"


def _besides(t: TensorStats) -> str:
    infinite = (t.pos_inf or 0) + (t.neg_inf or 0)
    return f" and {fmt(infinite)} Inf" if infinite else ""


def largest_exact(e: Evidence) -> float | None:
    """The size of what float64 gives for the bad numbers: of the first, or when that is bad too, of the largest."""
    if e.exact is not None and math.isfinite(e.exact):
        return e.exact
    return e.magnitude


def largest_operand(e: Evidence) -> float:
    return max((t.absmax for t in e.tensors[:-1] if t.absmax is not None), default=0.0)


def would_be(e: Evidence) -> str:
    """`the exact result is 71 280, 0.12 bits over the 65 504 of float16`"""
    form, size = format_of(e.dtype), largest_exact(e)
    over = bits_over(size, e.dtype) if size is not None else None
    if form is None:
        return "the dtype can't hold it"
    if size is None or over is None:
        return f"{e.dtype} ends at {fmt(form.max)}"
    if over <= 0:
        return f"the result, {fmt(size)}, would fit {e.dtype}, a step on the way to it does not"
    return f"the exact result is {fmt(size)}, {over:.2g} bits over the {fmt(form.max)} of {e.dtype}"


def too_large(e: Evidence) -> bool:
    """Whether float64 gets a number where the dtype can't hold it, or can't get to it."""
    form, size = format_of(e.dtype), largest_exact(e)
    if size is not None and form is not None:
        return abs(size) > form.max or largest_operand(e) ** 2 > form.max
    return e.exact is None and e.kinds[0] != "nan"


def lost(e: Evidence) -> str:
    """`the 1e-12 given to clamp_min (file.py:21) is 0 in float16`"""
    one = e.lost
    if one is None:
        return ""
    place = f" ({one.site[0].replace(chr(92), '/').rsplit('/', 1)[-1]}:{one.site[1]})" if one.site is not None else ""
    if one.beside is not None:
        return f"the {fmt(one.value)} given to {one.op}{place} is swallowed beside {fmt(one.beside)} in {one.dtype}"
    shown = repr(one.value) if one.becomes else fmt(one.value)
    return f"the {shown} given to {one.op}{place} is {fmt(one.becomes)} in {one.dtype}"


def trap(e: Evidence) -> str:
    """What throws the bad forward value away, which does not stop its gradient."""
    if not e.absorbed_by:
        return ""
    by = " and ".join(e.absorbed_by[:2])
    return f" In forward the value is thrown away by {by}; its gradient is computed all the same."


def autocast(e: Evidence) -> str:
    if e.autocast is None:
        return ""
    if e.given is None:
        return f" Autocast is on, and the operands are {e.autocast} by now."
    return f" The operands are {e.given}; autocast computes this op in {e.autocast}."
