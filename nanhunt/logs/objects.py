"""JSON objects of any nesting, one a line or many in a document, as entries."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from .entry import Entry, Fields, flat, meanings_of
from .names import Meaning

_VALIDATION = {"val", "valid", "validation", "test", "eval", "evaluation", "dev"}
_SPLITS = ("mode", "split", "phase", "subset", "stage")
_ELEMENT = 4 << 20
_WHOLE = 64 << 20


class Objects:
    """Reads objects, and remembers which keys mean what."""

    def __init__(self) -> None:
        self._known: dict[tuple[tuple[str, ...], bool], Fields] = {}

    def read(self, data: Mapping[str, Any]) -> Entry | None:
        """What an object says; None where it says nothing of a step."""
        numbers = flat(data)
        if not numbers:
            return None
        validation = any(str(data[key]).lower() in _VALIDATION for key in _SPLITS if key in data)
        look = (tuple(numbers), validation)
        fields = self._known.get(look)
        if fields is None:
            if len(self._known) > 4096:
                self._known.clear()
            meanings = meanings_of(list(numbers))
            if validation:
                meanings = [_checked(what) for what in meanings]
            summary = "train_runtime" in numbers
            fields = self._known[look] = Fields(meanings, validation=validation, summary=summary)
        if not fields.rich:
            return None
        entry = fields.entry(list(numbers.values()))
        return entry if entry.speaks() or entry.places() else None


def parsed(text: str) -> Any:
    """The value that a piece of JSON holds; None where it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _checked(what: Meaning | None) -> Meaning | None:
    if what is not None and what.kind in ("loss", "losses", "score"):
        return Meaning("metric", 0, f"val {what.name}")
    return None if what is not None and what.kind == "batch" else what


def is_document(start: str) -> bool:
    """A file that begins like this is one JSON value over many lines (or one huge line), not one value a line."""
    head = start.lstrip("\ufeff \t\r\n")
    if not head.startswith(("{", "[")):
        return False
    first, _, rest = head.partition("\n")
    first = first.strip()
    if first in ("{", "[", "[{", "[[") or (first.startswith("{") and first.endswith("[")):
        return True
    if first[:1] == "[" and first[1:].lstrip()[:1] not in ("{", "["):
        return False
    whole = parsed(first)
    if whole is not None:
        listed = isinstance(whole, list) or any(
            isinstance(v, list) and v and isinstance(v[0], dict) for v in whole.values()
        )
        columns = isinstance(whole, dict) and not rest.strip() and any(isinstance(v, list) for v in whole.values())
        return not rest.strip().startswith("{") and (listed or columns)
    return '"' in first[:400] and ":" in first and (not rest or rest[:1] in (" ", "\t", "]", "}"))


def of_document(text: Iterator[str], stem: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """The records of a JSON document, with the line each begins in: objects that stand in a list, or else columns.

    Only one element is held at a time. A document without such a list is read whole, up to 64 MB.
    """
    decoder = json.JSONDecoder()
    buffer, line = "", 1
    whole: list[str] = []
    size, found, inside = 0, False, False
    pieces = iter(text)
    ended = False
    while True:
        at = _element(buffer, inside)
        if at is None and inside and not buffer.strip(" \t\r\n,"):
            pass  # the next element comes with the next piece
        elif at is None:
            inside = False
            kept = buffer[-64:] if not ended else ""
            line += buffer.count("\n") - kept.count("\n")
            buffer = kept
        else:
            line += buffer.count("\n", 0, at)
            buffer = buffer[at:]
            try:
                value, end = decoder.raw_decode(buffer)
            except (ValueError, RecursionError):
                value, end = None, 0
            if end:
                if isinstance(value, Mapping):
                    found = True
                    whole = []
                    yield line, value
                line += buffer.count("\n", 0, end)
                buffer, inside = buffer[end:], True
                continue
            if ended or len(buffer) > _ELEMENT:  # broken, or no element: go on behind its bracket
                buffer, inside = buffer[1:], False
                continue
        if ended:
            break
        piece = next(pieces, None)
        if piece is None:
            ended = True
            continue
        size += len(piece)
        buffer += piece
        if not found and size <= _WHOLE:
            whole.append(piece)
        else:
            whole = []
    if not found and whole:
        yield from _of_whole(parsed("".join(whole).lstrip("\ufeff")), stem)


def _element(buffer: str, inside: bool) -> int | None:
    """Where the next element of a list of objects begins."""
    if inside:
        left = buffer.lstrip()
        if left.startswith(","):
            left = left[1:].lstrip()
        if left.startswith("{"):
            return len(buffer) - len(left)
        if not left:
            return None
    at = -1
    while (at := buffer.find("[", at + 1)) >= 0:
        behind = at + 1
        while behind < len(buffer) and buffer[behind] in " \t\r\n":
            behind += 1
        if behind < len(buffer) and buffer[behind] == "{":
            return behind
    return None


def _of_whole(data: Any, stem: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    if isinstance(data, Mapping):
        columns = {key: value for key, value in data.items() if isinstance(value, list) and value}
        columns = {key: value for key, value in columns.items() if not isinstance(value[0], list | Mapping)}
        nested = [value for value in data.values() if isinstance(value, Mapping)]
        if columns:
            for row in range(max(map(len, columns.values()))):
                yield 1, {key: value[row] for key, value in columns.items() if row < len(value)}
        elif len(nested) > 1 and all(flat(value) for value in nested[:20]) and "loss" in str(list(nested[0])).lower():
            for value in nested:
                yield 1, value
        else:
            yield 1, data
    elif isinstance(data, list):  # [[wall time, step, value], ..] as TensorBoard exports
        name = stem if "loss" in stem.lower() or "norm" in stem.lower() else "loss"
        for row in data:
            if isinstance(row, list) and len(row) == 3 and all(isinstance(v, int | float) for v in row):
                yield 1, {"step": row[1], name: row[2]}
