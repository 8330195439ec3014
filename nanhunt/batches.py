"""The hash of a batch: the same on every device, in any memory layout, integer dtype and order of keys."""

from __future__ import annotations

import functools
import hashlib
import math
from typing import Any

import torch

from .leaves import arguments

Tensor = torch.Tensor
Picked = list[tuple[str, str, Tensor]]  # name, shape, sample

SAMPLE = 64  # numbers of each tensor that go into the hash


def pick(args: Any, kwargs: Any) -> Picked:
    """Up to 64 numbers of each tensor in a call's arguments, spread evenly over its elements, copied.

    Nothing is read from a device: a sample stays where its tensor is until somebody wants the hash.
    """
    picked: Picked = []
    with torch.no_grad():
        for name, tensor in arguments(args, kwargs):
            if type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.is_nested:
                continue
            if tensor.device.type == "meta" or tensor.numel() == 0 or tensor.is_quantized:
                continue
            picked.append((name, str(tuple(tensor.shape)), _spread(tensor.detach())))
    return picked


def _spread(tensor: Tensor) -> Tensor:
    step = max(1, tensor.numel() // SAMPLE)
    while step > 1 and math.gcd(step, tensor.shape[-1]) > 1:  # else it sees a few columns, that may be blank
        step += 1
    if tensor.is_contiguous():
        return tensor.view(-1)[::step][:SAMPLE].clone()
    if tensor.is_cuda and torch.cuda.is_current_stream_capturing():  # what is made now belongs to that graph
        return tensor.reshape(-1)[::step][:SAMPLE].clone()
    # The same elements, wherever they lie: channels_last on one machine need not be so on another.
    count = min(SAMPLE, -(-tensor.numel() // step))
    return tensor[_coordinates(tuple(tensor.shape), step, count, tensor.device)]


@functools.lru_cache(maxsize=64)
def _coordinates(shape: tuple[int, ...], step: int, count: int, device: torch.device) -> tuple[Tensor, ...]:
    with torch.inference_mode(False):  # kept for later calls, which need not be in that mode
        flat = torch.arange(count, device=device) * step
        found = []
        for size in reversed(shape):
            found.append(flat % size)
            flat = flat // size
    return tuple(reversed(found))


def digest(batch: Picked) -> str | None:
    """16 hexadecimal digits of what was picked; None of nothing. Samples on a device are read.

    The numbers are compared as float64: a token is the same in int32 and int64, and so is one NaN and another.
    """
    if not batch:
        return None
    made = hashlib.blake2b(digest_size=8)
    for name, shape, sample in sorted(batch, key=lambda item: item[0]):
        made.update(f"{name}{shape}".encode(errors="backslashreplace"))
        numbers = sample.cpu()
        if numbers.dtype.is_complex:
            numbers = torch.view_as_real(numbers.resolve_conj().to(torch.complex128))
        wide = numbers.to(torch.float64) + 0.0  # -0.0 becomes 0.0
        made.update(torch.where(wide.isnan(), torch.nan, wide).numpy().tobytes())
    return made.hexdigest()
