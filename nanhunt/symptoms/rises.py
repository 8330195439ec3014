"""A loss that rises: noise, a spike that recovers, a step to a higher level, growth without end."""

from __future__ import annotations

import itertools
import math
import re
from collections import deque
from dataclasses import dataclass

from .levels import Level, median
from .steps import Step

_SIGMAS = 6.0  # above the level: normal noise does that once in a billion records
_SETTLED = 60  # records above a level after which that is the level
# What is made large in place of the loss, which then is no measure of success: it follows the policy up and down.
_REWARD = re.compile(
    r"\breward(?!s/(?:chosen|rejected|margins|accuracies))|\b(?:episode_|ep_)?(?:rew|return)\b|_reward", re.I
)
_BLOCK = 16  # records whose median stands for them where slow growth is looked for


@dataclass(frozen=True, slots=True, kw_only=True)
class Rise:
    """A rise of the loss, from the step at which it, or the gradient norm before it, left its level."""

    form: str  # "growth", "level", "spike", "slow"
    first: Step
    before: Step | None
    level: float  # of the loss before it
    peak: float
    last: Step
    records: int
    norm: float | None  # level of the gradient norm before it
    norm_peak: float | None
    sure: bool


class Rises:
    """Takes the healthy records of a run one by one, and says when the loss has left its level for good."""

    def __init__(self) -> None:
        self.loss = Level()
        self.norm = Level()
        self.spikes: list[Rise] = []
        self.spike_count = self.moved = 0
        self._recent: deque[tuple[Step, bool, bool]] = deque(maxlen=400)  # with: loss is above, norm is above
        self._opening: list[Step] = []
        self._above: list[Step] = []  # the records since the loss left its level
        self._calm = self._norms_high = 0
        self.least = math.inf  # |loss| while it was healthy
        self._norm_level: float | None = None  # of the gradient norm, when the loss left its level
        self._blocks: list[float] = []
        self._block: list[float] = []
        self._best = math.inf
        self._best_noise = 0.0
        self._slow: list[Step] = []
        self._rewarded = False

    def see(self, step: Step) -> Rise | None:
        """A record whose loss is finite."""
        loss = step.loss
        assert loss is not None
        if step.metrics and not self._rewarded and any(_REWARD.search(name) for name in step.metrics):
            self._rewarded = True
        high = self._is_above(loss)
        norm = step.grad_norm
        norm_high = False
        if norm is not None and math.isfinite(norm):
            if self.norm:
                norm_high = norm > 2 * self.norm.top and norm > 2.5 * self.norm.middle
            self._norms_high = self._norms_high + 1 if norm_high else 0
            if self._norms_high > _SETTLED:  # that is where it stands now
                self.norm.clear()
                norm_high = False
            if not norm_high:
                self.norm.add(norm)
        self._recent.append((step, high, norm_high))
        found = self._at_the_start(step)
        if high:
            self._calm = 0
            if not self._above:
                self._norm_level = self.norm.middle if self.norm else None
            self._above.append(step)
            found = found or self._judge()
            if found is None and len(self._above) > _SETTLED:
                self._settle()
        elif self._above:
            self._calm += 1
            if self._calm >= 2:  # it came back
                self._recovered()
        if not high:
            self.loss.add(loss)
            self.least = min(self.least, abs(loss))
        return found or self._creeping(step, loss)

    def running(self, *, at_end: bool = False) -> Rise | None:
        """The rise that ends in what has just happened (a NaN, the end of the log), if there is one.

        Two records above the level, the last among the highest; or one, where it is at least twice as high. At the end
        of a log, where nothing else has gone wrong, it takes three that are.
        """
        losses = [s.loss for s in self._above if s.loss is not None]
        if len(self._opening) < 12 and not at_end and (short := self._short(3)) is not None:
            return short
        if not losses or self._calm or not self.loss:
            return None
        rise = losses[-1] - self.loss.middle
        grown = len(losses) >= 2 and losses[-1] >= 0.8 * max(losses) and rise > 0.25 * self._unit()
        if self._norms_grew() and len(losses) >= 2 and rise > 0.1 * self._unit():
            grown = True
        leapt = rise > max(self._unit(), 10 * self.loss.noise)
        if at_end and not (grown and len(losses) >= 3 and (leapt or self._norms_grow())):
            return None
        return self._rise("growth", sure=grown and leapt) if grown or leapt else None

    @property
    def above(self) -> bool:
        """The loss is above its level now."""
        return bool(self._above)

    def recent(self, count: int) -> list[tuple[Step, bool, bool]]:
        """The last records, each with whether its loss, and its gradient norm, is above the level."""
        return list(self._recent)[-count:]

    def restart(self) -> None:
        """The run began anew, from a checkpoint: its level is where it will be."""
        self._above.clear()
        self._calm = 0
        self.loss.clear()
        self._block.clear()
        self._blocks.clear()
        self._best = math.inf

    def _at_the_start(self, step: Step) -> Rise | None:
        """Growth from the first record on, before there is any level to leave."""
        if len(self._opening) <= 12:
            self._opening.append(step)
        if len(self._opening) > 12:
            return None
        return self._short(4) if len(self._opening) >= 5 else None

    def _short(self, least: int) -> Rise | None:
        """The few records there are: each higher than the one before it, by far at the end."""
        losses = [s.loss for s in self._opening if s.loss is not None]
        at = len(losses) - 1
        while at > 0 and losses[at - 1] < losses[at]:
            at -= 1
        low = max(abs(losses[at]), abs(losses[0])) if losses else 0.0
        if len(losses) - at < least or not losses[-1] > 4 * max(low, 1e-12) or losses[-1] - losses[at] < 0.5 * low:
            return None
        first = self._opening[at + 1] if at else self._opening[0]
        norms = [s.grad_norm for s in self._opening[at:] if s.grad_norm is not None and math.isfinite(s.grad_norm)]
        return Rise(
            form="growth",
            first=first,
            before=self._opening[at] if at else None,
            level=losses[at],
            peak=losses[-1],
            last=self._opening[-1],
            records=len(losses) - at,
            norm=norms[0] if norms else None,
            norm_peak=max(norms) if norms else None,
            sure=losses[-1] > 100 * low,
        )

    # --- inside -------------------------------------------------------------------------------------

    def _unit(self) -> float:
        """What counts as much for this loss: its level, or all that training has gained so far."""
        level = self.loss.middle
        gained = self.loss.first - level
        return max(abs(level), gained, 10 * self.loss.noise, 1e-12)

    def _is_above(self, loss: float) -> bool:
        if not self.loss:
            return False
        level = self.loss.middle
        if loss <= level + max(0.05 * abs(level), self.loss.top - level, 1e-9):
            return False
        return loss > level + _SIGMAS * self.loss.noise

    def _norms_grew(self) -> bool:
        norms = self._norms_above()
        return bool(self.norm) and len(norms) >= 2 and median(norms) > 4 * max(self.norm.middle, 1e-30)

    def _norms_grow(self) -> bool:
        """They have left their level, and go on rising."""
        norms = self._norms_above()
        return self._norms_grew() and median(norms[-2:]) >= 1.5 * median(norms[:2])

    def _norms_fell(self) -> bool:
        """The gradient went when the loss rose: the units have died, and the loss is where chance leaves it."""
        norms = self._norms_above()
        return self._norm_level is not None and len(norms) >= 5 and median(norms) < 0.2 * self._norm_level

    def _lives(self, late: float, count: int) -> bool:
        """The gradient is smaller than it was and has not gone, and the loss stands above where chance had left it."""
        norms, first = self._norms_above(), self.loss.first
        assert self._norm_level is not None
        worse = self.loss.middle + late > first + max(0.05 * abs(first), 3 * self.loss.noise)
        return worse and count >= _SETTLED - 10 and median(norms[-8:]) > 0.02 * self._norm_level

    def _damaged(self, losses: list[float]) -> bool:
        """After a leap far beyond where training began, the loss stays up though the gradient is no larger than before.

        A new task gives large losses too, and large gradients with them.
        """
        first, level = abs(self.loss.first), self.loss.middle
        late = median(losses[-8:]) - level
        norms = self._norms_above()[3:]
        small = self._norm_level is not None and len(norms) >= 5 and median(norms) < 2 * self._norm_level
        far = max(losses) > 20 * max(first, abs(level)) and late > max(0.5 * self._gained(), 8 * self.loss.noise)
        wild = max(losses) > 100 * min(losses)  # no task's losses differ by so much from batch to batch
        return far and late > 0.5 * abs(level) and (small or wild or (not norms and len(losses) >= 25))

    def _norms_above(self) -> list[float]:
        return [s.grad_norm for s in self._above if s.grad_norm is not None and math.isfinite(s.grad_norm)]

    def _judge(self) -> Rise | None:
        losses = [s.loss for s in self._above if s.loss is not None]
        count = len(losses)
        rise = median(losses[-2:]) - self.loss.middle
        unit, noise = self._unit(), self.loss.noise
        early = median(losses[:2]) - self.loss.middle
        if count >= 4 and rise > max(unit, 10 * noise) and rise >= 1.5 * early and losses[-1] >= 0.8 * max(losses):
            return self._rise("growth", sure=rise > 3 * unit)
        if count >= 4 and self._norms_grow() and rise > max(0.5 * unit, 8 * noise) and rise >= 1.2 * early:
            return self._rise("growth", sure=True)
        if count >= 25 and not self._rewarded:
            late, start = median(losses[-8:]) - self.loss.middle, median(losses[2:10]) - self.loss.middle
            stays = late >= 0.9 * start and late >= 0.8 * self._gained()
            if late > max(0.5 * unit, 8 * noise) and stays and (not self._norms_fell() or self._lives(late, count)):
                return self._rise("level", sure=self.loss.middle + late > self.loss.first)
        if count >= 15 and self._damaged(losses):
            return self._rise("level", sure=True)
        return None

    def _gained(self) -> float:
        return self.loss.first - self.loss.middle

    def _recovered(self) -> None:
        losses = [s.loss for s in self._above if s.loss is not None]
        if max(losses) - self.loss.middle > max(self._unit(), 10 * self.loss.noise):
            self.spike_count += 1
            if len(self.spikes) < 8:
                self.spikes.append(self._rise("spike", sure=True))
        self._above.clear()
        self._calm = 0

    def _settle(self) -> None:
        self.loss.clear()
        for step in self._above[-16:]:
            assert step.loss is not None
            self.loss.add(step.loss)
        self._above.clear()
        self.moved += 1

    def _rise(self, form: str, *, sure: bool) -> Rise:
        """From the first of the records, next to each other, in which the loss or the gradient norm was up."""
        where = [i for i, (s, _, _) in enumerate(self._recent) if s is self._above[0]]
        at = where[0] if where else 0
        recent = list(self._recent)
        while at > 0 and (recent[at - 1][2] or (at > 1 and recent[at - 2][2] and form != "spike")):
            at -= 1
        norms = [s.grad_norm for s, _, _ in recent[at:] if s.grad_norm is not None and math.isfinite(s.grad_norm)]
        losses = [s.loss for s in self._above if s.loss is not None]
        return Rise(
            form=form,
            first=recent[at][0],
            before=recent[at - 1][0] if at else None,
            level=self.loss.middle,
            peak=max(losses),
            last=self._above[-1],
            records=len(recent) - at,
            norm=self.norm.middle if self.norm else None,
            norm_peak=max(norms) if norms else None,
            sure=sure,
        )

    def _creeping(self, step: Step, loss: float) -> Rise | None:
        """Slow growth, over blocks of records: too slow for the level, which goes along with it."""
        self._block.append(loss)
        if len(self._block) == 1:
            self._slow.append(step)
        if len(self._block) < _BLOCK:
            return None
        now = median(self._block)
        spread = self.loss.noise if self.loss else 0.0
        self._block = []
        self._blocks.append(now)
        if now < self._best:
            self._best, self._best_noise = now, spread
            self._blocks, self._slow = [now], self._slow[-1:]
            return None
        if len(self._blocks) > 400:  # it has not come back for very long: that is the plateau's to tell
            del self._blocks[1:200], self._slow[1:200]
        return self._grows(step)

    def _grows(self, step: Step) -> Rise | None:
        last = self._blocks[-4:]
        if len(self._blocks) < 5:
            return None
        rise = last[-1] - self._best
        gained = max(self.loss.first - self._best, 0.0)
        much = max(abs(self._best), gained, 8 * self._best_noise)
        steady = all(b > a for a, b in itertools.pairwise(last))
        # One leap, some blocks ago, is not slow: whether it is a rise at all was judged when it came.
        leapt = max(b - a for a, b in itertools.pairwise(self._blocks[:-3])) > 0.6 * rise
        if self._rewarded or leapt or not (steady and rise > much) or self._norms_fell():
            return None
        # A tenth of the rise says where slow growth began; of an explosion that is long after it.
        limit = self._best + max(3 * self._best_noise, min(0.1 * rise, 0.05 * max(abs(self._best), gained)))
        at = len(self._blocks) - 1
        while at > 1 and self._blocks[at - 1] > limit:
            at -= 1
        norms = [s.grad_norm for s, _, _ in self._recent if s.grad_norm is not None and math.isfinite(s.grad_norm)]
        return Rise(
            form="slow",
            first=self._slow[at],
            before=self._slow[at - 1],
            level=self._best,
            peak=self._blocks[-1],
            last=step,
            records=(len(self._blocks) - at) * _BLOCK,
            norm=self.norm.middle if self.norm else None,
            norm_peak=max(norms) if norms else None,
            sure=rise > 3 * much,
        )
