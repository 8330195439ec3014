"""What collectives were given and what they gave back: a tensor that was finite before and bad after."""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from . import internals, probe, ranks
from .verdict import Origin, Rec

if TYPE_CHECKING:
    from .observer import Observer

_PENDING = 64  # results that are still under way and are looked at later


@dataclass(frozen=True, slots=True, kw_only=True)
class Passage:
    """One collective that gave a bad tensor to a rank which had given it finite numbers.

    `sent` is the largest |number| that went in on this rank, None for one that only receives; `order` says when it
    was, among the tensors of the step; `unwritten`: the bad numbers stood in the buffer before.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    sent: float | None
    order: int
    kinds: tuple[str, ...]
    unwritten: bool

    def words(self) -> str:
        size = "x".join(map(str, self.shape)) or "one number"
        return f"{self.name} ({self.dtype}, {size})"

    def facts(self) -> dict[str, Any]:
        """The same for the context of a finding."""
        told = {"name": self.name, "dtype": self.dtype, "sent_absmax": self.sent, "unwritten": self.unwritten or None}
        return {key: value for key, value in told.items() if value is not None}


@dataclass(frozen=True, slots=True)
class Given:
    """What a collective begins with on this rank."""

    sent: float | None
    marks: tuple[int | None, ...]  # of receive buffers that are bad: what is in them


class Collectives:
    """Looks at what goes into collectives and what comes out, on the processor only: an accelerator is not read.

    Attributes:
        first: the first passage of the step.
        sent_bad: True when this rank has given something bad to a collective in this step.
    """

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self.first: Passage | None = None
        self.sent_bad = False
        self.given: Rec | None = None  # an output of the model whose gradient is handed over: that of another stage
        self._pending: deque[tuple[str, Given, list[weakref.ref[torch.Tensor]], Any, int]] = deque(maxlen=_PENDING)

    def new_step(self) -> None:
        self.first, self.sent_bad, self.given = None, False, None
        self._pending.clear()

    # --- for the judge ----------------------------------------------------------------------------

    def note(self, origin: Origin, tensor: Any, earlier: list[Origin]) -> None:
        """Of a bad value that this rank has not made: by which way it came from another process.

        `earlier` are the origins of this step so far: what came out of a collective after one of them is no news.
        """
        if not ranks.together() or origin.phase == "state" or origin.literal:
            return
        passage = self.settle()
        gradient = isinstance(tensor, torch.Tensor) and origin.phase == "backward"
        if passage is not None:
            if all(one.literal for one in earlier):
                origin.facts |= {"handed": passage.words(), "collective": passage.facts()}
        elif origin.phase == "input" and tensor is not None and tensor.is_leaf and tensor.requires_grad:
            origin.facts["handed"] = "the stage before it"  # a batch asks for no gradient, a receive buffer does
        elif gradient and self.given is not None and origin.rec is self.given:
            origin.facts["handed"] = "the stage after it"
        elif gradient and origin.tensor.startswith("grad of") and internals.sharded(tensor) and not self.sent_bad:
            origin.facts["handed"] = f"the reduce-scatter of the {origin.tensor.replace('grad of', 'gradient of')}"

    # --- what the hooks call ----------------------------------------------------------------------

    def before(self, given: Iterable[Any], received: Iterable[Any]) -> Given | None:
        """The numbers that go in; None when nobody looks."""
        try:
            return self._before(given, received) if self._observer.on and self.first is None else None
        except Exception as failure:
            self._observer.failed(failure)
            return None

    def _before(self, given: Iterable[Any], received: Iterable[Any]) -> Given | None:
        sizes = [size for size in map(_size, given) if size is not None]
        sent = max(sizes, default=None, key=lambda size: math.inf if size != size else size)
        if sent is not None and not sent < math.inf:
            self.sent_bad = True
            return None
        return Given(sent, tuple(map(_mark, received)))

    def after(self, name: str, given: Given, received: Iterable[Any], work: Any) -> None:
        """What came out, once it has: a result that is still under way is looked at later."""
        order = self._observer.seen - self._observer.seen_before
        tensors = [one for one in received if isinstance(one, torch.Tensor)]
        if work is not None:
            self._pending.append((name, given, [weakref.ref(one) for one in tensors], work, order))
            return
        try:
            self._look(name, given, tensors, order)
        except Exception as failure:
            self._observer.failed(failure)

    def settle(self) -> Passage | None:
        """The first passage of the step, after a look at what has arrived meanwhile."""
        for name, given, refs, work, order in list(self._pending):
            if self.first is None and _done(work):
                self._look(name, given, [one for one in (ref() for ref in refs) if one is not None], order)
        return self.first

    def _look(self, name: str, given: Given, tensors: list[torch.Tensor], order: int) -> None:
        for at, tensor in enumerate(tensors):
            size = _size(tensor)
            if self.first is None and size is not None and not size < math.inf:
                mark = given.marks[at] if at < len(given.marks) else None
                self.first = Passage(
                    name=name,
                    dtype=str(tensor.dtype).removeprefix("torch."),
                    shape=tuple(tensor.shape),
                    sent=given.sent,
                    order=order,
                    kinds=probe.kinds(tensor),
                    unwritten=mark is not None and mark == _mark(tensor),
                )


def _size(tensor: Any) -> float | None:
    """The largest |number|, not finite for a bad tensor; None where nothing can be read."""
    if not isinstance(tensor, torch.Tensor) or not (tensor.is_floating_point() or tensor.is_complex()):
        return None
    if tensor.device.type != "cpu":
        return None
    with torch.no_grad():
        numbers = probe.payload(tensor)
        if numbers is None:
            return None
        lo, hi = probe.limits(numbers)
    return math.nan if lo != lo else max(-lo, hi, 0.0)


def _mark(tensor: Any) -> int | None:
    """Something to know the bits of a bad tensor by; None for one that is fine."""
    size = _size(tensor)
    if size is None or size < math.inf or not tensor.is_contiguous():
        return None
    return int(tensor.detach().reshape(-1).view(torch.uint8).sum(dtype=torch.int64))


def _done(work: Any) -> bool:
    try:
        return bool(work.is_completed())
    except Exception:
        return False
