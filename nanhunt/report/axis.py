"""A logarithmic axis: numbers to places on a drawing, and its ticks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from .markup import Markup, join, percent, tag, words

_SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
_MOST_TICKS = 8
SMALLEST, LARGEST = -1074.0, 1024.0  # all that a float64 can hold


def log2(number: float | None) -> float | None:
    """The exponent of a number's size; None for zero and for what is not finite or not known."""
    if number is None or number == 0 or not math.isfinite(number):
        return None
    return math.log2(abs(number))


@dataclass(frozen=True, slots=True)
class Axis:
    """From 2 ** lo at place 0 to 2 ** hi at place `width`; places are percent of a drawing."""

    lo: float
    hi: float
    width: float = 100.0

    @classmethod
    def around(cls, exponents: Iterable[float], *, pad: float, width: float = 100.0) -> Axis:
        """An axis that holds all of these, with `pad` on both sides; four powers of two at least."""
        held = [min(max(exponent, SMALLEST), LARGEST) for exponent in exponents] or [0.0]
        lo, hi = min(held) - pad, max(held) + pad
        more = max(0.0, 4.0 - (hi - lo)) / 2
        return cls(lo - more, hi + more, width)

    def place(self, exponent: float) -> float:
        """What is outside stands at the end."""
        return self.width * min(max((exponent - self.lo) / (self.hi - self.lo), 0.0), 1.0)

    def holds(self, exponent: float) -> bool:
        return self.lo <= exponent <= self.hi

    def ticks(self, base: int) -> Iterator[tuple[float, int]]:
        """(place, power of `base`), evenly spaced, few enough to be labelled."""
        unit = math.log2(base)
        first, last = math.ceil(self.lo / unit), math.floor(self.hi / unit)
        step = next(n for n in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512) if (last - first) / n < _MOST_TICKS)
        for power in range(-(-first // step) * step, last + 1, step):
            yield self.place(power * unit), power

    def drawing(self, base: int) -> Markup:
        """The axis with its ticks, for the eye only: each picture tells its numbers itself."""
        marks = []
        for place, power in self.ticks(base):
            anchor = "start" if place < 4 else "end" if place > 96 else "middle"
            x = percent(place)
            marks.append(tag("line", x1=x, x2=x, y1=0, y2=5, class_="tick"))
            label = f"{base}{str(power).translate(_SUPERSCRIPT)}" if power else "1"
            marks.append(words("text", label, x=x, y=18, text_anchor=anchor, class_="label"))
        line = tag("line", x1="0%", x2=percent(self.width), y1=0.5, y2=0.5, class_="tick")
        return tag("svg", line, join(*marks), width="100%", height=22, aria_hidden="true", class_="axis")
