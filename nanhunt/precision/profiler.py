"""Counts the numbers of every module while steps run, each tensor once, and gives the record when it is asked for."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from .. import frames, hooks, internals, probe
from ..compiled import is_compiled
from ..naming import Names, type_name
from ..options import Options
from .exponents import count
from .ledger import Ledger, Row
from .profiles import ModuleProfile, Profile
from .sightings import Sighting, Sightings

Tensor = torch.Tensor


class _Module:
    """One module, and a row for each role in which it was met."""

    __slots__ = ("calls", "first", "own", "rows", "type")

    def __init__(self, kind: str) -> None:
        self.type = kind
        self.calls = 0
        self.first = 0  # of all modules the n-th to be called; 0 for one that was not
        self.own = False  # a module inside it has made all that it gave
        self.rows: dict[str, Row] = {}

    def row(self, role: str) -> Row:
        return self.rows.get(role) or self.rows.setdefault(role, Row())


class Profiler:
    """Profiles `model` from `open` to `close`; see `nanhunt.profile`. Results are not changed, no tensor is kept.

    Steps are the caller's: `end_step` ends one, and `look` says whether the next is profiled.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        wanted: Callable[[str], bool] = lambda path: True,
        every: int = 1,
        sample: int | None = None,
        backward: bool = True,
        failed: Callable[[Exception], None] | None = None,
    ) -> None:
        self.step = 0
        self.every, self.sample = every, sample
        self.on = True
        self.ledger = Ledger()
        self.notes: dict[str, None] = {}
        self._model = type_name(model)
        self._names = Names(model, wanted)
        self._backward = backward
        self._failed = failed or self._note
        self._modules: dict[str, _Module] = {}
        self._sightings = Sightings()
        self._called = self._seen = self._skipped = 0
        self._fresh = True  # the step has not called a module yet
        self._strangers = False  # modules were met that the tree did not have when it was read
        self._inverse: Tensor | None = None  # of the loss scale, while one is on the loss of this step
        self._scale: Tensor | None = None
        self._attachment: hooks.Attachment | None = None
        self._of_ours = next(hooks.keys)
        self._record: Profile | None = None

    # --- life ---------------------------------------------------------------------------------------

    def open(self) -> None:
        self._attachment = hooks.Attachment(self, self)
        self._hook_parameters()
        for module in self._names.model.modules():
            if is_compiled(module):
                where = self._names.modules[id(module)][0] or "the model"
                self.notes[f"inside {where}, which is compiled, only weights and their gradients are seen"] = None

    def close(self) -> None:
        """Take every hook off and read what was counted. It can be called twice."""
        if self._attachment is None:
            return
        self.on = False
        self._attachment.remove()
        self._attachment = None
        self._record = self.record()
        self._names.forget()
        self._forget_step()
        self.ledger = Ledger()

    def look(self, on: bool) -> None:
        """Whether the step that begins now is profiled."""
        if on and not self.on and self._attachment is not None:
            self._hook_parameters()
        self.on = on

    def end_step(self) -> None:
        """The step is over; nothing is read."""
        self.ledger.end_step(self.step, self._scale)
        self._forget_step()
        self.step += 1

    def _forget_step(self) -> None:
        self._sightings.clear()
        self._inverse = self._scale = None
        self._fresh = True
        if self._attachment is not None:
            self._attachment.drop_leaves()
            if self._strangers:
                self._strangers = False
                if self._names.refresh():
                    self._hook_parameters()

    def _hook_parameters(self) -> None:
        if self._attachment is not None and self._backward:
            with internals.unseen_by_modes():
                self._attachment.parameters(self._names.parameters(), self._parameter_hook)

    def record(self) -> Profile:
        """The record of what was counted up to now, read from where it was counted."""
        if self._record is not None:
            return self._record
        self.ledger.end_step(self.step, self._scale)
        places = [(name, role, row) for name, one in self._modules.items() for role, row in one.rows.items()]
        with torch.inference_mode(False), torch.no_grad(), internals.unseen_by_modes():
            read = self.ledger.read([row for _, _, row in places])
            scales = self.ledger.loss_scales()
        roles: dict[str, dict[str, Any]] = {}
        for (name, role, _), numbers in zip(places, read):
            roles.setdefault(name, {})[role] = numbers
        modules = {
            name: ModuleProfile(name=name, type=one.type, calls=one.calls, own=one.own, **roles.get(name, {}))
            for name, one in sorted(self._modules.items(), key=lambda item: item[1].first or math.inf)
            if name in roles
        }
        return Profile(
            model=self._model,
            modules=modules,
            steps=tuple(self.ledger.steps),
            loss_scales=scales,
            every=self.every,
            sample=self.sample,
            seen=self._seen,
            skipped=self._skipped,
            notes=tuple(self.notes),
        )

    def _note(self, failure: Exception) -> None:
        self.notes[f"an internal error, please report it: {type(failure).__name__}: {failure}"[:300]] = None

    # --- what the hooks call ------------------------------------------------------------------------

    def on_pre(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if not self.on or torch.compiler.is_compiling():
            return
        if internals.graph_task() != -1:  # a recomputation repeats what was counted
            return
        named, kwargs = self._named(module), frames.call_kwargs()
        if self._fresh and id(module) in self._names.modules:
            self._fresh = False
            self._unseen(self._weights)
        if named is None:
            return
        one = self._module(*named)
        one.calls += 1
        if not one.first:
            one.first = self._called = self._called + 1
        if named[2]:
            self._unseen(self._inputs, one, (args, kwargs))

    def on_post(self, module: nn.Module, args: Any, kwargs: Any, out: Any = hooks.RAISED) -> None:
        if not self.on or out is hooks.RAISED or torch.compiler.is_compiling():
            return
        named = self._named(module)
        if named is not None and named[2]:
            self._unseen(self._outputs, self._module(*named), out, internals.graph_task() != -1)

    def on_gradient(self, makers: list[_Module], grad: Tensor | None) -> None:
        if self.on and grad is not None and self._attachment is not None:
            self._unseen(self._gradient, [one.row("output_gradients") for one in makers], grad)

    def on_backward_begin(self, roots: tuple[Any, ...], create_graph: bool) -> None: ...
    def on_backward_end(self, given: tuple[Any, ...], grads: Any, ok: bool) -> None: ...
    def on_optimizer(self, optimizer: torch.optim.Optimizer, after: bool, closure: bool) -> None: ...

    def on_scaler(self, scaler: Any, what: str, before: Any, after: Any) -> None:
        if what == "scale" and self.on and scaler.is_enabled():
            self._unseen(self._scaled, scaler)

    # --- looking ------------------------------------------------------------------------------------

    def _inputs(self, one: _Module, given: Any) -> None:
        for _, tensor in probe.leaves(given):
            if not isinstance(tensor, nn.Parameter):
                seen = self._counted(tensor)
                if seen is not None:
                    self._add(one.row("inputs"), seen.counts, seen.peak, tensor)

    def _outputs(self, one: _Module, out: Any, again: bool) -> None:
        for _, tensor in probe.leaves(out):
            if isinstance(tensor, nn.Parameter):
                continue
            if again:  # a reentrant checkpoint: its gradients come back through this graph alone
                self._hook(tensor, [one])
                continue
            seen = self._counted(tensor)
            if seen is None:
                continue
            self._add(one.row("outputs"), seen.counts, seen.peak, tensor)
            if seen.maker is None:
                seen.maker = one
            one.own = one.own or seen.maker is one
            if seen.takers is None:
                seen.takers = self._hook(tensor, [one])
            elif one not in seen.takers:
                seen.takers.append(one)

    def _hook(self, tensor: Tensor, makers: list[_Module]) -> list[_Module] | None:
        """Hook the gradient of an output; `makers` may grow until it comes."""
        if not tensor.requires_grad or not self._backward or self._attachment is None:
            return None
        hook = _GradientHook(self, makers)
        self._attachment.gradient(tensor, tensor.grad_fn, tensor._backward_hooks, self._of_ours, hook)
        return makers

    def _weights(self) -> None:
        self._hook_parameters()  # those that were replaced, or have been made since
        met: set[int] = set()
        for _, path, p in self._names.parameters():
            if id(p) not in met and not is_lazy(p):
                met.add(id(p))
                self._straight(p, [self._module_of(path).row("weights")], None)

    def _parameter_hook(self, name: str, p: Tensor) -> Callable[[Tensor], None]:
        path = self._names.owners[id(p)][0][1]

        def on_parameter(p: Tensor) -> None:
            if self.on and p.grad is not None and self._attachment is not None:
                self._unseen(self._gradient, [self._module_of(path).row("weight_gradients")], p.grad)

        return on_parameter

    def _gradient(self, rows: list[Row], grad: Tensor) -> None:
        self._straight(grad, rows, self._inverse)

    def _straight(self, tensor: Tensor, rows: list[Row], factor: Tensor | None) -> None:
        """Count a tensor that no other module will take."""
        numbers = self._payload(tensor)
        if numbers is None:
            return
        if factor is not None:  # as GradScaler.unscale_ does, which also rounds to float32
            wide = numbers if numbers.dtype is torch.float64 else numbers.to(torch.float32)
            numbers = wide * factor.to(numbers.device)
        counts, peak = count(numbers, self.sample)
        for row in rows:
            self._add(row, counts, peak, tensor)

    def _counted(self, tensor: Tensor) -> Sighting | None:
        seen = self._sightings.of(tensor)
        if seen is not None:
            return seen
        numbers = self._payload(tensor)
        return None if numbers is None else self._sightings.put(tensor, *count(numbers, self.sample))

    def _payload(self, tensor: Tensor) -> Tensor | None:
        numbers = None if internals.batched(tensor) else probe.payload(tensor)
        if numbers is not None:
            self._seen += 1
        elif tensor.is_floating_point() or tensor.is_complex() or tensor.is_quantized:
            self._skipped += not _empty(tensor)
        return numbers

    def _add(self, row: Row, counts: Tensor, peak: Tensor, tensor: Tensor) -> None:
        self.ledger.add(row, counts, peak, str(tensor.dtype).removeprefix("torch."))

    def _scaled(self, scaler: Any) -> None:
        # get_scale() would make the host wait for the device; the tensor is there once a loss was scaled.
        scale = getattr(scaler, "_scale", None)
        scale = torch.tensor(scaler.get_scale()) if scale is None else scale.detach().clone()
        self._scale, self._inverse = scale, scale.to(torch.float32).reciprocal()

    def _unseen(self, look: Callable[..., None], *args: Any) -> None:
        """Look, unseen by modes of the user; a failure of ours must not end their step."""
        if internals.transformed() or internals.recording():
            self.notes["inside torch.func transforms or while a graph is traced nothing is looked at"] = None
            return
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            self.notes["while a CUDA graph is captured nothing is looked at"] = None
            return
        try:
            # What is counted in a user's inference mode must take counts from outside of it later.
            with torch.inference_mode(False), torch.no_grad():
                if internals.foreign_modes():
                    with internals.unseen_by_modes():
                        look(*args)
                else:
                    look(*args)
        except Exception as failure:
            self._failed(failure)

    # --- names --------------------------------------------------------------------------------------

    def _named(self, module: nn.Module) -> tuple[str, nn.Module, bool] | None:
        """(path, module, whether it is looked at); None for one that is not part of the model, or wraps one that is."""
        names = self._names
        paths = names.modules.get(id(module))
        if paths is None:
            self._strangers = not self._fresh
            return None
        path = paths[0]
        return (path, module, names.wanted(path)) if names.by_path.get(path) is module else None

    def _module(self, path: str, module: nn.Module, wanted: bool) -> _Module:
        return self._modules.get(path) or self._modules.setdefault(path, _Module(type_name(module)))

    def _module_of(self, path: str) -> _Module:
        module = self._names.by_path[path]
        return self._module(self._names.modules[id(module)][0], module, True)


class _GradientHook:
    """What hangs on an output: it holds no tensor, and says that it is not to be saved with one."""

    __slots__ = ("makers", "profiler")
    __torch_unserializable__ = True

    def __init__(self, profiler: Profiler, makers: list[_Module]) -> None:
        self.profiler, self.makers = profiler, makers

    def __call__(self, grad: Tensor | None) -> None:
        self.profiler.on_gradient(self.makers, grad)


def _empty(tensor: Tensor) -> bool:
    try:
        return tensor.numel() == 0 or tensor._is_zerotensor()
    except RuntimeError:
        return False


def beside(model: nn.Module, options: Options, failed: Callable[[Exception], None]) -> Profiler:
    """The profiler that goes along with a watch, and looks at what the watch looks at."""
    return Profiler(
        model,
        wanted=options.looked_at(model),
        every=options.every,
        backward=options.backward,
        failed=failed,
    )
