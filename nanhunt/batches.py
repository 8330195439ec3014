"""The hash of a batch: shapes, and up to 64 numbers of each tensor that the model was called with."""

from __future__ import annotations

import hashlib
import math
from typing import Any

import torch

from .leaves import arguments

Picked = list[tuple[str, str, torch.Tensor]]  # name, shape, sample

_SAMPLE = 64  # numbers of each tensor that go into the hash


def pick(args: Any, kwargs: Any) -> Picked:
    """A copy of a sample of each tensor in a call's arguments, enough for `digest`."""
    picked = []
    with torch.no_grad():
        for name, tensor in arguments(args, kwargs):
            if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or tensor.is_nested:
                continue
            if tensor.device.type == "meta" or tensor.numel() == 0 or tensor.is_quantized:
                continue
            flat = tensor.detach().reshape(-1) if tensor.is_contiguous() else tensor.detach()[(0,) * (tensor.dim() - 1)]
            step = max(1, flat.numel() // _SAMPLE)
            while step > 1 and math.gcd(step, tensor.shape[-1]) > 1:  # else it sees a few columns, that may be blank
                step += 1
            picked.append((name, str(tuple(tensor.shape)), flat[::step][:_SAMPLE].clone()))
    return picked


def digest(batch: Picked) -> str | None:
    """A short hash of what was picked; None of nothing. Samples on a device are read."""
    if not batch:
        return None
    made = hashlib.blake2b(digest_size=8)
    for name, shape, sample in sorted(batch, key=lambda item: item[0]):
        made.update(f"{name}{shape}".encode())
        numbers = sample.cpu()
        if numbers.dtype.is_complex:
            numbers = torch.view_as_real(numbers.to(torch.complex128))
        made.update(numbers.to(torch.float64).numpy().tobytes())
    return made.hexdigest()
