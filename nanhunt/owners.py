"""Whose tensor is it: parameter, buffer, gradient, optimizer state, batch, or memory that nobody wrote."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import CodeType
from typing import TYPE_CHECKING, NamedTuple

import torch

from .internals import Storage
from .marks import body, extent
from .naming import type_name

if TYPE_CHECKING:
    from .naming import Names

_MOST_NOTES = 4096


class Owner(NamedTuple):
    what: str  # "parameter", "buffer", "gradient", "state" (of an optimizer), "input", "uninitialised", "collective"
    name: str | None
    module: str | None = None
    module_type: str | None = None


class Owners:
    """Looks tensors up by the memory they stand in, so that views and detached copies are known too."""

    def __init__(self, names: Names) -> None:
        self._names = names
        self._of: dict[int, list[tuple[int, int, Owner]]] = {}
        self._built, self._cost = 0.0, 0.0
        self._notes: dict[int, tuple[Storage, Owner]] = {}

    def of(self, t: torch.Tensor | None, optimizer: torch.optim.Optimizer | None = None) -> Owner | None:
        dense = body(t) if t is not None else None
        if dense is None:
            return None
        self._refresh()
        key = dense.untyped_storage()._cdata
        start, stop = extent(dense)
        note = self._notes.get(key)
        for low, high, owner in self._of.get(key, ()):
            if low < stop and start < high:
                if owner.what == "gradient" and note is not None:  # its own name, and where it came from
                    return owner._replace(what=note[1].what)
                return owner
        if optimizer is not None:
            found = self._state(optimizer, key, start, stop)
            if found is not None:
                return found
        return note[1] if note is not None else None

    def forward_of(self, path: str) -> CodeType | None:
        """The code of a module's forward."""
        forward = getattr(type(self._names.by_path.get(path)), "forward", None)
        return getattr(forward, "__code__", None)

    def only_one_with(self, written: Callable[[CodeType], bool]) -> tuple[str, str] | None:
        """Path and type of the one module whose forward fits; None where there is none, or several."""
        fits: dict[type, bool] = {}
        found: list[tuple[str, str]] = []
        for path, module in self._names.by_path.items():
            kind = type(module)
            if kind not in fits:
                code = self.forward_of(path)
                fits[kind] = code is not None and written(code)
            if fits[kind]:
                found.append((path, type_name(module)))
        return found[0] if len(found) == 1 else None

    def name_of(self, t: torch.Tensor, optimizer: torch.optim.Optimizer | None = None) -> str | None:
        owner = self.of(t, optimizer)
        return owner.name if owner is not None else None

    def is_gradient(self, t: torch.Tensor) -> bool:
        dense = body(t)
        if dense is None:
            return False
        key = dense.untyped_storage()._cdata
        for p in self._names.model.parameters():
            grad = body(p.grad) if p.grad is not None else None
            if grad is not None and grad.untyped_storage()._cdata == key:
                return True
        return False

    def note_input(self, t: torch.Tensor, name: str) -> None:
        dense = body(t)
        if dense is not None:
            self._note(dense, Owner("input", name))

    def note_unknown(self, t: torch.Tensor, what: str) -> None:
        """What stands in `t` now was made by nobody here: `empty`, or another process."""
        dense = body(t)
        if dense is not None and dense.is_floating_point():
            self._note(dense, Owner(what, None))

    def written(self, t: torch.Tensor) -> None:
        """`t` was written; memory that it fills is not unknown any more."""
        if not self._notes:
            return
        dense = body(t)
        if dense is None:
            return
        storage = dense.untyped_storage()
        note = self._notes.get(storage._cdata)
        if note is not None and note[1].what != "input" and dense.numel() * dense.element_size() >= storage.nbytes():
            del self._notes[storage._cdata]

    def _note(self, dense: torch.Tensor, owner: Owner) -> None:
        storage = dense.untyped_storage()
        self._notes[storage._cdata] = (Storage(storage), owner)
        if len(self._notes) > _MOST_NOTES:
            alive = {key: note for key, note in self._notes.items() if not note[0].gone()}
            self._notes = alive if len(alive) < _MOST_NOTES else {}

    def _state(self, optimizer: torch.optim.Optimizer, key: int, start: int, stop: int) -> Owner | None:
        for p, state in optimizer.state.items():
            for name, value in state.items() if isinstance(state, dict) else ():
                dense = body(value) if isinstance(value, torch.Tensor) else None
                if dense is not None and dense.untyped_storage()._cdata == key:
                    low, high = extent(dense)
                    if low < stop and start < high:
                        whose = self.of(p) if isinstance(p, torch.Tensor) else None
                        return Owner("state", f"{name} of {whose.name}" if whose is not None else str(name))
        return None

    def _refresh(self) -> None:
        # A step with thousands of births must not read a large model thousands of times.
        now = time.perf_counter()
        if self._of and now - self._built < 50 * self._cost:
            return
        found: dict[int, list[tuple[int, int, Owner]]] = {}

        def add(t: torch.Tensor | None, owner: Owner) -> None:
            dense = body(t) if t is not None and not torch.nn.parameter.is_lazy(t) else None
            if dense is not None and dense.device.type != "meta":
                found.setdefault(dense.untyped_storage()._cdata, []).append((*extent(dense), owner))

        names = self._names
        types = {path: type_name(module) for path, module in names.by_path.items()}
        for plain, p in names.model.named_parameters():
            pairs = names.owners.get(id(p))
            name, path = pairs[0] if pairs else (plain, plain.rpartition(".")[0])
            add(p, Owner("parameter", name, path, types.get(path)))
            add(p.grad, Owner("gradient", f"grad of {name}", path, types.get(path)))
        for name, (module, key) in names.buffers.items():
            path = name.rpartition(".")[0]
            add(module._buffers.get(key), Owner("buffer", name, path, types.get(path)))
        self._of = found
        self._built = time.perf_counter()
        self._cost = self._built - now
