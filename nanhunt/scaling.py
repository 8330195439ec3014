"""The loss scale: which bad gradients a GradScaler is about to handle, and which no scale can cure."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from . import probe
from .verdict import Origin

if TYPE_CHECKING:
    from .judge import Judge

_GAIN = 256.0  # more than the largest derivative of a healthy module
_FLOAT16_MAX = 65504.0
_OF_SIZE = ("overflow", "loss_scale", "unknown")  # causes that a smaller scale may take away


class Scaling:
    """Holds an overflow back until the scaler has decided.

    A scaler that is finding its scale skips steps, nine of them may be healthy: that is no fault. Three things
    are: weights moved by such gradients, an overflow at scale 1, and a bad value that has another cause than size.
    """

    def __init__(self, judge: Judge) -> None:
        self._judge = judge
        self.scaler: Any = None  # the one that scaled the loss of this step
        self.pending: list[Origin] = []
        self._finite_before: dict[int, bool] = {}  # id of a scaled loss -> the loss itself was finite
        self._scale = math.nan

    def event(self, scaler: Any, what: str, given: Any, out: Any) -> None:
        """`what`: "scale", "step" or "update", and each with ":before" ahead of it."""
        if what == "scale" and scaler.is_enabled():
            self.scaler = scaler
            self._judge.has_optimizer = True  # the step ends when the scaler is updated
            if isinstance(given, torch.Tensor) and isinstance(out, torch.Tensor) and given.device.type == "cpu":
                numbers = probe.payload(given)
                self._finite_before = {id(out): numbers is not None and not probe.bad(*probe.limits(numbers))}
        elif what == "update:before" and scaler is self.scaler:
            self._judge.observer.drain()
            if self.pending:
                self._scale = float(scaler.get_scale())
        elif what == "update" and scaler is self.scaler:
            self._decide()
            self.scaler = None
            self._judge.turn()

    def made_it(self, loss: torch.Tensor) -> bool:
        """True when this loss was finite until the scaler multiplied it."""
        return self._finite_before.get(id(loss), False)

    def holds(self, origin: Origin) -> bool:
        """Take an origin in, if its fate is the scaler's to decide."""
        if origin in self.pending:
            return True
        if self.scaler is None or origin.phase != "backward" or not self._curable(origin):
            return False
        self.pending.append(origin)
        return True

    def _curable(self, origin: Origin) -> bool:
        """True when a smaller loss scale might help: what came in was large enough to overflow on its way through.

        A derivative that is undefined (sqrt at 0) gives an infinity whatever comes in; one that is defined adds
        up what came in, each part multiplied by so much at most. The op level knows which it was. A parameter's
        gradient sums over the whole batch as well: there only the scale can tell, once it has fallen to 1.
        """
        known = origin.facts.get("op_level")
        if known is not None:
            return known["phase"] == "backward" and known["cause"] in _OF_SIZE
        if origin.facts.get("scaled") or origin.tensor.startswith("grad of"):
            return True
        incoming = origin.call.incoming if origin.call is not None else float(self.scaler.get_scale())
        half = torch.float16 in self._judge.observer.dtypes
        limit = _FLOAT16_MAX if half else torch.finfo(torch.float32).max
        return not 0.0 < incoming * _GAIN < limit

    def _decide(self) -> None:
        pending, self.pending = self.pending, []
        for origin in pending:
            # An optimizer that moved weights with such gradients has shown in the weights by now; another one, whose
            # gradients were fine, may well have been let through.
            origin.facts["loss_scale"] = self._scale
            if self._scale <= 1.0:
                self._judge.confirm(origin)
            else:
                self._judge.clear(origin, "loss_scale")

    def end_step(self) -> None:
        for origin in self.pending:
            self._judge.clear(origin, "loss_scale")
        self.pending.clear()
        self._finite_before.clear()
