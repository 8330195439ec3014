"""Events to slots, and when to read the device.

On a CPU a reading is a number at once. On an accelerator a read would stop the host until the device
has caught up, so the range of each tensor goes into a slot that stays on the device, the event that
belongs to it waits in a list, and `drain` reads the slots with one copy per device and dtype.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from . import probe
from .verdict import Rec

_SLOTS = 1024  # per block; a block is two numbers for each
_Event = tuple[bool, Callable[..., None], tuple[Any, ...]]  # must it always run; called with args, None, None


class _Block:
    """Slots of one device and dtype: pairs of separate 0-dim views, made once, of numbers that lie side by side."""

    __slots__ = ("numbers", "pairs", "pinned", "used")

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        with torch.inference_mode(False), torch.no_grad():
            self.numbers = torch.zeros(_SLOTS, 2, dtype=dtype, device=device)
            ends = self.numbers.view(-1).unbind()
            # A copy into pinned memory does not wait, so that those of several blocks run together.
            self.pinned = (
                torch.zeros(_SLOTS, 2, dtype=dtype, device="cpu", pin_memory=True) if device.type == "cuda" else None
            )
        self.pairs = list(zip(ends[::2], ends[1::2]))
        self.used = 0

    def send(self) -> torch.Tensor:
        """The slots in use, on their way to the host."""
        if self.pinned is None:
            return self.numbers[: self.used]
        return self.pinned[: self.used].copy_(self.numbers[: self.used], non_blocking=True)


class _Given:
    """Tensors that somebody else has reduced, each to its number of largest magnitude; they are read once."""

    __slots__ = ("numbers", "pinned", "used")

    def __init__(self, largest: torch.Tensor) -> None:
        self.numbers, self.pinned, self.used = largest, None, largest.numel()

    def send(self) -> torch.Tensor:
        """Both ends of each range are the one number that is known."""
        return self.numbers.unsqueeze(1).expand(-1, 2)


class Slots:
    """Ranges that wait on their device, and the events that wait for them."""

    def __init__(self) -> None:
        self._blocks: dict[tuple[torch.device, torch.dtype], list[_Block]] = {}
        self._given: list[_Given] = []
        self.waiting: list[tuple[Rec, _Block | _Given, int]] = []
        self.events: list[_Event] = []
        self.reads = 0  # host reads so far
        self._lock = threading.RLock()

    def put(self, numbers: torch.Tensor, rec: Rec) -> None:
        """Reduce a payload into the next slot; the record gets its range when the slots are read."""
        with self._lock:
            blocks = self._blocks.get((numbers.device, numbers.dtype))
            if blocks is None:
                blocks = self._blocks[numbers.device, numbers.dtype] = [_Block(numbers.device, numbers.dtype)]
            block = blocks[-1]
            if block.used == _SLOTS:
                block = next((b for b in blocks if b.used < _SLOTS), None) or _Block(numbers.device, numbers.dtype)
                if block not in blocks:
                    blocks.append(block)
            i = block.used
            block.used = i + 1
            torch.aminmax(probe.in_order(numbers.detach()), out=block.pairs[i])
            self.waiting.append((rec, block, i))

    def given(self, largest: torch.Tensor, recs: list[Rec]) -> None:
        """Numbers that were reduced elsewhere, one for each record; they are read with the others."""
        with self._lock:
            given = _Given(largest)
            self._given.append(given)
            self.waiting += [(rec, given, i) for i, rec in enumerate(recs)]

    def drain(self, alert: bool) -> None:
        """Read every slot in use and give the records their ranges, then run the waiting events in order.

        When nothing bad was read, and nothing bad waits to be judged (`alert`), only those that must always run.
        """
        with self._lock:
            told, events = self._read(alert)
        for always, event, args in events:
            if told or always:
                event(*args, None, None)

    def _read(self, told: bool) -> tuple[bool, list[_Event]]:
        used: list[_Block | _Given] = [block for blocks in self._blocks.values() for block in blocks if block.used]
        used += self._given
        self._given = []
        sent = [(block, block.send()) for block in used]
        for device in {block.numbers.device for block in used if block.pinned is not None}:
            torch.cuda.current_stream(device).synchronize()
        ends = {}
        for block, numbers in sent:
            ends[id(block)] = numbers.tolist()
            self.reads += 1
            block.used = 0
        waiting, self.waiting = self.waiting, []
        events, self.events = self.events, []
        for rec, block, i in waiting:
            rec.measured(*ends[id(block)][i])
            told = told or rec.bad
        if not told:  # else the judge notes it, when it is told
            for rec, _, _ in waiting:
                if rec.of is not None:
                    rec.of.came_back(rec.absmax, rec.numel)
        return told, events

    def forget(self) -> None:
        """Drop what waits without reading it."""
        self.waiting.clear()
        self.events.clear()
        self._given.clear()
        self._given.clear()
        for blocks in self._blocks.values():
            for block in blocks:
                block.used = 0
