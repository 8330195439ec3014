"""NaN and Inf in the record of a run: where they begin, and whether the loss rose before them."""

from __future__ import annotations

import dataclasses
import math

from ..numerics import fmt
from . import counsel
from .rises import Rise, Rises
from .scale_course import Fall, ScaleCourse
from .steps import Step, Symptom

# What programs say when they give up, in small letters, and what that means.
_GAVE_UP = (
    ("minimum loss scale", "scale"),
    ("already at minimum", "scale"),
    ("loss scale is at its minimum", "scale"),
    ("infinite or nan", "loss"),
    ("nan or inf", "loss"),
    ("loss is nan", "loss"),
    ("nan loss", "loss"),
    ("loss is exploding", "rise"),
    ("loss diverged", "rise"),
    ("floatingpointerror", "loss"),
)


class Breaks:
    """Takes every record; knows the rises of the loss and the course of the loss scale."""

    def __init__(self) -> None:
        self.rises = Rises()
        self.scale = ScaleCourse()
        self.isolated: list[Step] = []  # bad gradient norms that came and went
        self.isolated_count = 0
        self._healthy: Step | None = None  # the last record in which all was well
        self._norms: list[Step] = []  # records in a row with a bad gradient norm that nobody skipped
        self._zeros: list[Step] = []  # records in a row with a loss of exactly 0
        self._told: dict[str, Symptom] = {}
        self._broken = False  # the loss is NaN now
        self._calm = 0
        self._back: Step | None = None  # where the loss was finite again, after the NaN that was told
        self._records = 0
        self._metric_told = False
        self._rise: Rise | None = None  # that was told as an explosion, as far as it has got
        self._rise_ends: tuple[Step | None, Fall | None] = (None, None)

    def see(self, step: Step) -> list[Symptom]:
        """What this record makes certain."""
        # A message that says nothing of a step is no record.
        silent = step.loss is None and step.grad_norm is None and step.skipped is None and step.loss_scale is None
        fall = None if silent else self.scale.see(step)
        if self._rise is not None:
            self._follow(step, fall)
        gave_up = _gave_up(step)
        bad = step.bad()
        if step.loss is not None or step.grad_norm is not None:
            self._records += 1
        found: list[Symptom] = []
        if gave_up == "rise":
            found += self._exploded(step) or []
        elif set(bad) - {"grad_norm"} or gave_up == "loss":
            found += self._break(step, bad or ("loss",))
        elif fall is not None or gave_up == "scale":
            found += self._collapsed(fall or self.scale.fall(step, bottom=True))
        elif "grad_norm" in bad and not step.skipped and step.loss_scale is None:
            found += self._norm(step)
        else:
            found += self._hidden(step)
        if not found and step.metrics:
            found += self._metric(step)
        if step.loss is not None and set(bad) <= {"grad_norm"} and not self._zeros:
            found += self._well(step)  # the loss of a step that is skipped is as good as any
        return found

    def end(self) -> list[Symptom]:
        """No more comes: what was not yet certain is as certain as it will ever be."""
        if self._broken or self._told:
            return []
        if len(self._norms) >= 2:
            return self._break(self._norms[0], ("grad_norm",), form="gradient")
        if len(self._zeros) >= 5:
            return self._break(self._zeros[0], ("loss",), form="hidden")
        rise = self.rises.running(at_end=True)
        if rise is not None:
            return [self._explosion(rise, None)]
        if self.scale.falling >= 6 and self.scale.records > self.scale.falling:
            return self._collapsed(self.scale.fall())
        return []

    def retold(self, symptom: Symptom) -> Symptom:
        """A symptom as it looks now: an explosion has gone on since it was certain, a NaN may have passed."""
        if symptom is self._told.get("nan_inf") and self._back is not None and not self._broken:
            return self._passed(symptom, self._back)
        if symptom.name != "loss_explosion" or self._rise is None:
            return symptom
        now = self._explosion(self._rise, *self._rise_ends)
        return dataclasses.replace(now, seen=symptom.seen)

    def _passed(self, symptom: Symptom, back: Step) -> Symptom:
        held = symptom.first is not None and symptom.first.skipped
        why = "its update was not applied" if held else "one batch, or the run began anew from good weights"
        return dataclasses.replace(
            symptom,
            cause=f"{symptom.cause} All is finite again from {back.at()} on: {why}.",
            advice=counsel.ADVICE["one_batch"],
        )

    # --- what may have happened ---------------------------------------------------------------------------

    def _well(self, step: Step) -> list[Symptom]:
        fine = not step.skipped and not _bad(step.grad_norm)
        if self._norms and fine:
            self.isolated_count += len(self._norms)
            self.isolated += self._norms[: max(4 - len(self.isolated), 0)]
            self._norms = []
        if self._broken:
            self._calm = self._calm + 1 if fine else 0
            if self._calm == 1:
                self._back = step
            if self._calm < 3:
                return []
            self._broken = False
            self.rises.restart()
        rise = self.rises.see(step)
        if fine and rise is None and not self.rises.above:
            self._healthy = step
        if rise is None or "loss_explosion" in self._told:
            return []
        return [self._explosion(rise, None)]

    def _norm(self, step: Step) -> list[Symptom]:
        """A bad gradient norm beside a finite loss: a scaler may have skipped that step, if nothing follows."""
        self._norms.append(step)
        if step.loss == 0.0:
            return self._break(self._norms[0], ("grad_norm",), form="hidden")
        if len(self._norms) >= 4:
            return self._break(self._norms[0], ("grad_norm",), form="gradient")
        return []

    def _hidden(self, step: Step) -> list[Symptom]:
        """A loss of exactly 0 right after one that was not small: what a filter makes of a NaN."""
        if step.loss != 0.0 or step.grad_norm not in (None, 0.0):
            if step.loss is not None:
                self._zeros = []
            return []
        loss, last = self.rises.loss, self._healthy
        level = abs(loss.middle if loss else loss.first)
        # A hinge loss, or one that is printed with few digits, comes near 0 before it gets there.
        if last is None or not level >= 0.02 or self.rises.least < 0.1 * level:
            return []
        self._zeros.append(step)
        # With a gradient of 0 it may be all that is left to do, for a while: see `end`.
        sure = len(self._zeros) >= 3 and step.grad_norm is None
        return self._break(self._zeros[0], ("loss",), form="hidden") if sure else []

    def _metric(self, step: Step) -> list[Symptom]:
        bad = [name for name, value in step.metrics.items() if not math.isfinite(value) and "loss" in name.lower()]
        if not bad or self._metric_told or self._broken:
            return []
        self._metric_told = True
        return [
            self._symptom(
                "nan_inf",
                "metric",
                step,
                f"{bad[0]} is {fmt(step.metrics[bad[0]])} at {step.at()} while the training loss is finite.",
                f"{bad[0]} = {fmt(step.metrics[bad[0]])} at {step.at()}.",
                confidence="likely",
            )
        ]

    def _break(self, step: Step, bad: tuple[str, ...], form: str | None = None) -> list[Symptom]:
        norms, self._norms, self._zeros = self._norms, [], []
        begun, self._broken, self._calm = self._broken, True, 0
        if begun or "nan_inf" in self._told or "loss_explosion" in self._told:
            return []
        first = norms[0] if norms else step
        rise = self.rises.running()
        if rise is not None:
            return [self._explosion(rise, first)]
        return [self._nan(first, bad, form)]

    def _exploded(self, step: Step) -> list[Symptom]:
        if "loss_explosion" in self._told or self._broken:
            return []
        rise = self.rises.running()
        return [self._explosion(rise, None)] if rise is not None else []

    def _collapsed(self, fall: Fall) -> list[Symptom]:
        if self._broken or "nan_inf" in self._told or "loss_explosion" in self._told:
            return []
        rise = self.rises.running()
        if rise is not None:
            return [self._explosion(rise, None, fall)]
        first = fall.first
        falls = f" from {fmt(fall.high)} to {fmt(fall.low)}" if fall.high and fall.low is not None else ""
        return [
            self._symptom(
                "nan_inf",
                "scale_collapse",
                first,
                f"The gradients were not finite in {fall.skipped} steps in a row from {first.at()} on, at every loss "
                f"scale{falls}: this is no search for a scale, a real NaN or Inf is made at each step.",
                f"{fall.skipped} steps skipped in a row, the loss scale{falls or ' lowered each time'}.",
                "The loss stays finite and the weights stay as they are, because no step is applied."
                if not _bad(first.loss)
                else "",
                "Even the smallest scale overflows." if fall.bottom else "",
                confidence="certain" if fall.bottom else "likely",
                before=fall.before,
            )
        ]

    # --- in words -------------------------------------------------------------------------------------------

    def _follow(self, step: Step, fall: Fall | None) -> None:
        rise = self._rise
        assert rise is not None
        nan, fell = self._rise_ends
        if fall is not None:
            fell = fall
        if nan is None and fell is None and (set(step.bad()) - {"grad_norm"} or _gave_up(step) == "loss"):
            nan = step
        self._rise_ends = nan, fell
        if nan is None and step.loss is not None and step.loss > rise.peak:
            norm = step.grad_norm if step.grad_norm is not None and math.isfinite(step.grad_norm) else None
            peaks = [n for n in (rise.norm_peak, norm) if n is not None]
            self._rise = dataclasses.replace(
                rise, peak=step.loss, last=step, records=rise.records + 1, norm_peak=max(peaks) if peaks else None
            )

    def _nan(self, first: Step, bad: tuple[str, ...], form: str | None) -> Symptom:
        before = self._healthy
        if form is None:
            form = "from_start" if before is None else "weights" if bad == ("weights",) else "sudden"
        what = _what(first, bad)
        fell = (
            before is not None
            and before.loss_scale is not None
            and first.loss_scale is not None
            and first.loss_scale < before.loss_scale
        )
        grew = self._norms_before()
        where = first.at() if before is None else _between(before, first)
        cause = f"{what} from {first.at()} on"
        if form == "hidden":
            cause = f"The run is NaN from {first.at()} on: a loss of exactly 0 "
            cause += "stands for a NaN that the trainer's logging has filtered out, and is no convergence"
        elif form == "from_start":
            cause += ", the first record there is: the weights, the data or the first forward are bad"
        elif form == "gradient":
            cause += " while the loss is still finite: it was made in backward"
        elif form == "weights":
            cause += ": an update has spoiled the weights"
        else:
            cause += ", with no rise of the loss before it"
        cause += "."
        if fell and _bad(first.loss):
            assert before is not None
            cause += (
                f" The loss scale fell with it ({fmt(before.loss_scale)} to {fmt(first.loss_scale)}), but is not the "
                "cause: a step that the scaler skips cannot make the loss NaN. Look in forward, in the weights or in "
                "the data first."
            )
        if grew:
            cause += f" {grew}"
        return self._symptom(
            "nan_inf",
            form,
            first,
            cause,
            f"Born {where}." if before is not None else "",
            *_history(before, first),
            confidence="certain" if form not in ("hidden", "gradient") or _bad(first.grad_norm) else "likely",
        )

    def _norms_before(self) -> str:
        norm = self.rises.norm
        recent = [s.grad_norm for s, _, high in self.rises.recent(8) if high and s.grad_norm is not None]
        if not norm or len(recent) < 2:
            return ""
        return (
            f"The gradient norm had grown before it: {', '.join(fmt(n) for n in recent[-4:])}, after a level of "
            f"{fmt(norm.middle)}."
        )

    def _explosion(self, rise: Rise, nan: Step | None, fall: Fall | None = None) -> Symptom:
        if self._rise is None:
            self._rise, self._rise_ends = rise, (nan, fall)
        first, last = rise.first, rise.last
        ends = ""
        if nan is not None:
            ends = f" The {_value(nan)} at {nan.at()} is only the end of it."
        elif fall is not None and fall.low is not None:
            ends = f" The loss scale fell to {fmt(fall.low)} because the gradients explode: lowering it cannot help."
        norm = ""
        led = ""
        if rise.norm and rise.norm_peak is not None and rise.norm_peak > 2 * rise.norm:
            norm = f"Gradient norm {fmt(rise.norm)} before, up to {fmt(rise.norm_peak)} in the rise."
            led = ", the gradient norm with it"
        says = {
            "growth": f"The loss rises from {first.at()} on, from {fmt(rise.level)} to {fmt(rise.peak)}{led}",
            "level": f"The loss leapt from {fmt(rise.level)} to {fmt(rise.peak)} at {first.at()} and stays up",
            "slow": f"The loss has been rising slowly since {first.at()}, from {fmt(rise.level)} to {fmt(rise.peak)}",
        }[rise.form]
        lr = max(last.lr) if last.lr else None
        warm = first.lr and rise.before is not None and rise.before.lr and max(first.lr) > max(rise.before.lr) * 1.0001
        known = "" if lr is None else f" ({fmt(lr)}{', still growing' if warm else ''})"
        why = f"the learning rate{known} is too high"
        return self._symptom(
            "loss_explosion",
            rise.form,
            first,
            f"{says}: {why} for these gradients, or they are not clipped.{ends}",
            f"Loss {fmt(rise.level)} before {first.at()}, {fmt(last.loss)} at {last.at()} ({rise.records} records).",
            norm,
            *_history(rise.before, first),
            confidence="certain" if rise.sure or nan is not None else "likely",
            before=rise.before,
            seen=last,
        )

    def _symptom(
        self,
        name: str,
        form: str,
        first: Step,
        cause: str,
        *evidence: str,
        confidence: str,
        before: Step | None = None,
        seen: Step | None = None,
    ) -> Symptom:
        made = counsel.symptom(
            name,
            form,
            first,
            cause,
            evidence,
            confidence=confidence,
            before=before if before is not None else self._healthy,
            seen=seen or first,
        )
        self._told.setdefault(name, made)
        return made


def _gave_up(step: Step) -> str | None:
    if step.note is None:
        return None
    said = step.note.lower()
    return next((what for words, what in _GAVE_UP if words in said), None)


def _what(step: Step, bad: tuple[str, ...]) -> str:
    names = {"loss": "The loss", "grad_norm": "The gradient norm", "weights": "The weights"}
    if bad[0] == "weights":
        return "The weights are NaN or Inf"
    value = getattr(step, bad[0], None) if bad[0] in names else step.losses.get(bad[0])
    said = fmt(value) if _bad(value) else "NaN or Inf"
    return f"{names.get(bad[0], bad[0])} is {said}"


def _value(step: Step) -> str:
    """The bad number of a record, "NaN or Inf" where only a message tells of it."""
    known = [step.loss, *step.losses.values(), step.grad_norm]
    return next((fmt(value) for value in known if _bad(value)), "NaN or Inf")


def _history(before: Step | None, first: Step) -> list[str]:
    """The state before it, and with it."""
    lines = []
    for step, word in ((before, "Before it"), (first, "With it")):
        if step is None:
            continue
        known = {
            "loss": step.loss,
            "gradient norm": step.grad_norm,
            "loss scale": step.loss_scale,
            "lr": max(step.lr) if step.lr else None,
        }
        said = ", ".join(f"{name} {fmt(value)}" for name, value in known.items() if value is not None)
        if step.batch:
            said += f", batch {step.batch}"
        if said:
            lines.append(f"{word}, at {step.at()}: {said}.")
    return lines


def _between(before: Step, first: Step) -> str:
    if before.step is not None and first.step is not None and first.step - before.step > 1:
        return f"between {before.at()}, which was fine, and {first.at()}"
    return f"at {first.at()}"


def _bad(value: float | None) -> bool:
    return value is not None and not math.isfinite(value)
