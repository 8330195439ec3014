"""Any value of a call as JSON and blocks of numbers: what cannot be carried is named, never pickled."""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ..internals import batched
from . import safe_tensors

Tensor = torch.Tensor

DEEPEST = 12
MOST_ITEMS = 10_000  # of one container
MOST_TENSORS = 10_000
_WIDE = 4  # a block is copied as it lies in memory when it is at most so many times what is seen of it
DTYPES = {str(one).removeprefix("torch."): one for one in vars(torch).values() if isinstance(one, torch.dtype)}
FORMATS = {str(one).removeprefix("torch."): one for one in vars(torch).values() if isinstance(one, torch.memory_format)}
_WORDS = {"dtype": torch.dtype, "memory_format": torch.memory_format, "device": torch.device, "layout": torch.layout}


class Room:
    """How many bytes may still be taken, by all cargoes that share it."""

    def __init__(self, most: int) -> None:
        self.most = self.left = most

    def take(self, size: int) -> bool:
        if size > self.left:
            return False
        self.left -= size
        return True


class Cargo:
    """Values as they are now: `trees` in terms of JSON, and copies of their tensors, each on its own device.

    Tensors that share memory share a block, and keep their strides. The room is given back when the cargo goes.

    Attributes:
        trees: by name, what was added.
        rows: for each tensor its block, dtype, shape, strides, offset, device, and whether it wants a gradient.
        left_out: what did not fit, or cannot be carried, in words.
    """

    def __init__(self, room: Room) -> None:
        self.trees: dict[str, Any] = {}
        self.rows: list[dict[str, Any]] = []
        self.blocks: dict[str, Tensor] = {}
        self.left_out: list[str] = []
        self.short = False  # something did not fit
        self._room = room
        self._taken = 0

    def add(self, name: str, value: Any) -> None:
        """Take a value, with all the tensors in it."""
        met: dict[int, tuple[int, Tensor, str]] = {}
        self.trees[name] = _Writer(self, met).tree(value, name, 0)
        groups: dict[Any, list[tuple[int, Tensor, str]]] = {}
        for row, tensor, label in met.values():
            self.rows[row]["left_out"] = why = _uncarried(tensor)
            if why is not None:
                self.left_out.append(f"{label}: {why}")
            else:
                groups.setdefault((tensor.untyped_storage()._cdata, tensor.dtype), []).append((row, tensor, label))
        for views in groups.values():
            self._take(views)

    def __del__(self) -> None:
        self._room.left += self._taken

    def take_off(self, name: str) -> None:
        """Let a value go again that shares no tensor with another."""
        for row in _numbers(self.trees.pop(name, None)):
            block = self.blocks.pop(self.rows[row].pop("block", None), None)
            if block is not None:
                size = block.numel() * block.element_size()
                self._taken -= size
                self._room.left += size

    @property
    def size(self) -> int:
        """Bytes of all its numbers."""
        return self._taken

    def complete(self, *names: str) -> bool:
        """True when nothing of these trees was left out."""
        return all(name in self.trees and whole(self.rows, self.trees[name]) for name in names)

    def _take(self, views: list[tuple[int, Tensor, str]]) -> None:
        """The block of memory under tensors that share it; where they see little of it, each apart."""
        if len(views) > 1 or not views[0][1].is_contiguous():
            low = min(int(t.storage_offset()) for _, t, _ in views)
            high = max(int(t.storage_offset()) + _reach(t) for _, t, _ in views)
            seen = sum(min(t.numel(), _reach(t)) for _, t, _ in views)
            if high - low <= _WIDE * seen:
                block = views[0][1].detach().as_strided((high - low,), (1,), low)
                self._put(
                    block, [(row, t, int(t.storage_offset()) - low, t.stride()) for row, t, _ in views], views[0][2]
                )
                return
        for row, t, label in views:
            whole = t.detach().resolve_conj().resolve_neg()
            self._put(whole, [(row, t, 0, None)], label)

    def _put(self, block: Tensor, rows: list[tuple[int, Tensor, int, tuple[int, ...] | None]], label: str) -> None:
        size = block.numel() * block.element_size()
        if not self._room.take(size):
            self.short = True
            why = f"{size / 1e6:.1f} MB, over max_mb ({self._room.most / 1e6:g} MB)"
            shape = ", ".join(map(str, block.shape))
            self.left_out.append(f"{label}: {str(block.dtype).removeprefix('torch.')}[{shape}], {why}")
            for row, *_ in rows:
                self.rows[row]["left_out"] = why
            return
        self._taken += size
        # Contiguous in the usual order, a copy in any case, and without a wait for the device.
        with torch.no_grad():
            copy = torch.empty(block.shape, dtype=block.dtype, device=block.device).copy_(block)
        name = label if label not in self.blocks else f"{label} ({len(self.blocks)})"
        self.blocks[name] = copy
        for row, t, offset, strides in rows:
            entry = self.rows[row]
            entry["block"], entry["shape"], entry["offset"] = name, list(t.shape), offset
            entry["strides"] = list(strides) if strides is not None else None


def packed(cargoes: Mapping[str, Cargo]) -> tuple[dict[str, list[dict[str, Any]]], dict[str, Tensor]]:
    """The rows of each cargo, and the blocks of all as the file takes them: equal ones once, odd dtypes as bytes."""
    blocks: dict[str, Tensor] = {}
    known: dict[Any, str] = {}
    rows: dict[str, list[dict[str, Any]]] = {}
    for title, cargo in cargoes.items():
        names: dict[str, str] = {}
        for name, block in cargo.blocks.items():
            there = block.cpu()
            raw = there.reshape(-1).view(torch.uint8) if there.numel() else torch.empty(0, dtype=torch.uint8)
            what = block.dtype, tuple(block.shape), hashlib.blake2b(raw.numpy().data).digest()
            names[name] = known.setdefault(what, f"{title}.{name}")
            if names[name] == f"{title}.{name}":
                blocks[names[name]] = there if safe_tensors.code_of(block.dtype) is not None else raw
        rows[title] = [{**row, "block": names[row["block"]]} if "block" in row else row for row in cargo.rows]
    return rows, blocks


def whole(rows: list[dict[str, Any]], tree: Any) -> bool:
    """True when nothing of a tree was left out."""
    return not any(_gaps(rows, tree))


def _gaps(rows: list[dict[str, Any]], tree: Any) -> Iterator[bool]:
    if isinstance(tree, dict):
        if "left_out" in tree:
            yield True
        elif tree.keys() <= {"tensor", "array"}:
            yield from (rows[at]["left_out"] is not None for at in tree.values())
        else:
            for part in tree.values():
                yield from _gaps(rows, part)
    elif isinstance(tree, list):
        for part in tree:
            yield from _gaps(rows, part)


def _numbers(tree: Any) -> Iterator[int]:
    """The tensors of a tree, by number."""
    parts = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ()
    if isinstance(tree, dict) and tree.keys() <= {"tensor", "array"}:
        yield from tree.values()
    else:
        for part in parts:
            yield from _numbers(part)


def _reach(t: Tensor) -> int:
    """How far a tensor goes in memory, in elements."""
    return 1 + sum((size - 1) * step for size, step in zip(t.shape, t.stride())) if t.numel() else 0


def _uncarried(t: Tensor) -> str | None:
    """Why a tensor cannot be taken along."""
    if type(t) not in (Tensor, nn.Parameter):
        return f"a {type(t).__name__} is no plain tensor"
    if t.layout is not torch.strided or t.is_nested:
        return "nested tensors are not carried" if t.is_nested else f"{t.layout} tensors are not carried"
    if t.is_quantized or t.device.type == "meta" or batched(t):
        return "it has no plain numbers"
    return None


class _Writer:
    def __init__(self, cargo: Cargo, met: dict[int, tuple[int, Tensor, str]]) -> None:
        self._cargo, self._met = cargo, met

    def tree(self, value: Any, label: str, depth: int) -> Any:
        if value is None or isinstance(value, (bool, str)) or type(value) is int:
            return value
        if isinstance(value, Tensor):
            return self._tensor(value, label)
        if isinstance(value, float):
            value = float(value)
            return value if math.isfinite(value) else {"float": str(value)}
        if isinstance(value, int):
            return int(value)
        if isinstance(value, complex):
            return {"complex": [self.tree(value.real, label, depth), self.tree(value.imag, label, depth)]}
        for word, kind in _WORDS.items():
            if isinstance(value, kind):
                return {word: str(value).removeprefix("torch.")}
        if isinstance(value, slice):
            return {"slice": [self.tree(one, label, depth) for one in (value.start, value.stop, value.step)]}
        if value is Ellipsis:
            return {"ellipsis": True}
        if hasattr(value, "__array__") and type(value).__module__ == "numpy":
            return self._array(value, label)
        return self._container(value, label, depth + 1)

    def _tensor(self, value: Tensor, label: str) -> dict[str, int]:
        known = self._met.get(id(value))
        if known is None:
            if len(self._met) >= MOST_TENSORS:
                return self._lost(label, "too many tensors")  # type: ignore[return-value]
            row = {
                "dtype": str(value.dtype).removeprefix("torch."),
                "device": str(value.device),
                "grad": bool(value.requires_grad),
                "parameter": isinstance(value, nn.Parameter),
            }
            self._cargo.rows.append(row)
            known = self._met[id(value)] = len(self._cargo.rows) - 1, value, label
        return {"tensor": known[0]}

    def _array(self, value: Any, label: str) -> Any:
        try:
            return {"array": self._tensor(torch.as_tensor(value), label)["tensor"]}
        except (TypeError, RuntimeError, ValueError):
            return self._lost(label, f"an array of {value.dtype}")

    def _container(self, value: Any, label: str, depth: int) -> Any:
        kind = type(value)
        if depth > DEEPEST:
            return self._lost(label, "nested too deeply")
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return {"named": self._pairs(zip(value._fields, value), label, depth, "{}.{}")}
        if isinstance(value, (tuple, list, collections.deque)):
            if len(value) > MOST_ITEMS:
                return self._lost(label, f"{len(value)} items")
            word = "tuple" if isinstance(value, tuple) else "list"
            return {word: [self.tree(one, f"{label}[{i}]", depth) for i, one in enumerate(value)]}
        if isinstance(value, Mapping):
            if len(value) > MOST_ITEMS:
                return self._lost(label, f"{len(value)} items")
            plain = kind in (dict, collections.OrderedDict)
            return {"dict" if plain else "record": self._pairs(value.items(), label, depth, "{}[{!r}]")}
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            named = ((one.name, getattr(value, one.name, None)) for one in dataclasses.fields(value))
            return {"record": self._pairs(named, label, depth, "{}.{}")}
        return self._lost(label, f"a {kind.__module__}.{kind.__qualname__} is not carried")

    def _pairs(self, items: Any, label: str, depth: int, form: str) -> list[list[Any]]:
        return [[self.tree(k, label, depth), self.tree(v, form.format(label, k), depth)] for k, v in items]

    def _lost(self, label: str, why: str) -> dict[str, str]:
        self._cargo.left_out.append(f"{label}: {why}")
        return {"left_out": why}
