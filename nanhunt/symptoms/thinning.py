"""A curve over a run of any length, kept in a few hundred stretches."""

from __future__ import annotations

import math

from .course import Curve
from .levels import median

_STRETCHES = 400


class Thinning:
    """Takes one value after another; neighbours are joined in pairs whenever there are too many.

    A stretch keeps its first step, its least and largest finite value, some of its values for the median, and how
    many were NaN or Inf, so a single spike in a million records still shows.
    """

    def __init__(self, stretches: int = _STRETCHES) -> None:
        self._room = 2 * stretches
        self._width = 1  # records to a stretch
        self._at: list[float] = []
        self._low: list[float] = []
        self._mid: list[float] = []
        self._high: list[float] = []
        self._bad: list[int] = []
        self._count = 0  # records in the last stretch
        self._some: list[float] = []

    def add(self, at: float, value: float) -> None:
        """A value that belongs to step `at`."""
        if self._count == 0 or self._count >= self._width:
            self._close()
            self._open(at)
        self._count += 1
        if math.isfinite(value):
            if not value >= self._low[-1]:  # NaN is none yet
                self._low[-1] = value
            if not value <= self._high[-1]:
                self._high[-1] = value
            if len(self._some) < 64:
                self._some.append(value)
        else:
            self._bad[-1] += 1

    def curve(self) -> Curve:
        """What it has become."""
        self._close()
        return Curve(
            at=tuple(self._at),
            low=tuple(self._low),
            mid=tuple(self._mid),
            high=tuple(self._high),
            bad=tuple(self._bad),
        )

    def __len__(self) -> int:
        return len(self._at)

    def _close(self) -> None:
        if self._at and self._some:
            self._mid[-1] = median(self._some)

    def _open(self, at: float) -> None:
        if len(self._at) >= self._room:
            self._halve()
        self._count = 0
        self._some = []
        self._at.append(at)
        for column in (self._low, self._mid, self._high):
            column.append(math.nan)
        self._bad.append(0)

    def _halve(self) -> None:
        self._width *= 2
        pairs = range(0, len(self._at) - 1, 2)
        self._low = [_least(self._low[i], self._low[i + 1]) for i in pairs]
        self._high = [_largest(self._high[i], self._high[i + 1]) for i in pairs]
        self._mid = [_between(self._mid[i], self._mid[i + 1]) for i in pairs]
        self._bad = [self._bad[i] + self._bad[i + 1] for i in pairs]
        self._at = [self._at[i] for i in pairs]


def _least(a: float, b: float) -> float:
    return b if a != a else a if b != b else min(a, b)


def _largest(a: float, b: float) -> float:
    return b if a != a else a if b != b else max(a, b)


def _between(a: float, b: float) -> float:
    return b if a != a else a if b != b else a + (b - a) / 2
