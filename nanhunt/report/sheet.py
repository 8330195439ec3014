"""The sheet that every page of HTML stands on: nothing is loaded from elsewhere, nothing runs, its size is bounded."""

from __future__ import annotations

import base64
import hashlib
import html
import pkgutil
from collections.abc import Callable, Iterable, Sequence

from ..numerics import fmt
from .lines import elide
from .markup import Markup, join, tag, text, words

ROOM = 470_000  # bytes of body, so that a page with its style stays below 500 KB
_ADVICE = 12


def document(heading: str, body: Markup, *, styles: Sequence[str] = ("page.css",)) -> str:
    """A whole page; `styles` are files beside this one. Its policy forbids scripts and anything from elsewhere."""
    style = "".join((pkgutil.get_data(__package__, name) or b"").decode("utf-8") for name in styles)
    digest = base64.b64encode(hashlib.sha256(style.encode("utf-8")).digest()).decode("ascii")
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    head = (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        '<meta name="referrer" content="no-referrer">\n'
    )
    head += f"{words('title', elide(heading, 160))}\n<style>{style}</style>\n</head>\n"
    return f"{head}<body>\n{body}\n</body>\n</html>\n"


def collection(
    heading: str, entries: Iterable[tuple[Markup, str, Callable[[int], Markup]]], count: int, notes: Sequence[str] = ()
) -> Markup:
    """Several articles, an index first: of each its label, its id, and what makes it for a room of so many bytes.

    Articles that no longer fit are counted at the end of the index.
    """
    told: list[Markup] = []
    index: list[Markup] = []
    said = [words("p", note) for note in notes]
    left = ROOM - sum(map(size, said))
    for at, (label, name, make) in enumerate(entries):
        article = make(left // (count - at))
        link = tag("a", label, href=f"#{name}")
        left -= size(article) + size(link)
        if left < 0:
            break
        told.append(article)
        index.append(tag("li", link))
    more = count - len(told)
    head = tag(
        "nav",
        words("h1", heading),
        *said,
        tag("ol", *index) if index else None,
        words("p", f"and {fmt(more)} more, for which this page has no room") if more else None,
    )
    return join(head, *told)


def frame(title: str, page: str, plain: str) -> str:
    """A page in a frame, which keeps the styles of a notebook out; where frames are not shown, the text below it."""
    style = "display:block;width:100%;height:640px;border:1px solid #8886;border-radius:6px;resize:vertical"
    below = "all:initial;color:inherit;display:block;font:12px/1.4 monospace;white-space:pre;overflow-x:auto"
    return (
        f'<div class="nanhunt"><iframe sandbox="" title="{text(title)}" style="{style}" '
        f'srcdoc="{html.escape(page)}"></iframe>'
        f"<details><summary>{text(title)}</summary>"
        f'<pre style="{below}">{html.escape(plain)}</pre></details></div>'
    )


def size(part: str) -> int:
    """Bytes that it takes in a file."""
    return len(part.encode("utf-8", "backslashreplace"))


def advice(actions: Sequence[str], level: int) -> Markup | None:
    """What to do, the first action first."""
    if not actions:
        return None
    return tag(
        "div",
        words(f"h{level}", "What to do"),
        tag("ol", *(tag("li", text(action, 600)) for action in actions[:_ADVICE])),
        class_="advice",
    )


def fitting(
    top: Markup, sections: Iterable[tuple[str, str | None, Markup | None]], level: int, room: int
) -> tuple[list[Markup], list[str]]:
    """The top and as many sections (heading, how to read it, inside) as there is room for; headings of the others."""
    told, left_out = [top], []
    room -= size(top)
    for heading, how, inside in sections:
        if inside is None:
            continue
        note = words("p", how, class_="how") if how else None
        section = tag("section", words(f"h{level}", heading), note, inside)
        if size(section) > room:
            left_out.append(f"{heading!r}, for want of room")
            continue
        room -= size(section)
        told.append(section)
    return told, left_out
