"""A line of source with the lines around it, short enough to be kept in a record."""

from __future__ import annotations

import linecache
from typing import Any

_REACH = 4  # lines before and after
_LONGEST = 240


def around(line: str | None, source: str | None) -> dict[str, Any] | None:
    """`{"first": 85, "lines": ("...", ...)}`: what stands around `"file.py:88"`, the text of which is `source`.

    None when the file cannot be read, or no longer says what it said when `source` was read.
    """
    file, _, at = (line or "").rpartition(":")
    if not source or not file or not at.isdecimal():
        return None
    lines = linecache.getlines(file)
    number = int(at)
    if not 1 <= number <= len(lines) or lines[number - 1].strip() != source.strip():
        return None
    first = max(1, number - _REACH)
    kept = [text.rstrip()[:_LONGEST] for text in lines[first - 1 : number + _REACH]]
    while kept and not kept[-1]:
        kept.pop()
    while not kept[0]:  # ends at the line itself, which is not empty
        kept.pop(0)
        first += 1
    return {"first": first, "lines": tuple(kept)}
