"""A watch over the steps [a, b) of somebody else's trainer, and what is told of a fault in them."""

from __future__ import annotations

import dataclasses
import inspect
import logging
import os
import sys
import warnings
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..compiled import is_compiled
from ..errors import NonFiniteError, NonFiniteWarning, UsageError, enabled
from ..finding import Finding
from ..hits import KEPT
from ..options import OnHit, checked
from ..report.files import write_whole
from ..watcher import Watch
from ..watching import watch

if TYPE_CHECKING:
    from ..monitor.front import Monitor

_ON_HIT = ("raise", "stop", "warn", "record")
# The options of `watch` that a callback takes under no name of its own.
_DEFAULTS = {
    name: option.default
    for name, option in inspect.signature(watch).parameters.items()
    if option.default is not option.empty
    and not name.startswith("_")
    and name not in ("optimizer", "on_hit", "steps", "monitor")
}
_log = logging.getLogger("nanhunt")


class Span:
    """Watches the steps that were asked for, as the trainer counts them, and has no hook anywhere else.

    A trainer calls `open` when it begins, `begin` at the start of each of its steps and `end` after each, and `close`
    when it ends, by whatever way, and before it runs the model for other reasons, such as an evaluation. The first
    step that is wanted opens the watch, which then stays from step to step.

    Args:
        steps: `(a, b)`: the steps a <= step < b of the trainer, whose step 0 is the first ever made; None for all.
        on_hit: `"raise"`, `"stop"` (for the trainer to do: see `struck`), `"warn"`, `"record"`, or a callable that
            gets the `Finding`.
        report: a folder, made when it is needed, for the page and the JSON of each fault; None for none.
        idle: never watch.
        options: those of `nanhunt.watch`; `every` is of the trainer's steps too.

    Attributes:
        finding: the first fault, its `step` being the trainer's, or None; among several ranks, once the watch is off,
            the first of them all.
        findings: all that was recorded since `open`, faults and what was none, at most 100.
        struck: True when the step that runs, or has just ended, has had a fault.
        inside: True when that step is one of those asked for.

    Raises:
        UsageError: for an option that does not exist, or a value that is not legal, before any training.
    """

    def __init__(
        self,
        *,
        steps: tuple[int, int] | None,
        on_hit: OnHit,
        report: str | os.PathLike[str] | None,
        idle: bool = False,
        **options: Any,
    ) -> None:
        if not callable(on_hit) and on_hit not in _ON_HIT:
            words = ", ".join(map(repr, _ON_HIT))
            raise UsageError(f"on_hit={on_hit!r} is not known: use one of {words} or a callable that gets the Finding")
        if report is not None and Path(report).exists() and not Path(report).is_dir():
            raise UsageError(f"report={os.fspath(report)!r} is a file: name a folder, which may be a new one")
        self.steps = tuple(steps) if isinstance(steps, list) else steps  # a list is what a YAML file gives
        self.on_hit, self.report, self.options = on_hit, report, dict(options)
        self.idle = idle
        # What `watch` refuses is refused now, and not at the first step that is wanted, hours from here.
        for name in options:
            if name == "optimizer":
                raise UsageError("the optimizer is the trainer's, and it is found there: leave optimizer= out")
            if name not in _DEFAULTS:
                own = ("steps", "on_hit", "detail", "report", "monitor", "watch")
                legal = ", ".join(dict.fromkeys((*own, *_DEFAULTS)))
                raise UsageError(f"{name!r} is no option here: use {legal}")
        watched = {**_DEFAULTS, **options}
        self._asked = checked(optimizer=None, on_hit="record", steps=self.steps, **watched)
        enabled()
        self.every: int = self.options.pop("every", 1)
        self._watch: Watch | None = None
        self.open()

    def open(self, model: nn.Module | None = None, *, compiled: bool = False) -> None:
        """A training begins; one that was left without a word is over.

        Raises:
            UsageError: when a pattern of `only` or `skip` fits no module of the model; when the model, or the trainer
                by what it does to it, is `compiled`, and will have run before the first step that is wanted, and the
                options do not say what to do then.
        """
        self.close()
        if model is not None and enabled():
            self._asked.looked_at(model)
        self.finding: Finding | None = None
        self.findings: list[Finding] = []
        self.struck = self.inside = False
        self._told: set[tuple[str | None, ...]] = set()
        compiled = compiled or (model is not None and any(map(is_compiled, model.modules())))
        late = self.steps is not None and self.steps[0] > 0
        if compiled and late and not self.idle and self.options.get("compiled", "error") == "error" and enabled():
            raise UsageError(
                "this model is compiled and will have run before the first step that is watched, and no check can be "
                'added to compiled code: use NanHuntCallback(compiled="eager") to run it eagerly while it is watched, '
                'or compiled="retrace" to have it compiled once more, with the checks'
            )

    def _wanted(self, step: int) -> bool:
        inside = self.steps is None or self.steps[0] <= step < self.steps[1]
        return inside and step % self.every == 0 and not self.idle

    def begin(
        self,
        model: nn.Module,
        optimizer: Any,
        now: Callable[[], int],
        tell: Callable[[Finding], object] = lambda finding: None,
    ) -> None:
        """A step begins.

        Args:
            model: what is trained.
            optimizer: the one optimizer, which a library may have wrapped; None where there are several.
            now: gives the trainer's count of steps that are done.
            tell: gets each fault, once for each place.
        """
        self.struck = False
        self.inside = self._wanted(now())
        if not self.inside:
            self.close()
            return
        self._now, self._tell = now, tell
        if self._watch is None:
            self._watch = watch(model, bare(optimizer), on_hit=self._hit, **self.options)
            self._watch._filing.told = self._now_of_trainer  # its capsules bear the trainer's steps
            self._read = 0
            self._marks: deque[tuple[int, int]] = deque(maxlen=8)
        self._mark()

    def end(self) -> None:
        """A step has ended, and the trainer has counted it."""
        if self._watch is None:
            return
        if self._wanted(self._now()):  # the next one, for which it stays
            self._gather()
        else:
            self.close()

    def close(self, error: BaseException | None = None) -> None:
        """Take all hooks off until a step begins; an `error` that the training ends with is told what was found.

        Raises:
            NonFiniteError: when the last look finds a fault, nothing else went wrong, and `on_hit` is `"raise"`.
        """
        running = self._watch
        if running is None:
            return
        try:
            if error is None:
                running.__exit__(None, None, None)
            else:
                running.__exit__(type(error), error, error.__traceback__)
        finally:
            self._gather()
            verdict = running.verdict and self._of_trainer(running.verdict)
            if verdict is not None and (self.finding is None or (self.finding.step or 0) >= (verdict.step or 0)):
                self.finding = verdict
            if error is not None:
                self._correct(error)
            self._watch = None
            del self._now, self._tell  # they hold the trainer

    def __getstate__(self) -> dict[str, Any]:
        """What a copy takes along: all but the watch that runs, which is of this process and this model."""
        return {key: value for key, value in vars(self).items() if key not in ("_now", "_tell")} | {"_watch": None}

    # --- steps of the watch and steps of the trainer ------------------------------------------------

    def _mark(self) -> None:
        """Note where the trainer is now: its steps and those of the watch need not go in pairs."""
        if self._watch is not None:
            here = self._watch.step, self._now()
            if not self._marks or self._marks[-1] != here:
                self._marks.append(here)

    def _of_trainer(self, finding: Finding) -> Finding:
        """The same with the trainer's step: that of the last mark at or before the step of the watch."""
        step = finding.step
        if step is None or not self._marks:
            return finding
        passed = [there for ours, there in self._marks if ours <= step]
        return dataclasses.replace(finding, step=passed[-1] if passed else self._marks[0][1])

    def _now_of_trainer(self, finding: Finding) -> Finding:
        self._mark()
        return self._of_trainer(finding)

    # --- what was found -----------------------------------------------------------------------------

    def _hit(self, finding: Finding) -> None:
        """What the watch does with a fault, while the step still runs."""
        self._mark()
        self._gather()
        self.struck = True
        fault = self._of_trainer(finding)
        if callable(self.on_hit):
            self.on_hit(fault)
        elif self.on_hit == "raise":
            raise NonFiniteError(fault)

    def _gather(self) -> None:
        """Take over what the watch has recorded since."""
        if self._watch is None:
            return
        new = self._watch.findings[self._read :]
        self._read += len(new)
        for finding in map(self._of_trainer, new):
            if len(self.findings) < KEPT:
                self.findings.append(finding)
            if finding.handled is None:
                self.struck = True
                self.finding = self.finding or finding
                self._announce(finding)

    def _announce(self, fault: Finding) -> None:
        """Say it so that nobody overlooks it: trainers leave a NaN out of the losses they log. Once for each place."""
        place = (fault.phase, fault.module, fault.kind, fault.tensor, fault.op)
        if place in self._told or len(self._told) >= KEPT:
            return
        first = not self._told
        self._told.add(place)
        files = self._written(fault)
        _log.error("%s%s", fault.title(), f" (see {files[0]})" if files else "")
        self._tell(fault)
        if self.on_hit == "stop" and first:
            print(f"\n{fault}\n", file=sys.stderr, flush=True)
        elif self.on_hit == "warn":
            warnings.warn(str(fault), NonFiniteWarning, stacklevel=2)

    def _written(self, fault: Finding) -> list[Path]:
        if self.report is None:
            return []
        rank = f"-rank{fault.rank}" if fault.rank is not None else ""
        stem, nth = f"step{fault.step}{rank}", 1
        while (Path(self.report) / f"{stem}.json").exists():
            nth += 1
            stem = f"step{fault.step}{rank}-{nth}"
        try:
            from ..report import html

            page = write_whole(Path(self.report) / f"{stem}.html", html.page(fault))
            return [page, write_whole(Path(self.report) / f"{stem}.json", fault.to_json(indent=1) + "\n")]
        except Exception as failure:  # a full disk, say, is no reason to end a training
            _log.error("the report of this fault could not be written: %s", failure)
            return []

    def _correct(self, error: BaseException) -> None:
        """What the watch has written on an exception names its own step: name the trainer's."""
        finding = getattr(error, "nanhunt_finding", None)
        if not isinstance(finding, Finding):
            return
        fault = self._of_trainer(finding)
        error.nanhunt_finding = fault  # type: ignore[attr-defined]
        notes = getattr(error, "__notes__", [])
        notes[:] = [note.replace(str(finding), str(fault)) for note in notes]


def bare(optimizer: Any) -> Any:
    """The torch optimizer inside what a library has wrapped around it; None when there is none to be seen."""
    while isinstance(getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = optimizer.optimizer
    return optimizer if isinstance(optimizer, torch.optim.Optimizer) else None


class Spanned:
    """What the callbacks for every trainer take, and what they tell: the trainer's events move the span."""

    def __init__(
        self,
        steps: tuple[int, int] | None = None,
        on_hit: OnHit = "raise",
        detail: str = "auto",
        report: str | os.PathLike[str] | None = None,
        monitor: Any = None,
        watch: bool = True,
        **options: Any,
    ) -> None:
        super().__init__()
        from .recording import Recording  # which asks this file for what a library has wrapped

        self._span = Span(steps=steps, on_hit=on_hit, report=report, detail=detail, idle=not watch, **options)
        self._recording = Recording(monitor)

    @property
    def finding(self) -> Finding | None:
        """The first fault of the last training, or None."""
        return self._span.finding

    @property
    def findings(self) -> list[Finding]:
        """All that was recorded in the last training, faults and what was none, at most 100."""
        return self._span.findings

    @property
    def monitor(self) -> Monitor | None:
        """The `Monitor` of the training that runs, or of the last one; None when none was asked for."""
        return self._recording.monitor
