"""What may be asked of a monitor and handed to it, and the words for what may not."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..errors import UsageError
from ..finding import Finding
from ..options import trained_with
from .record import ON_SYMPTOM

OPTIONS = ("every", "sample", "log", "ring", "on_symptom", "hold", "hunt")  # of a monitor, by name
SPOILED = (
    "The weights were already bad when the anomaly showed: only the past could tell what spoiled them (with hold=True "
    "they stay good)"
)
_SHARDED = {"FullyShardedDataParallel", "FSDPModule"}


def checked(
    model: Any,
    optimizer: Any,
    scaler: Any,
    every: Any,
    sample: Any,
    ring: Any,
    on_symptom: Any,
    hold: Any,
    hunt: Any,
) -> list[torch.optim.Optimizer]:
    """The optimizers, bare, or a `UsageError` that says what would fit."""
    if not isinstance(model, nn.Module):
        raise UsageError(f"nanhunt.Monitor needs a torch.nn.Module, got {type(model).__name__}: pass the model itself")
    several = list(optimizer) if isinstance(optimizer, (tuple, list)) else [optimizer] if optimizer is not None else []
    found = []
    for one in several:
        while isinstance(getattr(one, "optimizer", None), torch.optim.Optimizer):
            one = one.optimizer  # what a library has wrapped around it
        trained_with(one, None)
        found.append(one)
    trained_with(None, scaler)
    for name, value in (("every", every), ("sample", sample), ("ring", ring)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise UsageError(f"{name}={value!r}: give a whole number of steps, 1 or more")
    if not callable(on_symptom) and on_symptom not in ON_SYMPTOM:
        words = ", ".join(map(repr, ON_SYMPTOM))
        raise UsageError(f"on_symptom={on_symptom!r} is not known: use one of {words} or a callable")
    if not isinstance(hold, bool):
        raise UsageError(f"hold={hold!r}: give True or False")
    if not isinstance(hunt, int) or hunt < 0:
        raise UsageError(f"hunt={hunt!r}: give True, False, or a number of steps to watch after an anomaly")
    return found


def sharded(model: nn.Module) -> bool:
    """True when parameters are spread over the ranks."""
    return any(hasattr(p, "_local_tensor") for p in model.parameters()) or any(
        {cls.__name__ for cls in type(module).__mro__} & _SHARDED for module in model.modules()
    )


def number(name: str, value: Any) -> float:
    """A number that was handed to `Monitor.log`, or a `UsageError`."""
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        raise UsageError(
            f"log({name}=...) takes a number or a tensor of one number, got {type(value).__name__}"
        ) from None


def numbered(step: Any) -> int | None:
    """The step's number as it was handed to `Monitor.log`, or a `UsageError`."""
    if step is None:
        return None
    value = number("step", step)
    if not math.isfinite(value) or value != int(value):
        raise UsageError(f"log(step={step!r}): give the number of the step, a whole one")
    return int(value)


def measured(metrics: Any, more: Mapping[str, Any]) -> dict[str, float]:
    """Metrics by name; those that are None were not measured.

    Raises:
        UsageError: for something that is no number.
    """
    if metrics is not None and not isinstance(metrics, Mapping):
        raise UsageError(f"log(metrics=...) takes a dict of numbers by name, got {type(metrics).__name__}")
    known = {**(metrics or {}), **more}
    return {str(name): number(str(name), value) for name, value in known.items() if value is not None}


def logged(*, lr: Any, skipped: Any, batch: Any, **numbers: Any) -> dict[str, Any]:
    """The fields of a record that the program tells itself; those that it leaves out are None.

    Raises:
        UsageError: for something that is no number.
    """
    fields: dict[str, Any] = {name: number(name, value) for name, value in numbers.items() if value is not None}
    if lr is not None:
        fields["lr"] = tuple(number("lr", rate) for rate in (lr if isinstance(lr, (tuple, list)) else (lr,)))
    if skipped is not None:
        fields["skipped"] = bool(skipped)
    if batch is not None:
        fields["batch"] = str(batch)
    return fields


def remarks(said: Sequence[str], held: Sequence[int], findings: Sequence[Finding]) -> list[str]:
    """Sentences for the page: what was said on the way, what was held back, what following it up has found."""
    made = list(said)
    if held:
        some = ", ".join(map(str, held[:4])) + (" ..." if held[4:] else "")
        made.append(f"Held back: the update of step {some}; the weights are as the step before left them")
    made += [f"Followed up at step {found.step}: {found.title()}" for found in findings[:3]]
    return [f"{text}." for text in made]


def options_of(asked: Any) -> dict[str, Any]:
    """The options of a monitor that goes along with something else: True, a path for its file, or a dict of them.

    Raises:
        UsageError: for anything else, and for an option that does not exist.
    """
    if asked is True:
        return {}
    if isinstance(asked, (str, os.PathLike)):
        return {"log": asked}
    if not isinstance(asked, Mapping):
        raise UsageError(f"monitor={asked!r}: give True, a file for the record, or a dict with options of Monitor")
    for name in asked:
        if name not in OPTIONS:
            raise UsageError(f"monitor={{{name!r}: ...}}: {name!r} is no option of Monitor: use {', '.join(OPTIONS)}")
    return dict(asked)
