"""Runs that stand still: gradients that vanish, updates that are lost, a loss that does not move."""

from __future__ import annotations

import math
from collections import deque

from ..numerics import fmt
from . import counsel
from .headway import LOW, Headway
from .levels import median
from .steps import Step, Symptom

_TINY = 1e-6  # a gradient norm below it for long: the method's own border
_NOTHING = 1e-8  # an update that is smaller than this part of the weights
_LONG = 10  # records that make "for long"


class Stillness:
    """Takes records with a finite loss; each form is told once."""

    def __init__(self) -> None:
        self._told: set[str] = set()
        self._runs: dict[str, list[Step]] = {}  # form -> the first and the last record in which it held
        self._lengths: dict[str, int] = {}
        self._holds = {form: getattr(self, f"_is_{form}") for form in _FORMS}
        self._norms: list[float] = []  # the first few
        self._usual = math.nan  # the median of these
        self._products: deque[float] = deque(maxlen=8)
        self._way = Headway()

    def see(self, step: Step) -> list[Symptom]:
        """What this record makes certain."""
        self._note(step)
        sampled = step.update_ratio is not None or step.small_grads is not None or step.lost_updates is not None
        forms = _FORMS if sampled or step.dead or step.faint is not None or step.frozen is not None else _EVERY_STEP
        found = [symptom for form in forms for symptom in self._held(form, step)]
        if not found and not self._told and self._way.records in _LOOKS:
            found = [symptom for symptom in self._way.plateau() if symptom.confidence != "possible"]
            self._told.update(symptom.form for symptom in found)
        return found

    def end(self) -> list[Symptom]:
        """What only the whole run tells: the loss has not moved, or no step was long enough to be sure before."""
        found = self._short_of_long()
        if not found and not self._told:
            found = self._way.plateau()
        return found

    def _note(self, step: Step) -> None:
        self._way.see(step)
        norm = step.grad_norm
        if norm is not None and math.isfinite(norm) and norm > 0 and len(self._norms) < 8:
            self._norms.append(norm)
            self._usual = median(self._norms)

    # --- forms -------------------------------------------------------------------------------------------

    def _held(self, form: str, step: Step) -> list[Symptom]:
        if form in self._told:
            return []
        holds, counts = self._holds[form](step)
        if not counts:
            return []
        if not holds:
            if form in self._runs:
                del self._runs[form], self._lengths[form]
            return []
        run = self._runs.setdefault(form, [step, step])
        run[1] = step
        self._lengths[form] = self._lengths.get(form, 0) + 1
        if self._lengths[form] < (_FORMS[form] if form != "no_lr" else self._idle()):
            return []
        return self._tell(form, run[0], step)

    def _tell(self, form: str, first: Step, last: Step) -> list[Symptom]:
        self._told.add(form)
        made: Symptom = getattr(self, f"_say_{form}")(first, last)
        return [made]

    def _short_of_long(self) -> list[Symptom]:
        """What the log ends with, or a log of a few lines in all of which the same is wrong."""
        for form in ("no_gradient", "tiny"):
            length = self._lengths.get(form, 0)
            if form not in self._told and (length >= 5 or 3 <= length >= self._way.records - 1):
                return self._tell(form, *self._runs[form])
        return []

    def _is_no_gradient(self, step: Step) -> tuple[bool, bool]:
        norm = step.grad_norm
        return norm == 0.0 and not self._way.done(step), norm is not None and (norm == 0.0 or not step.skipped)

    def _is_tiny(self, step: Step) -> tuple[bool, bool]:
        norm = step.grad_norm
        holds = norm is not None and 0.0 < norm < _TINY and not self._way.learned()
        return holds, norm is not None and not step.skipped

    def _is_saturated(self, step: Step) -> tuple[bool, bool]:
        norm = step.grad_norm
        if norm is None or len(self._norms) < 5 or step.skipped:
            return False, False
        return norm < 1e-4 * self._usual and not self._way.learned(), True

    def _is_under_scaled(self, step: Step) -> tuple[bool, bool]:
        half = step.autocast == "float16" or "float16" in step.dtypes
        if step.small_grads is None or not half or step.skipped:
            return False, False
        much = step.small_grads > 0.4 and self._way.stands()
        if step.loss_scale is None or step.loss_scale <= 1.0:
            return much, True  # small numbers are what a loss scale is for
        return much and not self._way.done(step), True

    def _is_frozen(self, step: Step) -> tuple[bool, bool]:
        return bool(step.frozen), step.frozen is not None

    def _is_clipped_before_unscale(self, step: Step) -> tuple[bool, bool]:
        scale, norm = step.loss_scale, step.clipped_norm
        if step.clipped_scaled is False:  # it is known to have been in order: max_norm is that small
            self._products.clear()
            return False, True
        if norm is None:  # a log: what is clipped is what is logged
            norm = step.grad_norm
        elif step.grad_norm is not None and norm > 0.5 * step.grad_norm:
            self._products.clear()
            return False, True
        if scale is None or norm is None or scale < 64 or step.skipped or not norm > 0 or not math.isfinite(norm):
            return False, False
        self._products.append(norm * scale)
        middle = median(self._products)
        even = all(abs(p / middle - 1) < 0.02 for p in self._products)
        return even and 1e-3 <= middle <= 1e3 and norm < 1e-2, True

    def _is_cut_off(self, step: Step) -> tuple[bool, bool]:
        if step.faint is None or step.skipped:
            return False, False
        return step.faint > 0.3 and not step.dead and not self._way.learned(), True

    def _is_dead(self, step: Step) -> tuple[bool, bool]:
        return bool(step.dead), step.small_grads is not None or bool(step.dead)

    def _is_lost_updates(self, step: Step) -> tuple[bool, bool]:
        lost = step.lost_updates
        low = any(dtype in LOW or dtype.startswith("float8") for dtype in step.dtypes)
        if lost is None or step.skipped or (step.lr and not any(step.lr)):
            return False, False
        return low and lost >= 0.5 and self._way.stands(), True

    def _is_tiny_updates(self, step: Step) -> tuple[bool, bool]:
        ratio = step.update_ratio
        if ratio is None or step.skipped or not any(step.lr):
            return False, False
        reason = step.grad_norm is None or step.grad_norm > 1e-5  # without a gradient there is nothing to update by
        return ratio < _NOTHING and reason and not self._way.learned(), True

    def _is_clipped_to_nothing(self, step: Step) -> tuple[bool, bool]:
        norm, left = step.grad_norm, step.clipped_norm
        if norm is None or left is None or step.skipped:
            return False, False
        return left < 1e-4 * min(norm, 1.0) and not self._way.learned(), True

    def _is_no_lr(self, step: Step) -> tuple[bool, bool]:
        return not any(step.lr), bool(step.lr) and not step.skipped

    def _idle(self) -> int:
        """Records at a learning rate of 0 that are too many: where it was more, longer than the training until then."""
        if self._way.lr_most == 0.0:
            return _FORMS["no_lr"]
        return max(100, self._way.records - self._lengths["no_lr"])

    # --- in words -----------------------------------------------------------------------------------------

    def _symptom(
        self, name: str, form: str, first: Step, last: Step, cause: str, *evidence: str, confidence: str
    ) -> Symptom:
        return counsel.symptom(name, form, first, cause, evidence, confidence=confidence, seen=last)

    def _say_no_gradient(self, first: Step, last: Step) -> Symptom:
        idle = bool(last.lr) and not any(last.lr) and self._way.lr_most == 0.0
        why = (
            "and the learning rate is 0: no step is applied (a scaler that skips every step, or nothing to train)"
            if idle
            else "and no gradient reaches the weights: the loss is cut off, all is skipped, or all units are dead"
        )
        return self._symptom(
            "vanishing_gradient",
            "no_gradient",
            first,
            last,
            f"The gradient norm is exactly 0 from {first.at()} on {why}.",
            f"Gradient norm 0 in {self._lengths['no_gradient']} records, from {first.at()} to {last.at()}.",
            self._way.sentence(),
            confidence="certain",
        )

    def _say_tiny(self, first: Step, last: Step) -> Symptom:
        scaled = last.loss_scale
        why = "saturated or dead activations, or a depth that the gradient does not survive"
        if last.autocast == "float16" or "float16" in last.dtypes or (scaled is not None and scaled > 1):
            why = "the loss scale is too small for float16, or the activations are saturated"
        return self._symptom(
            "vanishing_gradient",
            "tiny",
            first,
            last,
            f"The gradient norm is below {fmt(_TINY)} from {first.at()} on while the loss stands: {why}.",
            f"Gradient norm {fmt(first.grad_norm)} at {first.at()}, {fmt(last.grad_norm)} at {last.at()}.",
            f"Loss scale {fmt(scaled)}." if scaled is not None else "",
            self._way.sentence(),
            confidence="likely",
        )

    def _say_saturated(self, first: Step, last: Step) -> Symptom:
        return self._symptom(
            "vanishing_gradient",
            "saturated",
            first,
            last,
            f"The gradient norm fell from {fmt(self._usual)} to {fmt(last.grad_norm)} while the loss stands: "
            "the activations have saturated or died.",
            f"Gradient norm {fmt(first.grad_norm)} at {first.at()}, {fmt(last.grad_norm)} at {last.at()}.",
            self._way.sentence(),
            confidence="likely",
        )

    def _say_under_scaled(self, first: Step, last: Step) -> Symptom:
        assert last.small_grads is not None
        scale = "no loss scale" if last.loss_scale is None else f"loss scale {fmt(last.loss_scale)}"
        return self._symptom(
            "vanishing_gradient",
            "under_scaled",
            first,
            last,
            f"{last.small_grads:.0%} of the gradients are too small for float16 with {scale}: they lose digits or "
            "become 0.",
            f"Share of gradients below float16's smallest normal, 6.1e-5: {last.small_grads:.1%} at {last.at()}"
            + (f", zeros {last.zero_grads:.1%}." if last.zero_grads is not None else "."),
            self._way.sentence(),
            confidence="certain",
        )

    def _say_frozen(self, first: Step, last: Step) -> Symptom:
        assert last.frozen is not None
        return self._symptom(
            "vanishing_gradient",
            "frozen",
            first,
            last,
            f"{last.frozen:.1%} of the optimizer's second moments are infinite since {first.at()}: these weights get "
            "an update of 0 for ever. A gradient was so large that its square overflowed.",
            f"Infinite second moments: {first.frozen or 0:.2%} at {first.at()}, {last.frozen:.2%} at {last.at()}.",
            self._way.sentence(),
            confidence="certain",
        )

    def _say_clipped_before_unscale(self, first: Step, last: Step) -> Symptom:
        limit = median(self._products)
        norm = last.clipped_norm if last.clipped_norm is not None else last.grad_norm
        whole = f" (before clipping {fmt(last.grad_norm)})" if last.clipped_norm is not None else ""
        return self._symptom(
            "vanishing_gradient",
            "clipped_before_unscale",
            first,
            last,
            f"The gradients were clipped to {fmt(limit)} while they were still multiplied by the loss scale: what "
            f"reaches the optimizer has a norm of {fmt(norm)}.",
            f"Norm after clipping {fmt(norm)}{whole}, times the loss scale {fmt(last.loss_scale)} = {fmt(limit)}, the "
            f"same in each of {len(self._products)} records.",
            self._way.sentence(),
            confidence="certain",
        )

    def _say_dead(self, first: Step, last: Step) -> Symptom:
        return self._symptom(
            "vanishing_gradient",
            "dead",
            first,
            last,
            f"{', '.join(last.dead[:3])}: only zeros come out since {first.at()}, so no gradient passes through.",
            f"Zero in every sampled step from {first.at()} to {last.at()}.",
            self._way.sentence(),
            confidence="likely",
        )

    def _say_cut_off(self, first: Step, last: Step) -> Symptom:
        assert last.faint is not None
        return self._symptom(
            "vanishing_gradient",
            "cut_off",
            first,
            last,
            f"{last.faint:.0%} of the weights have gradients a million times smaller than the rest: they are not "
            "trained, the gradient dies on its way back to them.",
            f"Share of such weights: {first.faint or 0:.0%} at {first.at()}, {last.faint:.0%} at {last.at()}; gradient "
            f"norm of all weights {fmt(last.grad_norm)}.",
            self._way.sentence(),
            confidence="likely",
        )

    def _say_lost_updates(self, first: Step, last: Step) -> Symptom:
        assert last.lost_updates is not None
        dtype = next((d for d in last.dtypes if d in LOW or d.startswith("float8")), "low-precision")
        return self._symptom(
            "non_convergence",
            "lost_updates",
            first,
            last,
            f"The weights are {dtype}, and {last.lost_updates:.0%} of the updates are below half an ulp of their "
            "weight: they are rounded away.",
            f"Weights that an update did not change although their gradient was not 0: {last.lost_updates:.0%} at "
            f"{last.at()}.",
            f"Learning rate {fmt(max(last.lr))}." if last.lr else "",
            self._way.sentence(),
            confidence="certain",
        )

    def _say_tiny_updates(self, first: Step, last: Step) -> Symptom:
        return self._symptom(
            "non_convergence",
            "tiny_updates",
            first,
            last,
            f"An update changes the weights by {fmt(last.update_ratio)} of their size only: the learning rate"
            + (f" ({fmt(max(last.lr))})" if last.lr else "")
            + " is far too small.",
            f"Size of an update over that of the weights: {fmt(first.update_ratio)} at {first.at()}, "
            f"{fmt(last.update_ratio)} at {last.at()}; about 1e-3 is usual.",
            self._way.sentence(),
            confidence="likely",
        )

    def _say_clipped_to_nothing(self, first: Step, last: Step) -> Symptom:
        return self._symptom(
            "non_convergence",
            "clipped_to_nothing",
            first,
            last,
            f"Clipping leaves {fmt(last.clipped_norm)} of a gradient norm of {fmt(last.grad_norm)}: next to nothing "
            "reaches the weights.",
            f"Gradient norm {fmt(first.grad_norm)} at {first.at()}, after clipping {fmt(first.clipped_norm)}.",
            self._way.sentence(),
            confidence="likely",
        )

    def _say_no_lr(self, first: Step, last: Step) -> Symptom:
        return self._symptom(
            "non_convergence",
            "no_lr",
            first,
            last,
            f"The learning rate is 0 from {first.at()} on: nothing is trained"
            + (", though the run goes on: the schedule is over." if self._way.lr_most else "."),
            f"Learning rate 0 in {self._lengths['no_lr']} records.",
            self._way.sentence(),
            confidence="certain",
        )


# Records after which a loss that has not moved is told while the run goes on, where more speaks for it.
_LOOKS = {512 * 2**n for n in range(20)}

# Form -> how many records in a row make it certain.
_FORMS = {
    "no_gradient": 5,
    "tiny": _LONG,
    "saturated": 20,
    "under_scaled": 3,
    "frozen": 1,
    "clipped_before_unscale": 4,
    "dead": 3,
    "cut_off": 3,
    "lost_updates": 3,
    "no_lr": 10,
    "tiny_updates": 3,
    "clipped_to_nothing": 20,
}

# Those that show in numbers which every record may have.
_EVERY_STEP = ("no_gradient", "tiny", "saturated", "clipped_before_unscale", "no_lr", "clipped_to_nothing")
