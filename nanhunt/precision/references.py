"""The numbers of the first run, kept for the runs that are held against it."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from .. import probe
from .alike import figures
from .figures import Figures

Tensor = torch.Tensor

_SAMPLE = 1 << 16  # numbers of a tensor for which there is no room as a whole


class Kept:
    """One tensor: all its numbers, or some that are evenly spread."""

    __slots__ = ("number", "shape", "step")

    def __init__(self, numbers: Tensor, *, whole: bool) -> None:
        self.shape = numbers.shape
        self.step = 1 if whole else max(1, numbers.numel() // _SAMPLE)
        self.number = _cut(numbers, self.step).to("cpu", copy=True)

    @property
    def whole(self) -> bool:
        return self.step == 1

    def against(self, tensor: Tensor, name: str, floor: Any = None, scale: float = 1.0) -> Figures | None:
        """How far `tensor`, divided by `scale`, is from this; None when they cannot be compared."""
        pair = self.beside(tensor, scale)
        return None if pair is None else figures(*pair, name, floor)

    def beside(self, tensor: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor] | None:
        """Both, on one device and in one shape."""
        numbers = probe.payload(tensor.detach())
        if numbers is None or numbers.shape != self.shape:
            return None
        numbers = _cut(numbers, self.step)
        numbers = numbers.cpu() if numbers.device.type == "mps" else numbers  # which has no float64
        numbers = numbers / scale if scale != 1.0 else numbers
        return self.number.to(numbers.device), numbers


class References:
    """Keeps tensors in the memory of the host: whole, until `room` bytes are taken, and from then on samples."""

    def __init__(self, room: int) -> None:
        self.sampled = 0  # tensors of which there is only a sample
        self._room = room
        self._known: dict[int, tuple[weakref.ref[Tensor], int, Kept]] = {}

    def keep(self, tensor: Tensor, scale: float = 1.0) -> Kept | None:
        """None for what holds no floating-point numbers. One that is met again, and was not written, is kept once."""
        known = self._known.get(id(tensor))
        version = _version(tensor)
        if known is not None and known[0]() is tensor and known[1] == version and version >= 0 and scale == 1.0:
            return known[2]
        numbers = probe.payload(tensor.detach())
        if numbers is None:
            return None
        size = numbers.numel() * numbers.element_size()
        whole = size <= self._room
        kept = Kept(numbers / scale if scale != 1.0 else numbers, whole=whole)
        self._room -= size if whole else 0
        self.sampled += not kept.whole
        self._known[id(tensor)] = weakref.ref(tensor), version, kept
        return kept


def _cut(numbers: Tensor, step: int) -> Tensor:
    return numbers if step == 1 else numbers.reshape(-1)[::step]


def _version(tensor: Tensor) -> int:
    try:
        return tensor._version
    except RuntimeError:  # inference tensors do not count versions
        return -1
