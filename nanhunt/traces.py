"""What compiled graphs report and where they leave it: slots on modules, the script of each graph, who is told."""

from __future__ import annotations

import itertools
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from . import dynamo

if TYPE_CHECKING:
    from .naming import Names
    from .verdict import Call

_TORCH_SPEAKS = r"Using `torch\.compile\(module\)` when there are global hooks"
_filters: list[Any] = []  # the one that is set because of this
SEAT = "_nanhunt"  # the one attribute that stands on a module, while a watch that compiled code reports to is on


class Seat:
    """The slots of one module, 0-dim tensors as plain attributes: compiled code writes there how large a tensor is.

    It is no part of the user's model: a copy or a pickle of the module has None in its place.
    """

    def __reduce_ex__(self, protocol: Any) -> Any:
        return type(None), ()


class Mark:
    """Set by the compiled code of one trace when it has run."""

    def __init__(self) -> None:
        self.ran = False


class Live:
    """What traced code reads, so that dynamo guards on it: one graph with the checks, one without."""

    def __init__(self) -> None:
        self.on = False
        self.generation = 0  # of watched models: a module that is new among them must be traced anew


class Value:
    """One tensor of a graph. `key` names the slot, on the seat of `owner`, for its number of largest magnitude."""

    __slots__ = ("dtype", "index", "key", "node", "owner")

    def __init__(self, dtype: torch.dtype, node: str, owner: weakref.ref[nn.Module], key: str, index: int) -> None:
        self.dtype, self.node = dtype, node
        self.owner, self.key, self.index = owner, key, index  # `index` among the values of the trace


class Event:
    """A module is entered, or left, with what it was given or gives back."""

    __slots__ = ("enter", "module", "site", "values")

    def __init__(self, enter: bool, module: nn.Module, site: tuple[str, int] | None) -> None:
        self.enter, self.site = enter, site
        self.module = weakref.ref(module)
        self.values: list[tuple[Any, Value]] = []  # by name


class Trace:
    """The script of one graph: its module calls in the order in which they run."""

    def __init__(self, serial: int, home: nn.Module | None) -> None:
        self.serial = serial
        self.home = weakref.ref(home) if home is not None else None  # the module whose hooks stand around the graph
        self.mark, self.marked = Mark(), False
        self.events: list[Event] = []
        self.values: list[Value] = []
        self.open: list[tuple[Event, dict[int, int]]] = []  # calls that run, with the versions of their kwargs
        self.known: dict[tuple[int, int], Value] = {}
        self._counts: dict[tuple[int, str], int] = {}
        self._versions: dict[int, int] = {}

    def key(self, module: nn.Module, kind: str) -> str:
        """A name for the next slot of a module, the same in each trace and for each module of the class."""
        n = self._counts[id(module), kind] = self._counts.get((id(module), kind), -1) + 1
        return f"{kind}_{n}"

    def ran(self) -> bool:
        """Whether the graph has run since this was last asked."""
        if self.marked:
            ran, self.mark.ran = self.mark.ran, False
            return ran
        # Inside a checkpoint dynamo allows no flag to be set, but the slots count how often they are written.
        ran = False
        for value in self.values[:1]:
            module = value.owner()
            for seat in seats.peers(type(module)):
                slot = getattr(seat, value.key, None)
                if slot is not None and self._versions.get(id(seat), 0) != slot._version:
                    ran, self._versions[id(seat)] = True, slot._version
        return ran


class _Seats:
    """Seats by module. Those of one class have the same slots: layers that are alike share one graph."""

    def __init__(self) -> None:
        self._of: dict[int, tuple[weakref.ref[nn.Module], Seat]] = {}
        self._by_class: dict[type, weakref.WeakSet[Seat]] = {}

    def __bool__(self) -> bool:
        return bool(self._of)

    def __contains__(self, module: nn.Module) -> bool:
        return id(module) in self._of

    def peers(self, cls: type) -> list[Seat]:
        return list(self._by_class.get(cls, ()))

    def place(self, module: nn.Module) -> Seat:
        """Put the seat of a module where its compiled code looks for it."""
        key = id(module)
        if key not in self._of:
            seat = Seat()
            like = next(iter(self.peers(type(module))), None)
            for name, slot in vars(like).items() if like is not None else ():
                setattr(seat, name, _slot(slot.dtype, slot.device))

            def gone(_: Any, others: _Seats = self, key: int = key) -> None:
                others._of.pop(key, None)

            self._of[key] = weakref.ref(module, gone), seat
            self._by_class.setdefault(type(module), weakref.WeakSet()).add(seat)
        seat = self._of[key][1]
        module.__dict__[SEAT] = seat
        return seat

    def add(self, module: nn.Module, key: str, dtype: torch.dtype, device: torch.device) -> None:
        """Give a module, and all of its class, the slot of this name."""
        self.place(module)
        for seat in self.peers(type(module)):
            if not hasattr(seat, key):
                setattr(seat, key, _slot(dtype, device))


def _slot(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    with torch.inference_mode(False), torch.no_grad():
        return dynamo.keep_address(torch.zeros((), dtype=dtype, device=device))


class View:
    """What one watch covers, and the traces that have run and that it has not been told of."""

    def __init__(self, names: Names, current: Callable[[], Call | None], blind: set[str]) -> None:
        self.names, self.current, self.blind = names, current, blind
        self.on = False
        self.pending: list[Trace] = []

    def holds(self, module: nn.Module) -> bool:
        return id(module) in self.names.modules or (self.names.refresh() and id(module) in self.names.modules)

    def home(self) -> nn.Module | None:
        call = self.current()
        return self.names.by_path.get(call.path) if call is not None else None

    def open(self) -> None:
        modules = list(self.names.model.modules())
        if _strays and not all(module in seats for module in modules):
            live.generation += 1
            _strays.clear()
        if any(module in seats for module in modules):
            self.seat()
        views.append(self)
        _listen()
        if dynamo.compiler_loaded():
            hush()

    def seat(self) -> None:
        for module in self.names.model.modules():
            if not isinstance(module, torch.jit.ScriptModule):
                seats.place(module)

    def look(self, on: bool) -> None:
        """Whether this watch looks at the step that comes: its graphs run with the checks or without."""
        self.on = on
        live.on = any(view.on for view in views)

    def close(self) -> None:
        """Take everything off the modules; what was traced finds it there again when the next watch begins."""
        if self not in views:
            return
        views.remove(self)
        if not views and not standing():
            speak()
        self.look(False)
        self.pending.clear()
        for module in self.names.model.modules():
            if SEAT in module.__dict__ and not any(id(module) in view.names.modules for view in views):
                del module.__dict__[SEAT]


class _Codes:
    """Code objects that are alive, by identity: one with a dict among its constants has no hash."""

    def __init__(self) -> None:
        self._of: dict[int, weakref.ref[Any]] = {}

    def add(self, code: Any) -> None:
        def gone(_: Any, of: dict[int, Any] = self._of, key: int = id(code)) -> None:
            of.pop(key, None)

        self._of[id(code)] = weakref.ref(code, gone)

    def __contains__(self, code: Any) -> bool:
        return id(code) in self._of and self._of[id(code)]() is code

    def __iter__(self) -> Iterator[Any]:
        return (code for code in [one() for one in list(self._of.values())] if code is not None)

    def clear(self) -> None:
        self._of.clear()


live = Live()
views: list[View] = []
traces: dict[int, Trace] = {}


class _Marks:
    """The marks of all traces, as attributes: traced code reaches its own without a look at the others."""


marks = _Marks()
seats = _Seats()
_through: list[bool] = []  # set when dynamo has traced through our hooks
_strays: list[bool] = []  # set when it has met a module that no watch covers
_compiled = _Codes()  # code that was compiled while our hooks stood
_ours = _Codes()  # what was made of it
_listening: list[Any] = []
_serials = itertools.count()


def _listen() -> None:
    if not _listening:

        def compiled(code: Any, new: Any) -> None:
            _compiled.add(code)
            _ours.add(new)

        handle = dynamo.on_compiled(compiled)
        if handle is not None:
            _listening.append(handle)


def standing() -> bool:
    """True while there is compiled code that our hooks were traced into: it is compiled again when they go."""
    if not _through:
        return False
    return not _listening or any(made in _ours for code in _compiled for made in dynamo.compiled_codes(code))


def forget() -> None:
    """No code is left that our hooks were traced into."""
    speak()
    for serial in list(traces):
        _drop(serial)
    for handle in _listening:
        handle.remove()
    _listening.clear()
    _compiled.clear()
    _ours.clear()
    _strays.clear()
    _through.clear()


def hush() -> None:
    """While our hooks stand, torch is not to speak of hooks that the program knows nothing of."""
    if not any(one in warnings.filters for one in _filters):
        warnings.filterwarnings("ignore", message=_TORCH_SPEAKS, category=UserWarning)
        _filters[:] = [warnings.filters[0]]


def speak() -> None:
    for one in _filters:
        if one in warnings.filters:
            cast("list[Any]", warnings.filters).remove(one)
    _filters.clear()


def _drop(serial: int) -> None:
    del traces[serial]
    delattr(marks, f"t{serial}")


def through() -> None:
    """Dynamo traces through our hooks."""
    if not _through:
        _through.append(True)
        _listen()


def stray() -> None:
    """Dynamo has met a module that no watch covers: if one ever does, its code must be traced anew."""
    _strays[:] = [True]


def begin(home: nn.Module | None) -> Trace:
    """A new trace, for a graph that is run from inside `home`; those of models that are gone are dropped."""
    for serial in [n for n, trace in traces.items() if trace.events and trace.events[0].module() is None]:
        _drop(serial)
    trace = Trace(next(_serials), home)
    traces[trace.serial] = trace
    setattr(marks, f"t{trace.serial}", trace.mark)
    return trace


def poll() -> None:
    """Tell the watches which graphs have run."""
    ran = [trace for trace in traces.values() if trace.ran()]
    if ran:
        for view in views:
            view.pending += ran


def strange(code: Any) -> bool:
    """True when dynamo holds code for `code` in which no hook of ours can be: it was there before."""
    return any(made not in _ours for made in dynamo.compiled_codes(code))
