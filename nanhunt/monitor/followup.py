"""After an anomaly: the full watch over the next steps, or a hunt through the same one."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from .. import ambient
from ..finding import Finding
from ..hunter import hunt
from ..replay import Snapshot
from ..watcher import Watch
from ..watching import watch

_KEPT = 20  # findings
_PAST = "the weights were already bad when this watch began: it shows where they are met, and not what spoiled them"


class FollowUp:
    """Opens a watch of every module for a few steps, and hunts through a step that can be run again.

    Attributes:
        findings: what was found, with the monitor's step numbers.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | None, scaler: Any, steps: int) -> None:
        self._model, self._optimizer, self._scaler, self._steps = model, optimizer, scaler, steps
        self.findings: list[Finding] = []
        self._watch: Watch | None = None
        self._first = 0
        self._read = 0
        self._context: dict[str, Any] = {}

    def open(self, first: int, *, spoiled: bool) -> None:
        """Watch the next steps, the first of which has this number; `spoiled` when weights are bad already."""
        if self._watch is not None:
            return
        self._first, self._read = first, 0
        self._context = {"weights": _PAST} if spoiled else {}
        self._watch = watch(self._model, self._optimizer, self._scaler, on_hit="record", compiled="eager")

    def begins(self, number: int) -> None:
        """A step begins; the watch ends with the last one that it was opened for, or that told something."""
        if self._watch is not None:
            self._gather()
            if number >= self._first + self._steps or self._watch.finding is not None:
                self.close()

    def close(self) -> None:
        running, self._watch = self._watch, None
        if running is not None:
            running.__exit__(None, None, None)
            self._gather(running)

    def end(self) -> None:
        """Nothing more is followed up; what was found stays, and the model may go."""
        self.close()
        self._model, self._optimizer, self._scaler = nn.Module(), None, None

    def _gather(self, running: Watch | None = None) -> None:
        running = running or self._watch
        assert running is not None
        new = running.findings[self._read :]
        self._read += len(new)
        for finding in new:
            step = None if finding.step is None else finding.step + self._first
            self._keep(dataclasses.replace(finding, step=step, context={**finding.context, **self._context}))

    def _keep(self, finding: Finding) -> None:
        if len(self.findings) < _KEPT:
            self.findings.append(finding)

    def hunt(
        self,
        number: int,
        before: Iterable[ambient.Back],
        step: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        restore: tuple[Any, ...],
    ) -> Finding | None:
        """Run a step again, from the random numbers it began with, and leave everything as it was found."""
        self.close()
        snapshot = Snapshot(self._model, self._optimizer, self._scaler, restore, args=args, kwargs=kwargs)
        with snapshot:
            for back in before:
                back()
            found = hunt(
                functools.partial(step, *args, **kwargs),
                model=self._model,
                optimizer=self._optimizer,
                scaler=self._scaler,
                restore=restore,
            )
        snapshot.restore()
        if found is not None:
            found = dataclasses.replace(found, step=number)
            self._keep(found)
        return found
