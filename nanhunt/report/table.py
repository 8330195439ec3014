"""A table that fits: the columns that say something, as many as there is room for."""

from __future__ import annotations

from collections.abc import Sequence

from tabulate import tabulate

from .lines import cells, elide, head


class Column:
    """A column of a table; `give` is its turn to go when the table is too wide, 0 never."""

    __slots__ = ("give", "left", "name", "shrinks", "values")

    def __init__(
        self, name: str, values: Sequence[str], *, left: bool = False, shrinks: bool = False, give: int = 0
    ) -> None:
        self.name, self.values, self.left, self.shrinks, self.give = name, values, left, shrinks, give

    def says(self) -> bool:
        return any(value not in ("", "?") for value in self.values)

    def width(self) -> int:
        return max(cells(self.name), *(cells(value) for value in self.values))


def table(columns: list[Column], width: int) -> list[str]:
    """Header and rows: the columns that say something, as many as fit, names elided."""
    columns = [column for column in columns if column.says()]
    if not columns:
        return []
    # Names give way down to a size at which a path can still be told, then the least important columns go.
    for limit, gives in ((60, 0), (44, 3), (34, 5), (26, 7), (20, 99)):
        for column in columns:
            if column.shrinks:
                column.values = [elide(value, limit) for value in column.values]
        while _total(columns) > width and (going := [c for c in columns if 0 < c.give <= gives]):
            columns.remove(min(going, key=lambda column: column.give))
        if _total(columns) <= width:
            break
    # The header goes in as a row: tabulate pads real headers by two columns that nothing can take away.
    text = tabulate(
        [[column.name for column in columns], *zip(*(column.values for column in columns), strict=True)],
        tablefmt="plain",
        colalign=["left" if column.left else "right" for column in columns],
        disable_numparse=True,
    )
    return [head(line, width).rstrip() for line in text.split("\n")]


def _total(columns: list[Column]) -> int:
    return sum(column.width() for column in columns) + 2 * (len(columns) - 1)
