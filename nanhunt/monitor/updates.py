"""One update of the weights, by a sample: the weights before and after, their gradients, the second moments."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch

from . import shares
from .gradients import norms, numbers_of, sample
from .readback import Numbers, Readback

Tensor = torch.Tensor
Name = Callable[[Tensor], str]

# What optimizers call their second moments: torch's, and those of transformers.
_SECOND = (
    "exp_avg_sq",
    "max_exp_avg_sq",
    "square_avg",
    "sum",
    "exp_inf",
    "exp_avg_sq_row",
    "exp_avg_sq_col",
    "state2",
)


class Update:
    """Takes what is needed around one optimizer step, as small copies, and works it out when it has been read."""

    def __init__(self, nth: int, reads: Readback) -> None:
        self._nth, self._reads = nth, reads
        self._params: list[tuple[str, Tensor, Tensor]] = []  # name, parameter, its numbers
        self._rows: list[list[shares.Part]] = []
        self._moments: list[list[shares.Part]] = []
        self._peaks = 0

    def before(self, optimizer: torch.optim.Optimizer, name: Name) -> None:
        """The weights that may be about to move: those in groups whose learning rate is not 0."""
        for group in optimizer.param_groups:
            rate = group.get("lr")
            if isinstance(rate, (int, float)) and rate == 0:
                continue  # a warm-up that begins at 0 moves nothing, and means it
            for p in group["params"]:
                weight = numbers_of(p) if p.requires_grad else None
                if weight is not None:
                    self._params.append((name(p), p, weight))
        for i, (_, parts, numbers) in enumerate(sample((n, weight, weight) for n, _, weight in self._params)):
            self._rows.append(parts)
            self._reads.add(("before", self._nth, i), numbers)

    def after(self, optimizer: torch.optim.Optimizer, name: Name) -> None:
        """The same weights once they have moved, their gradients, and the optimizer's second moments."""
        params, self._params = self._params, []
        for i, (_, _, numbers) in enumerate(sample((n, weight, weight) for n, _, weight in params)):
            self._reads.add(("after", self._nth, i), numbers)
        pushed = [(n, _pushed(p, weight), weight) for n, p, weight in params]
        for i, (_, _, numbers) in enumerate(sample(pushed)):
            self._reads.add(("pushed", self._nth, i), numbers)
        moments = list(second_moments(optimizer, name))
        for i, (_, parts, numbers) in enumerate(sample((n, moment, moment) for n, moment in moments)):
            self._moments.append(parts)
            self._reads.add(("moments", self._nth, i), numbers)
        for _, peaks in norms([moment for _, moment in moments], float("inf")):
            self._reads.add(("peaks", self._nth, self._peaks), peaks)
            self._peaks += 1

    def moved(self, values: dict[Hashable, Numbers], into: shares.Moved) -> None:
        """Add what the weights did."""
        for i, parts in enumerate(self._rows):
            before, after, pushed = (values.get((what, self._nth, i)) for what in ("before", "after", "pushed"))
            if before is not None and after is not None and pushed is not None and len(before) == len(after):
                into.add(before, after, pushed, shares.weights(parts))

    def frozen(self, values: dict[Hashable, Numbers]) -> tuple[float, float]:
        """(number of infinite second moments, number of all), by the sample; at least 1 when there is one at all."""
        infinite = total = 0.0
        for i, parts in enumerate(self._moments):
            some, count = shares.infinite(values["moments", self._nth, i], shares.weights(parts))
            infinite, total = infinite + some, total + count
        if not infinite:
            infinite = float(
                sum(int((values["peaks", self._nth, i] == float("inf")).sum()) for i in range(self._peaks))
            )
        return infinite, total


def _pushed(p: Tensor, weight: Tensor) -> Tensor:
    """The gradient that has moved a weight, as the weight is laid out; zeros where there is none that can be paired."""
    grad = numbers_of(p.grad) if p.grad is not None and p.grad.layout is torch.strided else None
    if grad is None or grad.shape != weight.shape:
        return weight.new_zeros(()).expand(weight.shape)
    return grad.to(weight.dtype)


def second_moments(optimizer: torch.optim.Optimizer, name: Name) -> Iterator[tuple[str, Tensor]]:
    """The second moments that an optimizer holds, with the name of the parameter each belongs to."""
    for p, state in optimizer.state.items():
        if not isinstance(state, dict):
            continue
        for key in _SECOND:
            moment = state.get(key)
            if isinstance(moment, Tensor) and moment.is_floating_point():
                numbers = numbers_of(moment)
                if numbers is not None:
                    yield name(p), numbers


def state_dtypes(optimizer: torch.optim.Optimizer) -> Iterator[Any]:
    """The dtypes of an optimizer's moments; of numbers such as a count of steps, none."""
    for p, state in optimizer.state.items():
        if isinstance(state, dict) and isinstance(p, Tensor):
            for moment in state.values():
                if isinstance(moment, Tensor) and moment.is_floating_point() and moment.dim() == p.dim() and p.dim():
                    yield moment.dtype
