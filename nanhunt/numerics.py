"""What a float format can hold: largest, smallest normal, smallest subnormal, headroom in bits."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Format:
    """One binary floating-point format; `eps` is the distance from 1 to the next larger number."""

    name: str
    bits: int
    max: float
    smallest_normal: float
    smallest_subnormal: float
    eps: float
    has_inf: bool


def _ieee(name: str, bits: int, mantissa: int, emax: int) -> Format:
    """The layout of IEEE 754-2019, 3.3 and table 3.5: emin = 1 - emax, the top exponent for Inf and NaN."""
    return Format(
        name=name,
        bits=bits,
        max=math.ldexp(2.0 - 2.0**-mantissa, emax),
        smallest_normal=math.ldexp(1.0, 1 - emax),
        smallest_subnormal=math.ldexp(1.0, 1 - emax - mantissa),
        eps=2.0**-mantissa,
        has_inf=True,
    )


FORMATS: dict[str, Format] = {
    form.name: form
    for form in (
        _ieee("float64", 64, mantissa=52, emax=1023),  # IEEE 754 binary64
        _ieee("float32", 32, mantissa=23, emax=127),  # IEEE 754 binary32
        _ieee("bfloat16", 16, mantissa=7, emax=127),  # the upper half of a binary32
        _ieee("float16", 16, mantissa=10, emax=15),  # IEEE 754 binary16
        # OCP OFP8 (8-bit floating point, rev. 1.0), table 1. E5M2 follows IEEE; E4M3 gives up Inf and keeps
        # a single NaN pattern (S.1111.111), so that its largest number is S.1111.110 = 1.75 * 2^8.
        _ieee("float8_e5m2", 8, mantissa=2, emax=15),
        Format("float8_e4m3fn", 8, 448.0, 2.0**-6, 2.0**-9, 2.0**-3, has_inf=False),
        # arXiv 2206.02915 (Graphcore, AMD, Qualcomm): no Inf, no negative zero, whose pattern is the NaN, and
        # an exponent bias one larger than OCP's (8 for E4M3, 16 for E5M2).
        Format("float8_e4m3fnuz", 8, 240.0, 2.0**-7, 2.0**-10, 2.0**-3, has_inf=False),
        Format("float8_e5m2fnuz", 8, 57344.0, 2.0**-15, 2.0**-17, 2.0**-2, has_inf=False),
        # OCP Microscaling (MX, v1.0), 5.4.1: a power of two that scales a block; no sign, zero or subnormals.
        Format("float8_e8m0fnu", 8, 2.0**127, 2.0**-127, 2.0**-127, 1.0, has_inf=False),
    )
}

# The formats every report compares with: what people train in, or would like to.
COMPARED = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")

_PARTS = {"complex32": "float16", "complex64": "float32", "complex128": "float64"}
_ALIASES = {
    "half": "float16",
    "float": "float32",
    "double": "float64",
    "chalf": "float16",
    "cfloat": "float32",
}
_ALIASES["cdouble"] = "float64"


def format_of(dtype_name: object) -> Format | None:
    """The format behind a dtype's name, with or without `torch.`; a complex dtype has that of its parts."""
    name = str(dtype_name).removeprefix("torch.")
    return FORMATS.get(_PARTS.get(name) or _ALIASES.get(name) or name)


def headroom_bits(absmax: float | None, dtype_name: object) -> float | None:
    """How often `absmax` can double before it leaves the format; negative when it does not fit, inf for 0."""
    form = format_of(dtype_name)
    if form is None or absmax is None:
        return None
    size = abs(absmax)
    if size == 0.0:
        return math.inf
    if not math.isfinite(size):
        return math.nan if math.isnan(size) else -math.inf
    return math.log2(form.max) - math.log2(size)


def headrooms(absmax: float | None) -> dict[str, float | None]:
    """The headroom of `absmax` in each of the compared formats."""
    return {name: headroom_bits(absmax, name) for name in COMPARED}


def bits_over(value: float | None, dtype_name: object) -> float | None:
    """By how many bits a value passes the format's largest number; negative when it fits."""
    room = headroom_bits(value, dtype_name)
    return None if room is None else -room


def fmt(x: float | None) -> str:
    """A number for human eyes: `71 280`, `0.25`, `1.2e+30`, `-inf`; `?` when unknown."""
    if x is None:
        return "?"
    if isinstance(x, int) and abs(x) < 10**15:
        return f"{x:,}".replace(",", " ")
    try:
        x = float(x)
    except OverflowError:  # an int beyond float64, which no float format has a digit for
        return f"{'-' if x < 0 else ''}1e+{int(math.log10(abs(x)))}"
    size = abs(x)
    if size == 0:
        return "0"
    if not 1e-3 <= size < 1e7:
        return f"{x:.3g}"
    if size >= 999.95:  # from here on four digits would show no fraction
        return f"{x:,.0f}".replace(",", " ")
    return f"{x:.4g}"
