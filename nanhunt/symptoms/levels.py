"""Where a noisy quantity stands, and how far it strays from there while all is well."""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Iterable, Sequence

_NORMAL = 1.4826  # a median absolute deviation times this is the standard deviation of normal noise
_NINTH = 1.2816  # deviations from the median to the ninth decile of normal noise


def median(values: Iterable[float]) -> float:
    """The middle of some values, at least one: that of `statistics`, in a third of its time."""
    ordered = sorted(values)
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


class Level:
    """Median and noise of the last healthy values, of which there must be a few before anything is said.

    Attributes:
        count: number of values ever taken in.
        first: median of the first few of them.
    """

    def __init__(self, size: int = 32, least: int = 5) -> None:
        self._values: deque[float] = deque(maxlen=size)
        self._least, self._stale = least, 0
        self._opening: list[float] = []
        self._seen: list[float] = []  # the values that middle, noise and top are of
        self._middle = self._noise = self._top = math.nan
        self.count = 0
        self.first = math.nan

    def add(self, value: float) -> None:
        """Take a healthy value in."""
        self._values.append(value)
        self.count += 1
        if len(self._opening) < 5:
            self._opening.append(value)
            self.first = median(self._opening)
        self._stale -= 1

    def __bool__(self) -> bool:
        return len(self._values) >= self._least

    @property
    def middle(self) -> float:
        """Median of the newest quarter: a loss that falls stands where it is now, not where it was."""
        self._freshen()
        return self._middle

    @property
    def noise(self) -> float:
        """Standard deviation about the trend, from medians."""
        self._freshen()
        if self._noise != self._noise:  # it costs most, and not every level is asked for it
            self._noise = noise(self._seen)
        return self._noise

    @property
    def top(self) -> float:
        """What hardly any of the newer half of the healthy values passes."""
        self._freshen()
        return self._top

    def clear(self) -> None:
        """Forget the values; the first few stay."""
        self._values.clear()
        self._stale = 0

    def _freshen(self) -> None:
        if self._stale <= 0:
            values = list(self._values)
            self._middle = median(values[-max(len(values) // 4, 5) :])
            self._seen, self._noise = values, math.nan
            ordered = sorted(values[-max(len(values) // 2, 5) :])
            self._top = ordered[-1 - len(ordered) // 20]
            self._stale = min(len(values), 32) // 8  # a few values more change little


def noise(values: Sequence[float]) -> float:
    """Standard deviation about a straight line, from medians; 0 where there are fewer than three values."""
    if len(values) < 3:
        return 0.0
    half = len(values) // 2
    early, late = median(values[:half]), median(values[-half:])
    slope = (late - early) / max(len(values) - half, 1)
    middle = (len(values) - 1) / 2
    rest = [value - slope * (i - middle) for i, value in enumerate(values)]
    centre = median(rest)
    about = _NORMAL * median([abs(value - centre) for value in rest])
    steps = [abs(b - a) for a, b in itertools.pairwise(values)]
    # A loss that is 0 in most batches has no deviation at its median, but has one at its ninth decile.
    newest = sorted(values[-half:])
    upper = (newest[-1 - half // 10] - median(newest)) / _NINTH
    return max(about, _NORMAL * median(steps) / math.sqrt(2), upper if half >= 10 else 0.0)
