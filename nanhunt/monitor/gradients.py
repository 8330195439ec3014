"""Gradients in a few numbers: the norm of each in one fused call, and the same few entries of each."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence

import torch

from .. import probe
from .shares import Part

Tensor = torch.Tensor

SAMPLE = 512  # numbers of a tensor


def numbers_of(tensor: Tensor) -> Tensor | None:
    """The numbers of a parameter, a gradient or a moment, each once; this rank's part of a sharded one.

    None where there is nothing to read: a fake or meta tensor, a quantised one, whole numbers.
    """
    if tensor.layout is torch.sparse_coo and not tensor.is_meta:
        tensor = tensor.detach()  # several entries for one place are a sum that is still to be made
        tensor = (tensor if tensor.is_coalesced() else tensor.coalesce())._values()
    return probe.payload(tensor)


def norms(tensors: Sequence[Tensor], order: float = 2.0, *, wide: bool = False) -> list[tuple[list[int], Tensor]]:
    """The norm of each: (which of them, their norms), a pair for each device and dtype; one fused call each.

    Halves are added up in float32, and `wide` adds up in float64. In float32 the squares of numbers above 1e19 are
    infinite: on the host that is seen, and done again in float64; on a device, where it would be a wait, it stays.
    """
    groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for i, tensor in enumerate(tensors):
        groups.setdefault((tensor.device, tensor.dtype), []).append(i)
    made = []
    for (_, dtype), which in groups.items():
        summed = torch.float64 if wide or dtype is torch.float64 else torch.float32
        chosen = [tensors[i] for i in which]
        found = torch.stack(torch._foreach_norm(chosen, order, dtype=summed))
        if order == 2.0 and summed is torch.float32 and found.is_cpu and bool(found.isinf().any()):
            found = torch.stack(torch._foreach_norm(chosen, order, dtype=torch.float64))
        made.append((which, found))
    return made


def pick(tensor: Tensor, like: Tensor) -> Tensor:
    """Up to 512 numbers from all over a tensor, at places that depend on shape and layout of `like` alone.

    They are counted in the order in which `like` lies in memory, so that it need not be copied.
    """
    if not like.is_contiguous():
        strides = like.stride()
        tensor = tensor.permute(sorted(range(len(strides)), key=strides.__getitem__, reverse=True))
    stride = _stride(tensor.numel(), tensor.shape[-1] if tensor.dim() else 1)
    return tensor.reshape(-1)[::stride]


@functools.lru_cache(maxsize=4096)
def _stride(count: int, last: int) -> int:
    """So that at most 512 are taken, and not one column of a matrix."""
    stride = max(1, -(-count // SAMPLE))
    while stride > 1 and math.gcd(stride, last) > 1:
        stride += 1
    return stride


def sample(named: Iterable[tuple[str, Tensor, Tensor]]) -> list[tuple[torch.dtype, list[Part], Tensor]]:
    """A copy of a few numbers of each: (dtype, what they are of, the numbers), a row for each device and dtype.

    Each comes with its name, and the tensor at whose places they are taken (see `pick`).
    """
    groups: dict[tuple[torch.device, torch.dtype], list[tuple[Part, Tensor]]] = {}
    for name, tensor, like in named:
        if tensor.numel():
            few = pick(tensor, like)
            part = Part(name=name, count=few.numel(), numel=tensor.numel())
            groups.setdefault((tensor.device, tensor.dtype), []).append((part, few))
    return [
        (dtype, [part for part, _ in rows], torch.cat([few for _, few in rows])) for (_, dtype), rows in groups.items()
    ]
