"""A course as a page for a terminal: the verdict, what to do, the numbers behind it, and its curves."""

from __future__ import annotations

import shutil
from collections.abc import Sequence

from ..symptoms.course import Course, Curve
from ..symptoms.steps import Symptom
from .course_words import (
    curve_name,
    facts,
    healthy,
    in_order,
    lanes,
    many_runs,
    mark,
    reading,
    span,
    spoilt,
    state,
    title,
    told,
    unknown,
    verdict,
)
from .dots import Chart, can_show, draw
from .extent import runs, values
from .lines import elide, wrap
from .paint import Paint, painter
from .table import Column, table

_WIDEST = 100
# How many lines a section may take, or how many of its kind it may hold.
_TITLE, _CAUSE, _ADVICE, _EVIDENCE, _STATE, _SCALE, _OTHERS, _REMARKS, _UNKNOWN = 3, 6, 12, 14, 11, 5, 4, 8, 3
_LANES, _METRICS = 3, 2
_HEIGHTS = {"loss": 6, "loss_scale": 3}  # of the charts, in lines


def page(course: Course, *, color: bool | None = None, width: int | None = None, braille: bool | None = None) -> str:
    """The whole page; `color`, `width` and `braille` None ask the terminal, for at most 100 columns."""
    width, paint = _width(width), painter(color)
    braille = can_show() if braille is None else braille
    first = course.symptoms[0] if course.symptoms else None
    sections = [[paint("bold", line) for line in wrap(title(course), width, most=_TITLE, rest="  ")]]
    if first is None:
        sections.append(wrap(healthy(course), width, most=_CAUSE))
    else:
        sections[0] += wrap("; ".join(f"{label} {said}" for label, said in facts(first)), width, most=2)
        sections.append(wrap(first.cause, width, most=_CAUSE))
    for heading, lines in (
        ("What to do", _numbered(first.advice, width, _ADVICE) if first else []),
        ("Evidence", _items(first.evidence, width, _EVIDENCE) if first else []),
        ("The state before it", _state(first, width) if first else []),
        ("The loss scale", wrap(course.scale or "", width, most=_SCALE)),
        ("Curves", _curves(course, width, paint, braille)),
        ("Other symptoms", _others(course.symptoms[1:], width)),
        ("Remarks", _items(course.remarks, width, _REMARKS)),
        ("What was read", _reading(course, width)),
    ):
        if lines:
            sections.append([paint("bold", heading), *lines])
    return "\n\n".join("\n".join(lines) for lines in sections if lines)


def pages(
    courses: Sequence[Course], *, color: bool | None = None, width: int | None = None, braille: bool | None = None
) -> str:
    """The pages of several courses, all their verdicts first; each page ends with a line end."""
    told = [page(course, color=color, width=width, braille=braille) for course in courses]
    if len(told) == 1:
        return f"{told[0]}\n"
    paint, width = painter(color), _width(width)
    index = [line for course in courses for line in wrap(title(course), width, most=2, rest="  ")]
    parts = [paint("bold", many_runs(courses)) + "\n" + "".join(f"{line}\n" for line in index)]
    parts += [f"\n{at} of {len(told)}\n\n{text}\n" for at, text in enumerate(told, 1)]
    return "".join(parts)


def _width(width: int | None) -> int:
    if width is None:
        width = min(shutil.get_terminal_size((_WIDEST, 24)).columns, _WIDEST)
    return max(width, 40)


def _numbered(texts: Sequence[str], width: int, most: int) -> list[str]:
    lines: list[str] = []
    for n, text in enumerate(texts[:most], 1):
        item = wrap(text, width, most=4, first=f"{n}. ", rest="   ")
        if len(lines) + len(item) > most:
            break
        lines += item
    return lines


def _items(texts: Sequence[str], width: int, most: int) -> list[str]:
    lines: list[str] = []
    for n, text in enumerate(texts):
        item = wrap(text, width, most=3, first="- ", rest="  ")
        if len(lines) + len(item) > most - (n + 1 < len(texts)):
            return [*lines, f"(and {len(texts) - n} more in the record)"]
        lines += item
    return lines


def _state(symptom: Symptom, width: int) -> list[str]:
    heads, rows = state(symptom)
    rows = rows[:_STATE]
    if not rows:
        return []
    columns = [Column("", [label for label, _ in rows], left=True, shrinks=True)]
    columns += [Column(head, [texts[n] for _, texts in rows], shrinks=True) for n, head in enumerate(heads)]
    return table(columns, width)


def _curves(course: Course, width: int, paint: Paint, braille: bool) -> list[str]:
    covered = span(course)
    if covered is None:
        return []
    shown = []
    for name, curve in _chosen(course):
        said = ", ".join(part for part in (*told(name, curve), spoilt(curve)) if part)
        height = _HEIGHTS.get(name, 4)
        shown.append(Chart(name=name, label=curve_name(name), told=said, curve=curve, height=height))
    marked = mark(course.symptoms[0]) if course.symptoms else None
    return draw(
        shown,
        covered,
        here=marked[0] if marked else None,
        lanes=lanes(course, _LANES),
        width=width,
        paint=paint,
        braille=braille,
    )


def _chosen(course: Course) -> list[tuple[str, Curve]]:
    """Loss and gradient norm, the loss scale when it moved, and metrics where they are the symptom."""
    held = in_order(course)
    about = course.symptom
    chosen = [
        (name, curve)
        for name, curve in held
        if name in ("loss", "grad_norm")
        or (name == "loss_scale" and len(set(values(runs(curve)))) > 1)
        or (name == "lr" and about in ("loss_explosion", "non_convergence") and len(set(values(runs(curve)))) > 1)
    ]
    if about == "metric_fluctuation" or not chosen:
        chosen += [(name, curve) for name, curve in held if name.startswith("metric ")][:_METRICS]
    return chosen or held[:2]


def _others(symptoms: Sequence[Symptom], width: int) -> list[str]:
    lines: list[str] = []
    for symptom in symptoms[:_OTHERS]:
        action = f" To do: {symptom.advice[0]}" if symptom.advice else ""
        lines += wrap(f"{verdict(symptom)}: {symptom.cause}{action}", width, most=4, first="- ", rest="  ")
    more = len(symptoms) - _OTHERS
    return lines if more <= 0 else [*lines, f"(and {more} more in the record)"]


def _reading(course: Course, width: int) -> list[str]:
    lines = wrap(reading(course), width, most=4)
    missed = unknown(course, _UNKNOWN)
    if missed:
        lines.append("Not understood, though it holds numbers:")
        lines += [elide(f"  {line}", width) for line in missed]
    return lines
