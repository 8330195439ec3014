"""Front door: `watch`, around any number of steps."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .compiled import refuse_dead, retrace
from .errors import UsageError, enabled
from .filing import Filing
from .hits import Hits
from .monitor.terms import options_of
from .options import OnHit, Options, checked
from .report.files import MAX_MB
from .verdict import KINDS
from .watcher import Watch

if TYPE_CHECKING:
    from .capsule.catch import Catch


class Nothing(Watch):
    """What `watch` gives when nanhunt is switched off by NANHUNT=0: it looks at nothing."""

    seen = step_of_last_call = 0

    def __init__(self, model: nn.Module, options: Options) -> None:
        self._model, self._hits = weakref.ref(model), Hits(options, list)
        self.errors, self.step, self._profiler = [], 0, None
        self._filing = Filing(options, self.errors.append)

    @property
    def verdict(self) -> None:
        return None

    @property
    def finding(self) -> None:
        return None

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *error: object) -> None:
        return None

    def remove(self) -> None:
        return None

    def returned(self, values: object) -> None:
        return None

    def ranges(self) -> dict[str, float]:
        return {}

    def first_batch_hash(self) -> None:
        return None


def watch(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    scaler: Any = None,
    *,
    on_hit: OnHit = "raise",
    stop: str = "confirmed",
    detail: str = "auto",
    kinds: Iterable[str] = KINDS,
    allow: Iterable[str] = (),
    steps: tuple[int, int] | None = None,
    every: int = 1,
    only: Iterable[str] = (),
    skip: Iterable[str] = (),
    backward: bool = True,
    compiled: str = "error",
    capsule: str | os.PathLike[str] | None = None,
    max_mb: float = MAX_MB,
    slim: bool = False,
    ring: int = 0,
    monitor: Any = False,
    profile: bool = False,
    _defer: bool = False,
    _ranks: bool = True,
    _catch: Catch | None = None,
) -> Watch:
    """Watch every module of `model`, forward and backward, and name what makes the first NaN or Inf.

    Use it as a context manager around any number of steps, or keep the handle and call `remove()`:
    the watch begins with the call. Results are not changed, bit for bit; all hooks come off at the end.

    Args:
        model: the module that is trained or served; wrappers (DDP, FSDP) may be on it.
        optimizer, scaler: a `torch.optim.Optimizer` and a `torch.amp.GradScaler`; found as they are
            used when not given.
        on_hit: `"raise"` (`NonFiniteError`), `"warn"`, `"record"`, or a callable that gets the `Finding`. Of several
            ranks that train together, all raise when one does, with its finding; so are all callables called
            when one has raised. With `"warn"` and `"record"` all go on.
        stop: `"confirmed"` waits, within the step, until the bad value has reached the model's output,
            the loss, a gradient, a parameter, a buffer or the optimizer's state; `"first"` stops at the birth.
        detail: `"module"`, `"op"` or `"auto"`.
        kinds: which of `"nan"`, `"+inf"`, `"-inf"` count.
        allow: patterns (`fnmatch`) of module paths whose births never count.
        steps: `(a, b)`: watch steps a <= step < b only, counted from 0 under this watch.
        every: watch every n-th step only.
        only, skip: patterns of module paths to look at, and not to look at. A pattern takes a module with all that
            is inside it; what the rest makes is then seen where it reaches a module that is looked at.
        backward: False to look at forward and the loss alone: no gradients, no updates. Cheaper; a weight that an
            update has spoiled is found in the next forward.
        compiled: of a model that `torch.compile` has been given, what is compiled while it is watched has its
            checks inside the graph, down to single modules. What to do with a part that was compiled and run before,
            where they cannot be added: `"error"`; `"retrace"` to throw away all compiled code of the process and
            pay for one more compilation; `"eager"` to run the model eagerly while it is watched. `detail="op"`
            always runs it eagerly.
        capsule: a folder, made when it is needed, for a capsule of each of the first faults in different places, at
            most 3: what `nanhunt replay` runs again. Copies are made of what a suspected birth was given, 4 at a
            time; a healthy step costs nothing. The inputs of a module whose backward fails are gone by then:
            `nanhunt.hunt` gives them.
        max_mb: megabytes that all these copies together, and so a capsule, may have.
        slim: keep the failing samples alone, where each result depends on one sample.
        ring: keep copies of the last batches, and of the state of the random numbers, for a capsule: each step pays
            for one copy of its batch, on its own device.
        monitor: True, a file for the record, or a dict with options of `nanhunt.Monitor`: also record every step in
            a few numbers, and what they say of the run. It is the watch's `monitor`.
        profile: True to count where all numbers of the watched steps lie, for `Watch.profile`; see
            `nanhunt.profile`, also for what it costs. `every` and `steps` say which steps.

    Raises:
        UsageError: for something that is not a module, an option that does not exist, a model that was compiled
            and run before it was watched, or a bad value of NANHUNT.
        NonFiniteError: from inside the step, when a fault is found and `on_hit` is `"raise"`.
    """
    if not isinstance(model, nn.Module):
        raise UsageError(f"nanhunt.watch needs a torch.nn.Module, got {type(model).__name__}: pass the model itself")
    options = checked(
        optimizer=optimizer,
        scaler=scaler,
        on_hit=on_hit,
        stop=stop,
        detail=detail,
        kinds=kinds,
        allow=allow,
        steps=steps,
        every=every,
        only=only,
        skip=skip,
        backward=backward,
        compiled=compiled,
        capsule=capsule,
        max_mb=max_mb,
        slim=slim,
        ring=ring,
        profile=profile,
        defer=_defer,
        ranks=_ranks,
        catch=_catch,
    )
    recorded = None if monitor is False else options_of(monitor)
    if not enabled():
        return _monitored(Nothing(model, options), model, recorded, optimizer, scaler)
    if compiled == "retrace":
        retrace()
    elif compiled == "error" and detail != "op":
        refuse_dead(model)
    return _monitored(Watch(model, options), model, recorded, optimizer, scaler)


def _monitored(
    made: Watch, model: nn.Module, options: dict[str, Any] | None, optimizer: torch.optim.Optimizer | None, scaler: Any
) -> Watch:
    """The watch with its monitor, which counts the steps as the watch does."""
    if options is None:
        return made
    from .monitor.front import Monitor  # its own follow-up opens watches

    try:
        made.monitor = Monitor(model, optimizer, scaler, **options, _number=lambda: made.step)
    except BaseException:
        made.remove()
        raise
    return made
