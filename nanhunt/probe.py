"""One tensor to its range, where it lives."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import Parameter
from torch.nn.parameter import is_lazy

from .finding import TensorStats
from .internals import grad_mode
from .leaves import leaves as leaves
from .numerics import format_of, headroom_bits, headrooms

Tensor = torch.Tensor

_STRIDED = torch.strided
_PLAIN_TYPES = (Tensor, Parameter)
DIRECT = frozenset((torch.float16, torch.bfloat16, torch.float32, torch.float64))  # what kernels reduce as it is
_COMPLEX = frozenset((torch.complex32, torch.complex64, torch.complex128))
_FLOAT8 = frozenset(
    dtype for name, dtype in vars(torch).items() if name.startswith("float8_") and isinstance(dtype, torch.dtype)
)
_COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


def payload(t: Tensor) -> Tensor | None:
    """The dense floating tensor that holds `t`'s numbers, or None when there is nothing to look at."""
    if (
        t.dtype in DIRECT
        and type(t) in _PLAIN_TYPES
        and t.layout is _STRIDED
        and not t.is_nested
        and not t.is_meta
        and not is_functorch_wrapped_tensor(t)
    ):
        return t if t.numel() and not t._is_zerotensor() else None  # zeros that autograd never writes down
    return _unusual(t)


def _unusual(t: Tensor) -> Tensor | None:
    if isinstance(t, FakeTensor) or is_functorch_wrapped_tensor(t) or is_lazy(t) or t.is_meta or t.is_quantized:
        return None
    if type(t) in _PLAIN_TYPES and t._is_zerotensor():
        return None
    if hasattr(t, "_local_tensor"):  # DTensor: this rank's shard
        return payload(t._local_tensor)
    if hasattr(t, "trigger_wait"):  # the result of a functional collective that may still be under way
        t = t.trigger_wait()
    if type(t) not in _PLAIN_TYPES:
        with torch._C.DisableTorchFunctionSubclass():  # what a subclass does to calls is not for ours
            t = t.detach()
    if t.is_nested:
        t = _nested(t)
    elif t.layout is torch.sparse_coo:
        t = t._values()
    elif t.layout in _COMPRESSED:
        t = t.values()
    if t.layout is not _STRIDED or not t.numel():
        return None
    if t.dtype in DIRECT:
        return t
    if t.dtype in _FLOAT8:  # no kernel reduces float8; float32 holds every value of every float8 exactly
        return t.detach().to(torch.float32)
    if t.dtype in _COMPLEX:
        return torch.view_as_real(t.resolve_conj())
    return None


def _nested(t: Tensor) -> Tensor:
    # A jagged tensor with holes keeps memory between its rows that nobody wrote and nobody reads.
    if t.layout is torch.jagged and t.lengths() is not None:  # type: ignore[attr-defined]
        return torch.cat([row.reshape(-1) for row in _rows(t)])
    return t.values()


def _rows(t: Tensor) -> tuple[Tensor, ...]:
    return torch.unbind(t.detach())


def in_order(t: Tensor) -> Tensor:
    """The same numbers with the dimensions in memory order and each number that is repeated by stride 0 once.

    Reductions make one pass over memory only when the last dimension is the fastest; channels_last,
    transposed and expanded tensors would cost 10 to 25 times as much.
    """
    if t.is_contiguous():
        return t
    strides = t.stride()
    order = sorted(range(len(strides)), key=strides.__getitem__, reverse=True)
    if 0 not in strides:
        return t.permute(order)
    for d in range(len(strides) - 1, -1, -1):
        if not strides[d]:
            t = t.select(d, 0)
    return in_order(t)


def limits(t: Tensor) -> tuple[float, float]:
    """The smallest and largest number of a payload; both are NaN when it holds one."""
    if not t.is_contiguous():
        t = in_order(t.detach())
    if not t.is_cpu:
        lo, hi = torch.aminmax(t.detach())
        return lo.item(), hi.item()
    free = _pairs[t.dtype]
    try:
        ends, pair = free.pop()  # threads never share one
    except IndexError:
        ends, pair = _pair(t.dtype)
    graph = torch.is_grad_enabled()
    grad_mode(False)  # cheaper than a detached view
    try:
        torch.aminmax(t, out=pair)
    except NotImplementedError:  # a dual number of forward AD
        lo, hi = torch.aminmax(t.detach())
        return lo.item(), hi.item()
    finally:
        grad_mode(graph)
    numbers = ends.tolist()
    free.append((ends, pair))
    return numbers[0], numbers[1]


# Pairs of numbers that nobody uses at the moment: results that need not be allocated, and are read in one go.
_Pair = tuple[Tensor, tuple[Tensor, Tensor]]
_pairs: dict[torch.dtype, list[_Pair]] = {dtype: [] for dtype in DIRECT}


def _pair(dtype: torch.dtype) -> _Pair:
    with torch.inference_mode(False), torch.no_grad():
        ends = torch.zeros(2, dtype=dtype, device="cpu")
        return ends, (ends[0], ends[1])


def bad(lo: float, hi: float) -> bool:
    """Whether limits give a NaN or an Inf away."""
    return not (-math.inf < lo and hi < math.inf)


def kinds(t: Tensor) -> tuple[str, ...]:
    """What `t` holds of "nan", "+inf" and "-inf", in this order."""
    numbers = payload(t)
    if numbers is None:
        return ()
    lo, hi = limits(numbers)
    if lo == lo:
        return ("+inf",) * (hi == math.inf) + ("-inf",) * (lo == -math.inf)
    numbers = in_order(numbers.detach())
    # NaN hides the others from aminmax; without it the ends of the range are what is left to see.
    lo, hi = limits(numbers.nan_to_num(nan=0.0, posinf=math.inf, neginf=-math.inf))
    return ("nan",) + ("+inf",) * (hi == math.inf) + ("-inf",) * (lo == -math.inf)


# -- full statistics ----------------------------------------------------------------------------------------


class _Layout(NamedTuple):
    """Where a float keeps its exponent, as seen through a signed integer of the same size."""

    integer: torch.dtype
    mantissa: int
    bias: int


_LAYOUTS = {
    torch.float16: _Layout(torch.int16, 10, 15),
    torch.bfloat16: _Layout(torch.int16, 7, 127),
    torch.float32: _Layout(torch.int32, 23, 127),
    torch.float64: _Layout(torch.int64, 52, 1023),
}

# A piece must stay in the processor's cache from its first pass to its last, or each costs five times more.
_PIECE = 1 << 18
_PIECE_ON_ACCELERATOR = 1 << 24


def _size_of_piece(flat: Tensor) -> int:
    return _PIECE if flat.is_cpu else _PIECE_ON_ACCELERATOR


def _pieces(flat: Tensor) -> tuple[Tensor, ...]:
    return torch.split(flat, _size_of_piece(flat))


def stats(t: Tensor, role: str, name: str | None = None) -> TensorStats:
    """Everything the table says about `t`, exact, whatever its dtype and layout.

    Where nothing can be read (a meta or fake tensor, a transform's wrapper, a subclass that refuses), the row
    holds shape, dtype and device only.
    """
    row: dict[str, Any] = {"role": role, "name": name}
    with torch.no_grad():
        for key, read in _OUTSIDE.items():
            with suppress(Exception):  # a wrapper may refuse any of them
                row[key] = read(t)
        outside = dict(row)
        try:
            numbers = payload(t)
            if numbers is not None:
                row |= _tally(numbers, row["dtype"])
                if row["nan"] or row["pos_inf"] or row["neg_inf"]:
                    row["first_bad"] = _first_bad(t, numbers)
            elif row.get("numel") == 0:
                row |= dict.fromkeys(("nan", "pos_inf", "neg_inf", "zero", "subnormal"), 0)
            elif not (t.is_floating_point() or t.is_complex()):
                row |= _whole_numbers(t)
        except Exception:
            row = outside
    return TensorStats(**row)


def _shape(t: Tensor) -> tuple[int, ...]:
    return tuple(_size(t, d) for d in range(t.dim()))


def _size(t: Tensor, d: int) -> int:
    try:
        size = t.size(d)
        return size if type(size) is int else -1
    except RuntimeError:  # strided nested tensors: "dim 1 is irregular"
        return -1


_OUTSIDE: dict[str, Callable[[Tensor], Any]] = {
    "shape": _shape,
    "dtype": lambda t: str(t.dtype).removeprefix("torch."),
    "device": lambda t: str(t.device),
    "numel": lambda t: int(t.numel()),
}


def _tally(numbers: Tensor, dtype: str) -> dict[str, Any]:
    distinct = in_order(numbers.detach().resolve_neg()).reshape(-1)
    layout = _LAYOUTS[distinct.dtype]
    largest = torch.iinfo(layout.integer).max
    infinity = largest >> layout.mantissa << layout.mantissa
    histogram = [0] * ((largest >> layout.mantissa) + 1)
    tiny = [0] * layout.mantissa
    nan = pos_inf = zero = 0
    lo, hi, least = math.inf, -math.inf, infinity
    for piece in _pieces(distinct):
        bits = piece.view(layout.integer)
        magnitude = bits & largest
        counts = torch.bincount(magnitude >> layout.mantissa, minlength=len(histogram)).tolist()
        histogram = [old + new for old, new in zip(histogram, counts, strict=True)]
        if counts[-1]:
            nan += int(torch.count_nonzero(magnitude > infinity))
            pos_inf += int(torch.count_nonzero(bits == infinity))
            piece = piece[magnitude < infinity]
        if piece.numel():
            ends = torch.aminmax(piece)
            lo, hi = min(lo, ends.min.item()), max(hi, ends.max.item())
        if counts[0]:
            zeros = int(torch.count_nonzero(magnitude == 0))
            zero += zeros
            if counts[0] > zeros:
                tiny = [old + new for old, new in zip(tiny, _octaves(magnitude, layout), strict=True)]
            magnitude = (magnitude - 1).bitwise_and_(largest)  # zero becomes the largest, the rest shrink by one
            least = min(least, int(magnitude.amin()) + 1)
        else:
            least = min(least, int(magnitude.amin()))
    form = format_of(dtype)
    assert form is not None
    # float8 comes here as float32: what counts is the smallest normal of its own format.
    below = round(math.log2(form.smallest_normal)) + layout.bias
    subnormal = sum(histogram[:below]) - zero if below > 0 else 0
    finite = sum(histogram[:-1])
    absmax = max(abs(lo), abs(hi)) if finite else None
    times = numbers.numel() // distinct.numel()
    return {
        "numel": numbers.numel(),
        "min": lo + 0.0 if finite else None,
        "max": hi + 0.0 if finite else None,
        "absmax": absmax,
        "smallest_nonzero": _value(least, layout) if finite > zero else None,
        "nan": nan * times,
        "pos_inf": pos_inf * times,
        "neg_inf": (histogram[-1] - nan - pos_inf) * times,
        "zero": zero * times,
        "subnormal": subnormal * times,
        "below_normal": subnormal / (finite - zero) if finite > zero else None,
        "headroom_bits": headroom_bits(absmax, dtype),
        "headroom": headrooms(absmax),
        "exponents": _exponents([*tiny, *histogram[1:-1]], layout, times),
    }


def _octaves(magnitude: Tensor, layout: _Layout) -> list[int]:
    """The subnormal numbers of a piece by the place of their highest bit: they share one exponent field."""
    small = magnitude[(magnitude > 0) & (magnitude < 1 << layout.mantissa)]
    powers = torch.tensor([1 << k for k in range(layout.mantissa)], dtype=layout.integer, device=small.device)
    counts: list[int] = torch.bincount(torch.bucketize(small, powers, right=True) - 1, minlength=len(powers)).tolist()
    return counts


def _exponents(counts: list[int], layout: _Layout, times: int) -> tuple[int, tuple[int, ...]] | None:
    """Counts from the smallest subnormal number upwards, without the empty ends."""
    held = [at for at, count in enumerate(counts) if count]
    if not held:
        return None
    first, last = held[0], held[-1]
    return first + 1 - layout.bias - layout.mantissa, tuple(count * times for count in counts[first : last + 1])


def _value(magnitude: int, layout: _Layout) -> float:
    """The number whose bits these are, without a float operation that could flush it to zero."""
    exponent, fraction = magnitude >> layout.mantissa, magnitude & ((1 << layout.mantissa) - 1)
    if exponent:
        return math.ldexp(fraction | 1 << layout.mantissa, exponent - layout.bias - layout.mantissa)
    return math.ldexp(fraction, 1 - layout.bias - layout.mantissa)


def _whole_numbers(t: Tensor) -> dict[str, Any]:
    """Indices, labels, masks: their range, and how many are zero."""
    whole = t.detach().to(torch.float64 if t.dtype is torch.uint64 else torch.int64)
    ends = torch.aminmax(in_order(whole))
    lo, hi = float(ends.min), float(ends.max)
    absmax = max(abs(lo), abs(hi))
    return {
        "min": lo,
        "max": hi,
        "absmax": absmax,
        "nan": 0,
        "pos_inf": 0,
        "neg_inf": 0,
        "zero": whole.numel() - int(torch.count_nonzero(whole)),
        "headroom": headrooms(absmax),
    }


def _first_bad(t: Tensor, numbers: Tensor) -> tuple[int, ...] | None:
    """The index into `t` of its first number that is not finite, in row-major order."""
    if t.is_nested:
        for row, part in enumerate(_rows(t)):
            inner = payload(part)
            place = None if inner is None else _first_bad(part, inner)
            if place is not None:
                return (row, *place)
        return None
    if hasattr(t, "_local_tensor") and t.shape != t._local_tensor.shape:
        return None
    if t.layout in _COMPRESSED:
        t = t.detach().to_sparse(layout=torch.sparse_coo)
        numbers = t._values()
        numbers = torch.view_as_real(numbers) if numbers.is_complex() else numbers
    for d, stride in enumerate(numbers.stride()):
        if not stride and numbers.shape[d]:
            numbers = numbers.narrow(d, 0, 1)
    nth = _nth_bad(numbers.detach().reshape(-1))
    if nth is None:
        return None
    index: list[int] = []
    for size in reversed(numbers.shape):
        nth, at = divmod(nth, size)
        index.insert(0, at)
    if t.is_complex():
        index.pop()
    if t.layout is torch.sparse_coo:
        index[:1] = t._indices()[:, index[0]].tolist()
    return tuple(index)


def _nth_bad(flat: Tensor) -> int | None:
    for n, piece in enumerate(_pieces(flat)):
        if bad(*limits(piece)):
            # of several largest numbers argmax names the first
            return n * _size_of_piece(flat) + int(piece.isfinite().logical_not_().view(torch.uint8).argmax())
    return None
