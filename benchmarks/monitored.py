"""What a monitor adds to a training step: ordinary and sampled steps apart, its own time, its ops and host reads."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

import nanhunt

from . import counts, models, pairs
from .models import Program
from .pairs import Spread, Step

MEASURED = ("gpt", "resnet", "llama", "tiny gpt2")
SAMPLE = 50  # the default: of so many steps one is sampled
_NEVER = 10**9
_FIRST = 3  # steps at the start that are sampled in any case
_HALF = 0.4  # seconds on either side of a pair


@contextlib.contextmanager
def monitored(program: Program, step: Step, **options: Any) -> Iterator[Step]:
    """A monitor in its stride: the steps that are always sampled are over."""
    with nanhunt.Monitor(program.model, program.optimizer, on_symptom="record", **options) as monitor:
        for _ in range(_FIRST):
            step()
        yield step
    if monitor.errors:
        raise monitor.errors[0]


def ratio(program: Program, step: Step, sample: int, *, times: int, rounds: int) -> Spread:
    """Interleaved pairs of bare and monitored steps."""
    order = random.Random(0)
    around = partial(monitored, program, step, sample=sample)
    with pairs.settled():
        return Spread.of(pairs.pair(step, around, times, order).ratio for _ in range(rounds))


def own_time(program: Program, step: Step, *, times: int) -> float:
    """The share of the time of ordinary steps that passes inside the monitor's events: what pairs can't resolve.

    Not in it is what each module call pays for the look into a dictionary, about a microsecond.
    """
    spent = 0.0

    def timed(guarded: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        nonlocal spent
        begin = time.process_time_ns()
        guarded(*args, **kwargs)
        spent += time.process_time_ns() - begin

    with nanhunt.Monitor(program.model, program.optimizer, sample=_NEVER, on_symptom="record") as monitor:
        pace: Any = monitor._pace
        pace._guarded = partial(timed, pace._guarded)
        for _ in range(_FIRST + 1):
            step()
        spent = 0.0
        begin = time.process_time_ns()
        for _ in range(times):
            step()
        whole = time.process_time_ns() - begin
    return spent / (whole - spent)


def counted(program: Program, step: Step, **options: Any) -> dict[str, int]:
    """Ops dispatched and host reads of one step, the fifth; without options of a bare one."""
    around = monitored(program, step, **options) if options else contextlib.nullcontext(step)
    with around as run:
        run()
        with counts.lists() as read:
            found = counts.ops(run)
    return {"ops": sum(found.values()), "reads": found["aten::_local_scalar_dense"] + len(read)}


def measure(names: list[str], *, quick: bool = False) -> list[dict[str, Any]]:
    """A row for each model: the ratios, what they come to over 50 steps, and the counts."""
    torch.set_num_threads(1)
    rows = []
    for name in names:
        program = models.build(name, quick=quick)
        step = program.step("train")
        times = pairs.times_for(step, 0.01 if quick else _HALF)
        plain = ratio(program, step, _NEVER, times=times, rounds=2 if quick else 16)
        sampled = ratio(program, step, 1, times=times, rounds=2 if quick else 6)
        bare = counted(program, step)
        ways = {
            "ordinary": {"sample": _NEVER},
            "ordinary, as on an accelerator": {"sample": _NEVER, "_defer": True},
            "sampled": {"sample": 1},
        }
        further = {
            way: {key: count - bare[key] for key, count in counted(program, step, **options).items()}
            for way, options in ways.items()
        }
        rows.append(
            {
                "model": name,
                "ordinary": plain.json(),
                "sampled": sampled.json(),
                "whole": round(((SAMPLE - 1) * plain.median + sampled.median) / SAMPLE, 5),
                "own": round(own_time(program, step, times=3 if quick else max(10, 3 * times)), 5),
                "parameters": sum(1 for _ in program.model.parameters()),
                "further": further,
            }
        )
    return rows
