"""One call run as it was recorded: its random numbers, its switches, and the gradients that came back to it."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy
import torch
from torch import nn
from torch.utils import _pytree as pytree

from .. import probe
from ..ambient import random_state
from ..errors import UsageError
from ..leaves import leaves
from ..schemas import schema_of
from . import op_list
from .reading import Piece

Tensor = torch.Tensor


def outcome(module: Any, call: tuple[tuple[Any, ...], dict[str, Any]], grads: Mapping[int, Tensor]) -> Any:
    """What a module makes of its arguments: its outputs and, where gradients came back, the gradients that it sends on.

    Its inputs are copies that bear the name of no leaf, so that it may work in place.
    """
    wanted = [t for _, t in leaves(call) if t.requires_grad]
    if isinstance(module, nn.Module):
        wanted += [p for p in module.parameters() if p.requires_grad]
    args, kwargs = pytree.tree_map_only(Tensor, lambda t: t.clone() if t.requires_grad else t, call)
    out = module(*args, **kwargs)
    outs = [t for _, t in leaves(out)]
    pairs = [(outs[at], grad) for at, grad in grads.items() if at < len(outs) and outs[at].requires_grad]
    if not pairs or not wanted:
        return out
    roots, seeds = map(list, zip(*pairs))
    return out, torch.autograd.grad(roots, wanted, seeds, allow_unused=True)


def op_gives(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What an op gives, and what it may have written to.

    Raises:
        UsageError: for operands that it cannot be trusted with.
        Exception: what the op itself dies of.
    """
    op_list.check(func, args, kwargs)
    with torch.no_grad():
        out = func(*args, **kwargs)
    schema = schema_of(func)
    if schema.garbage:
        out = [one for at, one in enumerate(out) if at not in schema.garbage]
    return (out, args, kwargs) if schema.writes else out


def set_modes(piece: Piece, module: nn.Module) -> None:
    modes = piece.training()
    for name, one in module.named_modules():
        one.training = modes.get(name, one.training)


def own(value: Any) -> Any:
    """Copies of the tensors in a value, so that a run in place leaves the capsule as it was; one of each."""
    made: dict[int, Tensor] = {}

    def one(t: Tensor) -> Tensor:
        if id(t) not in made:
            copy = t.detach().clone()
            if isinstance(t, nn.Parameter):
                copy = nn.Parameter(copy, requires_grad=t.requires_grad)
            made[id(t)] = copy.requires_grad_(t.requires_grad)
        return made[id(t)]

    return pytree.tree_map_only(Tensor, one, value)


def cast(value: Any, dtype: torch.dtype) -> Any:
    """The same with all real numbers in another dtype, and so the dtypes that an op is asked for."""
    wide = torch.complex128 if dtype is torch.float64 else torch.complex64

    def one(t: Any) -> Any:
        if isinstance(t, torch.dtype):
            return dtype if t.is_floating_point else wide if t.is_complex else t
        if isinstance(t, Tensor) and t.is_floating_point():
            other = t.detach().to(dtype)
            if isinstance(t, nn.Parameter):
                return nn.Parameter(other, requires_grad=t.requires_grad)
            return other.requires_grad_(t.requires_grad)
        return t

    return pytree.tree_map(one, value)


def kinds(value: Any) -> tuple[str, ...]:
    found = {kind for _, tensor in leaves(value) for kind in probe.kinds(tensor)}
    return tuple(kind for kind in ("nan", "+inf", "-inf") if kind in found)


@contextlib.contextmanager
def casting(casts: Mapping[str, str]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for kind, dtype in casts.items():
            stack.enter_context(torch.autocast(kind, getattr(torch, dtype)))
        yield


@contextlib.contextmanager
def as_recorded(piece: Piece, *, autocast: bool) -> Iterator[None]:
    """Random numbers, autocast and gradients as they were; afterwards as they are now."""
    backs = random_state(set())
    dtype = torch.get_default_dtype()
    try:
        if "random" in piece:
            _set_random(piece.value("random", dict))
        torch.set_default_dtype(
            getattr(torch, piece.word("default_dtype", ("float32", "float64", "float16", "bfloat16")))
        )
        grad = piece.flag("grad") and not piece.flag("inference")
        with torch.set_grad_enabled(grad), casting(piece.casts() if autocast else {}):
            yield
    finally:
        torch.set_default_dtype(dtype)
        for back in backs:
            back()


def _set_random(states: dict[str, Any]) -> None:
    try:
        if "torch" in states:
            torch.set_rng_state(states["torch"].cpu())
        if "python" in states:
            python = states["python"]
            random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
        if "numpy" in states:
            numpy.random.set_state(states["numpy"])
        if "cuda" in states and torch.cuda.is_available():
            torch.cuda.set_rng_state(states["cuda"].cpu())
    except Exception as error:
        raise UsageError(f"this capsule is damaged: its random state is none ({first_line(error)})") from None


def first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".split("\n")[0][:200]
