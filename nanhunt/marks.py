"""Which memory a bad value has reached, by storage and bytes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch

from . import probe
from .internals import Storage

if TYPE_CHECKING:
    from .births import Birth, Hop


def body(t: torch.Tensor) -> torch.Tensor | None:
    """The dense tensor in whose memory the numbers of `t` stand."""
    if t.layout is torch.strided and type(t) in (torch.Tensor, torch.nn.Parameter) and not t.is_nested:
        return t
    return probe.payload(t)


def extent(t: torch.Tensor) -> tuple[int, int]:
    """First and last byte of the storage that `t` spans."""
    last = sum((size - 1) * stride for size, stride in zip(t.shape, t.stride())) if t.numel() else -1
    width, start = t.element_size(), int(t.storage_offset())
    return start * width, (start + last + 1) * width


class Mark(NamedTuple):
    start: int
    stop: int
    births: tuple[Birth, ...]
    hops: tuple[Hop, ...]


class Marks:
    """Which births have reached which memory, by storage and the bytes in it.

    A mark holds its storage's identity weakly: it goes with the storage, and no later allocation at the
    same address can inherit it.
    """

    def __init__(self) -> None:
        self._of: dict[int, tuple[Storage, list[Mark]]] = {}
        self._limit = 1024

    def __bool__(self) -> bool:
        return bool(self._of)

    def of(self, t: torch.Tensor) -> Iterator[Mark]:
        """The marks on the memory that `t` spans."""
        if not self._of:
            return
        dense = body(t)
        if dense is None:
            return
        found = self._of.get(dense.untyped_storage()._cdata)
        if found is not None:
            start, stop = extent(dense)
            for mark in found[1]:
                if mark.start < stop and start < mark.stop:
                    yield mark

    def put(self, t: torch.Tensor, births: tuple[Birth, ...], hop: Hop | None) -> None:
        """`t` was just written and is bad: what stood in its bytes before is gone."""
        dense = body(t)
        if dense is None:
            return
        storage = dense.untyped_storage()
        start, stop = extent(dense)
        known, marks = self._of.get(storage._cdata, (None, []))
        kept = _remaining(marks, dense, start, stop)
        hops = (hop,) if hop is not None else ()
        self._of[storage._cdata] = (known or Storage(storage), [*kept[-64:], Mark(start, stop, births, hops)])
        if len(self._of) > self._limit:
            self._of = {key: pair for key, pair in self._of.items() if not pair[0].gone()}
            self._limit = max(1024, 2 * len(self._of))

    def clear(self, t: torch.Tensor) -> None:
        """`t` was just written and is finite."""
        if not self._of:
            return
        dense = body(t)
        if dense is None:
            return
        key = dense.untyped_storage()._cdata
        found = self._of.get(key)
        if found is not None:
            start, stop = extent(dense)
            kept = _remaining(found[1], dense, start, stop)
            if kept:
                self._of[key] = (found[0], kept)
            else:
                del self._of[key]

    def forget(self) -> None:
        self._of.clear()


def _remaining(marks: list[Mark], t: torch.Tensor, start: int, stop: int) -> list[Mark]:
    """The marks that a write to `t` leaves: all, when it left gaps between its elements."""
    if t.numel() * t.element_size() < stop - start:
        return marks
    return [mark for mark in marks if not (start <= mark.start and mark.stop <= stop)]
