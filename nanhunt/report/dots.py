"""Curves on a terminal: braille dots on common steps, plain characters where braille cannot be shown."""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..symptoms.course import Curve
from .extent import Point, Scale, Span, runs, spoilt_stretches, stairs, step_text, thinned, values
from .lines import cells, elide, head
from .paint import Paint

_NARROW = 6  # dots
_APART = 0.2  # of its height: labels of a scale are no closer than this
_LABEL = 12  # columns of what stands on the left, at most


@dataclass(frozen=True, slots=True)
class _Glyphs:
    """The characters of a chart; `across` and `down` are the dots of one character."""

    across: int
    down: int
    side: str
    corner: str
    floor: str
    bad: str
    here: str
    foot: str
    event: str


_BRAILLE = _Glyphs(2, 4, "│", "└", "─", "\N{MULTIPLICATION SIGN}", "┊", "▲", "•")
_ASCII = _Glyphs(1, 2, "|", "+", "-", "x", "|", "^", "*")
# https://www.unicode.org/charts/PDF/U2800.pdf: the bit of each dot, by column and row
_BITS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
_HALVES = {(True, False): "'", (False, True): ".", (True, True): ":"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """One curve to draw: `name` as the course has it, `label` and `told` as they stand above it, height in lines."""

    name: str
    label: str
    told: str
    curve: Curve
    height: int


def can_show() -> bool:
    """Whether standard output has these characters in its encoding."""
    drawn = (value for value in dataclasses.astuple(_BRAILLE) if isinstance(value, str))
    every = "".join(drawn) + "\u28ff"
    try:
        every.encode(getattr(sys.stdout, "encoding", None) or "utf-8")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def draw(
    shown: Sequence[Chart],
    span: Span,
    *,
    here: float | None,
    lanes: Sequence[tuple[str, Sequence[float]]],
    width: int,
    paint: Paint,
    braille: bool,
) -> list[str]:
    """The charts below each other, on one axis of steps; none is wider than `width` columns.

    `here` is a step that is marked through all of them; `lanes` are events, a line for each kind.
    """
    glyphs = _BRAILLE if braille else _ASCII
    scales = [Scale.of(values(runs(chart.curve)), chart.name) for chart in shown]
    labels = [text for scale in scales if scale is not None for _, text in scale.texts(_APART)]
    left = min(max(map(cells, [*labels, "nan/inf", *(name for name, _ in lanes)])), _LABEL)
    columns = max(width - left - 2, 8)
    stop = _column(here, span, columns) if here is not None and span.holds(here) else None
    marks = re.compile(f"[{re.escape(glyphs.bad + glyphs.here + glyphs.foot)}]+")

    def line(label: str, row: list[str]) -> str:
        if stop is not None and row[stop] == " ":
            row[stop] = glyphs.here
        label = elide(label, left)
        text = marks.sub(lambda found: paint("red", found[0]), "".join(row).rstrip())
        return f"{' ' * (left - cells(label))}{label} {glyphs.side}{text}".rstrip()

    lines: list[str] = []
    for chart, scale in zip(shown, scales):
        label = head(chart.label, width)
        lines.append(paint("bold", label) + elide(f"  {chart.told}".rstrip(), width - cells(label)))
        pieces = runs(chart.curve)
        spoilt = _spoilt(pieces, span, here, columns)
        if spoilt:
            lines.append(line("nan/inf", [glyphs.bad if n in spoilt else " " for n in range(columns)]))
        if scale is None:
            continue
        beside = {round((1 - scale.place(n)) * (chart.height - 1)): text for n, text in scale.texts(_APART)}
        size = columns, chart.height
        rows = _cells(_lit(pieces, span, scale, size, glyphs, stairs(chart.name)), size, glyphs)
        lines += [line(beside.get(n, ""), row) for n, row in enumerate(rows)]
    for name, steps in lanes:
        at = {_column(step, span, columns) for step in steps if span.holds(step)}
        lines.append(line(name, [glyphs.event if n in at else " " for n in range(columns)]))
    floor = [glyphs.floor] * columns
    if stop is not None:
        floor[stop] = paint("red", glyphs.foot)
    lines.append(f"{' ' * left} {glyphs.corner}{''.join(floor)}")
    lines.append(" " * (left + 2) + _foot(span, here, stop, columns, paint))
    return lines


def _spoilt(pieces: Sequence[Sequence[Point]], span: Span, here: float | None, columns: int) -> set[int]:
    """The columns in which something is NaN or Inf."""
    return {
        column
        for first, last in spoilt_stretches(pieces, here)
        for column in range(_column(first, span, columns), _column(last, span, columns) + 1)
    }


def _column(step: float, span: Span, columns: int) -> int:
    return round(span.place(step) * (columns * 2 - 1)) // 2


def _foot(span: Span, here: float | None, stop: int | None, columns: int, paint: Paint) -> str:
    """Step numbers below the axis: the marked one, then the first and the last where there is room left."""
    row = [" "] * columns
    taken: set[int] = set()

    def put(text: str, begin: int) -> int | None:
        begin = min(max(begin, 0), columns - len(text))
        near = set(range(begin - 1, begin + len(text) + 1))
        if begin < 0 or near & taken:
            return None
        row[begin : begin + len(text)] = text
        taken.update(near)
        return begin

    marked = step_text(here) if stop is not None and here is not None else ""
    at = put(marked, stop - len(marked) // 2) if stop is not None else None
    put(step_text(span.first), 0 if span.first != span.last else columns // 2)
    put(step_text(span.last), columns)
    if at is None:
        return "".join(row).rstrip()
    end = at + len(marked)
    return f"{''.join(row[:at])}{paint('red', marked)}{''.join(row[end:])}".rstrip()


def _lit(
    pieces: Sequence[Sequence[Point]], span: Span, scale: Scale, size: tuple[int, int], glyphs: _Glyphs, steps: bool
) -> set[tuple[int, int]]:
    """The dots of a curve, as (x, y) from the upper left: a line along the medians, the ends of their ranges."""
    wide, high = size[0] * glyphs.across, size[1] * glyphs.down
    lit: set[tuple[int, int]] = set()

    def row(number: float) -> int:
        return round((1 - scale.place(number)) * (high - 1))

    for points in pieces:
        before: tuple[int, int] | None = None
        for point in thinned(points, wide):
            if point.mid is None or point.low is None or point.high is None:
                before = None
                continue
            at = round(span.place(point.at) * (wide - 1)), row(point.mid)
            top, bottom = row(point.high), row(point.low)
            # A wide range would hide the line: its ends are enough.
            lit.update((at[0], y) for y in (range(top, bottom + 1) if bottom - top < _NARROW else (top, bottom)))
            corner = (at[0], before[1]) if before and steps else at
            lit.update(_between(before or at, corner))
            lit.update(_between(corner, at))
            before = at
    return lit


def _between(one: tuple[int, int], other: tuple[int, int]) -> Iterator[tuple[int, int]]:
    """The dots of a straight line."""
    (x, y), (to_x, to_y) = one, other
    most = max(abs(to_x - x), abs(to_y - y))
    for n in range(most + 1):
        part = n / most if most else 0.0
        yield round(x + (to_x - x) * part), round(y + (to_y - y) * part)


def _cells(lit: set[tuple[int, int]], size: tuple[int, int], glyphs: _Glyphs) -> list[list[str]]:
    rows = [[0] * size[0] for _ in range(size[1])]
    for x, y in lit:
        bit = _BITS[x % glyphs.across][y % glyphs.down] if glyphs is _BRAILLE else 1 << y % glyphs.down
        rows[y // glyphs.down][x // glyphs.across] |= bit
    if glyphs is _BRAILLE:
        return [[chr(0x2800 + bits) if bits else " " for bits in row] for row in rows]
    return [[_HALVES[bool(bits & 1), bool(bits & 2)] if bits else " " for bits in row] for row in rows]
