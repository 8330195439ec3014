"""A validation metric that jumps without a trend, judged against its own noise."""

from __future__ import annotations

import itertools
import math
import re
from statistics import mean

from ..numerics import fmt
from . import counsel
from .levels import median, noise
from .steps import Step, Symptom

_LEAST = 8  # evaluations before anything is said
_KEPT = 64
# Mean jump from one evaluation to the next, as a share of the level. Healthy runs of small models, once they have
# stopped rising, stay below 0.05; where steps are lost to a scale that keeps falling, half as much is no accident.
_SHARE, _SHARE_OF_CHURN = 0.1, 0.05
_LOUDER = 2.5  # times the jumps before the learning rate was raised
_NOT_VALIDATION = re.compile(r"reward|return|episode|speed|time|memory|per_second|runtime|throughput", re.IGNORECASE)
_HITS = re.compile(r"acc|map|iou|f1|auc|bleu|rouge|dice|prec|recall|ndcg|mrr|top.?[15]|\bem\b|exact", re.IGNORECASE)
_FEW = 0.1  # of such a metric, between 0 and 1, below which a jump by a part of itself is a jump by nearly nothing


class Wobble:
    """Takes the metrics of each record by name."""

    def __init__(self) -> None:
        self._seen: dict[str, list[tuple[Step, float, float]]] = {}  # with the learning rate
        self._counts: dict[str, int] = {}
        self._told = False
        self._lr = math.nan

    def see(self, step: Step, *, churns: bool = False) -> list[Symptom]:
        """What this record makes certain; `churns`: the loss scale backs off often."""
        if step.lr:
            self._lr = max(step.lr)
        found: list[Symptom] = []
        for name, value in step.metrics.items():
            if not math.isfinite(value) or len(self._seen) > 200 or _NOT_VALIDATION.search(name):
                continue
            values = self._seen.setdefault(name, [])
            values.append((step, value, self._lr))
            self._counts[name] = self._counts.get(name, 0) + 1
            del values[:-_KEPT]
            if not self._told and len(values) >= 3 * _LEAST and self._counts[name] % 4 == 0:
                found += self._judge(name, values, churns=churns)
        return found

    def end(self, *, churns: bool = False) -> list[Symptom]:
        """The same, when no more comes."""
        for name, values in self._seen.items():
            if not self._told and len(values) >= _LEAST:
                found = self._judge(name, values, churns=churns)
                if found:
                    return found
        return []

    def _judge(self, name: str, series: list[tuple[Step, float, float]], *, churns: bool) -> list[Symptom]:
        late = series[len(series) // 3 :]  # what comes first may be all trend
        values = [value for _, value, _ in late]
        jumps = [b - a for a, b in itertools.pairwise(values)]
        size = mean(abs(jump) for jump in jumps)
        level = median(abs(value) for value in values)
        if level < _FEW and max(values) <= 1.0 and _HITS.search(name):
            level = _FEW if max(values) > 0.0 else 0.0
        third = max(len(values) // 3, 2)
        trend = abs(median(values[-third:]) - median(values[:third]))
        spread = noise(values)
        turns = sum(a * b < 0 for a, b in itertools.pairwise(jumps)) / max(len(jumps) - 1, 1)
        if (
            level
            and size > (_SHARE_OF_CHURN if churns else _SHARE) * level
            and turns >= 1 / 3
            and trend <= 1.5 * spread
            and abs(values[-1] - values[0]) <= 0.5 * size * len(jumps)  # one way, all at once, is no fluctuation
        ):
            why = (
                "the loss scale backs off often, and each time a step is lost"
                if churns
                else "the updates are too large for the minimum they circle, or the validation set is small"
            )
            return self._tell(name, "scale_churn" if churns else "jumps", late, size, level, why)
        return self._raised(name, series)

    def _raised(self, name: str, series: list[tuple[Step, float, float]]) -> list[Symptom]:
        """Jumps that are louder since the learning rate was raised, for good."""
        lrs = [lr for _, _, lr in series]
        at = next((i for i in range(6, len(lrs) - _LEAST + 1) if lrs[i] > 1.9 * lrs[i - 1]), None)
        if at is None or min(lrs[at:]) < lrs[at]:
            return []
        before, after = ([value for _, value, _ in part] for part in (series[max(at - 8, 0) : at], series[at:]))
        calm = mean(abs(b - a) for a, b in itertools.pairwise(before))
        loud = mean(abs(b - a) for a, b in itertools.pairwise(after))
        level = median(abs(value) for value in after)
        if loud < _LOUDER * calm or loud < 0.025 * level:
            return []
        why = (
            f"the jumps were {fmt(calm)} before the learning rate was raised from {fmt(lrs[at - 1])} to {fmt(lrs[at])}"
        )
        return self._tell(name, "rate", series[at:], loud, level, why)

    def _tell(
        self, name: str, form: str, late: list[tuple[Step, float, float]], size: float, level: float, why: str
    ) -> list[Symptom]:
        self._told = True
        first, last = late[0][0], late[-1][0]
        values = [value for _, value, _ in late]
        return [
            counsel.symptom(
                "metric_fluctuation",
                form,
                first,
                f"{name} jumps by {fmt(size)} from one evaluation to the next, about a level of {fmt(level)}, "
                f"and has no trend: {why}.",
                (
                    f"The last values of {name}: {', '.join(fmt(value) for value in values[-6:])}.",
                    f"Between {fmt(min(values))} and {fmt(max(values))} over {len(values)} evaluations.",
                ),
                confidence="likely" if size > 1.5 * _SHARE * level or form != "jumps" else "possible",
                seen=last,
            )
        ]
