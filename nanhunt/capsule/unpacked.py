"""From JSON and blocks of numbers back to values, when they may come from anybody: each size is checked first."""

from __future__ import annotations

import collections
import keyword
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ..errors import UsageError
from ..report.lines import clean
from .cargo import DEEPEST, DTYPES, FORMATS, MOST_ITEMS, MOST_TENSORS

Tensor = torch.Tensor

_MOST_DIMS = 64


class Record(dict[Any, Any]):
    """What a mapping or an object of a class that is not known here held: by key, and by attribute."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class Missing(UsageError):
    """A value that the capsule does not hold; the message says why."""


class Unpacked:
    """Cargo that came from a file, of anybody: every index, size and stride is checked before it is used.

    Args:
        rows, blocks: what `cargo.packed` gave.
        most: bytes that all its tensors together may have, strides of 0 being one way to claim more than is there.
        device: where tensors are put.

    Raises:
        UsageError: for rows that do not fit the blocks.
    """

    def __init__(self, rows: Any, blocks: Mapping[str, Tensor], *, most: int, device: str = "cpu") -> None:
        if not isinstance(rows, list) or len(rows) > MOST_TENSORS * 4:
            raise _odd("its list of tensors is none")
        self._blocks, self._device = blocks, device
        claimed = 0
        for row in rows:
            if not isinstance(row, dict):
                raise _odd("its list of tensors is none")
            if row.get("left_out") is None:
                claimed += _checked(row, blocks)
        if claimed > most:
            raise _odd(f"its tensors claim {claimed / 1e6:.0f} MB, and at most {most / 1e6:.0f} MB are read")
        self._rows = rows
        self._moved: dict[str, Tensor] = {}
        self._made: dict[int, Any] = {}

    def value(self, tree: Any, depth: int = 0) -> Any:
        """The value of a tree; tensors that shared memory share it again.

        Raises:
            Missing: when a part was left out of the capsule.
            UsageError: for a tree that is none.
        """
        if tree is None or isinstance(tree, (bool, int, float, str)):
            return tree
        if not isinstance(tree, dict) or len(tree) != 1 or depth > DEEPEST + 4:
            raise _odd("a value in it is not understood")
        ((word, inner),) = tree.items()
        if word == "left_out":
            raise Missing(f"the capsule does not hold it: {clean(inner)[:300]}")
        try:
            return self._of(word, inner, depth + 1)
        except (TypeError, ValueError, KeyError, IndexError, RuntimeError, OverflowError) as error:
            if isinstance(error, UsageError):
                raise
            raise _odd(f"a value in it is not understood ({type(error).__name__})") from None

    def _of(self, word: str, inner: Any, depth: int) -> Any:
        if word in ("tensor", "array"):
            tensor = self._tensor(inner)
            return tensor.numpy() if word == "array" else tensor
        if word == "float":
            return {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}[inner]
        if word == "complex":
            return complex(self.value(inner[0], depth), self.value(inner[1], depth))
        if word == "dtype":
            return DTYPES[inner]
        if word == "memory_format":
            return FORMATS[inner]
        if word == "device":
            return torch.device(self._device)
        if word == "layout":
            return {"strided": torch.strided}[inner]
        if word == "ellipsis":
            return Ellipsis
        if not isinstance(inner, list) or len(inner) > MOST_ITEMS:
            raise _odd("a value in it is not understood")
        if word == "slice":
            return slice(*(self.value(one, depth) for one in inner))
        if word in ("tuple", "list"):
            items = [self.value(one, depth) for one in inner]
            return tuple(items) if word == "tuple" else items
        if word in ("dict", "record"):
            pairs = {self.value(key, depth): self.value(one, depth) for key, one in inner}
            return pairs if word == "dict" else Record(pairs)
        if word == "named":
            names = [key for key, _ in inner]
            if all(isinstance(n, str) and n.isidentifier() and not keyword.iskeyword(n) for n in names):
                kind = collections.namedtuple("Record", names, rename=True)  # type: ignore[misc]
                return kind(*(self.value(one, depth) for _, one in inner))
        raise _odd("a value in it is not understood")

    def _tensor(self, at: Any) -> Tensor:
        if type(at) is not int or not 0 <= at < len(self._rows):
            raise _odd("it names a tensor that it does not have")
        if at in self._made:
            return self._made[at]  # type: ignore[no-any-return]
        row = self._rows[at]
        if row.get("left_out") is not None:
            raise Missing(f"the capsule does not hold a tensor of it: {clean(row['left_out'])[:300]}")
        name = row["block"]
        if name not in self._moved:
            block = self._blocks[name]
            if block.dtype is not DTYPES[row["dtype"]]:
                block = block.clone().view(DTYPES[row["dtype"]])  # of bytes, which may begin anywhere
            self._moved[name] = block.to(self._device)
        block = self._moved[name]
        strides = row.get("strides")
        t = block.as_strided(row["shape"], strides, row["offset"]) if strides is not None else block.view(row["shape"])
        if row.get("parameter"):
            t = nn.Parameter(t, requires_grad=bool(row.get("grad")))
        elif row.get("grad") and (t.is_floating_point() or t.is_complex()):
            t = t.detach().requires_grad_()
        self._made[at] = t
        return t


def _checked(row: dict[str, Any], blocks: Mapping[str, Tensor]) -> int:
    """The bytes that a row claims, once all it says is known to be true of its block."""
    name, dtype = row.get("block"), row.get("dtype")
    shape: Any = row.get("shape")
    strides: Any = row.get("strides")
    offset: Any = row.get("offset")
    if not isinstance(name, str) or name not in blocks or not isinstance(dtype, str) or dtype not in DTYPES:
        raise _odd("a tensor has no block, or no dtype")
    whole = (
        [*shape, offset, *(strides or ())]
        if isinstance(shape, list) and isinstance(strides, (list, type(None)))
        else [-1]
    )
    if len(whole) > 2 * _MOST_DIMS + 1 or not all(type(one) is int and 0 <= one < 1 << 48 for one in whole):
        raise _odd("the sizes of a tensor are not whole numbers")
    block, kind = blocks[name], DTYPES[dtype]
    room = block.numel() * block.element_size()
    if block.dtype is not kind and (block.dtype is not torch.uint8 or room % kind.itemsize):
        raise _odd("a tensor does not have the dtype of its block")
    room //= kind.itemsize
    count = math.prod(shape)
    if strides is None:
        fits = count == room and offset == 0
    else:
        reach = 1 + sum((size - 1) * step for size, step in zip(shape, strides)) if count else 0
        fits = len(strides) == len(shape) and offset + reach <= room
    if not fits:
        raise _odd("a tensor does not fit into its block")
    return int(count * kind.itemsize)


def _odd(why: str) -> UsageError:
    return UsageError(f"this capsule is damaged: {why}")
