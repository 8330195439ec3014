"""What sampled numbers say of an update: how far weights moved, which did not, what gradients lost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..numerics import format_of

Numbers = npt.NDArray[np.floating]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """The sample of one tensor: `count` numbers that stand for `numel`."""

    name: str
    count: int
    numel: int


def weights(parts: Sequence[Part]) -> Numbers:
    """For how many numbers each number of the sample stands."""
    if not parts:
        return np.zeros(0)
    return np.repeat([part.numel / part.count for part in parts], [part.count for part in parts])


@dataclass(slots=True)
class Moved:
    """How far the weights of a sample moved, added up over optimizers and dtypes."""

    moved: float = 0.0  # squares
    length: float = 0.0
    pushed: float = 0.0  # weights with a nonzero gradient
    still: float = 0.0  # those of them that the update did not change

    def add(self, before: Numbers, after: Numbers, pushed: Numbers, weight: Numbers) -> None:
        """`pushed`: the gradients; numbers that are not finite before or after count for nothing."""
        before, after = before.astype(np.float64), after.astype(np.float64)
        good = np.isfinite(before) & np.isfinite(after)
        pull = good & (pushed != 0) & ~np.isnan(pushed)
        step = np.where(good, after, 0) - np.where(good, before, 0)
        self.moved += float(np.sum(weight * np.square(step)))
        self.length += float(np.sum(weight * np.square(np.where(good, before, 0))))
        self.pushed += float(np.sum(weight[pull]))
        self.still += float(np.sum(weight[pull & (step == 0)]))

    @property
    def ratio(self) -> float | None:
        """2-norm of the update over that of the weights."""
        return (self.moved / self.length) ** 0.5 if self.length else None

    @property
    def lost(self) -> float | None:
        """Share of the weights with a nonzero gradient that did not change."""
        return self.still / self.pushed if self.pushed else None


class Entries:
    """Gradient entries of a sample: zeros, those that are small for their format, and all others by exponent."""

    def __init__(self) -> None:
        self.all = self.zeros = self.small = 0.0
        self.histogram: dict[int, float] = {}  # weight by floor(log2 |gradient|), without the loss scale

    def add(self, grads: Numbers, weight: Numbers, scale: float, dtype: str) -> None:
        """`grads` are multiplied by `scale` no longer; `dtype` is the format they were computed in, with it."""
        size = np.abs(grads.astype(np.float64))
        finite = np.isfinite(size)
        nonzero = finite & (size > 0)
        self.all += float(np.sum(weight[finite]))
        self.zeros += float(np.sum(weight[finite & (size == 0)]))
        form = format_of(dtype)
        if form is not None:
            self.small += float(np.sum(weight[nonzero & (size * scale < form.smallest_normal)]))
        if nonzero.any():
            exponents = np.frexp(size[nonzero])[1].astype(np.int64) - 1
            least = int(exponents.min())
            counts = np.bincount(exponents - least, weights=weight[nonzero])
            for at, count in enumerate(counts.tolist()):
                if count:
                    self.histogram[least + at] = self.histogram.get(least + at, 0.0) + count

    @property
    def zero_share(self) -> float | None:
        return self.zeros / self.all if self.all else None

    @property
    def small_share(self) -> float | None:
        """Of the nonzero entries."""
        nonzero = self.all - self.zeros
        return self.small / nonzero if nonzero else None


def infinite(numbers: Numbers, weight: Numbers) -> tuple[float, float]:
    """(weight of the infinite ones, weight of all)."""
    return float(np.sum(weight[np.isinf(numbers)])), float(np.sum(weight))
