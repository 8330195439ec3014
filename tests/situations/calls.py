"""Ways of calling modules: shared, recursive, transient, from threads, through wrappers, with the user's own hooks."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from .harness import Spans
from .models import Net, batch, mlp, situation, squared, step


class Calls(nn.Module):
    """A root whose forward is a function of its children."""

    def __init__(self, body: Callable[..., Any], **children: nn.Module) -> None:
        super().__init__()
        self._body = body
        for name, child in children.items():
            self.add_module(name, child)

    def forward(self, *args: Any) -> Any:
        return self._body(self, *args)


@situation()
def called_several_times(watch: Spans) -> object:
    """One module is called many times in a forward, also without its output being used."""

    def body(self: Any, x: Tensor) -> Tensor:
        self.a(x)
        for _ in range(4):
            x = self.a(x).tanh()
        return x

    return step(watch, Calls(body, a=nn.Linear(4, 4)), batch())


@situation()
def shared_module(watch: Spans) -> object:
    """One module stands at two places of the tree."""
    lin = nn.Linear(4, 4)
    return step(watch, nn.Sequential(lin, nn.Tanh(), nn.Sequential(lin), lin), batch())


@situation()
def shared_weights(watch: Spans) -> object:
    """The head's weight is the embedding's weight."""
    emb, head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
    head.weight = emb.weight
    return step(watch, nn.Sequential(emb, nn.LayerNorm(4), head), torch.tensor([[1, 2, 2], [0, 6, 1]]))


@situation()
def recursion(watch: Spans) -> object:
    """A module that calls itself."""

    def body(self: Any, x: Tensor, depth: int) -> Tensor:
        y = self.a(x).tanh()
        return y if depth == 0 else y + self(y, depth - 1)

    return step(watch, Calls(body, a=nn.Linear(4, 4)), batch(), 5)


@situation()
def transient_modules(watch: Spans) -> object:
    """Modules made inside forward, used once and dropped."""

    def body(self: Any, x: Tensor) -> Tensor:
        y = nn.Softmax(dim=-1)(self.a(x))
        return nn.Sequential(nn.Linear(4, 4), nn.ReLU())(y) + nn.LayerNorm(4)(y)

    model = Calls(body, a=nn.Linear(4, 4))
    return {"outs": [step(watch, model, batch())["out"] for _ in range(20)], "model": model}


@situation()
def module_added_under_watch(watch: Spans) -> object:
    """A layer is added, one replaced and one deleted while the model is watched."""
    model = mlp(4, 4, 3)
    with watch(model):
        first = model(batch())
        model.add_module("extra", nn.Linear(3, 3))
        model[1] = nn.ReLU()
        second = model(batch())
        del model[2]
        model.append(nn.Flatten())
        (squared(first) + squared(second)).backward()
    return {"model": model, "first": first, "second": second}


@situation(sees=False)
def direct_forward_call(watch: Spans) -> object:
    """Children called by .forward(), which runs no hook."""

    def body(self: Any, x: Tensor) -> Tensor:
        return self.b.forward(self.a.forward(x))

    model = Calls(body, a=nn.Linear(4, 4), b=nn.Linear(4, 4))
    with watch(model):
        out = model.forward(batch())
        squared(out).backward()
    return {"model": model, "out": out}


@situation()
def parameter_containers(watch: Spans) -> object:
    """ParameterList, ParameterDict, ModuleDict, buffers that are None, unregistered modules in a list."""

    class Holds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ws = nn.ParameterList(torch.randn(4, 4) for _ in range(2))
            self.ps = nn.ParameterDict({"a": nn.Parameter(torch.randn(4)), "b": nn.Parameter(torch.zeros(()))})
            self.kinds = nn.ModuleDict({"x": nn.Linear(4, 4), "y": nn.Bilinear(4, 4, 4)})
            self.register_buffer("none", None)
            self.register_parameter("missing", None)
            self.hidden = [nn.Linear(4, 4)]

        def forward(self, x: Tensor, kind: str) -> Tensor:
            for w in self.ws:
                x = x @ w
            x = x * self.ps["a"] + self.ps["b"]
            x = self.hidden[0](x)
            return self.kinds["y"](x, x) if kind == "y" else self.kinds[kind](x)

    return step(watch, Holds(), batch(), "y")


@situation()
def user_hooks(watch: Spans) -> object:
    """The user's forward, pre, keyword, always-called, global, tensor and parameter hooks all run once, in order."""
    log: list[str] = []
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    model[0].register_forward_hook(lambda m, a, o: log.append("forward"))
    model[0].register_forward_pre_hook(lambda m, a: log.append("pre"))
    model[2].register_forward_hook(lambda m, a, k, o: log.append("kwargs"), with_kwargs=True)
    model[2].register_forward_hook(lambda m, a, o: log.append("always"), always_call=True)
    model[2].register_forward_hook(lambda m, a, o: log.append("first"), prepend=True)
    model[1].register_forward_hook(lambda m, a, o: o.register_hook(lambda g: log.append("tensor")) and None)
    model[0].weight.register_hook(lambda g: log.append("weight"))
    model[0].weight.register_post_accumulate_grad_hook(lambda p: log.append("accumulated"))
    handle = register_module_forward_hook(lambda m, a, o: log.append(f"global {type(m).__name__}"))
    try:
        made = step(watch, model, batch())
    finally:
        handle.remove()
    return {**made, "log": log}


@situation()
def user_hooks_replace_output(watch: Spans) -> object:
    """The user's hooks replace outputs, inputs and gradients."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    model[0].register_forward_hook(lambda m, a, o: o * 2)
    model[2].register_forward_pre_hook(lambda m, a: (a[0] + 1,))
    model[1].register_forward_hook(lambda m, a, o: o.register_hook(lambda g: g * 3) and o)
    model[0].weight.register_hook(lambda g: g.clamp(-0.01, 0.01))
    return step(watch, model, batch())


@situation()
def user_full_backward_hooks(watch: Spans) -> object:
    """The user has full backward hooks, which wrap inputs and outputs in identity nodes."""
    model = Net()
    model.blocks[0].register_full_backward_hook(lambda m, gi, go: tuple(g * 2 if g is not None else g for g in gi))
    model.head.register_full_backward_pre_hook(lambda m, go: tuple(g * 0.5 for g in go))
    return step(watch, model, batch(grad=True))


@situation()
def hook_added_under_watch(watch: Spans) -> object:
    """The user registers and removes hooks while the model is watched, and the user's stay."""
    model, log = mlp(4, 4, 3), []
    with watch(model):
        handle = model[0].register_forward_hook(lambda m, a, o: log.append("once"))
        model[2].register_forward_hook(lambda m, a, o: log.append("stays"))
        model(batch())
        handle.remove()
        squared(model(batch())).backward()
    model(batch())
    return {"model": model, "log": log}


@situation()
def forward_replaced(watch: Spans) -> object:
    """forward replaced on the instance, as adapters and accelerators do, before and during the watch."""
    model = mlp(4, 4, 3)
    old = model[0].forward
    model[0].forward = functools.wraps(old)(lambda x: old(x) * 2)
    with watch(model):
        first = model(batch())
        older = model[2].forward
        model[2].forward = lambda x: older(x) + 1
        second = model(batch())
        del model[2].forward
        (squared(first) + squared(second)).backward()
    return {"model": model, "first": first, "second": second}


@situation()
def own_call_method(watch: Spans) -> object:
    """A module class with its own __call__ and a __getattr__ that forwards to a child."""

    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def __call__(self, x: Tensor, *more: Any) -> Tensor:
            return super().__call__(x * 2)

        def __getattr__(self, name: str) -> Any:
            try:
                return super().__getattr__(name)
            except AttributeError:
                return getattr(super().__getattr__("inner"), name)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x) @ self.weight

    return step(watch, nn.Sequential(Wrapped(), Wrapped()), batch())
