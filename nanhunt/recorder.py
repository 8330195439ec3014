"""Events to slots, and when to read the device.

On a CPU a reading is a number at once. On an accelerator a read would stop the host until the device
has caught up, so the range of each tensor goes into a slot that stays on the device, the event that
belongs to it waits in a list, and `drain` reads all slots with two copies per device and dtype.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from . import probe

_SLOTS = 1024  # per block; a block is two tensors of this many numbers


class _Block:
    """Slots of one device and dtype. They are separate 0-dim views, made once."""

    __slots__ = ("high", "highs", "low", "lows", "used")

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        with torch.inference_mode(False), torch.no_grad():
            self.low = torch.zeros(_SLOTS, dtype=dtype, device=device)
            self.high = torch.zeros(_SLOTS, dtype=dtype, device=device)
        self.lows, self.highs = self.low.unbind(), self.high.unbind()
        self.used = 0


class Slots:
    """Ranges that wait on their device, and the events that wait for them."""

    def __init__(self) -> None:
        self._blocks: dict[tuple[torch.device, torch.dtype], list[_Block]] = {}
        self.waiting: list[tuple[Callable[[float, float], None], _Block, int]] = []
        self.events: list[Callable[[], None]] = []
        self.reads = 0  # host reads so far, for the benchmarks
        self._lock = threading.RLock()

    def put(self, numbers: torch.Tensor, take: Callable[[float, float], None]) -> None:
        """Reduce a payload into the next slot; `take(lo, hi)` is called when the slots are read."""
        with self._lock:
            self._put(numbers, take)

    def _put(self, numbers: torch.Tensor, take: Callable[[float, float], None]) -> None:
        blocks = self._blocks.setdefault((numbers.device, numbers.dtype), [])
        block = next((b for b in blocks if b.used < _SLOTS), None)
        if block is None:
            block = _Block(numbers.device, numbers.dtype)
            blocks.append(block)
        i = block.used
        block.used = i + 1
        torch.aminmax(probe.in_order(numbers.detach()), out=(block.lows[i], block.highs[i]))
        self.waiting.append((take, block, i))

    def drain(self) -> None:
        """Read every slot in use, hand the numbers out, then run the waiting events in order."""
        with self._lock:
            events = self._read()
        for event in events:
            event()

    def _read(self) -> list[Callable[[], None]]:
        lists: dict[int, tuple[list[Any], list[Any]]] = {}
        for blocks in self._blocks.values():
            for block in blocks:
                if block.used:
                    lists[id(block)] = (
                        block.low[: block.used].tolist(),
                        block.high[: block.used].tolist(),
                    )
                    self.reads += 2
                    block.used = 0
        waiting, self.waiting = self.waiting, []
        events, self.events = self.events, []
        for take, block, i in waiting:
            lows, highs = lists[id(block)]
            take(float(lows[i]), float(highs[i]))
        return events

    def forget(self) -> None:
        """Drop what waits without reading it."""
        self.waiting.clear()
        self.events.clear()
        for blocks in self._blocks.values():
            for block in blocks:
                block.used = 0
