"""How fine a format is: what an eps, an update or a constant of some size becomes in it."""

from __future__ import annotations

import math

import torch

from .. import probe
from ..numerics import Format, format_of

Tensor = torch.Tensor

HALF = (torch.float16, torch.bfloat16)
_SAMPLE = 1 << 14  # numbers of a tensor that stand for all of them


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def form(dtype: torch.dtype) -> Format | None:
    return format_of(dtype)


def stored(value: float, dtype: torch.dtype) -> float:
    """What `value` becomes in `dtype`."""
    return float(torch.tensor(value, dtype=torch.float64).to(dtype))


def usable_eps(dtype: torch.dtype) -> str:
    """The smallest power of ten that is a normal number of the format: `1e-04` for float16."""
    known = form(dtype)
    return f"1e{math.ceil(math.log10(known.smallest_normal))}" if known is not None else "a larger one"


def decay_lost(amount: float, dtype: torch.dtype) -> bool:
    """True when a factor of 1 - amount leaves every normal number of the format as it was.

    Two neighbours are at least eps / 2 of the number apart, so a change below eps / 4 of it is rounded back.
    """
    known = form(dtype)
    return known is not None and 0 < amount < known.eps / 4


def sample(tensor: Tensor) -> Tensor | None:
    """Numbers spread evenly over a tensor, copied: at most a few thousand; None when they cannot be read."""
    numbers = probe.payload(tensor)
    if numbers is None:
        return None
    flat = probe.in_order(numbers.detach())
    if flat.is_contiguous():
        flat = flat.view(-1)
        return flat[:: max(1, flat.numel() // _SAMPLE)].clone()
    while flat.numel() > _SAMPLE:  # a slice of a larger tensor: thinned out, one dimension at a time
        longest = max(range(flat.dim()), key=flat.shape.__getitem__)
        flat = flat[(slice(None),) * longest + (slice(None, None, 2),)]
    return flat.reshape(-1).clone()


def unmoved(weights: Tensor, update: float) -> float:
    """The share of the nonzero `weights` that an update of this size, up or down, does not change."""
    weights = weights[(weights != 0) & weights.isfinite()]
    if not weights.numel():
        return 0.0
    exact = weights.double()
    stays = ((exact + update).to(weights.dtype) == weights) & ((exact - update).to(weights.dtype) == weights)
    return float(stays.double().mean())


def half_steps(weights: Tensor) -> Tensor:
    """For each nonzero weight half the distance to its neighbour: what an update must pass to change it."""
    known = form(weights.dtype)
    assert known is not None
    exact = weights[(weights != 0) & weights.isfinite()].double().abs()
    _, exponent = torch.frexp(exact.clamp_min(known.smallest_normal))
    return torch.ldexp(torch.full_like(exact, known.eps / 4), exponent)
