"""A histogram of exponents, and what of it would overflow, turn subnormal or vanish in a narrower format.

Where a cast rounds depends on the mantissa as well: 65 519 becomes 65 504 in float16, and 65 520 becomes Inf. All
borders of the formats of deep learning lie at one of a few mantissas, whatever the exponent, so a number goes into one
of eleven classes beside its exponent. Scaling by a power of two moves the exponent and keeps the class: with the
counts at hand, a share is exact for each format and each such scale.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from ..errors import UsageError
from ..numerics import FORMATS, Format

SMALLEST, LARGEST = -149, 127  # exponents that a float32 can have, subnormal numbers by their highest bit
_NORMAL = -126  # the smallest that is not subnormal

# Class of a number 1.f * 2^e by its fraction f: the class of the last border that is not above it. A border is
# (f, whether f itself lies above it). `ones` leading ones in the fraction are 1 - 2^-ones and more.
_ONES = (2, 3, 4, 7, 8, 10, 11, 23)
_BORDERS: tuple[tuple[Fraction, bool], ...] = tuple(
    sorted(
        [
            (Fraction(0), True),
            (Fraction(0), False),
            (Fraction(13, 16), False),  # 464, from which on float8_e4m3fn is at its end
            *((1 - Fraction(1, 2**ones), True) for ones in _ONES),
        ],
        key=lambda border: (border[0], not border[1]),
    )
)
CLASSES = len(_BORDERS)


def class_of(fraction: Fraction) -> int:
    """The class of a number with this fraction, 0 <= fraction < 1."""
    return sum(fraction > at or (within and fraction == at) for at, within in _BORDERS) - 1


@dataclass(frozen=True, slots=True)
class _Border:
    """Numbers from here on are above: larger exponents, and of this one the classes from `at` on."""

    exponent: int
    at: int


@dataclass(frozen=True, slots=True)
class _Ends:
    """Where a cast to a format, which rounds to the nearest and ties to even, leaves what the format holds."""

    overflow: _Border  # from here on it becomes Inf, NaN, or the largest number
    normal: _Border  # from here on it becomes a normal number
    held: _Border  # from here on it does not become zero


def _border(value: Fraction, within: bool) -> _Border:
    """The border at `value`; the number itself lies above it when `within`."""
    exponent = math.frexp(float(value))[1] - 1
    fraction = value / Fraction(2) ** exponent - 1
    for at, border in enumerate(_BORDERS):
        if border == (fraction, within):
            return _Border(exponent, at)
    return _Border(exponent + 1, 0)  # beyond the mantissas that a float32 can have: nothing of this exponent is above


def _ends(form: Format) -> _Ends:
    largest, normal, smallest = (Fraction(x) for x in (form.max, form.smallest_normal, form.smallest_subnormal))
    step = Fraction(form.eps) * Fraction(2) ** (math.frexp(form.max)[1] - 1)
    odd = (largest / step) % 2 == 1  # a tie at the end goes to the even neighbour, which is out of range
    return _Ends(
        overflow=_border(largest + step / 2, odd),
        normal=_border(normal - smallest / 2, True),
        held=_border(smallest / 2, False),
    )


# What a share can be asked for. float64 holds all that is counted here; e8m0 has neither sign nor zero.
TARGETS: dict[str, _Ends] = {
    name: _ends(form) for name, form in FORMATS.items() if name not in ("float64", "float8_e8m0fnu")
}


def target(dtype: object) -> Format:
    """The format behind a dtype or its name.

    Raises:
        UsageError: for one that no share can be had of, naming those that can.
    """
    name = str(dtype).removeprefix("torch.")
    name = {"half": "float16", "fp16": "float16", "bf16": "bfloat16", "float": "float32", "fp32": "float32"}.get(
        name, name
    )
    if name not in TARGETS:
        raise UsageError(f"dtype={str(dtype)!r}: a share can be had of {', '.join(TARGETS)}")
    return FORMATS[name]


def overflows(size: float, form: Format) -> bool:
    """Whether a number of this size leaves the format when it is cast to it."""
    if not 0 < size < math.inf:
        return size == math.inf
    fraction, exponent = math.frexp(size)
    border = TARGETS[form.name].overflow
    return (exponent - 1, class_of(2 * Fraction(fraction) - 1)) >= (border.exponent, border.at)


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """How many of `finite` numbers leave what a format holds when they are cast to it, each counted once.

    Attributes:
        over: become Inf, or NaN, or the largest number where the format has no Inf: torch 2.13 saturates to 448 in
            float8_e4m3fn on a CPU, earlier ones gave NaN.
        tiny: become subnormal: not zero, with fewer bits than others.
        lost: are not zero and become zero.
        finite: all numbers but Inf and NaN; zeros are among them.
        exact: False where the counts are bounds: see `Histogram.share`.
    """

    over: int
    tiny: int
    lost: int
    finite: int
    exact: bool = True

    @property
    def overflow(self) -> float:
        """The share of all finite numbers that overflow, 0 to 1."""
        return self.over / self.finite if self.finite else 0.0

    @property
    def subnormal(self) -> float:
        """The share that becomes subnormal, 0 to 1."""
        return self.tiny / self.finite if self.finite else 0.0

    @property
    def vanish(self) -> float:
        """The share that vanishes: becomes zero without being zero, 0 to 1."""
        return self.lost / self.finite if self.finite else 0.0

    def __add__(self, other: Share) -> Share:
        return Share(
            over=self.over + other.over,
            tiny=self.tiny + other.tiny,
            lost=self.lost + other.lost,
            finite=self.finite + other.finite,
            exact=self.exact and other.exact,
        )


NOTHING = Share(over=0, tiny=0, lost=0, finite=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Histogram:
    """Numbers counted by exponent and class of mantissa; zeros, NaN and infinities apart.

    Attributes:
        bins: `(exponent, counts by class)` in ascending order: 2^exponent <= |x| < 2^(exponent + 1). Subnormal numbers
            of the dtype stand at the exponent of their highest bit. Float64 is counted as the float32 it rounds to.
        zero, nan, pos_inf, neg_inf: their counts.
        below, beyond: of float64, not zero and too small, and finite and too large, for a float32.
    """

    bins: tuple[tuple[int, tuple[int, ...]], ...] = ()
    zero: int = 0
    nan: int = 0
    pos_inf: int = 0
    neg_inf: int = 0
    below: int = 0
    beyond: int = 0

    @property
    def numel(self) -> int:
        """All numbers that were counted."""
        return self.finite + self.nan + self.pos_inf + self.neg_inf

    @property
    def finite(self) -> int:
        return self.zero + self.nonzero

    @property
    def nonzero(self) -> int:
        """The finite ones that are not zero."""
        return self.below + self.beyond + sum(sum(counts) for _, counts in self.bins)

    def __add__(self, other: Histogram) -> Histogram:
        if not other.numel:
            return self
        if not self.numel:
            return other
        bins = dict(self.bins)
        for exponent, counts in other.bins:
            mine = bins.get(exponent)
            bins[exponent] = counts if mine is None else tuple(a + b for a, b in zip(mine, counts))
        return Histogram(
            bins=tuple(sorted(bins.items())), **{name: getattr(self, name) + getattr(other, name) for name in _COUNTS}
        )

    def exponents(self) -> dict[int, int]:
        """The counts by exponent alone."""
        return {exponent: sum(counts) for exponent, counts in self.bins}

    def share(self, dtype: object, loss_scale: float = 1.0) -> Share:
        """What leaves the format `dtype` when these numbers, times `loss_scale`, are cast to it.

        Exact, as torch casts, when the scale is a power of two and nothing lies outside of what a float32 holds before
        and after the product; `exact` says whether. For another scale `over` is counted at the next larger power of
        two, and `tiny` and `lost` together at the next smaller one: bounds that are never too low.

        Raises:
            UsageError: for a dtype of which none can be had, or a scale that is not a positive number.
        """
        ends = TARGETS[target(dtype).name]
        up, down = scaled(loss_scale)
        over = self.beyond + self._above(ends.overflow, up)
        held = self._above(ends.held, down)
        known = self.nonzero - self.below - self.beyond
        low = known - self._above(ends.normal, down)  # subnormal or lost
        outside = bool(self.below or self.beyond) and up != 0
        # A product that is subnormal in float32 is rounded before it is cast, which only wide formats can show.
        if self.bins and up < 0 and self.bins[0][0] + up < _NORMAL and ends.normal.exponent <= _NORMAL:
            outside = True
        return Share(
            over=over,
            tiny=low - (known - held),
            lost=known - held + self.below,
            finite=self.finite,
            exact=up == down and not outside,
        )

    def _above(self, border: _Border, scale: int) -> int:
        """How many numbers times 2^scale lie above a border."""
        found = 0
        for exponent, counts in reversed(self.bins):
            if exponent + scale < border.exponent:
                break
            found += sum(counts[border.at :] if exponent + scale == border.exponent else counts)
        return found

    def to_dict(self) -> dict[str, Any]:
        told: dict[str, Any] = {name: getattr(self, name) for name in _COUNTS if getattr(self, name)}
        if self.bins:
            told["bins"] = [[exponent, *_trimmed(counts)] for exponent, counts in self.bins]
        return told

    @classmethod
    def from_dict(cls, told: Mapping[str, Any]) -> Histogram:
        bins = tuple(
            (int(exponent), (*map(int, counts), *[0] * (CLASSES - len(counts))))
            for exponent, *counts in told.get("bins", ())
        )
        return cls(bins=bins, **{name: int(told.get(name, 0)) for name in _COUNTS})


_COUNTS = ("zero", "nan", "pos_inf", "neg_inf", "below", "beyond")


def scaled(loss_scale: float) -> tuple[int, int]:
    """The powers of two around a scale, as exponents, the larger first; twice the same for a power of two.

    Raises:
        UsageError: for what is no positive number.
    """
    if isinstance(loss_scale, bool) or not isinstance(loss_scale, (int, float)) or not 0 < loss_scale < math.inf:
        raise UsageError(f"loss_scale={loss_scale!r}: give a positive number, a power of two such as 65536")
    fraction, exponent = math.frexp(loss_scale)
    return (exponent - 1, exponent - 1) if fraction == 0.5 else (exponent, exponent - 1)


def _trimmed(counts: tuple[int, ...]) -> tuple[int, ...]:
    last = max((at for at, count in enumerate(counts) if count), default=-1)
    return counts[: last + 1]
