"""The record of a run's ranges: per module, where its numbers lay, and how its largest ones went over the steps."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ..errors import UsageError
from ..numerics import headroom_bits
from .forecast import Forecast, forecast
from .spectra import NOTHING, Histogram, Share, target

if TYPE_CHECKING:
    from .narrowing import Verdict

FORMAT = 1
# What is profiled of a module; the words are the attributes of `ModuleProfile`, and those of pages.
ROLES = ("inputs", "outputs", "output_gradients", "weights", "weight_gradients")
GRADIENTS = ("output_gradients", "weight_gradients")


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbers:
    """All numbers of one role of a module over the profiled steps.

    Attributes:
        dtypes: those that the tensors had.
        tensors: how many tensors were looked at.
        absmax: the largest finite |number|, None where all were Inf or NaN.
        trend: the same for each entry of `Profile.steps`, None where there was none.
        histogram: of all numbers, or of those that were sampled.
    """

    dtypes: tuple[str, ...]
    tensors: int
    absmax: float | None
    trend: tuple[float | None, ...]
    histogram: Histogram

    def share(self, dtype: object, loss_scale: float = 1.0) -> Share:
        """See `Histogram.share`."""
        return self.histogram.share(dtype, loss_scale)

    def headroom(self, dtype: object, loss_scale: float = 1.0) -> float | None:
        """How many bits the largest number, times the scale, may still grow in `dtype`; negative when it is beyond."""
        return headroom_bits(None if self.absmax is None else self.absmax * loss_scale, target(dtype).name)

    def forecast(self, steps: tuple[int, ...], dtype: object, loss_scale: float = 1.0) -> Forecast | None:
        """When the headroom in `dtype` is used up, if it shrinks at a clear rate; `steps` are `Profile.steps`."""
        form = target(dtype).name
        rooms = [headroom_bits(None if size is None else size * loss_scale, form) for size in self.trend]
        return forecast(steps, rooms)

    def to_dict(self) -> dict[str, Any]:
        return {
            "dtypes": list(self.dtypes),
            "tensors": self.tensors,
            "absmax": self.absmax,
            "trend": list(self.trend),
            "histogram": self.histogram.to_dict(),
        }

    @classmethod
    def from_dict(cls, told: Mapping[str, Any]) -> Numbers:
        return cls(
            dtypes=tuple(map(str, told["dtypes"])),
            tensors=int(told["tensors"]),
            absmax=_size(told["absmax"]),
            trend=tuple(map(_size, told["trend"])),
            histogram=Histogram.from_dict(told["histogram"]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleProfile:
    """One module: what it took, gave and held; a role that was not met is None.

    Gradients are those of its outputs and of its own parameters, without the loss scale of a GradScaler. `own` is
    False when all it gave was made by modules inside it, which then show the same numbers. A module with several
    names, or called several times, is counted under its first name, all calls together.
    """

    name: str
    type: str
    calls: int
    own: bool = True
    inputs: Numbers | None = None
    outputs: Numbers | None = None
    output_gradients: Numbers | None = None
    weights: Numbers | None = None
    weight_gradients: Numbers | None = None

    def roles(self) -> Iterator[tuple[str, Numbers]]:
        """The roles that were met, with their numbers."""
        for role in ROLES:
            numbers: Numbers | None = getattr(self, role)
            if numbers is not None:
                yield role, numbers

    def share(self, dtype: object, loss_scale: float = 1.0) -> dict[str, Share]:
        """The share of each role; only gradients are multiplied by the loss scale."""
        return {role: one.share(dtype, loss_scale if role in GRADIENTS else 1.0) for role, one in self.roles()}

    def to_dict(self) -> dict[str, Any]:
        told = {"name": self.name, "type": self.type, "calls": self.calls, "own": self.own}
        return told | {role: numbers.to_dict() for role, numbers in self.roles()}

    @classmethod
    def from_dict(cls, told: Mapping[str, Any]) -> ModuleProfile:
        roles = {role: Numbers.from_dict(told[role]) for role in ROLES if told.get(role) is not None}
        return cls(
            name=str(told["name"]),
            type=str(told["type"]),
            calls=int(told["calls"]),
            own=bool(told["own"]),
            **roles,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """What would leave the format `dtype`, module by module and role by role: `shares["encoder.0"]["outputs"]`."""

    dtype: str
    loss_scale: float
    modules: Mapping[str, Mapping[str, Share]]

    def __getitem__(self, module: str) -> Mapping[str, Share]:
        return self.modules[module]

    def total(self, *roles: str) -> Share:
        """All modules together, of these roles, or of all: a number that several modules handle counts for each."""
        return sum(
            (share for one in self.modules.values() for role, share in one.items() if not roles or role in roles),
            NOTHING,
        )

    @property
    def overflow(self) -> float:
        return self.total().overflow

    @property
    def subnormal(self) -> float:
        return self.total().subnormal

    @property
    def vanish(self) -> float:
        return self.total().vanish


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Where the numbers of a run lay: see `nanhunt.profile`.

    Attributes:
        model: the class of the model.
        modules: by path, in the order of first calls; `""` is the model itself.
        steps: the profiled steps that the entries of each `trend` are of. A long run has one entry for several.
        loss_scales: of a GradScaler that was in use, for the same entries; None where there was none.
        every, sample: as they were asked for.
        seen: tensors that were counted; `skipped`: those that could not be, such as quantized ones.
        notes: what else could not be looked at, in words.
    """

    model: str
    modules: Mapping[str, ModuleProfile]
    steps: tuple[int, ...]
    loss_scales: tuple[float | None, ...] = ()
    every: int = 1
    sample: int | None = None
    seen: int = 0
    skipped: int = 0
    notes: tuple[str, ...] = field(default=())

    def __post_init__(self) -> None:
        object.__setattr__(self, "modules", MappingProxyType(dict(self.modules)))

    def __reduce__(self) -> tuple[Any, ...]:
        return Profile.from_dict, (self.to_dict(),)

    def share(self, dtype: object, loss_scale: float = 1.0) -> Shares:
        """What would overflow, turn subnormal or vanish in `dtype`, with gradients multiplied by `loss_scale`.

        Nothing runs again. See `Histogram.share` for when it is exact.

        Raises:
            UsageError: for a dtype of which no share can be had, or a scale that is no positive number.
        """
        form = target(dtype)
        told = {name: one.share(form.name, loss_scale) for name, one in self.modules.items()}
        return Shares(dtype=form.name, loss_scale=loss_scale, modules=told)

    def verdict(self, dtype: object = "float16", loss_scale: float | None = None) -> Verdict:
        """Whether this run can move to `dtype`, and if not, because of which modules.

        Without a `loss_scale`, the largest that leaves every gradient two bits of headroom is taken.

        Raises:
            UsageError: as of `share`.
        """
        from .narrowing import verdict

        return verdict(self, dtype, loss_scale)

    def __str__(self) -> str:
        from ..report.spectrum import page

        return page(self)

    def _repr_html_(self) -> str:
        from ..report.heatmap import notebook

        return notebook(self)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as JSON has them; `from_dict` takes them back."""
        return {
            "profile": FORMAT,
            "model": self.model,
            "steps": list(self.steps),
            "loss_scales": list(self.loss_scales),
            "every": self.every,
            "sample": self.sample,
            "seen": self.seen,
            "skipped": self.skipped,
            "notes": list(self.notes),
            "modules": [one.to_dict() for one in self.modules.values()],
        }

    @classmethod
    def from_dict(cls, told: Mapping[str, Any]) -> Profile:
        """The profile that `to_dict` has told.

        Raises:
            UsageError: for anything else.
        """
        if not isinstance(told, Mapping) or told.get("profile") != FORMAT:
            raise UsageError("this is no nanhunt profile of format 1: give what Profile.to_dict() has returned")
        try:
            modules = [ModuleProfile.from_dict(one) for one in told["modules"]]
            return cls(
                model=str(told["model"]),
                modules={one.name: one for one in modules},
                steps=tuple(map(int, told["steps"])),
                loss_scales=tuple(map(_size, told["loss_scales"])),
                every=int(told["every"]),
                sample=None if told["sample"] is None else int(told["sample"]),
                seen=int(told["seen"]),
                skipped=int(told["skipped"]),
                notes=tuple(map(str, told["notes"])),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UsageError(f"this nanhunt profile is damaged ({type(error).__name__}: {error})") from None

    def to_json(self, indent: int | None = None) -> str:
        return json.dumps(self.to_dict(), indent=indent, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Profile:
        """Raises `UsageError` for text that `to_json` has not written."""
        try:
            told = json.loads(text)
        except ValueError as error:
            raise UsageError(f"this is no nanhunt profile: it is not JSON ({error})") from None
        return cls.from_dict(told)


def _size(value: Any) -> float | None:
    if value is None:
        return None
    size = float(value)
    if not math.isfinite(size):
        raise ValueError(f"{value!r} is not finite")
    return size
