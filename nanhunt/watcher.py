"""A running watch: it goes with the program, and stops it at the first fault."""

from __future__ import annotations

import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from . import frames, hooks, internals
from .among import Among
from .compiled import has_compiled
from .errors import NonFiniteError, NonFiniteWarning, UsageError
from .filing import Filing
from .finding import Finding
from .hits import KEPT, Hits
from .judge import Judge
from .naming import Names
from .observer import Observer
from .options import Options
from .scene import Scene
from .verdict import Origin

if TYPE_CHECKING:
    from .monitor.front import Monitor
    from .oplevel import OpLevel
    from .precision.profiler import Profiler
    from .precision.profiles import Profile


_active: list[Watch] = []


class Watch:
    """A running watch: see `nanhunt.watch`, which makes it.

    Attributes:
        finding: the first fault (a `Finding` whose `handled` is None), or None. Among several ranks, once the watch
            is over: the first fault of all of them, the same on each.
        findings: everything that was recorded on this rank, faults and what was none, at most 100.
        step: the step that runs, from 0.
        seen: how many tensors were looked at.
        errors: failures of the watch itself; training went on, and they are told when it is removed.
        monitor: the `Monitor` that goes along with it, where one was asked for.
    """

    monitor: Monitor | None = None

    def __init__(self, model: nn.Module, options: Options) -> None:
        self._model = weakref.ref(model)
        self._hits = Hits(options, self._inner)
        self.errors: list[Exception] = []
        self.step = 0
        self._options = options
        self._optimizer = options.optimizer
        self._closed = False
        self._stance: Any = None
        if options.compiled == "eager" or options.detail == "op":
            internals.eager.hold()
            self._stance = internals.eager
        names = Names(model, options.looked_at(model))
        self._judge = Judge(
            names,
            hit=self._hit,
            cleared=self._cleared,
            turn=self._turn,
            stop_first=options.stop == "first",
        )
        self._observer = Observer(
            names,
            self._judge,
            sites=options.detail != "module",
            defer=options.defer and options.detail != "op",
            at_once=options.detail == "op",
            backward=options.backward,
            failed=self._failed,
        )
        self._among = Among(self._observer, self._hits, own=options.ranks)
        self._observer.obey, self._observer.renew = self._among.obey, self._renew
        self._scene = Scene(self._observer, self._judge, detail=options.detail)
        self._scene.eager = self._stance is not None and has_compiled(model)
        self._scene.optimizer = self._optimizer
        self._judge.has_optimizer = self._optimizer is not None
        self._judge.observer, self._judge.scene = self._observer, self._scene
        self._filing = Filing(options, self._failed)
        self._filing.join(self._scene, self._observer)
        self._ops: OpLevel | None = None
        if options.detail == "op":
            self._trace(names)
        self._observer.partial = bool(options.only or options.skip)
        if self._observer.partial:
            self._observer.blind.add("modules left out by only= or skip=: a value may come from one of them")
        self._profiler: Profiler | None = None
        if options.profile:
            from .precision.profiler import beside

            self._profiler = beside(model, options, self._failed)
        self._attach()

    def _trace(self, names: Names) -> None:
        """Run a tracer beside the hooks; nothing that the watch itself does with tensors is traced."""
        from .oplevel import OpLevel

        ops = OpLevel(names, self._observer.calls.current, self._host_read, self._filing.keep)
        observer = self._observer
        for name in ("on_pre", "on_post", "on_gradient"):
            setattr(observer, name, ops.hidden(getattr(observer, name)))
        setattr(observer.arrivals, "on_parameter", ops.hidden(observer.arrivals.on_parameter))  # noqa: B010
        for name in ("_guarded", "_host_read"):
            setattr(self, name, ops.hidden(getattr(self, name)))
        self._ops = self._judge.ops = ops

    @property
    def model(self) -> nn.Module | None:
        """The watched model, for as long as somebody else keeps it."""
        return self._model()

    @property
    def verdict(self) -> Finding | None:
        """What the ranks have agreed on, where several train together and one has met a fault."""
        return self._among.verdict

    @property
    def finding(self) -> Finding | None:
        return self.verdict or self._hits.first

    @property
    def findings(self) -> list[Finding]:
        return self._hits.findings

    @property
    def seen(self) -> int:
        return self._observer.seen

    def ranges(self) -> dict[str, float]:
        """The numbers of a step for a logger, flat: of the running step, else of the last whole one.

        `"{module}/absmax"`, the largest |number| that the module's last call gave out; `"{module}/headroom_bits"`,
        by how many bits it may still grow in its own dtype; `"{module}/grad.absmax"`, the largest |gradient| that
        came back. The model's own path, "", is "(the model itself)". Only finite numbers. Where ranges wait on a
        device, this reads it.
        """
        self._guarded(self._observer.drain)
        return self._observer.ranges()

    @property
    def profile(self) -> Profile | None:
        """Where the numbers of the steps so far lay; None without `profile=True`. While steps run, it is read anew."""
        return self._profiler.record() if self._profiler is not None else None

    # --- life -------------------------------------------------------------------------------------

    def _attach(self) -> None:
        self._attachment = hooks.Attachment(self, self._observer)
        self._observer.attach(self._attachment)
        if self._profiler is not None:
            self._profiler.open()
        _active.append(self)
        if self._stance is None:
            self._observer.regions.view.open()
        self._select()
        self._hook_parameters()

    def _hook_parameters(self) -> None:
        if not self._options.backward:
            return
        with internals.unseen_by_modes() if internals.foreign_modes(self._observer.own_modes) else nullcontext():
            self._attachment.parameters(self._observer.names.parameters(), self._observer.arrivals.hook)

    def __enter__(self) -> Watch:
        if self._closed:
            raise UsageError("this watch was removed: make a new one with nanhunt.watch(model)")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._closed:
            return
        instead: NonFiniteError | None = None
        try:
            if error is None:
                self._guarded(self._last_look)
                instead = self._among.settle(None)
            else:
                instead = self._died(error)
        except NonFiniteError as stop:  # of the last look
            self._among.settle(stop)
            raise
        finally:
            self._take_off()
        if instead is not None:
            raise instead from error

    def _last_look(self) -> None:
        self._judge.leaving()
        self._observer.drain()
        self._judge.end_step()

    def remove(self) -> None:
        """Take every hook off. What was found stays; the watch cannot be entered again.

        Among several ranks, with a fault on any of them, it waits for the others to say what they have found.
        """
        if not self._closed:
            self._among.settle(None)
            self._take_off()

    def _take_off(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._among.leave()
        self._observer.on = False
        if self._ops is not None:
            self._ops.leave()
            self.errors += [RuntimeError(text) for text in self._ops.all_failures()]
        with internals.unseen_by_modes() if internals.foreign_modes() else nullcontext():
            self._attachment.remove()
        if self._profiler is not None:
            self._guarded_close(self._profiler)
        self._observer.forget()
        self._judge.state.forget()
        self._filing.end_step()
        self._scene.optimizer = self._optimizer = None
        if self in _active:
            _active.remove(self)
        if self._stance is not None:
            self._stance.drop()
        if self.monitor is not None:
            self.monitor.remove()
        if self._unseen():
            warnings.warn(
                "nanhunt saw a backward or an optimizer step, but no call of the model it watches: was the step "
                "compiled before the watch began, or another model trained? For a compiled step use "
                'nanhunt.watch(model, compiled="retrace"), or compiled="eager" to run it eagerly.',
                NonFiniteWarning,
                stacklevel=3,
            )
        if self.errors:
            first = self.errors[0]
            warnings.warn(
                f"nanhunt could not look at everything: {len(self.errors)} internal error(s), the first "
                f"{type(first).__name__}: {first}. Training was not touched. Please report it.",
                NonFiniteWarning,
                stacklevel=3,
            )

    def _guarded_close(self, profiler: Profiler) -> None:
        try:
            profiler.close()
        except Exception as failure:  # a device that has died
            self._failed(failure)

    # --- for hunt ---------------------------------------------------------------------------------

    def returned(self, values: Iterable[tuple[str, torch.Tensor]]) -> None:
        """What the step gives back counts, when nothing else was found and no scaler accounts for it."""
        self._guarded(self._returned, values)

    def _returned(self, values: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._observer.drain()
        if self.finding is not None or any(f.handled == "loss_scale" for f in self.findings):
            return
        self._scene.step = self._scene.step_of_last_call  # an optimizer may have ended it, and no other has begun
        for path, tensor in values:
            rec = self._observer.look(tensor, ("returned value", path), None, None, False)
            if rec is not None:
                self._observer.tell(True, self._judge.returned, (rec,), None, tensor)
        self._observer.drain()

    def first_batch_hash(self) -> str | None:
        """The hash of what the model was first called with under this watch."""
        return self._scene.first_batch_hash()

    @property
    def step_of_last_call(self) -> int:
        return self._scene.step_of_last_call

    def _unseen(self) -> bool:
        """True when the model was trained and yet none of its calls passed a hook."""
        return self._observer.roots == 0 and (self.step > 0 or self._judge.stepped_back)

    def _died(self, error: BaseException) -> NonFiniteError | None:
        """The program left by an exception: if a bad value was on its way, the exception should say so."""
        if not isinstance(error, Exception):
            return None
        if isinstance(error, NonFiniteError):
            return self._among.settle(error)
        try:
            self._guarded(self._observer.drain)
        except NonFiniteError:
            pass
        if self.finding is None:
            suspect = self._judge.suspect()
            if self._ops is not None:
                suspect = self._ops.died_of() or suspect
            if suspect is not None:
                suspect.step = self.step
                suspect.settled = True
                self._hits.keep(self._filing.filed(self._scene.finding(suspect), suspect))
        instead = self._among.settle(error)
        if instead is None and self.finding is not None:
            error.nanhunt_finding = self.finding  # type: ignore[attr-defined]
            if sys.version_info >= (3, 11):
                error.add_note("nanhunt: " + str(self.finding))
        return instead

    # --- what the hooks call ------------------------------------------------------------------------

    def on_backward_begin(self, roots: tuple[Any, ...], create_graph: bool) -> None:
        if self._observer.halt is not None:
            self._among.obey()
        if not frames.rehearsed():
            self._guarded(self._judge.backward_begins, roots, create_graph)

    def on_backward_end(self, given: tuple[Any, ...], grads: Any, ok: bool) -> None:
        if ok and not frames.rehearsed():
            self._guarded(self._judge.backward_ends, given, grads)

    def on_optimizer(self, optimizer: torch.optim.Optimizer, after: bool, closure: bool) -> None:
        self._guarded(self._optimizer_event, optimizer, after, closure)

    def on_scaler(self, scaler: Any, what: str, before: Any, after: Any) -> None:
        wanted = self._options.scaler
        if wanted is None or wanted is scaler:
            self._guarded(self._judge.scaling.event, scaler, what, before, after)

    def _host_read(self, tensor: torch.Tensor, birth: Any) -> None:
        if self._closed or not self._observer.on or self._ops is None:
            return
        try:
            fields = self._ops.fields(tensor, birth)
            if fields is not None:
                self._judge.read_by_host(tensor, birth.phase, birth.kinds, fields)
        except NonFiniteError:
            raise
        except Exception as failure:
            self._failed(failure)

    def _guarded(self, event: Callable[..., None], *args: Any) -> None:
        if not self._closed:
            step = self.step
            self._observer.guarded(event, *args)
            if self.step != step and self._ops is not None:  # it may have turned while our mode was off the stack
                self._follow()

    def _failed(self, failure: Exception) -> None:
        """A failure of the watch itself: counted, told when the watch ends; training goes on."""
        if failure is self._hits.theirs:
            raise failure
        if len(self.errors) < KEPT:
            self.errors.append(failure)

    def _optimizer_event(self, optimizer: torch.optim.Optimizer, after: bool, closure: bool) -> None:
        if self._observer.halt is not None:
            self._among.obey()
        if optimizer is not self._optimizer and not self._judge.state.concerns(optimizer):
            return
        self._scene.optimizer = optimizer
        self._judge.has_optimizer = True
        if not self._observer.on or not self._options.backward:
            if after and self._judge.scaling.scaler is None:
                self._turn()
            return
        if not after:
            if not closure:  # which has yet to make the gradients of this step: those that stand there are old
                self._judge.state.before_update(optimizer)
            return
        self._judge.state.after_update(optimizer)
        if self._judge.scaling.scaler is None:  # else the step ends when the scaler is updated
            self._turn()

    # --- steps ------------------------------------------------------------------------------------

    def _turn(self) -> None:
        """A step is over."""
        self._observer.drain()
        self._judge.end_step()
        self._observer.new_step()
        self._filing.end_step()
        if self._ops is not None:
            self._ops.tracer.end_step()
        if self._profiler is not None:
            self._profiler.end_step()
        self.step += 1
        self._scene.step = self.step
        self._select()

    def _select(self) -> None:
        if self._among.join():
            self._attachment.collectives(self._observer.collectives)
        steps, every = self._options.steps, self._options.every
        inside = steps is None or steps[0] <= self.step < steps[1]
        on = inside and self.step % every == 0
        if on and not self._observer.on and self.step:
            self._renew()
            self._judge.fresh = True
        self._observer.on = on
        if self._profiler is not None:
            self._profiler.look(on)
        self._observer.regions.view.look(on)
        if self._ops is not None and not self._observer.hidden:
            self._follow()

    def _renew(self) -> None:
        """Read the model again: parameters and modules may have been replaced since."""
        self._observer.names.refresh()
        self._hook_parameters()

    def _follow(self) -> None:
        """Have the op level trace this step, or not."""
        ops, observer = self._ops, self._observer
        if ops is not None and not self._closed:
            observer.own_modes = int(ops.follow(observer.on))
            if observer.on and not observer.own_modes:
                observer.blind.add("the op level: a dispatch mode of the program was open when the step began")

    # --- hits ---------------------------------------------------------------------------------------

    def _hit(self, origin: Origin) -> None:
        if self._hits.counts(origin):
            finding = self._scene.finding(origin)
            self._among.tell(finding)
            self._hits.act(self._filing.filed(finding, origin))
        else:
            origin.facts["handled"] = "allowed"

    def _cleared(self, origin: Origin, why: str) -> None:
        self._filing.forget(origin)
        if self._scene.absorbed(origin) and self._hits.counts(origin):
            self._hits.keep(self._scene.finding(origin))

    def _inner(self) -> list[Hits]:
        later = _active[_active.index(self) + 1 :] if self in _active else []
        mine = set(self._observer.names.modules)
        return [w._hits for w in later if w._observer.on and mine & set(w._observer.names.modules)]


@contextmanager
def outer_watches(*, looking: bool) -> Iterator[None]:
    """While a hunt runs, the watches around it leave the stopping to it, and do not look at a step twice."""
    outer = [(one, one._hits.on_hit) for one in _active]
    for one, on_hit in outer:
        one._hits.on_hit = "record" if on_hit == "raise" else on_hit
        one._observer.aside = not looking
    try:
        yield
    finally:
        for one, on_hit in outer:
            one._hits.on_hit = on_hit
            one._observer.aside = False
