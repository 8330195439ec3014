"""Curves as drawings of a page: range and median on common steps, where they are bad, and what happened when."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from ..symptoms.course import Curve
from .extent import Point, Scale, Span, runs, spoilt_stretches, stairs, step_text, thinned, values
from .markup import Markup, join, percent, tag, words

_POINTS, _DOTS = 300, 60  # of a curve at most; so few are drawn as dots, too
_WIDE, _HIGH, _MARGIN = 2000, 1000, 8  # units of a path across and down; pixels above and below it
_LETTERS = 22  # pixels: labels of a scale are no closer than this
_CROSSES, _EVENTS = 12, 200
_TICKS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Lines:
    """What goes through all drawings from top to bottom: places of symptoms, the first one first, and of events."""

    symptoms: Sequence[float] = ()
    events: Sequence[float] = ()


def drawing(name: str, curve: Curve, span: Span, lines: Lines, *, said: str, high: int) -> Markup:
    """A curve of `high` pixels and the labels of its scale; `said` tells it to those who do not see it."""
    pieces = runs(curve)
    scale = Scale.of(values(pieces), name)
    here = lines.symptoms[0] if lines.symptoms else None
    inside = [*_bad(pieces, span, here, high), *_through(span, lines, high)]
    if scale is None:
        return join(_labels((), high), _svg(inside, high, said))
    room = high - 2 * _MARGIN
    labels = [(_MARGIN + room * (1 - scale.place(n)), text) for n, text in scale.texts(_LETTERS / room)]
    grid = [tag("line", x1="0%", x2="100%", y1=round(y, 1), y2=round(y, 1), class_="grid") for y, _ in labels]
    shapes = []
    for n, points in enumerate(pieces):
        past = " past" if n + 1 < len(pieces) else ""
        shapes += list(_shapes(thinned(points, max(_POINTS // len(pieces), 2)), span, scale, past, stairs(name)))
    paths = tag(
        "svg",
        *shapes,
        x=0,
        y=_MARGIN,
        width="100%",
        height=room,
        viewBox=f"0 0 {_WIDE} {_HIGH}",
        preserveAspectRatio="none",
        overflow="visible",
    )
    return join(_labels(labels, high), _svg([*grid, *inside, paths, *_crosses(pieces, span, here)], high, said))


def flags(told: Sequence[tuple[float, str]], span: Span) -> Markup:
    """Where the symptoms begin, in words above the drawings, a row for each."""
    lines, texts = [], []
    high = 18 * len(told) + 4
    for n, (step, text) in enumerate(told):
        x, y = percent(100 * span.place(step)), 18 * n + 13
        kind = "flag" if n == 0 else "flag other"
        place = span.place(step)
        anchor, beside = ("start", 5) if place < 1 / 3 else ("end", -5) if place > 2 / 3 else ("middle", 0)
        texts.append(words("text", text, x=x, y=y, dx=beside, text_anchor=anchor, class_=kind))
        # In the middle a text stands on its line, which begins below it.
        lines.append(tag("line", x1=x, x2=x, y1=y - 9 if beside else y + 4, y2=high, class_=f"{kind} through"))
    drawn = tag("svg", *lines, *texts, width="100%", height=high, aria_hidden="true", class_="flags")
    return join(words("span", "", class_="beside"), drawn)


def lane(name: str, steps: Sequence[float], span: Span, lines: Lines, *, said: str) -> Markup:
    """The events of one kind, a mark for each."""
    shown = [step for step in steps if span.holds(step)]
    places = sorted({percent(100 * span.place(step)) for step in shown}, key=lambda x: float(x.rstrip("%")))
    thin = -(-len(places) // _EVENTS)
    marks = [tag("line", x1=x, x2=x, y1=4, y2=14, class_="event") for x in places[::thin]] if places else []
    label = tag("span", words("span", name), class_="beside")
    return join(label, _svg([*_through(span, Lines(symptoms=lines.symptoms), 18), *marks], 18, said))


def foot(span: Span) -> Markup:
    """The axis of steps."""
    marks = [tag("line", x1="0%", x2="100%", y1=0.5, y2=0.5, class_="tick")]
    steps = list(span.ticks(_TICKS)) or [span.first]
    if span.place(steps[-1]) < 0.85:
        steps.append(span.last)
    for step in steps:
        x = percent(100 * span.place(step))
        marks.append(tag("line", x1=x, x2=x, y1=0, y2=5, class_="tick"))
        anchor = "start" if span.place(step) < 0.06 else "end" if span.place(step) > 0.94 else "middle"
        marks.append(words("text", step_text(step), x=x, y=18, text_anchor=anchor, class_="label"))
    label = words("span", "step", class_="beside")
    return join(label, tag("svg", *marks, width="100%", height=22, aria_hidden="true"))


def _svg(inside: Iterable[Markup], high: int, said: str) -> Markup:
    return tag("svg", words("title", said), *inside, width="100%", height=high, role="img", aria_label=said)


def _labels(labels: Sequence[tuple[float, str]], high: int) -> Markup:
    texts = (words("text", text, x="100%", y=round(y + 4, 1), text_anchor="end") for y, text in labels)
    return tag("svg", *texts, width="100%", height=high, aria_hidden="true", class_="beside")


def _through(span: Span, lines: Lines, high: int) -> Iterator[Markup]:
    kinds = [*((step, "event through") for step in lines.events)]
    kinds += [(step, "flag other through" if n else "flag through") for n, step in enumerate(lines.symptoms)]
    for step, kind in kinds:
        if span.holds(step):
            x = percent(100 * span.place(step))
            yield tag("line", x1=x, x2=x, y1=0, y2=high, class_=kind)


# -- what is bad ---------------------------------------------------------------------------------------------


def _bad(pieces: Sequence[Sequence[Point]], span: Span, here: float | None, high: int) -> Iterator[Markup]:
    for first, end in list(spoilt_stretches(pieces, here))[:_EVENTS]:
        left, right = 100 * span.place(first), 100 * span.place(end)
        yield tag("rect", x=percent(left), width=percent(max(right - left, 0.3)), y=0, height=high, class_="spoilt")


def _crosses(pieces: Sequence[Sequence[Point]], span: Span, here: float | None) -> Iterator[Markup]:
    for first, _ in list(spoilt_stretches(pieces, here))[:_CROSSES]:
        cross = tag("path", d="M-4 -4L4 4M-4 4L4 -4", class_="cross")
        yield tag("svg", cross, x=percent(100 * span.place(first)), y=_MARGIN, width=1, height=1, overflow="visible")


# -- paths ---------------------------------------------------------------------------------------------------


def _shapes(points: Sequence[Point], span: Span, scale: Scale, past: str, steps: bool) -> Iterator[Markup]:
    """Of each piece without a gap: the band from least to largest number, the line of medians, dots where few."""

    def at(step: float, number: float | None) -> tuple[int, int]:
        return round(_WIDE * span.place(step)), round(_HIGH * (1 - scale.place(number or 0.0)))

    piece: list[Point] = []
    for point in [*points, None]:
        if point is not None and point.mid is not None:
            piece.append(point)
            continue
        if piece:
            if any(one.low != one.high for one in piece):
                upper = [at(one.at, one.high) for one in piece]
                lower = [at(one.at, one.low) for one in piece]
                yield _path([*upper, *reversed(lower)], f"band{past}", closed=True)
            line = [at(one.at, one.mid) for one in piece]
            if steps:
                line = [line[0], *(corner for a, b in itertools.pairwise(line) for corner in ((b[0], a[1]), b))]
            yield _path(line if len(line) > 1 else line * 2, f"median{past}" if len(line) > 1 else f"dot{past}")
            if len(piece) > 1 and len(points) <= _DOTS:
                for one in piece:
                    yield _path([at(one.at, one.mid)] * 2, f"dot{past}")
        piece = []


def _path(places: Sequence[tuple[int, int]], kind: str, *, closed: bool = False) -> Markup:
    # Numbers alone, so there is nothing to escape; an attribute of `tag` would be cut where it is long.
    first, *rest = (f"{x} {y}" for x, y in places)
    return Markup(f'<path d="M{first}L{" ".join(rest)}{"Z" if closed else ""}" class="{kind}"></path>')
