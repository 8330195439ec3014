"""Several lines of a log that speak of one step, put together, and the step they make."""

from __future__ import annotations

from ..symptoms.steps import Step
from .entry import Entry

_ONE_EACH = ("loss", "grad_norm", "clipped_norm", "loss_scale")
_LATEST = (*_ONE_EACH, "loss_scale_after", "skips", "skips_so_far", "nans")


def differ(has: float | None, more: float | None) -> bool:
    """Both are told, and they are not the same number (two NaN are)."""
    return has is not None and more is not None and has != more and not (has != has and more != more)


def apart(pending: Entry, entry: Entry) -> bool:
    """The two tell different quantities, none of them twice."""
    for name in _ONE_EACH:
        if getattr(pending, name) is not None and getattr(entry, name) is not None:
            return False
    return not (pending.losses.keys() & entry.losses.keys()) and not (pending.lr and entry.lr)


def again(pending: Entry, entry: Entry) -> bool:
    """The second line tells the first one's step once more, with the gradient norm that was missing.

    Some programs print their own line, rounded, before that of the trainer below them.
    """
    if pending.grad_norm is not None or entry.grad_norm is None or (entry.line or 0) - (pending.line or 0) > 2:
        return False
    if pending.epoch is None or pending.epoch != entry.epoch or len(pending.lr) != len(entry.lr):
        return False
    pairs = [(pending.loss, entry.loss), *zip(pending.lr, entry.lr)]
    return all(a is not None and b is not None and abs(a - b) <= 1e-3 * abs(b) + 1e-9 for a, b in pairs)


def merge(pending: Entry, entry: Entry) -> bool:
    """Adds what a second line says of the same step; False, and nothing added, when the two contradict each other."""
    estimate = not entry.validation and differ(pending.loss, entry.loss)
    if estimate and not _estimates(pending, entry) and not _estimates(entry, pending):
        return False
    if any(differ(getattr(pending, name), getattr(entry, name)) for name in _ONE_EACH[1:]):
        return False
    if any(differ(pending.losses.get(name), value) for name, value in entry.losses.items()):
        return False
    if estimate:
        # A mean over some batches, told beside the validation loss; the step's own stands in a line of its own.
        less = pending if _estimates(pending, entry) else entry
        if less.loss is not None:
            less.metrics = {**less.metrics, "train loss": less.loss}
        less.loss = None
    for name in _LATEST:
        if (more := getattr(entry, name)) is not None:
            setattr(pending, name, more)
    for name in ("losses", "metrics", "scores"):
        if more := getattr(entry, name):
            setattr(pending, name, {**getattr(pending, name), **more})
    pending.lr = pending.lr or entry.lr
    pending.silent = pending.silent or entry.silent
    pending.validation = pending.validation and entry.validation
    pending.summary = pending.summary and entry.summary
    return True


def is_sum(entry: Entry) -> bool:
    """It gives parts of a loss and no total."""
    return entry.loss is None and len(entry.losses) > 1 and not entry.event


def step_of(entry: Entry, number: int | None, rank: int, skips: float) -> Step:
    """The step that an entry tells.

    Args:
        entry: all that is known of it.
        number: of the step.
        rank: who told it.
        skips: steps that were skipped since the last record, where only their count so far is printed.
    """
    skipped = None if entry.skips is None else entry.skips > 0
    loss, losses, metrics, note = entry.loss, entry.losses, entry.metrics, entry.note
    if entry.scores and (loss is None or metrics):
        metrics = {**metrics, **entry.scores}
    if loss is None and losses and not entry.event:
        loss, losses = sum(losses.values()), losses if len(losses) > 1 else {}
    if skips > 0:
        skipped, note = True, note or f"{skips:.0f} steps were skipped since the last line"
    if entry.nans:
        losses = {**losses, "nan iterations": float("nan")}
        note = note or f"the loss of {entry.nans:.0f} iterations was not finite"
    if entry.silent and loss is None:
        loss = float("nan")
        note = note or "no loss is printed: this format leaves out one that is not above 0, such as NaN"
    return Step(
        step=number,
        line=entry.line,
        rank=rank,
        loss=loss,
        losses=losses,
        grad_norm=entry.grad_norm,
        clipped_norm=entry.clipped_norm,
        lr=entry.lr,
        loss_scale=entry.loss_scale,
        loss_scale_after=entry.loss_scale_after,
        skipped=skipped,
        metrics=metrics,
        note=note,
    )


def _estimates(one: Entry, other: Entry) -> bool:
    return bool(one.metrics) and not other.metrics and one.grad_norm is None
