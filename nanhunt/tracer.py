"""The op level: every op of a step watched as it runs; births, and where they go."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from . import internals, probe, sites
from .births import Birth, Hop, Made, Marks, culprit
from .causes import explain
from .evidence import Operand, calmed, output_at, rerun, small
from .finding import TensorStats
from .makers import Makers, code_of
from .owners import Owners
from .schemas import Schema, schema_of
from .witness import Witness

if TYPE_CHECKING:
    from .naming import Names
    from .verdict import Call

Tensor = torch.Tensor

_MOST_BIRTHS = 10_000
_MOST_NODES = 500_000
_MOST_HOPS = 200_000
_MOST_AGAIN = 1000  # ops run once more with their bad operands calmed
_SAVED = 1 << 26  # elements that one in-place op may have copied before it runs
# These hand numbers on and make none.
_CARRIES = frozenset(
    "copy clone cat stack index index_select gather scatter slice_backward select_backward slice_scatter "
    "select_scatter embedding expand repeat roll flip constant_pad_nd masked_fill masked_select where index_put "
    "unfold_backward as_strided_scatter triu tril contiguous alias detach lift_fresh index_copy index_fill".split()
)


class _Run:
    """One op, from before it runs to after."""

    __slots__ = ("func", "schema", "args", "kwargs", "tensors", "saved", "task")

    def __init__(self, func: Any, schema: Schema, args: Any, kwargs: Any, task: int) -> None:
        self.func, self.schema, self.args, self.kwargs, self.task = func, schema, args, kwargs, task
        self.tensors = _tensors((*args, *kwargs.values()))
        self.saved: dict[int, Tensor | None] = {}

    def before(self, t: Tensor) -> Tensor:
        """`t` as it was before this op wrote to it."""
        saved = self.saved.get(id(t), t)
        return t if saved is None else saved


class _Place:
    """Where in the user's terms an op ran."""

    __slots__ = ("phase", "op", "base", "call", "site", "module", "module_type", "tensor", "user_code", "optimizer")

    def __init__(self, phase: str, op: str | None, call: Call | None, site: sites.Site | None) -> None:
        self.phase, self.op, self.call, self.site = phase, op, call, site
        self.base: str | None = None  # in backward: the forward op
        self.module: str | None = call.path if call is not None else None
        self.module_type: str | None = call.type_name if call is not None else None
        self.tensor: str | None = None
        self.user_code = False
        self.optimizer: torch.optim.Optimizer | None = None


class Tracer(TorchDispatchMode):
    """Sees every op of forward, loss, backward and optimizer, and follows what is born bad.

    `names` is a `Names`, `current_call` gives the innermost running module call of this thread, and
    `on_host_read` is told of a bad number that the program reads. The results are left alone: ranges are
    taken before an op that writes to its operands, and nothing of the user's is kept alive.
    """

    supports_higher_order_operators = True

    def __init__(
        self,
        *,
        names: Names,
        current_call: Callable[[], Call | None],
        on_host_read: Callable[[Tensor, Birth], None] | None = None,
    ) -> None:
        super().__init__()
        self.births: list[Birth] = []
        self.born = self.propagated = self.absorbed = 0
        self.failures: list[str] = []
        self.loss_scale: float | None = None  # what the watch knows of a scaler
        self._current_call, self._on_host_read = current_call, on_host_read
        self._owners = Owners(names)
        self._marks = Marks()
        self._makers = Makers()
        self._witness = Witness(self._makers)
        self._nodes: dict[int, dict[int, Made]] = {}
        self._literals: dict[Any, Birth] = {}
        self._after_backward = False
        self._task = -1
        self._guessed_scale: float | None = None
        self._hops = 0
        self._again = _MOST_AGAIN

    # --- what a watch asks ------------------------------------------------------------------------

    def birth_of(self, tensor: Tensor) -> Birth | None:
        """The culprit on the chain that reached this bad tensor; None when it is finite or nobody knows."""
        try:
            kinds = probe.kinds(tensor)
            if not kinds:
                return None
            births = [birth for mark in self._marks.of(tensor) for birth in mark.births]
            if births:
                return culprit(births)
            owner = self._owners.of(tensor)
            if owner is None:
                return None
            return self._source(Operand("tensor", tensor, kinds=kinds), _Place("forward", None, None, None))
        except Exception as failure:
            self._failed(failure)
            return None

    def note_input(self, tensor: Tensor, name: str) -> None:
        """`tensor` came in from outside; should it be bad, `name` is what to call it."""
        self._owners.note_input(tensor, name)

    def end_step(self) -> None:
        """The step is over: what comes now outside of modules is forward again."""
        self._after_backward = False
        self._again = _MOST_AGAIN

    def explain(self, birth: Birth) -> dict[str, Any]:
        """The fields of a Finding that the op level knows."""
        line, source = sites.text(birth.site)
        verdict = explain(birth.evidence, birth.cause, birth.tensor, birth.kind)
        tensors: tuple[TensorStats, ...] = birth.evidence.tensors if birth.evidence is not None else ()
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
            "tensors": tensors,
        }

    def path(self, birth: Birth, to: Tensor, most: int = 12) -> list[str]:
        """From the birth to the tensor where it was noticed, one op a line; longer ways lose their middle."""
        todo = [(hop, (hop,)) for mark in self._marks.of(to) for hop in mark.hops]
        seen: set[int] = set()
        while todo:
            hop, way = todo.pop(0)
            if hop.birth is birth:
                return _told(way, most)
            if id(hop) not in seen:
                seen.add(id(hop))
                todo.extend((back, (back, *way)) for back in hop.back)
        return []

    # --- the mode ---------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, torch._ops.OpOverload) or internals.off_limits():
            return func(*args, **kwargs)
        run = None
        try:
            run = self._look(func, args, kwargs)
        except Exception as failure:
            self._failed(failure)
        out = func(*args, **kwargs)
        read: tuple[Tensor, Birth] | None = None
        if run is not None:
            try:
                read = self._weigh(run, out)
            except Exception as failure:
                self._failed(failure)
        if read is not None and self._on_host_read is not None:
            self._on_host_read(*read)
        return out

    def _failed(self, failure: Exception) -> None:
        if len(self.failures) < 100:
            self.failures.append(f"{type(failure).__name__}: {failure}")

    def _look(self, func: Any, args: Any, kwargs: Any) -> _Run:
        """Before the op: what it will overwrite, and which autograd node it is making."""
        run = _Run(func, schema_of(func), args, kwargs, internals.graph_task())
        if run.schema.writes and not run.schema.empty:
            self._save(run)
        if run.task != -1:
            self._after_backward = True
            if run.task != self._task:
                self._task = run.task
                self._guess_scale(run)
        elif self._after_backward and self._current_call() is not None:
            self._after_backward = False
        if (run.task == -1 or torch.is_grad_enabled()) and any(t.requires_grad for t in run.tensors):
            number = internals.newest_node()
            nodes = self._nodes.setdefault(threading.get_ident(), {})
            if number >= 0 and number not in nodes:
                nodes[number] = self._made(run)
                if len(nodes) > _MOST_NODES:
                    del nodes[next(iter(nodes))]
        return run

    def _save(self, run: _Run) -> None:
        room = _SAVED
        schema = run.schema
        for role, value in (*zip(schema.roles, run.args), *run.kwargs.items()):
            if role not in schema.writes or role in schema.overwrites:
                continue
            for t in _tensors((value,)):
                if probe.payload(t) is not None:
                    room -= t.numel()
                    run.saved[id(t)] = t.detach().clone() if room >= 0 else None

    def _made(self, run: _Run) -> Made:
        """What the node that this op makes will be called when its backward fails."""
        if run.task != -1:
            inside = sites.inside_backward()
            if not inside.again:  # a backward that is differentiated again: all comes from the same forward op
                forward = self._forward_of(internals.running_node())
                if forward is not None:
                    return forward
                return Made(run.schema.name, run.schema.base, None, inside.site)
        return Made(run.schema.name, run.schema.base, self._current_call(), sites.user_site())

    def _forward_of(self, node: Any) -> Made | None:
        """The forward op whose derivative `node` is."""
        if node is None:
            return None
        number, name = internals.number_of(node), node.name()
        if number < 0 or number >= internals.ACCUMULATE:
            return None
        if name == "CopySlices":  # numbered after the op whose result it copies
            number -= 1
        plain = name.lower().replace("_", "")
        own = self._nodes.get(threading.get_ident())
        tables = ([own] if own is not None else []) + [t for t in self._nodes.values() if t is not own]
        best: Made | None = None
        for table in tables:
            for step in range(50):
                made = table.get(number - step)
                if made is not None:
                    # Numbers are counted per thread: among several, the one whose name fits.
                    if len(tables) == 1 or plain.startswith(made.base.replace("_", "")[:6]):
                        return made
                    best = best or made
                    break
        return best

    def _guess_scale(self, run: _Run) -> None:
        """A backward that starts by multiplying with a constant: most likely a loss scale."""
        self._guessed_scale = None
        node = internals.running_node()
        if run.schema.base == "mul" and node is not None and node.name().startswith("MulBackward"):
            for value in run.args[1:2]:
                if isinstance(value, Tensor) and value.dim() == 0 and value.device.type == "cpu":
                    value = float(value)
                if isinstance(value, float) and value >= 2:
                    self._guessed_scale = value

    # --- after the op -----------------------------------------------------------------------------

    def _weigh(self, run: _Run, out: Any) -> tuple[Tensor, Birth] | None:
        schema = run.schema
        if schema.reads:
            return self._read(run, out)
        outs = _outputs(run, out)
        if schema.empty or schema.collective:
            for _, t in outs:
                self._owners.note_unknown(t, "uninitialised" if schema.empty else "collective")
                self._marks.clear(t)
            return None
        if schema.views:
            return None
        bads: list[tuple[int, Tensor]] = []
        scalars = self._constants(run)
        for position, t in outs:
            numbers = probe.payload(t)
            if numbers is None or position in schema.garbage:
                continue
            if numbers is t:
                site = sites.user_site() if scalars else None
                self._makers.put(t, schema.base, scalars, run.tensors, site)
            if probe.bad(*probe.limits(numbers)):
                bads.append((position, t))
            else:
                self._marks.clear(t)
                self._owners.written(t, bool(schema.overwrites))
        if bads:
            self._judge(run, out, outs, bads)
        elif self._marks:
            self._note_absorbed(run)
        return None

    def _constants(self, run: _Run) -> tuple[float, ...]:
        """The Python numbers among the arguments, also those that torch has wrapped in a tensor."""
        if run.schema.base == "to_copy":
            code = code_of(run.args[0].dtype)
            return () if code is None else (code,)
        found = []
        for value in (*run.args, *run.kwargs.values()):
            if type(value) is float:
                found.append(value)
            elif isinstance(value, Tensor) and _wrapped(value):
                found.append(float(value))
        return tuple(found)

    def _read(self, run: _Run, out: Any) -> tuple[Tensor, Birth] | None:
        value = run.args[0] if run.args else None
        bad = isinstance(out, (float, complex)) and not (abs(out) < math.inf)
        if not isinstance(value, Tensor) or not (bad or (isinstance(out, bool) and probe.kinds(value))):
            return None
        birth = self.birth_of(value)
        if birth is None or birth.literal or sites.printing():
            return None
        return value, birth

    def _note_absorbed(self, run: _Run) -> None:
        """A bad operand and a finite result: who was stopped, and by what."""
        stopped = {birth for t in run.tensors for mark in self._marks.of(t) for birth in mark.births}
        if stopped:
            self.absorbed += 1
            for birth in stopped:
                if len(birth.absorbed_by) < 16:
                    birth.absorbed_by.add(run.schema.base)

    def _judge(self, run: _Run, out: Any, outs: list[tuple[int, Tensor]], bads: list[tuple[int, Tensor]]) -> None:
        """Something came out bad: was it handed on, or made here?"""
        if run.schema.per_item:
            for position, t in bads:
                self._settle(run, out, [(position, t)], _operands(run, position))
        else:
            self._settle(run, out, bads, _operands(run, None))

    def _settle(self, run: _Run, out: Any, bads: list[tuple[int, Tensor]], operands: list[Operand]) -> None:
        place = self._place(run, operands)
        arrived: dict[int, Birth] = {}
        hops: list[Hop] = []
        kinds_in: set[str] = set()
        literals: dict[str, float] = dict(_bad_scalars(run))
        for operand in operands:
            before = run.before(operand.tensor)
            if before is operand.tensor and id(before) in run.saved:
                continue  # too large to be copied: nobody knows
            operand.kinds = probe.kinds(before)
            if not operand.kinds:
                continue
            marks = [m for m in self._marks.of(operand.tensor)]
            if not marks and _wrapped(before):
                literals[operand.role] = float(before)
                continue
            kinds_in.update(operand.kinds)
            births = [b for m in marks for b in m.births] or [self._source(operand, place)]
            for birth in births:
                if birth.reader_open and not self._casts(run):
                    birth.reader_open = False
                    birth.op, birth.site, birth.call = place.op, place.site, place.call
                    birth.module, birth.module_type = place.module, place.module_type
                arrived[birth.number] = birth
            hops.extend(h for m in marks for h in m.hops)
            operand.tensor = before
        kinds_out = _order({kind for _, t in bads for kind in probe.kinds(t)})
        inherited = tuple(arrived[number] for number in sorted(arrived))
        if not inherited and not literals:
            new = self._birth(run, out, place, operands, bads, kinds_out, ())
        elif "nan" in kinds_out and "nan" not in kinds_in:
            # Infinities became a NaN here, or a NaN was given as a number.
            new = self._birth(run, out, place, operands, bads, ("nan",), inherited, literals)
        elif not inherited:
            new = self._literal(run, out, place, operands, bads, kinds_out, literals)
        else:
            new = self._anew(run, place, operands, bads)
        births = inherited if new is None else (new,) if new.parents else (*inherited, new)
        if len(births) > 24:
            births = (*[b for b in births if not b.literal][:16], *[b for b in births if b.literal][:4])
        self.propagated += new is None
        hop: Hop | None = None
        self._hops += 1
        if self._hops <= _MOST_HOPS:
            ran = place.op if place.op is not None else run.schema.name
            hop = Hop(ran, place.phase, place.module, place.site, kinds_out[0], tuple(hops[:8]), new)
            if new is None and not hops and inherited:
                hop.birth = inherited[0]
        for _, t in bads:
            self._marks.put(t, births, hop)

    # --- births -----------------------------------------------------------------------------------

    def _birth(
        self,
        run: _Run,
        out: Any,
        place: _Place,
        operands: list[Operand],
        bads: list[tuple[int, Tensor]],
        kinds: tuple[str, ...],
        parents: tuple[Birth, ...],
        literals: dict[str, float] | None = None,
        fresh: Tensor | None = None,
    ) -> Birth:
        position, t = bads[0]
        if kinds == ("nan",):
            position, t = next(((p, o) for p, o in bads if "nan" in probe.kinds(o)), bads[0])
        else:
            kinds = _order(set(probe.kinds(t)) & set(kinds)) or kinds
        birth = Birth(
            number=len(self.births),
            phase=place.phase,
            op=place.op if place.op is not None else run.schema.name,
            ran=run.schema.name,
            kinds=kinds,
            site=place.site,
            call=place.call,
            module=place.module,
            module_type=place.module_type,
            tensor=place.tensor or self._called(run, place, position, t),
            parents=parents,
        )
        if literals and place.phase != "optimizer":
            birth.cause = "literal"
        for operand in operands:
            operand.name = self._owners.name_of(operand.tensor)
        birth.evidence = self._witness.gather(
            run, place, operands, output_at(out, position) if position >= 0 else t, position, t, kinds,
            literals=literals or {}, inherited=bool(parents), fresh=fresh,
            loss_scale=self.loss_scale or self._guessed_scale, dropped=self._dropped(place),
        )  # fmt: skip
        self._keep(birth)
        return birth

    def _keep(self, birth: Birth) -> None:
        self.born += 1
        if len(self.births) < _MOST_BIRTHS:
            self.births.append(birth)
        else:
            birth.number = self.born

    def _literal(
        self,
        run: _Run,
        out: Any,
        place: _Place,
        operands: list[Operand],
        bads: list[tuple[int, Tensor]],
        kinds: tuple[str, ...],
        literals: dict[str, float],
    ) -> Birth:
        """An infinity given as a number: intent. In an update it is not: nobody wants an infinite step."""
        if place.phase == "optimizer":
            return self._birth(run, out, place, operands, bads, kinds, (), literals)
        key = (run.schema.name, place.site, kinds)
        known = self._literals.get(key)
        if known is None:
            known = Birth(
                number=len(self.births), phase=place.phase, op=place.op, ran=run.schema.name, kinds=kinds,
                site=place.site, call=place.call, module=place.module, module_type=place.module_type, literal=True,
                cause="literal",
            )  # fmt: skip
            self._literals[key] = known
            self._keep(known)
        return known

    def _anew(self, run: _Run, place: _Place, operands: list[Operand], bads: list[tuple[int, Tensor]]) -> Birth | None:
        """With its bad operands made harmless, does the op still give something bad? Then that is its own doing."""
        schema = run.schema
        if schema.base in _CARRIES or self._again <= 0 or not all(small(t) for t in run.tensors):
            return None
        self._again -= 1
        again = rerun(run.func, schema, run.args, run.kwargs, lambda t: calmed(run.before(t)), False)
        for position, t in bads:
            fresh = output_at(again, position)
            if isinstance(fresh, Tensor) and fresh.shape == t.shape:
                kinds = probe.kinds(fresh)
                if kinds:
                    return self._birth(run, again, place, operands, [(position, fresh)], kinds, (), None, fresh)
        return None

    def _source(self, operand: Operand, place: _Place) -> Birth:
        """A tensor that was bad before anybody looked: the batch, a weight, a buffer, memory nobody wrote."""
        t, kinds = operand.tensor, operand.kinds
        owner = self._owners.of(t, place.optimizer)
        what, name = (owner.what, owner.name) if owner is not None else ("input", None)
        number = {"parameter": "bad_parameter", "buffer": "bad_buffer", "input": "bad_input"}
        phase = {"parameter": "state", "buffer": "state", "state": "state", "input": "input"}.get(what, place.phase)
        literal = "nan" not in kinds and what in ("buffer", "input", "state")
        birth = Birth(
            number=len(self.births), phase=phase, op=place.op, ran=place.op or "", kinds=kinds, site=place.site,
            call=place.call, module=place.module, module_type=place.module_type, tensor=name or operand.role,
            literal=literal, cause=number.get(what, what if what in ("uninitialised", "collective") else "unknown"),
        )  # fmt: skip
        if what == "input":
            birth.op = birth.module = birth.module_type = None
            call, birth.call = birth.call, None
            while call is not None and call.parent is not None:
                call = call.parent
            if call is not None and call.site is not None:
                birth.site = call.site
            birth.tensor = name or "batch"
        elif what in ("parameter", "buffer"):
            birth.reader_open = place.op is None or (place.op.startswith("aten._to_copy") and self._autocast())
        birth.evidence = self._witness.source(operand, place.phase, birth.tensor)
        self._keep(birth)
        self._marks.put(t, (birth,), None)
        return birth

    # --- places -----------------------------------------------------------------------------------

    def _place(self, run: _Run, operands: list[Operand]) -> _Place:
        schema = run.schema
        if run.task == -1:
            call = self._current_call()
            place = _Place("forward", schema.name, call, sites.user_site())
            if call is None:
                updating, place.optimizer = sites.optimizer_running()
                if updating or (self._after_backward and self._is_update(operands)):
                    place.phase = "optimizer"
            return place
        inside = sites.inside_backward()
        if inside.again:
            return _Place("forward", schema.name, self._current_call(), inside.site)
        node = internals.running_node()
        if node is not None and internals.number_of(node) >= internals.ACCUMULATE and inside.site is None:
            place = _Place("backward", "AccumulateGrad", None, sites.backward_site())
            owner = self._owners.of(getattr(node, "variable", None))
            if owner is not None:
                place.tensor = f"grad of {owner.name}"
                place.module, place.module_type = owner.module, owner.module_type
            return place
        made = self._forward_of(node)
        place = _Place("backward", schema.name, None, inside.site or sites.backward_site())
        place.user_code = inside.site is not None
        if made is not None:
            place.call = made.call
            place.module = made.call.path if made.call is not None else None
            place.module_type = made.call.type_name if made.call is not None else None
            if inside.site is None:
                place.op, place.base, place.site = made.op, made.base, made.site
        return place

    def _is_update(self, operands: list[Operand]) -> bool:
        return not torch.is_grad_enabled() or any(self._owners.is_gradient(o.tensor) for o in operands)

    def _called(self, run: _Run, place: _Place, position: int, t: Tensor) -> str:
        """The name of the tensor that came out bad."""
        if place.phase == "backward":
            return "grad_input"
        name = self._owners.name_of(t, place.optimizer) if position < 0 or run.schema.writes else None
        return name or ("output" if run.schema.outputs < 2 else f"output[{max(position, 0)}]")

    def _dropped(self, place: _Place) -> tuple[str, ...]:
        """In backward: what threw the forward result of the same op away, where that was bad already."""
        if place.phase != "backward":
            return ()
        for birth in reversed(self.births):
            if birth.phase == "forward" and birth.site == place.site and birth.op == place.op and birth.absorbed_by:
                return tuple(sorted(birth.absorbed_by))
        return ()

    def _casts(self, run: _Run) -> bool:
        return run.schema.base == "to_copy" and self._autocast()

    @staticmethod
    def _autocast() -> bool:
        return internals.autocast_depth() > 0


# --- arguments and results -----------------------------------------------------------------------------------


def _tensors(values: Any) -> list[Tensor]:
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif type(value) in (list, tuple):
            found.extend(one for one in value if isinstance(one, Tensor))
    return found


def _outputs(run: _Run, out: Any) -> list[tuple[int, Tensor]]:
    """Results by position; tensors that were written but not returned have no position (-1) unless per item."""
    if isinstance(out, Tensor):
        found = [(0, out)]
    elif isinstance(out, (list, tuple)):
        found = [(i, one) for i, one in enumerate(out) if isinstance(one, Tensor)]
    else:
        found = []
    if run.schema.writes:
        seen = {id(t) for _, t in found}
        for role, value in (*zip(run.schema.roles, run.args), *run.kwargs.items()):
            if role in run.schema.writes:
                for i, t in enumerate(_tensors((value,))):
                    if id(t) not in seen:
                        found.append((i if run.schema.per_item else -1, t))
    return found


def _operands(run: _Run, item: int | None) -> list[Operand]:
    """Tensor arguments by role; of an op over lists, those of one item. What is only overwritten is left out."""
    found: list[Operand] = []
    for role, value in (*zip(run.schema.roles, run.args), *run.kwargs.items()):
        if role in run.schema.overwrites:
            continue
        if isinstance(value, Tensor):
            found.append(Operand(role, value))
        elif type(value) in (list, tuple):
            for i, one in enumerate(value):
                if isinstance(one, Tensor) and (item is None or i == item):
                    found.append(Operand(role if item is not None else f"{role}[{i}]", one))
    return [o for o in found if probe.payload(o.tensor) is not None or not o.tensor.is_floating_point()]


def _wrapped(t: Tensor) -> bool:
    """A Python number that torch has wrapped in a tensor: 0-dimensional, float64, on the host."""
    return t.dim() == 0 and t.dtype is torch.float64 and t.device.type == "cpu" and not t.requires_grad


def _bad_scalars(run: _Run) -> list[tuple[str, float]]:
    found = []
    for role, value in (*zip(run.schema.roles, run.args), *run.kwargs.items()):
        values = value if type(value) in (list, tuple) else (value,)
        for one in values:
            if isinstance(one, (float, complex)) and not abs(one) < math.inf:
                found.append((role, one if isinstance(one, float) else math.nan))
    return found


def _order(kinds: set[str]) -> tuple[str, ...]:
    return tuple(kind for kind in ("nan", "+inf", "-inf") if kind in kinds)


def _told(way: tuple[Hop, ...], most: int) -> list[str]:
    lines = []
    for hop in way:
        line, source = sites.text(hop.site)
        where = f" in {hop.module or 'the root'}" if hop.module is not None else ""
        lines.append(f"{hop.phase}: {hop.op}{where} gave {hop.kind}  {line or '?'}  {source or ''}".rstrip())
    if len(lines) > most:
        head = most // 2
        lines[head : len(lines) - (most - head - 1)] = [f"... {len(lines) - most + 1} more ops ..."]
    return lines
