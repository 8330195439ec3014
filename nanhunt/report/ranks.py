"""Many ranks in one picture: who made it, who was handed it, step by step."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..consensus import Consensus, consent, ranks_in_words, was_handed
from ..finding import Finding
from ..numerics import fmt
from .lines import wrap
from .markup import Markup, join, percent, tag, words
from .table import Column, table

_RANK, _RESTART = re.compile(r"rank(\d{1,7})(?!\d)"), re.compile(r"restart(\d{1,6})(?!\d)")
_STEPS, _BEFORE = 12, 2  # columns of the picture; those before the first fault
_ROWS = 12  # kinds of ranks that the table tells apart
_BANDS = 128  # of the drawing: more ranks share one
FIRST, MADE, HANDED, CLEAN, UNKNOWN, AFTER = "first", "made", "handed", "clean", "unknown", "after"
_SIGNS = {FIRST: "X", MADE: "x", HANDED: "o", CLEAN: ".", UNKNOWN: "?", AFTER: ""}
_WORST = (FIRST, MADE, HANDED, UNKNOWN, CLEAN, AFTER)
_LEGEND = "X first, x made there too, o handed or what came of it, . clean, ? nothing known"
HOW_TO_READ = (
    "From top to bottom the ranks, rank 0 first, and a column for each step. Red: the first of all; framed in red: "
    "made on that rank too; grey: handed by another process, or what came of it; pale: clean; dotted: nothing is known."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """The ranks of one start of a job: an elastic launcher may have started it several times."""

    restart: int
    consensus: Consensus


def place(name: str, finding: Finding | None) -> tuple[int, int] | None:
    """(restart, rank) of a file of findings, from what it holds, else from its name; None for one of no rank."""
    base = os.path.basename(name)
    named = _RANK.search(base)
    rank = finding.rank if finding is not None and finding.rank is not None else int(named[1]) if named else None
    if rank is None:
        return None
    told = finding.context.get("restart") if finding is not None else None
    again = _RESTART.search(base)
    return (told if isinstance(told, int) else int(again[1]) if again else 0), rank


def attempts(read: Iterable[tuple[str, Sequence[Finding]]]) -> list[Attempt]:
    """What the files say of each start of the job; empty where they are not those of several ranks."""
    words: dict[int, dict[int, list[Finding]]] = {}
    for name, findings in read:
        at = place(name, None)
        if at is not None and not findings:
            words.setdefault(at[0], {}).setdefault(at[1], [])
        for finding in findings:
            at = place(name, finding)
            if at is not None:
                words.setdefault(at[0], {}).setdefault(at[1], []).append(finding)
    if len({rank for said in words.values() for rank in said}) < 2:
        return []
    return [Attempt(restart=restart, consensus=consent(said)) for restart, said in sorted(words.items())]


def chosen(tried: Sequence[Attempt]) -> Attempt:
    """The first start of the job that has a fault, else the last."""
    return next((one for one in tried if one.consensus.verdict is not None), tried[-1])


def text(said: Consensus, width: int = 100) -> str:
    """The picture for a terminal: ranks that went the same way share a row."""
    steps = _columns(said)
    rows = _rows(said, steps)
    alike: dict[tuple[str, ...], list[int]] = {}
    for rank, row in enumerate(rows):
        alike.setdefault(row, []).append(rank)
    order = sorted(alike, key=lambda row: (min(map(_WORST.index, row), default=0), alike[row][0]))
    shown = order[:_ROWS]
    columns = [Column("ranks", [ranks_in_words(alike[row]) for row in shown], left=True, shrinks=True)]
    columns += [
        Column(name, [_SIGNS[row[at]] for row in shown], give=len(steps) - at)
        for at, name in enumerate(_headings(steps))
    ]
    lines = [f"Ranks by step ({_LEGEND})", *(table(columns, width) if shown else [])]
    if len(order) > len(shown):
        left_out = sum(len(alike[row]) for row in order[_ROWS:])
        lines.append(f"(and {fmt(left_out)} ranks that went other ways)")
    return "\n".join([*lines, "", *wrap(summary(said), width, most=4)])


def summary(said: Consensus) -> str:
    """How many ranks there are, and what is known of them."""
    handed = sum(all(map(was_handed, found[:1])) for found in said.faults.values())
    parts = [f"{fmt(len(said.faults))} with a fault" + (f" ({fmt(handed)} only handed it)" if handed else "")]
    parts.append(f"{fmt(len(said.clean))} clean")
    if said.silent:
        parts.append(f"nothing known of {ranks_in_words(said.silent)}")
    return f"{fmt(said.world)} ranks: {', '.join(parts)}."


def drawing(said: Consensus) -> Markup:
    """The picture for a page: every rank in its place, neighbours that went the same way as one block."""
    steps = _columns(said)
    rows = _rows(said, steps)
    size = -(-len(rows) // _BANDS)
    bands = [
        tuple(min((row[at] for row in rows[first : first + size]), key=_WORST.index) for at in range(len(steps)))
        for first in range(0, len(rows), size)
    ]
    wide, high = 100.0 / max(1, len(steps)), 100.0 / max(1, len(bands))
    blocks: list[Markup] = []
    for at in range(len(steps)):
        first = 0
        while first < len(bands):
            state = bands[first][at]
            end = first + 1
            while end < len(bands) and bands[end][at] == state:
                end += 1
            if state != AFTER:
                blocks.append(
                    tag(
                        "rect",
                        x=percent(at * wide + 0.1),
                        y=percent(first * high),
                        width=percent(wide - 0.2),
                        height=percent((end - first) * high),
                        class_=f"rank-{state}",
                    )
                )
            first = end
    tall = min(480, max(48, 8 * len(bands)))
    heads = [words("span", name) for name in _headings(steps)]
    title = words("title", f"{fmt(said.world)} ranks, {fmt(len(steps))} steps")
    return join(
        tag("div", *heads, class_="rank-steps"),
        tag("svg", title, *blocks, width="100%", height=tall, role="img", class_="ranks"),
        words("p", summary(said)),
    )


# --- who did what in which step --------------------------------------------------------------------


def _columns(said: Consensus) -> list[tuple[int, int]]:
    """The steps that the picture shows, as (first, end) each: the first fault, a little before, and what came of it."""
    met = [f.step for found in said.faults.values() for f in found if f.step is not None]
    if not met:
        return []
    first, last = max(0, min(met) - _BEFORE), max(met)
    near = list(range(first, min(last + 1, first + _STEPS)))
    columns = [(step, step + 1) for step in near]
    if near[-1] < last:  # what is far away shares the last column
        columns[-1] = (columns[-1][0], last + 1)
    return columns


def _headings(steps: Sequence[tuple[int, int]]) -> list[str]:
    names = [str(first) if end == first + 1 else f"{first}-{end - 1}" for first, end in steps]
    return [f"step {name}" if at == 0 else name for at, name in enumerate(names)]


def _rows(said: Consensus, steps: Sequence[tuple[int, int]]) -> list[tuple[str, ...]]:
    """What each rank did in each of the steps."""
    first = said.verdict.rank if said.verdict is not None else None
    silent = set(said.silent)
    rows: list[tuple[str, ...]] = []
    for rank in range(said.world):
        if rank in silent:
            rows.append((UNKNOWN,) * len(steps))
            continue
        found = said.faults.get(rank, ())
        began = min((f.step for f in found if f.step is not None), default=None)
        row = []
        for start, end in steps:
            here = [f for f in found if f.step is not None and start <= f.step < end]
            if here:
                made = here[0].step == began and not was_handed(here[0])
                row.append((FIRST if rank == first else MADE) if made else HANDED)
            else:
                row.append(CLEAN if began is None or start < began else AFTER)
        rows.append(tuple(row))
    return rows
