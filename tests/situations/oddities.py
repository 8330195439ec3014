"""Modules and arguments that a tool must not look at too closely."""

import collections
import enum
import types
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar
from unittest import mock

import torch
from torch import Tensor, nn

from .harness import Spans
from .models import batch, mlp, situation, squared, step


class _Touchy:
    """Raises at whatever one does with it, and counts the attempts."""

    touched: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("__"):
            _Touchy.touched.append(name)
        raise AttributeError(name)

    def __len__(self) -> int:
        _Touchy.touched.append("len")
        raise RuntimeError("no length")

    def __iter__(self) -> Iterator[Any]:
        _Touchy.touched.append("iter")
        raise RuntimeError("no iteration")

    def __bool__(self) -> bool:
        _Touchy.touched.append("bool")
        raise RuntimeError("no truth")

    def __repr__(self) -> str:
        _Touchy.touched.append("repr")
        raise RuntimeError("no text")

    def __eq__(self, other: object) -> bool:
        _Touchy.touched.append("eq")
        raise RuntimeError("no comparison")

    def __hash__(self) -> int:
        _Touchy.touched.append("hash")
        raise RuntimeError("no hash")


class _Loads(Sequence[Tensor]):
    """A sequence that reads its items from somewhere, and counts the reads."""

    def __init__(self) -> None:
        self.reads = 0

    def __len__(self) -> int:
        return 3

    def __getitem__(self, i: Any) -> Any:
        if not 0 <= i < 3:
            raise IndexError
        self.reads += 1
        return torch.full((4,), float(i))


class _Slots:
    __slots__ = ("missing", "x")

    def __init__(self) -> None:
        self.x = batch()


class _Kind(enum.Enum):
    A = 1


class _Takes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin, self.pick = nn.Linear(4, 4), _Takes_inner()

    def forward(self, x: Tensor, *odd: Any, **named: Any) -> Tensor:
        self.pick(*odd, **named)
        return self.lin(x)


class _Takes_inner(nn.Module):
    def forward(self, *odd: Any, **named: Any) -> Any:
        return odd, named


def _gone() -> Any:
    class Thing:
        pass

    return weakref.proxy(Thing())


@situation()
def odd_arguments(watch: Spans) -> object:
    """Arguments that raise, count or compute when they are looked at: nobody looks at them."""
    _Touchy.touched.clear()
    loads, gen = _Loads(), (torch.rand(4) for _ in range(3))
    knot: list[Any] = []
    knot.append(knot)
    odd = [_Touchy(), loads, gen, knot, _gone(), _Slots(), _Kind.A, iter([1]), types.SimpleNamespace(a=_Touchy())]
    odd += [
        types.MappingProxyType({"x": batch()}),
        collections.ChainMap({"x": batch()}),
        collections.UserDict(x=batch()),
    ]
    odd += [list(range(50_000)), {i: i for i in range(5_000)}, print, int, object(), super(_Slots, _Slots()), ...]
    model = _Takes()
    with watch(model):
        out = model(batch(), *odd, touchy=_Touchy(), nested={"deep": [(_Touchy(),)]})
        squared(out).backward()
    return [model, out, loads.reads, list(_Touchy.touched), sum(gen)]


@situation()
def mock_arguments(watch: Spans) -> object:
    """Mocks as arguments and outputs, whose every attribute exists and is remembered."""
    thing = mock.MagicMock()
    model = _Takes()
    with watch(model):
        out = model(batch(), thing, key=thing)
        squared(out).backward()
    return [model, out, len(thing.mock_calls), sorted(thing._mock_children)]


class _Awkward(nn.Module):
    """Equal to everything, false, without a text, with its own ideas of what its children are called."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("no comparison")

    def __hash__(self) -> int:
        return id(self) // 16

    def __len__(self) -> int:
        return 0

    def __bool__(self) -> bool:
        return False

    def __dir__(self) -> list[str]:
        raise RuntimeError("no directory")

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x)


@situation()
def awkward_modules(watch: Spans) -> object:
    """Modules that are false, refuse comparison and have no directory."""
    model = nn.Sequential(_Awkward(), nn.Sequential(), _Awkward())
    made = step(watch, model, batch())
    return [made["out"], made["loss"], [p.grad for p in model.parameters()]]


@situation()
def shadowed_names(watch: Spans) -> object:
    """Children, parameters and buffers called `name`, `path`, `call`, `register_hook`, and dotted module paths."""

    class Shadows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name in ("name", "path", "call", "hook", "module"):
                self.add_module(name, nn.Linear(4, 4))
            self.register_buffer("register_hook", torch.ones(4))
            self.register_parameter("grad_fn", nn.Parameter(torch.ones(4)))

        def forward(self, x: Tensor, args: Tensor, out: float = 1.0, self_: int = 0, module: Any = None) -> Tensor:
            for child in self.children():
                x = child(x) * out
            return x * self.register_hook + args * self.grad_fn

    return step(watch, Shadows(), x=batch(), args=batch(), out=2.0, module="m")


@situation()
def swapped_tensors(watch: Spans) -> object:
    """swap_tensors on inputs and outputs, which refuses tensors that anyone holds a weak reference to."""
    model, x, y = mlp(4, 6, 3), batch(), batch()
    with watch(model), torch.no_grad():
        first, second = model(x), model(y)
        torch.utils.swap_tensors(x, y)
        torch.utils.swap_tensors(first, second)
        third = model(x)
    return [model, x, y, first, second, third]


@situation()
def tensors_with_attributes(watch: Spans) -> object:
    """Tensors that carry Python attributes, weak references and finalisers of the user's."""
    model, log = mlp(4, 6, 3), []
    with watch(model):
        x = batch()
        x.tag = "mine"  # type: ignore[attr-defined]
        out = model(x)
        out.tag = "out"  # type: ignore[attr-defined]
        weakref.finalize(out, log.append, "out died")
        count = (len(weakref.getweakrefs(model[0].weight)), sorted(vars(x)), sorted(vars(out)))
        squared(out).backward()
        del out
    return [model, x, log, count]


@situation()
def many_small_modules(watch: Spans) -> object:
    """Two thousand calls of one step, more than any table of the tool holds at first."""

    class Many(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(2000):
                x = self.cell(x).tanh()
            return x

    return step(watch, Many(), batch(1, 2))


@situation()
def reentrant_backward(watch: Spans) -> object:
    """A custom Function whose backward runs a forward and a backward of its own, as equilibrium models do."""
    model = nn.ModuleDict({"outer": nn.Linear(4, 4), "inner": mlp(4, 5, 4)})

    class Solve(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return model["inner"](x)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            with torch.enable_grad():
                y = x.detach().requires_grad_()
                out = model["inner"](y)
                torch.autograd.backward(out, grad)
            return y.grad

    with watch(model):
        for _ in range(2):
            squared(Solve.apply(model["outer"](batch()))).backward()
    return model
