"""A course as one page of HTML that needs nothing else: the verdict, what to do, and every curve with its marks."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from ..numerics import fmt
from ..symptoms.course import Course
from ..symptoms.steps import Symptom
from .course_text import page as plain
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
from .curves import Lines, drawing, flags, foot, lane
from .extent import runs
from .lines import clean
from .markup import Markup, dotted, join, tag, text, words
from .sheet import ROOM, advice, collection, document, fitting
from .sheet import frame as framed

_STYLES = ("page.css", "course.css")
# A page is read by people: what a record holds beyond this stays in the record.
_CURVES, _LANES, _FLAGS, _OTHERS, _SENTENCES, _ROWS, _UNKNOWN = 16, 5, 4, 12, 40, 40, 12
_FEW = 12  # events of a kind that are so rare go through all drawings
_HOW_TO_READ = (
    "All drawings share the axis of steps. The line is the median of neighbouring records, the shade reaches from the "
    "least to the largest."
)
_READ_BAD = " A cross and a red ground stand where values are NaN or Inf."
_READ_SYMPTOM = " The red line is the step at which the symptom begins."
_READ_PAST = " What was recorded before a restart is pale."


def page(course: Course) -> str:
    """The page of a course, whole, from its record alone; below 500 KB whatever the record holds.

    Nothing on it is loaded from elsewhere and nothing runs: a policy in the page forbids both. Every text of the
    record is escaped.
    """
    return document(title(course), _article(course, 1, 1, ROOM), styles=_STYLES)


def pages(courses: Sequence[Course], *, notes: Sequence[str] = ()) -> str:
    """Several courses on one page, an index first; one alone gets its own page.

    The page stays below 500 KB: what there is no room for is left out, and the page says so. `notes` stand below the
    heading, a paragraph each.
    """
    if len(courses) == 1 and not notes:
        return page(courses[0])
    heading = many_runs(courses)
    entries = (
        (words("span", title(course)), f"run-{at}", functools.partial(_article, course, 2, at))
        for at, course in enumerate(courses, 1)
    )
    return document(heading, collection(heading, entries, len(courses), notes), styles=_STYLES)


def frame(course: Course) -> str:
    """The page in a frame of a notebook."""
    return framed(title(course), page(course), plain(course, color=False, braille=True))


def _article(course: Course, level: int, at: int, room: int) -> Markup:
    first = course.symptoms[0] if course.symptoms else None
    sections = (
        ("The run", _how_to_read(course), _curves(course)),
        ("Evidence", None, _sentences(first.evidence) if first else None),
        ("The state before it", None, _state(first) if first else None),
        ("The loss scale", None, words("p", course.scale, class_="why") if course.scale else None),
        ("Other symptoms", None, _others(course.symptoms[1:])),
        ("Remarks", None, _sentences(course.remarks)),
        ("What was read", None, _reading(course)),
    )
    parts, left_out = fitting(_top(course, level), sections, level + 1, room)
    for more, what in (
        (len(in_order(course)) - _CURVES, "curves"),
        (len(course.symptoms) - 1 - _OTHERS, "symptoms"),
    ):
        if more > 0:
            left_out.append(f"{fmt(more)} more {what}")
    if left_out:
        parts.append(words("p", f"Not on this page, but in the record: {'; '.join(left_out)}.", class_="how"))
    return tag("article", *parts, id=f"run-{at}")


def _top(course: Course, level: int) -> Markup:
    first = course.symptoms[0] if course.symptoms else None
    kicker = [words("b", "nanhunt"), words("span", clean(course.format) or "a run")]
    return tag(
        "header",
        tag("p", *kicker, class_="kicker"),
        tag(f"h{level}", dotted(title(course))),
        _facts(first) if first else None,
        words("p", first.cause if first else healthy(course), class_="why"),
        advice(first.advice, level + 1) if first else None,
        class_="top",
    )


def _facts(symptom: Symptom) -> Markup:
    pairs = facts(symptom)
    return tag(
        "dl",
        *(
            tag("div", words("dt", label), tag("dd", words("b" if label == "symptom" else "span", said)))
            for label, said in pairs
        ),
        class_="facts",
    )


# -- the run -------------------------------------------------------------------------------------------------


def _how_to_read(course: Course) -> str:
    shown = [curve for _, curve in in_order(course)[:_CURVES]]
    said = _HOW_TO_READ
    said += _READ_BAD if any(map(spoilt, shown)) else ""
    said += _READ_SYMPTOM if course.symptoms and mark(course.symptoms[0]) else ""
    return said + (_READ_PAST if any(len(runs(curve)) > 1 for curve in shown) else "")


def _curves(course: Course) -> Markup | None:
    covered = span(course)
    if covered is None:
        return None
    marks = [found for symptom in course.symptoms if (found := mark(symptom)) is not None]
    flagged = [(step, said) for step, said in marks if covered.holds(step)][:_FLAGS]
    events = lanes(course, _LANES)
    lines = Lines(
        symptoms=[step for step, _ in flagged],
        events=[step for _, steps in events if len(steps) <= _FEW for step in steps],
    )
    parts = [flags(flagged, covered)] if flagged else []
    for name, curve in in_order(course)[:_CURVES]:
        numbers, bad = ", ".join(told(name, curve)), spoilt(curve)
        label = curve_name(name)
        heading = tag(
            "p",
            words("b", label),
            words("span", bad, class_="chip") if bad else None,
            words("span", numbers, class_="quiet"),
            class_="name",
        )
        spoken = f"{label}: {', '.join(part for part in (numbers, bad) if part)}"
        high = 132 if name in ("loss", "grad_norm") else 84
        parts += [heading, drawing(name, curve, covered, lines, said=spoken, high=high)]
    for name, steps in events:
        parts.append(lane(name, steps, covered, lines, said=f"{name}, {fmt(len(steps))} times"))
    return tag("div", *parts, foot(covered), class_="curves")


# -- the rest ------------------------------------------------------------------------------------------------


def _sentences(texts: Sequence[str]) -> Markup | None:
    return tag("ul", *(tag("li", text(said, 600)) for said in texts[:_SENTENCES]), class_="said") if texts else None


def _state(symptom: Symptom) -> Markup | None:
    heads, rows = state(symptom)
    if not rows:
        return None
    body = [
        tag(
            "tr",
            words("th", label, scope="row"),
            *(words("td", said, class_="bad" if said in ("nan", "inf", "-inf") else None) for said in texts),
        )
        for label, texts in rows[:_ROWS]
    ]
    head = tag("thead", tag("tr", tag("td"), *(words("th", name, scope="col") for name in heads)))
    table = tag("table", head, tag("tbody", *body), class_="numbers state")
    return tag("div", table, class_="scrolls", role="region", aria_label="The state before it", tabindex=0)


def _others(symptoms: Sequence[Symptom]) -> Markup | None:
    told_of = [
        tag(
            "div",
            tag("p", words("b", verdict(symptom))),
            words("p", symptom.cause),
            _sentences((*symptom.evidence[:3], *(f"To do: {action}" for action in symptom.advice[:2]))),
        )
        for symptom in symptoms[:_OTHERS]
    ]
    return tag("div", *told_of, class_="others") if told_of else None


def _reading(course: Course) -> Markup:
    missed = unknown(course, _UNKNOWN)
    note = words("p", "Not understood, though it holds numbers:", class_="how") if missed else None
    lines = tag("pre", *(part for line in missed for part in (text(line), Markup("\n"))), class_="missed", tabindex=0)
    return join(words("p", reading(course), class_="why"), note, lines if missed else None)
