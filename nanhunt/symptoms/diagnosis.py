"""A run, step by step, to its symptoms: numbers first, then the loss scale, then the optimiser."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from statistics import median

from ..numerics import fmt
from .breaks import Breaks
from .course import Course
from .steps import SYMPTOMS, Step, Symptom
from .stillness import Stillness
from .thinning import Thinning
from .wobble import Wobble

_CURVES = 60  # quantities that are drawn
_MARKS = 200
# What a run suffers from stands before what goes along with it; of two of one rank, the one that was told first.
_ORDER = {
    "nan_inf": 0,
    "loss_explosion": 0,
    "vanishing_gradient": 1,
    "non_convergence": 1,
    "metric_fluctuation": 2,
}
assert set(_ORDER) == set(SYMPTOMS)


class Diagnosis:
    """Takes the records of a run in their order and keeps a bounded memory of them, however long the run is.

    `see` gives the symptoms that a record makes certain, `end` those that only the whole run shows; nothing may be
    seen after the end. Ranks of one run go into one diagnosis, in the order in which they wrote.
    """

    def __init__(self) -> None:
        self.symptoms: list[Symptom] = []
        self.records = 0
        self._breaks = Breaks()
        self._stillness = Stillness()
        self._wobble = Wobble()
        self._curves: dict[str, Thinning] = {}
        self._marks: list[tuple[float, str]] = []
        self._first: int | None = None
        self._last: int | None = None
        self._gaps: deque[int] = deque(maxlen=101)
        self._restarts = 0
        self._restart: tuple[int, int] | None = None
        self._ranks: set[int] = set()
        self._ended = False

    def see(self, step: Step) -> list[Symptom]:
        """Take one record in; what it makes certain is returned and stands in `symptoms` as well."""
        self.records += 1
        self._place(step)
        self._draw(step)
        found = self._breaks.see(step)
        if not step.bad():
            found += self._stillness.see(step)
        found += self._wobble.see(step, churns=self._breaks.scale.churns)
        return self._keep(found)

    def end(self) -> list[Symptom]:
        """No more records come."""
        if self._ended:
            return []
        self._ended = True
        found = self._breaks.end()
        if not any(symptom.name in ("nan_inf", "loss_explosion") for symptom in self.symptoms + found):
            found += self._stillness.end()
            found += self._wobble.end(churns=self._breaks.scale.churns)
        return self._keep(found)

    @property
    def scale(self) -> str | None:
        """What the loss scale did, in a sentence; None where there is none."""
        return self._breaks.scale.sentence()

    @property
    def remarks(self) -> list[str]:
        """What is noteworthy and no symptom."""
        said = []
        rises = self._breaks.rises
        if rises.spikes:
            tops = ", ".join(f"{fmt(s.peak)} at step {s.first.step}" for s in rises.spikes[:3])
            many = "spike" if rises.spike_count == 1 else "spikes"
            said.append(f"{rises.spike_count} {many} of the loss recovered: {tops}.")
        if self._breaks.isolated:
            where = ", ".join(f"{s.step}" for s in self._breaks.isolated[:4])
            said.append(
                f"The gradient norm was NaN or Inf in {self._breaks.isolated_count} records ({where}) and fine after "
                "them: a scaler that skips a step looks like that."
            )
        if self._restart is not None:
            many = "once" if self._restarts == 1 else f"{self._restarts} times"
            said.append(
                f"The step number went back {many}, first from {self._restart[0]} to {self._restart[1]}: a restart."
            )
        return said

    def course(
        self,
        *,
        source: str,
        format: str,
        lines: int | None = None,
        understood: int | None = None,
        unknown: Iterable[str] = (),
        ranks: int | None = None,
    ) -> Course:
        """All of it as a record that can be kept and shown."""
        return Course(
            source=source,
            format=format,
            records=self.records,
            ranks=ranks if ranks is not None else max(len(self._ranks), 1),
            steps=(self._first, self._last),
            spacing=float(median(self._gaps)) if self._gaps else None,
            symptoms=tuple(map(self._breaks.retold, self.symptoms)),
            remarks=tuple(self.remarks),
            scale=self.scale,
            curves={name: thinning.curve() for name, thinning in self._curves.items()},
            marks=tuple(self._marks),
            lines=lines,
            understood=understood,
            unknown=tuple(unknown),
        )

    # --- inside -----------------------------------------------------------------------------------------------

    def _keep(self, found: list[Symptom]) -> list[Symptom]:
        if not found:
            return found
        self.symptoms += found
        self.symptoms.sort(key=lambda symptom: _ORDER[symptom.name])
        return found

    def _place(self, step: Step) -> None:
        self._ranks.add(step.rank)
        if step.step is None:
            return
        if self._first is None:
            self._first = step.step
        elif self._last is not None and step.step > self._last:
            self._gaps.append(step.step - self._last)
        elif self._last is not None and step.step < self._last - 1:
            self._restarts += 1
            self._restart = self._restart or (self._last, step.step)
            self._breaks.rises.restart()
            self._mark(step.step, "restart")
        self._last = step.step

    def _draw(self, step: Step) -> None:
        at = float(step.step if step.step is not None else self._last if self._last is not None else self.records)
        if step.skipped:
            self._mark(at, "skipped")
        for name in ("loss", "grad_norm", "clipped_norm", "loss_scale", "update_ratio", "small_grads", "lost_updates"):
            value = getattr(step, name)
            if value is not None:
                self._add(name, at, value)
        if step.lr:
            largest = max(step.lr, key=lambda lr: lr if math.isfinite(lr) else math.inf) if step.lr[1:] else step.lr[0]
            self._add("lr", at, largest)
        if not step.metrics and not step.losses:
            return
        for name, value in step.metrics.items():
            self._add(f"metric {name}", at, value)
        for name, value in step.losses.items():
            self._add(f"part {name}", at, value)

    def _add(self, name: str, at: float, value: float) -> None:
        curve = self._curves.get(name)
        if curve is None:
            if len(self._curves) >= _CURVES:
                return
            curve = self._curves[name] = Thinning()
        curve.add(at, value)

    def _mark(self, at: float, text: str) -> None:
        if len(self._marks) < _MARKS:
            self._marks.append((at, text))
