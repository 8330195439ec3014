"""Births of bad values, and the ops that handed them on."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from . import sites
from .evidence import Evidence
from .sites import Site

if TYPE_CHECKING:
    from .verdict import Call


@dataclass(eq=False, slots=True)
class Birth:
    """One op that made a NaN or Inf: from finite operands, from Inf (a NaN), or out of a literal.

    Also the first op that reads a tensor which was bad before anybody looked (phase "input" or "state").
    `literal` births are intent and never the answer while there is another. `parents` are the births
    whose Inf this NaN was made from.
    """

    number: int
    phase: str
    op: str | None
    ran: str
    kinds: tuple[str, ...]
    site: Site | None
    call: Call | None = None
    module: str | None = None
    module_type: str | None = None
    tensor: str = "output"
    literal: bool = False
    cause: str | None = None
    parents: tuple[Birth, ...] = ()
    evidence: Evidence | None = None
    absorbed_by: set[str] = field(default_factory=set)
    in_forward: bool = False  # it was noticed before backward: in an output, or the loss
    kept: Any = None  # copies of what the op was given, for as long as a capsule may want them
    reader_open: bool = False  # of a weight that autocast has cast: the op that reads it is still to come

    @property
    def thrown_away(self) -> tuple[str, ...]:
        """Ops that ended it in forward, when it was noticed only later: then it came back through a gradient."""
        return tuple(sorted(self.absorbed_by)) if self.phase == "forward" and not self.in_forward else ()

    @property
    def kind(self) -> str:
        return self.kinds[0]

    @property
    def nth(self) -> int | None:
        return self.call.nth if self.call is not None else None


class Hop:
    """One op that handed a bad value on. Chained backwards, so that the way can be told."""

    __slots__ = ("back", "birth", "kind", "module", "op", "phase", "site")

    def __init__(
        self,
        op: str,
        phase: str,
        module: str | None,
        site: Site | None,
        kind: str,
        back: tuple[Hop, ...],
        birth: Birth | None,
    ) -> None:
        self.op, self.phase, self.module, self.site, self.kind = op, phase, module, site, kind
        self.back, self.birth = back, birth

    def __str__(self) -> str:
        line, source = sites.text(self.site)
        where = "" if self.module is None else f" in {self.module or 'the root'}"
        return f"{self.phase}: {self.op}{where} gave {self.kind}  {line or '?'}  {source or ''}".rstrip()


def culprit(births: Iterable[Birth]) -> Birth | None:
    """The first birth of the chain that is not a literal; a literal one when there is nothing else."""
    seen: dict[int, Birth] = {}
    todo = list(births)
    while todo:
        birth = todo.pop()
        if birth.number not in seen:
            seen[birth.number] = birth
            todo.extend(birth.parents)
    ordered = [seen[number] for number in sorted(seen)]
    return next((birth for birth in ordered if not birth.literal), ordered[0] if ordered else None)


def way(birth: Birth, ends: Iterable[Hop]) -> tuple[Hop, ...]:
    """The shortest way from the birth to one of `ends`; empty when it did not get there."""
    todo: list[tuple[Hop, tuple[Hop, ...]]] = [(hop, (hop,)) for hop in ends]
    seen: set[int] = set()
    for hop, behind in todo:  # grows while it is walked
        if hop.birth is birth:
            return behind
        if id(hop) not in seen:
            seen.add(id(hop))
            todo.extend((back, (back, *behind)) for back in hop.back)
    return ()


def told(hops: tuple[Hop, ...], most: int) -> list[str]:
    """One line a hop; a long way loses its middle."""
    lines = [str(hop) for hop in hops]
    if len(lines) > most:
        head = most // 2
        lines[head : len(lines) - (most - head - 1)] = [f"... {len(lines) - most + 1} more ops ..."]
    return lines
