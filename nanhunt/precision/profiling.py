"""Front door: `profile`, which runs some steps and tells where their numbers lay."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from .. import internals
from ..compiled import has_compiled
from ..errors import UsageError, enabled
from ..naming import type_name
from ..options import checked
from .profiler import Profiler
from .profiles import Profile


def profile(
    model: nn.Module,
    step: Callable[..., Any],
    *,
    steps: int = 1,
    batches: Sequence[Any] | None = None,
    every: int = 1,
    sample: int | None = None,
    only: Iterable[str] = (),
    skip: Iterable[str] = (),
) -> Profile:
    """Run `step` so many times, and count where the numbers of every module of `model` lie.

    Inputs, outputs and their gradients, weights and their gradients are counted by exponent on the device where they
    live, and read once, at the end. The steps are real ones: what they change stays changed, bit for bit as without a
    profile. Gradients are taken without the loss scale of a GradScaler, as they are in the optimizer step; one that
    has overflowed or vanished at that scale is counted as such. What is compiled runs eagerly meanwhile. Numbers that
    a module's own code makes and does not give out are not seen: `nanhunt.compare` runs them in the narrower format.

    Args:
        model: the module whose insides are profiled.
        step: forward, and backward where gradients are to be counted too; with the optimizer step, the record shows
            how ranges grow as the model learns.
        steps: how often it is called.
        batches: what it is called with, one of them at a time, from the start again when they are used up; without
            them it is called with nothing.
        every: profile every n-th step only; the others run as always.
        sample: count only so many numbers of each tensor, evenly spread: counts are then those of the sample. The
            largest number is always that of all.
        only, skip: patterns (`fnmatch`) of module paths to look at, and not to look at, each with all that is inside.

    Raises:
        UsageError: for arguments that do not fit, saying what would; when the steps are over and none of them has
            called the model.
        Exception: what the step itself raises.
    """
    if not isinstance(model, nn.Module):
        raise UsageError(f"nanhunt.profile needs a torch.nn.Module, got {type(model).__name__}: pass the model itself")
    if not callable(step):
        raise UsageError(
            f"nanhunt.profile needs a function that runs one step, got a {type(step).__name__}: "
            "nanhunt.profile(model, step, steps=10)"
        )
    _whole("steps", steps)
    if sample is not None:
        _whole("sample", sample)
    if batches is not None and not _listed(batches):
        raise UsageError(
            "batches: give a list of batches, at least one; of a loader, list(itertools.islice(loader, 8))"
        )
    options = checked(
        optimizer=None,
        scaler=None,
        on_hit="record",
        stop="confirmed",
        detail="auto",
        kinds=("nan",),
        allow=(),
        steps=None,
        every=every,
        compiled="eager",
        only=only,
        skip=skip,
    )
    if not enabled():
        for at in range(steps):
            _run(step, batches, at)
        return Profile(model=type_name(model), modules={}, steps=())
    compiled = has_compiled(model)
    profiler = Profiler(model, wanted=options.looked_at(model), every=every, sample=sample)
    if compiled:
        internals.eager.hold()
    try:
        profiler.open()
        if compiled:
            profiler.notes = {"the model is compiled; it was run eagerly": None}
        for at in range(steps):
            profiler.look(at % every == 0)
            _run(step, batches, at)
            profiler.end_step()
    finally:
        profiler.close()
        if compiled:
            internals.eager.drop()
    found = profiler.record()
    if not found.seen and found.skipped:
        raise UsageError(
            f"none of {found.skipped} tensors could be read, such as those of a model on the meta device: give a model "
            "that holds numbers"
        )
    if not any(one.calls for one in found.modules.values()):
        raise UsageError(
            "the step has not called the model: give the module that it calls itself, not one that wraps or copies it"
            + "".join(f" ({note})" for note in found.notes)
        )
    return found


def forward(model: nn.Module, example: Any) -> Callable[[], Any]:
    """A step that calls the model with a tensor, a tuple of positional arguments, or a mapping of keyword arguments."""
    if isinstance(example, Mapping):
        return lambda: model(**example)
    given = example if isinstance(example, tuple) else (example,)
    return lambda: model(*given)


def _listed(batches: Any) -> bool:
    """Whether they can be taken one by one, again and again; a tensor is one batch and not a list of them."""
    listed = hasattr(batches, "__getitem__") and hasattr(batches, "__len__")
    return listed and not isinstance(batches, (torch.Tensor, str, bytes, Mapping)) and len(batches) > 0


def _run(step: Callable[..., Any], batches: Sequence[Any] | None, at: int) -> None:
    if batches is None:
        step()
    else:
        step(batches[at % len(batches)])


def _whole(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UsageError(f"{name}={value!r}: give a whole number, 1 or more")
