"""One step of a run, in numbers: what a monitor has seen of it, or what a line of a log says."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import UsageError

# The identifiers of what can be wrong with a run; "none" is what a healthy one has.
SYMPTOMS = ("loss_explosion", "vanishing_gradient", "nan_inf", "non_convergence", "metric_fluctuation")
_TEXTS = {"worst", "batch", "autocast", "note"}  # a layer may be called "inf"


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What is known of one step; what is not known is None, or empty.

    Attributes:
        step: the number the program gives it; a log without numbers counts its records from 1. None for an event
            (an overflow message) of a log that has no step numbers.
        line: of the file, counted from 1; None for a live run.
        rank: who says so; 0 where there is one process only.
        loss: not multiplied by the loss scale.
        losses: the parts it is a sum of, by name.
        grad_norm: 2-norm of all gradients, not multiplied by the loss scale, before clipping.
        clipped_norm: the same as the optimizer got it, after clipping.
        clipped_scaled: whether they were clipped while they were still multiplied by the loss scale; None where nobody
            saw them being clipped.
        lr: one for each parameter group.
        loss_scale: the one this step used; of a log, the one that stands in the line.
        loss_scale_after: what the scaler has made of it, where that is told.
        skipped: the step was not applied, because its gradients were not finite.
        update_ratio: 2-norm of the update over that of the weights.
        lost_updates: share of the weights, with a nonzero gradient, that the update did not change.
        zero_grads: share of gradient entries that are exactly zero.
        small_grads: share of the nonzero gradient entries that the format they were computed in can hold only as
            subnormals: what a larger loss scale would save.
        faint: share of the weights whose parameter has a gradient norm below 1e-6 of that of all gradients: layers
            that nothing comes back to, while the whole norm looks well.
        frozen: share of optimizer second moments that are infinite: such weights never move again.
        dead: names of modules whose output was constant zero (dead activations).
        bad_weights: number of weights that are NaN or Inf, where they were looked at.
        worst: name of the parameter whose gradient was the first to be bad, or the largest.
        batch: hash of what the model was handed.
        metrics: validation metrics by name, as they were handed in or logged.
        autocast: dtype of the autocast region the forward ran in, such as "float16".
        dtypes: dtypes of the weights that are trained.
        state_dtypes: dtypes of the optimizer's moments.
        note: a message of the program (a scaler's, a trainer's) that belongs to it.
    """

    step: int | None
    line: int | None = None
    rank: int = 0
    loss: float | None = None
    losses: Mapping[str, float] = field(default_factory=dict)
    grad_norm: float | None = None
    clipped_norm: float | None = None
    clipped_scaled: bool | None = None
    lr: tuple[float, ...] = ()
    loss_scale: float | None = None
    loss_scale_after: float | None = None
    skipped: bool | None = None
    update_ratio: float | None = None
    lost_updates: float | None = None
    zero_grads: float | None = None
    small_grads: float | None = None
    faint: float | None = None
    frozen: float | None = None
    dead: tuple[str, ...] = ()
    bad_weights: int | None = None
    worst: str | None = None
    batch: str | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    autocast: str | None = None
    dtypes: tuple[str, ...] = ()
    state_dtypes: tuple[str, ...] = ()
    note: str | None = None

    def at(self) -> str:
        """Its place in the run, in words."""
        if self.step is not None:
            return f"step {self.step}"
        return f"line {self.line}" if self.line is not None else "the start"

    def bad(self) -> tuple[str, ...]:
        """What of it is NaN or Inf, by name: of the loss, its parts, the gradient norm and the weights."""
        found = [name for name, value in (("loss", self.loss), ("grad_norm", self.grad_norm)) if _bad(value)]
        if self.losses:
            found += [name for name, value in self.losses.items() if _bad(value)]
        if self.bad_weights:
            found.append("weights")
        return tuple(found)

    def to_dict(self) -> dict[str, Any]:
        """What is known, as JSON can hold it: a number that JSON has not is "nan", "inf" or "-inf"."""
        return {
            f.name: plain(value)
            for f in dataclasses.fields(self)
            if (value := getattr(self, f.name)) not in (None, (), {}) and not (f.name == "rank" and value == 0)
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Step:
        """The step that `to_dict` wrote.

        Raises:
            UsageError: when it is none.
        """
        known = {f.name for f in dataclasses.fields(cls)}
        if not isinstance(data, Mapping) or not set(data) <= known:
            raise UsageError("not a step that nanhunt wrote: it has unknown fields")
        values = {name: value if name in _TEXTS else number(value) for name, value in data.items()}
        try:
            for name in ("lr", "dead", "dtypes", "state_dtypes"):
                if name in values:
                    values[name] = tuple(map(number, values[name]) if name == "lr" else values[name])
            for name in ("losses", "metrics"):
                if name in values:
                    values[name] = {key: number(value) for key, value in values[name].items()}
        except (TypeError, AttributeError) as error:
            raise UsageError(f"not a step that nanhunt wrote: {error}") from None
        fits(cls, values)
        return cls(**{"step": None, **values})


@dataclass(frozen=True, slots=True, kw_only=True)
class Symptom:
    """One thing that is wrong with a run.

    Attributes:
        name: one of `SYMPTOMS`.
        form: finer than the name, such as "growth", "scale_collapse", "lost_updates" (listed in `symptoms.py`).
        step: where it began; None where the log has no step numbers.
        line: of the log, where it began.
        cause: the likely cause, one or two sentences with the numbers.
        advice: short, specific actions, the first one first.
        evidence: sentences that each give steps and numbers.
        confidence: "certain", "likely" or "possible".
        before: the last healthy step before it.
        first: the step that it begins with.
        seen: the step at which it could be told.
    """

    name: str
    form: str
    step: int | None
    line: int | None = None
    cause: str
    advice: tuple[str, ...]
    evidence: tuple[str, ...]
    confidence: str
    before: Step | None = None
    first: Step | None = None
    seen: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """As JSON can hold it."""
        made = {f.name: plain(getattr(self, f.name)) for f in dataclasses.fields(self)}
        for name in ("before", "first"):
            value = getattr(self, name)
            made[name] = None if value is None else value.to_dict()
        return made

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Symptom:
        """The symptom that `to_dict` wrote.

        Raises:
            UsageError: when it is none.
        """
        try:
            values = dict(data)
            for name in ("before", "first"):
                if values.get(name) is not None:
                    values[name] = Step.from_dict(values[name])
            for name in ("advice", "evidence"):
                values[name] = tuple(values[name])
            fits(cls, values)
            return cls(**values)
        except (TypeError, KeyError, ValueError) as error:
            raise UsageError(f"not a symptom that nanhunt wrote: {error}") from None


def _bad(value: float | None) -> bool:
    return value is not None and not math.isfinite(value)


def fits(cls: type, values: Mapping[str, Any]) -> None:
    """Refuses what was read for a record, where a field holds something else than the record says.

    Raises:
        UsageError: with the name of the first such field.
    """
    kinds = _kinds(cls)
    for name, value in values.items():
        if not kinds[name](value):
            raise UsageError(
                f"{name!r} of a {cls.__name__.lower()} is {str(value)[:40]!r}: nanhunt writes no such thing"
            )


@functools.cache
def _kinds(cls: type) -> dict[str, Callable[[Any], bool]]:
    return {f.name: _kind(str(f.type)) for f in dataclasses.fields(cls)}


def _kind(annotation: str) -> Callable[[Any], bool]:
    """Whether a value is what an annotation of a record's field says."""
    if annotation.endswith(" | None"):
        inner = _kind(annotation.removesuffix(" | None"))
        return lambda value: value is None or inner(value)
    if annotation.startswith("tuple["):
        parts = [_kind(part) for part in annotation[6:-1].split(", ") if part != "..."]
        if "..." in annotation:
            return lambda value: isinstance(value, tuple) and all(map(parts[0], value))
        return lambda value: isinstance(value, tuple) and len(value) == len(parts)
    if annotation.startswith("Mapping["):
        inner = _kind(annotation[8:-1].split(", ")[1])
        return lambda value: isinstance(value, Mapping) and all(map(inner, value.values()))
    if annotation == "bool":
        return lambda value: isinstance(value, bool)
    plainly: dict[str, tuple[type, ...]] = {"str": (str,), "int": (int,), "float": (int, float)}
    kind = plainly.get(annotation)
    if kind is None:  # another record, which was read already
        return lambda value: dataclasses.is_dataclass(value) and type(value).__name__ == annotation
    return lambda value: isinstance(value, kind) and not isinstance(value, bool)


def plain(value: Any) -> Any:
    """As JSON can hold it: a NaN or an infinity is a word, a tuple a list."""
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if value != value else "inf" if value > 0 else "-inf"
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return [plain(item) for item in value]
    return value


def number(value: Any) -> Any:
    """The other way: a word that means a NaN or an infinity is that number; all else stays."""
    return float(value) if value in ("nan", "inf", "-inf") else value
