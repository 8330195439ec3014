"""What modules return: structures, strangers, nothing at all."""

import collections
import dataclasses
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .harness import Spans
from .models import batch, situation, squared, step


@dataclasses.dataclass
class Pair:
    """A dataclass output."""

    left: Tensor
    right: Tensor


class Named(NamedTuple):
    """A namedtuple output."""

    a: Tensor
    b: list[Tensor]


class ModelOutput(collections.OrderedDict[str, Any]):
    """A dict with attribute access, as Hugging Face has it."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class Returns(nn.Module):
    """A linear layer whose output is wrapped by a function."""

    def __init__(self, wrap: Any) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self._wrap = wrap

    def forward(self, x: Tensor) -> Any:
        return self._wrap(self.lin(x))


STRUCTS: dict[str, tuple[Any, Any]] = {
    "dict": (lambda y: {"a": y, "b": [y * 2, {"c": y + 1}]}, lambda o: o["a"] + o["b"][1]["c"]),
    "list": (lambda y: [y, y * 2, None, 3], lambda o: o[0] + o[1]),
    "tuple": (lambda y: (y, (y * 2, (y * 3,))), lambda o: o[1][1][0]),
    "dataclass": (lambda y: Pair(y, y.exp()), lambda o: o.left * o.right),
    "namedtuple": (lambda y: Named(y, [y * 2]), lambda o: o.a + o.b[0]),
    "modeloutput": (lambda y: ModelOutput(logits=y, past=(y, y)), lambda o: o.logits + o.past[1]),
    "structseq": (lambda y: y.max(dim=1), lambda o: o.values),
    "namespace": (lambda y: SimpleNamespace(y=y, z=[y * 2]), lambda o: o.y + o.z[0]),
    "defaultdict": (lambda y: collections.defaultdict(list, a=[y]), lambda o: o["a"][0]),
    "deque": (lambda y: collections.deque([y, y * 2], maxlen=2), lambda o: o[1]),
    "numpy": (lambda y: (y, y.detach().numpy()), lambda o: o[0]),
}


def _struct(name: str) -> None:
    wrap, unwrap = STRUCTS[name]

    def run(watch: Spans) -> object:
        return step(watch, Returns(wrap), batch(), loss=lambda out: squared(unwrap(out)))

    run.__name__ = f"returns_{name}"
    run.__doc__ = f"A module that returns a {name}."
    situation()(run)


for _kind in STRUCTS:
    _struct(_kind)


class _TupleSubclass(tuple[Any, ...]):
    def __new__(cls, a: Tensor, b: Tensor) -> "_TupleSubclass":
        return super().__new__(cls, (a, b))


@situation()
def tuple_subclass_out(watch: Spans) -> object:
    """A tuple subclass whose constructor takes other arguments than a tuple's."""
    return step(watch, Returns(lambda y: _TupleSubclass(y, y * 2)), batch(), loss=lambda o: squared(o[1]))


class _Lazy:
    """Counts each look at it; a look that nobody asked for is a change."""

    def __init__(self, y: Tensor) -> None:
        self.y, self.looks = y, 0

    @property
    def value(self) -> Tensor:
        self.looks += 1
        return self.y * 2

    def __len__(self) -> int:
        self.looks += 100
        return 1

    def __iter__(self) -> Iterator[Tensor]:
        self.looks += 1000
        yield self.y

    def __bool__(self) -> bool:
        raise RuntimeError("no truth value")

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("no comparison")

    __hash__ = None  # type: ignore[assignment]


@situation()
def output_with_side_effects(watch: Spans) -> object:
    """An output object whose properties, length and iteration have side effects or raise."""
    return step(watch, Returns(_Lazy), batch(), loss=lambda o: squared(o.value))


class _LoadingMap(Mapping[str, Tensor]):
    """Makes its tensors when asked, from the random number generator."""

    def __init__(self, y: Tensor) -> None:
        self.y = y

    def __getitem__(self, key: str) -> Tensor:
        return self.y * torch.rand(())

    def __iter__(self) -> Iterator[str]:
        return iter(("a", "b"))

    def __len__(self) -> int:
        return 2


@situation()
def output_mapping_that_computes(watch: Spans) -> object:
    """A Mapping that draws random numbers each time an item is read."""
    return step(watch, Returns(_LoadingMap), batch(), loss=lambda o: squared(o["a"]))


class _Gen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Iterator[Tensor]:
        for _ in range(3):
            x = self.lin(x)
            yield x


@situation()
def generator_forward(watch: Spans) -> object:
    """A forward that is a generator; nobody but the user may consume it."""
    return step(watch, _Gen(), batch(), loss=lambda gen: squared(sum(gen, torch.zeros(5, 4))))


@situation()
def output_iterators(watch: Spans) -> object:
    """map, zip and generator outputs are consumed once, by the user."""
    model = Returns(lambda y: (map(torch.sin, (y, y)), (z for z in (y, y * 2)), zip((y,), (y,), strict=True)))
    return step(watch, model, batch(), loss=lambda o: squared(sum(o[0]) + sum(o[1]) + next(o[2])[0]))


@situation(sees=False)
def returns_strangers(watch: Spans) -> object:
    """Modules that return None, themselves, a string, a class, a function, bytes, a number."""

    class Odd(nn.Module):
        def __init__(self, value: Any) -> None:
            super().__init__()
            self._value = value

        def forward(self) -> Any:
            return self if self._value == "self" else self._value

    values = [None, "self", "text", int, print, b"x", 3, 2.5, Ellipsis, NotImplemented, {1, 2}, False, 0]
    model = nn.ModuleList(Odd(value) for value in values)
    with watch(model):
        outs = [child() for child in model]
    return [
        out is child if child._value == "self" else out is child._value for out, child in zip(outs, model, strict=True)
    ]


@situation()
def returns_distribution(watch: Spans) -> object:
    """A policy that returns a torch distribution, from which the loss samples."""
    model = Returns(lambda y: torch.distributions.Normal(y, y.exp(), validate_args=True))
    other = Returns(lambda y: torch.distributions.Categorical(logits=y))
    first = step(watch, model, batch(), loss=lambda d: squared(d.rsample()) - d.log_prob(torch.ones(5, 4)).mean())
    second = step(watch, other, batch(), loss=lambda d: -d.log_prob(d.sample()).mean() - d.entropy().mean())
    return [first["model"], first["loss"], second["model"], second["loss"]]


@situation()
def thousands_of_outputs(watch: Spans) -> object:
    """A module that returns five thousand tensors."""
    return step(watch, Returns(lambda y: [y.sum() * i for i in range(5000)]), batch(), loss=lambda o: o[3] + o[4999])


@situation()
def cyclic_output(watch: Spans) -> object:
    """A dict that contains itself."""

    def tie(y: Tensor) -> dict[str, Any]:
        knot: dict[str, Any] = {"y": y}
        knot["self"] = [knot]
        return knot

    return step(watch, Returns(tie), batch(), loss=lambda o: squared(o["self"][0]["y"]))


@situation()
def same_tensor_twice(watch: Spans) -> object:
    """One tensor stands in an output several times, and a child returns what its parent returns."""
    model = nn.Sequential(nn.Sequential(nn.Sequential(Returns(lambda y: (y, y, [y])))))
    return step(watch, model, batch(), loss=lambda o: squared(o[0] + o[2][0]))
