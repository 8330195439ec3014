"""Two tensors that should be the same: how far apart they are, and what rounding alone would have done."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ..numerics import FORMATS, Format, format_of
from .figures import Figures

Tensor = torch.Tensor

TF32 = Format("tf32", 19, FORMATS["float32"].max, 2.0**-126, 2.0**-136, 2.0**-10, has_inf=True)
_PIECE = 1 << 20  # numbers that are compared at a time, in float64
_AT_LIMIT = 0.99  # of a format's largest number: so near to it stand the constants of masks
_KINDS = (("nan", torch.isnan), ("+inf", torch.isposinf), ("-inf", torch.isneginf))


def form(dtype: Any) -> Format:
    name = str(dtype).removeprefix("torch.")
    return TF32 if name == "tf32" else format_of(name) or FORMATS["float32"]


def lower(*dtypes: Any) -> Format:
    """The one with the fewest digits."""
    return max((form(dtype) for dtype in dtypes), key=lambda one: one.eps)


def figures(a: Tensor, b: Tensor, tensor: str, floor: Any = None) -> Figures:
    """How far `b` is from `a`, numbers of one shape; ulps are those of `floor`, or of their own, the lower format.

    Numbers that stand at the limits of both formats with the same sign are a mask's, and count as the same.
    """
    low = lower(a.dtype, b.dtype, *(() if floor is None else (floor,)))
    names = (str(a.dtype).removeprefix("torch."), str(b.dtype).removeprefix("torch."))
    if a.dtype is b.dtype and torch.equal(a, b):
        size, count = _size(a)
        return Figures(
            tensor=tensor, dtypes=names, cosine=1.0, max_abs=0.0, max_rel=0.0, error=0.0, ulps=0.0, max_ulps=0.0,
            lower=low.name, sizes=(size, size), count=count,
        )  # fmt: skip
    scale = max(_largest(a), _largest(b))
    scale = scale if scale > 1e150 else 1.0
    aa = bb = ab = dd = biggest = relative = most_ulps = 0.0
    count = 0
    only_a, only_b = dict.fromkeys(("nan", "+inf", "-inf"), 0), dict.fromkeys(("nan", "+inf", "-inf"), 0)
    for x, y in _pieces(a, b):
        good = x.isfinite() & y.isfinite()
        limited = _at_limit(x, y, form(a.dtype), form(b.dtype))
        if not bool(good.all()):
            lone_a, lone_b = y.isfinite() & ~limited, x.isfinite() & ~limited
            both = ~x.isfinite() & ~y.isfinite() & ~limited
            odd = both & (x.isnan() != y.isnan()) | both & (x.sign() != y.sign()) & ~x.isnan()
            for kind, is_kind in _KINDS:
                only_a[kind] += int((is_kind(x) & (lone_a | odd)).sum())
                only_b[kind] += int((is_kind(y) & (lone_b | odd)).sum())
        good &= ~limited
        if not bool(good.all()):
            x, y = x[good], y[good]
        if not x.numel():
            continue
        off, each = (y - x).abs(), x.abs()
        biggest = max(biggest, float(off.max()))
        some = each > 0
        if bool(some.any()):
            relative = max(relative, float((off[some] / each[some]).max()))
        most_ulps = max(most_ulps, float((off / _ulp(each, low)).max()))
        if scale != 1.0:
            x, y, off = x / scale, y / scale, off / scale
        aa, bb, ab, dd = aa + float(x @ x), bb + float(y @ y), ab + float(x @ y), dd + float(off @ off)
        count += x.numel()
    rms = scale * math.sqrt(aa / count) if count else 0.0
    gone = scale * math.sqrt(dd / count) if count else 0.0
    return Figures(
        tensor=tensor,
        dtypes=names,
        cosine=_cosine(aa, bb, ab, dd),
        max_abs=biggest,
        max_rel=relative,
        error=gone / rms if rms else (math.inf if gone else 0.0),
        ulps=gone / _ulp_of(rms, low),
        max_ulps=most_ulps,
        lower=low.name,
        sizes=(rms, scale * math.sqrt(bb / count) if count else 0.0),
        count=count,
        only_a=tuple(f"{n} {kind}" for kind, n in only_a.items() if n),
        only_b=tuple(f"{n} {kind}" for kind, n in only_b.items() if n),
    )


def _cosine(aa: float, bb: float, ab: float, dd: float) -> float:
    if not dd:
        return 1.0
    if not aa or not bb:
        return 0.0
    return max(-1.0, min(1.0, ab / math.sqrt(aa) / math.sqrt(bb)))


@dataclass(frozen=True, slots=True)
class Measured:
    """An error: root mean square, that of the right numbers, how many these are, what alone is not finite, dtype."""

    error: float
    size: float
    count: int
    made: tuple[str, ...]
    dtype: torch.dtype


def measured(a: Tensor, b: Tensor) -> Measured:
    """The error of `b`, which should be `a`."""
    told = figures(a, b, "")
    size = told.sizes[0]
    off = told.error * size if size else told.max_abs
    return Measured(off, size, told.count, told.only_b, b.dtype)


def _size(a: Tensor) -> tuple[float, int]:
    """Root mean square over what is finite and no mask's, and how many numbers that are."""
    scale = _largest(a)
    scale = scale if scale > 1e150 else 1.0
    total, count = 0.0, 0
    for x, _ in _pieces(a, a):
        x = x[x.isfinite() & (x.abs() < _AT_LIMIT * form(a.dtype).max)] / scale
        total, count = total + float(x @ x), count + x.numel()
    return scale * math.sqrt(total / count) if count else 0.0, count


def floor(size: float, of: Format) -> float:
    """The error that no result of this size in this format is without: about a quarter of a unit in the last place."""
    return max(0.25 * of.eps * size, 0.25 * of.smallest_subnormal)


def _pieces(a: Tensor, b: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    a, b = a.detach().reshape(-1), b.detach().reshape(-1)
    for at in range(0, a.numel(), _PIECE):
        yield a[at : at + _PIECE].double(), b[at : at + _PIECE].double()


def _largest(t: Tensor) -> float:
    if t.dtype is not torch.float64 or not t.numel():
        return 0.0
    return float(t.detach().nan_to_num(0.0, 0.0, 0.0).abs().max())


def _at_limit(x: Tensor, y: Tensor, of_x: Format, of_y: Format) -> Tensor:
    """Where both are infinite or as good as the largest number, with the same sign; an Inf where one was, too."""
    ends = (x.abs() >= _AT_LIMIT * of_x.max) & (y.abs() >= _AT_LIMIT * of_y.max)
    return ends & (x.sign() == y.sign()) | x.isnan() & y.isnan()


def _ulp(size: Tensor, of: Format) -> Tensor:
    exponent = torch.frexp(size.clamp(min=of.smallest_normal))[1] - 1
    return torch.ldexp(torch.full_like(size, of.eps), exponent)


def _ulp_of(size: float, of: Format) -> float:
    return float(_ulp(torch.tensor([size], dtype=torch.float64), of))


# --- what rounding would do -----------------------------------------------------------------------------------


def rounded(t: Tensor, to: Any, noise: torch.Generator) -> Tensor:
    """`t` as the format `to` would hold it, in its own dtype.

    Where `to` has as many digits, each number moves by up to one unit in its last place: what comes of that is
    what another order of summation may do. Whole numbers, masks, and what `to` cannot hold stay as they are.
    """
    own, other = form(t.dtype), form(to)
    if other.eps > own.eps:
        near = _tf32(t) if other is TF32 else t.to(getattr(torch, other.name)).to(t.dtype)
        return torch.where(near.isfinite() | ~t.isfinite(), near, t)
    push = 2 * torch.rand(t.shape, generator=noise, dtype=torch.float32).to(t.device) - 1
    moved = (t.double() + t.double() * (own.eps * push.double())).to(t.dtype)
    still = (t == t.round()) | (t.abs() >= _AT_LIMIT * own.max)
    return torch.where(still, t, moved)


def _tf32(t: Tensor) -> Tensor:
    bits = t.float().contiguous().view(torch.int32)
    return ((bits + 0x1000) & ~0x1FFF).view(torch.float32).to(t.dtype)
