"""One run of an example or of a step with all rules looking on: its ops, module calls, updates, loss scale."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from .. import internals, sites
from ..calls import Calls
from ..hooks import RAISED, Attachment
from ..naming import Names
from ..remarks import OUTSIDE, Sheet
from ..runs import Run
from ..schemas import schema_of
from . import scalers
from .custom import Custom
from .epses import Epses
from .halves import Halves
from .masks import Masks
from .ops import BACKWARD, FORWARD, UPDATE, Op
from .scaled import Scaled
from .sums import Sums
from .undone import Undone
from .updates import Moved

Tensor = torch.Tensor

_MOST_FAILURES = 20


class Trial:
    """Runs the program's code and shows each op to the rules. It changes nothing itself.

    Attributes:
        dtypes: the floating dtypes of what has run.
        casts: the dtypes that autocast was seen to cast to.
        optimizers, scalers: what was met in use, in order.
        moved: what updates in half precision have changed.
        backward: whether a backward has run.
        failures: what went wrong in a rule; the program is not told.
    """

    def __init__(self, names: Names, sheet: Sheet, *, trains: bool) -> None:
        self._names, self._sheet = names, sheet
        self._calls = Calls(names, sites=False)
        addresses = {p.data_ptr(): name for name, _, p in names.parameters() if _addressed(p)}
        self._scaled = Scaled(sheet, self._parameters)
        self._sums = Sums(sheet)
        self._rules = (
            Masks(sheet, addresses),
            Epses(sheet),
            Halves(sheet, trains=trains),
            Undone(sheet, addresses),
            Custom(sheet),
            self._sums,
            self._scaled,
        )
        self._updating = 0
        self._graph = True
        self.dtypes: set[torch.dtype] = set()
        self.casts: set[torch.dtype] = set()
        self.optimizers: dict[int, Optimizer] = {}
        self.scalers: dict[int, Any] = {}
        self.moved = Moved()
        self.backward = False
        self.failures: list[str] = []

    def run(self, act: Callable[[], Any]) -> Exception | None:
        """Run it; the exception it dies of is given back.

        Everything that was hung into torch is off again afterwards.
        """
        self._graph = torch.is_grad_enabled()
        attachment = Attachment(self, self)
        internals.eager.hold()  # compiled code shows none of its ops
        try:
            with internals.op_by_op(), _Mode(self):
                act()
        except Exception as error:
            return error
        finally:
            internals.eager.drop()
            attachment.remove()
            for rule in self._rules:
                self.quiet(rule.finish)
        return None

    def _parameters(self) -> Iterator[Tensor]:
        for _, _, p in self._names.parameters():
            yield p
        for optimizer in self.optimizers.values():
            for group in optimizer.param_groups:
                yield from group["params"]

    def quiet(self, look: Callable[..., Any], *args: Any) -> Any:
        """Look without being seen by other modes; a failure is noted and the program goes on."""
        try:
            return internals.unseen(look, *args)
        except Exception as failure:
            if len(self.failures) < _MOST_FAILURES:
                self.failures.append(f"{type(failure).__name__}: {failure}")
            return None

    # --- ops --------------------------------------------------------------------------------------

    def before(self, func: Any, args: Any, kwargs: Any) -> Op:
        task = internals.graph_task()
        run = Run(func, schema_of(func), args, kwargs, task)
        phase = UPDATE if self._updating else BACKWARD if task != -1 else FORWARD
        op = Op(run, self._calls.current(), phase, depth=internals.autocast_depth(), graph=self._graph)
        for rule in self._rules:
            rule.before(op)
        return op

    def after(self, op: Op, out: Any) -> None:
        op.out = out
        op.outs = [t for _, t in op.run.outputs(out)]
        for t in op.outs:
            if t.is_floating_point():
                self.dtypes.add(t.dtype)
        if op.base == "to_copy" and op.depth and op.outs and internals.autocast_dtype(op.outs[0]):
            self.casts.add(op.outs[0].dtype)
        for rule in self._rules:
            rule.after(op)

    # --- module calls -----------------------------------------------------------------------------

    def on_pre(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self.quiet(self._begin, module, args)

    def _begin(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        running, again = self._calls.running()
        entry = self._calls.known(module, running)
        if entry is None:
            return
        call = self._calls.begin(entry, running, again)
        self._sums.called(module, args, call.path)
        for kind in ("cpu", *_accelerator()):
            if torch.is_autocast_enabled(kind):
                self.casts.add(torch.get_autocast_dtype(kind))

    def on_post(self, module: nn.Module, args: Any, kwargs: Any, out: Any = RAISED) -> None:
        running, _ = self._calls.running()
        self._calls.end(module, running)

    # --- the rest of a step -----------------------------------------------------------------------

    def on_backward_begin(self, roots: tuple[Any, ...], create_graph: bool) -> None:
        self.backward = True

    def on_backward_end(self, given: tuple[Any, ...], grads: Any, ok: bool) -> None:
        self._scaled.backward_ended()

    def on_optimizer(self, optimizer: Optimizer, after: bool, closure: bool) -> None:
        self.quiet(self._update, optimizer, after)

    def _update(self, optimizer: Optimizer, after: bool) -> None:
        self.optimizers.setdefault(id(optimizer), optimizer)
        with internals.unseen_by_modes():
            self._scaled.optimizer(optimizer, after)
            if after:
                self._updating = max(0, self._updating - 1)
                found = getattr(optimizer, "found_inf", None)
                if not (isinstance(found, Tensor) and bool(found)):  # a fused update that was skipped
                    self.moved.after()
            else:
                self._updating += 1
                self.moved.before(optimizer, self._names, "optimizer")

    def on_scaler(self, scaler: Any, what: str, before: Any, after: Any) -> None:
        self.quiet(self._scale, scaler, what, before)

    def _scale(self, scaler: Any, what: str, given: Any) -> None:
        with internals.unseen_by_modes():
            self.scalers.setdefault(id(scaler), scaler)
            if what == "scale:before" and scaler.is_enabled():
                scalers.loss(scaler, given, self._sheet, OUTSIDE, sites.text(sites.user_site()))
            self._scaled.scaler(scaler, what)


class _Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Shows each op to a trial; stays out where a mode must."""

    supports_higher_order_operators = True

    def __init__(self, trial: Trial) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._trial = trial

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, torch._ops.OpOverload) or internals.off_limits():
            return func(*args, **kwargs)
        trial = self._trial
        op: Op | None = trial.quiet(trial.before, func, args, kwargs)
        out = func(*args, **kwargs)
        if op is not None:
            trial.quiet(trial.after, op, out)
        return out


def _addressed(p: Tensor) -> bool:
    """Whether a parameter has numbers in memory of its own."""
    return type(p) in (Tensor, nn.Parameter) and p.layout is torch.strided and not p.is_meta and p.numel() > 0


def _accelerator() -> tuple[str, ...]:
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return (found.type,) if found is not None else ()
