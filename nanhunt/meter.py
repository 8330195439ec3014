"""The largest numbers that each module gives out, and gets back in backward, while a step runs."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
from torch import nn

from . import hooks, internals, probe
from .headroom import Peak
from .naming import type_name, walk
from .ranges import Range


class _Row:
    """One module: its largest finite |numbers|, by tensor and dtype."""

    __slots__ = ("sizes", "type_name")

    def __init__(self, type_name: str) -> None:
        self.type_name = type_name
        self.sizes: dict[tuple[str, str], float] = {}  # ("output" or "gradient", dtype) -> size

    def largest(self, tensor: str) -> float | None:
        return max((size for (what, _), size in self.sizes.items() if what == tensor), default=None)


class Meter:
    """Measures every module of `model`, or of every model that is called, between `__enter__` and `__exit__`.

    It is for tests: each look reads the device. Gradients are told without the loss scale of a GradScaler. Results
    are not changed; all hooks come off at the end. Without a `model`, the first call of a module that is part of
    nothing called before makes it a root; paths then begin at their root, and with its class where there are several.

    Raises:
        RuntimeError: at the end, when a look has failed, so that nothing passes for measured that was not.
    """

    def __init__(self, model: nn.Module | None = None) -> None:
        self._rows: dict[tuple[int, str], _Row] = {}  # in the order of first calls
        self._known: dict[int, tuple[weakref.ref[nn.Module], tuple[int, str]]] = {}
        self._types: dict[tuple[int, str], str] = {}
        self._roots: list[str] = []
        self._single = model is not None
        self._attachment: hooks.Attachment | None = None
        self._failure: Exception | None = None
        self._scale = 1.0  # on the loss of the running step
        self._of_ours = next(hooks.keys)
        if model is not None:
            self._learn(model)

    def __enter__(self) -> Meter:
        self._attachment = hooks.Attachment(self, self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._attachment is not None:
            self._attachment.remove()
            self._attachment = None
        if self._failure is not None and error is None:
            raise RuntimeError("nanhunt could not measure every tensor of this step") from self._failure

    def ranges(self) -> tuple[Range, ...]:
        """What was measured, module by module in the order of first calls."""
        measured = (
            Range(
                module=self._path(key),
                type=row.type_name,
                output=row.largest("output"),
                gradient=row.largest("gradient"),
            )
            for key, row in self._rows.items()
            if row.sizes
        )
        return tuple(measured)

    def peaks(self) -> list[Peak]:
        """The same by dtype."""
        return [
            Peak(module=self._path(key), type=row.type_name, tensor=tensor, dtype=dtype, size=size)
            for key, row in self._rows.items()
            for (tensor, dtype), size in row.sizes.items()
        ]

    def _path(self, key: tuple[int, str]) -> str:
        root, path = key
        if len(self._roots) == 1:
            return path
        return f"{self._roots[root]}.{path}" if path else self._roots[root]

    # --- what the hooks call ------------------------------------------------------------------------

    def on_pre(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if torch.compiler.is_compiling():
            return
        key = self._key(module)
        if key is not None and key not in self._rows:
            self._rows[key] = _Row(self._types[key])

    def on_post(self, module: nn.Module, args: Any, kwargs: Any, out: Any = hooks.RAISED) -> None:
        if torch.compiler.is_compiling():
            return
        key = None if out is hooks.RAISED else self._key(module)
        row = None if key is None else self._rows.get(key)
        if row is not None and not internals.transformed() and not internals.recording():
            self._unseen(self._outputs, row, out)

    def on_backward_begin(self, roots: tuple[Any, ...], create_graph: bool) -> None: ...
    def on_backward_end(self, given: tuple[Any, ...], grads: Any, ok: bool) -> None: ...
    def on_optimizer(self, optimizer: torch.optim.Optimizer, after: bool, closure: bool) -> None: ...
    def on_scaler(self, scaler: Any, what: str, before: Any, after: Any) -> None:
        if what == "scale" and scaler.is_enabled():
            self._scale = float(scaler.get_scale())
        elif what == "update":
            self._scale = 1.0

    def _outputs(self, row: _Row, out: Any) -> None:
        for _, tensor in probe.leaves(out):
            if isinstance(tensor, nn.Parameter):
                continue
            self._look(row, "output", tensor)
            if tensor.requires_grad and self._attachment is not None:
                hook = _GradientHook(self, row)
                self._attachment.gradient(tensor, tensor.grad_fn, tensor._backward_hooks, self._of_ours, hook)

    def on_gradient(self, row: _Row, grad: torch.Tensor | None) -> None:
        if grad is not None and self._attachment is not None:
            self._unseen(self._look, row, "gradient", grad)

    def _look(self, row: _Row, what: str, tensor: torch.Tensor) -> None:
        numbers = None if internals.batched(tensor) else probe.payload(tensor)
        size = None if numbers is None else _largest(numbers)
        if size is not None:
            size = size / self._scale if what == "gradient" else size
            key = what, str(tensor.dtype).removeprefix("torch.")
            row.sizes[key] = max(size, row.sizes.get(key, 0.0))

    def _unseen(self, look: Callable[..., None], *args: Any) -> None:
        """Look, unseen by modes and subclasses of the user; a failure of ours must not end their step."""
        try:
            with internals.unseen_by_modes():
                look(*args)
        except Exception as failure:
            self._failure = self._failure or failure

    # --- names --------------------------------------------------------------------------------------

    def _key(self, module: nn.Module) -> tuple[int, str] | None:
        known = self._known.get(id(module))
        if known is not None and known[0]() is module:
            return known[1]
        if self._single:
            return None
        self._learn(module)
        return self._known[id(module)][1]

    def _learn(self, root: nn.Module) -> None:
        number = len(self._roots)
        self._roots.append(type_name(root))
        names: set[int] = set()
        for path, module in walk(root):
            self._types[number, path] = type_name(module)  # of a wrapper and what it wraps, the inner one
            if id(module) not in names:  # a shared module goes by its first name
                names.add(id(module))
                self._known[id(module)] = weakref.ref(module), (number, path)


class _GradientHook:
    """What hangs on a tensor: it holds no tensor, and says that it is not to be saved with one."""

    __slots__ = ("meter", "row")
    __torch_unserializable__ = True

    def __init__(self, meter: Meter, row: _Row) -> None:
        self.meter, self.row = meter, row

    def __call__(self, grad: torch.Tensor | None) -> None:
        self.meter.on_gradient(self.row, grad)


def _largest(numbers: torch.Tensor) -> float | None:
    """The largest finite |number| of a payload: an infinity that is meant, such as a mask, is no range."""
    lo, hi = probe.limits(numbers)
    if probe.bad(lo, hi):
        finite = numbers.detach()
        finite = finite[finite.isfinite()]
        if not finite.numel():
            return None
        lo, hi = probe.limits(finite)
    return max(-lo, hi)
