"""The running calls of each thread, and what is known of a module before it is called."""

from __future__ import annotations

import threading

from torch import nn

from . import internals, sites
from .naming import Names, type_name
from .verdict import Call, Rec, common

# Linear maps and piecewise linear ones: from finite gradients their derivative can overflow, not be undefined.
_STEADY = (
    "Linear Bilinear Conv1d Conv2d Conv3d ConvTranspose1d ConvTranspose2d ConvTranspose3d Embedding EmbeddingBag "
    "Identity Dropout Dropout1d Dropout2d Dropout3d ReLU ReLU6 LeakyReLU Flatten Unflatten Upsample PixelShuffle "
    "AvgPool1d AvgPool2d AvgPool3d MaxPool1d MaxPool2d MaxPool3d AdaptiveAvgPool1d AdaptiveAvgPool2d"
).split()

Running = list[Call]  # innermost last


class Entry:
    """A module of the tree as it was read."""

    __slots__ = ("aliases", "builtin", "key", "kwargs", "looked", "path", "steady", "type_name")

    def __init__(self, module: nn.Module, names: Names) -> None:
        self.key = id(module)
        self.aliases = names.modules[self.key]
        self.path = self.aliases[0]
        self.type_name = type_name(module)
        self.builtin = type(module).__module__.startswith("torch.nn.modules.")
        self.steady = self.builtin and self.type_name in _STEADY
        self.looked = any(names.wanted(path) for path in self.aliases)
        self.kwargs = True  # until a call without keyword arguments has been seen


class _Thread(threading.local):
    """The running calls of one thread: in forward, and apart for each backward that recomputes."""

    def __init__(self) -> None:
        self.task = -1
        self.running: Running = []
        self.others: dict[int, Running] = {}

    def turn(self, task: int) -> None:
        self.others[self.task] = self.running
        if task == -1:  # every backward of this thread is over
            self.others = {-1: self.others.get(-1, [])}
        self.task, self.running = task, self.others.get(task, [])


class Calls:
    """Keeps the stack of running module calls, per thread, without trusting that every call ends.

    A checkpoint that stops its recomputation early, and an exception, leave calls that never return: the
    end of an outer call drops what still lies on it, and each backward has a stack of its own.
    """

    def __init__(self, names: Names, *, sites: bool) -> None:
        self._names, self._sites = names, sites
        self.thread = _Thread()
        self.entries: dict[int, Entry] = {}  # id(module) ->
        self._patience, self._waited = 1, 0
        self.last: dict[str, Call] = {}  # path -> its last call of this step
        self.given: dict[str, tuple[Call, list[Rec]]] = {}  # path -> its last call that has ended, and what it gave
        self.given_before: dict[str, tuple[Call, list[Rec]]] = {}  # in the step before
        self.ran = False  # in this step, watched or not
        self.threads: set[int] = set()  # those inside the model
        self._learn()

    def _learn(self) -> None:
        known = self.entries
        self.entries = {}
        for module in self._names.model.modules():
            entry = Entry(module, self._names)
            if entry.key in known:
                entry.kwargs = known[entry.key].kwargs
            self.entries[entry.key] = entry

    def newcomer(self, module: nn.Module) -> Entry | None:
        """A module that is not in the tree as it was read: added since, or made on the fly in a forward."""
        self._waited += 1
        if self._waited < self._patience:
            return None
        self._waited = 0
        if self._names.refresh():
            self._learn()
            self._patience = 1
        else:  # made anew in every forward: do not read the tree each time
            self._patience = min(self._patience * 2, 4096)
        return self.entries.get(id(module))

    def running(self) -> tuple[Running, bool]:
        """The calls that run in this thread, and whether they only recompute (inside a backward)."""
        thread = self.thread
        task = internals.graph_task()
        if task != thread.task:
            thread.turn(task)
        return thread.running, task != -1

    def known(self, module: nn.Module, running: Running) -> Entry | None:
        """The entry of a module; None for one that is not part of the model."""
        entry = self.entries.get(id(module))
        return self.newcomer(module) if entry is None and running else entry

    def begin(self, entry: Entry, running: Running, again: bool, *, traced: bool = False) -> Call:
        parent = running[-1] if running else None
        path = entry.path
        if again and parent is None and path in self.last:  # it stands where it stood the first time
            parent = self.last[path].parent
        if len(entry.aliases) > 1:
            path = common(parent.path if parent else "", entry.aliases)
        before = self.last.get(path)
        if again:
            call = Call(path, entry.type_name, 1 if before is None else before.nth, parent, entry.key)
            call.again = True
        else:
            nth = 1 if before is None else before.nth + 1
            if before is not None and before is parent and before.module_id != entry.key:
                nth = before.nth  # what a wrapper (DDP, torch.compile's) that bears its name has called
            call = self.last[path] = Call(path, entry.type_name, nth, parent, entry.key)
        if entry.builtin:
            call.builtin, call.steady = True, entry.steady
        if self._sites and not traced:  # the line of a call inside a compiled graph was written down with it
            call.site = sites.caller()
        if not running:
            self.threads.add(threading.get_ident())
        running.append(call)
        return call

    def end(self, module: nn.Module, running: Running) -> Call | None:
        """Take the call of a module off, with all that still lies on it; None when it did not begin here."""
        key = id(module)
        for at in range(len(running) - 1, -1, -1):
            if running[at].module_id == key:
                found = running[at]
                del running[at:]
                if not running:
                    self.threads.discard(threading.get_ident())
                return found
        return None

    def met_kwargs(self, call: Call) -> None:
        entry = self.entries.get(call.module_id)
        if entry is not None:
            entry.kwargs = True

    def first_run(self, call: Call | None) -> Call | None:
        """Of a call that only recomputes: the call whose values were judged."""
        return self.last.get(call.path, call) if call is not None and call.again else call

    def current(self) -> Call | None:
        """The innermost running call of this thread, None outside the model."""
        running, _ = self.running()
        return running[-1] if running else None

    def new_step(self) -> None:
        self.last.clear()
        if self.given:
            self.given_before, self.given = self.given, {}
        self.ran = False

    def interrupted(self) -> None:
        """The program left by an exception: what was running is not running any more."""
        self.thread.running.clear()
