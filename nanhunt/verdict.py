"""Who made it, who carried it, who was handed it: the rules that turn readings into one culprit.

Nothing here knows torch. A step is described by `Call` (one run of one module) and `Rec` (one tensor
that was looked at: its range, who gave it out, who took it). `settle` names the origin of a bad value
seen in forward, `blame` the call behind a bad gradient.

The rule in forward: a bad value that comes out of a call, or goes into a child of it, was *carried*
when something bad had reached that call before (its inputs, what its children gave back), and was
*made* by the call's own code otherwise. Two refinements: a literal infinity (a mask) explains other
infinities of its sign but never a NaN, so a NaN after it is made anew; an infinity that was computed
(an overflow) explains the NaN it turns into.

The rule in backward: gradients arrive in reverse order, so the first bad gradient is that of a tensor
which was *fed* to the culprit: the deepest call that took the tensor, or the code around it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from . import numerics

_LARGE_WEIGHT = 1e6
KINDS = ("nan", "+inf", "-inf")


class Call:
    """One run of a watched module. `own` holds the origins that reached its own code so far.

    What a healthy run leaves as it is stands on the class: one is made for every call of every module.
    """

    site: tuple[str, int] | None = None  # file and line of the call, where it was recorded
    own: tuple[Origin, ...] = ()
    taken: tuple[Rec, ...] | list[Rec] = ()  # what it was given
    grad: float | None = None  # largest |gradient| that came back to its outputs
    incoming = 0.0  # at most so large is the sum of those |gradients|
    again = False  # a checkpoint runs it once more, inside the backward
    builtin = False  # a module of torch.nn
    looked = True  # False for a module that was left out by the user
    steady = False  # a module whose derivative can only overflow, never be undefined
    traced = 0  # of a call inside a compiled graph: the how-manieth it was; 0: Python has run it

    def __init__(self, path: str, type_name: str, nth: int, parent: Call | None, module_id: int) -> None:
        self.path, self.type_name, self.nth = path, type_name, nth
        self.parent, self.module_id = parent, module_id

    def reached(self, origin: Origin) -> None:
        """Note that an origin has reached the call's own code."""
        if origin not in self.own:
            self.own = (*self.own, origin)

    def inside(self, other: Call) -> bool:
        """True when this call ran inside `other` (at any depth)."""
        call = self.parent
        while call is not None:
            if call is other:
                return True
            call = call.parent
        return False


class Rec:
    """One tensor that was looked at. Numbers and names only: no tensor is ever kept."""

    lo = hi = 0.0
    bad = False  # a NaN or an Inf is in it
    numel = 1
    exits = False  # given out by the outermost call: the code around the model may use it
    leaf = False  # a tensor that the user holds: its gradient is a result
    origin: Origin | None = None
    node = ""  # of a tensor that will be gone when its range is read: the autograd node that made it
    version = serial = 0  # of the tensor, and of the step, when it was looked at
    of: Rec | None = None  # of a gradient: the tensor it belongs to

    def __init__(self, name: Any, dtype: Any, scope: Call | None, maker: Call | None) -> None:
        self.name, self.dtype = name, dtype
        self.scope = scope  # the call in whose own code the tensor stands
        self.makers = [] if maker is None else [maker]  # the calls that gave it out, innermost first
        self.takers: list[Call] = []

    def measured(self, lo: float, hi: float) -> None:
        """Take the range: smallest and largest number, both NaN when there is one among them."""
        self.lo, self.hi = lo, hi
        self.bad = not (-math.inf < lo and hi < math.inf)

    def came_back(self, size: float, numel: int) -> None:
        """Note how large the gradient was that came back to the calls which gave this tensor out."""
        for call in self.makers:
            if call.grad is None or not call.grad >= size:
                call.grad = size
            call.incoming += size * numel

    @property
    def absmax(self) -> float:
        if self.bad:
            return math.nan if self.lo != self.lo else math.inf
        return max(0.0, -self.lo, self.hi)


@dataclass(slots=True, eq=False)
class Origin:
    """One place where something bad came to be, and how far it got."""

    phase: str
    call: Call | None
    kinds: tuple[str, ...]
    tensor: str
    literal: bool = False
    owner: str | None = None  # of a parameter or buffer: its module
    carried: set[str] = field(default_factory=set)
    rec: Rec | None = None
    step: int = 0
    facts: dict[str, Any] = field(default_factory=dict)  # what the report needs, taken at the birth
    settled: bool = False  # confirmed, handled or absorbed: not to be reported again

    def __post_init__(self) -> None:
        self.carried.update(self.kinds)

    @property
    def kind(self) -> str:
        return self.kinds[0]

    @property
    def allowed(self) -> bool:
        """True for a value that the user allows: what comes of it is no fault either."""
        return self.facts.get("handled") == "allowed"


def settle(kinds: tuple[str, ...], reached: Sequence[Origin]) -> Origin | None:
    """The origin that explains a bad value of these kinds, or None: it was made here.

    `reached` are the origins that had reached the code which made the value, in order of arrival.
    """
    if "nan" in kinds:
        for origin in reached:
            if "nan" in origin.carried:
                return origin
        for origin in reached:
            if not origin.literal:
                origin.carried.update(kinds)
                return origin
        return None
    computed = [origin for origin in reached if not origin.literal]
    for origin in (*computed, *reached):
        if not origin.carried.isdisjoint(kinds):
            return origin
    for origin in computed:
        origin.carried.update(kinds)
        return origin
    return None


def deepest(calls: list[Call]) -> list[Call]:
    """The calls of the list that hold no other call of the list: who took a tensor last."""
    return [c for c in calls if not any(other.inside(c) for other in calls if other is not c)]


def blame(
    rec: Rec,
    kinds: tuple[str, ...],
    suspect: Callable[[Call], bool] = lambda call: False,
    *,
    loss_inside: bool = False,
) -> Call | None:
    """The call whose backward made the bad gradient of `rec`; None: the code around the model.

    Only a call that got a gradient back can have sent one on. The gradient of a tensor is the sum over all that
    used it, so with several users the choice rests on what each can do: one that holds a bad value (`suspect`)
    comes first, and a linear map that is fed with finite gradients can overflow, it cannot make a NaN. A tensor
    that has left the model was used by the loss code, unless the model gives back the loss itself (`loss_inside`).
    """
    used = [c for c in rec.takers if c not in rec.makers]  # one that gives back what it took has only handed it on
    ran = [c for c in used if c.grad is not None and math.isfinite(c.grad)] or [c for c in used if c.grad is None]
    takers = deepest(ran)
    if len(takers) > 1:
        able = [c for c in takers if suspect(c)] or [c for c in takers if not (c.steady and _harmless(c, kinds, rec))]
        takers = able or deepest([c for c in ran if c not in takers])
    if takers:
        return max(takers, key=lambda c: c.grad if c.grad is not None else -1.0)
    return None if rec.exits and not loss_inside else rec.scope


def _harmless(call: Call, kinds: tuple[str, ...], rec: Rec) -> bool:
    """True when a linear map cannot have made this of the finite gradients it was given."""
    limit = numerics.format_of(str(rec.dtype).removeprefix("torch."))
    return "nan" in kinds or (limit is not None and call.incoming * _LARGE_WEIGHT < limit.max)


def common(parent: str, aliases: list[str]) -> str:
    """The name of a shared module that fits the call it stands in, else its first name."""
    prefix = parent + "." if parent else ""
    fitting = [a for a in aliases if a.startswith(prefix)]
    return min(fitting, key=lambda a: a[len(prefix) :].count(".")) if fitting else aliases[0]
