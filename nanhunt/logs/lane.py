"""One rank of a log: which number each record has, which of them speak of one step, where the run began anew."""

from __future__ import annotations

from collections.abc import Iterable

from ..symptoms.steps import Step
from .entry import Entry
from .merging import again, apart, differ, is_sum, merge, step_of
from .spellings import whole


class Lane:
    """One rank: its numbers, and the record that may still be added to."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.spoke = False
        self.summed = 0
        self.pending: Entry | None = None
        self.number = 0  # of the pending record
        self.source = ""
        self.last: int | None = None  # the last number of the log's own
        self.numbered = False
        self.counting = False
        self.trained = False
        self.count = 0
        self.context: int | None = None
        self.epoch: int | None = None
        self.first_epoch: int | None = None
        self.raw: int | None = None
        self.offset = 0
        self.partial = False
        self.skips: float | None = None
        self.overflows = 0
        self.zero_based = False

    # ---- what comes in

    def event(self, entry: Entry) -> Iterable[Step]:
        """A message: it stands by itself, at the last number of the log."""
        out = list(self.flush())
        number = whole(entry.step)
        if self.numbered:
            if number is None or (self.last is not None and number < self.last):
                number = self.last
            self.last = number
        self.overflows += bool(entry.skips)
        out.append(self._step(entry, number))
        return out

    def add(self, entry: Entry) -> Iterable[Step]:
        """A record, or a line that only says where we are."""
        if not entry.speaks():
            if entry.places():
                self._place(entry)
            elif self.pending is not None and (entry.line or 0) - (self.pending.line or 0) <= 12:
                # A block of lines, one quantity on each.
                self.pending.lr = self.pending.lr or entry.lr
                if self.pending.loss_scale is None:
                    self.pending.loss_scale = entry.loss_scale
            return ()
        if (entry.summary and self.trained) or self._repeats_epoch(entry):
            entry.loss, entry.losses = None, {}
            if not entry.metrics and not entry.scores:
                return ()
        trains = not entry.validation and entry.trains()
        return self._training(entry) if trains or not self._checks(entry) else self._checking(entry)

    def flush(self) -> Iterable[Step]:
        """The record that was waiting."""
        if self.pending is None:
            return ()
        entry, self.pending = self.pending, None
        return (self._step(entry, self.number),)

    # ---- numbers

    def _place(self, entry: Entry) -> None:
        if (step := whole(entry.step)) is not None:
            self.context = step
        if (epoch := whole(entry.epoch)) is not None:
            self._enter(epoch)

    def _enter(self, epoch: int) -> None:
        if self.first_epoch is None:
            self.first_epoch = epoch
        self.epoch = epoch

    def _repeats_epoch(self, entry: Entry) -> bool:
        """A mean over the epoch, in a log that has told its steps one by one."""
        if not self.numbered or self.source == "epoch" or entry.step is not None or entry.batch is not None:
            return False
        return whole(entry.epoch) is not None and entry.loss is not None and not entry.grad_norm and self.trained

    def _checks(self, entry: Entry) -> bool:
        return bool(entry.validation or entry.metrics or entry.scores)

    def _numbered(self, entry: Entry) -> tuple[int, str]:
        """The number of a training record, and where it is from."""
        epoch = whole(entry.epoch)
        before = self.epoch
        if epoch is not None:
            self._enter(epoch)
        own = whole(entry.step)
        if own is not None:
            return self._lapped(own, before, same=self.pending is not None and apart(self.pending, entry)), "step"
        batch = whole(entry.batch)
        if batch is not None:
            total = whole(entry.batches)
            if total and batch < total:
                self.partial = True
            if total and not self.partial and self.epoch is not None:
                return self.epoch, "epoch"  # only whole epochs are told, as by Keras
            if total and self.epoch is not None:
                base = entry.base if entry.base is not None else 0 if not self.first_epoch else 1
                return (self.epoch - base) * total + batch, "batch"
            return self._lapped(batch, before, total), "batch"
        if self.context is not None:
            number, self.context = self.context, None
            return number, "context"
        # "resuming from step 500" numbers no records; a block of lines, one quantity on each, has one number.
        lone = self.source == "context" and self.count <= 1 and not self._in_block(entry)
        if self.numbered and self.source != "epoch" and self.last is not None and not self.counting and not lone:
            return self.last, "last"
        if epoch is not None and not self.counting:
            return epoch, "epoch"
        return self.count + 1, "count"

    def _in_block(self, entry: Entry) -> bool:
        """The line stands close behind the pending record, and says what that one does not."""
        pending = self.pending
        return pending is not None and (entry.line or 0) - (pending.line or 0) <= 12 and apart(pending, entry)

    def _lapped(self, raw: int, before: int | None, total: int | None = None, same: bool = False) -> int:
        """A number that begins anew with each epoch goes on instead."""
        if raw == 0:
            self.zero_based = True
        if self.raw is not None and raw <= self.raw and not (raw == self.raw and same):
            risen = self.epoch is not None and before is not None and self.epoch > before
            if risen:
                self.offset += self.raw + self.zero_based
            elif total and self.epoch is None and raw < self.raw:
                self.offset += total
            elif raw < self.raw and self.epoch is not None and before is not None and self.epoch < before:
                self.offset = 0
        self.raw = raw
        return self.offset + raw

    # ---- records

    def _training(self, entry: Entry) -> Iterable[Step]:
        self.spoke = True
        number, source = self._numbered(entry)
        pending = self.pending
        if source == "count" and pending is not None:
            if self._completes(pending, entry):
                return ()
            if again(pending, entry):  # told twice, the second time in full
                self.pending = entry
                return ()
        if pending is not None:
            if source == "last" or number == self.number:
                if merge(pending, entry):
                    self.trained = self.trained or not entry.summary
                    return ()
                if source == "epoch" and self.source == "epoch" and self.count <= 1:
                    # A second record of the first epoch: epochs are no numbers of records here.
                    self.counting, self.numbered, self.last = True, False, None
                    self.number, self.count, source = 1, 1, "count"
            elif source == "count" and self.source in ("context", "epoch") and self.count <= 1:
                self.counting, self.numbered, self.last = True, False, None
                self.number, self.count = 1, 1
            elif not self.trained and self.source == "count":
                self.number = self.count = 0  # an evaluation before the first step
        if source == "count":
            self.counting = True
            number = self.count + 1
        out = self.flush()
        self.count += 1
        if source in ("step", "batch") and self.last is not None and self.numbered and number < self.last:
            back = f"step numbers go back from {self.last} to {number}"
            entry.note = back if not entry.note else f"{entry.note}; {back}"
        if source != "count":
            self.last, self.numbered = number, True
        self.trained = self.trained or not entry.summary
        self.pending, self.number, self.source = entry, number, source
        return out

    def _checking(self, entry: Entry) -> Iterable[Step]:
        """A validation: it goes to the step that was last told, unless it names a later one."""
        self.spoke = True
        own, epoch = whole(entry.step), whole(entry.epoch)
        pending = self.pending
        self.context, context = None, self.context
        if own is None and context is not None and (self.last is None or context > self.last):
            own = context
        if entry.validation and self.trained and epoch is not None:
            own = None  # it may count the batches of the validation set
        if own is not None and (not self.numbered or self.last is None or own + self.offset >= self.last):
            number, source = own + (self.offset if self.trained else 0), "step"
        elif self.trained or (pending is not None and (epoch is None or epoch == self.number)):
            number, source = (self.number if pending is not None else self.last or self.count), self.source
            if not self.trained and pending is not None and not self._fresh(pending, entry):
                number, source = self.count + 1, "count"  # a log of nothing but validations
            if self.source == "epoch" and epoch is not None and epoch > number:
                number, source = epoch, "epoch"
        elif epoch is not None and not self.counting:
            number, source = epoch, "epoch"
        else:
            number, source = self.count + 1, "count"
        if pending is not None and number == self.number and merge(pending, entry):
            return ()
        out = self.flush()
        if not self.trained:
            self.count = max(self.count, number) if source == "count" else self.count + 1
        if source in ("step", "epoch") or self.numbered:
            self.last, self.numbered = number, True
        self.pending, self.number, self.source = entry, number, source
        return out

    def _fresh(self, pending: Entry, entry: Entry) -> bool:
        """The metrics are other ones than those that the pending record has."""
        has, more = {**pending.metrics, **pending.scores}, {**entry.metrics, **entry.scores}
        return not any(differ(has.get(name), value) for name, value in more.items())

    def _completes(self, pending: Entry, entry: Entry) -> bool:
        """Two lines that follow each other and say different things of one step, in a log without numbers."""
        if pending.line is None or entry.line is None or entry.line - pending.line > 3 or not apart(pending, entry):
            return False
        return merge(pending, entry)

    def _step(self, entry: Entry, number: int | None) -> Step:
        self.summed += is_sum(entry)
        skips = 0.0
        if entry.skips_so_far is not None:
            if self.skips is not None and not self.overflows:  # else messages have told of each one
                skips = entry.skips_so_far - self.skips
            self.skips, self.overflows = entry.skips_so_far, 0
        return step_of(entry, number, self.rank, skips)
