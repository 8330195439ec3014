"""Runs a situation plain and watched, and says in what the two runs differ."""

import contextlib
import dataclasses
import io
import random
import warnings
from collections.abc import Callable, Iterator
from functools import cache, cached_property
from types import TracebackType
from typing import Any

import numpy as np
import torch

from .freeze import Table, freeze, marks
from .world import changes, world

Opener = Callable[..., Any]
MODES: dict[str, dict[str, object]] = {
    "module": {"detail": "module"},
    "auto": {"detail": "auto"},
    "deferred": {"detail": "auto", "_defer": True},
    "op": {"detail": "op"},
}


class Spans:
    """What a situation gets as `watch`: opens the real thing or nothing, and looks at the model when it closes."""

    def __init__(self, opener: Opener | None = None, **options: object) -> None:
        self.opener = opener
        self.options = options
        self.open = 0
        self.marks: list[Table] = []
        self.hunts: list[Any] = []

    def __call__(
        self, model: torch.nn.Module, optimizer: object = None, scaler: object = None, **extra: object
    ) -> "Span":
        watch: Any = contextlib.nullcontext()
        if self.opener is not None:
            watch = self.opener(model, optimizer, scaler, on_hit="record", **{**self.options, **extra})
        return Span(self, model, watch)


class Span:
    """One `with watch(model):` of a situation."""

    def __init__(self, spans: Spans, model: torch.nn.Module, watch: Any) -> None:
        self.spans, self.model, self.watch = spans, model, watch

    def __enter__(self) -> None:
        hunt = self.watch.__enter__()
        self.spans.open += 1
        if hunt is not None:
            self.spans.hunts.append(hunt)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> object:
        swallowed = self.watch.__exit__(kind, error, traceback)
        self.spans.open -= 1
        if not self.spans.open:
            self.spans.marks.append(marks(self.model))
        return swallowed


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Situation:
    """A program that builds everything from a fixed seed and returns all it made."""

    name: str
    run: Callable[[Spans], object]
    sees: bool = True  # its modules emit floating tensors in eager mode, inside the watch
    clean: bool = True  # nothing in it is a fault
    loose: str | None = None  # why two plain runs differ in the last bits
    warns: bool = False  # nanhunt may say something here
    skips: dict[str, str] = dataclasses.field(default_factory=dict)  # mode -> why it does not apply

    @cached_property
    def text(self) -> str:
        return (self.run.__doc__ or "").strip()


class Catalogue(dict[str, Situation]):
    """Situations by name; a decorator that files them."""

    def __call__(self, **facts: Any) -> Callable[[Callable[[Spans], object]], Callable[[Spans], object]]:
        def file(run: Callable[[Spans], object]) -> Callable[[Spans], object]:
            name = run.__name__.strip("_")
            assert name not in self, f"two situations are called {name}"
            assert run.__doc__, f"situation {name} does not say what it is"
            self[name] = Situation(name=name, run=run, **facts)
            return run

        return file


@dataclasses.dataclass(frozen=True)
class Outcome:
    """All that one run left behind."""

    results: Table
    marks: Table
    warnings: frozenset[str]
    said: str
    changed: tuple[str, ...]
    hunts: tuple[Any, ...]


def perform(situation: Situation, spans: Spans) -> Outcome:
    """Run from fixed seeds; freeze what came out, the random number generators, and the world around."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    out, err = io.StringIO(), io.StringIO()
    before = world()
    with warnings.catch_warnings(record=True) as said, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        warnings.simplefilter("always")
        made = situation.run(spans)
        messages = frozenset(f"{w.category.__name__}: {w.message}".split("\n")[0][:150] for w in said)
    changed = tuple(changes(before, world()))
    rng = {"torch": torch.get_rng_state(), "python": random.getstate(), "numpy": np.random.get_state()}
    results = freeze({"result": made, "rng": rng})
    left = {f"watch {i} {key}": fact for i, table in enumerate(spans.marks) for key, fact in table.items()}
    return Outcome(results, left, messages, out.getvalue() + err.getvalue(), changed, tuple(spans.hunts))


@cache
def reference(situation: Situation) -> Outcome:
    """The plain run, after one that is thrown away: first calls import, compile and warn."""
    perform(situation, Spans())
    return perform(situation, Spans())


def compare(situation: Situation, expected: Outcome, actual: Outcome, versions: bool = True) -> list[str]:
    """One line for each thing that two runs of a situation do not share."""
    faults = [
        f"{key}: {a!s:.200} -> {b!s:.200}"
        for key, a, b in _unequal(expected.results, actual.results, situation.loose)
        if versions or not key.endswith(":version")
    ]
    faults += [
        f"left behind, {key}: {a!s:.300} -> {b!s:.300}" for key, a, b in _unequal(expected.marks, actual.marks, None)
    ]
    faults += [f"world: {change}" for change in actual.changed if change not in expected.changed]
    if not situation.warns:
        faults += [f"new warning: {message}" for message in sorted(actual.warnings - expected.warnings)]
        if "nanhunt" in actual.said:
            faults.append(f"printed: {actual.said[-500:]}")
    return faults


def check(situation: Situation, opener: Opener, **options: object) -> Outcome:
    """Assert that the watched run equals the plain one and that the watch was awake, silent and without failures."""
    expected = reference(situation)
    actual = perform(situation, Spans(opener, **options))
    # Under any dispatch mode autograd adds gradients out of place, so their versions stay lower.
    faults = compare(situation, expected, actual, versions=options.get("detail") != "op")
    for hunt in actual.hunts:
        faults += [f"internal failure: {error!r:.300}" for error in hunt.errors]
        if situation.clean and hunt.finding is not None:
            faults.append(f"found in a healthy program: {hunt.finding.title()}")
    if not actual.hunts:
        faults.append("the situation never opened a watch")
    if situation.sees and not any(hunt.seen for hunt in actual.hunts):
        faults.append("blind: not one tensor was checked")
    assert not faults, f"{situation.name}: {situation.text}\n  " + "\n  ".join(faults[:25])
    return actual


def _unequal(a: Table, b: Table, loose: str | None) -> Iterator[tuple[str, object, object]]:
    absent = "(absent)"
    for key in sorted(a.keys() | b.keys()):
        left, right = a.get(key, absent), b.get(key, absent)
        if left != right and not (loose and _close(left, right)):
            yield key, _readable(left), _readable(right)


def _close(left: object, right: object) -> bool:
    if not (isinstance(left, bytes) and isinstance(right, bytes) and len(left) == len(right) and len(left) % 4 == 0):
        return False
    pair = np.frombuffer(left, np.float32), np.frombuffer(right, np.float32)
    return bool(np.allclose(*pair, rtol=1e-4, atol=1e-6, equal_nan=True))


def _readable(value: object) -> object:
    if isinstance(value, bytes) and value and len(value) % 4 == 0:
        return np.frombuffer(value, np.float32)[:6]
    return value
