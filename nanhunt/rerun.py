"""The culprit once more, on its own inputs, with every op watched: what can be had without the user's step."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _pytree as pytree

from .calls import Calls
from .leaves import arguments, leaves
from .lineage import Keep
from .naming import Names
from .oplevel import told
from .ranks import grouped
from .replay import Snapshot
from .tracer import Tracer
from .verdict import Call


class _Reached(BaseException):
    """The re-run has come to the child that was handed the bad value: no need to go on."""


class Shadow:
    """Keeps the module stack of a re-run, and stops it where the first run had stopped."""

    def __init__(self, names: Names, before: Call | None, keep: Keep | None = None) -> None:
        self.calls = Calls(names, sites=False)
        self.tracer = Tracer(names=names, current_call=self.calls.current, keep=keep)
        self.fields: dict[str, Any] | None = None
        self.thread = threading.get_ident()
        self._before = before

    def on_pre(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._before is not None and id(module) == self._before.module_id:
            self.look((args, kwargs))
            if self.fields is not None:
                raise _Reached
        running, again = self.calls.running()
        entry = self.calls.known(module, running)
        if entry is not None:
            self.calls.begin(entry, running, again)

    def on_post(self, module: nn.Module) -> None:
        running, _ = self.calls.running()
        self.calls.end(module, running)

    def look(self, values: Any) -> None:
        """Ask for the birth behind the first bad tensor among `values`."""
        for _, tensor in leaves(values):
            birth = self.tracer.birth_of(tensor)
            if birth is not None:
                self.fields = told(self.tracer, birth, tensor)
                return


_HARMLESS = (
    int,
    float,
    complex,
    str,
    bytes,
    bool,
    type(None),
    torch.dtype,
    torch.device,
    torch.memory_format,
    torch.layout,
)


def possible(module: nn.Module, args: Any, calls: Calls) -> bool:
    """True when running a module again can leave no trace.

    Not with a process group, another thread inside the model, hooks of the user, or an argument (a cache) that
    the module may write into.
    """
    if not all(isinstance(arg, (torch.Tensor, *_HARMLESS)) for arg in pytree.tree_leaves(args)):
        return False
    if len(calls.threads) > 1:
        return False
    if grouped():
        return False
    if isinstance(module, torch.jit.ScriptModule):
        return False
    return not any(m._forward_hooks or m._forward_pre_hooks for m in module.modules())


def rerun(shadow: Shadow, module: nn.Module, call: Call, args: Any, kwargs: Any) -> dict[str, Any] | None:
    """The op-level fields of what `module` makes of its own inputs; None when it makes nothing bad this time.

    Everything is put back: random state, buffers, flags, plain attributes. The inputs are copies, so that a
    module which works in place cannot touch what the user's graph has saved.
    """
    snapshot = Snapshot(module, inside=True)
    random_before = torch.get_rng_state()
    drawn, ran = False, None
    args, kwargs = pytree.tree_map_only(torch.Tensor, _copy, (args, kwargs))
    running, again = shadow.calls.running()
    entry = shadow.calls.known(module, running)
    cached = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)  # else a weight that was cast before is not seen to be cast
    try:
        if entry is not None:
            ran = shadow.calls.begin(entry, running, again)
        # Hooks on saved tensors, a checkpoint's among them, are to see what the program saves and no more.
        with saved_tensors_hooks(lambda t: t, lambda t: t), shadow.tracer:
            for name, tensor in arguments(args, kwargs, module):
                shadow.tracer.note_input(tensor, name)
            out = module.forward(*args, **kwargs)
        shadow.look(out)
    except _Reached:
        pass
    except Exception:
        return None
    finally:
        torch.set_autocast_cache_enabled(cached)
        drawn = not torch.equal(random_before, torch.get_rng_state())
        snapshot.restore()
    fields = shadow.fields
    if fields is None:
        return None
    if ran is not None and fields["module"] is not None:  # a shared module bears the name of the call it stands in
        if fields["module"] == ran.path:
            fields["module"], fields["call"] = call.path, call.nth
        elif fields["module"].startswith(ran.path + "."):
            fields["module"] = call.path + fields["module"][len(ran.path) :]
    if drawn:
        fields["notes"] = {"rerun": "the module drew random numbers: the run that explains it used other draws"}
    return fields


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, nn.Parameter):
        return tensor
    copy = tensor.detach()
    if tensor.requires_grad:
        copy = copy.requires_grad_()  # and a clone of that is no leaf: an in-place op is allowed on it
    return copy.clone()
