"""A module that fails when it is told to, and a count of the hooks that stand."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.modules.module as nn_module
import torch.optim.optimizer as optim_module
from torch import Tensor, nn


def standing(model: nn.Module) -> int:
    """Hooks and wrappers that stand in torch, on the modules of `model` and on its parameters."""
    places = [getattr(nn_module, name) for name in vars(nn_module) if name.startswith("_global_") and "hooks" in name]
    places += [getattr(optim_module, name) for name in vars(optim_module) if name.startswith("_global_optimizer")]
    for p in model.parameters():
        places += [p._backward_hooks or (), getattr(p, "_post_accumulate_grad_hooks", None) or ()]
    for module in model.modules():
        places += [module._forward_hooks, module._forward_pre_hooks, module._backward_hooks]
    wrapped = [torch.autograd._engine_run_backward, torch.amp.GradScaler.step]
    return sum(map(len, places)) + sum(hasattr(function, "__wrapped__") for function in wrapped)


class Fault(nn.Module):
    """Hands on what it gets, and once, at the trainer's step `at`, divides by zero or takes the root of zero.

    `step` is asked for the trainer's step; `calls` says of each call: the step, whether in training, and how many
    hooks stood.
    """

    def __init__(self, at: int | None, phase: str, *, evaluation: bool = False) -> None:
        super().__init__()
        self.at, self.phase, self.evaluation = at, phase, evaluation
        self.step: Callable[[], int] = lambda: -1
        self.model: Any = None
        self.calls: list[tuple[int, bool, int]] = []

    def attached(self, model: nn.Module, step: Callable[[], int]) -> None:
        self.step, self.model = step, functools.partial(_given, model)

    def forward(self, x: Tensor) -> Tensor:
        step = self.step()
        self.calls.append((step, self.training, standing(self.model()) if self.model is not None else -1))
        if step != self.at or self.training is self.evaluation:
            return x
        return x / (x - x) if self.phase == "forward" else x + (x - x).sqrt()


def _given(value: nn.Module) -> nn.Module:
    return value
