"""What a whole run, or its log, says: the symptoms, the numbers around them, and curves to draw."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import UsageError
from .steps import Symptom, fits, number, plain

_FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One quantity over the run, thinned out: each point is a stretch of records, in the order of the file.

    Attributes:
        at: step number at which each stretch begins.
        low, mid, high: least, median and largest finite value of each stretch; NaN where it has none.
        bad: number of NaN and Inf in each stretch.
    """

    at: tuple[float, ...]
    low: tuple[float, ...]
    mid: tuple[float, ...]
    high: tuple[float, ...]
    bad: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """The diagnosis of a run, made from its record alone; it prints as a page.

    Attributes:
        source: the file, or what the model is called.
        format: how the log is written, in words ("fairseq simple, scaler messages"), or "live".
        records: number of steps in it.
        ranks: number of ranks that speak in it.
        steps: first and last step number; None where there is no number.
        spacing: the usual distance of two records, in steps.
        symptoms: the first one is what the run suffers from, the others go along with it.
        remarks: sentences about what is noteworthy and no symptom: recovered spikes, calibration of the loss scale,
            restarts.
        scale: sentence about the loss scale, the window of safe ones where it is known; None where there is none.
        curves: by name ("loss", "grad_norm", "lr", "loss_scale", "metric accuracy"), thinned out.
        marks: (step, text) of events to draw: skipped steps, restarts, epochs.
        lines: lines read; None for a live run.
        understood: lines a record was read from.
        unknown: a few lines that hold numbers and were not understood, each with its line number.
    """

    source: str
    format: str
    records: int
    ranks: int = 1
    steps: tuple[int | None, int | None] = (None, None)
    spacing: float | None = None
    symptoms: tuple[Symptom, ...] = ()
    remarks: tuple[str, ...] = ()
    scale: str | None = None
    curves: Mapping[str, Curve] = field(default_factory=dict)
    marks: tuple[tuple[float, str], ...] = ()
    lines: int | None = None
    understood: int | None = None
    unknown: tuple[str, ...] = ()

    @property
    def symptom(self) -> str:
        """The identifier of what the run suffers from: one of `steps.SYMPTOMS`, or "none"."""
        return self.symptoms[0].name if self.symptoms else "none"

    @property
    def first_bad_step(self) -> int | None:
        """Where that began; None where nothing is wrong, or where the log has no step numbers."""
        return self.symptoms[0].step if self.symptoms else None

    @property
    def first_bad_line(self) -> int | None:
        """The line of the log at which that began."""
        return self.symptoms[0].line if self.symptoms else None

    @property
    def cause(self) -> str | None:
        """The likely cause, with its numbers."""
        return self.symptoms[0].cause if self.symptoms else None

    @property
    def advice(self) -> tuple[str, ...]:
        """What to do, the first action first."""
        return self.symptoms[0].advice if self.symptoms else ()

    @property
    def evidence(self) -> tuple[str, ...]:
        """Sentences with steps and numbers."""
        return self.symptoms[0].evidence if self.symptoms else ()

    def to_dict(self) -> dict[str, Any]:
        """As JSON can hold it; the properties above stand in it too."""
        made: dict[str, Any] = {"nanhunt_course": _FORMAT}
        for name in ("symptom", "first_bad_step", "first_bad_line", "cause", "advice", "evidence"):
            made[name] = plain(getattr(self, name))
        for f in dataclasses.fields(self):
            made[f.name] = plain(getattr(self, f.name))
        made["symptoms"] = [symptom.to_dict() for symptom in self.symptoms]
        made["curves"] = {name: plain(dataclasses.asdict(curve)) for name, curve in self.curves.items()}
        return made

    def to_json(self, *, indent: int | None = None) -> str:
        """JSON of `to_dict`."""
        return json.dumps(self.to_dict(), indent=indent, allow_nan=False)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Course:
        """The course that `to_dict` wrote.

        Raises:
            UsageError: when it is none, or of a newer format.
        """
        if not isinstance(data, Mapping) or data.get("nanhunt_course") != _FORMAT:
            raise UsageError("not a course that this version of nanhunt wrote")
        values = {f.name: data[f.name] for f in dataclasses.fields(cls) if f.name in data}
        try:
            values["symptoms"] = tuple(map(Symptom.from_dict, values.get("symptoms", ())))
            values["curves"] = {
                name: Curve(**{key: tuple(map(number, points)) for key, points in curve.items()})
                for name, curve in values.get("curves", {}).items()
            }
            values["marks"] = tuple((number(at), text) for at, text in values.get("marks", ()))
            values["spacing"] = number(values.get("spacing"))
            for name in ("steps", "remarks", "unknown"):
                values[name] = tuple(values.get(name, ()))
            fits(cls, {**values, "marks": ()})
            if not all(isinstance(mark[0], (int, float)) and isinstance(mark[1], str) for mark in values["marks"]):
                raise UsageError("a mark of a course is a step and a text")
            for curve in values["curves"].values():
                fits(Curve, {f.name: getattr(curve, f.name) for f in dataclasses.fields(curve)})
            return cls(**values)
        except (TypeError, ValueError, AttributeError) as error:
            raise UsageError(f"not a course that this version of nanhunt wrote: {error}") from None

    def __str__(self) -> str:
        from ..report.course_text import page  # the page is loaded when it is wanted

        return page(self)

    def _repr_html_(self) -> str:
        from ..report.course_page import frame

        return frame(self)
