"""What a module is handed and what it returns, tensor by tensor."""

from __future__ import annotations

import inspect
from collections import UserDict, deque
from collections.abc import Iterator
from itertools import islice
from types import FunctionType, MappingProxyType, ModuleType
from typing import Any

import torch

Tensor = torch.Tensor

_MOST_LEAVES = 1000
_MOST_VISITS = 10_000
_DEEPEST = 50
_DEEP = 3
# What no walk looks into; a module's tensors are its parameters, which are watched as such.
_OPAQUE = (str, bytes, bytearray, int, float, complex, type, ModuleType, FunctionType, torch.nn.Module)


def leaves(obj: Any, *, deep: bool = False) -> Iterator[tuple[str, Tensor]]:
    """The tensors inside `obj`, each with the suffix that reaches it: "", "[1]", ".logits", "['x']".

    Looks into tuples, lists, mappings, named tuples, torch's return types and dataclasses; `deep` also into
    the attributes of other objects, three levels down. Iterators are not touched, cycles are cut, and so is
    everything after 1000 tensors. Never raises.
    """
    if issubclass(type(obj), Tensor):  # isinstance would ask the object itself for its class
        yield "", obj
    elif type(obj) is tuple and len(obj) <= 8 and _all_tensors(obj):  # what most modules hand on
        for i, item in enumerate(obj):
            yield f"[{i}]", item
    else:
        yield from _Walk(deep).leaves(obj, "", 0)


def _all_tensors(items: tuple[Any, ...]) -> bool:
    for item in items:  # noqa: SIM110 - a generator costs more than the whole loop
        if not issubclass(type(item), Tensor):
            return False
    return True


class _Walk:
    """One walk through an object: what it may still spend, and the containers it stands in."""

    __slots__ = ("above", "deep", "tensors", "visits")

    def __init__(self, deep: bool) -> None:
        self.deep = deep
        self.tensors = _MOST_LEAVES
        self.visits = _MOST_VISITS
        self.above: set[int] = set()

    def leaves(self, obj: Any, path: str, depth: int) -> Iterator[tuple[str, Tensor]]:
        """The tensors below `obj`; `depth` counts the levels of plain attributes above it."""
        try:
            parts = _parts(obj, self.deep and depth < _DEEP)
        except Exception:  # a lazy container of the user's may do anything when it is read
            return
        self.above.add(id(obj))
        for suffix, part in parts:
            self.visits -= 1
            if self.visits < 0 or self.tensors <= 0:
                break
            kind = type(part)
            if issubclass(kind, Tensor):
                self.tensors -= 1
                yield path + suffix, part
            elif part is None or issubclass(kind, _OPAQUE) or id(part) in self.above or len(self.above) > _DEEPEST:
                continue
            else:
                # `batch._store._mapping['x']` is `batch['x']` to the one who wrote it
                hidden = suffix.startswith("._")
                level = depth + (suffix.startswith(".") and not issubclass(type(obj), tuple))
                yield from self.leaves(part, path if hidden else path + suffix, level)
        self.above.discard(id(obj))


def _parts(obj: Any, deep: bool) -> list[tuple[str, Any]]:
    """What stands inside `obj`, each part with the suffix that reaches it."""
    kind = type(obj)
    if kind is tuple or kind is list or kind is deque:
        return [(f"[{i}]", part) for i, part in enumerate(islice(obj, _MOST_VISITS))]
    if kind is dict:
        return [(f"[{key!r}]", part) for key, part in islice(obj.items(), _MOST_VISITS)]
    if hasattr(kind, "__dataclass_fields__"):
        return [(f".{name}", getattr(obj, name, None)) for name in kind.__dataclass_fields__]
    if issubclass(kind, tuple):
        # named tuples have _fields; those of C (torch.return_types) have __match_args__ and n_fields
        names: tuple[str, ...] = getattr(kind, "_fields", ())
        if not names and hasattr(kind, "n_fields"):
            names = getattr(kind, "__match_args__", ())
        if len(names) == len(obj):
            return [(f".{name}", part) for name, part in zip(names, obj, strict=True)]
    if issubclass(kind, (tuple, list, deque)):
        return [(f"[{i}]", part) for i, part in enumerate(islice(obj, _MOST_VISITS))]
    if issubclass(kind, dict):
        return [(f"[{key!r}]", part) for key, part in islice(dict.items(obj), _MOST_VISITS)]
    if issubclass(kind, MappingProxyType):
        return [(f"[{key!r}]", part) for key, part in islice(obj.items(), _MOST_VISITS)]
    if issubclass(kind, UserDict):  # another mapping may compute what it gives when it is read
        return [(f"[{key!r}]", part) for key, part in islice(obj.data.items(), _MOST_VISITS)]
    if deep and hasattr(obj, "__dict__"):
        return [(f".{name}", part) for name, part in islice(vars(obj).items(), _MOST_VISITS)]
    return []


def arguments(args: Any, kwargs: Any, module: Any = None) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a call, each as the module's `forward` calls it: `x`, `batch['x']`, `args[0]`."""
    names = forward_parameters(module)
    for i, arg in enumerate(args):
        for path, tensor in leaves(arg, deep=True):
            yield (names[i] if i < len(names) else f"args[{i}]") + path, tensor
    for key, value in kwargs.items():
        for path, tensor in leaves(value, deep=True):
            yield key + path, tensor


def forward_parameters(module: Any) -> list[str]:
    """The names of the positional parameters of a module's `forward`."""
    try:
        signature = inspect.signature(module.forward)
    except (TypeError, ValueError, AttributeError):
        return []
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [p.name for p in signature.parameters.values() if p.kind in kinds]
