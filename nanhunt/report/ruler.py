"""Where the numbers of each tensor lie, on one ruler of powers of two, beside what the formats hold."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..finding import Finding, TensorStats
from ..numerics import COMPARED, FORMATS, Format, fmt, format_of
from .axis import LARGEST, SMALLEST, Axis, log2
from .lines import elide
from .markup import Markup, join, percent, tag, words
from .words import bits, is_bad, notation, row_name, share
from .words import percent as part

_NARROW = ("float16", "float8_e4m3fn", "float8_e5m2")  # formats that are always on the ruler from end to end
_NEAR = 16.0  # bits: from so close on, the end of a wide format is on it too
HOW_TO_READ = (
    "Powers of two. Upper rows: what each format holds (smallest \N{MIDDLE DOT} smallest normal … largest number), "
    "pale where it is subnormal. Below, for each tensor: the bar is its range of sizes, the columns count its numbers "
    "by exponent (their height is the logarithm of the count), the shade is what its own dtype holds, and thin lines "
    "are the ends of the other formats."
)
_NAME, _COLUMNS = 120, 72  # letters of a name, columns of a histogram at most
_HEIGHT, _BASE, _BAR = 46, 36, 7  # of a drawing: its foot, and the bar below the histogram


def rulers(finding: Finding, rows: Sequence[TensorStats]) -> Markup | None:
    """A drawing for each format and each tensor, all on the same axis; None when nothing is known of any."""
    rows = [row for row in rows if row.absmax is not None or row.exponents is not None or is_bad(row)]
    if not rows:
        return None
    axis = _axis(rows)
    own = dict.fromkeys(form.name for row in rows if (form := format_of(row.dtype)) is not None)
    formats = [FORMATS[name] for name in (*COMPARED, *(name for name in own if name not in COMPARED))]
    return join(
        tag("div", *(_format(form, axis) for form in formats), class_="formats"),
        *(_tensor(row, elide(row_name(row, finding), _NAME), axis) for row in rows),
        axis.drawing(2),
    )


def _ends(form: Format) -> tuple[float, float, float]:
    """Exponents of the smallest number, the smallest normal one, and the largest."""
    return math.log2(form.smallest_subnormal), math.log2(form.smallest_normal), math.log2(form.max)


def _axis(rows: Sequence[TensorStats]) -> Axis:
    held = [end for name in _NARROW for end in _ends(FORMATS[name])]
    for row in rows:
        held += [e for number in (row.smallest_nonzero, row.absmax) if (e := log2(number)) is not None]
        if row.exponents is not None:
            first, counts = _histogram(row)
            held += [float(first), float(first + len(counts))] if counts else []
    lo, hi = min(held), max(held)
    for name in dict.fromkeys((*COMPARED, *(str(row.dtype) for row in rows))):
        form = format_of(name)
        if form is not None:
            smallest, normal, largest = _ends(form)
            hi = largest if largest - _NEAR < hi < largest else hi
            lo = smallest if smallest < lo < normal + _NEAR else lo
    return Axis.around((lo, hi), pad=(hi - lo) / 40 + 1)


def _format(form: Format, axis: Axis) -> Markup:
    said = (
        f"{form.name}: smallest number {fmt(form.smallest_subnormal)}, smallest normal number "
        f"{fmt(form.smallest_normal)}, largest {fmt(form.max)}"
    )
    numbers = f"{fmt(form.smallest_subnormal)} \N{MIDDLE DOT} {fmt(form.smallest_normal)} … {fmt(form.max)}"
    label = tag("p", words("b", form.name), words("span", numbers, class_="quiet"), class_="name")
    drawing = join(words("title", said), _band(form, axis, 1, 8))
    return tag("div", label, tag("svg", drawing, width="100%", height=10, role="img", aria_label=said), class_="scale")


def _band(form: Format, axis: Axis, y: float, height: float) -> Markup:
    """What a format holds: subnormal numbers pale, normal ones full, arrows where it goes on beyond the ruler."""
    smallest, normal, largest = (axis.place(end) for end in _ends(form))
    parts = [
        _rect(smallest, normal, y, height, "subnormal"),
        _rect(normal, largest, y, height, "normal"),
    ]
    if _ends(form)[2] > axis.hi:
        parts.append(_arrow("100%", y + height / 2, "beyond", right=True))
    if _ends(form)[0] < axis.lo:
        parts.append(_arrow("0%", y + height / 2, "beyond", right=False))
    return join(*parts)


def _tensor(row: TensorStats, name: str, axis: Axis) -> Markup:
    said = _said(row, name)
    facts = [
        words("b", name),
        words("code", notation(row)) if row.dtype else None,
        *(words("span", bad, class_="chip") for bad in _bad(row)),
        words("span", _range(row), class_="quiet"),
    ]
    form = format_of(row.dtype)
    lo, hi = log2(row.smallest_nonzero), log2(row.absmax)
    parts = [
        _band(form, axis, 2, _BASE - 2) if form is not None else None,
        join(*(_limits(FORMATS[other], axis) for other in COMPARED)),
        _bars(row, form, axis),
    ]
    if lo is not None and hi is not None:
        left, right = axis.place(lo), axis.place(hi)
        parts.append(_rect(left, max(right, left + 0.4), _BASE + 2, _BAR, "range"))
    elif hi is not None:  # only the largest is known
        parts.append(tag("circle", cx=percent(axis.place(hi)), cy=_BASE + 2 + _BAR / 2, r=3.5, class_="range"))
    if row.pos_inf or row.neg_inf:
        parts.append(_arrow("100%", _BASE + 2 + _BAR / 2, "bad", right=True))
    drawing = join(words("title", said), *parts)
    return tag(
        "div",
        tag("p", *facts, class_="name"),
        tag("svg", drawing, width="100%", height=_HEIGHT, role="img", aria_label=said),
        class_="scale tensor bad" if is_bad(row) else "scale tensor",
    )


def _limits(form: Format, axis: Axis) -> Markup:
    _, normal, largest = _ends(form)
    marks = ((normal, f"{form.name}: smallest normal"), (largest, f"{form.name}: largest"))
    return join(
        *(
            tag("line", words("title", said), x1=x, x2=x, y1=2, y2=_BASE, class_="limit")
            for exponent, said in marks
            if axis.holds(exponent)
            for x in [percent(axis.place(exponent))]
        )
    )


def _histogram(row: TensorStats) -> tuple[int, tuple[int, ...]]:
    """The part of a histogram that a float64 could have."""
    if row.exponents is None:
        return 0, ()
    first, counts = row.exponents
    skipped = max(0, int(SMALLEST) - first)
    return max(first, int(SMALLEST)), counts[skipped : max(0, int(LARGEST) - first)]


def _bars(row: TensorStats, form: Format | None, axis: Axis) -> Markup | None:
    first, counts = _histogram(row)
    most = max(counts, default=0)
    if most <= 0:
        return None
    wide = -(-len(counts) // _COLUMNS)  # exponents to a column, one as long as there is room
    bars = []
    for at in range(0, len(counts), wide):
        exponent, count = first + at, max(counts[at : at + wide])
        if count <= 0:
            continue
        height = 3 + (_BASE - 7) * math.log1p(count) / math.log1p(most)
        tiny = form is not None and exponent < _ends(form)[1]
        left, right = axis.place(exponent), axis.place(exponent + wide)
        said = f"{'up to ' if wide > 1 else ''}{fmt(count)} between 2^{exponent} and 2^{exponent + wide}"
        bars.append(
            tag(
                "rect",
                words("title", said),
                x=percent(left),
                width=percent((right - left) * 0.88),
                y=round(_BASE - height, 1),
                height=round(height, 1),
                class_="count tiny" if tiny else "count",
            )
        )
    return join(*bars)


def _rect(left: float, right: float, y: float, height: float, kind: str) -> Markup:
    return tag("rect", x=percent(left), width=percent(max(right - left, 0)), y=y, height=height, class_=kind)


def _arrow(x: str, y: float, kind: str, *, right: bool) -> Markup:
    """An arrow head with its tip at `x`."""
    back = -8 if right else 8
    head = tag("path", d=f"M0 0L{back} -5L{back} 5Z", class_=kind)
    return tag("svg", head, x=x, y=y, width=1, height=1, overflow="visible")


# -- in words ------------------------------------------------------------------------------------------------


def _bad(row: TensorStats) -> list[str]:
    counts = ((row.nan, "nan"), (row.pos_inf, "+inf"), (row.neg_inf, "-inf"))
    return [f"{fmt(n)} {kind}" for n, kind in counts if n]


def _range(row: TensorStats) -> str:
    facts = []
    if row.absmax is not None:
        low = f"{fmt(row.smallest_nonzero)} … " if row.smallest_nonzero is not None else "up to "
        facts.append("all zero" if row.absmax == 0 else f"{low}{fmt(row.absmax)}")
    if zero := share(row.zero, row.numel):
        facts.append(f"{zero} zero")
    if below := part(row.below_normal):
        facts.append(f"{below} subnormal")
    if row.headroom_bits is not None and row.absmax:
        facts.append(f"headroom {bits(row.headroom_bits)} bits")
    return " \N{MIDDLE DOT} ".join(facts)


def _said(row: TensorStats, name: str) -> str:
    facts = _range(row).replace(" … ", " to ").replace(" \N{MIDDLE DOT} ", ", ")
    return f"{name}, {row.dtype or 'dtype unknown'}: {', '.join([*_bad(row), facts])}"
