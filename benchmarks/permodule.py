"""What watching one more module costs, in microseconds, beside the floor measured in the same run."""

from __future__ import annotations

import functools
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import nanhunt

from . import pairs, tools
from .models import Chain, Program, Times
from .pairs import Spread, Step

# What the target is measured against: an empty global forward hook, an empty tensor hook for each output, and one
# aminmax of the output and one of its gradient. Nothing is read.
FLOOR = "floor: one aminmax"
COMPARED = ("floor: empty hooks", "floor: one sum", FLOOR, "nanhunt, module", "nanhunt, auto")


class Links(Program):
    """Forward and backward through `count` modules of one kind, one after the other, and nothing else."""

    def __init__(self, count: int, make: Callable[[], nn.Module], x: Tensor) -> None:
        super().__init__("links", Chain(count, make), {"x": x}, torch.zeros(1), "links.0")
        self.count, self.x = count, x.requires_grad_()
        self.ones = torch.ones_like(x)

    def train(self) -> None:
        self.x.grad = None
        self.model(self.x).backward(self.ones)


KINDS: dict[str, Callable[[int], Links]] = {
    "x * c, 4x16": lambda count: Links(count, Times, torch.randn(4, 16)),
    "Linear(16, 16), 4x16": lambda count: Links(count, functools.partial(nn.Linear, 16, 16), torch.randn(4, 16)),
}


def compared(names: Sequence[str]) -> dict[str, tools.Around]:
    floors: dict[str, tools.Around] = {
        name: functools.partial(tools.reduced, reduce=reduce) for name, reduce in tools.FLOORS.items()
    }
    watches: dict[str, tools.Around] = {
        name: functools.partial(tools.watched, options=options) for name, options in tools.WATCHES.items()
    }
    known = floors | watches
    return {name: known[name] for name in names}


def extra(program: Links, *, rounds: int, times: int, names: Sequence[str] = COMPARED) -> dict[str, Spread]:
    """Microseconds for one module, forward and backward together: `bare` alone, the others on top of it."""
    order = random.Random(0)
    step: Step = program.step("train")
    found: dict[str, list[float]] = {name: [] for name in ("bare", *names)}
    step()
    with pairs.settled():
        for _ in range(rounds):
            for name, around in compared(names).items():
                pair = pairs.pair(step, functools.partial(around, program, step), times, order)
                found["bare"].append(1e6 * pair.bare / program.count)
                found[name].append(1e6 * (pair.tool - pair.bare) / program.count)
    return {name: Spread.of(figures) for name, figures in found.items()}


def attaching(count: int, rounds: int) -> dict[str, float]:
    """Microseconds for one module to attach a watch, to live through its first step, and to take it off."""
    program = Links(count, functools.partial(nn.Linear, 16, 16), torch.randn(4, 16))
    step = program.step("train")
    step()
    found: dict[str, list[float]] = {"attach": [], "first step": [], "remove": []}
    for _ in range(rounds):
        begin = time.process_time()
        watch = nanhunt.watch(program.model)
        attached = time.process_time()
        step()
        stepped = time.process_time()
        later = pairs.cpu_time(step, 3)
        leaving = time.process_time()
        watch.remove()
        found["attach"].append(attached - begin)
        found["first step"].append(max(0.0, stepped - attached - later))
        found["remove"].append(time.process_time() - leaving)
    return {name: round(1e6 * statistics.median(figures) / count, 2) for name, figures in found.items()}


def measure(*, quick: bool = False) -> dict[str, Any]:
    """Both kinds of tiny modules, and what attaching costs."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    count, rounds, times = (20, 2, 2) if quick else (200, 15, 5)
    modules = []
    for kind, make in KINDS.items():
        found = extra(make(count), rounds=rounds, times=times)
        modules.append(
            {
                "kind": kind,
                "modules": count,
                "microseconds": {name: spread.json() for name, spread in found.items()},
                "over_floor": {
                    name: round(found[name].median / found[FLOOR].median, 3) for name in COMPARED if "nanhunt" in name
                },
            }
        )
    return {"modules": modules, "attaching": attaching(20 if quick else 1000, 3 if quick else 7)}
