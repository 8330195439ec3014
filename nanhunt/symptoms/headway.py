"""What a loss has gained: since the beginning, of late, or nothing at all."""

from __future__ import annotations

import math
from collections import deque

from ..numerics import fmt
from . import counsel
from .levels import median, noise
from .steps import Step, Symptom

LOW = ("float16", "bfloat16")
_CLASSES = (2, 3, 4, 5, 10, 20)  # of which a classifier that has learned nothing may be guessing
_SHORT = 8  # blocks, of as many records at first, before "of late" means anything
_BLOCKS = 128


class Headway:
    """Takes every record and keeps the loss in blocks, and what else shows whether anything is learned."""

    def __init__(self) -> None:
        self.records = 0
        self._first: Step | None = None
        self._last: Step | None = None
        self._opening: list[float] = []
        self._ending: deque[float] = deque(maxlen=32)
        self._blocks: list[float] = []  # medians; their width doubles
        self._block: list[float] = []
        self._width = 8
        self._ratios: deque[float] = deque(maxlen=8)
        self.lr_most = 0.0
        self._state: tuple[str, ...] = ()
        self._weights: tuple[str, ...] = ()
        self._metrics: dict[str, list[float]] = {}

    def see(self, step: Step) -> None:
        """Take a record in."""
        self.records += 1
        self._first, self._last = self._first or step, step
        if step.loss is not None and math.isfinite(step.loss):
            self._take(step.loss)
        if step.lr:
            for lr in step.lr:
                if self.lr_most < abs(lr) < math.inf:
                    self.lr_most = abs(lr)
        if step.update_ratio is not None:
            self._ratios.append(step.update_ratio)
        self._state = step.state_dtypes or self._state
        self._weights = step.dtypes or self._weights
        for name, value in step.metrics.items():
            if math.isfinite(value) and (name in self._metrics or len(self._metrics) < 60):
                self._metrics.setdefault(name, []).append(value)
                del self._metrics[name][:-64]

    def _take(self, loss: float) -> None:
        if len(self._opening) < 5:
            self._opening.append(loss)
        self._ending.append(loss)
        self._block.append(loss)
        if len(self._block) == self._width:
            self._blocks.append(median(self._block))
            self._block = []
            if len(self._blocks) == _BLOCKS:
                self._blocks = [(a + b) / 2 for a, b in zip(self._blocks[::2], self._blocks[1::2])]
                self._width *= 2

    # --- what was gained ------------------------------------------------------------------------------------

    def gained(self) -> float:
        """Share of the first loss that is gone: 0 when nothing was gained, 1 when the loss has reached 0."""
        if not self._opening:
            return 0.0
        first, now = median(self._opening), median(list(self._ending)[-5:])
        return (first - now) / max(abs(first), 1e-12)

    def stands(self) -> bool:
        """The loss has gained next to nothing of late."""
        if len(self._blocks) < _SHORT:
            return not self.learned()
        quarter = len(self._blocks) // 4
        before, now = median(self._blocks[-2 * quarter : -quarter]), median(self._blocks[-quarter:])
        return before - now < 0.03 * abs(before)

    def learned(self) -> bool:
        """Much of the first loss is gone: gradients may be small because there is little left to do."""
        return self.gained() > 0.15

    def done(self, step: Step) -> bool:
        """The loss is nearly gone, measured by where it began: a regression may begin at 1e-10."""
        first = abs(median(self._opening)) if self._opening else 0.0
        return step.loss is None or abs(step.loss) < 1e-2 * first

    def sentence(self) -> str:
        """From where to where the loss went; empty where there is none."""
        if not self._opening:
            return ""
        now = median(list(self._ending)[-5:])
        return f"The loss went from {fmt(self._opening[0])} to {fmt(now)} over {self.records} records."

    # --- a loss that does not move ----------------------------------------------------------------------------

    def plateau(self) -> list[Symptom]:
        """What the whole run tells, when nothing else is wrong: the loss has not moved."""
        blocks = self._blocks
        if self._first is None or self._last is None or len(blocks) < (2 if self._sparse() else 4):
            return []
        spread = noise(blocks if len(blocks) >= 4 else list(self._ending))
        third = max(len(blocks) // 3, 1)
        early, late = median(blocks[:third]), median(blocks[-third:])
        fell = (early - late) / max(abs(early), 1e-12)
        if fell > 0.02 or early - late > 4 * spread or self.gained() > 0.05 or abs(late) < 1e-2:
            return []
        low_state = [dtype for dtype in self._state if dtype in LOW]
        low = low_state or [dtype for dtype in self._weights if dtype in LOW]
        still = bool(self._ratios) and median(self._ratios) < 1e-7
        chance = self._chance(late, spread)
        if not low and not still and not chance:
            return []
        why = "the loss has not moved"
        if low:
            why += f", and the {'optimizer state' if low_state else 'weights'} is kept in {low[0]}"
        elif still:
            why += f", and an update changes the weights by {fmt(median(self._ratios))} of their size only"
        if chance:
            why += f": it stands at {chance}"
        form = "low_precision_state" if low else "plateau"
        rate = f"Learning rate up to {fmt(self.lr_most)}." if self.lr_most else ""
        return [
            counsel.symptom(
                "non_convergence",
                form,
                self._first,
                f"Over {self.records} records {why}.",
                (self.sentence(), rate),
                confidence="likely" if still or low else "possible",
                seen=self._last,
            )
        ]

    def _sparse(self) -> bool:
        """A record stands for many steps: a few of them tell as much as many do elsewhere."""
        first, last = self._first, self._last
        if first is None or last is None or first.step is None or last.step is None:
            return False
        return last.step - first.step >= 20 * self.records

    def _chance(self, late: float, spread: float) -> str:
        """What guessing gives, in words, where the loss stands there without noise to speak of; else "".

        No metric has improved either. A run that begins with good weights stands still as well: at a level that chance
        does not give. Chance gives ln(k) for k classes; far up it is what any vocabulary gives.
        """
        if spread >= 0.05 * abs(late) or any(_moved(values) for values in self._metrics.values()):
            return ""
        classes = next((k for k in _CLASSES if abs(late / math.log(k) - 1) < 0.015), None)
        if classes is not None:
            return f"{fmt(late)}, which is what guessing among {classes} classes gives"
        return f"{fmt(late)}, as high as guessing leaves it" if late > 4.0 else ""


def _moved(values: list[float]) -> bool:
    if len(values) < 4:
        return False
    third = max(len(values) // 3, 1)
    change = abs(median(values[-third:]) - median(values[:third]))
    return change > max(3 * noise(values), 0.05 * abs(median(values[:third])))
