"""What is written down, and decided, while dynamo traces the hooks: which tensors a graph looks at, in which order."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from . import dynamo, internals, sites, traces
from .traces import SEAT, Event, Trace, Value, View

_CHECKPOINT = "tag_activation_checkpoint"
_FLOAT8 = frozenset(
    dtype for name, dtype in vars(torch).items() if name.startswith("float8_") and isinstance(dtype, torch.dtype)
)
_FLOATS = frozenset((torch.float16, torch.bfloat16, torch.float32, torch.float64)) | _FLOAT8
# What the name of an autograd node begins with, by the name of the function that makes it, where they differ.
_NODES = {"truediv": "Div", "div": "Div", "floordiv": "Div", "matmul": "Mm", "linear": "Addmm", "mul": "Mul"}

Item = tuple[tuple[dynamo.Step, ...], str, bool]  # where a tensor stands, its slot, whether it must be cast
Plan = tuple[int, bool, tuple[Item, ...]]  # the mark to set, whether no watch covers the module, what to look at

_NOTHING: Plan = (-1, False, ())
_STRAY: Plan = (-1, True, ())
_plan: list[Plan] = [_NOTHING]


@dynamo.constant
def plan() -> Plan:
    """What the `log_` call just before has decided: a constant to the code that is traced."""
    return _plan[0]


def log_enter(context: Any) -> None:
    """Called by dynamo in the middle of a forward pre-hook."""
    _logged(context, _enter)


def log_leave(context: Any) -> None:
    """Called by dynamo in the middle of a forward hook."""
    _logged(context, _leave)


def _logged(context: Any, event: Callable[[dynamo.Tracing, nn.Module, list[View]], Plan]) -> None:
    _plan[0] = _NOTHING
    traces.through()
    if not traces.live.on:
        return
    try:
        tracing = dynamo.Tracing(context)
        module = tracing.variable("module").value
        seers = [view for view in traces.views if view.holds(module)]
        if not seers:
            traces.stray()
            _plan[0] = _STRAY
        elif not tracing.graph.export:
            _plan[0] = event(tracing, module, seers)
    except Exception as failure:  # of the private parts of another torch: the program is compiled without checks
        for view in traces.views:
            view.blind.add(f"compiled code could not be checked ({type(failure).__name__}: {failure})"[:200])


def _trace_of(tracing: dynamo.Tracing, seers: list[View]) -> Trace:
    trace: Trace | None = getattr(tracing.graph, SEAT, None)
    if trace is None:  # dynamo begins anew, with another graph, when it has to break one
        for view in seers:
            view.seat()
        trace = traces.begin(seers[0].home())
        setattr(tracing.graph, SEAT, trace)
    return trace


def _enter(tracing: dynamo.Tracing, module: nn.Module, seers: list[View]) -> Plan:
    trace = _trace_of(tracing, seers)
    bodies = tracing.bodies()
    site = next((line for line in tracing.lines() if sites.is_user(line[0])), None)
    event = Event(True, module, site)
    trace.events.append(event)
    items: list[Item] = []
    for step, part in enumerate(dynamo.items(tracing.variable("args"))):
        for path, tensor in dynamo.tensors(tracing, part):
            name = (step, dynamo.suffix(path))
            _note(trace, event, module, name, tensor, ((False, step), *path), bodies, items)
    versions: dict[int, int] = {}
    try:
        for _, part in dynamo.entries(tracing.variable("kwargs", above=2)):
            for _, tensor in dynamo.tensors(tracing, part):
                versions[id(_fake(tensor))] = _version(_fake(tensor))
    except Exception:  # the frame is not as expected: taken as they are found when the call ends
        versions = {}
    trace.open.append((event, versions))
    return _mark(trace, bodies), False, tuple(items)


def _leave(tracing: dynamo.Tracing, module: nn.Module, seers: list[View]) -> Plan:
    trace = _trace_of(tracing, seers)
    bodies = tracing.bodies()
    entered: Event | None = None
    versions: dict[int, int] = {}
    while trace.open and entered is None:
        begun, versions = trace.open.pop()
        entered = begun if begun.module() is module else None
    items: list[Item] = []
    if entered is not None:  # a global pre-hook is not given the keyword arguments
        for key, part in dynamo.entries(tracing.variable("kwargs")):
            for path, tensor in dynamo.tensors(tracing, part):
                fake = _fake(tensor)
                if versions.get(id(fake), _version(fake)) == _version(fake):  # else the call has written to it
                    where = ((False, 0), (False, key), *path)
                    _note(trace, entered, module, (key, dynamo.suffix(path)), tensor, where, bodies, items)
    event = Event(False, module, None)
    trace.events.append(event)
    for path, tensor in dynamo.tensors(tracing, tracing.variable("out")):
        name = ("output", dynamo.suffix(path))
        _note(trace, event, module, name, tensor, ((False, 1), *path), bodies, items)
    return _mark(trace, bodies), False, tuple(items)


def _mark(trace: Trace, bodies: list[str]) -> int:
    if trace.marked or bodies:
        return -1
    trace.marked = True
    return trace.serial


def _note(
    trace: Trace,
    event: Event,
    module: nn.Module,
    name: Any,
    tensor: Any,
    where: tuple[dynamo.Step, ...],
    bodies: list[str],
    items: list[Item],
) -> None:
    """Write down that an event has this tensor, and have it looked at if nobody has done so."""
    fake = _fake(tensor)
    if issubclass(tensor.python_type(), nn.Parameter):
        return
    identity = id(fake), _version(fake)
    value = trace.known.get(identity)
    if value is None:
        if any(body != _CHECKPOINT for body in bodies) or internals.transformed() or not _readable(tensor, fake):
            return
        wide = torch.float64 if fake.dtype is torch.float64 else torch.float32
        key = trace.key(module, f"{wide}_{fake.device}".removeprefix("torch."))
        value = Value(fake.dtype, _node(tensor.proxy.node), weakref.ref(module), key, len(trace.values))
        traces.seats.add(module, key, wide, fake.device)
        trace.known[identity] = value
        trace.values.append(value)
        items.append((where, value.key, fake.dtype in _FLOAT8))
    event.values.append((name, value))


def _fake(tensor: Any) -> Any:
    return tensor.proxy.node.meta["example_value"]


def _version(fake: Any) -> int:
    return 0 if fake.is_inference() else int(fake._version)


def _readable(tensor: Any, fake: Any) -> bool:
    if tensor.python_type() is not torch.Tensor or is_lazy(fake) or fake.is_nested or fake.is_quantized:
        return False
    if fake.layout is not torch.strided or fake.dtype not in _FLOATS or fake.device.type == "meta":
        return False
    # A size that is only known when the graph runs may be 0, and nothing has no largest number.
    return not any(size == 0 if type(size) is int else _unbacked(size) for size in fake.shape)


def _unbacked(size: Any) -> bool:
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    return bool(free_unbacked_symbols(size))


def _node(node: Any) -> str:
    """What the name of the autograd node of this op begins with."""
    target = node.target
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    name = name.strip("_")
    return _NODES.get(name) or "".join(part.capitalize() for part in name.split("_"))
