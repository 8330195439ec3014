"""Entries into steps, for each rank by itself, in the order of the log."""

from __future__ import annotations

from collections.abc import Iterable

from ..symptoms.steps import Step
from .entry import Entry
from .lane import Lane
from .spellings import whole

_MAX_RANKS = 4096


class Assembly:
    """Steps in the order of the log, for each rank by itself."""

    def __init__(self) -> None:
        self._lanes: dict[int, Lane] = {}

    @property
    def ranks(self) -> int:
        """Number of ranks that told of a step."""
        return max(1, sum(lane.spoke for lane in self._lanes.values()))

    @property
    def summed(self) -> bool:
        """Most records had parts of a loss and no total: their sum stands for it."""
        return any(lane.summed * 2 > lane.count for lane in self._lanes.values())

    def add(self, entry: Entry, line: int | None, rank: int = 0) -> Iterable[Step]:
        """The steps that are complete now."""
        if entry.rank is not None and (own := whole(entry.rank)) is not None and 0 <= own < 1_000_000:
            rank = own
        lane = self._lanes.get(rank)
        if lane is None:
            if len(self._lanes) >= _MAX_RANKS:
                rank = 0
            lane = self._lanes.setdefault(rank, Lane(rank))
        entry.line = line
        out = list(lane.event(entry) if entry.event else lane.add(entry))
        if not out or len(self._lanes) == 1:
            return out
        # Of several ranks nothing overtakes what was written before it.
        until = out[-1].line or 0
        for other in self._lanes.values():
            if other is not lane and other.pending is not None and (other.pending.line or 0) < until:
                out.extend(other.flush())
        return sorted(out, key=lambda step: step.line or 0)

    def end(self) -> Iterable[Step]:
        """What was still waiting for more."""
        waiting = [lane for lane in self._lanes.values() if lane.pending is not None]
        for lane in sorted(waiting, key=lambda lane: lane.pending.line or 0 if lane.pending else 0):
            yield from lane.flush()
