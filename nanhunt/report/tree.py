"""The model as a tree: the culprit and the way from it lit up, the rest folded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, TypeGuard

from ..finding import Finding
from ..numerics import fmt
from ..outline import lit
from .markup import Markup, join, tag, text, words

_SAYS = {
    "made": "made here",
    "read": "read here",
    "holds": "holds it",
    "way": "handed on",
    "noticed": "noticed here",
}
_MOST, _DEEPEST = 500, 60  # rows, and how deep they may stand


class _Row(NamedTuple):
    depth: int
    path: str
    name: str
    kind: str
    alike: int


def tree(finding: Finding) -> Markup | None:
    """Nested lists; None when the finding holds no outline of the model."""
    record = finding.context.get("modules")
    rows = _rows(record.get("rows")) if isinstance(record, Mapping) else []
    if not rows:
        return None
    parts = lit(finding)
    above = {path for part in parts for path in _above(part)}
    items: list[Markup] = []  # of the level that is being built, the last row first
    stack: list[tuple[int, list[Markup]]] = []  # levels above it that wait for what comes before
    for row in reversed(rows):
        while stack and stack[-1][0] > row.depth + 1:
            stack.pop()
        inside = stack.pop()[1] if stack and stack[-1][0] == row.depth + 1 else []
        item = _item(row, inside[::-1], parts, row.path in above)
        if stack and stack[-1][0] == row.depth:
            stack[-1][1].append(item)
        else:
            stack.append((row.depth, [item]))
    for _, level in stack:
        items += level[::-1]
    left_out = record.get("left_out") if isinstance(record, Mapping) else None
    more = (
        words("p", f"and {fmt(left_out)} rows more, the deepest of the model", class_="quiet")
        if _whole(left_out)
        else None
    )
    return join(tag("ul", *items, class_="tree"), more)


def _whole(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _rows(record: object) -> list[_Row]:
    """The rows of an outline, as far as they are what an outline has."""
    rows: list[_Row] = []
    names: list[str] = []
    for row in record[:_MOST] if isinstance(record, tuple) else ():
        if not isinstance(row, tuple) or len(row) not in (3, 5) or not isinstance(row[0], int):
            continue
        depth = min(max(row[0], 0), len(names), _DEEPEST)
        name, kind = str(row[1]), str(row[2])
        names[depth:] = [name]
        path = ".".join(names[1 : depth + 1])
        count = row[3] if len(row) == 5 and _whole(row[3]) else 1
        shown = name if len(row) == 3 else f"{name} … {row[4]}"
        rows.append(_Row(depth, path if count == 1 else "\0", shown, kind, count))
    return rows


def _above(path: str) -> list[str]:
    found = [""]
    while path:
        found.append(path)
        path = path.rpartition(".")[0]
    return found


def _item(row: _Row, inside: list[Markup], parts: Mapping[str, str], on_the_way: bool) -> Markup:
    part = parts.get(row.path)
    label = join(
        tag("code", text(row.name or "(the model itself)", 80)),
        tag("span", text(row.kind, 60), class_="quiet"),
        words("span", f"\N{MULTIPLICATION SIGN} {fmt(row.alike)}", class_="quiet") if row.alike > 1 else None,
        words("b", _SAYS[part], class_="chip" if part in ("made", "read", "holds") else "chip carried")
        if part is not None
        else None,
    )
    marks = " ".join(mark for mark, on in (("lit", on_the_way), (part or "", part is not None)) if on)
    label = tag("span", label, class_=f"module {marks}".rstrip())
    if not inside:
        return tag("li", label)
    opened = "" if on_the_way or not row.depth else None
    return tag("li", tag("details", tag("summary", label), tag("ul", *inside), open=opened))
