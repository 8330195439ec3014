"""The only file that registers hooks; all of them come off.

Everything torch offers for looking on is used here and nowhere else: the global module hooks (they
keep fast paths and results that per-module hooks change), tensor hooks, post-accumulate hooks, the
optimizers' step hooks. What torch has no hook for is wrapped while a watch or a monitor is on, and put back
after: where a backward begins and ends, the GradScaler's methods, the clipping of gradients by their norm, the
recursion limit; among several ranks, what moves tensors between them (`wires`).
"""

from __future__ import annotations

import functools
import itertools
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch.nn.modules import module as _nn_module
from torch.nn.parameter import is_lazy
from torch.nn.utils import clip_grad as _clip_grad
from torch.optim import optimizer as _optimizer
from torch.utils.hooks import RemovableHandle

from . import compiled, dynamo, frames, traces, wires

_HOOK_DICTS = hasattr(torch._C._FunctionBase, "_register_hook_dict")
keys = itertools.count(-1, -1)  # for hooks on tensors: torch numbers its handles from 0 up
RAISED: Any = object()  # stands for the output of a module whose forward raised


class CallListener(Protocol):
    """What is told of module calls. Nothing it returns is used; only the deliberate stop may be raised."""

    def on_pre(self, module: torch.nn.Module, args: tuple[Any, ...]) -> None: ...
    def on_post(self, module: torch.nn.Module, args: Any, kwargs: Any, out: Any = ...) -> None: ...


class Listener(Protocol):
    """What is told of the rest of a step."""

    def on_backward_begin(self, roots: tuple[Any, ...], create_graph: bool) -> None: ...
    def on_backward_end(self, given: tuple[Any, ...], grads: Any, ok: bool) -> None: ...
    def on_optimizer(self, optimizer: torch.optim.Optimizer, after: bool, closure: bool) -> None: ...
    def on_scaler(self, scaler: Any, what: str, before: Any, after: Any) -> None: ...


class ClipListener(Listener, Protocol):
    """One that is also told when gradients are about to be clipped: by `clip_grad_norm_`, whoever calls it."""

    def on_clip(self, parameters: list[torch.Tensor], max_norm: float, total_norm: Any) -> None: ...


class ModuleCalls:
    """One listener among those that see every module call of the process. `remove` can be called twice."""

    def __init__(self, listener: CallListener) -> None:
        self._told = dynamo.without_compiler(listener.on_pre), dynamo.without_compiler(listener.on_post)
        _open_gate(self._told)

    def remove(self) -> None:
        _leave_gate(self._told)


class Attachment:
    """All that one watch has hung into torch. `remove` takes it off again; it can be called twice."""

    def __init__(self, listener: Listener, calls: CallListener) -> None:
        self._params: dict[int, tuple[torch.Tensor, RemovableHandle]] = {}
        self._leaves: list[RemovableHandle] = []
        self.calls = ModuleCalls(calls)
        _wrap(listener)
        self._listener: Listener | None = listener
        self._collectives: wires.CollectiveListener | None = None

    def collectives(self, listener: wires.CollectiveListener) -> None:
        """Have collectives told, from now on."""
        if self._collectives is None and self._listener is not None:
            self._collectives = listener
            wires.wrap(listener)

    def parameters(
        self,
        named: Iterable[tuple[str, str, torch.Tensor]],
        make: Callable[[str, torch.Tensor], Callable[[torch.Tensor], None]],
    ) -> None:
        """Hook the gradient of every parameter once; those that were replaced since are hooked anew."""
        for name, _owner, p in named:
            if id(p) in self._params or not p.requires_grad or is_lazy(p):
                continue
            if not p.is_leaf:
                continue
            self._params[id(p)] = (p, p.register_post_accumulate_grad_hook(make(name, p)))  # type: ignore[no-untyped-call]

    def instead(self, p: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> None:
        """Put another hook in the place of ours: those of others keep theirs, before or behind it."""
        handle = self._params[id(p)][1]
        hung = handle.hooks_dict_ref()
        if hung is not None and handle.id in hung:
            hung[handle.id] = hook

    def gradient(
        self, tensor: torch.Tensor, node: Any, others: Any, key: int, hook: Callable[[torch.Tensor], None]
    ) -> None:
        """Hook the gradient of a tensor, which `node` has made, under a `key` that torch never gives.

        What `Tensor.register_hook` does, at a third of its price: no handle is made where none is needed. A leaf
        outlives the step, so its handle is kept for removal.
        """
        if others is None and node is not None and _HOOK_DICTS:
            tensor._backward_hooks = hung = OrderedDict()
            hung[key] = hook
            node._register_hook_dict(tensor)
            return
        handle = tensor.register_hook(hook)  # type: ignore[no-untyped-call]
        if node is None:
            self._leaves.append(handle)

    def drop_leaves(self) -> None:
        for handle in self._leaves:
            handle.remove()
        self._leaves.clear()

    def remove(self) -> None:
        if self._listener is None:
            return
        _unwrap(self._listener)
        self._listener = None
        if self._collectives is not None:
            wires.unwrap(self._collectives)
            self._collectives = None
        self.drop_leaves()
        self.calls.remove()
        for p, handle in self._params.values():
            handle.remove()
            if not getattr(p, "_post_accumulate_grad_hooks", True):
                setattr(p, "_post_accumulate_grad_hooks", None)  # noqa: B010  (as it was found; torch's stub is wrong)
        self._params.clear()


class Following:
    """All that one monitor has hung into torch: the listener's events, and the calls of one module.

    `called(args, kwargs)` is told before each call of `root`; that costs every other module a look into a dictionary.
    None for a model that is compiled, where such a hook would become part of the graph. `remove` can be called twice.
    """

    def __init__(self, listener: ClipListener, root: torch.nn.Module | None, called: Callable[..., None]) -> None:
        self._listener: ClipListener | None = listener
        self._root, self._called = (None if root is None else id(root)), called
        self._outputs: RemovableHandle | None = None
        _wrap(listener)
        if self._root is not None:
            _follow_root(self._root, called)

    def outputs(self, kinds: tuple[type, ...], told: Callable[[torch.nn.Module, Any], None]) -> None:
        """Have what modules of these kinds give out told, until `no_outputs`."""
        self.no_outputs()

        def post(module: torch.nn.Module, args: Any, out: Any) -> None:
            if isinstance(module, kinds) and not torch.compiler.is_compiling():
                _tell(told, module, out)

        dynamo.run_plainly(post)
        self._outputs = _nn_module.register_module_forward_hook(post)

    def no_outputs(self) -> None:
        if self._outputs is not None:
            self._outputs.remove()
            self._outputs = None

    def remove(self) -> None:
        if self._listener is None:
            return
        _unwrap(self._listener)
        self._listener = None
        self.no_outputs()
        if self._root is not None:
            _leave_root(self._root, self._called)


# --- the calls of single modules ------------------------------------------------------------------

_roots: dict[int, tuple[Callable[..., None], ...]] = {}
_root_gate: list[RemovableHandle] = []


def _root_pre(module: torch.nn.Module, args: tuple[Any, ...]) -> None:
    if torch.compiler.is_compiling():
        return
    for called in _roots.get(id(module), ()):
        _tell(called, args, frames.call_kwargs())


def _follow_root(root: int, called: Callable[..., None]) -> None:
    with _lock:
        _roots[root] = (*_roots.get(root, ()), called)
        if not _root_gate:
            _root_gate.append(_nn_module.register_module_forward_pre_hook(_root_pre))


def _leave_root(root: int, called: Callable[..., None]) -> None:
    with _lock:
        left = tuple(one for one in _roots.pop(root, ()) if one is not called)
        if left:
            _roots[root] = left
        if not _roots:
            for handle in _root_gate:
                handle.remove()
            _root_gate.clear()


# --- the global module hooks --------------------------------------------------------------------

# One pair for all: compiled code is valid for the hooks it was traced with, and would be compiled anew for each watch
# that brings its own. Once it was traced into code that lives, the pair stays, with `traces.live` off.

_Told = tuple[Callable[..., None], Callable[..., None]]
_lock = threading.RLock()
_gate: list[RemovableHandle] = []
_told: tuple[_Told, ...] = ()
_befores: tuple[Callable[..., None], ...] = ()
_afters: tuple[Callable[..., None], ...] = ()


def _pre(module: torch.nn.Module, args: tuple[Any, ...]) -> None:
    if torch.compiler.is_compiling():
        if torch.compiler.is_dynamo_compiling():  # else torch.export, which runs this
            compiled.enter(module, args)
        return
    for before in _befores:
        before(module, args)
    if not _befores:  # the compiled code may have gone that kept the hooks here
        _close_gate()


# On an exception torch calls it without kwargs, as hook(module, args, None).
def _post(module: torch.nn.Module, args: Any, kwargs: Any, out: Any = RAISED) -> None:
    if torch.compiler.is_compiling():
        if torch.compiler.is_dynamo_compiling() and out is not RAISED:
            compiled.leave(module, args, kwargs, out)
        return
    for after in _afters:
        after(module, args, kwargs, out)


@dynamo.without_compiler
def _tell(event: Callable[..., None], *args: Any) -> None:
    if not torch.compiler.is_compiling():
        event(*args)


for _function in (_pre, _post, _root_pre, _tell):
    dynamo.run_plainly(_function)


def _open_gate(told: _Told) -> None:
    global _told, _befores, _afters
    with _lock:
        _told = (*_told, told)
        _befores, _afters = tuple(one[0] for one in _told), tuple(one[1] for one in _told)
        if not _gate:
            _gate.append(_nn_module.register_module_forward_pre_hook(_pre))
            _gate.append(_nn_module.register_module_forward_hook(_post, with_kwargs=True, always_call=True))


def _leave_gate(told: _Told) -> None:
    global _told, _befores, _afters
    with _lock:
        _told = tuple(one for one in _told if one is not told)
        _befores, _afters = tuple(one[0] for one in _told), tuple(one[1] for one in _told)
        _close_gate()


@dynamo.without_compiler
def _close_gate() -> None:
    with _lock:
        if _told or traces.standing():
            return
        for handle in _gate:
            handle.remove()
            # torch forgets this entry when such a hook is removed (2.13).
            getattr(_nn_module, "_global_forward_hooks_with_kwargs", {}).pop(handle.id, None)
        _gate.clear()
        traces.forget()


# --- what torch has no hook for -----------------------------------------------------------------

_listeners: tuple[Listener, ...] = ()
_originals: list[tuple[Any, str, Any]] = []
_limit = _raised = 0
_stepping: list[RemovableHandle] = []
_SCALER_METHODS = ("scale", "unscale_", "step", "update")


def _wrap(listener: Listener) -> None:
    global _listeners, _limit, _raised
    with _lock:
        _listeners = (*_listeners, listener)
        if len(_listeners) > 1:
            return
        # Each watched level costs one more Python frame: a model near the limit must still fit.
        _limit = sys.getrecursionlimit()
        _raised = _limit + _limit // 3
        sys.setrecursionlimit(_raised)
        for register, after in (
            (_optimizer.register_optimizer_step_pre_hook, False),
            (_optimizer.register_optimizer_step_post_hook, True),
        ):
            _stepping.append(register(functools.partial(_step, after)))
        _replace(torch.autograd, "_engine_run_backward", _watched_backward)
        for place, name in ((_clip_grad, "_clip_grads_with_norm_"), (torch.nn.utils, "clip_grads_with_norm_")):
            _replace(place, name, _watched_clip)
        scalers = [torch.amp.GradScaler]
        while scalers:
            cls = scalers.pop()
            scalers.extend(cls.__subclasses__())
            for name in _SCALER_METHODS:
                if name in vars(cls):
                    _replace(cls, name, functools.partial(_watched_scaler, name))


def _unwrap(listener: Listener) -> None:
    global _listeners
    with _lock:
        _listeners = tuple(one for one in _listeners if one is not listener)
        if _listeners:
            return
        for place, name, original in reversed(_originals):
            setattr(place, name, original)
        _originals.clear()
        for handle in _stepping:
            handle.remove()
        _stepping.clear()
        if sys.getrecursionlimit() == _raised:  # else somebody wants another one: Inductor does
            sys.setrecursionlimit(_limit)


def _replace(place: Any, name: str, make: Callable[[Any], Any]) -> None:
    original = vars(place).get(name) if isinstance(place, type) else getattr(place, name, None)
    if original is None:  # a private function of another torch: the loss is then not looked at
        return
    _originals.append((place, name, original))
    setattr(place, name, make(original))


def _step(after: bool, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """One pair of hooks for all listeners: one that comes or goes while they run does not change what torch walks."""
    if torch.compiler.is_compiling():
        return
    if frames.steps_of(optimizer) < 2:  # the outermost
        closure = (len(args) > 1 and args[1] is not None) or kwargs.get("closure") is not None
        for listener in _listeners:
            _tell(listener.on_optimizer, optimizer, after, closure)


dynamo.run_plainly(_step)


def _watched_clip(clip: Any) -> Any:
    @functools.wraps(clip)
    def watched(parameters: Any, max_norm: Any, total_norm: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return clip(parameters, max_norm, total_norm, *args, **kwargs)
        if not isinstance(parameters, torch.Tensor):
            parameters = list(parameters)
        for listener in _listeners:
            told = getattr(listener, "on_clip", None)
            if told is not None:
                params = [parameters] if isinstance(parameters, torch.Tensor) else parameters
                _tell(told, params, max_norm, total_norm)
        return clip(parameters, max_norm, total_norm, *args, **kwargs)

    return dynamo.run_plainly(watched, inside=False)


def _watched_backward(run: Any) -> Any:
    @functools.wraps(run)
    def watched(t_outputs: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or dynamo.symbolic(t_outputs):
            return run(t_outputs, *args, **kwargs)
        # (outputs, grad_outputs, keep_graph, create_graph, inputs, ...): as torch.autograd calls the engine
        create_graph = len(args) > 2 and args[2] is True
        listeners = _listeners
        for listener in listeners:
            _tell(listener.on_backward_begin, t_outputs, create_graph)
        given = args[3] if len(args) > 3 and isinstance(args[3], tuple) else ()
        ok = False
        grads = None
        try:
            grads = run(t_outputs, *args, **kwargs)
            ok = True
            return grads
        finally:
            # Newest first: when several see the same fault, the inner watch is the one that raises.
            for listener in reversed(listeners):
                _tell(listener.on_backward_end, given, grads, ok)

    return dynamo.run_plainly(watched, inside=False)


def _watched_scaler(name: str, method: Any) -> Any:
    @functools.wraps(method)
    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        listeners = _listeners
        given = args[0] if args else None
        for listener in listeners:
            _tell(listener.on_scaler, self, name + ":before", given, None)
        out = method(self, *args, **kwargs)
        for listener in reversed(listeners):
            _tell(listener.on_scaler, self, name, given, out)
        return out

    return watched
