"""Gradients of parameters as they arrive: large ones looked at on the spot, small ones together."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import nn

from . import probe
from .internals import batched
from .moved import is_small
from .ranks import grouped, together

if TYPE_CHECKING:
    from .observer import Observer

_INF = math.inf


class Arrivals:
    """Hangs on parameters; what has arrived is told to the judge before anything that comes after it."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self.largest = 0.0  # |number| of them in this step; infinity when it is not known
        self.sizes: dict[int, float] = {}  # of each parameter, among several ranks: what goes into the all-reduce
        self._several = False
        self._small: dict[int, tuple[str, nn.Parameter]] = {}  # those that are looked at together, by id
        self._waiting: list[nn.Parameter] = []

    def hook(self, name: str, param: torch.Tensor) -> Callable[[torch.Tensor], None]:
        """What to hang on a parameter, to be called when its gradient has been added up.

        Small ones are only noted, by a hook that runs no Python. Not where somebody may change the gradient before
        it is looked at: a hook of the user, an all-reduce.
        """
        if isinstance(param, nn.Parameter) and not self._alone(param):
            self._small[id(param)] = name, param
            return self._waiting.append  # type: ignore[return-value]
        return functools.partial(self.on_parameter, name)

    def _alone(self, param: torch.Tensor) -> bool:
        return (
            self._observer.deferring
            or not is_small(param)
            or len(getattr(param, "_post_accumulate_grad_hooks", None) or ()) > 0
            or grouped()
        )

    def backward_begins(self) -> None:
        """Where a hook of somebody's stands behind ours by now, the gradient must be looked at before it runs."""
        self._waiting.clear()
        self._several = together()
        attachment = self._observer.attachment
        if not self._small or attachment is None:
            return
        several = grouped()
        for key, (name, p) in list(self._small.items()):
            if several or len(p._post_accumulate_grad_hooks or ()) > 1:
                del self._small[key]
                attachment.instead(p, functools.partial(self.on_parameter, name))

    def on_parameter(self, name: str, param: torch.Tensor) -> None:
        if self._observer.on and param.grad is not None:
            self._observer.guarded(self._look, name, param, param.grad)

    def _look(self, name: str, param: torch.Tensor, grad: torch.Tensor) -> None:
        observer, judge = self._observer, self._observer.judge
        judge.touched.add(id(param))
        if not judge.alert and not observer.deferring and type(grad) is torch.Tensor and not batched(grad):
            numbers = probe.payload(grad)
            if numbers is None:
                return
            if numbers.is_cpu:
                size = observer.peak(numbers)
                if size < _INF:
                    self.largest = max(self.largest, size)
                    if self._several:
                        self.sizes[id(param)] = size
                    return
        self.largest = _INF
        self.settle()
        reading = observer.reading(grad)
        if reading is not None:
            observer.tell(reading.bad, judge.parameter, (name, id(param), reading), None, grad)

    def settle(self) -> None:
        """Look at the small ones that have arrived, in one go; one by one only when something is bad."""
        if not self._waiting:
            return
        params = self._waiting[:]
        self._waiting.clear()
        observer, judge = self._observer, self._observer.judge
        if not observer.on:
            return
        pairs = [(p, p.grad) for p in params if p.grad is not None]
        if not judge.alert and not observer.deferring and all(_plain(grad) for _, grad in pairs):
            size = observer.peak_together([grad for _, grad in pairs])
            if size < _INF:
                judge.touched.update(map(id, params))
                self.largest = max(self.largest, size)
                return
        for p, grad in pairs:
            if id(p) in self._small:
                self._look(self._small[id(p)][0], p, grad)

    def new_step(self) -> None:
        self._waiting.clear()
        self.sizes.clear()
        self.largest = 0.0

    def forget(self) -> None:
        self._waiting.clear()
        self.sizes.clear()
        self._small.clear()


def _plain(grad: torch.Tensor) -> bool:
    return (
        type(grad) is torch.Tensor and grad.layout is torch.strided and grad.dtype in probe.DIRECT and grad.numel() > 0
    )
