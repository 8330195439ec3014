"""The loss scale over a run: finding it, backing off now and then, falling without end, too small for long."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from ..numerics import fmt
from .steps import Step

_LONE = 8  # halvings in a row that no healthy run has once it is under way: gradients grow by 256 at one step
_SEARCH = 40  # the same while the first scale is looked for: 2^32 is where some begin
_CHURN = 0.02  # share of skipped steps: a scaler that doubles every 2000 steps skips one in 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Fall:
    """Steps skipped in a row, the scale being lowered at each."""

    first: Step
    before: Step | None
    last: Step
    skipped: int
    high: float | None  # the scale at first and at last
    low: float | None
    bottom: bool  # the smallest scale overflows too


class ScaleCourse:
    """Takes the records one by one, those that only say that a step was skipped among them."""

    def __init__(self) -> None:
        self.first: float | None = None
        self.now: float | None = None
        self.least = math.inf
        self.most = 0.0
        self.skipped = self.records = self.calibration = 0
        self.by_name: dict[str, int] = {}  # parameters whose gradient was bad, by how often
        self._good = 0  # records since the start that were applied
        self._run: list[Step] = []  # a few of the steps skipped in a row, the first of them at least
        self._length = self._quiet = 0
        self._owed = 0  # steps counted as skipped, by which a later record's scale will be lower
        self._from: float | None = None
        self._last = Step(step=None)  # that was skipped
        self._applied: Step | None = None  # the last step that was
        self._window: deque[bool] = deque(maxlen=1000)

    def see(self, step: Step) -> Fall | None:
        """The fall that this record confirms, if it does; told once it is certain, at each record that goes on."""
        scale = _known(step.loss_scale)
        # A step skipped for want of any gradient is no overflow.
        over = (bool(step.skipped) and step.grad_norm != 0.0) or (
            scale is not None and _bad(step.grad_norm) and not _bad(step.loss)
        )
        before = self.now
        if scale is not None:
            self._know(scale)
        self.records += 1
        self._window.append(over)
        if not over:
            # A log has one line in a hundred steps: what was skipped in between shows in the scale.
            if before is not None and scale is not None and scale < before:
                self.skipped += max(round(math.log2(before) - math.log2(scale)) - self._owed, 0)
            if scale is not None:
                self._owed = 0
            self._good += 1
            # In a log a line may stand between two skipped steps and say nothing of its own.
            self._quiet += 1
            lower = before is not None and scale is not None and scale < before
            if not self._length or (not lower and (step.skipped is False or scale is not None or self._quiet >= 2)):
                self._run, self._length, self._from = [], 0, None
                self._applied = step
            return None
        self._quiet = 0
        self.skipped += 1
        if self._good < 3:
            self.calibration += 1
        self._length += 1
        if self._from is None:
            self._from = scale if scale is not None else before
        self._last = step
        if len(self._run) < 4:
            self._run.append(step)
        if step.worst is not None and len(self.by_name) < 1000:
            self.by_name[step.worst] = self.by_name.get(step.worst, 0) + 1
        after = _known(step.loss_scale_after)
        lowered = before is not None and scale is not None and scale < before
        if after is not None:
            self._know(after)
        elif not lowered:
            self._owed += 1
        bottom = scale is not None and scale <= 1.0
        # Between two lines of a log other messages may stand: their number alone says nothing of steps in a row.
        if bottom or self._length >= (_LONE if self._good >= 20 else _SEARCH):
            return self.fall(step, bottom=bottom)
        return None

    def fall(self, step: Step | None = None, *, bottom: bool = False) -> Fall:
        """The steps skipped in a row up to now, which `step` ends."""
        step = step or self._last
        return Fall(
            first=self._run[0] if self._run else step,
            before=self._applied,
            last=step,
            skipped=self._length,
            high=self._from,
            low=self.now,
            bottom=bottom,
        )

    @property
    def falling(self) -> int:
        """Steps skipped in a row, up to now."""
        return self._length

    @property
    def churns(self) -> bool:
        """Many steps of the last thousand were skipped, apart from the search at the start."""
        late = self.skipped - self.calibration
        return self.records >= 100 and late >= 10 and late / self.records > _CHURN

    def sentence(self) -> str | None:
        """What the scale did, in words; None where there is none."""
        if self.first is None or self.now is None:
            many = "1 step was" if self.skipped == 1 else f"{self.skipped} steps were"
            return f"{many} skipped; no loss scale is told." if self.skipped else None
        if not self.skipped and self.first == self.now == self.most:
            flat = f"The loss scale stood at {fmt(self.now)} throughout, and no step was skipped"
            return flat + (": nothing is scaled." if self.now == 1.0 else ".")
        said = f"The loss scale went from {fmt(self.first)} to {fmt(self.now)}"
        if {self.least, self.most} - {self.first, self.now}:
            said += f" (between {fmt(self.least)} and {fmt(self.most)})"
        if not self.skipped:
            return said + " without a skipped step, as it should."
        said += f"; {self.skipped} {'step was' if self.skipped == 1 else 'steps were'} skipped"
        if self.calibration:
            said += f", {self.calibration} of them at the start, while the scale was being found"
        if self.churns:
            said += ": the gradients overflow often"
            if self.by_name:
                worst = max(self.by_name, key=lambda name: self.by_name[name])
                said += f", first in {worst}"
        elif self.records >= 100 and self.skipped - self.calibration < self.records / 50:
            said += ": now and then is as it should be, that is how the largest scale is found"
        return said + "."

    def _know(self, scale: float) -> None:
        if self.first is None:
            self.first = scale
        self.now = scale
        self.least, self.most = min(self.least, scale), max(self.most, scale)


def _known(scale: float | None) -> float | None:
    return scale if scale is not None and 0.0 < scale < math.inf else None


def _bad(value: float | None) -> bool:
    return value is not None and not math.isfinite(value)
