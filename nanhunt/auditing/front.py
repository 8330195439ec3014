"""Front door: `audit`, which says what is wrong before the first step."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ..errors import UsageError, enabled
from ..naming import Names
from ..options import made, trained_with
from ..remarks import Remarks, Sheet
from ..replay import Snapshot
from . import norms, optimizers, scalers, sums, tensors, updates
from .grain import HALF, name_of
from .groups import parts
from .trial import Trial

Tensor = torch.Tensor

_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}


def audit(
    model: nn.Module,
    optimizer: Optimizer | None = None,
    scaler: Any = None,
    *,
    example: Any = None,
    step: Callable[[], Any] | None = None,
    autocast: torch.dtype | str | None = None,
    restore: Iterable[Any] = (),
    ignore: Iterable[str] = (),
) -> Remarks:
    """Say what is wrong with a training before its first step: one remark for each, with the fix.

    Weights, buffers, norms, optimizer and scaler are judged as they stand. What the model's own code does (an eps, a
    mask, a softmax in half, a custom function) shows while an `example` or a `step` runs once; then everything it has
    changed is put back: parameters, buffers, gradients, the state of optimizer and scaler, random numbers, flags.

    Args:
        model: the module that is trained or served, in the mode (`train()`, `eval()`) in which it will be.
        optimizer, scaler: what it is trained with, as far as there is any. Those that `step` uses are found.
        example: what the model is called with: a tensor, a tuple of positional arguments, a mapping of keyword
            arguments. When it returns a loss (a number, or something with `loss`), the backward runs as well.
        step: one training step, without arguments: shows the order of scale, clip and update too. Without an
            `optimizer` a copy of all parameters is taken first.
        autocast: `torch.float16` or `torch.bfloat16`: what the model runs under; the example is run under it. A step
            opens its own autocast, and what it opens is seen. None takes what is open around the call.
        restore: what else the step changes, as in `nanhunt.hunt`.
        ignore: rules that say nothing, by name (`nanhunt.remarks.RULES`).

    Returns:
        `Remarks`, a list, faults first; empty when nothing is wrong. It prints as a page, and tells under `unseen` what
        was not looked at. Empty, too, when nanhunt is switched off by NANHUNT=0.

    Raises:
        UsageError: for arguments that do not fit, saying what would; for an example or a step of a model with lazy
            parameters; when the step has changed something that cannot be put back.
        Exception: what the example or the step dies of, unless a remark tells why.
    """
    lower = _checked(model, optimizer, scaler, example, step, autocast)
    sheet = Sheet(ignore)
    if not enabled():
        return sheet.remarks(())
    return _Audit(model, optimizer, scaler, lower, tuple(restore), sheet).run(example, step)


class _Audit:
    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | None,
        scaler: Any,
        lower: torch.dtype | None,
        restore: tuple[Any, ...],
        sheet: Sheet,
    ) -> None:
        self._model, self._optimizer, self._scaler, self._restore = model, optimizer, scaler, restore
        self._sheet, self._names = sheet, Names(model)
        self._device = next((p.device.type for p in model.parameters()), "cpu")
        ambient = torch.get_autocast_dtype(self._device) if _ambient(self._device) else None
        self._lower = lower
        self._casts = {dtype for dtype in (lower, ambient) if dtype is not None}
        self._looked: list[str] = []

    def run(self, example: Any, step: Callable[[], Any] | None) -> Remarks:
        trial: Trial | None = None
        if step is not None:
            trial = self._try(step, (), "one step")
        elif example is not None:
            args, kwargs = _arguments(example)
            trial = self._try(lambda: self._call(args, kwargs), (args, kwargs), "one forward of the example")
        else:
            self._sheet.unseen.append("the model's own code, which shows with example=... or step=...")
        self._judge(trial)
        return self._sheet.remarks(self._looked)

    # --- what runs --------------------------------------------------------------------------------

    def _try(self, act: Callable[[], Any], given: Any, what: str) -> Trial:
        """Run it under the rules, and put back what it has changed."""
        model, optimizer = self._model, self._optimizer
        made(model)
        # Which parameters a step writes to by hand nobody says; those of an optimizer are copied as it steps.
        more = (model,) if what == "one step" and optimizer is None else ()
        trial = Trial(self._names, self._sheet, trains=what == "one step" or optimizer is not None)
        snapshot = Snapshot(model, optimizer, self._scaler, (*self._restore, *more), args=(given,))
        with snapshot, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            error = trial.run(act)
        gaps = snapshot.gaps()
        snapshot.restore()
        if gaps:
            some = ", ".join(gaps[:3]) + (", ..." if len(gaps) > 3 else "")
            raise UsageError(f"the step has written to {some} before a copy was taken: pass restore=(model,)")
        if error is not None and not self._sheet.explains():
            raise error
        self._looked.append(what + (" and its backward" if trial.backward and what != "one step" else ""))
        unseen = self._sheet.unseen
        if error is not None:
            first = str(error).split("\n")[0][:160]
            unseen.append(f"what comes after the {type(error).__name__} that {what} ended with ({first})")
        elif not trial.backward and what != "one step" and self._optimizer is not None:
            unseen.append("the backward: the example returns no loss")
        unseen += [f"an op that a rule failed at ({failure})" for failure in trial.failures]
        unseen += snapshot.notes
        return trial

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        lower = self._lower
        around = torch.autocast(self._device, dtype=lower) if lower is not None else contextlib.nullcontext()
        with around:
            out = self._model(*args, **kwargs)
        loss = _loss(out)
        if loss is not None:
            loss.backward()  # type: ignore[no-untyped-call]

    # --- what is judged ---------------------------------------------------------------------------

    def _judge(self, trial: Trial | None) -> None:
        sheet, names = self._sheet, self._names
        casts = frozenset(self._casts | (trial.casts if trial is not None else set()))
        parameters, buffers = tensors.look(names, sheet, frozenset(d for d in casts if d in HALF))
        norms.look(names, sheet)
        weights = {p.dtype for _, _, p in names.parameters()}
        sums.switches(self._device, frozenset(casts | weights), sheet)
        self._looked.append(f"{parameters} parameters and {buffers} buffers")
        used = self._used(trial)
        for place, optimizer in used:
            self._looked.append(type(optimizer).__name__)
            for part in parts(optimizer, names, place):
                optimizers.look(part, sheet)
                if trial is not None:
                    updates.look(part, sheet, trial.moved)
                else:
                    updates.look(part, sheet, updates.Moved())
        known = {id(self._scaler): self._scaler} if self._scaler is not None else {}
        ran = (trial.dtypes if trial is not None else set()) | casts
        for scaler in (known | (trial.scalers if trial is not None else {})).values():
            self._looked.append(type(scaler).__name__)
            scalers.look(scaler, used, names, sheet, frozenset(ran), seen=trial is not None or bool(casts))
        if known and trial is None and not casts:
            sheet.unseen.append("whether the GradScaler has float16 to scale: pass autocast=, example= or step=")
        under = [name_of(dtype) for dtype in casts]
        if under:
            self._looked.append(f"under autocast to {' and '.join(sorted(under))}")

    def _used(self, trial: Trial | None) -> list[tuple[str, Optimizer]]:
        """Every optimizer, with what to call it."""
        found = {id(self._optimizer): self._optimizer} if self._optimizer is not None else {}
        wrapped = vars(self._optimizer).get("optimizer") if self._optimizer is not None else None
        for key, optimizer in (trial.optimizers if trial is not None else {}).items():
            if optimizer is not wrapped:
                found.setdefault(key, optimizer)
        several = len(found) > 1
        return [
            (f"optimizer {n} ({type(o).__name__})" if several else "optimizer", o)
            for n, o in enumerate(found.values(), 1)
        ]


# --- arguments ------------------------------------------------------------------------------------


def _checked(model: Any, optimizer: Any, scaler: Any, example: Any, step: Any, autocast: Any) -> torch.dtype | None:
    if not isinstance(model, nn.Module):
        raise UsageError(f"nanhunt.audit needs a torch.nn.Module, got {type(model).__name__}: pass the model itself")
    trained_with(optimizer, scaler)
    if step is not None and not callable(step):
        raise UsageError(
            f"step is a {type(step).__name__}: give a function without arguments that runs one training step, such as "
            "lambda: train_step(batch)"
        )
    if step is not None and example is not None:
        raise UsageError("give an example, which the model is called with, or a step, which calls it itself: not both")
    lower = _DTYPES.get(autocast, autocast) if isinstance(autocast, str) else autocast
    if lower is not None and lower not in HALF:
        raise UsageError(f"autocast={autocast!r} is not known: use torch.float16, torch.bfloat16 or None")
    return lower


def _arguments(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(example, Mapping):
        return (), {str(key): value for key, value in example.items()}
    return (example if isinstance(example, tuple) else (example,)), {}


def _ambient(device: str) -> bool:
    try:
        return torch.is_autocast_enabled(device)
    except RuntimeError:  # a device without autocast
        return False


def _loss(out: Any) -> Tensor | None:
    """The loss in what a model returns, if backward can start there."""
    candidates = [out]
    if isinstance(out, Mapping):
        candidates.append(out.get("loss"))
    candidates.append(getattr(out, "loss", None))
    if isinstance(out, (tuple, list)) and out:
        candidates.append(out[0])
    for value in candidates:
        if isinstance(value, Tensor) and value.numel() == 1 and value.requires_grad and value.is_floating_point():
            return value
    return None
