"""Faults put into a model on purpose: in the output or gradient of a module, in a weight, in a buffer."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from specimens import Specimen
from torch import Tensor, nn

PLACES = ("output", "gradient", "weight", "buffer")
KINDS = ("nan", "+inf", "-inf")
OVER_ZERO = {"nan": 0.0, "+inf": 1.0, "-inf": -1.0}  # what gives that kind when divided by zero


@dataclass(frozen=True, slots=True, kw_only=True)
class Plant:
    """One fault: in the output or gradient of a module, or in a parameter or buffer (``path`` names it)."""

    specimen: str
    path: str
    module_type: str
    place: str
    kind: str
    seed: int = 0

    def number(self, below: int, what: str) -> int:
        """The same choice each time the planted module is called, also in a recomputation."""
        return random.Random(f"{self.seed}:{self.specimen}:{self.path}:{self.place}:{self.kind}:{what}").randrange(
            below
        )


def every_plant(specimen: Specimen, seed: int = 0) -> Iterator[Plant]:
    """Each kind in the output and the gradient of each module, and in each parameter and floating buffer."""
    model = specimen.model
    common = {"specimen": specimen.name, "seed": seed}
    for path, module in model.named_modules():
        for place in ("output", "gradient"):
            for kind in KINDS:
                yield Plant(path=path, module_type=type(module).__name__, place=place, kind=kind, **common)  # type: ignore[arg-type]
    for place, named in (("weight", model.named_parameters()), ("buffer", model.named_buffers())):
        for path, tensor in named:
            if tensor.is_floating_point():
                owner = type(model.get_submodule(path.rpartition(".")[0])).__name__
                for kind in KINDS:
                    yield Plant(path=path, module_type=owner, place=place, kind=kind, **common)  # type: ignore[arg-type]


# ---- looking at tensors


def leaves(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors of an output, through tuples, lists, mappings and dataclasses; not through other objects."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from leaves(item, f"{name}.{key}")
    elif isinstance(value, (tuple, list)):
        for i, item in enumerate(value):
            yield from leaves(item, f"{name}[{i}]")
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for slot in dataclasses.fields(value):
            yield from leaves(getattr(value, slot.name), f"{name}.{slot.name}")


def swapped(value: Any, old: Tensor, new: Tensor) -> Any:
    """The same structure with one tensor exchanged; a ModelOutput keeps its type."""
    if value is old:
        return new
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(swapped(item, old, new) for item in value))
    if isinstance(value, (tuple, list)):
        return type(value)([swapped(item, old, new) for item in value])
    if isinstance(value, dict):
        items = {key: swapped(item, old, new) for key, item in value.items()}
        return items if type(value) is dict else type(value)(**items)
    return value


def floating(value: Any) -> list[Tensor]:
    return [t for _, t in leaves(value) if t.is_floating_point() and t.numel()]


def kinds_in(tensor: Tensor) -> tuple[str, ...]:
    """Which kinds a tensor holds, in the order in which one is named when there are several."""
    tensor = tensor.detach()
    tests = (tensor.isnan(), tensor == math.inf, tensor == -math.inf)
    return tuple(kind for kind, test in zip(KINDS, tests, strict=True) if test.any())


def is_bad(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and not bool(tensor.detach().isfinite().all())


def fingerprint(model: nn.Module) -> str:
    """Equal for two models whose parameters and buffers are bitwise equal."""
    digest = hashlib.sha1(usedforsecurity=False)
    for tensor in state_of(model).values():
        digest.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


# ---- planting


def with_fault(tensor: Tensor, kind: str, at: int) -> Tensor:
    """The tensor plus 0 everywhere, and plus the fault at one element, computed by dividing by zero."""
    above, below = torch.zeros_like(tensor).flatten(), torch.ones_like(tensor).flatten()
    above[at], below[at] = OVER_ZERO[kind], 0.0
    return tensor + (above / below).view(tensor.shape)


class _BadOutput(torch.autograd.Function):
    """In forward one element goes bad, as in an operator of one's own; in backward nothing happens."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, kind: str, at: int) -> Tensor:
        return with_fault(tensor, kind, at)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None, None


class _BadGradient(torch.autograd.Function):
    """Does nothing in forward; in backward one element of the gradient goes bad."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, kind: str, at: int) -> Tensor:
        ctx.kind, ctx.at = kind, at
        return tensor.clone()  # a view could not be modified in place by the next module

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return with_fault(gradient, ctx.kind, ctx.at), None, None


@dataclass(slots=True)
class Reached:
    """What the plant met while the step ran."""

    calls: int = 0
    planted: int = 0
    graphless: int = 0  # of those, where no graph was recorded
    given: set[object] = field(default_factory=set)  # what the planted module gives back
    shares: dict[object, Tensor] = field(default_factory=dict)  # what the planted module alone sent into a gradient
    shared: set[object] = field(default_factory=set)  # gradients to which others added as well, or that it returns


def key_of(tensor: Tensor) -> object:
    """Names one tensor of the graph for as long as the step lasts."""
    node: Any = tensor.grad_fn
    return node._sequence_nr(), tensor.output_nr


def _told_apart(value: Any, reached: Reached) -> Any:
    """The tensors as aliases, so that the module's own share of each gradient is seen before the others are added."""
    for tensor in floating(value):
        if tensor.grad_fn is None or not torch.is_grad_enabled():
            continue
        key, alias = key_of(tensor), tensor.view_as(tensor)

        def own(gradient: Tensor, key: object = key) -> None:
            before = reached.shares.get(key)
            reached.shares[key] = gradient.detach().clone() if before is None else before + gradient.detach()

        def total(gradient: Tensor, key: object = key) -> None:
            share = reached.shares.get(key)
            if share is None or not torch.equal(share.nan_to_num(7.0, 8.0, 9.0), gradient.nan_to_num(7.0, 8.0, 9.0)):
                reached.shared.add(key)

        alias.register_hook(own)  # type: ignore[no-untyped-call]
        tensor.register_hook(total)  # type: ignore[no-untyped-call]
        value = swapped(value, tensor, alias)
    return value


def _planted_forward(
    forward: Callable[..., Any], plant: Plant, reached: Reached, apart: bool, *args: Any, **kwargs: Any
) -> Any:
    if apart:
        args, kwargs = _told_apart((args, kwargs), reached)
    output = forward(*args, **kwargs)
    reached.calls += 1
    found = floating(output)
    if not found:
        return output
    reached.planted += 1
    old = found[plant.number(len(found), "leaf")]
    at = plant.number(old.numel(), "element")
    if plant.place == "output":
        # Where no graph is recorded, or a mask comes in, one more -inf looks meant to all that see no operations.
        masked = any(bool((t == -math.inf).any()) for t in floating((args, kwargs)))
        reached.graphless += masked or not (old.requires_grad and torch.is_grad_enabled())
        bad_output: Any = _BadOutput.apply
        return swapped(output, old, bad_output(old, plant.kind, at))
    if apart:
        reached.shared |= {key_of(t) for t in found if t is not old and t.grad_fn is not None}
    reached.given |= {key_of(t) for t in found if t.grad_fn is not None}
    bad_gradient: Any = _BadGradient.apply
    new = bad_gradient(_told_apart(old, reached) if apart else old, plant.kind, at)
    return swapped(output, old, new)


@contextmanager
def planted(specimen: Specimen, plant: Plant, *, apart: bool = False) -> Iterator[Reached]:
    """The specimen, as built, with the fault in it; as built again afterwards. ``apart`` is for the oracle only."""
    reached = Reached()
    specimen.restore()
    if plant.place in ("output", "gradient"):
        module = specimen.model.get_submodule(plant.path)
        # An attribute of this one instance: the fault is in the module's own forward, under no name of its own.
        module.__dict__["forward"] = functools.partial(_planted_forward, module.forward, plant, reached, apart)
    else:
        tensor = state_of(specimen.model)[plant.path].data
        at = plant.number(tensor.numel(), "element")
        place = tuple(int(i) for i in torch.unravel_index(torch.tensor(at), tensor.shape))
        tensor[place] = float(plant.kind)
    try:
        yield reached
    finally:
        if plant.place in ("output", "gradient"):
            del module.__dict__["forward"]
        specimen.restore()


def state_of(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}
