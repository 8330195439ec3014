"""A comparison of two runs as one page of HTML: similarity along the model, own errors, gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..numerics import fmt
from ..precision.figures import LINE, MULTIPLE, Call, Figures
from ..precision.likeness import Likeness
from .likeness import BELOW, cosine, facts, gradients, judged, notes, page, thinned, times, title, ulps
from .likeness import advice as actions
from .lines import clean, elide
from .markup import Markup, dotted, join, percent, tag, words
from .sheet import advice, document, frame

_DOTS, _ROWS, _PARAMETERS = 160, 200, 60
_HEIGHT, _TOP, _FOOT = 200, 12, 16  # of the drawing, in pixels
_BEST, _WORST = -16.0, 0.0  # exponents of 1 - cosine
HOW_TO_READ = (
    "From left to right the calls in the order in which they ran; height is 1 - cosine of their outputs in both runs, "
    "on a logarithmic scale: the lower, the more alike. The dashed line is a cosine of 0.99. A red dot is a module "
    "whose own code loses more than rounding explains, a cross one whose numbers are not finite in the second run."
)


def html_page(record: Likeness) -> str:
    """One page that needs nothing else: nothing on it is loaded from elsewhere, and nothing runs."""
    heading = title(record)
    sections = (
        ("Similarity along the model", HOW_TO_READ, _charts(record)),
        ("What each module's own code loses", _own_how(), _own(record)),
        ("Outputs, module by module", None, _outputs(record)),
        ("Gradients of parameters", None, _gradients(record)),
        ("Notes", None, tag("ul", *(words("li", note) for note in notes(record))) if notes(record) else None),
    )
    told = [
        tag("section", words("h2", name), words("p", how, class_="how") if how else None, inside)
        for name, how, inside in sections
        if inside is not None
    ]
    return document(heading, tag("article", _top(record, heading), *told))


def notebook(record: Likeness) -> str:
    """The page in a frame of a notebook."""
    return frame(title(record), html_page(record), page(record))


def _top(record: Likeness, heading: str) -> Markup:
    kicker = f"{record.a} against {record.b}"
    told = [
        tag("div", words("dt", label), tag("dd", words("b" if BELOW in said else "span", said)))
        for label, said in facts(record)
    ]
    return tag(
        "header",
        tag("p", words("b", "nanhunt compare"), words("span", kicker), class_="kicker"),
        tag("h1", dotted(heading[:1].upper() + heading[1:] if record.first is None else heading)),
        tag("dl", *told, class_="facts") if told else None,
        advice(actions(record), 2),
        class_="top",
    )


# --- the chart ----------------------------------------------------------------------------------------------


def _charts(record: Likeness) -> Markup | None:
    by: dict[int, list[Call]] = {}
    for call in record.calls:
        if call.output is not None:
            by.setdefault(call.batch, []).append(call)
    if not by:
        return None
    drawn = []
    for batch, calls in sorted(by.items(), key=lambda item: _least(item[1]))[:4]:
        label = words("p", f"batch {batch}", class_="name") if record.batches > 1 else None
        drawn.append(join(label, _chart(record, thinned(calls, _DOTS))))
    return join(*drawn)


def _least(calls: Sequence[Call]) -> float:
    return min(call.output.cosine for call in calls if call.output is not None)


def _y(value: float) -> float:
    """Where a cosine stands: at the foot when the two are the same."""
    gap = 1 - value
    exponent = min(max(math.log10(gap), _BEST), _WORST) if gap > 0 else _BEST
    return round(_TOP + (_HEIGHT - _TOP - _FOOT) * (_WORST - exponent) / (_WORST - _BEST), 1)


def _chart(record: Likeness, calls: Sequence[Call]) -> Markup:
    step = 92 / max(len(calls) - 1, 1)
    xs = [6 + n * step for n in range(len(calls))]
    outs = [call.output for call in calls if call.output is not None]
    ys = [_y(0.0 if out.only_b else out.cosine) for out in outs]
    scale = [
        words("text", said, x="0%", y=_y(value) + 4, class_="label")
        for said, value in (("1", 0.0), ("1e-4", 1 - 1e-4), ("1e-8", 1 - 1e-8), ("1e-12", 1 - 1e-12))
    ]
    line = _y(LINE)
    parts = [tag("line", words("title", f"cosine {LINE}"), x1="6%", x2="100%", y1=line, y2=line, class_="limit")]
    parts += [
        tag("line", x1=percent(xs[n]), y1=ys[n], x2=percent(xs[n + 1]), y2=ys[n + 1], class_="trace")
        for n in range(len(xs) - 1)
    ]
    for x, y, call, out in zip(xs, ys, calls, outs, strict=True):
        label = words("title", f"{elide(clean(call.module) or '(the model itself)', 80)}: {_said(out)}")
        if out.only_b:
            cross = tag("path", label, d="M-4 -4L4 4M-4 4L4 -4", class_="cross")
            parts.append(tag("svg", cross, x=percent(x), y=y, width=1, height=1, overflow="visible"))
        elif call.own is not None and call.own.times > MULTIPLE:
            dot = tag("path", label, d="M-5 0a5 5 0 1 0 10 0a5 5 0 1 0 -10 0", class_="bad")
            parts.append(tag("svg", dot, x=percent(x), y=y, width=1, height=1, overflow="visible"))
        else:
            parts.append(tag("circle", label, cx=percent(x), cy=y, r=3, class_="out"))
    said = f"similarity of {len(calls)} calls, from {cosine(outs[0].cosine)} to {cosine(outs[-1].cosine)}"
    drawing = join(words("title", said), *scale, *parts)
    return tag("svg", drawing, width="100%", height=_HEIGHT, role="img", aria_label=said)


def _said(out: Figures) -> str:
    bad = f", {', '.join(out.only_b)} in the second run" if out.only_b else ""
    return f"cosine {cosine(out.cosine)}, largest error {fmt(out.max_abs)}, {ulps(out)}{bad}"


# --- the tables ---------------------------------------------------------------------------------------------


def _own_how() -> str:
    return (
        "Root mean square of the error, relative to the numbers, where each module reads what it read in the first run "
        "and its children gave what they gave there; beside it what rounding its inputs, weights and results once "
        f"explains. A module parts above {MULTIPLE:g} times that."
    )


def _own(record: Likeness) -> Markup | None:
    rows = judged(record)
    if not rows:
        return None
    cells = [
        (
            name or "(the model itself)",
            [own.tensor, ", ".join(own.made) or fmt(own.error), fmt(own.explained), times(own)],
            own.times > MULTIPLE,
        )
        for name, own in rows
    ]
    return _table(["module", "at", "own error", "explained", "times"], cells)


def _outputs(record: Likeness) -> Markup | None:
    cells = []
    for name, one in record.modules.items():
        out = one.output
        if out is None:
            continue
        said = [
            cosine(one.cosine),
            cosine(one.mean_cosine),
            fmt(out.max_abs),
            fmt(out.max_rel),
            fmt(float(f"{out.ulps:.3g}")),
            fmt(float(f"{out.max_ulps:.3g}")),
            out.lower,
            cosine(one.gradient_cosine).replace("?", ""),
        ]
        cells.append((f"{name or '(the model itself)'}", said, bool(out.only_b) or name in record.parted))
    heads = ["module", "cosine", "mean", "largest error", "relative", "ulp", "largest", "of", "cosine of gradient"]
    return _table(heads, cells) if cells else None


def _gradients(record: Likeness) -> Markup | None:
    cells = [
        (
            name,
            [", ".join(one.only_b) or cosine(one.cosine), fmt(one.max_abs), fmt(one.error), ulps(one)],
            bool(one.only_b) or one.cosine < LINE,
        )
        for name, one in gradients(record)[:_PARAMETERS]
    ]
    return _table(["parameter", "cosine", "largest error", "relative error", "ulp"], cells) if cells else None


def _table(heads: list[str], rows: Sequence[tuple[str, list[str], bool]]) -> Markup:
    body = [
        tag(
            "tr",
            tag("th", dotted(elide(clean(name), 160)), scope="row"),
            *(words("td", value, class_="bad" if bad else None) for value in values),
        )
        for name, values, bad in rows[:_ROWS]
    ]
    more = len(rows) - _ROWS
    head = tag("thead", tag("tr", *(words("th", one, scope="col") for one in heads)))
    whole = tag("div", tag("table", head, tag("tbody", *body), class_="numbers"), class_="scrolls")
    return join(whole, words("p", f"and {fmt(more)} more in the record", class_="how") if more > 0 else None)
