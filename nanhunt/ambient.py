"""What a step takes from the process around it: random numbers, and the switches of its thread."""

from __future__ import annotations

import copy
import functools
import random
import sys
from collections.abc import Callable
from typing import Any

import torch

Back = Callable[[], Any]  # puts everything back in place and gives the object it belongs to


def generator(value: Any) -> Back | None:
    """A source of random numbers of the user's own."""
    if isinstance(value, torch.Generator):
        state = value.get_state()
        return lambda: value.set_state(state)
    if isinstance(value, random.Random):
        python = value.getstate()
        return lambda: value.setstate(python)
    numpy = sys.modules.get("numpy.random")
    if numpy is None:
        return None
    if isinstance(value, numpy.RandomState):
        legacy = value.get_state()
        return lambda: value.set_state(legacy)
    if isinstance(value, numpy.Generator):
        bits = copy.deepcopy(value.bit_generator.state)

        def back() -> None:
            value.bit_generator.state = bits

        return back
    return None


def random_state(devices: set[torch.device]) -> list[Back]:
    """The generators of torch (every device in use), numpy and python."""
    cpu, python = torch.get_rng_state(), random.getstate()
    backs: list[Back] = [lambda: torch.set_rng_state(cpu), lambda: random.setstate(python)]
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        legacy = numpy.random.get_state()
        backs.append(lambda: numpy.random.set_state(legacy))
    for device in devices:
        if device.type in ("cpu", "meta"):
            continue
        module = torch.get_device_module(device)
        if device.index is None or device.type == "mps":
            backs.append(functools.partial(module.set_rng_state, module.get_rng_state()))
        else:
            backs.append(functools.partial(module.set_rng_state, module.get_rng_state(device), device))
    return backs


def switches() -> Back:
    """Switches of this thread that a step, stopped half-way, may have left turned."""
    grad, dtype, anomaly = torch.is_grad_enabled(), torch.get_default_dtype(), torch.is_anomaly_enabled()
    cache = torch.is_autocast_cache_enabled()
    kinds = {"cpu"}
    if torch.accelerator.is_available():
        accelerator = torch.accelerator.current_accelerator()
        if accelerator is not None:
            kinds.add(accelerator.type)
    casts = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds]

    def back() -> None:
        torch.set_grad_enabled(grad)
        torch.set_default_dtype(dtype)
        torch.set_anomaly_enabled(anomaly, torch.is_anomaly_check_nan_enabled())
        torch.set_autocast_cache_enabled(cache)
        for kind, enabled, lower in casts:
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, lower)
        torch.clear_autocast_cache()  # casts of parameters that hold the first run's graph

    return back
