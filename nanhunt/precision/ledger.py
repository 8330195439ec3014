"""What a profile has counted so far, where the numbers live: nothing is read before somebody asks."""

from __future__ import annotations

import torch

from .exponents import histogram
from .profiles import Numbers
from .spectra import Histogram

Tensor = torch.Tensor

_ENTRIES = 256  # of a course: then two steps share one, then four
_AT_ONCE = 128  # rows that one read brings to the host


class _Cell:
    """One row on one device: its counts, and the largest number of the running step."""

    __slots__ = ("counts", "peak")

    def __init__(self, counts: Tensor) -> None:
        self.counts = counts
        self.peak: Tensor | None = None


class _Shelf:
    """All cells of one device, and for each step the largest numbers of all of them in one tensor."""

    def __init__(self, device: torch.device, entries: int) -> None:
        # Not every device knows float64; where none does, no float64 comes either.
        self.dtype = torch.float32 if device.type == "mps" else torch.float64
        self.none = torch.full((), -1.0, dtype=self.dtype, device=device)
        self.cells: list[_Cell] = []
        self.course: list[Tensor | None] = [None] * entries

    def peaks(self) -> Tensor:
        """The largest numbers of the running step, -1 where there is none."""
        taken = [self.none if cell.peak is None else cell.peak.to(self.dtype) for cell in self.cells]
        return torch.stack(taken) if taken else self.none.reshape(1)[:0]


class Row:
    """One role of one module, whose numbers may stand on several devices."""

    __slots__ = ("cells", "dtypes", "tensors")

    def __init__(self) -> None:
        self.cells: dict[torch.device, int] = {}  # device -> place on its shelf
        self.dtypes: dict[str, None] = {}
        self.tensors = 0


class Ledger:
    """Rows of counts, and the course of their largest numbers over the steps."""

    def __init__(self) -> None:
        self._shelves: dict[torch.device, _Shelf] = {}
        self._span = 1  # steps of one entry
        self._filled = 0  # steps in the last entry
        self._touched = False  # in the running step
        self._last = -1  # the step that was put aside last
        self.steps: list[int] = []  # the first step of each entry
        self.scales: list[Tensor | None] = []
        self.reads = 0  # host reads so far

    def add(self, row: Row, counts: Tensor, peak: Tensor, dtype: str) -> None:
        """Take in what was counted of one tensor; both are copied or added, neither is kept."""
        shelf = self._shelves.get(counts.device)
        if shelf is None:
            shelf = self._shelves[counts.device] = _Shelf(counts.device, len(self.steps))
        at = row.cells.get(counts.device)
        if at is None:
            row.cells[counts.device] = len(shelf.cells)
            cell = _Cell(counts.clone())
            shelf.cells.append(cell)
        else:
            cell = shelf.cells[at]
            cell.counts.add_(counts)
        cell.peak = peak if cell.peak is None else torch.maximum(cell.peak, peak)
        row.dtypes[dtype] = None
        row.tensors += 1
        self._touched = True

    def end_step(self, step: int, scale: Tensor | None) -> None:
        """Put the largest numbers of the step aside; a step in which nothing was counted leaves no entry."""
        if not self._touched:
            return
        self._touched = False
        if step == self._last:  # the record was asked for while the step ran
            self._filled -= 1
        elif not self.steps or self._filled >= self._span:
            if len(self.steps) == _ENTRIES:
                self._halve()
            self.steps.append(step)
            self.scales.append(None)
            self._filled = 0
            for shelf in self._shelves.values():
                shelf.course.append(None)
        self._filled += 1
        self._last = step
        self.scales[-1] = scale if scale is not None else self.scales[-1]
        for shelf in self._shelves.values():
            shelf.course[-1:] = [_larger(shelf.course[-1] if shelf.course else None, shelf.peaks(), shelf.none)]
            for cell in shelf.cells:
                cell.peak = None

    def _halve(self) -> None:
        self.steps = self.steps[::2]
        self.scales = [later if later is not None else first for first, later in zip(*[iter(self.scales)] * 2)]
        for shelf in self._shelves.values():
            pairs = zip(*[iter(shelf.course)] * 2)
            shelf.course = [_larger(first, later, shelf.none) for first, later in pairs]
        self._span *= 2

    def read(self, rows: list[Row]) -> list[Numbers]:
        """The rows as the record has them, read from their devices; those that nothing was added to are empty."""
        held = {device: (self._counts(shelf), self._courses(shelf)) for device, shelf in self._shelves.items()}
        return [self._numbers(row, held) for row in rows]

    def loss_scales(self) -> tuple[float | None, ...]:
        return tuple(None if scale is None else float(scale) for scale in self.scales)

    def _counts(self, shelf: _Shelf) -> list[Histogram]:
        found = []
        for at in range(0, len(shelf.cells), _AT_ONCE):
            read = torch.stack([cell.counts for cell in shelf.cells[at : at + _AT_ONCE]]).cpu()
            self.reads += 1
            found += [histogram(counts) for counts in read]
        return found

    def _courses(self, shelf: _Shelf) -> list[list[float]]:
        """For each cell its largest number in each entry, -1 where there is none."""
        width = len(shelf.cells)
        columns = [
            shelf.none.expand(width) if one is None else torch.cat([one, shelf.none.expand(width - one.numel())])
            for one in shelf.course
        ]
        if not columns or not width:
            return [[] for _ in range(width)]
        self.reads += 1
        read: list[list[float]] = torch.stack(columns, 1).tolist()
        return read

    def _numbers(self, row: Row, held: dict[torch.device, tuple[list[Histogram], list[list[float]]]]) -> Numbers:
        course = [-1.0] * len(self.steps)
        counted = Histogram()
        for device, at in row.cells.items():
            histograms, courses = held[device]
            counted = counted + histograms[at]
            course = [max(pair) for pair in zip(course, courses[at])]
        trend = tuple(None if size < 0 else size for size in course)
        finite = counted.finite > 0
        return Numbers(
            dtypes=tuple(row.dtypes),
            tensors=row.tensors,
            absmax=max((size for size in trend if size is not None), default=None) if finite else None,
            trend=trend if finite else (None,) * len(trend),
            histogram=counted,
        )


def _larger(first: Tensor | None, later: Tensor | None, none: Tensor) -> Tensor | None:
    """The larger of each two numbers; the rows that `first` did not know yet have none."""
    if first is None or later is None:
        return first if later is None else later
    missing = later.numel() - first.numel()
    return torch.maximum(torch.cat([first, none.expand(missing)]) if missing else first, later)
