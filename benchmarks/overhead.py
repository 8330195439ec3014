"""What a tool adds to a step: the ratio of CPU times, watched over bare, model by model."""

from __future__ import annotations

import functools
import math
import random
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from . import apart, models, pairs, tools
from .models import Program
from .pairs import Pair, Spread, Timer
from .tools import Tool

HALF = 0.3  # seconds of steps on either side of a pair, unless one step takes longer
TRAINING = 0.8  # the part of a model's time that goes to training steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One tool on one model in one mode; `ratio` is None where it could not be measured, and `note` says why."""

    model: str
    mode: str
    tool: str
    kind: str
    ratio: Spread | None
    bare_ms: float | None
    note: str = ""

    def json(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "mode": self.mode,
            "tool": self.tool,
            "kind": self.kind,
            "ratio": None if self.ratio is None else self.ratio.json(),
            "bare_ms": None if self.bare_ms is None else round(self.bare_ms, 3),
            "note": self.note,
        }


def measure(
    name: str,
    mode: str,
    rows: list[Tool],
    *,
    seconds: float,
    quick: bool = False,
    told: Callable[[float], object] = lambda seconds: None,
) -> list[Row]:
    """The rows of one model of the table in one mode. `told` is called with the seconds that went by."""
    program = models.build(name, quick=quick)
    return of_program(program, mode, rows, seconds=seconds, half=0.01 if quick else HALF, quick=quick, told=told)


def of_program(
    program: Program,
    mode: str,
    rows: list[Tool],
    *,
    seconds: float,
    half: float = HALF,
    quick: bool = False,
    told: Callable[[float], object] = lambda seconds: None,
    timer: Timer = pairs.cpu_time,
) -> list[Row]:
    """Pairs for each tool until the time is up; whoever has had least of its share of the time comes next.

    A tool that raises gets the error as its note.

    Raises:
        RuntimeError: when the loss is no longer finite, as the figures would mean nothing.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peers warn of what they cannot see
        step = program.step(mode)
        step()
        times = pairs.times_for(step, half, timer)
        wanted = [tool for tool in rows if mode in tool.modes]
        notes = {tool.name: tool.why_not(program.name) or "" for tool in wanted}
        found: dict[str, list[Pair]] = {tool.name: [] for tool in wanted}
        spent = {tool.name: 0.0 for tool in wanted}
        order = random.Random(0)
        end = time.monotonic() + seconds

        def enough(tool: Tool) -> bool:
            """Two pairs, or one that took an eighth of all the time there is."""
            return len(found[tool.name]) >= (1 if quick or spent[tool.name] > seconds / 8 else 2)

        with pairs.settled():
            while runs := [tool for tool in wanted if not notes[tool.name]]:
                tool = min(runs, key=lambda t: (enough(t), spent[t.name] / t.share))
                past = found[tool.name]
                if enough(tool) and time.monotonic() > end:
                    break
                begin = time.monotonic()
                # A tool that multiplies the step's time gets fewer steps, as long as its cost comes round.
                slower = max(1.0, past[0].ratio if past else 1.0)
                count = tool.cycle * math.ceil(max(1.0, times / slower) / tool.cycle)
                try:
                    past.append(pairs.pair(step, functools.partial(tool.around, program, step), count, order, timer))
                except Exception as error:
                    notes[tool.name] = apart.words(error)
                took = time.monotonic() - begin
                spent[tool.name] += took
                told(took)
    if mode == "train" and not torch.isfinite(program.last):
        raise RuntimeError(f"the loss of {program.name} is {program.last}: its ratios mean nothing")
    return [_row(program.name, mode, tool, found[tool.name], notes[tool.name]) for tool in wanted]


def _row(name: str, mode: str, tool: Tool, found: list[Pair], note: str) -> Row:
    good = found if not note else []
    return Row(
        model=name,
        mode=mode,
        tool=tool.name,
        kind=tool.kind,
        ratio=Spread.of(p.ratio for p in good) if good else None,
        bare_ms=1e3 * Spread.of(p.bare for p in good).median if good else None,
        note=note,
    )


def measure_all(
    names: list[str],
    rows: list[Tool],
    *,
    seconds: float,
    quick: bool = False,
    told: Callable[[float], object] = lambda seconds: None,
) -> list[Row]:
    """Every model in both modes. Tools that leave something behind come last, each in a process of its own."""
    torch.set_num_threads(1)
    found: list[Row] = []
    near = [tool for tool in rows if not tool.apart]
    for name in names:
        absent = [tool for tool in rows if tool.apart and tool.why_not(name)]
        far = [tool for tool in rows if tool.apart and not tool.why_not(name)]
        reason = models.missing(name)
        for mode, part in (("train", TRAINING), ("infer", 1 - TRAINING)):
            if reason is not None:
                gone = [tool for tool in rows if mode in tool.modes]
                found += [_row(name, mode, tool, [], reason) for tool in gone]
                continue
            share = seconds * part / len(names)
            found += measure(name, mode, near + absent, seconds=share, quick=quick, told=told)
            for tool in far:
                if mode in tool.modes:
                    found.append(_apart(name, mode, tool, quick))
    return found


def _apart(name: str, mode: str, tool: Tool, quick: bool) -> Row:
    try:
        row: Row = apart.run(_alone, name, mode, tool.name, quick, seconds=120)
    except apart.Failed as failure:
        return _row(name, mode, tool, [], str(failure))
    return row


def _alone(name: str, mode: str, tool: str, quick: bool) -> Row:
    torch.set_num_threads(1)
    return measure(name, mode, tools.named([tool]), seconds=1 if quick else 10, quick=quick)[0]
