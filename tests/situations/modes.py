"""The program's own dispatch and function modes, which see every operator that runs under them."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

from .checkpointing import Checkpointed
from .harness import Spans
from .models import Net, batch, mlp, situation, squared, step


class _Ops(TorchDispatchMode):
    """Keeps the names of the operators it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


class _Functions(TorchFunctionMode):
    """Keeps the names of the functions it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(getattr(func, "__name__", str(func)))
        return func(*args, **(kwargs or {}))


@situation()
def dispatch_mode(watch: Spans) -> object:
    """A dispatch mode of the user's sees the operators of the program and no others."""
    with _Ops() as ops:
        made = step(watch, Net(), batch())
    return [made["loss"], made["model"], ops.seen]


@situation()
def dispatch_mode_inside(watch: Spans) -> object:
    """The same with a mode that opens inside the watch, around the forward only."""
    model = Net()
    with watch(model):
        with _Ops() as ops:
            loss = squared(model(batch()))
        loss.backward()
    return [loss, model, ops.seen]


@situation()
def function_mode(watch: Spans) -> object:
    """A function mode of the user's sees the calls of the program and no others."""
    with _Functions() as functions:
        made = step(watch, mlp(4, 6, 3), batch())
    return [made["loss"], made["model"], functions.seen]


@situation()
def default_device(watch: Spans) -> object:
    """torch.device as a context, which is a function mode over all factories."""
    with torch.device("cpu"):
        return step(watch, Net(), batch())


@situation()
def flop_counter(watch: Spans) -> object:
    """FlopCounterMode counts the same, module by module, which it tells by hooks of its own."""
    model = Net()
    with FlopCounterMode(display=False) as counter:
        made = step(watch, model, batch())
    counts = {name: {str(op): n for op, n in ops.items()} for name, ops in counter.get_flop_counts().items()}
    return [made["loss"], counter.get_total_flops(), counts]


@situation()
def selective_checkpoint_saves_all(watch: Spans) -> object:
    """A selective checkpoint that saves every operator's output and hands them out again in order."""

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE

    contexts = partial(create_selective_checkpoint_contexts, policy)
    return step(watch, Checkpointed(use_reentrant=False, context_fn=contexts).eval(), batch())


@situation()
def profiled(watch: Spans) -> object:
    """A step under the profiler, with shapes, stacks and modules."""
    with torch.profiler.profile(record_shapes=True, with_modules=True):
        return step(watch, Net(), batch())


class _Scaled(TorchFunctionMode):
    """A mode that changes what functions do: relu returns twice the value."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out * 2 if getattr(func, "__name__", "") == "relu" else out


@situation()
def function_mode_that_changes(watch: Spans) -> object:
    """A function mode that changes results."""

    class Relu(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(x)

    with _Scaled():
        return step(watch, nn.Sequential(nn.Linear(4, 4), Relu()), batch())
