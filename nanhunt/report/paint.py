"""Colour on a terminal: when it is wanted, and how a line gets it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

Paint = Callable[[str, str], str]

_CODES = {"bold": "1", "red": "31", "cyan": "36"}


def painter(color: bool | None) -> Paint:
    """A function of style ("bold", "red", "cyan") and text; `color` None asks the terminal."""
    return _paint if (_wants_color() if color is None else color) else _leave


def _wants_color() -> bool:
    """https://no-color.org and https://force-color.org, then whether anyone is looking."""
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    return os.environ.get("TERM") != "dumb" and bool(getattr(sys.stdout, "isatty", bool)())


def _paint(style: str, text: str) -> str:
    return f"\x1b[{_CODES[style]}m{text}\x1b[0m"


def _leave(style: str, text: str) -> str:
    return text
