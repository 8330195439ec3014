"""Small results on their way to the host: what stands on a device is copied once, and read when it has arrived."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Tensor = torch.Tensor
Numbers = npt.NDArray[Any]

_BARE: dict[torch.dtype, torch.dtype] = {torch.bfloat16: torch.float32, torch.bool: torch.uint8}  # numpy has none


class Readback:
    """Takes small tensors by key; `send` starts the copy of all of them, `values` waits for it.

    Tensors of the host are read where they are; with `pack` they go the way of the others, so that this way can be
    tried without a device. What is handed in must be nobody else's to write to, unless it is one number: that is
    copied at once.
    """

    def __init__(self, *, pack: bool = False) -> None:
        self._pack = pack
        self._here: dict[Hashable, Numbers] = {}
        self._waiting: dict[torch.device, list[tuple[Hashable, Tensor]]] = {}
        self._sent: list[tuple[list[tuple[Hashable, Any, int]], Tensor, Any]] = []  # (key, dtype, count) of each part

    def add(self, key: Hashable, tensor: Tensor) -> None:
        """Take the numbers of a tensor, in a dtype that numpy has."""
        tensor = tensor.detach()
        if tensor.is_complex():
            tensor = torch.view_as_real(tensor.resolve_conj())
        tensor = tensor.to(_BARE.get(tensor.dtype, tensor.dtype)).reshape(-1)
        if tensor.is_cpu and not self._pack:
            self._here[key] = tensor.numpy() if tensor.numel() > 1 else np.asarray(tensor.tolist())
            return
        self._waiting.setdefault(tensor.device, []).append((key, tensor.clone() if tensor.numel() == 1 else tensor))

    def peek(self, key: Hashable) -> Numbers | None:
        """What stands under a key, now: this waits for the device."""
        if key in self._here:
            return self._here[key]
        waiting = [tensor for parts in self._waiting.values() for name, tensor in parts if name == key]
        return np.asarray(waiting[0].tolist()) if waiting else None

    def send(self) -> None:
        """Start the copy: one for each device."""
        for device, parts in self._waiting.items():
            packed = torch.cat([tensor.contiguous().view(torch.uint8) for _, tensor in parts])
            kinds = [(key, tensor.new_empty(0, device="cpu").numpy().dtype, tensor.numel()) for key, tensor in parts]
            self._sent.append((kinds, *_copy(packed, device)))
        self._waiting.clear()

    def ready(self) -> bool:
        """True when `values` need not wait."""
        return not self._waiting and all(event is None or event.query() for _, _, event in self._sent)

    def values(self) -> dict[Hashable, Numbers]:
        """All numbers by key; waits for what is still on its way."""
        self.send()
        for kinds, host, event in self._sent:
            if event is not None:
                event.synchronize()
            data, at = host.cpu().numpy().tobytes(), 0
            for key, dtype, count in kinds:
                self._here[key] = np.frombuffer(data, dtype=dtype, count=count, offset=at)
                at += count * dtype.itemsize
        self._sent.clear()
        return self._here


def _copy(packed: Tensor, device: torch.device) -> tuple[Tensor, Any]:
    """The same in memory that a device can write to while the host goes on, and the event of its arrival.

    Where there is no such memory the tensor itself, to be read when it is asked for.
    """
    if device.type == "cpu":
        return packed, None
    try:
        host = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
        host.copy_(packed, non_blocking=True)
        event = torch.Event(device.type)
        event.record(torch.get_device_module(device).current_stream(device))
    except (RuntimeError, AttributeError, NotImplementedError):  # mps has no pinned memory, others no events
        return packed, None
    return host, event
