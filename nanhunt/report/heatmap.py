"""A profile as one page of HTML: rows modules, columns powers of two, the shade the share, lines the limits."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..numerics import COMPARED, FORMATS, Format, fmt
from ..precision.narrowing import Verdict
from ..precision.profiles import Profile
from ..ranges import path_of
from .axis import Axis
from .lines import clean, elide
from .markup import Markup, dotted, join, percent, tag, text, words
from .sheet import ROOM, document, frame
from .sheet import size as weight
from .spectrum import BETWEEN, Line, about, bad, chosen, keep, level, lines, moved, size, span, zeros
from .words import bits
from .words import percent as part

_CLOSEST, _REASONS, _WARNED = 12, 12, 12  # what one page shows; the record has the rest
_FRAME = 6_000  # bytes of what stands around the rows of a table
_HEIGHT, _LEVELS = 16, 9
_HEADINGS = {  # in the order of the page: what is handed to a module is mostly what another gave
    "outputs": "Outputs",
    "output_gradients": "Gradients of outputs",
    "weight_gradients": "Gradients of weights",
    "weights": "Weights",
    "inputs": "Inputs",
}
HOW_TO_READ = (
    "Powers of two from left to right; the stronger the shade of a field, the more of the numbers lie there, each "
    "shade three times the one before. Dashed lines are the smallest normal and the largest number of each format; the "
    "bands on top say which. Gradients are shown times the loss scale of the heading."
)


def page(profile: Profile, *, dtype: object = "float16", loss_scale: float | None = None) -> str:
    """The page of a profile, whole, from its record alone; below 500 KB however many modules it has.

    Nothing on it is loaded from elsewhere and nothing runs; every text of the record is escaped.
    """
    verdict = profile.verdict(dtype, loss_scale)
    form = FORMATS[verdict.dtype]
    told = [_top(profile, verdict)]
    rows = lines(profile, verdict)
    axis = _axis(rows)
    groups = [("Closest to the limits", chosen(profile, verdict, _CLOSEST))]
    groups += [(heading, [row for row in rows if row.role == role]) for role, heading in _HEADINGS.items()]
    groups = [(heading, some) for heading, some in groups if some]
    left, hidden = ROOM - sum(map(weight, told)), 0
    for at, (heading, some) in enumerate(groups):
        note = words("p", HOW_TO_READ, class_="how") if not at else None
        drawn, more = _map(some, axis, form, mixed=not at, room=left // (len(groups) - at) - _FRAME)
        told.append(tag("section", words("h2", heading), note, drawn))
        left -= weight(told[-1])
        hidden += more
    if hidden:
        told.append(words("p", f"Not on this page, but in the record: {fmt(hidden)} more rows.", class_="how"))
    return document(verdict.title(), tag("article", *told, id="profile"), styles=("page.css", "precision.css"))


def notebook(profile: Profile) -> str:
    """The page in a frame of a notebook."""
    return frame(profile.verdict().title(), page(profile), str(profile))


def _top(profile: Profile, verdict: Verdict) -> Markup:
    said = verdict.title()
    return tag(
        "header",
        tag("p", words("b", "nanhunt"), words("span", "profile"), class_="kicker"),
        tag("h1", dotted(said[:1].upper() + said[1:])),
        words("p", about(profile), class_="why"),
        _listed("What stands against it", [one.text for one in verdict.reasons], _REASONS),
        words("p", keep(verdict), class_="why") if verdict.keep else None,
        _listed("Headroom that shrinks", [one.text for one in verdict.warnings], _WARNED),
        words("p", BETWEEN.format(verdict.dtype), class_="how") if verdict.fits else None,
        *(words("p", note, class_="how") for note in profile.notes[:12]),
        class_="top",
    )


def _listed(heading: str, texts: list[str], most: int) -> Markup | None:
    if not texts:
        return None
    more = len(texts) - most
    items = [tag("li", text(one, 600)) for one in texts[:most]]
    rest = words("p", f"and {fmt(more)} more", class_="quiet") if more > 0 else None
    return tag("div", words("h2", heading), tag("ol", *items), rest, class_="advice")


def _axis(rows: Sequence[Line]) -> Axis:
    lo, hi = span(rows)
    return Axis(float(lo) - 1, float(hi) + 1)


def _map(rows: Sequence[Line], axis: Axis, form: Format, *, mixed: bool, room: int) -> tuple[Markup, int]:
    """A table of rows, as many as there is room for (bytes), and how many are left out."""
    heads = [words("th", name, scope="col") for name in ("module", "largest", f"headroom, {form.name}", "zero")]
    drawn = []
    for row in rows:
        drawn.append(_row(row, axis, form, mixed))
        room -= weight(drawn[-1])
        if room < 0:
            drawn.pop()
            break
    table = tag(
        "table",
        tag("thead", tag("tr", *heads, tag("th", _formats(axis), scope="col", class_="chart"))),
        tag("tbody", *drawn),
        tag("tfoot", tag("tr", tag("td", colspan=4), tag("td", axis.drawing(2), class_="chart"))),
        class_="trail spread",
    )
    return table, len(rows) - len(drawn)


def _formats(axis: Axis) -> Markup:
    """A band for each format: pale where it is subnormal."""
    drawn = []
    for at, name in enumerate(COMPARED):
        form = FORMATS[name]
        smallest, normal, largest = (
            axis.place(math.log2(edge)) for edge in (form.smallest_subnormal, form.smallest_normal, form.max)
        )
        y = 1 + 14 * at
        drawn.append(
            tag("rect", x=percent(smallest), width=percent(normal - smallest), y=y, height=11, class_="subnormal")
        )
        drawn.append(tag("rect", x=percent(normal), width=percent(largest - normal), y=y, height=11, class_="normal"))
        middle = percent((max(normal, 0.0) + largest) / 2)
        drawn.append(words("text", name, x=middle, y=y + 9, text_anchor="middle", class_="label"))
    said = f"from where to where {', '.join(COMPARED)} go"
    return tag("svg", *drawn, width="100%", height=14 * len(COMPARED) + 2, role="img", aria_label=said)


def _row(row: Line, axis: Axis, form: Format, mixed: bool) -> Markup:
    path = elide(path_of(row.module.name), 160)
    front, dot, back = path.rpartition(".")
    code = tag("code", words("span", front + dot) if dot else None, words("b", back), title=path)
    kind = row.name.removeprefix(path_of(row.module.name)).strip() if mixed else clean(row.module.type)
    left = row.left(form)
    beyond = "number bad" if left is not None and left < 0 else "number"
    return tag(
        "tr",
        tag("th", tag("div", code, words("span", elide(kind, 60), class_="quiet")), scope="row"),
        words("td", fmt(size(row)), class_=beyond),
        words("td", bits(left), class_=beyond),
        words("td", part(zeros(row.numbers)), class_="number"),
        tag("td", _drawing(row, axis, form), class_="chart"),
    )


def _drawing(row: Line, axis: Axis, form: Format) -> Markup:
    total = max(row.numbers.histogram.numel, 1)
    first = round(axis.lo)
    fields: dict[tuple[int, str], list[str]] = {}
    for exponent, count in moved(row).items():
        held = math.log2(form.smallest_normal) <= exponent <= math.log2(form.max)
        fields.setdefault((level(count / total, _LEVELS), "count" if held else "count tiny"), []).append(
            f"M{exponent - first} 0h1v1h-1z"
        )
    # One path for each shade, in units of a power of two; a rectangle for each field would make a page of megabytes.
    shades = tag(
        "svg",
        *(
            tag("path", d="".join(paths), fill_opacity=round(shade / _LEVELS, 2), class_=kind)
            for (shade, kind), paths in sorted(fields.items())
        ),
        width="100%",
        height=_HEIGHT,
        viewBox=f"0 0 {round(axis.hi) - first} 1",
        preserveAspectRatio="none",
    )
    share = row.numbers.share(form.name, row.scale)
    facts = [f"largest {fmt(size(row))}"]
    facts += [
        f"{part(value)} {what} in {form.name}"
        for value, what in ((share.overflow, "overflow"), (share.subnormal, "subnormal"), (share.vanish, "vanish"))
        if value
    ]
    if wrong := bad(row.numbers):
        facts.append(f"{part(wrong)} Inf or NaN")
    said = f"{elide(row.name, 120)}: {', '.join(facts)}"
    return tag(
        "svg",
        words("title", said),
        shades,
        _limits(axis),
        width="100%",
        height=_HEIGHT,
        role="img",
        aria_label=said,
    )


def _limits(axis: Axis) -> Markup:
    """A line at the smallest normal and at the largest number of each format that is on the axis."""
    ends = [math.log2(end) for name in COMPARED for end in (FORMATS[name].smallest_normal, FORMATS[name].max)]
    places = dict.fromkeys(percent(axis.place(end)) for end in ends if axis.holds(end))
    return join(*(tag("line", x1=x, x2=x, y1=0, y2=_HEIGHT, class_="limit") for x in places))
