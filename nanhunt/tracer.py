"""The op level: every op of a step is watched as it runs; what is born bad is followed."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from . import internals, probe, sites
from .births import Birth, culprit, told, way
from .causes import explain
from .lineage import Keep, Lineage
from .makers import Makers, code_of
from .nodes import Nodes
from .owners import Owners
from .places import Places
from .runs import Operand, Place, Run, Tensor
from .schemas import schema_of
from .witness import Witness

if TYPE_CHECKING:
    from .naming import Names
    from .verdict import Call


_NUMBERS = (int, float, bool, complex)
_PLAIN = (torch.Tensor, torch.nn.Parameter)


class Tracer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every op of forward, loss, backward and optimizer, and follows what is born bad.

    `names` is a `Names`, `current_call` gives the innermost running module call of this thread, and
    `on_host_read` is told when the program reads a bad number, `keep` of each birth while the operands are in hand.
    Results are left alone: what an op will
    overwrite is copied before it runs, and nothing of the user's is kept alive.

    Stays out, op by op, where a mode must: under forward AD, inside torch.func transforms, while a graph is
    recorded. Compiled regions are run eagerly meanwhile; `torch.jit.trace` fails its own check under any mode.
    A failure of the tracer's own is counted in `failures` and the program goes on.
    """

    supports_higher_order_operators = True

    def __init__(
        self,
        *,
        names: Names,
        current_call: Callable[[], Call | None],
        on_host_read: Callable[[Tensor, Birth], None] | None = None,
        keep: Keep | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.failures: list[str] = []
        self.loss_scale: float | None = None  # what the watch knows of a scaler
        self._on_host_read = on_host_read
        self._owners = Owners(names)
        self._makers = Makers()
        self._nodes = Nodes(current_call)
        self._places = Places(self._nodes, self._owners, current_call)
        self._lineage = Lineage(self._places, self._owners, Witness(self._makers), keep)

    # --- what a watch asks ------------------------------------------------------------------------

    @property
    def births(self) -> list[Birth]:
        """Every birth so far, in order; bounded."""
        return self._lineage.births

    @property
    def counts(self) -> dict[str, int]:
        """How many ops made a bad value, handed one on, or gave a finite result from a bad operand."""
        line = self._lineage
        return {"born": line.born, "propagated": line.propagated, "absorbed": line.absorbed}

    def birth_of(self, tensor: Tensor) -> Birth | None:
        """The culprit on the chain that reached this bad tensor; None when it is finite or nobody knows."""
        try:
            kinds = probe.kinds(tensor)
            births = [birth for mark in self._lineage.marks.of(tensor) for birth in mark.births] if kinds else []
            if births:
                found = culprit(births)
                if found is not None and not self._places.after_backward:
                    found.in_forward = True
                return found
            if not kinds or self._owners.of(tensor) is None:
                return None
            return self._lineage.source(
                Operand("tensor", tensor, tensor, kinds=kinds), Place("forward", None, None, None)
            )
        except Exception as failure:
            self._failed(failure)
            return None

    def died_of(self) -> Birth | None:
        """The culprit behind the operand of the op that raised last: what a program that died was killed by."""
        return self._lineage.deadly

    def note_input(self, tensor: Tensor, name: str) -> None:
        """`tensor` came in from outside; should it be bad, `name` is what to call it."""
        with torch._C.DisableTorchFunctionSubclass():
            self._owners.note_input(tensor, name)

    def end_step(self) -> None:
        """The step is over: what comes now outside of modules is forward again."""
        self._places.after_backward = False
        self._lineage.end_step()

    def explain(self, birth: Birth) -> dict[str, Any]:
        """The fields of a Finding that the op level knows."""
        line, source = sites.text(birth.site)
        evidence = birth.evidence
        if evidence is not None and birth.thrown_away:
            evidence = replace(evidence, absorbed_by=birth.thrown_away)
        verdict = explain(evidence, birth.cause, birth.tensor, birth.kind)
        return {
            "phase": birth.phase,
            "module": birth.module,
            "module_type": birth.module_type,
            "call": birth.nth,
            "op": birth.op,
            "line": line,
            "source": source,
            "kind": birth.kind,
            "tensor": birth.tensor,
            "cause": verdict.cause,
            "why": verdict.why,
            "advice": verdict.advice,
            "tensors": evidence.tensors if evidence is not None else (),
        }

    def path(self, birth: Birth, to: Tensor, most: int = 12) -> list[str]:
        """From the birth to the tensor where it was noticed, one op a line."""
        return told(way(birth, [hop for mark in self._lineage.marks.of(to) for hop in mark.hops]), most)

    # --- the mode ---------------------------------------------------------------------------------

    def __enter__(self) -> Tracer:
        # Compiled code is not looked into, and `fullgraph=True` raises under a mode: run it all eagerly.
        internals.eager.hold()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        internals.eager.drop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, torch._ops.OpOverload) or internals.off_limits():
            return func(*args, **kwargs)
        if args and type(args[0]) in _NUMBERS and schema_of(func).takes_tensor:
            # TorchScript constants arrive as the numbers they wrap, which the op itself then refuses.
            args = (torch.tensor(args[0]), *args[1:])
        run: Run | None = self._quiet(self._before, func, args, kwargs)
        try:
            out = func(*args, **kwargs)
        except Exception:
            self._quiet(self._lineage.died, run)
            raise
        read: tuple[Tensor, Birth] | None = self._quiet(self._after, run, out) if run is not None else None
        if read is not None and self._on_host_read is not None:
            self._on_host_read(*read)
        return out

    def _quiet(self, look: Callable[..., Any], *args: Any) -> Any:
        """Look at tensors so that no other mode, the user's, sees it; a failure is counted."""
        try:
            return internals.unseen(look, *args)
        except Exception as failure:
            self._failed(failure)
            return None

    def _failed(self, failure: Exception) -> None:
        if len(self.failures) < 100:
            self.failures.append(f"{type(failure).__name__}: {failure}")

    def _before(self, func: Any, args: Any, kwargs: Any) -> Run:
        run = Run(func, schema_of(func), args, kwargs, internals.graph_task())
        self._nodes.note(run)
        self._places.note(run)
        if run.schema.writes and not run.schema.empty:
            run.save()
        return run

    def _after(self, run: Run, out: Any) -> tuple[Tensor, Birth] | None:
        schema, marks = run.schema, self._lineage.marks
        if schema.reads:
            return self._read(run, out)
        if schema.views:
            return None
        outs = run.outputs(out)
        if schema.empty or schema.collective:
            # What a collective gives is not read: it may still be under way. Its schema does not say what it writes.
            births = tuple({b.number: b for t in run.tensors for m in marks.of(t) for b in m.births}.values())
            for t in {id(t): t for t in [*(t for _, t in outs), *(run.tensors if schema.collective else ())]}.values():
                if births and schema.collective:  # this rank sent it
                    marks.put(t, births, None)
                else:
                    self._owners.note_unknown(t, "uninitialised" if schema.empty else "collective")
                    marks.clear(t)
            return None
        bads: list[tuple[int, Tensor]] = []
        for position, t in outs:
            numbers = probe.payload(t)
            if numbers is None or position in schema.garbage:
                continue
            if probe.bad(*probe.limits(numbers)):
                bads.append((position, t))
            else:
                marks.clear(t)
                self._owners.written(t)
        if not bads:
            if marks and (run.task != -1 or any(t.is_floating_point() or t.is_complex() for _, t in outs)):
                self._lineage.stopped(run)
        else:
            self._lineage.loss_scale = self.loss_scale or self._nodes.scale
            if schema.per_item:
                for position, t in bads:
                    self._lineage.settle(run, out, [(position, t)], run.operands(position))
            else:
                self._lineage.settle(run, out, bads, run.operands(None))
            for _, t in bads:
                self._owners.written(t)
        for _, t in outs:  # after the verdict: an op that works in place would be taken for its operand's maker
            if t.is_floating_point() and t.layout is torch.strided and not t.is_nested and type(t) in _PLAIN:
                self._note_maker(run, t)
        return None

    def _note_maker(self, run: Run, t: Tensor) -> None:
        if run.schema.base == "to_copy":
            cast = internals.autocast_dtype(t)
            constants = code_of(run.args[0].dtype) if cast else ()
            if cast:
                self._makers.cast_at.add(internals.autocast_depth())
        else:
            constants = run.constants()
        site = sites.user_site() if constants else None
        self._makers.put(t, run.schema.base, constants, run.tensors, site)

    def _read(self, run: Run, out: Any) -> tuple[Tensor, Birth] | None:
        """A number goes to the host: a bad one may decide what the program does next."""
        value = run.args[0] if run.args else None
        bad = isinstance(out, (float, complex)) and not abs(out) < math.inf
        if not isinstance(value, Tensor) or not (bad or (isinstance(out, bool) and probe.kinds(value))):
            return None
        birth = self.birth_of(value)
        return None if birth is None or birth.literal or sites.printing() else (value, birth)
