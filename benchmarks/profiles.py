"""What a range profile adds to a training step: whole, of sampled numbers, of sampled steps, and inside a watch."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from tabulate import tabulate

import nanhunt
from nanhunt.precision.exponents import SIZE
from nanhunt.precision.profiler import Profiler

from . import models, overhead
from .models import Program
from .pairs import Step
from .tools import Tool

MODELS = ("gpt", "resnet", "tiny gpt")
_EVERY, _SAMPLE = 10, 4096


@contextmanager
def profiled(program: Program, step: Step, *, every: int = 1, sample: int | None = None) -> Iterator[Step]:
    """A profile that stays open over all steps of a side; reading it at the end is not in the ratio."""
    profiler = Profiler(program.model, every=every, sample=sample)
    profiler.open()

    def run() -> None:
        profiler.look(profiler.step % every == 0)
        step()
        profiler.end_step()

    try:
        yield run
    finally:
        profiler.close()


@contextmanager
def watched(program: Program, step: Step, **options: Any) -> Iterator[Step]:
    with nanhunt.watch(program.model, program.optimizer, **options):
        yield step


@contextmanager
def bare(program: Program, step: Step) -> Iterator[Step]:
    yield step


ROWS = [
    Tool(name="bare again", around=bare, kind="floor"),
    Tool(name="profile", around=profiled, kind="nanhunt", share=2),
    Tool(name=f"profile, sample={_SAMPLE}", around=partial(profiled, sample=_SAMPLE), kind="nanhunt", share=2),
    Tool(name=f"profile, every={_EVERY}", around=partial(profiled, every=_EVERY), kind="nanhunt", cycle=_EVERY),
    Tool(name="watch", around=watched, kind="nanhunt"),
    Tool(name="watch, profile=True", around=partial(watched, profile=True), kind="nanhunt"),
]


def measure(names: Sequence[str] = MODELS, *, seconds: float = 20.0, quick: bool = False) -> list[dict[str, Any]]:
    """The rows of each model, `seconds` a model; `bytes` is what the counts of one profile take on the device."""
    torch.set_num_threads(1)
    found = []
    for name in names:
        program = models.build(name, quick=quick)
        held = counts_held(program)
        rows = overhead.of_program(program, "train", ROWS, seconds=seconds, half=0.01 if quick else 0.3, quick=quick)
        found += [row.json() | {"bytes": held} for row in rows]
    return found


def counts_held(program: Program) -> int:
    """Bytes of the counts of one profiled step: eight for each of the places of each role of each module."""
    profile = nanhunt.profile(program.model, program.step("train"))
    return sum(8 * SIZE for one in profile.modules.values() for _ in one.roles())


def table(found: list[dict[str, Any]]) -> str:
    """A row for each way, a column for each model: profiled over bare, and the memory of the counts."""
    names = list(dict.fromkeys(row["model"] for row in found))
    ways = list(dict.fromkeys(row["tool"] for row in found))
    cells = {(row["tool"], row["model"]): row for row in found}
    rows: list[list[str]] = [[way, *(_cell(cells[way, name]) for name in names)] for way in ways]
    first = [cells[ways[0], name] for name in names]
    rows.append(["bare step, ms", *(f"{row['bare_ms']:.1f}" for row in first)])
    rows.append(["counts on the device, MB", *(f"{row['bytes'] / 1e6:.1f}" for row in first)])
    return str(tabulate(rows, headers=["", *names], tablefmt="github", disable_numparse=True))


def _cell(row: dict[str, Any]) -> str:
    ratio = row["ratio"]
    if ratio is None:
        return f"fails: {row['note']}"
    return f"{ratio['median']:.2f} ({ratio['low']:.2f} .. {ratio['high']:.2f}; {ratio['count']})"


def main() -> None:
    asked = argparse.ArgumentParser(prog="python -m benchmarks.profiles", description=__doc__)
    asked.add_argument("--seconds", type=float, default=20.0, help="for each model")
    asked.add_argument("--models", nargs="+", default=MODELS)
    asked.add_argument("--quick", action="store_true", help="only to see that it runs")
    options = asked.parse_args()
    print(table(measure(options.models, seconds=options.seconds, quick=options.quick)))


if __name__ == "__main__":
    main()
