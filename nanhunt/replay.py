"""What a step consumes: take it, put it back."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_pre_hook

from .ambient import Back, random_state, switches
from .errors import UsageError
from .kept import PLAIN, Held, Keeper, Samples, version_of
from .leaves import leaves

Tensor = torch.Tensor

_SMALL = 1 << 20  # bytes of parameters that are copied at once
_MOST_BYTES = 1 << 30  # of the batch that is copied
# Attributes every module has; the containers among them are handled by name or never written by a forward.
_STANDARD = frozenset(vars(nn.Module()))
_UNTOUCHED = (*PLAIN, nn.Module)
# Wrappers whose attributes are the state of a running protocol, not of a step.
_PROTOCOLS = ("torch.nn.parallel.", "torch.distributed.", "deepspeed.", "fairscale.")
_SCALER_METHODS = ("scale", "unscale_", "step", "update")


def _nothing() -> None:
    return None


class Snapshot:
    """The state before a step. While it is entered, it also takes what it finds in use.

    Random numbers, buffers, gradients, flags and attributes are copied at once. Parameters, and the state of
    an optimizer, are copied when an optimizer step is about to run: until then only code that updates by hand
    writes to them, and `gaps` tells which it was. A very small model is copied at once, against such code.

    Attributes:
        copied: how many tensors were copied, by role.
        found: what was met in use without having been handed over, by class name.
        notes: what could not be taken, in words.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        scaler: Any = None,
        restore: Iterable[Any] = (),
        *,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
        inside: bool = False,
    ) -> None:
        self._keeper = Keeper()
        self.found: list[str] = []
        self._backs: list[Back] = []
        self._seen: dict[int, Any] = {}
        self._stepped: set[int] = set()
        self._params: dict[int, tuple[str, Held]] = {}
        self._unready: list[str] = []
        self._gaps: list[str] = []
        self._undo: list[Callable[[], None]] = []
        # Inside a step its switches stay as they are, and so do the casts that autocast has cached: with others
        # in their place gradients would be summed in another order.
        self._switches = switches() if not inside else _nothing
        self._large: list[Held] = []
        self._budget = _MOST_BYTES
        self._samples: Samples | None = None  # until all is taken
        self._modules(model, "")
        for thing in restore:
            self._handed(thing)
        if optimizer is not None:
            self._optimizer(optimizer)
            self._owned(optimizer, late=False)
        if scaler is not None:
            self._attributes(scaler)
        for value in (*args, *(kwargs or {}).values()):
            self._argument(value)
        loose = [(name, held) for name, held in self._params.values() if held.number is None]
        if sum(_size(held.tensor) for _, held in loose) <= _SMALL:  # a copy costs no more than the look at a sample
            for _, held in loose:
                self._take(held)
            loose = []
        self._samples = Samples(loose)
        devices = {held.tensor.device for _, held in self._params.values()}
        self._random = random_state(devices | {t.device for _, t in leaves((args, kwargs or {}))})

    @property
    def copied(self) -> Counter[str]:
        return self._keeper.copied

    @property
    def notes(self) -> list[str]:
        return self._keeper.notes

    # --- what stands from the start ---------------------------------------------------------------

    def _modules(self, model: nn.Module, prefix: str) -> None:
        names = [(prefix + name, p) for name, p in model.named_parameters()]
        keeper = self._keeper
        for name, p in names:
            if id(p) in self._params:
                continue
            keeper.left_alone.add(id(p))
            if is_lazy(p):
                self._unready.append(name)
                continue
            self._params[id(p)] = (name, Held(p))
            self._backs.append(keeper.gradient(p))
        for module in model.modules():
            if id(module) in self._seen:
                continue
            self._seen[id(module)] = module
            self._backs.append(self._module(module))

    def _module(self, module: nn.Module) -> Back:
        keeper = self._keeper
        script = isinstance(module, torch.jit.ScriptModule)
        buffers = module.buffers(recurse=False) if script else module._buffers.values()
        inner = [keeper.keep(b, "buffer") for b in buffers if b is not None]
        whole = not script and not type(module).__module__.startswith(_PROTOCOLS)
        own = vars(module) if whole else {}
        # Parameters, buffers, children and hooks by name: a step that is stopped does not get to remove its hooks.
        # Most of these are empty, and a thousand new dicts would wake the garbage collector.
        known = [value for name, value in own.items() if name in _STANDARD and isinstance(value, dict)]
        tables, empty = [(value, dict(value)) for value in known if value], [value for value in known if not value]
        training, shallow = module.training, dict(own)
        if whole and len(shallow) > len(_STANDARD):
            inner += [
                keeper.keep(value, "attribute", 1)
                for name, value in shallow.items()
                if name not in _STANDARD and not isinstance(value, _UNTOUCHED)
            ]

        def back() -> None:
            if whole:
                own.clear()
                own.update(shallow)
            for table in empty:
                table.clear()
            for table, before in tables:
                if table.keys() != before.keys() or any(table[k] is not v for k, v in before.items()):
                    table.clear()
                    table.update(before)
            if module.training != training:
                module.training = training
            for one in inner:
                one()

        return back

    def _handed(self, thing: Any) -> None:
        if isinstance(thing, nn.Module):
            self._modules(thing, f"{type(thing).__name__}.")
            for p in thing.parameters():  # nobody says when they are written: a copy at once
                self._take_parameter(p)
        elif isinstance(thing, Optimizer):
            self._optimizer(thing)
            self._about_to_step(thing)
        elif isinstance(thing, (LRScheduler, torch.amp.GradScaler)):
            self._attributes(thing)
        elif isinstance(thing, Tensor):
            self._backs.append(self._keeper.keep(thing, "restore"))
        else:
            back = self._keeper.by_state(thing)
            if back is None:
                raise UsageError(
                    f"restore holds a {type(thing).__name__}, which has no state_dict() and load_state_dict(): give "
                    "objects that have both, modules, optimizers, tensors or random generators"
                )
            self._backs.append(back)

    def _argument(self, value: Any) -> None:
        """The step may write to its batch, or take labels out of it: tensors, and containers that hold some."""
        if isinstance(value, nn.Module):
            if id(value) not in self._seen:
                self._modules(value, f"{type(value).__name__}.")
        elif isinstance(value, Optimizer):
            self._optimizer(value)
        elif isinstance(value, (LRScheduler, torch.amp.GradScaler)):
            self._attributes(value)
        elif not isinstance(value, PLAIN):
            tensors = [tensor for _, tensor in leaves(value, deep=True)]
            for tensor in tensors:
                self._budget -= _size(tensor)
                if self._budget < 0 and id(tensor) not in self._keeper.left_alone:
                    self._keeper.left_alone.add(id(tensor))
                    self._large.append(Held(tensor))
                self._backs.append(self._keeper.keep(tensor, "argument"))
            if tensors:
                self._backs.append(self._keeper.keep(value, "argument"))

    def _attributes(self, owner: LRScheduler | torch.amp.GradScaler) -> None:
        if id(owner) in self._seen:
            return
        self._seen[id(owner)] = owner
        if isinstance(owner, LRScheduler):
            self._optimizer(owner.optimizer)
        if hasattr(owner, "__dict__"):
            self._backs.append(self._keeper.keep_vars(owner, "state", without=frozenset({"optimizer"})))

    # --- optimizers -------------------------------------------------------------------------------

    def _optimizer(self, optimizer: Optimizer) -> None:
        """What can change without a step: learning rates and the optimizer's own attributes."""
        if id(optimizer) in self._seen:
            return
        self._seen[id(optimizer)] = optimizer
        groups = vars(optimizer).get("param_groups")
        for group in groups or ():
            self._keeper.left_alone.update(id(p) for p in group["params"])
        own = vars(optimizer)
        shallow = dict(own)
        inner = [self._keeper.keep(groups, "optimizer state")]
        apart = ("param_groups", "state", "defaults")
        inner += [
            self._keeper.keep(value, "optimizer state", 1)
            for name, value in shallow.items()
            if name not in apart and "hooks" not in name and not isinstance(value, PLAIN)
        ]

        def back() -> None:
            own.clear()
            own.update(shallow)
            for one in inner:
                one()

        self._backs.append(back)
        wrapped = own.get("optimizer")  # the wrappers of accelerate and others
        if isinstance(wrapped, Optimizer):
            self._optimizer(wrapped)

    def _owned(self, optimizer: Optimizer, *, late: bool) -> None:
        """Parameters that the optimizer moves and the model does not have."""
        foreign = 0
        for i, group in enumerate(optimizer.param_groups):
            for j, p in enumerate(group["params"]):
                if id(p) in self._params or is_lazy(p):
                    continue
                foreign += 1
                self._keeper.left_alone.add(id(p))
                self._params[id(p)] = (f"param_groups[{i}]['params'][{j}]", Held(p))
                if not late:
                    self._backs.append(self._keeper.gradient(p))
        if late and foreign:
            self.notes.append(
                f"{foreign} parameters that {type(optimizer).__name__} moves are not the model's: pass the module "
                "they belong to in restore="
            )

    def _about_to_step(self, optimizer: Optimizer) -> None:
        """The last moment before parameters and the optimizer's state are written."""
        if id(optimizer) not in self._seen:
            self.found.append(type(optimizer).__name__)
            self._optimizer(optimizer)
        if id(optimizer) in self._stepped:
            return
        self._stepped.add(id(optimizer))
        self._backs.append(self._keeper.keep(vars(optimizer).get("state"), "optimizer state"))
        self._gaps = self.gaps()  # from here on a written parameter is one that has a copy
        self._owned(optimizer, late=True)
        moved = sum(_size(held.tensor) for _, held in self._params.values() if held.wants_grad)
        frozen = sum(_size(held.tensor) for _, held in self._params.values() if not held.wants_grad)
        mine = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for key, (_, held) in self._params.items():
            # A frozen copy of the network is often moved by hand after the step (BYOL, DQN); a frozen
            # backbone, many times larger than what is trained, is not.
            if key in mine or held.wants_grad or frozen <= moved:
                self._take(held)

    def _take_parameter(self, p: Tensor) -> None:
        if id(p) in self._params:
            self._take(self._params[id(p)][1])

    def _take(self, held: Held) -> None:
        if held.number is None:
            held.take()
            self.copied["parameter"] += 1

    # --- while the step runs ----------------------------------------------------------------------

    def __enter__(self) -> Snapshot:
        handle = register_optimizer_step_pre_hook(lambda o, args, kwargs: self._guarded(self._about_to_step, o))
        self._undo.append(handle.remove)
        for cls in _family(LRScheduler):
            self._listen(cls, "step")
        for cls in _family(torch.amp.GradScaler):
            for name in _SCALER_METHODS:
                self._listen(cls, name)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._undo:
            self._undo.pop()()

    def _listen(self, cls: type, name: str) -> None:
        """torch has no hook here: wrap the method, look before it runs, and put it back at the end."""
        method = vars(cls).get(name)
        if method is None:
            return

        @functools.wraps(method)
        def wrapper(owner: Any, *args: Any, **kwargs: Any) -> Any:
            self._guarded(self._met, owner)
            return method(owner, *args, **kwargs)

        def undo() -> None:
            if vars(cls).get(name) is wrapper:  # else somebody has put his own there since
                setattr(cls, name, method)

        setattr(cls, name, wrapper)
        self._undo.append(undo)

    def _met(self, owner: Any) -> None:
        if id(owner) not in self._seen:
            self.found.append(type(owner).__name__)
            self._attributes(owner)

    def _guarded(self, look: Callable[[Any], None], owner: Any) -> None:
        try:
            look(owner)
        except Exception as failure:  # the user's step must not notice; without a copy there is no way back
            self._unready.append(f"{type(owner).__name__} ({type(failure).__name__}: {failure})")

    # --- afterwards -------------------------------------------------------------------------------

    def gaps(self) -> list[str]:
        """What cannot be put back: parameters written by hand before any copy, lazy ones, failed copies."""
        loose = [(name, held) for name, held in self._params.values() if held.number is None]
        loose += [("a large tensor of the batch", held) for held in self._large]
        written = {name: None for name, held in loose if version_of(held.tensor) != held.version}
        touched = self._samples.written() if loose and self._samples is not None else set()
        written.update((name, None) for name, held in loose if name in touched)
        return list(dict.fromkeys((*self._unready, *self._gaps, *written)))

    def restore(self) -> None:
        """Put everything back, in place and bit for bit; `gaps` tells what cannot be."""
        with torch.inference_mode(False), torch.no_grad():
            for _, held in self._params.values():
                held.put_back()
            for back in reversed(self._backs):
                back()
        for back in self._random:
            back()
        self._switches()


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _family(cls: type) -> Iterator[type]:
    yield cls
    sub: type
    for sub in cls.__subclasses__():
        yield from _family(sub)
