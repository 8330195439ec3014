"""What a curve covers: its points, the steps they span, and the scale that its values are drawn on."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..numerics import fmt
from ..symptoms.course import Curve

_DECADES = 50.0  # largest over smallest: from here on a linear scale would hide the small numbers
_FLOOR = 0.14  # of a logarithmic scale: room below the smallest number, at whose foot zero stands
_LINEAR, _POWERS = ("lr",), ("loss_scale",)  # a schedule keeps its known shape; a scale moves in factors


class Point(NamedTuple):
    """A stretch of records: least, median and largest finite value, or None three times; and how many are bad."""

    at: float
    low: float | None
    mid: float | None
    high: float | None
    bad: int


def real(value: object) -> float | None:
    """A finite number, or None for whatever else a record may hold in its place."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def runs(curve: Curve) -> list[list[Point]]:
    """The points of a curve in pieces: one begins wherever the step number falls back, as after a restart."""
    pieces: list[list[Point]] = []
    for at, low, mid, high, bad in zip(curve.at, curve.low, curve.mid, curve.high, curve.bad):
        step, middle = real(at), real(mid)
        if step is None:
            continue
        ends = [number for number in (real(low), middle, real(high)) if number is not None]
        bottom, top = (min(ends), max(ends)) if ends else (None, None)
        point = Point(step, bottom, bottom if middle is None else middle, top, int(real(bad) or 0))
        if not pieces or step < pieces[-1][-1].at:
            pieces.append([])
        pieces[-1].append(point)
    return pieces


def thinned(points: Sequence[Point], most: int) -> list[Point]:
    """At most that many points: neighbours are taken together."""
    wide = -(-len(points) // max(most, 1))
    return [_together(points[n : n + wide]) for n in range(0, len(points), wide)] if wide > 1 else list(points)


def _together(points: Sequence[Point]) -> Point:
    held = [point for point in points if point.mid is not None]
    return Point(
        points[0].at,
        min((point.low for point in held if point.low is not None), default=None),
        statistics.median_low([point.mid for point in held if point.mid is not None]) if held else None,
        max((point.high for point in held if point.high is not None), default=None),
        sum(point.bad for point in points),
    )


def values(pieces: Iterable[Iterable[Point]]) -> list[float]:
    """All finite numbers of a curve."""
    return [n for points in pieces for point in points for n in (point.low, point.mid, point.high) if n is not None]


def spoilt_stretches(pieces: Iterable[Sequence[Point]], here: float | None) -> Iterator[tuple[float, float]]:
    """First and last step of each stretch in which every point has a NaN or Inf in it.

    A point that has numbers as well may have turned bad after its first step: at `here`, when that lies inside it.
    """
    for points in pieces:
        first: float | None = None
        for n, point in enumerate(points):
            if not point.bad:
                continue
            end = points[n + 1].at if n + 1 < len(points) else math.inf
            inside = here is not None and point.mid is not None and point.at < here < end
            at = here if inside and here is not None else point.at
            first = at if first is None else first
            if n + 1 == len(points) or not points[n + 1].bad:
                yield first, at
                first = None


def stairs(name: str) -> bool:
    """Whether a quantity keeps its value until it changes, so that no slope may be drawn."""
    return name in _POWERS


def step_text(step: float) -> str:
    """A step number as the logs have it."""
    return str(int(step)) if step == int(step) and abs(step) < 1e15 else fmt(step)


@dataclass(frozen=True, slots=True)
class Span:
    """The steps that all charts of a page share."""

    first: float
    last: float

    @classmethod
    def of(cls, steps: Iterable[object]) -> Span | None:
        held = [step for step in map(real, steps) if step is not None]
        return cls(min(held), max(held)) if held else None

    def holds(self, step: float) -> bool:
        return self.first <= step <= self.last

    def place(self, step: float) -> float:
        """From 0 to 1; a single step stands in the middle."""
        return _part(step, self.first, self.last)

    def ticks(self, most: int) -> Iterator[float]:
        """A few round step numbers."""
        unit = _round_unit(self.first, self.last, most)
        if unit is not None:
            unit = max(unit, 1.0)
            every = (n * unit for n in range(math.ceil(self.first / unit), math.floor(self.last / unit) + 1))
            yield from filter(self.holds, every)


@dataclass(frozen=True, slots=True)
class Scale:
    """From numbers to heights between 0 and 1.

    Attributes:
        kind: "linear"; "log" of numbers that are not negative, zero at the foot; "signed" for numbers of both signs
            that span decades.
        lo, hi: ends of the data; of a logarithmic scale the smallest number but zero, and the largest.
        unit: of a signed scale: about linear below this size, logarithmic above it.
        zero: whether a logarithmic scale has to hold zero.
    """

    kind: str
    lo: float
    hi: float
    unit: float = 1.0
    zero: bool = False

    @classmethod
    def of(cls, numbers: Sequence[float], name: str = "") -> Scale | None:
        """The scale that shows them all best; None when there is none. `name` is that of the curve."""
        if not numbers:
            return None
        lo, hi = min(numbers), max(numbers)
        if name in _LINEAR or lo == hi:
            return cls("linear", lo, hi)
        sizes = sorted(abs(number) for number in numbers if number)
        if lo >= 0 and (name in _POWERS or math.log(sizes[-1]) - math.log(sizes[0]) > math.log(_DECADES)):
            return cls("log", sizes[0], hi, zero=lo == 0)
        usual = sizes[len(sizes) // 2]
        if lo < 0 and math.log(sizes[-1]) - math.log(usual) > math.log(_DECADES):
            return cls("signed", lo, hi, unit=usual)
        return cls("linear", lo, hi)

    def place(self, number: float) -> float:
        if self.kind == "log":
            floor = _FLOOR if self.zero else 0.0
            if number <= 0:
                return 0.0
            return floor + (1 - floor) * _part(math.log(number), math.log(self.lo), math.log(self.hi))
        return _part(self._bent(number), self._bent(self.lo), self._bent(self.hi))

    def _bent(self, number: float) -> float:
        if self.kind != "signed":
            return number
        bent = math.asinh(number / self.unit)
        if math.isfinite(bent):
            return bent
        return math.copysign(math.log(2) + math.log(abs(number)) - math.log(self.unit), number)  # beyond float64

    def labels(self, apart: float) -> list[float]:
        """Numbers to write beside it: its ends, and round ones between that are so far apart; the largest first."""
        ends = [self.hi, self.lo] if self.hi != self.lo else [self.hi]
        if self.zero:
            ends = [self.hi, 0.0]
        shown = list(ends)
        for number in self._between():
            if all(abs(self.place(number) - self.place(other)) >= apart for other in shown):
                shown.append(number)
        return sorted(shown, reverse=True)

    def texts(self, apart: float) -> list[tuple[float, str]]:
        """The labels with their texts, as long as it takes to tell them apart."""
        numbers = self.labels(apart)
        said = [fmt(number) for number in numbers]
        if len(set(said)) < len(said):
            said = [f"{number:.6g}" for number in numbers]
        return list({text: (number, text) for number, text in zip(numbers, said)}.values())

    def _between(self) -> Iterator[float]:
        if self.kind == "log":
            first, last = math.ceil(math.log10(self.lo)), math.floor(math.log10(self.hi))
            middle = (first + last) // 2
            powers = sorted(range(first, last + 1), key=lambda power: abs(power - middle))
            yield from (10.0**power for power in powers)
        elif self.kind == "signed":
            yield 0.0
        elif (unit := _round_unit(self.lo, self.hi, 3)) is not None:
            yield from (n * unit for n in range(math.ceil(self.lo / unit), math.floor(self.hi / unit) + 1))


def _part(number: float, lo: float, hi: float) -> float:
    """How far `number` has come from `lo` to `hi`; what lies outside stands at the end."""
    if not hi > lo:
        return 0.5
    part = (number - lo) / (hi - lo)
    if math.isnan(part) or math.isinf(hi - lo):  # the distance is beyond float64
        part = (number / 2 - lo / 2) / (hi / 2 - lo / 2)
    return min(max(part, 0.0), 1.0)


def _round_unit(lo: float, hi: float, most: int) -> float | None:
    """1, 2 or 5 times a power of ten that goes at most `most` times into the distance; None where float64 ends."""
    distance = (hi - lo) / max(most, 1)
    if not 1e-300 < distance < 1e300 or distance < 1e-12 * max(abs(lo), abs(hi)):
        return None
    power = 10.0 ** math.floor(math.log10(distance))
    return next((factor * power for factor in (1.0, 2.0, 5.0, 10.0) if factor * power >= distance), 10 * power)
