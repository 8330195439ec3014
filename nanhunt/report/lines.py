"""Text that fits: any name on a terminal, whatever characters it holds."""

from __future__ import annotations

import unicodedata

# A hostile name may be megabytes long; nothing beyond this is ever shown.
_LONGEST = 4000


def clean(text: object) -> str:
    """One printable line: control, bidi and surrogate characters as escapes, any space as a space."""
    line = str(text)
    if len(line) > _LONGEST:
        line = line[: _LONGEST // 2] + "..." + line[-_LONGEST // 2 :]
    if line.isascii() and line.isprintable():
        return line
    return "".join(_shown(char) for char in line)


def _shown(char: str) -> str:
    if char == " " or char.isprintable():
        return char
    if unicodedata.category(char) == "Zs":
        return " "
    return char.encode("unicode_escape").decode("ascii")


def cells(text: str) -> int:
    """How many columns a clean line takes on a terminal at most: a combining mark counts as one."""
    return len(text) if text.isascii() else sum(_cell(char) for char in text)


def _cell(char: str) -> int:
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1


def head(text: str, width: int) -> str:
    """The beginning of `text` that fits into `width` columns."""
    if text.isascii():
        return text[: max(width, 0)]
    used = 0
    for i, char in enumerate(text):
        used += _cell(char)
        if used > width:
            return text[:i]
    return text


def elide(text: str, width: int) -> str:
    """`text` in at most `width` columns, its middle left out; the end of a path says more than its start."""
    if cells(text) <= width:
        return text
    front = head(text, max(width - 3, 0) // 3)
    back = head(text[::-1], max(width - 3 - cells(front), 0))[::-1]
    return head(f"{front}...{back}", width)


def wrap(text: str, width: int, *, most: int, first: str = "", rest: str = "") -> list[str]:
    """A paragraph of at most `most` lines; `first` and `rest` stand before its lines and count as width."""
    lines: list[str] = []
    line, empty = first, True
    for word in clean(text).split(" "):
        if not word:
            continue
        if not empty and cells(line) + 1 + cells(word) > width:
            lines.append(line)
            line, empty = rest, True
        line += word if empty else f" {word}"
        empty = False
        while cells(line) > width and len(lines) <= most:
            part = head(line, width)
            lines.append(part)
            line = rest + line[len(part) :]
    if not empty:
        lines.append(line)
    if len(lines) > most:
        last = lines[most - 1]
        lines[most - 1 :] = [head(last, width - 4) + " ..."]
    return lines
