"""The calls before the fault, as a table in which growth is seen."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..finding import Call, Finding
from ..numerics import Format, fmt, format_of
from .axis import Axis, log2
from .lines import elide
from .markup import Markup, join, percent, tag, words
from .words import call_name, growth, known

HOW_TO_READ = (
    "The largest number that went into each call (ring) and that came out (dot), oldest call first; dots that wander "
    "to the right are numbers that grow. A cross at the end is a NaN or an infinity."
)

_HEIGHT, _MIDDLE = 28, 14
_ZERO, _FINITE, _BEYOND = 1.5, 95.0, 98.5  # places of zero, of the end of the axis, of what is not finite
_NEAR = 12.0  # bits: so near to its end a format is drawn


def trail(finding: Finding, calls: Sequence[Call]) -> Markup | None:
    """A row for each call: module, largest number in and out, growth, and both numbers on a common axis."""
    if not calls:
        return None
    sizes = [e for call in calls for n in (call.absmax_in, call.absmax_out) if (e := log2(n)) is not None]
    limits = _limits(finding, max(sizes)) if sizes else []
    axis = Axis.around((*sizes, *(math.log2(form.max) for form in limits)), pad=0.7, width=_FINITE)
    ends = [tag("p", *(words("span", f"{form.name} ends at {fmt(form.max)}") for form in limits), class_="quiet")]
    heads = [words("th", head, scope="col") for head in ("call", "in", "out", "growth")]
    return tag(
        "table",
        tag("thead", tag("tr", *heads, tag("th", *(ends if limits else []), scope="col", class_="chart"))),
        tag("tbody", *(_row(calls, at, axis, limits) for at in range(len(calls)))),
        tag("tfoot", tag("tr", tag("td", colspan=4), tag("td", axis.drawing(10), class_="chart"))),
        class_="trail",
    )


def _limits(finding: Finding, largest: float) -> list[Format]:
    """The formats of the finding's tensors, and float16, where the calls come near to their ends."""
    forms = {form.name: form for row in finding.tensors if (form := format_of(row.dtype)) is not None}
    half = format_of("float16")
    assert half is not None
    forms.setdefault(half.name, half)
    return [form for form in forms.values() if math.log2(form.max) - _NEAR < largest][:3]


def _row(calls: Sequence[Call], at: int, axis: Axis, limits: Sequence[Format]) -> Markup:
    call = calls[at]
    nth = f"call {fmt(call.call)}" if call.call is not None and call.call > 1 else ""
    kind = ", ".join(part for part in (call.module_type, call.phase if call.phase != "forward" else "", nth) if part)
    factor = growth(call).replace("x ", "\N{MULTIPLICATION SIGN} ")
    path = elide(call_name(call), 160)
    front, dot, back = path.rpartition(".")
    code = tag("code", words("span", front + dot) if dot else None, words("b", back), title=path)
    name = tag("th", tag("div", code, words("span", elide(kind, 80), class_="quiet")), scope="row")
    return tag(
        "tr",
        name,
        words("td", known(call.absmax_in), class_="number bad" if _bad(call.absmax_in) else "number"),
        words("td", known(call.absmax_out), class_="number bad" if _bad(call.absmax_out) else "number"),
        words("td", factor, class_="number"),
        tag("td", _drawing(calls, at, axis, limits), class_="chart"),
    )


def _bad(number: float | None) -> bool:
    return number is not None and not math.isfinite(number)


def _x(number: float | None, axis: Axis) -> float | None:
    """Where a number stands; zero at the start, None when it is not known."""
    if number is None:
        return None
    exponent = log2(number)
    return axis.place(exponent) if exponent is not None else _ZERO if number == 0 else _BEYOND


def _drawing(calls: Sequence[Call], at: int, axis: Axis, limits: Sequence[Format]) -> Markup:
    call = calls[at]
    begin, end = _x(call.absmax_in, axis), _x(call.absmax_out, axis)
    parts = [_line(x, 0, x, _HEIGHT, "limit") for form in limits for x in [axis.place(math.log2(form.max))]]
    here = end if end is not None else begin
    # Halves of the lines from what the call before gave out, and to what the next one does: they meet between rows.
    for other, y in ((at - 1, 0), (at + 1, _HEIGHT)):
        if here is not None and 0 <= other < len(calls):
            there = _x(calls[other].absmax_out, axis)
            if there is not None:
                parts.append(_line((here + there) / 2, y, here, _MIDDLE, "trace"))
    if begin is not None and end is not None:
        parts.append(_line(begin, _MIDDLE, end, _MIDDLE, "step"))
    if begin is not None:
        parts.append(_mark(begin, "in", bad=_bad(call.absmax_in)))
    if end is not None:
        parts.append(_mark(end, "out", bad=_bad(call.absmax_out)))
    given, gave = known(call.absmax_in) or "not known", known(call.absmax_out) or "not known"
    said = f"{elide(call_name(call), 80)}: in {given}, out {gave}"
    return tag("svg", words("title", said), join(*parts), width="100%", height=_HEIGHT, role="img", aria_label=said)


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> Markup:
    return tag("line", x1=percent(x1), y1=y1, x2=percent(x2), y2=y2, class_=kind)


def _mark(x: float, kind: str, *, bad: bool) -> Markup:
    if not bad:
        return tag("circle", cx=percent(x), cy=_MIDDLE, r=4 if kind == "in" else 4.5, class_=kind)
    cross = tag("path", d="M-4 -4L4 4M-4 4L4 -4", class_="cross")
    return tag("svg", cross, x=percent(x), y=_MIDDLE, width=1, height=1, overflow="visible")
