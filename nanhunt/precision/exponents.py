"""Where the numbers of a tensor lie: counted by exponent where the tensor lives, and read once at the end.

Everything here is a fixed row of ops without a host read on an accelerator: what the host may know for nothing, on a
CPU, only leaves ops out. The counts are those of `spectra.Histogram`, finer by the leading ones of each mantissa.
"""

from __future__ import annotations

import math
from fractions import Fraction

import torch

from .. import probe
from .spectra import CLASSES, LARGEST, SMALLEST, Histogram, class_of

Tensor = torch.Tensor

# Through an int32, a float32 is sign, 8 bits of exponent (bias 127), 23 of fraction.
_MAX, _FRACTION, _NORMAL, _INFINITE = 0x7FFFFFFF, 0x007FFFFF, 0x00800000, 0x7F800000
_TIE, _AFTER = 13 << 19, 14 << 19  # fractions 13/16 and 7/8
# Codes of a fraction: 23 minus its leading ones, so 0 for a fraction of ones alone; two classes more cut across.
_POWER, _PAST_TIE = 24, 25
_CODES = 26
_EXPONENTS = LARGEST + 2 - SMALLEST  # one more for Inf and NaN
_NO_EXPONENT = 1 + (-127 - SMALLEST) * _CODES + _POWER  # where a zero stands as it is
_NEG_INF, _BELOW, _BEYOND = (1 + _EXPONENTS * _CODES + at for at in range(3))
SIZE = _BEYOND + 1
_PIECE = 1 << 17  # numbers that stay in a processor's cache from the first op to the last
_PIECE_ON_ACCELERATOR = 1 << 26


def count(numbers: Tensor, sample: int | None = None) -> tuple[Tensor, Tensor]:
    """Counts (int64, `SIZE`), and the largest finite |number| (no dimension, float32, of float64 float64).

    `numbers` is what `probe.payload` gives: strided, not empty, of a real dtype. Both results stay on its device.
    With `sample` only so many numbers are counted, evenly spread and at least one; the largest is that of all.
    """
    distinct = probe.in_order(numbers.detach().resolve_neg()).reshape(-1)
    times = numbers.numel() // distinct.numel()
    counted = distinct if sample is None else distinct[:: stride(distinct.numel(), sample)]
    host = distinct.is_cpu
    size = _PIECE if host else _PIECE_ON_ACCELERATOR
    total: Tensor | None = None
    peak: Tensor | None = None
    for piece in torch.split(counted, size):
        found, largest = _piece(piece.contiguous(), host)
        total = found if total is None else total.add_(found)
        peak = largest if peak is None else torch.maximum(peak, largest)
    if counted is not distinct:
        peak = None
        for piece in torch.split(distinct, size):
            largest = _largest(piece, host)
            peak = largest if peak is None else torch.maximum(peak, largest)
    assert total is not None and peak is not None  # not empty
    return (total.mul_(times) if times > 1 else total), peak


def stride(numel: int, sample: int) -> int:
    """Every how many numbers one is taken; it has no divisor in common with `numel`, so no column is taken alone."""
    step = max(-(-numel // sample), 1)
    while step > 1 and math.gcd(step, numel) > 1:
        step += 1
    return min(step, numel)


def _piece(piece: Tensor, host: bool) -> tuple[Tensor, Tensor]:
    wide = piece.dtype is torch.float64
    single = piece.to(torch.float32)  # exact but for float64, which torch casts to any narrower dtype by this way
    magnitude = single.view(torch.int32) & _MAX
    top = magnitude.amax()
    tame = host and int(top) < _INFINITE  # no Inf, no NaN
    if wide:
        peak = _largest(piece, host)
    else:
        peak = (top if tame else torch.where(magnitude < _INFINITE, magnitude, 0).amax()).view(torch.float32)
    # A subnormal number as an integer times 2^-149: as a float32, that integer has its exponent and fraction.
    small = magnitude < _NORMAL
    whole = host and int(torch.count_nonzero(small)) == small.numel() - int(torch.count_nonzero(magnitude))
    if not whole:
        magnitude = torch.where(small, magnitude.to(torch.float32).view(torch.int32) - (149 << 23), magnitude)
    fraction = magnitude & _FRACTION
    # The highest bit of what is missing to a fraction of ones tells how many ones lead.
    code = ((fraction ^ _FRACTION).to(torch.float32).view(torch.int32) >> 23).clamp_(min=126)
    code += fraction == 0
    code.add_((fraction > _TIE) & (fraction < _AFTER), alpha=_PAST_TIE - 21)
    # Zero has come out at an exponent far below all others: it goes to place 0.
    first = 1 - 126 - (SMALLEST + 127) * _CODES
    keys = code.add_(magnitude >> 23, alpha=_CODES).add_(first).clamp_(min=0)
    counts = _counted(keys)
    if whole:  # zeros alone have the exponent of subnormal numbers
        counts[0], counts[_NO_EXPONENT] = counts[_NO_EXPONENT].clone(), 0
    if not tame:
        counts[_NEG_INF] = torch.count_nonzero(piece == -math.inf)
    if wide:
        counts[_BELOW] = torch.count_nonzero((single == 0) & (piece != 0))
        counts[_BEYOND] = torch.count_nonzero(single.isinf() & piece.isfinite())
    return counts, peak


def _largest(piece: Tensor, host: bool) -> Tensor:
    wide = torch.float64 if piece.dtype is torch.float64 else torch.float32
    if host:  # one pass; an Inf that is meant, such as a mask, takes more
        lo, hi = probe.limits(piece)
        if not probe.bad(lo, hi):
            return torch.tensor(max(-lo, hi), dtype=wide)
    return torch.where(piece.isfinite(), piece, 0).abs().amax().to(wide)


def _counted(keys: Tensor) -> Tensor:
    if keys.is_cpu:
        return torch.bincount(keys, minlength=SIZE)
    if keys.is_cuda:  # bincount reads the largest key back
        return torch.histc(keys, SIZE, 0, SIZE).to(torch.int64)
    ones = torch.ones(1, dtype=torch.int64, device=keys.device).expand(keys.numel())
    return torch.zeros(SIZE, dtype=torch.int64, device=keys.device).index_add_(0, keys, ones)


# --- on the host ------------------------------------------------------------------------------------------------


def _class_of_code(code: int) -> int:
    if code == _POWER:
        return class_of(Fraction(0))
    if code == _PAST_TIE:
        return class_of(Fraction(27, 32))
    ones = 23 - code
    # The smallest fraction with so many leading ones and a zero behind them, but not the power of two itself.
    return class_of(1 - Fraction(1, 2**ones) + (Fraction(1, 2**23) if not ones else 0))


_FOLD = torch.zeros(_CODES, CLASSES, dtype=torch.int64)
for _code in range(_CODES):
    _FOLD[_code, _class_of_code(_code)] = 1


def histogram(counts: Tensor) -> Histogram:
    """What was counted, as the record has it; `counts` are those of `count`, on the host."""
    table = counts[1:_NEG_INF].view(_EXPONENTS, _CODES)
    classes = table[:-1] @ _FOLD
    held: list[int] = classes.any(1).nonzero().flatten().tolist()
    top = table[-1].tolist()  # Inf has an empty fraction
    zero, neg_inf, below, beyond = (int(counts[at]) for at in (0, _NEG_INF, _BELOW, _BEYOND))
    return Histogram(
        bins=tuple((SMALLEST + at, tuple(classes[at].tolist())) for at in held),
        zero=zero - below,
        nan=sum(top) - top[_POWER],
        pos_inf=top[_POWER] - beyond - neg_inf,
        neg_inf=neg_inf,
        below=below,
        beyond=beyond,
    )
