"""HTML and SVG from values: every text is escaped unless a tag made it."""

from __future__ import annotations

import html
import re
from typing import NewType

from .lines import clean, elide

Markup = NewType("Markup", str)

_LONGEST = 1000
_PATH = re.compile(r"\S{25,}")


def text(value: object, longest: int = _LONGEST) -> Markup:
    """A value as one line of text, its middle left out where it is long."""
    return Markup(html.escape(elide(clean(value), longest)))


def tag(name: str, *inside: Markup | None, **attributes: object) -> Markup:
    """An element; `class_` is `class`, other underscores are hyphens, and what is None is left out."""
    said = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{text(_number(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Markup(f"<{name}{said}>{''.join(part for part in inside if part is not None)}</{name}>")


def words(name: str, value: object, **attributes: object) -> Markup:
    """An element that holds nothing but text."""
    return tag(name, text(value), **attributes)


def dotted(value: object) -> Markup:
    """Text in which a line may break after the dots of long paths, not just anywhere."""
    return Markup(_PATH.sub(lambda path: path[0].replace(".", ".<wbr>"), text(value)))


def join(*parts: Markup | None) -> Markup:
    return Markup("".join(part for part in parts if part is not None))


def percent(place: float) -> str:
    """A length of SVG: drawings have no size of their own, so that their letters keep theirs on any screen."""
    return f"{place:.2f}".rstrip("0").rstrip(".") + "%"


def _number(value: object) -> object:
    return f"{value:.6g}" if isinstance(value, float) else value
