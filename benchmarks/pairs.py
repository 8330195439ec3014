"""Interleaved pairs: the same work with and without a tool, side by side in random order."""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any

Step = Callable[[], object]
Timer = Callable[[Step, int], float]  # (step, times) -> seconds for one step


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """The median of some figures, their quartiles, and how many there were."""

    median: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, figures: Iterable[float]) -> Spread:
        found = sorted(figures)
        if len(found) < 2:
            return cls(median=found[0], low=found[0], high=found[0], count=1)
        low, middle, high = statistics.quantiles(found, n=4, method="inclusive")
        return cls(median=middle, low=low, high=high, count=len(found))

    def json(self) -> dict[str, Any]:
        return {key: round(value, 5) for key, value in asdict(self).items()}


def cpu_time(step: Step, times: int) -> float:
    """Seconds of this process for one step: what other programs do on the machine counts little."""
    begin = time.process_time()
    for _ in range(times):
        step()
    return (time.process_time() - begin) / times


@contextmanager
def settled() -> Iterator[None]:
    """What stands for good is not walked by the collections between the halves of a pair, nor within them."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Seconds for one step without a tool and with it."""

    bare: float
    tool: float

    @property
    def ratio(self) -> float:
        return self.tool / self.bare


def half(around: AbstractContextManager[Step], times: int, timer: Timer = cpu_time) -> float:
    """Seconds for one step inside `around`, which gives the step to run.

    Attaching, detaching and the first step (in which a tool may learn names) are not counted.
    """
    gc.collect()
    with around as step:
        step()
        return timer(step, times)


def pair(
    bare: Step,
    around: Callable[[], AbstractContextManager[Step]],
    times: int,
    order: random.Random,
    timer: Timer = cpu_time,
) -> Pair:
    """One pair: which of the two goes first is drawn by lot, so that a drift of the machine favours neither."""
    if order.random() < 0.5:
        before = half(nullcontext(bare), times, timer)
        return Pair(bare=before, tool=half(around(), times, timer))
    during = half(around(), times, timer)
    return Pair(bare=half(nullcontext(bare), times, timer), tool=during)


def times_for(step: Step, seconds: float, timer: Timer = cpu_time) -> int:
    """How many steps take about so many seconds, after one that warms up."""
    step()
    return max(1, round(seconds / max(timer(step, 1), 1e-7)))
