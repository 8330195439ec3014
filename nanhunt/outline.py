"""The model as an outline: alike siblings on one row, what the finding speaks of on rows of its own."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from .finding import Finding

_MOST = 400  # rows
_LONGEST = 120  # of a name
_MANY = 4  # alike neighbours share a row whatever their names; fewer when they are numbered

# As a hop of context["path"] is written: `forward: aten.exp.default in encoder.act gave +inf  file.py:8  ...`
HOP = re.compile(
    r"(?P<phase>\w+): (?P<op>\S+)(?: in (?P<module>.+?))? gave (?P<kind>nan|[+-]inf)(?:  (?P<where>.*))?", re.DOTALL
)


def lit(finding: Finding) -> dict[str, str]:
    """Path of a module to its part in the finding: "made", "read", "holds", "way" or "noticed"."""
    hops = finding.context.get("path")
    told = [HOP.fullmatch(str(hop)) for hop in (hops if isinstance(hops, tuple) else ())]
    way = ["" if hop["module"] == "the root" else hop["module"] for hop in told if hop and hop["module"]]
    noticed = way[-1] if way and told[-1] and told[-1]["module"] else None
    reached = finding.context.get("reached")
    if not way and isinstance(reached, tuple) and reached:  # no op was followed: the modules that it came through
        way = [str(path) for path in reached]
        noticed = "" if "" in way else way[-1]
    parts = dict.fromkeys(way, "way")
    if noticed is not None:
        parts[noticed] = "noticed"
    if finding.phase in ("state", "optimizer") and finding.tensor:
        parts[finding.tensor.rpartition(" of ")[2].rpartition(".")[0]] = "holds"
    if finding.module is not None:
        parts[finding.module] = "read" if finding.phase == "state" else "made"
    return parts


def outline(types: Mapping[str, str], of_interest: Iterable[str]) -> dict[str, Any]:
    """`{"modules": n, "left_out": rows, "rows": ((depth, name, type), (depth, name, type, how many, last), ...)}`.

    `types` maps the path of every module to its type, parents before children. Rows are in the order of the
    model. Neighbours that look alike, all the way down, share a row, which shows what is inside the first of
    them, unless one of their kind is shown beside it. The modules `of_interest`, those around them and those
    inside them keep rows of their own; of the others the deepest go first when there would be more than 400.
    """
    kept = {path for path in of_interest if path in types}
    for path in tuple(kept):
        while path:
            path = path.rpartition(".")[0]
            kept.add(path)
    children: dict[str, list[str]] = {}
    for path in types:
        if path:
            children.setdefault(_parent(path, types), []).append(path)
    shapes = _shapes(types, children)
    rows: list[tuple[int, tuple[Any, ...]]] = []  # with how soon it has to go
    todo: list[tuple[str, int, int, str, bool]] = [("", 0, 1, "", True)] if "" in types else []
    while todo:
        path, depth, count, last, opened = todo.pop()
        above = _parent(path, types) if path else path
        name = _own_name(path, above)
        row: tuple[Any, ...] = (depth, name[:_LONGEST], types[path][:_LONGEST])
        rank = 0 if path in kept or not path else 1 if above in kept else 2 + depth
        rows.append((rank, (*row, count, _own_name(last, above)[:_LONGEST]) if count > 1 else row))
        inner = children.get(path, ()) if opened else ()
        runs = list(_runs(inner, shapes, kept))
        shown = {shapes[child] for child in inner if child in kept}
        for first, number, end in reversed(runs):
            todo.append((first, depth + 1, number, end, first in kept or shapes[first] not in shown))
    total = len(rows)
    if total > _MOST:
        staying = sorted(sorted(range(len(rows)), key=lambda at: rows[at][0])[:_MOST])
        rows = [rows[at] for at in staying]
    return {"modules": len(types), "left_out": total - len(rows), "rows": tuple(row for _, row in rows)}


def _parent(path: str, types: Mapping[str, str]) -> str:
    path = path.rpartition(".")[0]
    while path and path not in types:
        path = path.rpartition(".")[0]
    return path


def _own_name(path: str, parent: str) -> str:
    return path[len(parent) + 1 :] if parent else path


def _shapes(types: Mapping[str, str], children: Mapping[str, Sequence[str]]) -> dict[str, int]:
    """A number for each path: the same for two modules that print alike, names of their own aside."""
    numbers: dict[tuple[Any, ...], int] = {}
    shapes: dict[str, int] = {}
    for path in reversed(list(types)):
        inside = tuple((_own_name(child, path), shapes[child]) for child in children.get(path, ()))
        shapes[path] = numbers.setdefault((types[path], inside), len(numbers))
    return shapes


def _runs(paths: Sequence[str], shapes: Mapping[str, int], kept: set[str]) -> Iterator[tuple[str, int, str]]:
    """(first, how many, last) of neighbours that look alike; what is kept, or has a name that tells, is alone."""
    at = 0
    while at < len(paths):
        end = at + 1
        if paths[at] not in kept:
            while end < len(paths) and paths[end] not in kept and shapes[paths[end]] == shapes[paths[at]]:
                end += 1
        run = paths[at:end]
        if len(run) >= _MANY or all(path[-1:].isdecimal() for path in run):
            yield run[0], len(run), run[-1]
        else:
            yield from ((path, 1, path) for path in run)
        at = end
