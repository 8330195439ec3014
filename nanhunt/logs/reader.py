"""One log file as a stream of steps: each line is tried by the families of formats, the cheapest look first."""

from __future__ import annotations

import dataclasses
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from ..errors import UsageError
from ..symptoms.steps import Step
from .assembly import Assembly
from .boards import Board, is_board
from .entry import Entry
from .objects import Objects, is_document, of_document, parsed
from .shapes import Shapes, sample, telling
from .source import Progress, Source
from .spellings import plainly
from .tables import Table, header, is_rule

_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07]*\x07|\x1b[()][A-Z0-9]")
_REDRAWN = re.compile("[\r\b]+")
_RANK = re.compile(
    r"\s*(?:\[(?:rank|default|worker|gpu|proc(?:ess)?|node\d+|host\d+)[ _:]?(\d+)\]:?"
    r"|\[(\d+)\]:|\[\d+,(\d+)\]<std\w+>:?"
    r"|(?:rank|worker|process|gpu)[ _]?(\d+) ?[:|>] ?"
    r"|(\d+): (?=\s*(?:[\[{]|\d{4}-|\|)|.*\b(?:[Ss]tep|[Ii]ter(?:ation)?|[Ee]poch)\b))\s?"
)
# A decimal comma behind a name. Where three digits follow it, it may as well part the thousands.
_COMMA = re.compile(r"(?<=[^\W\d])([)\]\"']?\s*[=:]?\s*[-+]?)(\d+),(\d+)(?![\d.]|,\d|\s*\])")
_RANK_STARTS = frozenset(" [0123456789rRwWpPgG")
_KEPT = 5


class Reader:
    """One log file as a stream of steps.

    Args:
        name: what it is called.
        files: the file, "-", or several that follow each other.
        rank: whose log it is, where no line says that.
        progress: see `reading.read_log`.

    Attributes:
        formats: how many records each format gave.
        understood: number of lines a record or a message was read from.
    """

    def __init__(self, name: str, files: Sequence[str], *, rank: int = 0, progress: Progress | None = None) -> None:
        self.name = name
        self.formats: Counter[str] = Counter()
        self.understood = 0
        self._rank = rank
        self._assembly = Assembly()
        self._shapes = Shapes()
        self._objects = Objects()
        self._table: Table | None = None
        self._maybe: Table | None = None
        self._monitor = False
        self._commas = False  # the log has decimal commas
        self._own_ranks: set[int] = set()
        self._unknown: list[str] = []
        self._doubtful: list[str] = []
        self._lines = 0
        self._bytes = 0
        self._numbers = False
        self._remarks: list[str] = []
        self._sources = [Source(file, progress=progress) for file in files]  # refuses at once what cannot be read

    @property
    def lines(self) -> int:
        """Lines read so far; records, of a TensorBoard file."""
        return self._lines

    @property
    def ranks(self) -> int:
        """Number of ranks that speak in it."""
        return max(self._assembly.ranks, len(self._own_ranks))

    @property
    def unknown(self) -> tuple[str, ...]:
        """A few lines that hold numbers and were not understood; those with telling words first."""
        return tuple((self._unknown + self._doubtful)[:_KEPT])

    def steps(self) -> Iterator[Step]:
        """The steps, each as soon as nothing more can belong to it."""
        for source in self._sources:
            before = self._lines
            if is_board(source.path, source.start):
                source.close()
                yield from self._board(source.path)
            else:
                yield from self._text(source)
                self._lines = before + source.lines
            self._remarks += source.remarks()
            self._bytes += len(source.start)
        yield from self._assembly.end()

    def format(self) -> str:
        """How the log is written, the commonest first, messages behind the records."""
        names = [name for name, _ in self.formats.most_common()]
        names.sort(key=lambda name: name.endswith("messages"))
        return ", ".join(names[:4]) if names else "unknown"

    def remarks(self) -> list[str]:
        """What has to be said about the reading."""
        said = list(self._remarks)
        if not self._bytes:
            said.append("The file is empty.")
        elif not self.understood:
            said.append(
                "No step was read: no line gives a loss, a gradient norm or a validation metric by a known name "
                + ("(such as loss=2.31, 'grad_norm': 0.87)." if self._numbers else "and there are no numbers in it.")
            )
        if self._assembly.summed:
            said.append("The log gives parts of the loss and no total: their sum stands for it.")
        return said

    # ---- one file

    def _text(self, source: Source) -> Iterator[Step]:
        stem = os.path.basename(source.path).split(".")[0]
        text = source.text()
        first = next(text, "")
        pieces = _chained(first, text)
        if is_document(first):
            name = "trainer_state.json" if '"log_history"' in first or "trainer_state" in stem else "JSON document"
            yield from self._document(source, pieces, stem, name)
            return
        for number, line in source.numbered(pieces):
            if "\x1b" in line:
                line = _ANSI.sub("", line)
            if "\r" in line or "\b" in line:
                for part in _REDRAWN.split(line):
                    if part and not part.isspace():
                        yield from self._line(number, part, stem)
            elif line:
                yield from self._line(number, line, stem)

    def _document(self, source: Source, pieces: Iterator[str], stem: str, name: str) -> Iterator[Step]:
        counted = _Counted(pieces)
        for line, data in of_document(counted, stem):
            self._numbers = True
            entry = self._objects.read(data)
            if entry is not None:
                yield from self._entry(entry, line, self._rank, name)
        source.lines = counted.lines

    def _board(self, path: str) -> Iterator[Step]:
        board = Board(path)
        for entry in board.entries():
            self._numbers = True
            yield from self._entry(entry, None, self._rank, "TensorBoard events")
        self._lines += board.records
        if board.broken:
            self._remarks.append(f"The event file breaks off ({board.broken}); what comes before was read.")

    # ---- one line

    def _line(self, number: int, text: str, stem: str) -> Iterable[Step]:
        rank = self._rank
        if text[0] in _RANK_STARTS and (said := _RANK.match(text)):
            rank = int(next(group for group in said.groups() if group is not None)[:6])
            text = text[said.end() :]
        if self._table is not None or self._maybe is not None:
            row = self._row(text)
            if row is not None:
                self._numbers = True
                return self._entry(row, number, rank, self._table.dialect if self._table else "table")
        if not text.isascii():
            text = plainly(text)
        if "," in text and "." not in text:
            text = self._with_points(text)
        at = text.find('{"')
        if at >= 0 and text.rstrip().endswith("}"):
            data = parsed(text[at:])
            if isinstance(data, dict):
                return self._object(data, text, number, rank, at)
        shape, entry = self._shapes.read(text)
        self._numbers = self._numbers or shape.numbers
        if entry is not None:
            steps = self._entry(entry, number, rank, shape.dialect)
            if entry.event or entry.speaks() or entry.places():
                return steps
        if shape.fields is None and shape.message is None:
            if shape.strange and (table := header(text, stem)) is not None:
                self._maybe, self._table = table, None
            elif shape.numbers and not shape.bar:
                self._wonder(number, text, shape.strange)
        return ()

    def _with_points(self, text: str) -> str:
        """The line with decimal points for decimal commas, once one stands in the log that can be nothing else."""
        found = _COMMA.findall(text)
        if found and not self._commas:
            self._commas = any(len(after) != 3 or before == "0" for _, before, after in found)
        return _COMMA.sub(r"\1\2.\3", text) if found and self._commas else text

    def _row(self, text: str) -> Entry | None:
        table = self._table or self._maybe
        assert table is not None
        if is_rule(text):
            return None
        row = table.row(text)
        if row is not None:
            self._table, self._maybe = table, None
        elif self._maybe is not None:
            self._maybe = None  # its first row shows that it is none
        return row

    def _object(self, data: dict[str, object], text: str, number: int, rank: int, at: int) -> Iterable[Step]:
        self._numbers = True
        if "nanhunt_steps" in data:
            self._monitor = True
            self.understood += 1
            return ()
        if self._monitor:
            try:
                step = Step.from_dict(data)
                step.bad()
                self._own_ranks.add(step.rank)
            except (UsageError, TypeError, ValueError):
                self._wonder(number, text)
                return ()
            self.understood += 1
            self.formats["nanhunt steps"] += 1
            return (dataclasses.replace(step, line=number, rank=step.rank or rank),)
        entry = self._objects.read(data)
        if entry is None:
            if telling(text):
                self._wonder(number, text)
            return ()
        entry.summary = entry.summary or "| train |" in text  # fairseq's means over the epoch
        name = (
            "JSON lines"
            if at == 0
            else "fairseq json"
            if "train_inner" in text or "num_updates" in data
            else "JSON in lines"
        )
        return self._entry(entry, number, rank, name)

    def _entry(self, entry: Entry, line: int | None, rank: int, dialect: str) -> Iterable[Step]:
        if entry.event or entry.speaks():
            self.understood += 1
            self.formats[dialect] += 1
        return self._assembly.add(entry, line, rank)

    def _wonder(self, number: int, text: str, strange: bool = True) -> None:
        kept = self._unknown if strange and telling(text) else self._doubtful
        if len(kept) < _KEPT:
            kept.append(sample(number, text))


def _chained(first: str, rest: Iterator[str]) -> Iterator[str]:
    yield first
    yield from rest


class _Counted:
    """Pieces of text, with their lines counted."""

    def __init__(self, pieces: Iterator[str]) -> None:
        self._pieces = pieces
        self.lines = 0
        self._ended = True

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        try:
            piece = next(self._pieces)
        except StopIteration:
            self.lines += not self._ended
            self._ended = True
            raise
        self.lines += piece.count("\n")
        if piece:
            self._ended = piece.endswith("\n")
        return piece
