"""Figures of two tensors that should be the same: of a call, of its module, of a parameter's gradient."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

LINE = 0.99  # cosine of the logits below which precision already changes what a model says
MULTIPLE = 2.5  # own error, in units of what rounding explains, above which a module parts


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Two tensors that should be the same, over the numbers that are finite in both.

    Attributes:
        tensor: which one: `"output"`, `"output.logits"`, `"input x"`, `"grad of output"`.
        dtypes: of the first run's, and of the second's.
        cosine: similarity of the two, exactly 1.0 where they are equal bit for bit or both zero.
        max_abs: largest absolute difference.
        max_rel: largest difference relative to the number itself, over those that are not zero.
        error: root mean square of the difference, relative to that of the first run's numbers.
        ulps: root mean square of the difference in units in the last place of `lower` at the size of the tensor.
        max_ulps: largest difference in units in the last place of `lower` at the size of that number.
        lower: the format of the two with the fewest digits.
        sizes: root mean square of either, over the numbers that are finite in both.
        count: of those numbers.
        only_a, only_b: what is not finite in one of them alone, such as `("3 nan", "1 +inf")`.
    """

    tensor: str
    dtypes: tuple[str, str]
    cosine: float
    max_abs: float
    max_rel: float
    error: float
    ulps: float
    max_ulps: float
    lower: str
    sizes: tuple[float, float]
    count: int
    only_a: tuple[str, ...] = ()
    only_b: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Own:
    """The error that a module's own code makes of the first run's inputs, its children's outputs being right.

    Attributes:
        tensor: where it is largest in terms of `explained`: an output, or what the code hands to a child.
        error: root mean square, relative to that of the first run's numbers.
        explained: the same of the error which rounding explains: what is read, what is given and the weights rounded
            once to their formats, and all else computed as in the first run.
        made: what is not finite and should be, such as `("2 nan",)`.
    """

    tensor: str
    error: float
    explained: float
    made: tuple[str, ...] = ()

    @property
    def times(self) -> float:
        """By how much the error is larger than what rounding explains."""
        if self.made or not math.isfinite(self.error):
            return math.inf
        return self.error / self.explained if self.explained else (math.inf if self.error else 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of a module in both runs; the worst of its tensors stands for each kind."""

    module: str
    type: str
    call: int
    batch: int
    input: Figures | None = None
    output: Figures | None = None
    gradient: Figures | None = None
    own: Own | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """The gradient of one parameter in both runs, the loss scale taken out."""

    name: str
    module: str
    batch: int
    gradient: Figures


@dataclass(frozen=True, slots=True)
class Module:
    """All calls of one module, over all batches."""

    name: str
    type: str
    calls: tuple[Call, ...]

    @property
    def cosine(self) -> float:
        """The worst similarity of its outputs; NaN when none could be compared."""
        return worst(call.output.cosine for call in self.calls if call.output is not None)

    @property
    def mean_cosine(self) -> float:
        return mean([call.output.cosine for call in self.calls if call.output is not None])

    @property
    def input_cosine(self) -> float:
        return worst(call.input.cosine for call in self.calls if call.input is not None)

    @property
    def gradient_cosine(self) -> float:
        """The worst similarity of the gradients of its outputs; NaN when there were none."""
        return worst(call.gradient.cosine for call in self.calls if call.gradient is not None)

    @property
    def output(self) -> Figures | None:
        """The worst of its outputs."""
        found = [call.output for call in self.calls if call.output is not None]
        return min(found, key=lambda one: (not one.only_b, one.cosine, -one.error), default=None)

    @property
    def own(self) -> Own | None:
        """Its own error where that passes most what rounding explains."""
        return max((c.own for c in self.calls if c.own is not None), key=lambda one: one.times, default=None)

    @property
    def parts(self) -> bool:
        """True when its own code loses more than rounding explains."""
        own = self.own
        return own is not None and own.times > MULTIPLE


def worst(values: Any) -> float:
    return min((value for value in values if not math.isnan(value)), default=math.nan)


def mean(values: list[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return math.fsum(known) / len(known) if known else math.nan
