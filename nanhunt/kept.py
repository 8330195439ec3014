"""Any object to what it holds, and back into that same object."""

from __future__ import annotations

import copy
import sys
import weakref
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .ambient import Back, generator

Tensor = torch.Tensor

PLAIN = (int, float, complex, str, bytes, bool, type(None))
_SAMPLE = 8  # numbers of a tensor that tell whether it was written through `.data`
_MOST_ITEMS = 1000  # of a container that is walked; a longer one is put back as it was, its items left alone
_DEEPEST = 6


class Held:
    """One tensor: where its numbers lie, and, once `take` was called, which numbers."""

    __slots__ = ("alias", "number", "odd", "tensor", "version", "wants_grad")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.wants_grad = tensor.requires_grad
        self.number: Tensor | None = None
        # `.data` shares the memory and keeps it, and writing through it leaves the user's version count alone:
        # a restored tensor holds again what that count stood for.
        self.alias = tensor.data
        # Sparse, nested and wrapped tensors have no single block of memory that could have been swapped.
        self.odd = tensor.layout is not torch.strided or tensor.is_nested or is_traceable_wrapper_subclass(tensor)
        self.version = version_of(tensor)

    def take(self) -> Held:
        self.number = _block(self.alias).clone() if _overlaps(self.alias) else self.alias.clone()
        return self

    def moved(self) -> bool:
        """True when the tensor has been given other memory since: `p.data = ...`, `resize_`."""
        a, b = self.tensor, self.alias
        if self.odd:
            return False
        return (a.data_ptr(), a.shape, a.stride(), a.dtype) != (b.data_ptr(), b.shape, b.stride(), b.dtype)

    def put_back(self) -> Tensor:
        tensor = self.tensor
        if self.moved():
            tensor.data = self.alias
            self.alias = tensor.data
        if self.number is not None:
            target = _block(self.alias) if _overlaps(self.alias) else _writable(tensor, self.alias)
            target.copy_(self.number)
        if tensor.requires_grad != self.wants_grad and tensor.is_leaf:
            tensor.requires_grad_(self.wants_grad)
        return tensor


class Gradient:
    """The `.grad` of one leaf: whether there was one, which object, and its numbers."""

    __slots__ = ("leaf", "number", "of")

    def __init__(self, leaf: Tensor) -> None:
        self.leaf = leaf
        grad = leaf.grad
        # Held weakly: most steps drop the old gradient, and keeping it alive beside its copy would cost memory.
        self.of = weakref.ref(grad) if grad is not None else None
        self.number = None if grad is None else grad.detach().clone()

    def put_back(self) -> None:
        if self.of is None or self.number is None:
            self.leaf.grad = None
            return
        grad = self.of()
        if grad is None:
            self.leaf.grad = self.number.clone()
            return
        with torch.no_grad():
            # In place, so that a view into a bucket (DDP) stays one. A gradient with a history was never written to.
            if not grad.requires_grad:
                _writable(grad, grad.data).copy_(self.number)
        if self.leaf.grad is not grad:
            self.leaf.grad = grad


class Keeper:
    """Takes objects and remembers each once, however many names it has."""

    def __init__(self) -> None:
        self.copied: Counter[str] = Counter()  # tensors copied, by role
        self.notes: list[str] = []  # what could not be taken
        self.left_alone: set[int] = set()  # tensors that somebody else takes care of
        self._memo: dict[int, tuple[Any, Back]] = {}

    def keep(self, value: Any, role: str, depth: int = 0) -> Back:
        """Take `value` as it is now; the answer puts it back."""
        if isinstance(value, PLAIN):
            return lambda: value
        known = self._memo.get(id(value))
        if known is not None:
            return known[1]
        back: Back
        if isinstance(value, Tensor):
            back = self._tensor(value, role)
        else:
            self._memo[id(value)] = (value, lambda: value)  # a cycle ends here
            back = self._other(value, role, depth)
        self._memo[id(value)] = (value, back)
        return back

    def keep_vars(self, owner: Any, role: str, *, without: frozenset[str] = frozenset()) -> Back:
        """The attributes of a plain object: which there are, and what the containers among them hold."""
        names: dict[str, Any] = vars(owner)
        shallow = dict(names)
        inner = [self.keep(v, role, 1) for k, v in shallow.items() if not isinstance(v, PLAIN) and k not in without]

        def back() -> Any:
            names.clear()
            names.update(shallow)
            for one in inner:
                one()
            return owner

        return back

    def _tensor(self, tensor: Tensor, role: str) -> Back:
        if id(tensor) in self.left_alone or tensor.grad_fn is not None:
            return lambda: tensor
        if is_lazy(tensor) or tensor.device.type == "meta":
            return lambda: tensor
        try:
            held = Held(tensor).take()
        except (RuntimeError, NotImplementedError, TypeError) as failure:
            self.notes.append(f"a {role} of type {type(tensor).__name__} could not be copied ({_first(failure)})")
            return lambda: tensor
        self.copied[role] += 1
        if not tensor.requires_grad:
            return held.put_back
        gradient = self.gradient(tensor)

        def back() -> Tensor:
            gradient()
            return held.put_back()

        return back

    def gradient(self, leaf: Tensor) -> Back:
        taken = Gradient(leaf)
        self.copied["gradient"] += taken.of is not None
        return taken.put_back

    def _other(self, value: Any, role: str, depth: int) -> Back:
        if depth > _DEEPEST:
            return lambda: value
        if isinstance(value, dict):
            return self._dict(value, role, depth)
        if isinstance(value, (list, deque)):
            return self._list(value, role, depth)
        if isinstance(value, set):
            members = set(value)

            def back() -> Any:
                value.clear()
                value.update(members)
                return value

            return back
        if isinstance(value, tuple):
            return self._several([self.keep(item, role, depth + 1) for item in value[:_MOST_ITEMS]], value)
        source = generator(value)
        if source is not None:
            return source
        if isinstance(value, (torch.optim.lr_scheduler.LRScheduler, torch.amp.GradScaler)):
            return self.keep_vars(value, role, without=frozenset({"optimizer"}))
        if isinstance(value, Mapping) and type(getattr(value, "data", None)) is dict:  # a UserDict, as tokenizers give
            inside: dict[Any, Any] = getattr(value, "data")  # noqa: B009  (Mapping has no such attribute)
            return self._several([self.keep(inside, role, depth + 1)], value)
        return lambda: value

    def _dict(self, value: dict[Any, Any], role: str, depth: int) -> Back:
        shallow = dict(value)
        inner: list[Back] = []
        if len(shallow) <= self._limit(role):
            inner = [self.keep(v, role, depth + 1) for v in shallow.values() if not isinstance(v, PLAIN)]

        def back() -> Any:
            value.clear()
            value.update(shallow)
            for one in inner:
                one()
            return value

        return back

    def _list(self, value: list[Any] | deque[Any], role: str, depth: int) -> Back:
        shallow = list(value)
        inner: list[Back] = []
        if len(shallow) <= self._limit(role):
            inner = [self.keep(v, role, depth + 1) for v in shallow if not isinstance(v, PLAIN)]

        def back() -> Any:
            value.clear()
            value.extend(shallow)
            for one in inner:
                one()
            return value

        return back

    def _limit(self, role: str) -> int:
        return sys.maxsize if role == "optimizer state" else _MOST_ITEMS

    def _several(self, inner: list[Back], value: Any) -> Back:
        def back() -> Any:
            for one in inner:
                one()
            return value

        return back

    def by_state(self, value: Any) -> Back | None:
        """An object that can tell and take its state: `state_dict`, or a generator of random numbers."""
        source = generator(value)
        if source is not None:
            return source
        if not (hasattr(value, "state_dict") and hasattr(value, "load_state_dict")):
            return None
        state = copy.deepcopy(value.state_dict())

        def back() -> Any:
            value.load_state_dict(copy.deepcopy(state))
            return value

        return back


def version_of(tensor: Tensor) -> int:
    try:
        return tensor._version
    except RuntimeError:  # inference tensors do not count versions
        return -1


def _first(failure: BaseException) -> str:
    return str(failure).split("\n")[0][:100]


def _writable(tensor: Tensor, alias: Tensor) -> Tensor:
    """Through what to write: a copy into the alias of a sparse tensor gives new indices to the alias alone."""
    return alias if tensor.layout is torch.strided else tensor


def _overlaps(tensor: Tensor) -> bool:
    """True where several elements are one number in memory (an expanded buffer): torch refuses to write to it."""
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
        return False
    reach = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride()))
    return tensor.numel() > reach


def _block(tensor: Tensor) -> Tensor:
    """The whole memory of a tensor, byte by byte."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


class Samples:
    """A few numbers of every parameter. Old code writes through `.data`, which no version count shows."""

    def __init__(self, named: Iterable[tuple[str, Held]]) -> None:
        self._groups: dict[tuple[torch.device, torch.dtype], list[tuple[str, Tensor]]] = {}
        for name, held in named:
            alias = held.alias
            if held.odd or alias.numel() == 0 or alias.is_quantized or alias.device.type == "meta":
                continue
            self._groups.setdefault((alias.device, alias.dtype), []).append((name, alias))
        self._before = {key: self._read(rows) for key, rows in self._groups.items()}

    def _read(self, rows: list[tuple[str, Tensor]]) -> Tensor:
        return torch.cat([_sample(alias) for _, alias in rows]).view(torch.uint8)

    def written(self) -> set[str]:
        """The names of those whose sample has changed."""
        names: set[str] = set()
        for key, rows in self._groups.items():
            before, now = self._before[key], self._read(rows)
            if not torch.equal(before, now):
                lengths = [min(_SAMPLE, alias.numel()) * alias.element_size() for _, alias in rows]
                pairs = zip(torch.split(before, lengths), torch.split(now, lengths), rows)
                names.update(name for a, b, (name, _) in pairs if not torch.equal(a, b))
        return names


def _sample(alias: Tensor) -> Tensor:
    """Numbers spread over the memory of a tensor, in one view."""
    count = min(_SAMPLE, alias.numel())
    return torch.as_strided(alias, (count,), (alias.numel() // count,))
