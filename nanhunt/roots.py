"""Every root module that a program calls, watched as it comes."""

from __future__ import annotations

import functools
import gc
import inspect
import sys
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import nn

from . import frames, hooks, internals, traces, watcher
from .away import Away
from .compiled import has_compiled
from .errors import UsageError, enabled
from .finding import Finding
from .hits import KEPT
from .naming import type_name
from .options import checked
from .tidings import Tidings, open_session
from .watcher import Watch
from .watching import watch

LIMIT = 64  # models that are watched at a time: each costs every backward and optimizer step some microseconds
_BRIEF, _TIRED = 10, 16  # calls of a short life; short lives of one class after which a new one must prove itself
_PROOF, _DOUBLED = 3, 4  # by its calls: the first of them that is watched; how often their number is doubled
_TOLD = 20  # classes that are named as not watched
_PATIENCE = 4096  # new models between two searches for dead ones, at most
_COMPILED = (
    "it calls models where no hook sees it: what runs there is not looked at; ask for "
    'compiled="eager" to have it run eagerly while it is watched'
)

# What may be asked for: the options of `watch` that do not belong to one model.
_OF_ONE = ("optimizer", "scaler", "only", "skip", "monitor", "profile")
_DEFAULTS = {
    name: option.default
    for name, option in inspect.signature(watch).parameters.items()
    if option.default is not option.empty and not name.startswith("_") and name not in _OF_ONE
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """A model that was watched: its class, and how many of its steps and calls from outside were seen."""

    model: str
    steps: int
    calls: int


class Roots:
    """Watches every module that is called from outside any other module, from its first call on.

    Use it as a context manager, or with `start()` and `stop()`. It takes the options of `nanhunt.watch` except
    `optimizer` and `scaler`, which are found as they are used, and the patterns `only` and `skip`, which are of
    one model. A call of a part of a watched model starts nothing; a larger model that contains a watched one
    takes its place. What cannot be watched runs as if nobody looked, and is told in `unwatched`. Models that
    die are let go. Of a class that is made anew again and again, an instance is watched once it has been called a
    few times.

    Attributes:
        watches: the watches that run now, after `stop` those that ran last.
        findings: what all watches have recorded, in the order in which it happened, at most 100.
        finding: the first fault (its `handled` is None), or None; among several ranks, after `stop`, that of them all.
        speaks: after `stop`, among several ranks: whether it is for this one to print what there is to say.
        models: for each of `findings` the class of the model that it was found in.
        noted: called with each finding as it is recorded, before anything is raised; None for nobody.

    Raises:
        UsageError: for an option that does not exist or a value that is not legal, at once.
    """

    def __init__(self, **options: Any) -> None:
        for name in options:
            if name not in _DEFAULTS:
                raise UsageError(f"{name!r} is no option here: use {', '.join(_DEFAULTS)}")
        self._options = _DEFAULTS | options
        checked(optimizer=None, scaler=None, **self._options)
        self.watches: list[Watch] = []
        self.findings: list[Finding] = []
        self.models: list[str] = []
        self.finding: Finding | None = None
        self.speaks = True
        self.noted: Callable[[Finding], object] | None = None
        self._names: dict[Watch, str] = {}
        self._ended: list[Watched] = []
        self._dead: list[Watch] = []
        self._away: list[Away] | None = None
        # The parts of what is watched or refused, and whom their calls concern.
        self._known: dict[int, tuple[weakref.ref[nn.Module], tuple[Watch, ...]]] = {}
        self._known_limit = 4096
        self._unwatched: dict[str, str] = {}
        self._brief: dict[str, int] = {}
        self._calls: dict[int, int] = {}  # those of what `_known` has as let be, because its class is tired
        self._patience, self._waited = 1, 0
        self._lock = threading.Lock()
        self._session: Tidings | None = None  # with the other ranks: one for all that is watched
        self._handle: Any = None
        self._compilations = 0
        self._eager = self._traced = self._stopped = False

    # --- life -------------------------------------------------------------------------------------

    def __enter__(self) -> Roots:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop(error)

    def start(self) -> None:
        """Begin to look for models; with NANHUNT=0 nothing is ever looked at."""
        if self._stopped:
            raise UsageError("these roots were stopped: make new ones with Roots(...)")
        if self._handle is not None or not enabled():
            return
        if self._options["compiled"] == "eager":  # a compiled function, or Module.compile, passes no hook of ours
            import torch._dynamo  # noqa: F401  (a stance is only taken where the compiler is there)

            internals.eager.hold()
            self._eager = True
        traces.hush()
        self._compilations = _compilations()
        self._handle = hooks.ModuleCalls(self)
        gc.callbacks.append(self._collecting)

    def stop(self, error: BaseException | None = None) -> None:
        """Take everything off. `error` is what the program died of, if it did.

        Raises:
            NonFiniteError: when the last look at an unfinished step finds a fault and `on_hit` is "raise".
        """
        self._stopped = True
        if self._handle is None:
            return
        self._handle.remove()
        self._handle = None
        gc.callbacks.remove(self._collecting)
        if not traces.standing():
            traces.speak()
        self._note_compiled()
        self._bury()
        stopped: BaseException | None = None
        for one in sorted(self.watches, key=lambda one: one.finding is not self.finding):
            if error is not None and self.finding is not None and one.finding is not self.finding:
                one._take_off()  # the exception bears the first finding, and not what came of it elsewhere
                continue
            try:
                one.__exit__(type(error) if error is not None else None, error, None)
            except Exception as failure:
                stopped = stopped or failure
        self._consent(stopped or error)
        self._known.clear()
        if self._eager:
            self._eager = False
            internals.eager.drop()
        if stopped is not None:
            raise stopped

    def _consent(self, error: BaseException | None) -> None:
        """What all ranks say was first is the finding, also of a rank that has met none."""
        session, self._session = self._session, None
        if session is None:
            return
        if self.finding is not None and error is not None:
            session.tell(self.finding, stopping=True)
        if error is None or isinstance(error, Exception):  # else somebody wants the program to end now
            self.finding = session.settle() or self.finding
        if session.speaker is not None:
            self.speaks = session.speaker == session.rank
        else:  # nobody has a fault, or the ranks cannot talk any more
            self.speaks = self.finding is not None or session.rank == 0
        session.leave()

    # --- what is told -------------------------------------------------------------------------------

    @property
    def unwatched(self) -> list[str]:
        """What was called and not watched, each with the reason, in words."""
        return [f"{name}: {why}" for name, why in self._unwatched.items()]

    @property
    def watched(self) -> list[Watched]:
        """The models that were watched, in the order of their end; those that still are come last."""
        return [*self._ended, *(self._told(one) for one in self.watches)]

    # --- module calls -------------------------------------------------------------------------------

    def on_pre(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if torch.compiler.is_compiling():
            return
        # A hundred watches do not each look at every call: it is passed on to those that it concerns.
        for one in self._concerned(module, begin=True):
            one._observer.on_pre(module, args)

    def on_post(self, module: nn.Module, args: Any, kwargs: Any, out: Any = hooks.RAISED) -> None:
        if torch.compiler.is_compiling():
            return
        for one in self._concerned(module, begin=False):
            one._observer.on_post(module, args, kwargs, out)

    def _concerned(self, module: nn.Module, *, begin: bool) -> tuple[Watch, ...]:
        known = self._known.get(id(module))
        if known is not None and known[0]() is module:
            if known[1] or id(module) not in self._calls:
                return known[1]
            one = self._proven(module) if begin else None
            return (one,) if one is not None else ()
        owners = [one for one in self.watches if id(module) in one._observer.names.modules]
        if owners:  # it was put into a watched model since
            self._known[id(module)] = weakref.ref(module), tuple(owners)
        one = self._newcomer(module) if begin and not owners else None
        return (one,) if one is not None else tuple(owners or self.watches)

    def _proven(self, module: nn.Module) -> Watch | None:
        """The watch of a module of a tired class, from the call on that shows it to be no passer-by.

        Where even such ones have had short lives, more calls are asked for: watches stay rare among calls.
        """
        calls = self._calls[id(module)] = self._calls.get(id(module), 0) + 1
        short = self._brief.get(_class(module), 0) - _TIRED
        return self._newcomer(module, proven=True) if calls >= _PROOF << min(max(short, 0), _DOUBLED) else None

    def _newcomer(self, module: nn.Module, *, proven: bool = False) -> Watch | None:
        """The watch of a module that nobody knows and that no other module calls; None where none is to begin."""
        if any(id(module) in one._observer.names.modules for one in watcher._active):
            return None  # the program's own watch
        if getattr(module, "_is_replica", False):  # of DataParallel, made anew in each forward
            return None
        if internals.graph_task() != -1 or internals.transformed() or internals.recording():
            return None
        if len(frames.running()) > 1:
            return None  # made on the fly inside the forward of another
        if self._options["detail"] == "op" and internals.dispatch_modes() > len(self.watches):
            return None  # the program would later take our mode off the stack instead of the one it has on now
        # A finalizer may call a module while a collection holds the lock: it must not wait for itself.
        if not self._lock.acquire(timeout=1.0):
            return None
        try:
            return self._begin(module, proven) if self._handle is not None else None
        finally:
            self._lock.release()

    def _begin(self, module: nn.Module, proven: bool) -> Watch | None:
        name = _class(module)
        if proven or self._brief.get(name, 0) < _TIRED:
            self._sweep()
        if not proven and self._brief.get(name, 0) >= _TIRED:
            why = (
                f"{_TIRED} were watched, later ones only once they had been called a few times (steps count from there)"
            )
            self._refuse(module, name, f"made anew again and again: {why}")
            self._calls[id(module)] = 1
            return None
        parts = {id(part): part for part in module.modules()}
        contained = [one for one in self.watches if id(one._observer.names.model) in parts]
        if len(self.watches) - len(contained) >= LIMIT:
            self._refuse(module, name, f"{LIMIT} models are watched at a time, and there were more")
            return None
        try:
            self._session = self._session or open_session()
            one = watch(module, **self._options, _ranks=False)
        except Exception as failure:  # whatever is odd about this model: the program must go on
            self._refuse(module, name, f"{type(failure).__name__}: {failure}")
            for half in [one for one in watcher._active if one.model is module]:
                half.remove()
            return None
        one._attachment.calls.remove()  # of its calls it is told by us
        one._among.share(self._session)
        for smaller in contained:
            self._end(smaller)
        setattr(one._hits, "keep", functools.partial(self._keep, name, one._hits.keep))  # noqa: B010  (a method, for mypy)
        self.watches.append(one)
        self._names[one] = name
        self._traced = self._traced or has_compiled(module)
        self._learn(module, one)
        return one

    def _refuse(self, module: nn.Module, name: str, why: str) -> None:
        if len(self._unwatched) >= _TOLD:
            name, why = "others", "and more classes than are named here"
        self._unwatched.setdefault(name, why)
        self._learn(module, None)

    def _learn(self, module: nn.Module, one: Watch | None) -> None:
        """From now on calls of any part of this module go to this watch, or to none."""
        if len(self._known) > self._known_limit:
            self._known = {key: known for key, known in list(self._known.items()) if known[0]() is not None}
            self._calls = {key: calls for key, calls in list(self._calls.items()) if key in self._known}
            self._known_limit = max(4096, 2 * len(self._known))
        for part in module.modules():
            known = self._known.get(id(part))
            before = known[1] if known is not None and known[0]() is part else ()
            self._calls.pop(id(part), None)  # of what has stood at this address before
            self._known[id(part)] = weakref.ref(part), before if one is None else (*before, one)

    def _keep(self, name: str, keep: Callable[[Finding], None], finding: Finding) -> None:
        keep(finding)
        if finding.handled is None and self.finding is None:
            self.finding = finding
        if len(self.findings) < KEPT:
            self.findings.append(finding)
            self.models.append(name)
        if self.noted is not None:
            self.noted(finding)

    # --- the end of a model -------------------------------------------------------------------------

    def _end(self, one: Watch) -> None:
        self._ended.append(self._told(one))
        del self._names[one]
        self.watches.remove(one)
        for key, (part, owners) in list(self._known.items()):
            if one in owners:
                self._known[key] = part, tuple(other for other in owners if other is not one)
        one._take_off()

    def _told(self, one: Watch) -> Watched:
        return Watched(model=self._names[one], steps=one.step, calls=one._observer.roots)

    def _bury(self) -> None:
        """Take off the watches of the dead. Not while a collection runs: torch may be walking over its hooks."""
        dead, self._dead = self._dead, []
        for one in dead:
            name = self._names[one]
            self._brief[name] = self._brief.get(name, 0) + 1 if one._observer.roots < _BRIEF else 0
            self._end(one)

    def _sweep(self) -> None:
        """Look for models that only their watches keep. With no room left, less and less often while there are none."""
        self._waited += 1
        if len(self.watches) < LIMIT or self._waited >= self._patience:
            self._waited = 0
            self._take_back(self._let_go())
            self._patience = 1 if self._dead else min(2 * self._patience, _PATIENCE)
        self._bury()

    def _let_go(self) -> list[Away]:
        return [Away(one) for one in self.watches if not one._observer.calls.threads and one not in self._dead]

    def _take_back(self, away: list[Away]) -> None:
        self._dead += [one.watch for one in away if not one.back()]

    def _collecting(self, phase: str, info: dict[str, int]) -> None:
        """A full collection must find a model that only our names hold, also one that is part of a cycle."""
        if phase == "start" and info["generation"] == 2 and self._away is None and self._lock.acquire(blocking=False):
            self._away = self._let_go()
        elif phase == "stop" and self._away is not None:
            away, self._away = self._away, None
            self._take_back(away)
            self._lock.release()

    def _note_compiled(self) -> None:
        """A compiled function, or `Module.compile`, passes no hook: that it ran is all that can be known of it."""
        if _compilations() > self._compilations and self._options["compiled"] == "error" and not self._traced:
            self._unwatched["code under torch.compile"] = _COMPILED


def _class(module: nn.Module) -> str:
    return type_name(getattr(module, "_orig_mod", module))


def _compilations() -> int:
    """How many frames torch.compile has looked at in this process; 0 where it does not count them."""
    counters: Any = getattr(sys.modules.get("torch._dynamo.utils"), "counters", None)
    return int(counters["frames"]["total"]) if counters else 0
