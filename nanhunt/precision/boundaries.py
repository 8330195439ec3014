"""Every call of a model's modules, laid open where it begins and where it ends."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import TracebackType
from typing import Any, Protocol

import torch
from torch import nn

from .. import internals
from ..calls import Calls
from ..leaves import forward_parameters, leaves
from ..naming import Names

Tensor = torch.Tensor
Key = tuple[str, int, int]  # path, n-th call in the step, and which of those that bear this name (a wrapper's is 0)
Tensors = list[tuple[str, Tensor]]


class Listener(Protocol):
    """What is told of each call: its key, that of the call it stands in, and the tensors, which it may write to."""

    def entered(self, key: Key, parent: Key | None, tensors: Tensors) -> None: ...
    def left(self, key: Key, parent: Key | None, tensors: Tensors) -> None: ...


class Boundaries:
    """While entered, tells a listener of every call of a module of `model`, keyword arguments included.

    torch's hooks before a call do not see those, so the forward of each module is wrapped, on the module itself: for
    a model whose attributes somebody puts back. What only recomputes in backward is not told, nor are the children
    where `inside` is False.
    """

    def __init__(self, model: nn.Module, listener: Listener, *, inside: bool = True) -> None:
        self.names = Names(model)
        self.calls = Calls(self.names, sites=False)
        self.failures: list[str] = []  # of ours, in words
        self.transformed = False  # calls inside of torch.func or of a tracer were met, which are not told
        self.types: dict[str, str] = {}
        self._model, self._listener, self._inside = model, listener, inside
        self._keys: dict[int, tuple[Any, Key]] = {}  # id of a call -> the call, so that it lives, and its key
        self._counted: dict[tuple[str, int], int] = {}
        self._wrapped: list[tuple[dict[str, Any], Any]] = []

    def __enter__(self) -> Boundaries:
        for module in list(self._model.modules()) if self._inside else [self._model]:
            if isinstance(module, torch.jit.ScriptModule):
                continue
            own = vars(module)
            self._wrapped.append((own, own.get("forward")))
            own["forward"] = self._around(module, module.forward)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for own, before in reversed(self._wrapped):
            if before is None:
                own.pop("forward", None)
            else:
                own["forward"] = before
        self._wrapped.clear()

    def current(self) -> Key | None:
        """The call whose own code runs in this thread."""
        call = self.calls.current()
        known = self._keys.get(id(call))
        return known[1] if known is not None else None

    def _around(self, module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        parameters = forward_parameters(module)

        @functools.wraps(forward)
        def around(*args: Any, **kwargs: Any) -> Any:
            running, again = self.calls.running()
            if internals.transformed() or internals.recording():
                self.transformed = True
                return forward(*args, **kwargs)
            if again or torch.compiler.is_compiling():
                return forward(*args, **kwargs)
            entry = self.calls.known(module, running)
            if entry is None:
                if running or module is not self._model:
                    return forward(*args, **kwargs)
                raise AssertionError("the model itself is not among its modules")
            parent = self.current()
            call = self.calls.begin(entry, running, False)
            same = self._counted[call.path, call.nth] = self._counted.get((call.path, call.nth), -1) + 1
            key = (call.path, call.nth, same)
            self._keys[id(call)] = call, key
            self.types[call.path] = call.type_name
            self._tell(self._listener.entered, key, parent, [*_inputs(parameters, args, kwargs)])
            try:
                out = forward(*args, **kwargs)
            finally:
                self.calls.end(module, running)
            self._tell(self._listener.left, key, parent, [(f"output{path}", t) for path, t in leaves(out)])
            return out

        return around

    def _tell(self, event: Callable[..., None], key: Key, parent: Key | None, tensors: Tensors) -> None:
        """Modes and subclasses of the user see nothing of what is done; a failure of ours does not end their step."""
        try:
            with internals.unseen_by_modes(), torch.inference_mode(False), torch.no_grad():
                event(key, parent, tensors)
        except Exception as failure:
            said = f"{key[0] or 'the model'}: {type(failure).__name__}: {failure}".split("\n")[0][:200]
            if said not in self.failures:
                self.failures.append(said)


def _inputs(parameters: list[str], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensors:
    """What a call is handed, by the names of its forward. A cache and other objects are not looked into."""
    found: Tensors = []
    for i, arg in enumerate(args):
        name = parameters[i] if i < len(parameters) else f"args[{i}]"
        found += [(f"input {name}{path}", tensor) for path, tensor in leaves(arg)]
    for name, value in kwargs.items():
        found += [(f"input {name}{path}", tensor) for path, tensor in leaves(value)]
    return found
