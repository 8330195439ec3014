"""Headroom that shrinks: whether a course of largest numbers has a clear trend, and in how many steps it is at zero."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

_LEAST, _MOST = 6, 32  # points of a trend: the latest, for what was long ago may have gone another way
_CLEAR = 2.5  # standard deviations from no trend at all, by the test of Mann and Kendall
_AHEAD = 10  # times the steps that were seen: what lies farther ahead is not foretold


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """A clear trend towards the end of a format: `rate` bits lost in a step, `steps` steps until nothing is left.

    `left` is the headroom now in bits, on the line through the points and not at the last of them alone.
    """

    rate: float
    left: float
    steps: int


def forecast(steps: Sequence[int], rooms: Sequence[float | None]) -> Forecast | None:
    """The trend of headroom over steps, or None when there is no clear one, or it is far from zero.

    A line through the medians of Theil and Sen, which a single odd step does not move. `rooms` is the headroom in
    bits at each of `steps`, None where it is not known.
    """
    points = [(step, room) for step, room in zip(steps, rooms) if room is not None and math.isfinite(room)][-_MOST:]
    if len(points) < _LEAST or points[-1][1] <= 0:
        return None
    pairs = [(x, y, z, w) for at, (x, y) in enumerate(points) for z, w in points[at + 1 :]]
    falling = sum((w < y) - (w > y) for _, y, _, w in pairs)
    n = len(points)
    spread = math.sqrt(n * (n - 1) * (2 * n + 5) / 18)
    if (falling - 1) / spread < _CLEAR:
        return None
    rate = -median((w - y) / (z - x) for x, y, z, w in pairs)
    last = points[-1][0]
    left = median(room - rate * (last - step) for step, room in points)
    if rate <= 0:
        return None
    ahead = max(left, 0.0) / rate
    if ahead > _AHEAD * (last - points[0][0]):
        return None
    return Forecast(rate=rate, left=left, steps=math.ceil(ahead))
