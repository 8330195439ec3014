"""What is taken of a fault while its tensors are in hand: its module's inputs, its op's operands, the batch."""

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .. import frames, probe
from ..naming import type_name
from ..verdict import Call, Origin, Rec
from . import rebuild
from .cargo import Cargo, Room

if TYPE_CHECKING:
    from ..births import Birth
    from ..finding import Finding
    from ..observer import Observer
    from ..runs import Run

SUSPECTS = 4  # births whose inputs are held at a time, until they are confirmed or turn out to be harmless
OPS = 32  # the same of single ops, at op level
_CALLS = 8  # calls of the model after which an op that nobody came back to is let go


@dataclass(slots=True)
class Part:
    """Some values of one moment, and what else a replay has to know of it, in terms of JSON."""

    cargo: Cargo
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One call of a module, known from a first run of the same step."""

    path: str
    nth: int
    step: int


@dataclass(slots=True, kw_only=True)
class Parts:
    """All that is known of one fault, for a capsule."""

    call: Part | None = None  # of the culprit module
    op: Part | None = None
    batches: list[Part] = field(default_factory=list)  # what the model was called with, the newest last
    hashes: list[dict[str, Any]] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)


class Catch:
    """Holds copies, bounded in number and in bytes, of what a capsule of a fault will want.

    A step in which nothing is suspected leaves nothing here, unless `ring` batches were asked for.

    Args:
        most: bytes that all copies together may have.
        ring: how many batches are kept, as copies made when the model is called.
        target: take the inputs of this call before it runs, and the gradients that come back to its outputs.
    """

    def __init__(self, *, most: int, ring: int = 0, target: Target | None = None) -> None:
        self.room = Room(most)
        self.target = target
        self.found: Parts | None = None  # of the first fault, where the watch itself writes no capsule
        self.closed = False  # no capsule will be written any more
        self.written: set[tuple[str, str | None]] = set()  # phases and modules of which there is a capsule
        self._ring: deque[Part] = deque(maxlen=ring)
        self._suspects: list[Origin] = []
        self._squeezed = False  # batches have made room for something else
        self._ops: list[tuple[Birth, int]] = []
        self._calls = 0
        self._hashed: deque[tuple[int, Any]] = deque(maxlen=2)
        self._met: Part | None = None
        self._outputs: dict[int, tuple[int, Rec]] = {}

    # --- what the model is called with --------------------------------------------------------------

    def batch(self, args: Any, kwargs: Any, step: int, sample: Any) -> None:
        """The model is called from outside."""
        if self.closed:
            return
        self._calls += 1
        self._hashed.append((step, sample))
        if self._ops and self._ops[0][1] < self._calls - _CALLS:
            self._let_go(self._calls - _CALLS)
        if self._ring.maxlen:
            part = Part(Cargo(self.room), {"step": step, **_ambient()})
            if len(self._ring) == self._ring.maxlen:
                self._ring.popleft()  # its room is the new one's
            _take_call(part.cargo, args, kwargs)
            _take_random(part.cargo)
            self._ring.append(part)

    def end_step(self) -> None:
        """What nothing has confirmed by now was harmless."""
        self._suspects.clear()
        self._let_go(self._calls + 1)

    def close(self) -> None:
        """Let all copies go, and take no more."""
        self.closed = True
        self.end_step()
        self._ring.clear()
        self._hashed.clear()

    def _let_go(self, before: int) -> None:
        for birth, at in self._ops:
            if at < before:
                birth.kept = None
        self._ops = [one for one in self._ops if one[1] >= before]

    # --- births -------------------------------------------------------------------------------------

    def _roomy(self, take: Callable[[], Part]) -> Part:
        """Take a part; batches, which are wanted last, make room for it."""
        part = take()
        if part.cargo.short and self._ring:
            del part
            self._ring.clear()
            self._squeezed = True
            part = take()
        return part

    def born(self, origin: Origin, observer: Observer, hand: Any) -> None:
        """A suspected birth: copy what its module was given, while the call still runs, and the module's state.

        Not of a module that there is a capsule of: a fault of every step would be copied in every step.
        """
        if self.closed or (origin.phase, origin.call.path if origin.call is not None else None) in self.written:
            return
        running = frames.running()
        origin.facts["call_part"] = self._roomy(lambda: self._culprit(origin, observer, running, hand))
        root = next((one for one in reversed(running) if id(one[0]) in observer.names.modules), None)
        given = (root[1], root[2]) if root is not None else hand
        if not self._ring.maxlen and isinstance(given, tuple) and len(given) == 2 and isinstance(given[1], dict):
            inner = Part(Cargo(self.room), {"step": origin.step, **_ambient()})
            _take_call(inner.cargo, *given)
            origin.facts["batch_part"] = inner
        self._suspects = [one for one in self._suspects if not one.settled]
        self._suspects.append(origin)
        if len(self._suspects) > SUSPECTS:
            self.forget(self._suspects[0])

    def _culprit(self, origin: Origin, observer: Observer, running: list[Any], hand: Any) -> Part:
        call = origin.call
        path = call.path if call is not None else None
        part = Part(Cargo(self.room), {"when": "after"})
        if call is not None and path is not None:
            ran = next((one for one in running if id(one[0]) == call.module_id), None)
            module = observer.names.by_path.get(path)
            module = module if module is not None else ran[0] if ran is not None else None
            part.facts |= {"module": path, "type": call.type_name, "call": call.nth, **_ambient()}
            if ran is not None and origin.phase in ("forward", "state") and hand is not None:
                _take_call(part.cargo, ran[1], ran[2])
                part.facts["changed"] = list(_changed(observer, call, ran[1], ran[2]))
            if module is not None:
                _take_module(part, module)
            _take_random(part.cargo)
        return part

    def forget(self, origin: Origin) -> None:
        """It was harmless."""
        for name in ("call_part", "batch_part"):
            origin.facts.pop(name, None)
        origin.facts.get("op_level", {}).pop("kept", None)
        self._suspects = [one for one in self._suspects if one is not origin]

    def op(self, run: Run, birth: Birth, position: int) -> None:
        """An op that made something bad has just run: copy what it was given."""
        if self.closed or (birth.phase, birth.module) in self.written:
            return
        if birth.literal or (len(self._ops) >= OPS and birth.kept is None):
            return
        birth.kept = self._roomy(lambda: self._operation(run, birth, position))
        self._ops.append((birth, self._calls))

    def _operation(self, run: Run, birth: Birth, position: int) -> Part:
        def before(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                found = run.before(value)
                return found if found is not None else _Overwritten()
            if type(value) in (list, tuple):
                # Of an op over lists, the item that failed: all of them together are a whole model.
                items = value[position : position + 1] if run.schema.per_item else value
                return type(value)(before(one) for one in items)
            return value

        cargo = Cargo(self.room)
        cargo.add("args", tuple(before(value) for value in run.args))
        cargo.add("kwargs", {key: before(value) for key, value in run.kwargs.items()})
        facts = {"name": str(run.func), "kinds": list(birth.kinds), "writes": bool(run.schema.writes)}
        facts["garbage"] = sorted(run.schema.garbage)
        return Part(cargo, facts)

    # --- a call that is known beforehand --------------------------------------------------------------

    def listen(self, observer: Observer) -> None:
        """Stand before what the hooks call: only where there is a target, and the step is run a second time."""
        pre, post, gradient = observer.on_pre, observer.on_post, observer.on_gradient

        def on_pre(module: nn.Module, args: tuple[Any, ...]) -> None:
            pre(module, args)
            observer.guarded(self._enter, observer, module, args, frames.call_kwargs())

        def on_post(module: nn.Module, args: Any, kwargs: Any, *out: Any) -> None:
            call = observer.calls.current()
            mine = out and call is not None and call.module_id == id(module) and self._wanted(observer, call)
            post(module, args, kwargs, *out)
            if mine:
                observer.guarded(self._leave, observer, out[0])

        def on_gradient(rec: Rec, grad: torch.Tensor | None) -> None:
            known = self._outputs.get(id(rec))
            if known is not None and grad is not None:
                observer.guarded(self._came_back, known[0], grad)
            gradient(rec, grad)

        for name, event in (("on_pre", on_pre), ("on_post", on_post), ("on_gradient", on_gradient)):
            setattr(observer, name, event)

    def _wanted(self, observer: Observer, call: Call) -> bool:
        target = self.target
        return (
            target is not None
            and call.path == target.path
            and call.nth == target.nth
            and not call.again
            and observer.serial == target.step
        )

    def _enter(self, observer: Observer, module: nn.Module, args: Any, kwargs: Any) -> None:
        call = observer.calls.current()
        if self._met is not None or call is None or call.module_id != id(module) or not self._wanted(observer, call):
            return

        def taken() -> Part:
            facts = {"when": "before", "module": call.path, "type": call.type_name, "call": call.nth, **_ambient()}
            part = Part(Cargo(self.room), facts)
            _take_call(part.cargo, args, kwargs)
            _take_module(part, observer.names.by_path.get(call.path, module))
            _take_random(part.cargo)
            return part

        self._met = self._roomy(taken)

    def _leave(self, observer: Observer, out: Any) -> None:
        for at, (_, tensor) in enumerate(probe.leaves(out)):
            rec = observer.known(tensor)
            if rec is not None:
                self._outputs[id(rec)] = at, rec

    def _came_back(self, at: int, grad: torch.Tensor) -> None:
        name = f"gradient {at}"
        if self._met is not None and not (self.found is not None and name in self._met.cargo.trees):
            self._met.cargo.take_off(name)  # that of a backward before, which was healthy
            self._met.cargo.add(name, grad)

    # --- the fault ------------------------------------------------------------------------------------

    def parts(self, finding: Finding, origin: Origin | None) -> Parts:
        """What was taken of this fault; `missing` says in words what was not."""
        found = Parts(batches=list(self._ring), hashes=[{"step": s, "sample": sample} for s, sample in self._hashed])
        if self._squeezed and not found.batches:
            found.missing.append("the batch: with it, the rest would not fit into max_mb")
        facts = origin.facts if origin is not None else {}
        if not found.batches and facts.get("batch_part") is not None:
            found.batches = [facts["batch_part"]]
        found.op = (facts.get("op_level") or {}).get("kept")
        for part in (self._met, facts.get("call_part")):
            if part is not None and found.call is None and _same_call(part, finding):
                found.call = part
        return found


class _Overwritten:
    """Stands for an operand that the op has written to, and that was too large to be copied first."""


def _same_call(part: Part, finding: Finding) -> bool:
    return finding.module is not None and (part.facts.get("module"), part.facts.get("call")) == (
        finding.module,
        finding.call,
    )


def _take_call(cargo: Cargo, args: Any, kwargs: Any) -> None:
    cargo.add("call", {"args": tuple(args), "kwargs": dict(kwargs)})


def _take_module(part: Part, module: nn.Module) -> None:
    """Its parameters and buffers with those of all that is inside it, and how to build it where torch.nn can."""
    named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    part.cargo.add("state", dict(named))
    part.cargo.add("build", rebuild.described(module))
    part.facts["training"] = {name: m.training for name, m in module.named_modules()}
    part.facts["buffers"] = any(True for _ in module.buffers())
    part.facts["type"] = part.facts.get("type") or type_name(module)


def _take_random(cargo: Cargo) -> None:
    """The state of the generators of torch (each device that is in use), python and numpy."""
    version, words, gauss = random.getstate()
    # As a tensor: 625 numbers, each as a value of its own, would take a third of a millisecond.
    python = {"version": version, "words": torch.tensor(words, device="cpu"), "gauss": gauss}
    states: dict[str, Any] = {"torch": torch.get_rng_state(), "python": python}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        states["numpy"] = numpy.random.get_state()
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states["cuda"] = torch.cuda.get_rng_state()
    cargo.add("random", states)


def _ambient() -> dict[str, Any]:
    """The switches of this thread that decide what a forward computes."""
    casts = {}
    for kind in ("cpu", "cuda"):
        if torch.is_autocast_enabled(kind):
            casts[kind] = str(torch.get_autocast_dtype(kind)).removeprefix("torch.")
    return {
        "autocast": casts,
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "default_dtype": str(torch.get_default_dtype()).removeprefix("torch."),
    }


def _changed(observer: Observer, call: Call, args: Any, kwargs: Any) -> Iterator[str]:
    """The inputs that are not any more what they were when the call began."""
    for name, tensor in probe.leaves((args, kwargs)):
        if tensor.is_floating_point() and not tensor.is_inference() and not isinstance(tensor, nn.Parameter):
            rec = observer.known(tensor)
            if tensor.dtype in probe.DIRECT and (rec is None or call not in rec.takers):
                yield name
