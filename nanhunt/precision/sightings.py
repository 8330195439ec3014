"""Tensors that were counted in this step: whoever handles one of them next need not count it again."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from typing import Any

import torch

from ..kept import version_of

Tensor = torch.Tensor

_REMEMBERED = 64  # enough for the next module that takes it, and for the containers that hand it on


class Sighting:
    """The counts of one tensor as it stood. The tensor is not kept alive.

    Attributes:
        maker: who gave it out first.
        takers: who waits for its gradient.
    """

    __slots__ = ("_tensor", "_version", "counts", "maker", "peak", "takers")

    def __init__(self, tensor: Tensor, counts: Tensor, peak: Tensor) -> None:
        self._tensor, self._version = weakref.ref(tensor), version_of(tensor)
        self.counts, self.peak = counts, peak
        self.maker: Any = None
        self.takers: list[Any] | None = None

    def still(self, tensor: Tensor) -> bool:
        """Whether `tensor` is the one that was seen, and nobody has written to it since."""
        return self._tensor() is tensor and self._version == version_of(tensor)


class Sightings:
    """The latest of them, by identity."""

    def __init__(self) -> None:
        self._held: OrderedDict[int, Sighting] = OrderedDict()

    def of(self, tensor: Tensor) -> Sighting | None:
        seen = self._held.get(id(tensor))
        return seen if seen is not None and seen.still(tensor) else None

    def put(self, tensor: Tensor, counts: Tensor, peak: Tensor) -> Sighting:
        seen = self._held[id(tensor)] = Sighting(tensor, counts, peak)
        if len(self._held) > _REMEMBERED:
            self._held.popitem(last=False)
        return seen

    def clear(self) -> None:
        self._held.clear()
