"""The two runs of a step that a comparison holds against each other: what each of them looks at."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .. import hooks, internals
from .boundaries import Boundaries, Key, Tensors
from .figures import Figures
from .references import Kept, References

Tensor = torch.Tensor
Label = tuple[Key, str]  # of a call's input or output
_OTHER = 0.1  # relative error of a batch above which it is another one: rounding to bfloat16 makes 0.002


class Enough(BaseException):
    """The step has come to what no longer concerns a comparison: an optimizer is about to write the parameters."""


class Pass:
    """One run. It ends where an optimizer of the model is about to step; the loss scale is noted as it is used."""

    def __init__(self, scale: float = 1.0) -> None:
        self.scale = scale
        self.boundaries: Boundaries | None = None
        self.attachment: hooks.Attachment | None = None

    def begin(self, boundaries: Boundaries, attachment: hooks.Attachment) -> None:
        self.boundaries, self.attachment = boundaries, attachment

    # --- what torch tells -----------------------------------------------------------------------------

    def on_pre(self, module: nn.Module, args: tuple[Any, ...]) -> None: ...
    def on_post(self, module: nn.Module, args: Any, kwargs: Any, out: Any = ...) -> None: ...
    def on_backward_begin(self, roots: tuple[Any, ...], create_graph: bool) -> None: ...
    def on_backward_end(self, given: tuple[Any, ...], grads: Any, ok: bool) -> None: ...

    def on_optimizer(self, optimizer: torch.optim.Optimizer, after: bool, closure: bool) -> None:
        if not after and not closure:
            self._end(optimizer)

    def on_scaler(self, scaler: Any, what: str, before: Any, after: Any) -> None:
        if what == "scale" and scaler.is_enabled():
            self.scale = float(scaler.get_scale())
        elif what in ("unscale_:before", "step:before"):  # which refuses the gradients of float16 weights
            self._end(before)

    def _end(self, optimizer: Any) -> None:
        """End the run, if this optimizer is one of the model's."""
        owners = self.boundaries.names.owners if self.boundaries is not None else {}
        groups = getattr(optimizer, "param_groups", ())
        if any(id(p) in owners for group in groups for p in group["params"]):
            raise Enough

    # --- what boundaries tell -------------------------------------------------------------------------

    def entered(self, key: Key, parent: Key | None, tensors: Tensors) -> None: ...
    def left(self, key: Key, parent: Key | None, tensors: Tensors) -> None: ...


class _Graded(Pass):
    """A run whose gradients are looked at: those of outputs, and those of parameters as they stand at last."""

    def begin(self, boundaries: Boundaries, attachment: hooks.Attachment) -> None:
        super().begin(boundaries, attachment)
        self._of_ours = next(hooks.keys)
        self._times: dict[Label, int] = {}
        attachment.parameters(boundaries.names.parameters(), self._on_parameter)

    def _listen(self, key: Key, tensors: Tensors) -> None:
        assert self.attachment is not None
        for name, tensor in tensors:
            if tensor.requires_grad and not isinstance(tensor, nn.Parameter):
                hook = _GradientHook(functools.partial(self._on_gradient, (key, name)))
                self.attachment.gradient(tensor, tensor.grad_fn, tensor._backward_hooks, self._of_ours, hook)

    def _on_gradient(self, label: Label, grad: Tensor) -> None:
        n = self._times[label] = self._times.get(label, -1) + 1
        with internals.unseen_by_modes(), torch.no_grad():
            self.gradient(label, n, grad)

    def _on_parameter(self, name: str, p: Tensor) -> Callable[[Tensor], None]:
        def hook(p: Tensor) -> None:
            if p.grad is not None:
                with internals.unseen_by_modes(), torch.no_grad():
                    self.parameter(name, p.grad)

        return hook

    def gradient(self, label: Label, n: int, grad: Tensor) -> None:
        raise NotImplementedError

    def parameter(self, name: str, grad: Tensor) -> None:
        raise NotImplementedError


class _GradientHook:
    """What hangs on a tensor: it holds none, and says that it is not to be saved with one."""

    __slots__ = ("tell",)
    __torch_unserializable__ = True

    def __init__(self, tell: Callable[[Tensor], None]) -> None:
        self.tell = tell

    def __call__(self, grad: Tensor | None) -> None:
        if grad is not None:
            self.tell(grad)


class First(_Graded):
    """The run with setting `a`: all is kept."""

    def __init__(self, room: int, scale: float = 1.0) -> None:
        super().__init__(scale)
        self.references = References(room)
        self.kept: dict[Key, dict[str, Kept]] = {}
        self.gradients: dict[tuple[Label, int], Kept] = {}
        self.parameters: dict[str, Kept] = {}
        self.outermost: list[Key] = []
        self.ended: list[Key] = []
        self.data: list[dict[str, int]] = []  # whole numbers that the step hands to the model, call by call

    def entered(self, key: Key, parent: Key | None, tensors: Tensors) -> None:
        if parent is None:
            self.outermost.append(key)
            self.data.append(_whole(tensors))
        self._keep(key, tensors)

    def left(self, key: Key, parent: Key | None, tensors: Tensors) -> None:
        self.ended.append(key)
        self._keep(key, tensors)
        self._listen(key, tensors)

    def _keep(self, key: Key, tensors: Tensors) -> None:
        kept = self.kept.setdefault(key, {})
        for name, tensor in tensors:
            one = self.references.keep(tensor)
            if one is not None:
                kept[name] = one

    def gradient(self, label: Label, n: int, grad: Tensor) -> None:
        kept = self.references.keep(grad, self.scale)
        if kept is not None:
            self.gradients[label, n] = kept

    def parameter(self, name: str, grad: Tensor) -> None:
        kept = self.references.keep(grad, self.scale)
        if kept is not None:
            self.parameters[name] = kept


class Second(_Graded):
    """The run with setting `b`: all is held against the first run."""

    def __init__(self, first: First, floor: str | None, scale: float = 1.0) -> None:
        super().__init__(scale)
        self._first, self._floor = first, floor
        self.figures: dict[Key, list[Figures]] = {}
        self.gradients: dict[Key, list[Figures]] = {}
        self.parameters: dict[str, Figures] = {}
        self.drawn = False  # the first call of the model was handed another batch
        self.strayed = False  # a later one was handed other whole numbers
        self._calls = 0
        self.unlike: list[str] = []  # what has another shape, or is not there, in one of the runs

    def entered(self, key: Key, parent: Key | None, tensors: Tensors) -> None:
        shapes = self._compare(key, tensors)
        if parent is None:
            known = self._first.data[self._calls] if self._calls < len(self._first.data) else {}
            self._calls += 1
            other = any(known.get(name, value) != value for name, value in _whole(tensors).items())
            if self._calls > 1:
                self.strayed |= other
            else:
                self.drawn = other or not shapes or any(one.error > _OTHER for one in self.figures.get(key, ()))

    def left(self, key: Key, parent: Key | None, tensors: Tensors) -> None:
        self._compare(key, tensors)
        self._listen(key, tensors)

    def _compare(self, key: Key, tensors: Tensors) -> bool:
        """Whether what is in both runs has the same shapes."""
        known = self._first.kept.get(key)
        if known is None:
            self.unlike.append(f"call {key[1]} of {key[0] or 'the model'} is not in the first run")
            return True
        alike = True
        found = self.figures.setdefault(key, [])
        for name, tensor in tensors:
            if name in known:
                told = known[name].against(tensor, name, self._floor)
                if told is None:
                    self.unlike.append(f"{name} of {key[0] or 'the model'} has another shape in the first run")
                    alike = False
                else:
                    found.append(told)
        return alike

    def gradient(self, label: Label, n: int, grad: Tensor) -> None:
        known = self._first.gradients.get((label, n))
        told = known.against(grad, f"grad of {label[1]}", self._floor, self.scale) if known is not None else None
        if told is not None:
            self.gradients.setdefault(label[0], []).append(told)

    def parameter(self, name: str, grad: Tensor) -> None:
        known = self._first.parameters.get(name)
        told = known.against(grad, f"grad of {name}", self._floor, self.scale) if known is not None else None
        if told is not None:
            self.parameters[name] = told


def _whole(tensors: Tensors) -> dict[str, int]:
    """Whole numbers by name, as checksums."""
    found = {}
    for name, tensor in tensors:
        plain = tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_meta
        if plain and not tensor.is_floating_point() and not tensor.is_complex() and not tensor.is_quantized:
            found[name] = zlib.crc32(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return found
