"""An audit as a page, for a terminal and for a browser: what is wrong, where, by how much, and what to do."""

from __future__ import annotations

from collections.abc import Sequence

from ..remarks import FAULT, RULES, Remark, Remarks
from .lines import clean, elide, wrap
from .markup import Markup, dotted, join, tag, text, words
from .sheet import advice, document, frame

_PLACES = 4  # of one thing that is wrong in many places
_MOST = 200  # entries on a page


def headline(remarks: Remarks) -> str:
    """`3 remarks: 2 faults, 1 risk`."""
    if not remarks:
        return "Nothing is wrong, as far as was looked"
    faults = sum(remark.severity == FAULT for remark in remarks)
    counts = [(faults, "fault"), (len(remarks) - faults, "risk")]
    parts = [f"{n} {word}{'s' if n != 1 else ''}" for n, word in counts if n]
    return f"{len(remarks)} remark{'s' if len(remarks) != 1 else ''}: {', '.join(parts)}"


def page(remarks: Remarks, *, width: int = 100) -> str:
    """The page for a terminal. The same thing in many places, such as all layers, is told once."""
    width = max(width, 40)
    blocks = [[headline(remarks)]]
    groups = _groups(remarks)
    for number, group in enumerate(groups[:_MOST], 1):
        blocks.append(entry(group, width, f"{number}. "))
    if len(groups) > _MOST:
        blocks.append([f"and {len(groups) - _MOST} more, in the record"])
    for name, said in (("Looked at", remarks.looked), ("Not looked at", remarks.unseen)):
        if said:
            blocks.append(wrap(f"{name}: {'; '.join(said)}.", width, most=8, rest="  "))
    return "\n\n".join("\n".join(block) for block in blocks)


def entry(group: Sequence[Remark], width: int, first: str = "") -> list[str]:
    """One thing that is wrong, and all the places where it is."""
    remark = group[0]
    indent = " " * len(first)
    lines = [elide(f"{first}{remark.severity}  {remark.rule}  {_place(remark)}", width)]
    if len(group) > 1:
        lines += wrap(f"and in {_others(group)}", width, most=2, first=indent, rest=indent)
    if remark.line:
        lines.append(elide(f"{indent}at {clean(remark.line)}", width))
    if remark.source:
        lines.append(elide(f"{indent}   {clean(remark.source)}", width))
    lines += wrap(remark.message, width, most=8, first=indent, rest=indent)
    if len(remark.names) > 1:
        lines += wrap(f"Which: {_names(remark)}", width, most=3, first=indent, rest=indent)
    lines += wrap(f"Fix: {remark.fix}", width, most=5, first=indent, rest=indent)
    return lines


def html(remarks: Remarks) -> str:
    """The page for a browser, whole; nothing is loaded from elsewhere and nothing runs."""
    groups = _groups(remarks)
    told = [_article(group) for group in groups[:_MOST]]
    if len(groups) > _MOST:
        told.append(words("p", f"and {len(groups) - _MOST} more, in the record"))
    for name, said in (("Looked at", remarks.looked), ("Not looked at", remarks.unseen)):
        if said:
            items = [words("li", line) for line in said]
            told.append(tag("section", words("h2", name), tag("ul", *items)))
    heading = headline(remarks)
    return document(heading, join(_top(heading), *told))


def _top(heading: str) -> Markup:
    kicker = tag("p", words("b", "nanhunt"), words("span", "audit"), class_="kicker")
    return tag("header", kicker, words("h1", heading), class_="top")


def notebook(remarks: Remarks) -> str:
    """The page in a frame of a notebook."""
    return frame(headline(remarks), html(remarks), str(remarks))


def _groups(remarks: Remarks) -> list[list[Remark]]:
    """Remarks that say the same of several places: the same rule at the same line, or in the same words."""
    groups: dict[tuple[str, ...], list[Remark]] = {}
    for remark in remarks:
        groups.setdefault((remark.rule, remark.severity, remark.line or remark.message, remark.fix), []).append(remark)
    return list(groups.values())


def _place(remark: Remark) -> str:
    return clean(remark.place) or "(the model itself)"


def _others(group: Sequence[Remark]) -> str:
    places = list(dict.fromkeys(_place(remark) for remark in group[1:]))
    more = len(places) - _PLACES
    return ", ".join(places[:_PLACES]) + (f" and {more} more places" if more > 0 else "")


def _names(remark: Remark) -> str:
    more = len(remark.names) - _PLACES
    return ", ".join(map(clean, remark.names[:_PLACES])) + (f" and {more} more" if more > 0 else "")


def _article(group: Sequence[Remark]) -> Markup:
    remark = group[0]
    kicker = tag(
        "p",
        words("b", remark.severity),
        words("span", remark.rule.replace("_", " ")),
        words("span", RULES.get(remark.rule, "")),
        class_="kicker",
    )
    where = None
    if remark.line:
        caption = tag("figcaption", words("b", remark.line))
        number = remark.line.rpartition(":")[2]
        line = tag("span", words("i", number), text(remark.source or "", 240), class_="line hit")
        code = tag("pre", tag("code", line), tabindex=0) if remark.source else None
        where = tag("figure", caption, code, class_="source")
    told = tag(
        "header",
        kicker,
        tag("h2", dotted(_place(remark))),
        words("p", f"and in {_others(group)}", class_="quiet") if len(group) > 1 else None,
        where,
        words("p", remark.message, class_="why"),
        words("p", f"Which: {_names(remark)}", class_="quiet") if len(remark.names) > 1 else None,
        advice([remark.fix], 3),
        class_="top",
    )
    return tag("section", told)
