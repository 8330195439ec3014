"""The hooks as dynamo traces them into a compiled graph: largest numbers into slots, in plain ops that fuse.

`enter` and `leave` do not run as Python. A call of `comptime` hands over to `scripts`, which runs while dynamo traces,
and what it has decided comes back as a constant. Only forward is looked at: a hook on a gradient would write to a
tensor that the backward graph has saved, and torch then refuses the user's backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import CodeType
from typing import Any

import torch
from torch import nn

from . import dynamo
from .errors import UsageError
from .scripts import log_enter, log_leave, plan
from .traces import live, marks, strange


def enter(module: nn.Module, args: tuple[Any, ...]) -> None:
    from torch._dynamo.comptime import comptime

    comptime(log_enter)
    if not live.on:
        return
    serial, stray, items = plan()
    if stray and live.generation < 0:  # never: but dynamo now looks for another generation
        return
    if serial >= 0:
        getattr(marks, f"t{serial}").ran = True
    if items:
        _take(module, args, items)


def leave(module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
    if not live.on:
        return
    from torch._dynamo.comptime import comptime

    comptime(log_leave)
    serial, stray, items = plan()
    if stray and live.generation < 0:
        return
    if serial >= 0:
        getattr(marks, f"t{serial}").ran = True
    if items:
        _take(module, (kwargs, out), items)


def _take(module: Any, values: Any, items: Any) -> None:
    seat = module._nanhunt
    for where, key, cast in items:
        tensor = values
        for attribute, step in where:
            tensor = getattr(tensor, step) if attribute else tensor[step]
        tensor = tensor.detach()
        if cast:
            tensor = tensor.to(torch.float32)
        low, high = tensor.amin(), tensor.amax()
        # The number of the largest magnitude, with its sign; NaN where there is one. Two slots for the two ends would
        # cost a kernel more for each tensor.
        getattr(seat, key).copy_(torch.where(-low > high, low, high))


# --- what was compiled before -------------------------------------------------------------------------


def is_compiled(module: nn.Module) -> bool:
    """True for what torch.compile gave, and for a module that `compile()` was called on."""
    return (
        type(module).__name__ == "OptimizedModule"
        or getattr(module, "_compiled_call_impl", None) is not None
        or _given(module.forward) is not None
    )


def has_compiled(model: nn.Module) -> bool:
    """True when the model is, or holds, something that torch.compile was given."""
    return any(is_compiled(module) for module in model.modules())


def dead(model: nn.Module) -> tuple[str, nn.Module] | None:
    """(path, module) of a part that runs compiled code in which no check can be: it was compiled before.

    Code belongs to a class, so another model of the same class may have left it.
    """
    for path, module in model.named_modules():
        if is_compiled(module):
            for part in module.modules():
                if any(strange(code) for code in codes(part)):
                    return ".".join(name for name in path.split(".") if name != "_orig_mod"), module
    return None


def refuse_dead(model: nn.Module) -> None:
    """Raise for a model that was compiled, and run, before it was watched.

    Raises:
        UsageError: naming the module and what can be done.
    """
    found = dead(model)
    if found is not None:
        path, module = found
        raise UsageError(
            f"{path or 'the model'} ({type(module).__name__}) was compiled and run before it was watched, and no check "
            "can be added to a compiled graph: open the watch before the first compiled call, or use "
            'nanhunt.watch(model, compiled="retrace") to have it compiled once more with the checks, or '
            'nanhunt.watch(model, compiled="eager") to run it eagerly while it is watched'
        )


def retrace() -> None:
    """Throw away all that torch.compile has made in this process: it is compiled anew when it is next called."""
    if dynamo.compiler_loaded():
        torch._dynamo.reset()


def _given(function: Any) -> Any:
    """The function that torch.compile was given, where `function` is what it gave back."""
    return getattr(function, "_torchdynamo_orig_callable", None)


def codes(module: nn.Module) -> Iterator[Any]:
    """The code of a module whose frames dynamo compiles, where module calls stand in it."""
    given = _given(module.forward)
    functions = [module.forward, given]
    for function in functions:
        if function is None:
            continue
        function = getattr(function, "__func__", function)
        while function is not None:  # what a decorator wraps is a frame of its own
            code = getattr(function, "__code__", None)
            if isinstance(code, CodeType) and (module._modules or function is given):
                yield code
            function = getattr(function, "__wrapped__", None)
