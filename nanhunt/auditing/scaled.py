"""Rules for the order of a step: gradients carry the loss scale from backward until they are unscaled.

From pytorch#40907 and the AMP examples of torch ("gradient clipping": call unscale_ first).
"""

from __future__ import annotations

import os
import sys
from types import FrameType
from typing import Any

import torch
from torch.optim import Optimizer

from .. import sites
from ..numerics import fmt
from ..remarks import OUTSIDE, Sheet
from .ops import BACKWARD, Op

Tensor = torch.Tensor

_CLIP = os.path.join(os.path.dirname(torch.nn.__file__), "utils", "clip_grad.py")
_LIMITS = ("max_norm", "clip_value")  # what torch's clipping functions call their limit
_CLAMPS = frozenset("clamp clamp_min clamp_max clip".split())
_UNSCALES = "amp_foreach_non_finite_check_and_unscale_"


class Scaled:
    """Follows which gradients carry a loss scale, by the order of calls."""

    def __init__(self, sheet: Sheet, gradients: Any) -> None:
        self._sheet = sheet
        self._gradients = gradients  # gives the parameters
        self._scaler: Any = None  # has scaled a loss, and not been updated since
        self._after_backward = False
        self._inside_step = False  # of the scaler
        self._unscaled: set[int] = set()  # addresses of gradients

    # --- what happens -----------------------------------------------------------------------------

    def scaler(self, scaler: Any, what: str) -> None:
        """`what`: "scale", "step" or "update", and each with ":before" ahead of it."""
        if what == "scale" and scaler.is_enabled():
            if self._scaler is None:
                self._unscaled.clear()
            self._scaler = scaler
        elif what in ("step:before", "step"):
            self._inside_step = what == "step:before"
        elif what == "update":
            self._scaler, self._after_backward = None, False
            self._unscaled.clear()

    def backward_ended(self) -> None:
        self._after_backward = self._scaler is not None

    def optimizer(self, optimizer: Optimizer, after: bool) -> None:
        """An optimizer's step: the scaler's own is fine, a direct one is not unless `unscale_` came first."""
        if after or not self._carries() or self._inside_step:
            return
        grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        if not grads or any(grad.data_ptr() in self._unscaled for grad in grads):
            return
        scale = float(self._scaler.get_scale())
        decays = [float(group.get("weight_decay") or 0) for group in optimizer.param_groups]
        decay = f", weight_decay {fmt(max(decays))} counts for 1/{fmt(scale)} of what it should" if any(decays) else ""
        self._sheet.add(
            "step_before_unscale",
            "optimizer",
            f"{type(optimizer).__name__}.step() runs on gradients that still carry the loss scale of {fmt(scale)}: "
            f"SGD moves that many times too far, Adam divides it out but for its eps{decay}, and no step is skipped "
            "when one is Inf.",
            "call scaler.step(optimizer), which unscales, in its place.",
            at=sites.text(sites.user_site()),
        )

    def _carries(self) -> bool:
        return self._scaler is not None and self._after_backward

    # --- ops --------------------------------------------------------------------------------------

    def before(self, op: Op) -> None:
        if op.phase == BACKWARD or op.call is not None or not self._carries():
            return
        if op.run.schema.name.endswith(".default") and _UNSCALES in op.run.schema.name:
            self._unscaled.update(t.data_ptr() for t in op.run.tensors)
        elif not self._inside_step:
            self._clipped(op)

    def finish(self) -> None:
        """Nothing is open."""

    def after(self, op: Op) -> None:
        """Nothing: it is the order that counts."""

    def _clipped(self, op: Op) -> None:
        frame = _frame_of(_CLIP)
        if frame is None and op.base not in _CLAMPS:
            return
        carry = self._grads() - self._unscaled
        touched = {t.data_ptr() for t in op.run.tensors}
        if not touched & carry:
            return
        scale = float(self._scaler.get_scale())
        limit = _limit(frame) if frame is not None else next(iter(op.constants()), None)
        said = ""
        if limit is not None and scale:
            said = f": its limit of {fmt(limit)} is one of {fmt(limit / scale)} for the gradients themselves"
        self._sheet.add(
            "clip_before_unscale",
            OUTSIDE,
            f"gradients are clipped while they still carry the loss scale of {fmt(scale)}{said}. What is left after "
            "unscaling is next to nothing, and the model does not learn.",
            "call scaler.unscale_(optimizer) before clipping; scaler.step() then does not unscale again.",
            at=op.at,
        )

    def _grads(self) -> set[int]:
        return {p.grad.data_ptr() for p in self._gradients() if p.grad is not None}


def _frame_of(file: str) -> FrameType | None:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename == file:
            return frame
        frame = frame.f_back
    return None


def _limit(frame: FrameType) -> float | None:
    outer: FrameType | None = frame
    while outer is not None and outer.f_code.co_filename == _CLIP:
        for name in _LIMITS:
            value = outer.f_locals.get(name)
            if isinstance(value, (int, float)):
                return float(value)
        outer = outer.f_back
    return None
