"""A compiled model, watched from before its first call, beside the same model unwatched."""

from __future__ import annotations

import contextlib
import functools
import random
import time
import types
from typing import Any

import torch

import nanhunt

from . import models, pairs, tools
from .apart import words
from .models import Program
from .pairs import Spread


def measure(quick: bool = False) -> dict[str, Any]:
    """Graphs, kernels, equality and the ratio of steps; where a compiled model is refused, its words.

    Best called in a process of its own: it counts what the compiler does, from zero.
    """
    torch.set_num_threads(1)
    bare = _compiled(quick)
    begin = time.monotonic()
    before = _counts()
    bare_losses = _steps(bare)
    plain = _since(before)
    result: dict[str, Any] = {"model": "gpt", "bare": plain, "seconds_to_compile": round(time.monotonic() - begin, 1)}
    subject = _compiled(quick)
    before = _counts()
    try:
        with nanhunt.watch(subject.model, subject.optimizer, **tools.COMPILED):
            losses = _steps(subject)
    except Exception as error:
        return result | {"status": "refused", "note": words(error)}
    result |= {
        "status": "measured",
        "watched": _since(before),
        "equal": losses == bare_losses and _equal(bare, subject),
    }
    order = random.Random(0)
    once = pairs.times_for(bare.train, 0.02 if quick else 0.3)
    around = functools.partial(tools.watched, subject, subject.train, tools.COMPILED)
    found = [pairs.pair(bare.train, around, once, order) for _ in range(2 if quick else 12)]
    eager = models.build("gpt", quick=quick)
    eager.train()
    return result | {
        "ratio": Spread.of(p.ratio for p in found).json(),
        "bare_ms": round(1e3 * Spread.of(p.bare for p in found).median, 2),
        "eager_ms": round(1e3 * pairs.cpu_time(eager.train, once), 2),
        "after_more_watches": _since(before) | {"watches": len(found) + 1},
    }


def _compiled(quick: bool) -> Program:
    program = models.build("gpt", quick=quick)
    _give_own_code(program.model)
    program.model = torch.compile(program.model)  # type: ignore[assignment]
    return program


def _give_own_code(model: torch.nn.Module) -> None:
    """Compiled code belongs to the code it was made of, and so to every model of the class: here each has its own."""
    made: dict[type, type] = {}
    for module in model.modules():
        cls = type(module)
        if cls.__module__ != models.__name__:
            continue
        if cls not in made:
            forward = cls.forward
            own = types.FunctionType(
                forward.__code__.replace(), forward.__globals__, forward.__name__, forward.__defaults__
            )
            made[cls] = type(cls.__name__, (cls,), {"forward": own})
        module.__class__ = made[cls]


def _steps(program: Program) -> list[float]:
    losses = []
    for _ in range(3):
        program.train()
        losses.append(program.last.item())
    return losses


def _equal(one: Program, other: Program) -> bool:
    """True when parameters and gradients are the same bit for bit."""
    return all(
        torch.equal(a, b) and (a.grad is None or (b.grad is not None and torch.equal(a.grad, b.grad)))
        for a, b in zip(one.model.parameters(), other.model.parameters())
    )


def _counts() -> dict[str, int]:
    from torch._dynamo.utils import counters
    from torch._inductor import metrics

    return {
        "graphs": counters["stats"]["unique_graphs"],
        "graph_breaks": sum(counters["graph_break"].values()),
        "kernels": metrics.generated_kernel_count,
    }


def _since(before: dict[str, int]) -> dict[str, int]:
    return {name: number - before[name] for name, number in _counts().items()}


def available() -> str | None:
    """Why nothing can be compiled here, or None."""
    with contextlib.suppress(Exception):
        from torch._inductor.cpp_builder import get_cpp_compiler

        get_cpp_compiler()
        return None
    return "no C++ compiler was found"
