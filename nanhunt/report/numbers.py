"""Every number that a finding has of its tensors, as tables: what the pictures show, to be read and copied."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..finding import Finding, TensorStats
from ..numerics import COMPARED, fmt
from .lines import elide
from .markup import Markup, join, tag, words
from .words import bits, is_bad, known, percent, row_name, share

_MOST_EXPONENTS = 150


def _count(n: int | None) -> str:
    return "" if n is None else fmt(n)


def _index(at: tuple[int, ...] | None) -> str:
    return "" if at is None else f"[{', '.join(map(str, at[:12]))}]"


_ROWS: tuple[tuple[str, Callable[[TensorStats], str]], ...] = (
    ("dtype", lambda row: row.dtype or ""),
    (
        "shape",
        lambda row: (
            ""
            if row.shape is None
            else "\N{MULTIPLICATION SIGN}".join("*" if n < 0 else str(n) for n in row.shape) or "scalar"
        ),
    ),
    ("device", lambda row: row.device or ""),
    ("numbers", lambda row: _count(row.numel)),
    ("nan", lambda row: _count(row.nan)),
    ("+inf", lambda row: _count(row.pos_inf)),
    ("-inf", lambda row: _count(row.neg_inf)),
    ("first of them at", lambda row: _index(row.first_bad)),
    ("smallest", lambda row: known(row.min)),
    ("largest", lambda row: known(row.max)),
    ("largest size", lambda row: known(row.absmax)),
    ("smallest size but 0", lambda row: known(row.smallest_nonzero)),
    (
        "zero",
        lambda row: " \N{MIDDLE DOT} ".join(part for part in (_count(row.zero), share(row.zero, row.numel)) if part),
    ),
    (
        "subnormal",
        lambda row: " \N{MIDDLE DOT} ".join(
            part for part in (_count(row.subnormal), percent(row.below_normal)) if part
        ),
    ),
    ("headroom, bits", lambda row: bits(row.headroom_bits)),
    *((f"in {name.removesuffix('fn')}", lambda row, name=name: bits(row.headroom.get(name))) for name in COMPARED),
)


def numbers(finding: Finding, rows: Sequence[TensorStats]) -> Markup:
    """A column for each tensor, a row for each number; rows that say nothing of any tensor are left out."""
    told = [(name, [say(row) for row in rows]) for name, say in _ROWS]
    body = [
        tag(
            "tr",
            words("th", name, scope="row"),
            *(
                words("td", value, class_="bad" if name in ("nan", "+inf", "-inf") and value not in ("", "0") else None)
                for value in values
            ),
        )
        for name, values in told
        if any(values)
    ]
    return _scrolling(_table(finding, rows, body, "numbers"), "Numbers of the tensors")


def counts(finding: Finding, rows: Sequence[TensorStats]) -> Markup | None:
    """How many numbers of each tensor have which exponent, folded away."""
    held = [(row, dict(enumerate(row.exponents[1], row.exponents[0]))) for row in rows if row.exponents is not None]
    exponents = sorted({e for _, histogram in held for e, n in histogram.items() if n}, reverse=True)
    if not exponents:
        return None
    shown = exponents[:_MOST_EXPONENTS]
    body = [
        tag(
            "tr",
            words("th", f"2^{exponent} to 2^{exponent + 1}", scope="row"),
            *(words("td", fmt(histogram[exponent]) if histogram.get(exponent) else "") for _, histogram in held),
        )
        for exponent in shown
    ]
    table = _table(finding, [row for row, _ in held], body, "numbers")
    more = len(exponents) - len(shown)
    note = words("p", f"and {fmt(more)} smaller ones", class_="quiet") if more else None
    summary = words("summary", "How many numbers have which exponent")
    return tag("details", summary, join(_scrolling(table, "Counts by exponent"), note))


def _table(finding: Finding, rows: Sequence[TensorStats], body: Sequence[Markup], kind: str) -> Markup:
    names = (
        words("th", elide(row_name(row, finding), 120), scope="col", class_="bad" if is_bad(row) else None)
        for row in rows
    )
    return tag("table", tag("thead", tag("tr", tag("td"), *names)), tag("tbody", *body), class_=kind)


def _scrolling(table: Markup, name: str) -> Markup:
    return tag("div", table, class_="scrolls", role="region", aria_label=name, tabindex=0)
