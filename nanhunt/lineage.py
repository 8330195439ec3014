"""Handed on or made here: the decision on every bad result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import probe
from .births import Birth, Hop, culprit
from .internals import autocast_depth
from .marks import Marks
from .owners import Owners
from .places import Places
from .runs import Operand, Place, Run, Tensor, in_order, wrapped
from .witness import Witness, calmed, output_at, rerun, small

# Told of each birth while the operands are in hand: the op, the birth, and which result (of an op over lists: item).
Keep = Callable[[Run, Birth, int], None]

_MOST_BIRTHS = 10_000
_MOST_HOPS = 200_000
_MOST_AGAIN = 1000  # ops of a step that are run once more with their bad operands calmed
# These hand numbers on and make none.
_CARRIES = frozenset(
    "copy clone cat stack index index_select gather scatter slice_backward select_backward slice_scatter "
    "select_scatter embedding expand repeat roll flip constant_pad_nd masked_fill masked_select where index_put "
    "unfold_backward as_strided_scatter triu tril contiguous alias detach lift_fresh index_copy index_fill".split()
)
_CAUSES = {"parameter": "bad_parameter", "buffer": "bad_buffer", "input": "bad_input", "state": "bad_buffer"}


class Lineage:
    """All births, and the memory that each has reached."""

    def __init__(self, places: Places, owners: Owners, witness: Witness, keep: Keep | None = None) -> None:
        self.births: list[Birth] = []
        self.born = self.propagated = self.absorbed = 0
        self.marks = Marks()
        self.again = _MOST_AGAIN
        self.loss_scale: float | None = None
        self.deadly: Birth | None = None
        self._places, self._owners, self._witness, self._keep = places, owners, witness, keep
        self._literals: dict[Any, Birth] = {}
        self._hops = 0

    def end_step(self) -> None:
        self.again = _MOST_AGAIN
        self._hops = 0
        self.deadly = None

    def stopped(self, run: Run) -> None:
        """The result is finite: whose bad value ended here, and by what?"""
        births = {birth for t in run.tensors for mark in self.marks.of(t) for birth in mark.births}
        if births:
            self.absorbed += 1
            for birth in births:
                if run.task == -1 and len(birth.absorbed_by) < 16:
                    birth.absorbed_by.add(run.schema.base)

    def died(self, run: Run | None) -> None:
        """The op raised: because of a bad operand?"""
        if run is not None and self.marks:
            self.deadly = culprit(birth for t in run.tensors for mark in self.marks.of(t) for birth in mark.births)

    def settle(self, run: Run, out: Any, bads: list[tuple[int, Tensor]], operands: list[Operand]) -> None:
        """These results are bad: because operands were, or by the op's own doing."""
        place = self._places.of(run, operands)
        literals = run.bad_numbers()
        arrived: dict[int, Birth] = {}
        hops: list[Hop] = []
        kinds_in: set[str] = set()
        for operand in operands:
            operand.kinds = probe.kinds(operand.tensor)
            if not operand.kinds:
                continue
            marks = list(self.marks.of(operand.live))
            if not marks and wrapped(operand.tensor) and self._owners.of(operand.live) is None:
                literals[operand.role] = float(operand.tensor)
                continue
            kinds_in.update(operand.kinds)
            for birth in [b for m in marks for b in m.births] or [self._found(run, operand, place, bads[0][0])]:
                self._read_by(birth, run, place)
                arrived[birth.number] = birth
            hops.extend(h for m in marks for h in m.hops)
        kinds = in_order({kind for _, t in bads for kind in probe.kinds(t)})
        inherited = tuple(arrived[number] for number in sorted(arrived))
        new: Birth | None
        if not inherited and not literals:
            new = self._birth(run, out, place, operands, bads, kinds)
        elif "nan" in kinds and "nan" not in kinds_in:
            # Infinities became a NaN here, or a NaN was given as a number.
            new = self._birth(run, out, place, operands, bads, ("nan",), parents=inherited, literals=literals)
        elif not inherited:
            new = self._literal(run, out, place, operands, bads, kinds, literals)
        else:
            new = self._anew(run, place, operands, bads)
        births = inherited if new is None else (new,) if new.parents else (*inherited, new)
        if len(births) > 24:
            births = (*[b for b in births if not b.literal][:16], *[b for b in births if b.literal][:4])
        self.propagated += new is None
        hop = self._hop(run, place, kinds[0], hops, new or (inherited[0] if not hops else None))
        for _, t in bads:
            self.marks.put(t, births, hop)

    def _hop(self, run: Run, place: Place, kind: str, back: list[Hop], birth: Birth | None) -> Hop | None:
        self._hops += 1
        if self._hops > _MOST_HOPS:
            return None
        op = place.op if place.op is not None else run.schema.name
        return Hop(op, place.phase, place.module, place.site, kind, tuple(back[:8]), birth)

    # --- kinds of births --------------------------------------------------------------------------

    def _birth(
        self,
        run: Run,
        out: Any,
        place: Place,
        operands: list[Operand],
        bads: list[tuple[int, Tensor]],
        kinds: tuple[str, ...],
        parents: tuple[Birth, ...] = (),
        literals: dict[str, float] | None = None,
    ) -> Birth:
        position, t = bads[0]
        if kinds == ("nan",):
            position, t = next(((p, o) for p, o in bads if "nan" in probe.kinds(o)), bads[0])
        else:
            kinds = in_order(set(probe.kinds(t)) & set(kinds)) or kinds
        birth = self._new(place.phase, run.schema.name if place.op is None else place.op, kinds, place)
        birth.ran, birth.parents = run.schema.name, parents
        birth.tensor = place.tensor or self._called(run, place, position, t)
        if literals and place.phase != "optimizer" and any(value != value for value in literals.values()):
            birth.cause = "literal"
        for operand in operands:
            operand.name = self._owners.name_of(operand.live)
        birth.evidence = self._witness.gather(
            run, place, operands, position, t, kinds, literals=literals or {},
            inherited=bool(parents or literals), loss_scale=self.loss_scale, dropped=self._dropped(place),
        )  # fmt: skip
        if self._keep is not None:
            self._keep(run, birth, position)
        return birth

    def _new(self, phase: str, op: str | None, kinds: tuple[str, ...], place: Place) -> Birth:
        birth = Birth(
            number=self.born, phase=phase, op=op, ran=op or "", kinds=kinds, site=place.site, call=place.call,
            module=place.module, module_type=place.module_type,
        )  # fmt: skip
        self.born += 1
        if len(self.births) < _MOST_BIRTHS:
            self.births.append(birth)
        return birth

    def _literal(
        self,
        run: Run,
        out: Any,
        place: Place,
        operands: list[Operand],
        bads: list[tuple[int, Tensor]],
        kinds: tuple[str, ...],
        literals: dict[str, float],
    ) -> Birth:
        """An infinity given as a number is intent; not so in an update: nobody wants an infinite step."""
        if place.phase == "optimizer":
            return self._birth(run, out, place, operands, bads, kinds, (), literals)
        key = (run.schema.name, place.site, kinds)
        known = self._literals.get(key)
        if known is None:
            known = self._literals[key] = self._new(place.phase, place.op, kinds, place)
            known.literal, known.cause = True, "literal"
        return known

    def _anew(self, run: Run, place: Place, operands: list[Operand], bads: list[tuple[int, Tensor]]) -> Birth | None:
        """With its bad operands made harmless, is the result still bad? Then that is the op's own doing."""
        if run.schema.base in _CARRIES or self.again <= 0 or not all(small(t) for t in run.tensors):
            return None
        self.again -= 1
        again = rerun(run, calmed, wide=False)
        for position, t in bads:
            fresh = output_at(again, max(position, 0))
            if isinstance(fresh, Tensor) and fresh.shape == t.shape:
                kinds = probe.kinds(fresh)
                if kinds:
                    return self._birth(run, again, place, operands, [(position, fresh)], kinds)
        return None

    def _found(self, run: Run, operand: Operand, place: Place, position: int) -> Birth:
        birth = self.source(operand, place)
        if self._keep is not None:
            self._keep(run, birth, position)
        return birth

    def source(self, operand: Operand, place: Place) -> Birth:
        """A tensor that was bad before anybody looked: the batch, a weight, a buffer, memory nobody wrote."""
        t, kinds = operand.live, operand.kinds
        owner = self._owners.of(t, place.optimizer)
        what, name = (owner.what, owner.name) if owner is not None else ("input", None)
        phase = {"parameter": "state", "buffer": "state", "state": "state", "input": "input"}.get(what, place.phase)
        if name is not None and name.startswith("grad of "):
            phase = "backward"
        birth = self._new(phase, place.op, kinds, place)
        birth.tensor = name or operand.role
        birth.literal = "nan" not in kinds and what in ("buffer", "input", "state")
        birth.cause = _CAUSES.get(what, what if what in ("uninitialised", "collective") else "unknown")
        if what == "input":
            birth.tensor = name or "batch"
            birth.op = birth.module = birth.module_type = birth.call = None
            call = place.call
            while call is not None and call.parent is not None:
                call = call.parent
            if call is not None and call.site is not None:
                birth.site = call.site
        elif what in ("parameter", "buffer"):
            birth.reader_open = place.op is None or (place.op.startswith("aten._to_copy") and autocast_depth() > 0)
        birth.evidence = self._witness.source(operand, place.phase, birth.tensor)
        self.marks.put(t, (birth,), None)
        return birth

    def _read_by(self, birth: Birth, run: Run, place: Place) -> None:
        """A weight that autocast has cast is read by the op that it was cast for."""
        if birth.reader_open and not (run.schema.base == "to_copy" and autocast_depth() > 0):
            birth.reader_open = False
            birth.op, birth.site, birth.call = place.op, place.site, place.call
            birth.module, birth.module_type = place.module, place.module_type
            if self._keep is not None:
                self._keep(run, birth, 0)

    # --- names ------------------------------------------------------------------------------------

    def _called(self, run: Run, place: Place, position: int, t: Tensor) -> str:
        """The name of the tensor that came out bad."""
        if place.phase == "backward":
            return "grad_input"
        name = self._owners.name_of(t, place.optimizer) if position < 0 or run.schema.writes else None
        return name or ("output" if run.schema.outputs < 2 else f"output[{max(position, 0)}]")

    def _dropped(self, place: Place) -> tuple[str, ...]:
        """In backward: what threw the forward result of the same op away, where that was bad already."""
        if place.phase == "backward":
            for birth in reversed(self.births):
                if birth.phase == "forward" and birth.site == place.site and birth.op == place.op and birth.absorbed_by:
                    return tuple(sorted(birth.absorbed_by))
        return ()
