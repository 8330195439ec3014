"""The parameters of an optimizer by group and dtype, with their names and the numbers they are updated with."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from ..naming import Names

Tensor = torch.Tensor

# An optimizer with one of these words among its settings or its state does something about lost updates itself.
_REMEDIES = ("stochastic", "kahan", "master", "compensat")


@dataclass(frozen=True, slots=True)
class Part:
    """The parameters of one group that have one dtype."""

    optimizer: Optimizer
    group: Mapping[str, Any]
    place: str
    dtype: torch.dtype
    params: tuple[tuple[str, Tensor], ...]

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.params]

    @property
    def kind(self) -> str:
        return type(self.optimizer).__name__

    @property
    def torchs(self) -> bool:
        return type(self.optimizer).__module__.startswith("torch.optim")

    @property
    def fused(self) -> bool:
        return bool(self.group.get("fused"))

    def number(self, key: str) -> float | None:
        """A setting of the group as a number; None when it has no such setting, or a pair of them."""
        value = self.group.get(key)
        if isinstance(value, Tensor) and value.numel() == 1 and value.device.type != "meta":
            return float(value)
        return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None

    @property
    def peak(self) -> float:
        """The largest learning rate that is known of: now, or at the top of a schedule."""
        known = [self.number(key) for key in ("lr", "initial_lr", "max_lr")]
        return max((value for value in known if value is not None and math.isfinite(value)), default=0.0)

    @property
    def adaptive(self) -> bool:
        """True where the update of a weight has about the size of the learning rate, whatever its gradient."""
        return any(word in self.kind.lower() for word in ("adam", "lion", "adagrad"))

    @property
    def decoupled(self) -> bool:
        """True where the weight decay multiplies the weight."""
        word = self.kind.lower()
        return "adamw" in word or "lion" in word or bool(self.group.get("decoupled_weight_decay"))

    @property
    def decay_rate(self) -> float | None:
        """The second moment's memory: beta2 of Adam, alpha of RMSprop."""
        betas = self.group.get("betas")
        if isinstance(betas, (tuple, list)) and len(betas) > 1 and "lion" not in self.kind.lower():
            return float(betas[1])
        return self.number("alpha") if self.kind == "RMSprop" else None

    @property
    def remedied(self) -> bool:
        settings = [*self.group.items(), *vars(self.optimizer).items()]
        keys = [key for key, value in settings if value is not None and value is not False and value != []]
        keys += [key for _, p in self.params[:1] for key in self.optimizer.state.get(p, {})]
        return any(word in str(key).lower() for key in keys for word in _REMEDIES)


def parts(optimizer: Optimizer, names: Names, place: str) -> Iterator[Part]:
    """The parts of an optimizer. A parameter that is not the model's is called by where the optimizer has it."""
    wrapped = vars(optimizer).get("optimizer")  # accelerate's and others' wrappers
    inner = wrapped if isinstance(wrapped, Optimizer) else optimizer
    for i, group in enumerate(inner.param_groups):
        found: dict[torch.dtype, list[tuple[str, Tensor]]] = {}
        for j, p in enumerate(group["params"]):
            if not p.requires_grad or is_lazy(p):
                continue
            owners = names.owners.get(id(p))
            name = owners[0][0] if owners else f"{place}.param_groups[{i}]['params'][{j}]"
            found.setdefault(p.dtype, []).append((name, p))
        at = f"{place}.param_groups[{i}]" if len(inner.param_groups) > 1 else place
        for dtype, params in found.items():
            yield Part(inner, group, at, dtype, tuple(params))
