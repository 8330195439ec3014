"""A finding as one page of HTML that needs nothing else: no network, no script, light and dark, on paper too."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence

from ..consensus import Consensus
from ..errors import UsageError
from ..finding import PICTURES, Finding
from ..numerics import fmt
from ..outline import HOP
from . import ranks
from .lines import clean
from .markup import Markup, dotted, join, tag, text, words
from .numbers import counts, numbers
from .ranks import HOW_TO_READ as READ_RANKS
from .ruler import HOW_TO_READ as READ_RULER
from .ruler import rulers
from .sheet import ROOM, advice, collection, document, fitting, frame, size
from .text import title
from .trail import HOW_TO_READ as READ_TRAIL
from .trail import trail
from .tree import tree
from .words import hop, is_bad, place, plain

# A page is read by people and sent by mail: what a record holds beyond this stays in the record.
_TENSORS, _CALLS, _CONTEXT, _LINES = 12, 32, 60, 24
_NOTES = 24  # files that could not be read, by name

_ELSEWHERE = ("path", "ledger", *PICTURES)  # context that has a place of its own


def page(finding: Finding) -> str:
    """The page of a finding, whole, from its record alone; below 500 KB whatever the record holds.

    Nothing on it is loaded from elsewhere and nothing runs: a policy in the page forbids both. Every text of the
    record is escaped.
    """
    return document(title(finding), _article(finding, 1, None, room=ROOM))


def pages(findings: Sequence[Finding], titles: Iterable[str] | None = None, *, notes: Sequence[str] = ()) -> str:
    """Several findings on one page, an index first; `titles` (files, tests), one for each, say where it is from.

    The page stays below 500 KB: many findings are told with fewer pictures, and at last not at all; it says so.
    `notes` stand below the heading, a paragraph each: which run it was, what was watched and what was not.

    Raises:
        UsageError: when there are not as many titles as findings.
    """
    named = list(titles) if titles is not None else [None] * len(findings)
    if len(named) != len(findings):
        raise UsageError(f"{len(named)} titles for {len(findings)} findings: give one title for each, or none at all")
    heading = f"{fmt(len(findings))} finding{'s' if len(findings) != 1 else ''}" if findings else "No finding"
    entries = (
        (
            join(words("span", name, class_="quiet") if name is not None else None, words("span", _verdict(finding))),
            f"finding-{at}",
            functools.partial(_in_room, finding, name, at),
        )
        for at, (finding, name) in enumerate(zip(findings, named, strict=True), 1)
    )
    return document(heading, collection(heading, entries, len(findings), notes))


def _in_room(finding: Finding, name: str | None, at: int, room: int) -> Markup:
    return _article(finding, 2, name, at, room=room)


def of_ranks(said: Consensus, *, notes: Sequence[str] = ()) -> str:
    """The verdict over many ranks as one page, with all of them in one picture; `notes` stand below it."""
    picture = tag(
        "section",
        words("h2", "Ranks by step"),
        words("p", READ_RANKS, class_="how"),
        ranks.drawing(said),
        *(words("p", note, class_="quiet") for note in notes[:_NOTES]),
        words("p", f"and {fmt(len(notes) - _NOTES)} more files", class_="quiet") if len(notes) > _NOTES else None,
    )
    if said.verdict is None:
        return document("No finding", join(tag("nav", words("h1", "No finding")), picture))
    article = _article(said.verdict, 1, None, room=ROOM - size(picture))
    return document(title(said.verdict), join(article, picture))


def notebook(finding: Finding) -> str:
    """The page in a frame of a notebook."""
    return frame(title(finding), page(finding), str(finding))


def _verdict(finding: Finding) -> str:
    said = title(finding)
    return said[:1].upper() + said[1:] if finding.module is None else said


def _article(finding: Finding, level: int, name: str | None, at: int = 1, *, room: int) -> Markup:
    """The sections of a finding, as many as there is room for (bytes); what comes first is always told."""
    rows = finding.tensors[:_TENSORS]
    if len(finding.tensors) > _TENSORS:  # what is bad comes first only where not all can be shown
        rows = tuple(sorted(finding.tensors, key=lambda row: not is_bad(row))[:_TENSORS])
    calls = finding.trail[-_CALLS:]
    sections = (
        ("Where the numbers lie", READ_RULER, rulers(finding, rows)),
        ("The calls before it", READ_TRAIL, trail(finding, calls)),
        ("Where in the model", None, tree(finding)),
        ("From there to where it was noticed", None, _way(finding)),
        ("Every number", None, join(numbers(finding, rows), counts(finding, rows)) if rows else None),
        ("Context", None, _context(finding)),
    )
    told, left_out = fitting(_top(finding, level, name), sections, level + 1, room)
    for more, what in (
        (len(finding.tensors) - len(rows), "tensors"),
        (len(finding.trail) - len(calls), "earlier calls"),
    ):
        if more:
            left_out.append(f"{fmt(more)} more {what}")
    if left_out:
        told.append(words("p", f"Not on this page, but in the record: {'; '.join(left_out)}.", class_="how"))
    return tag("article", *told, id=f"finding-{at}")


# -- the first screen ----------------------------------------------------------------------------------------


def _top(finding: Finding, level: int, name: str | None) -> Markup:
    f = finding
    when = (("step", f.step), ("call", f.call), ("rank", f.rank))
    kicker = " \N{MIDDLE DOT} ".join([clean(f.phase), *(f"{what} {fmt(n)}" for what, n in when if n is not None)])
    return tag(
        "header",
        tag("p", words("b", "nanhunt"), words("span", kicker), words("span", name) if name else None, class_="kicker"),
        tag(f"h{level}", dotted(_verdict(f))),
        _source(f),
        _facts(f),
        words("p", f.why, class_="why") if f.why else None,
        advice(f.advice, level + 1),
        class_="top",
    )


def _facts(finding: Finding) -> Markup | None:
    facts = [
        (label, said) for label, said in place(finding)[bool(finding.line) + bool(finding.line and finding.source) :]
    ]
    if not facts:
        return None
    return tag(
        "dl",
        *(
            tag("div", words("dt", label), tag("dd", words("b" if label == "cause" else "code", said)))
            for label, said in sorted(facts, key=lambda fact: fact[0] != "cause")
        ),
        class_="facts",
    )


def _source(finding: Finding) -> Markup | None:
    if not finding.line:
        return None
    file, _, at = clean(finding.line).rpartition(":")
    hit = int(at) if at.isdecimal() and len(at) < 9 else 0
    folder, slash, base = file.replace("\\", "/").rpartition("/")
    where = place(finding)[0][0]
    caption = tag(
        "figcaption",
        words("span", where, class_="quiet"),
        tag("code", words("span", folder + slash, class_="quiet"), words("b", f"{base}:{at}")),
    )
    first, lines = _lines(finding, hit)
    if not lines:
        return tag("figure", caption, class_="source")
    shown = []
    for number, line in enumerate(lines, first):
        classes = "line hit" if number == hit or len(lines) == 1 else "line"
        shown.append(tag("span", words("i", number or ""), text(line, 240), Markup("\n"), class_=classes))
    return tag("figure", caption, tag("pre", tag("code", *shown), tabindex=0), class_="source")


def _lines(finding: Finding, hit: int) -> tuple[int, list[str]]:
    """Number of the first line, and the lines without the indentation they share."""
    around = finding.context.get("source_context")
    if isinstance(around, Mapping):
        first, lines = around.get("first"), around.get("lines")
        if (
            isinstance(first, int)
            and isinstance(lines, tuple)
            and 0 < first <= hit < first + len(lines) <= first + _LINES
        ):
            texts = [str(line).expandtabs(4) for line in lines]
            held = [len(line) - len(line.lstrip(" ")) for line in texts if line.strip()]
            return first, [line[min(held, default=0) :] for line in texts]
    return hit, [finding.source.strip()] if finding.source else []


# -- the rest ------------------------------------------------------------------------------------------------


def _way(finding: Finding) -> Markup | None:
    hops = finding.context.get("path")
    if not isinstance(hops, tuple) or len(hops) < 2:
        return None
    shown = hops if len(hops) <= 24 else (*hops[:12], f"... {len(hops) - 23} more ops ...", *hops[-11:])
    return tag("ol", *(tag("li", _hop(str(one))) for one in shown), class_="way")


def _hop(line: str) -> Markup:
    """What the op gave, the op, its module; then, on a line of its own, where that is written."""
    told = HOP.fullmatch(line)
    if told is None:
        return words("span", hop(line), class_="quiet")
    op = told["op"].split(".")
    return join(
        words("span", told["kind"], class_="chip"),
        words("b", op[1] if op[0] == "aten" and len(op) > 1 else told["op"]),
        tag("code", dotted(told["module"])) if told["module"] else None,
        words("span", told["phase"], class_="quiet"),
        words("code", hop(f" {told['where']}").strip(), class_="quiet") if told["where"] else None,
    )


def _context(finding: Finding) -> Markup | None:
    items = [
        (str(key).replace("_", " "), plain(value))
        for key, value in list(finding.context.items())[:_CONTEXT]
        if value not in (None, (), {}, "") and key not in _ELSEWHERE
    ]
    ledger = finding.context.get("ledger")
    if isinstance(ledger, Mapping) and ledger:
        said = ", ".join(f"{plain(value)} {clean(key)}" for key, value in list(ledger.items())[:8])
        items.append(("bad values by op", said))
    if not items:
        return None
    return tag(
        "dl",
        *(tag("div", tag("dt", text(key, 80)), tag("dd", text(said, 400))) for key, said in items),
        class_="context",
    )
