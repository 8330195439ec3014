"""The window of safe loss scales: from the exponents of the gradients, without a trial."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from ..errors import UsageError
from ..numerics import format_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """The loss scales that suit the gradients of a step, as powers of two.

    Attributes:
        dtype: the format that holds the scaled gradients.
        low: the smallest scale with less than `share` of the nonzero gradient entries rounded to zero. 0 when every
            scale does.
        high: the largest scale at which no gradient overflows; 0 when there is none (a gradient was not finite).
        current: the scale that was in use, or None.
        absmax: the largest |gradient|, not multiplied by any scale.
        lost: share of the nonzero entries that the current scale (1 without one) rounds to zero.
        share: the share that counts as too much.
        largest: name of the parameter with the largest gradient: the first to overflow.
    """

    dtype: str
    low: float
    high: float
    current: float | None
    absmax: float
    lost: float
    share: float
    largest: str | None = None

    @property
    def fits(self) -> bool | None:
        """Whether the current scale lies in the window; None without one."""
        return None if self.current is None else self.low <= self.current <= self.high

    @property
    def matters(self) -> bool:
        """Whether it is worth a word: float32 has room for everything."""
        return self.dtype == "float16" or self.current not in (None, 1.0)

    def __str__(self) -> str:
        if not self.high:
            who = f" (in {self.largest})" if self.largest else ""
            return f"no loss scale suits {self.dtype}: a gradient is not finite{who}"
        named = f" of {self.largest}" if self.largest else ""
        text = f"{self.dtype} gradients: safe loss scales {_power(self.low)} to {_power(self.high)}"
        if self.low > self.high:
            text = (
                f"{self.dtype} gradients: no loss scale is safe, above {_power(self.high)} they overflow and below "
                f"{_power(self.low)} more than {self.share:.1%} of them vanish"
            )
        if self.current is None:
            return f"{text}; largest gradient {self.absmax:.3g}{named}"
        if self.current > self.high:
            where = f"above it: the gradient{named} is the first to overflow"
        elif self.current < self.low:
            where = f"below it: {self.lost:.1%} of the nonzero gradients are rounded to zero"
        else:
            where = "inside"
        return f"{text}; the current one, {_power(self.current)}, is {where}"


def _power(scale: float) -> str:
    if scale <= 0:
        return "0"
    exponent = math.log2(scale)
    if exponent == round(exponent) and (exponent < 0 or exponent > 20):
        return f"2^{exponent:.0f}"
    return f"{scale:,.0f}".replace(",", " ") if scale == round(scale) else f"{scale:.6g}"


def window(
    histogram: Mapping[int, float],
    absmax: float,
    dtype: str,
    *,
    current: float | None = None,
    share: float = 1e-3,
    largest: str | None = None,
) -> Window:
    """The window of safe scales for gradients that are not multiplied by any.

    Only the gradients of the parameters are in it: those of activations, on the way there, may be larger. An entry is
    lost when it is rounded to zero: below half of the smallest number of the format.

    Args:
        histogram: weight of the nonzero entries by exponent, floor(log2 |gradient|).
        absmax: the largest |gradient|; NaN or infinite when one is bad.
        dtype: the format that the scaled gradients are computed in.
        current: the scale in use.
        share: of the nonzero entries, the part that may be lost.
        largest: the parameter that `absmax` is of.

    Raises:
        UsageError: for a dtype that is no float format, or a share that is none.
    """
    form = format_of(dtype)
    if form is None:
        raise UsageError(f"dtype={dtype!r} is no float format that is known: use float16, bfloat16, float32, ...")
    if not 0 < share < 1:
        raise UsageError(f"share={share!r}: give a share between 0 and 1, such as 0.001")
    bottom = math.frexp(form.smallest_subnormal)[1] - 2  # from half of the smallest number up it is rounded to that
    total = sum(histogram.values())

    def lost(exponent: int) -> float:
        gone = sum(weight for at, weight in histogram.items() if at + exponent < bottom)
        return gone / total if total else 0.0

    high = 0.0
    if math.isfinite(absmax):
        high = _largest(absmax, form.max)
    low = 0.0
    if total and math.isfinite(absmax):
        # the exponent of the entry that is just not lost: the first with at least `share` of the weight up to it
        run = 0.0
        for at in sorted(histogram):
            run += histogram[at]
            if run >= share * total:
                low = math.ldexp(1.0, bottom - at)
                break
    scale = 1.0 if current is None or current <= 0 else current
    return Window(
        dtype=form.name,
        low=low,
        high=high,
        current=current,
        absmax=absmax,
        lost=lost(math.floor(math.log2(scale))),
        share=share,
        largest=largest,
    )


def _largest(absmax: float, limit: float) -> float:
    """The largest power of two by which `absmax` can be multiplied and stay at or below `limit`."""
    if absmax <= 0:
        return math.ldexp(1.0, 126)  # nothing to overflow; no loss scale in float32 is larger
    exponent = min(math.frexp(limit)[1] - math.frexp(absmax)[1] + 1, 126)
    while math.ldexp(absmax, exponent) > limit:
        exponent -= 1
    return math.ldexp(1.0, exponent)
