"""Tables with a header: CSV, TSV, Lightning's metrics.csv, Keras CSVLogger, ultralytics, columns set with blanks."""

from __future__ import annotations

import csv
import re

from .entry import Entry, Fields
from .names import Meaning, meaning
from .spellings import number

_WORTH = ("loss", "losses", "grad_norm", "metric", "score", "loss_scale")
_RULE = re.compile(r"[\s|+:=\-]*")
_HINT = re.compile(r"loss|gpu_mem|norm|acc|metric|\bvalue\b|map|score|scale|nll|\blr\b", re.I)
_VALIDATION = {"val", "valid", "validation", "test", "eval", "evaluation", "dev"}
_SPLITS = {"split", "phase", "mode", "subset", "set", "stage", "partition"}
_BEHIND = re.compile(r":?\s*\d+%\|.*")  # a progress bar beside the names, as ultralytics draws it
_UNITS = re.compile(r"([-+]?\d+(?:\.\d*)?(?:e[-+]?\d+)?|[-+]?nan|[-+]?inf)(?:[A-Za-z%:]{1,3}|/\d+)?", re.I)


class Table:
    """A header that was read, and the way to read rows under it.

    Attributes:
        dialect: name of the format.
    """

    def __init__(self, cells: list[str], delimiter: str | None, meanings: list[Meaning | None]) -> None:
        self._width = len(cells)
        self._delimiter = delimiter
        self._used = [at for at, what in enumerate(meanings) if what is not None and what.kind != "ignored"]
        kept = [meanings[at] for at in self._used]
        self._fields = Fields(kept)
        checked = [
            Meaning("metric", 0, f"val {what.name}") if what and what.kind in ("loss", "losses", "score") else what
            for what in kept
        ]
        self._checked = Fields(checked, validation=True)
        self._split = next((at for at, cell in enumerate(cells) if cell.lower() in _SPLITS), None)
        self.dialect = _dialect(cells, delimiter)
        self._begins: bool | None = None

    def row(self, text: str) -> Entry | None:
        """What a row says; None where the line is no row of this table."""
        cells = _cells(text, self._delimiter)
        if len(cells) != self._width and (self._delimiter is not None or len(cells) < self._width):
            return None
        if self._delimiter is None:  # blanks part everything: rows have to begin alike, with a word or with a number
            begins = cells[0][:1].isalpha()
            if self._begins not in (None, begins):
                return None
            self._begins = begins
        values: list[float | None] = []
        words = 0
        for at in self._used:
            cell = cells[at]
            try:
                value: float | None = float(cell)
            except ValueError:
                value = _cell(cell, self._delimiter)
                if value is None and cell.strip() and not _missing(cell):
                    words += 1
            values.append(value)
        if words * (2 if self._delimiter else len(values) + 1) > len(values):
            return None
        if values.count(None) == len(values):
            return Entry() if words == 0 and any(cell.strip() for cell in cells) else None
        if self._split is not None and cells[self._split].strip().strip('"').lower() in _VALIDATION:
            return self._checked.entry(values)
        return self._fields.entry(values)


def header(text: str, stem: str) -> Table | None:
    """The table that a line may be the header of; its first row has to show that it is.

    Args:
        text: the line.
        stem: name of the file, which says what a column that is called "Value" holds.
    """
    if len(text) > 20000 or not _HINT.search(text):
        return None
    delimiters = [d for d in ("\t", ",", ";", "|") if d in text]
    text = _BEHIND.sub("", text)
    for delimiter in (*delimiters, None):
        cells = [cell.strip().strip("\"'").strip() for cell in _cells(text, delimiter)]
        cells = [cell.rstrip(")") if "(" not in cell else cell for cell in cells]
        if delimiter is None and len(cells) < 2:
            if not re.fullmatch(r"\s*[\w/.]+\s*", text):
                continue
        elif len(cells) < 2:
            continue
        if any(number(cell) is not None or len(cell) > 100 for cell in cells):
            continue
        meanings = [_column(cell) for cell in cells]
        lower = [cell.lower() for cell in cells]
        if "value" in lower and "step" in lower:  # what TensorBoard exports
            meanings[lower.index("value")] = _of_file(stem)
        if any(what is not None and what.kind in _WORTH for what in meanings):
            return Table(cells, delimiter, meanings)
    return None


def is_rule(text: str) -> bool:
    """A line that is drawn between a header and its rows."""
    return _RULE.fullmatch(text) is not None


def _column(cell: str) -> Meaning | None:
    if cell in ("box", "obj", "cls", "dfl"):  # as ultralytics calls the parts of its loss
        return Meaning("losses", 20, cell)
    # W&B exports "name of the run - train/loss", with __MIN and __MAX beside it.
    return meaning(cell) or (meaning(cell.rpartition(" - ")[2]) if " - " in cell else None)


def _of_file(stem: str) -> Meaning:
    for piece in (stem, re.sub(r"^run[-_].*tag[-_]", "", stem), stem.rpartition("-")[2]):
        found = meaning(piece)
        if found is not None and found.kind in (*_WORTH, "lr"):
            return found
    return Meaning("loss", 1, "Value")


def _cells(text: str, delimiter: str | None) -> list[str]:
    if delimiter is None:
        return text.split()
    if '"' in text:
        try:
            return next(csv.reader([text], delimiter=delimiter), [])
        except csv.Error:
            return text.split(delimiter)
    if delimiter == "|":
        text = text.strip().strip("|")
    return text.split(delimiter)


def _cell(cell: str, delimiter: str | None) -> float | None:
    value = number(cell)
    if value is None and (found := _UNITS.fullmatch(cell.strip())) and delimiter is None:
        value = number(found[1])
    if value is None and delimiter == ";" and cell.count(",") == 1:  # a decimal comma
        value = number(cell.replace(",", "."))
    if value is None and cell.strip().lower() in ("true", "false"):
        value = float(cell.strip().lower() == "true")
    return value


def _missing(cell: str) -> bool:
    return cell.strip().strip("\"'").lower() in ("", "none", "null", "na", "n/a", "-", "--", "<na>")


def _dialect(cells: list[str], delimiter: str | None) -> str:
    names = {cell.lower() for cell in cells}
    if {"epoch", "step"} <= names and delimiter == ",":
        return "Lightning metrics.csv"
    if names & {"train/box_loss", "box_loss", "box"} and names & {"epoch", "gpu_mem"}:
        return "ultralytics table"
    return {",": "CSV", "\t": "TSV", ";": "CSV with semicolons", "|": "table with bars", None: "table"}[delimiter]
