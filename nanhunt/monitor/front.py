"""Front door: `Monitor`, the light record of every step and what it says of the run."""

from __future__ import annotations

import dataclasses
import math
import os
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .. import __version__, ambient, internals, ranks
from ..errors import NonFiniteWarning, SymptomError, UsageError, enabled
from ..finding import Finding
from ..symptoms.course import Course
from ..symptoms.steps import Step, Symptom
from .draft import Draft
from .holding import bad_weights
from .journal import Journal, of_rank
from .measured import Spectrum
from .pace import Pace
from .record import OnSymptom, Record
from .scales import Window, window
from .terms import SPOILED, checked, logged, measured, numbered, remarks, sharded

if TYPE_CHECKING:
    from .followup import FollowUp

_BEHIND = 2  # steps whose numbers may still be on their way from a device
_WATCHED = 3  # steps that the full watch looks at after an anomaly
_ERRORS = 100
_LOCAL = "Parameters are sharded: norms, shares and counts are of this rank's part"


class Monitor:
    """Records every step of a training in a few numbers, and says what is wrong with the run.

        with nanhunt.Monitor(model, optimizer, scaler, log="run.jsonl") as monitor:
            train(model, optimizer, scaler)  # your loop as it is
        print(monitor)

    It begins with the call; end it with the `with` block or `remove()`. Results are not changed, bit for bit. The
    loss is the tensor on which backward began, without the loss scale; the mean, where a step has several backwards.
    A step ends with the optimizer's step, or with the scaler's update, and its record is complete when the next one
    begins, or when `steps`, `symptoms` or `course()` are read. Numbers that stand on a device are copied once a step,
    and read when they have arrived: a step or two later.

    Args:
        model: the module that is trained; wrappers (DDP, FSDP) may be on it. Where parameters are sharded, all
            numbers are of this rank's part: there is never a collective.
        optimizer: a `torch.optim.Optimizer`, or a tuple of several; found as they are used when left out.
        scaler: a `torch.amp.GradScaler`; found as well.
        every: record each n-th step only; of the others nothing is looked at.
        sample: one recorded step in so many, and the first three, also takes the sampled numbers: the update-to-weight
            ratio, lost updates, zero and small gradients, second moments, whether weights are finite, dead
            activations. They are of up to 512 numbers of each tensor.
        log: a file for the record, a JSON line a step, appended; of several ranks each writes its own, `PATH.rank3`.
        ring: how many steps are kept in `steps`.
        on_symptom: `"warn"` (`SymptomWarning`), `"record"`, `"raise"` (`SymptomError`, when the next step begins), or
            a callable that gets each `Symptom`; once for each.
        hold: hold an update back whose loss or gradients are NaN or infinite while the weights are still good. A
            GradScaler does that by itself for gradients. One wait for the device in each recorded step.
        hunt: follow an anomaly up. With `run` the same batch is hunted through at once (which needs `hold`), else the
            full watch is opened for the next 3 steps, or as many as the number says. See `findings`.

    Attributes:
        held: numbers of the steps whose update was held back.
        errors: failures of the monitor itself; training went on, and they are told when it is removed.

    Raises:
        UsageError: for something that is not a module, an option that does not fit, or a file that cannot be written.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None = None,
        scaler: Any = None,
        *,
        every: int = 1,
        sample: int = 50,
        log: str | os.PathLike[str] | None = None,
        ring: int = 2000,
        on_symptom: OnSymptom = "warn",
        hold: bool = False,
        hunt: bool | int = False,
        _number: Callable[[], int] | None = None,
        _defer: bool = False,
    ) -> None:
        optimizers = checked(model, optimizer, scaler, every, sample, ring, on_symptom, hold, hunt)
        self._name = type(model).__name__
        self._quiet = on_symptom == "record"
        self._queue: deque[Draft] = deque()
        self._spectrum: tuple[Spectrum, float | None] | None = None
        self._alone = 0  # records that were only logged
        self._said: list[str] = []
        self._behind = 0 if not _defer else _BEHIND
        self._rank = ranks.rank() or 0
        self._record = Record(ring=ring, on_symptom=on_symptom, journal=None)
        self._pace: Pace | None = None
        self._followup: FollowUp | None = None
        self.held: list[int] = []
        self.errors: list[Exception] = []
        self._ended = False
        self._running = False  # a step of `run`
        self._anomaly: Step | None = None  # that is to be followed up
        if not enabled():
            return
        local = sharded(model)
        if local:
            self._said.append(_LOCAL)
            if hold:
                raise UsageError(
                    "hold=True: parameters are sharded here, and each rank would hold back by its own part alone"
                )
        if log is not None:
            header = {"nanhunt": __version__, "model": self._name, "rank": self._rank, "every": every}
            header |= {"sample": sample, "torch": str(torch.__version__), "began": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
            if local:
                header["local"] = True
            journal = Journal(of_rank(log, self._rank if ranks.together() else None), header)
            self._record = Record(ring=ring, on_symptom=on_symptom, journal=journal)
        if hunt:
            from .followup import FollowUp

            steps = _WATCHED if hunt is True else hunt
            self._followup = FollowUp(model, optimizers[0] if len(optimizers) == 1 else None, scaler, steps)
        with _unseen():
            self._pace = Pace(
                model,
                optimizers,
                scaler,
                self,
                guarded=self._guarded,
                every=every,
                sample=sample,
                hold=hold,
                number=_number,
                pack=_defer,
            )

    # --- what it tells ------------------------------------------------------------------------------

    @property
    def steps(self) -> tuple[Step, ...]:
        """The newest records, the newest last. Waits for numbers that are still on their way."""
        self._settle()
        return tuple(self._record.steps)

    @property
    def symptoms(self) -> tuple[Symptom, ...]:
        """What is wrong with the run so far; the first one is what it suffers from."""
        self._settle()
        return self._record.symptoms

    @property
    def finding(self) -> Finding | None:
        """The first fault that following an anomaly up has found (`hunt=`), or None."""
        return next((finding for finding in self.findings if finding.handled is None), None)

    @property
    def findings(self) -> tuple[Finding, ...]:
        """All that following anomalies up has found."""
        return tuple(self._followup.findings) if self._followup is not None else ()

    def course(self) -> Course:
        """The whole diagnosis of the run so far, with curves; it prints as a page."""
        self._settle()
        made = self._record.course(self._name)
        found = self.scale_window()
        safe = f"{found}." if found is not None and found.matters else None
        return dataclasses.replace(
            made,
            scale=" ".join(filter(None, (made.scale, safe))) or None,
            remarks=(*made.remarks, *remarks(self._said, self.held, self.findings)),
        )

    def __str__(self) -> str:
        return str(self.course())

    def _repr_html_(self) -> str:
        return self.course()._repr_html_()

    def scale_window(self, share: float = 1e-3, *, dtype: str | None = None) -> Window | None:
        """The loss scales that suit the gradients of the newest sampled step; None before there is one.

        Args:
            share: of the nonzero gradient entries, the part that may be rounded to zero.
            dtype: the format of the scaled gradients; by itself the narrowest that they were computed in.
        """
        self._settle()
        if self._spectrum is None:
            return None
        found, current = self._spectrum
        return window(
            found.histogram,
            found.absmax,
            dtype or found.dtype,
            current=current,
            share=share,
            largest=found.largest,
        )

    # --- what it is told ----------------------------------------------------------------------------

    def log(
        self,
        *,
        step: int | None = None,
        loss: Any = None,
        grad_norm: Any = None,
        lr: Any = None,
        loss_scale: Any = None,
        skipped: bool | None = None,
        batch: str | None = None,
        note: str | None = None,
        metrics: Mapping[str, Any] | None = None,
        **more: Any,
    ) -> None:
        """Add to the record of the step that runs, or has just ended, what only the program knows.

        In a loop in which nothing of a training is seen (no torch optimizer, no backward) each call with a `loss`
        or a `grad_norm` is a step of its own. Tensors of one number are read, which waits for a device.

        Args:
            step: the program's own number of the step.
            loss, grad_norm, lr, loss_scale, skipped: instead of what was seen.
            batch: what is known of the batch, such as an index or a hash.
            note: a few words.
            metrics, more: validation metrics by name; None is one that was not measured.

        Raises:
            UsageError: for something that is no number.
        """
        fields = logged(loss=loss, grad_norm=grad_norm, loss_scale=loss_scale, lr=lr, skipped=skipped, batch=batch)
        own, told = numbered(step), measured(metrics, more)
        if note is not None:
            note = str(note)
        if self._pace is None and not enabled():
            return
        if self._ended:
            raise UsageError("this monitor was removed: make a new one with nanhunt.Monitor(model)")
        if fields or told or note is not None or own is not None:
            self._guarded(self._logged, own, fields, told, note)

    def _logged(self, step: int | None, fields: dict[str, Any], metrics: dict[str, float], note: str | None) -> None:
        draft = self._pace.draft if self._pace is not None else None
        if draft is not None and (draft.wanted or not metrics):
            if step is not None:
                draft.number = step
            draft.given.update(fields)
            draft.given["metrics"] = {**draft.given.get("metrics", {}), **metrics}
            if note is not None:
                draft.note(note)
            return
        if metrics:
            fields["metrics"] = metrics
        if note is not None:
            fields["note"] = note
        own = step
        if own is None:
            own = self._record.last
            if own is None or (not (self._pace and self._pace.seen) and fields.keys() & {"loss", "grad_norm"}):
                own = self._alone
        self._alone = max(self._alone, own + 1)
        self._record.add(Step(step=own, rank=self._rank, **fields))

    def handed(self, *batch: Any) -> None:
        """What the next step is made of, where the model itself is not called with it: its hash goes in the record."""
        if self._pace is not None:
            self._guarded(self._pace.called, batch, {})

    def forward_in(self, dtype: str | None) -> None:
        """The dtype that autocast gives the forward, where the model does not show it; None when it does."""
        if self._pace is not None:
            self._pace.autocast = dtype

    def run(self, step: Callable[..., Any], *args: Any, restore: Iterable[Any] = (), **kwargs: Any) -> Any:
        """Run one step, and give what it returns; when its update had to be held back, hunt through it at once.

        The hunt runs the same step on the same batch, from the same random numbers, and everything it touches is put
        back; what it finds stands in `finding`. Buffers (running statistics) are as the bad forward has left them.

        Args:
            step: forward, loss, backward, optimizer step, called with the other arguments.
            restore: what else the step changes, as for `nanhunt.hunt`.

        Raises:
            UsageError: when the monitor was made without `hold=True` and `hunt=True`.
            Exception: what the step raises.
        """
        pace, followup = self._pace, self._followup
        if not enabled():
            return step(*args, **kwargs)
        if pace is None or followup is None or not pace.holds:
            raise UsageError(
                "run() hunts through a step whose update was held back: use Monitor(model, hold=True, hunt=True)"
            )
        before = ambient.random_state(pace.devices())
        held = len(self.held)
        self._running = True
        try:
            value = step(*args, **kwargs)
        finally:
            self._running = False
        if len(self.held) > held and not followup.findings:
            pace.aside = True
            try:
                found = followup.hunt(self.held[-1], before, step, args, kwargs, tuple(restore))
            finally:
                pace.aside = False
            self._announce(found)
        return value

    # --- life -----------------------------------------------------------------------------------------

    def __enter__(self) -> Monitor:
        if self._ended:
            raise UsageError("this monitor was removed: make a new one with nanhunt.Monitor(model)")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.remove()
        except SymptomError:
            if error is None:
                raise

    def remove(self) -> None:
        """Take every hook off and close the file. What was recorded stays.

        Raises:
            SymptomError: when `on_symptom` is "raise" and the end of the run shows a symptom.
        """
        if self._ended:
            return
        pace, self._pace = self._pace, None
        try:
            if pace is not None:
                self._guarded(pace.remove)
                self._guarded(self._drain, True)
            self._ended = True
            self._guarded(self._record.end)
            if self._followup is not None:
                found = len(self._followup.findings)
                self._guarded(self._followup.end)
                self._announce(*self._followup.findings[found:])
        finally:
            self._ended = True
            self._complain()

    def _complain(self) -> None:
        self._record.complain(stacklevel=3)
        if self.errors:
            first = self.errors[0]
            warnings.warn(
                f"nanhunt could not record everything: {len(self.errors)} internal error(s), the first "
                f"{type(first).__name__}: {first}. Training was not touched. Please report it.",
                NonFiniteWarning,
                stacklevel=3,
            )

    # --- what the pace calls ----------------------------------------------------------------------------

    def called(self) -> None:
        """The model is called for the next step: a watch that has looked at enough ends before it."""
        if self._followup is not None and self._pace is not None:
            found = len(self._followup.findings)
            self._followup.begins(self._pace.next())
            self._announce(*self._followup.findings[found:])

    def begins(self) -> None:
        """A step is about to begin."""
        self._drain(False)
        self.called()

    def turned(self, draft: Draft) -> None:
        """A step has ended: what follows an anomaly up begins with the next one."""
        if draft.held:
            self.held.append(draft.number)
        followup, pace = self._followup, self._pace
        if followup is not None and pace is not None and draft.wanted and not (draft.held and self._running):
            self._follow_up(followup, pace, draft)
        draft.reads.send()  # before the device is busy with the next step

    def _follow_up(self, followup: FollowUp, pace: Pace, draft: Draft) -> None:
        if draft.held or self._anomaly is not None or (not self._behind and draft.bad_now()):
            spoiled = not draft.held and bool(bad_weights(p for _, _, p in pace.names.parameters()))
            self._anomaly = None
            if not followup.findings:
                followup.open(pace.next(), spoiled=spoiled)
                if spoiled:
                    self._say(SPOILED)

    def done(self, draft: Draft) -> None:
        """Nothing more will be added to this draft."""
        if draft.wanted:
            draft.reads.send()
            self._queue.append(draft)
            self._drain(False)

    # --- records ----------------------------------------------------------------------------------------

    def _settle(self) -> None:
        if self._pace is not None:
            self._guarded(self._pace.close, running=False)
        self._guarded(self._drain, True)

    def _drain(self, everything: bool) -> None:
        """Make records of drafts whose numbers have arrived; with too many on their way, wait for the oldest."""
        while self._queue and (everything or len(self._queue) > _BEHIND or self._queue[0].reads.ready()):
            draft = self._queue.popleft()
            step, spectrum = draft.step(rank=self._rank)
            if self._pace is not None and step.loss_scale is not None:
                self._pace.scale = step.loss_scale_after or step.loss_scale
            if spectrum is not None and (self._spectrum is None or math.isfinite(spectrum.absmax)):
                self._spectrum = spectrum, step.loss_scale  # gradients that overflowed say nothing of the others
            anomaly = bool(set(step.bad()) - {"grad_norm"}) or (bool(step.bad()) and not step.skipped) or draft.held
            if self._pace is not None and (anomaly or step.bad_weights):
                step = dataclasses.replace(
                    step, bad_weights=bad_weights(p for _, _, p in self._pace.names.parameters())
                )
            if anomaly:
                self._anomaly = step
            self._record.add(step)

    def _announce(self, *findings: Finding | None) -> None:
        for finding in findings:
            if finding is not None and finding.handled is None and not self._quiet:
                warnings.warn(f"nanhunt followed the anomaly up:\n{finding}", NonFiniteWarning, stacklevel=2)

    def _say(self, text: str) -> None:
        if text not in self._said:
            self._said.append(text)

    def _guarded(self, event: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Nothing of ours reaches the program's modes, its graph or its control flow, but what is meant to."""
        try:
            with _unseen(), torch.no_grad():
                event(*args, **kwargs)
        except Exception as failure:
            if failure is self._record.theirs:
                raise
            if len(self.errors) < _ERRORS:
                self.errors.append(failure)


def _unseen() -> AbstractContextManager[None]:
    """The program's own modes do not see what is done inside."""
    return internals.unseen_by_modes() if internals.foreign_modes() else nullcontext()
