"""A step that is still being recorded: handles of numbers that may stand on a device, until they are read."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Any

import numpy as np
import torch

from .. import batches
from ..symptoms.steps import Step
from . import shares
from .gradients import norms, numbers_of
from .measured import Measured, Spectrum
from .readback import Numbers, Readback
from .updates import Update

Tensor = torch.Tensor
Name = Callable[[Tensor], str]

CLIPPED_SCALED = (
    "gradients were clipped while they were multiplied by the loss scale: clip_grad_norm_ ran before scaler.unscale_"
)


class Draft:
    """Collects one step; `step` makes the record, once everything it needs has been read.

    Attributes:
        number: of the step.
        wanted: False for a step that is only counted.
        sampled: whether the sampled numbers are taken in it.
        given: fields of the record that are known already.
        stepped: ids of the optimizers that have stepped in it; `tried`: those a scaler was asked to step.
        unscaled: ids of the optimizers whose gradients the scaler has divided by the loss scale.
        scaler: the one that multiplied its loss, or None.
        fused: an optimizer that skips by itself, on the device, was asked to step.
        over: it has ended, and waits for what may still be logged of it.
        held: the update was held back.
        closure: the optimizer calls for losses and gradients itself, several times.
    """

    def __init__(self, number: int, *, wanted: bool, sampled: bool, pack: bool = False) -> None:
        self.number, self.wanted, self.sampled = number, wanted, sampled
        self.given: dict[str, Any] = {}
        self.notes: list[str] = []
        self.stepped: list[int] = []
        self.tried: list[int] = []
        self.unscaled: set[int] = set()
        self.scaler: Any = None
        self.over = False
        self.held = self.closure = self.fused = self.counted = False
        self.scale_taken = False
        self.backwards = 0
        self.batch: batches.Picked = []
        self.reads = Readback(pack=pack)
        self.gradients = Measured(self.reads, sampled=sampled)
        self._losses: list[bool] = []  # whether each still has the loss scale in it
        self._rates: list[float | None] = []
        self._rated: set[int] = set()
        self._updates: dict[int, Update] = {}
        self._weights = 0
        self._dead: list[str] = []

    # --- what is taken while the step runs ----------------------------------------------------------

    def loss(self, tensor: Tensor, *, scaled: bool) -> None:
        """A tensor that a backward began on; several of one step are averaged."""
        if self.closure and self._losses:
            return  # of an optimizer that tries several points, the first is where it stood
        self.reads.add(("loss", len(self._losses)), tensor)
        self._losses.append(scaled)

    def forget_loss(self) -> None:
        """The last backward was none that fills gradients."""
        if self._losses:
            self._losses.pop()

    def forget_backwards(self) -> None:
        """The gradients so far were thrown away: those backwards, and the batch they saw, are no part of this step."""
        self._losses.clear()
        self.batch = []
        self.backwards = 0

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def clip(self, params: Iterable[Tensor], max_norm: float, total_norm: Any, *, scaled: bool) -> None:
        """Gradients that were measured are about to be scaled down together."""
        self.gradients.clip(params, max_norm, total_norm, scaled=scaled)
        if scaled:
            self.note(CLIPPED_SCALED)

    def rates(self, optimizer: torch.optim.Optimizer) -> None:
        """The learning rate of each group, as this step uses it; once for each optimizer."""
        if id(optimizer) in self._rated:
            return
        self._rated.add(id(optimizer))
        for group in optimizer.param_groups:
            rate = group.get("lr")
            if isinstance(rate, Tensor):
                self.reads.add(("lr", len(self._rates)), rate)
                self._rates.append(None)
            elif isinstance(rate, (int, float)):
                self._rates.append(float(rate))

    def scale(self, key: str, scale: Any) -> None:
        """The loss scale, before (`"scale"`) or after (`"scale_after"`) the scaler has decided."""
        if isinstance(scale, Tensor):
            self.reads.add(key, scale)
        elif scale is not None:
            self.reads.add(key, torch.tensor(float(scale), dtype=torch.float64))

    def before_update(self, optimizer: torch.optim.Optimizer, name: Name) -> None:
        if self.sampled:
            update = self._updates[id(optimizer)] = Update(len(self._updates), self.reads)
            update.before(optimizer, name)

    def after_update(self, optimizer: torch.optim.Optimizer, name: Name) -> None:
        """The weights as the update has left them: what moved, and whether all of them are finite."""
        update = self._updates.get(id(optimizer))
        if update is None:
            return
        if not self.held:
            update.after(optimizer, name)
        self.weights(p for group in optimizer.param_groups for p in group["params"])

    def weights(self, params: Iterable[Tensor]) -> None:
        """Take the norms of weights, which are finite when the weights are."""
        for _, made in norms([numbers for p in params if (numbers := numbers_of(p)) is not None]):
            self.reads.add(("weights", self._weights), made)
            self._weights += 1

    def outputs(self, dead: Iterable[tuple[str, Tensor]]) -> None:
        """Modules by name, and whether each gave out nothing but zeros (a tensor of one number)."""
        for name, zero in dead:
            self.reads.add(("dead", len(self._dead)), zero)
            self._dead.append(name)

    def bad_now(self, *, losses: bool = True) -> bool:
        """Whether a loss, or a gradient that no scaler looks after, is NaN or infinite; this waits for a device."""
        keys = self.gradients.keys() if self.scaler is None else []
        keys += [("loss", i) for i in range(len(self._losses))] if losses else []
        found = (self.reads.peek(key) for key in keys)
        return any(numbers is not None and not np.isfinite(numbers).all() for numbers in found)

    # --- what is made of it -------------------------------------------------------------------------

    def step(self, *, rank: int) -> tuple[Step, Spectrum | None]:
        """The record, and of a sampled step the gradients' exponents.

        Its `bad_weights` is -1 where some are bad and they have yet to be counted.
        """
        values = self.reads.values()
        scale = _one(values.get("scale"))
        fields = self.given
        if scale is not None:
            fields.setdefault("loss_scale", scale)
        after = _one(values.get("scale_after"))
        if after is not None:
            fields.setdefault("loss_scale_after", after)
        if self._losses:
            parts = [float(values["loss", i][0]) / (scale or 1.0 if s else 1.0) for i, s in enumerate(self._losses)]
            fields.setdefault("loss", sum(parts) / len(parts))
        rates = [float(values["lr", i][0]) if rate is None else rate for i, rate in enumerate(self._rates)]
        if rates:
            fields.setdefault("lr", tuple(rates))
        _fill(fields, self.gradients.norms(values, scale))
        self._skipped(fields)
        spectrum = self._sampled(values, scale, fields) if self.sampled else None
        if self._weights:
            fine = all(np.isfinite(values["weights", i]).all() for i in range(self._weights))
            fields.setdefault("bad_weights", 0 if fine else -1)
        dead = tuple(name for i, name in enumerate(self._dead) if values["dead", i][0])
        if dead:
            fields.setdefault("dead", dead)
        if self.notes:
            fields.setdefault("note", "; ".join(self.notes))
        if self.batch:
            fields.setdefault("batch", batches.digest(self._picked(values)))
        return Step(step=self.number, rank=rank, **fields), spectrum

    def take_batch(self, batch: batches.Picked) -> None:
        self.batch = batch
        for i, (_, _, numbers) in enumerate(batch):
            if not numbers.is_cpu:
                self.reads.add(("batch", i), numbers)

    def _picked(self, values: dict[Hashable, Numbers]) -> batches.Picked:
        """The batch's sample, on the host."""
        return [
            (name, shape, torch.from_numpy(values["batch", i].copy()) if ("batch", i) in values else numbers)
            for i, (name, shape, numbers) in enumerate(self.batch)
        ]

    def _skipped(self, fields: dict[str, Any]) -> None:
        if self.held:
            fields.setdefault("skipped", True)
        elif self.tried:
            missing = any(key not in self.stepped for key in self.tried)
            fields.setdefault("skipped", missing or (self.fused and not np.isfinite(fields.get("grad_norm", 0.0))))

    def _sampled(self, values: dict[Hashable, Numbers], scale: float | None, fields: dict[str, Any]) -> Spectrum | None:
        entries, spectrum = self.gradients.entries(values, scale, fields.get("autocast"))
        moved = shares.Moved()
        infinite = total = 0.0
        for update in self._updates.values():
            if not fields.get("skipped"):
                update.moved(values, moved)
            some, count = update.frozen(values)
            infinite, total = infinite + some, total + count
        known = {
            "zero_grads": entries.zero_share,
            "small_grads": entries.small_share,
            "update_ratio": moved.ratio,
            "lost_updates": moved.lost,
            "frozen": infinite / total if total else None,
        }
        _fill(fields, known)
        return spectrum


def _fill(fields: dict[str, Any], known: dict[str, Any]) -> None:
    """Take in what is known, where the program has not said otherwise."""
    for name, value in known.items():
        if value is not None:
            fields.setdefault(name, value)


def _one(numbers: Numbers | None) -> float | None:
    return None if numbers is None else float(numbers.reshape(-1)[0])
