"""How alike two runs of one step were, module by module, and where they part: the record, to JSON and back."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import UsageError
from .figures import LINE, Call, Figures, Module, Own, Parameter, mean, worst

FORMAT = 1


@dataclass(frozen=True, repr=False)
class Likeness:
    """What `nanhunt.compare` found: a frozen record, printable, JSON both ways.

    Attributes:
        a, b: the settings, in words.
        calls: each call of each module, in the order in which they gave their outputs, batch after batch.
        parameters: the gradients, by parameter and batch.
        outputs: figures of the model's output, one for each batch: its logits where it names them.
        parted: modules whose own code loses more than rounding explains, in the order in which they ran.
        died: what the second run died of, or None.
        notes: what could not be compared, and why.
    """

    a: str
    b: str
    calls: tuple[Call, ...] = ()
    parameters: tuple[Parameter, ...] = ()
    outputs: tuple[Figures, ...] = ()
    parted: tuple[str, ...] = ()
    batches: int = 1
    died: str | None = None
    notes: tuple[str, ...] = ()
    context: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    # --- what people ask ------------------------------------------------------------------------------

    @property
    def first(self) -> str | None:
        """Path of the module where the two part (`""` is the model itself); None when rounding explains all."""
        return self.parted[0] if self.parted else None

    @functools.cached_property
    def modules(self) -> dict[str, Module]:
        """By path, in the order in which they first gave an output."""
        by: dict[str, list[Call]] = {}
        for call in self.calls:
            by.setdefault(call.module, []).append(call)
        return {name: Module(name, calls[0].type, tuple(calls)) for name, calls in by.items()}

    @functools.cached_property
    def gradients(self) -> dict[str, Figures]:
        """The worst over the batches, by parameter."""
        least: dict[str, Figures] = {}
        for one in self.parameters:
            known = least.get(one.name)
            if known is None or _worse(one.gradient, known):
                least[one.name] = one.gradient
        return least

    @property
    def output_cosine(self) -> float:
        """Similarity of the model's output, its logits where it names them: the worst batch. NaN when unknown."""
        return worst(one.cosine for one in self.outputs)

    @property
    def mean_output_cosine(self) -> float:
        return mean([one.cosine for one in self.outputs])

    @functools.cached_property
    def gradient_cosine(self) -> float:
        """Similarity of the whole gradient, all parameters in one vector: the worst batch. NaN when there was none."""
        by: dict[int, list[Figures]] = {}
        for one in self.parameters:
            by.setdefault(one.batch, []).append(one.gradient)
        return worst(_together(figures) for figures in by.values())

    @property
    def not_finite(self) -> str | None:
        """Path of the first module that gave a NaN or Inf in the second run alone."""
        for call in self.calls:
            if call.output is not None and call.output.only_b and not (call.input is not None and call.input.only_b):
                return call.module
        return next((call.module for call in self.calls if call.output is not None and call.output.only_b), None)

    @property
    def broken(self) -> tuple[str, ...]:
        """Parameters whose gradient has a NaN or Inf in the second run alone."""
        return tuple(name for name, one in self.gradients.items() if one.only_b)

    @property
    def identical(self) -> bool:
        """True when every number that was compared is the same."""
        every = [f for call in self.calls for f in (call.input, call.output, call.gradient) if f is not None]
        every += [*self.outputs, *(one.gradient for one in self.parameters)]
        return self.died is None and bool(every) and all(not f.max_abs and not f.only_a and not f.only_b for f in every)

    @property
    def agree(self) -> bool:
        """True when no module parts, and outputs and gradients are on the good side of the line: precision is not the
        cause."""
        known = not math.isnan(self.output_cosine)
        return (
            self.died is None
            and self.first is None
            and self.not_finite is None
            and known
            and self.output_cosine >= LINE
            and not self.broken
            and not self.gradient_cosine < LINE
        )

    def title(self) -> str:
        """The one sentence that matters."""
        from ..report.likeness import title

        return title(self)

    def __repr__(self) -> str:
        return f"<Likeness of {self.a} and {self.b}: {self.title()}>"

    def __str__(self) -> str:
        from ..report.likeness import page

        return page(self)

    def _repr_html_(self) -> str:
        from ..report.along import notebook

        return notebook(self)

    def html(self) -> str:
        """One self-contained page for a browser."""
        from ..report.along import html_page

        return html_page(self)

    # --- to JSON and back -----------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """Plain values; numbers that are not finite as strings `"nan"`, `"inf"`, `"-inf"`. The first keys are read
        by people: what follows from the rest is written too, and not read back."""
        told = {
            "format": FORMAT,
            "kind": "likeness",
            "a": self.a,
            "b": self.b,
            "first": self.first,
            "agree": self.agree,
            "title": self.title(),
            "output_cosine": self.output_cosine,
            "mean_output_cosine": self.mean_output_cosine,
            "gradient_cosine": self.gradient_cosine,
            "not_finite": self.not_finite,
            "parted": list(self.parted),
            "batches": self.batches,
            "died": self.died,
            "notes": list(self.notes),
            "context": dict(self.context),
            "modules": {
                name: {"type": one.type, "calls": len(one.calls), "cosine": one.cosine, "parts": one.parts}
                for name, one in self.modules.items()
            },
            "outputs": [dataclasses.asdict(one) for one in self.outputs],
            "calls": [dataclasses.asdict(one) for one in self.calls],
            "parameters": [dataclasses.asdict(one) for one in self.parameters],
        }
        return {key: _plain(value) for key, value in told.items()}

    def to_json(self, *, indent: int | None = None) -> str:
        return json.dumps(self.to_dict(), indent=indent, allow_nan=False)

    @classmethod
    def from_dict(cls, told: Mapping[str, Any]) -> Likeness:
        """The record that `to_dict` gave.

        Raises:
            UsageError: for anything else, saying what is wrong.
        """
        if not isinstance(told, Mapping) or told.get("kind") != "likeness":
            raise UsageError("this is no comparison of nanhunt: give what Likeness.to_dict() returned")
        if told.get("format") != FORMAT:
            raise UsageError(f"this comparison has format {told.get('format')!r}, and this nanhunt reads {FORMAT}")
        try:
            return cls(
                a=told["a"],
                b=told["b"],
                calls=tuple(_call(one) for one in told["calls"]),
                parameters=tuple(
                    Parameter(**{**_known(Parameter, one), "gradient": _figures(one["gradient"])})
                    for one in told["parameters"]
                ),
                outputs=tuple(f for one in told["outputs"] if (f := _figures(one)) is not None),
                parted=tuple(told["parted"]),
                batches=told["batches"],
                died=told["died"],
                notes=tuple(told["notes"]),
                context=dict(told["context"]),
            )
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise UsageError(f"this comparison is not whole: {type(error).__name__} {error}") from error

    @classmethod
    def from_json(cls, text: str) -> Likeness:
        try:
            told = json.loads(text)
        except ValueError as error:
            raise UsageError(f"this is no comparison of nanhunt: it is not JSON ({error})") from error
        return cls.from_dict(told)


def _worse(one: Figures, other: Figures) -> bool:
    return (not one.only_b, one.cosine) < (not other.only_b, other.cosine)


def _together(figures: list[Figures]) -> float:
    """The cosine of several pairs of tensors in one vector."""
    largest = max((size for one in figures for size in one.sizes), default=0.0) or 1.0
    aa = bb = ab = 0.0
    for one in figures:
        x, y = (size / largest for size in one.sizes)
        aa, bb, ab = aa + one.count * x * x, bb + one.count * y * y, ab + one.count * x * y * one.cosine
    if not any(one.max_abs for one in figures):
        return 1.0
    return ab / math.sqrt(aa) / math.sqrt(bb) if aa and bb else 0.0


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


_NAMED = ("nan", "inf", "-inf")


def _known(cls: Any, told: Mapping[str, Any]) -> dict[str, Any]:
    fields = {field.name: str(field.type) for field in dataclasses.fields(cls)}
    known = {}
    for key, value in told.items():
        if key in fields:
            number = fields[key] == "float" and value in _NAMED
            numbers = fields[key] == "tuple[float, float]"
            known[key] = (
                float(value)
                if number
                else tuple(map(float, value) if numbers else value)
                if isinstance(value, list)
                else value
            )
    return known


def _figures(told: Any) -> Any:
    return None if told is None else Figures(**_known(Figures, told))


def _call(told: Mapping[str, Any]) -> Call:
    own = told["own"]
    parts = {key: _figures(told[key]) for key in ("input", "output", "gradient")}
    return Call(**{**_known(Call, told), **parts, "own": None if own is None else Own(**_known(Own, own))})
