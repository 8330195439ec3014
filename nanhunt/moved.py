"""What an optimizer moves: its parameters by name, and which of them are looked at together."""

from __future__ import annotations

import torch

from . import probe
from .naming import Names

_SMALL = 1 << 13  # numbers: below, a call costs more than the copy into one tensor
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_WIDE = (torch.float32, torch.bfloat16, torch.float64)


class Moved:
    """Read once, and used until the optimizer's groups or the model's names change.

    `pairs` has each parameter, but for those of modules that were left out, with its name; `small` has those that are
    looked at together, `large` the others; `wide` says that none is of a dtype with a short range.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, names: Names) -> None:
        self._ids = _ids(optimizer)
        self._owners = names.owners
        self.pairs: list[tuple[torch.Tensor, str]] = []
        for i, group in enumerate(optimizer.param_groups):
            for j, p in enumerate(group["params"]):
                owners = names.owners.get(id(p))
                if not owners:
                    self.pairs.append((p, f"param_groups[{i}]['params'][{j}]"))
                elif names.wanted(owners[0][1]):
                    self.pairs.append((p, owners[0][0]))
        self.small = [p for p, _ in self.pairs if is_small(p)]
        self.large = [p for p, _ in self.pairs if not is_small(p)]
        self.wide = all(p.dtype in _WIDE for p, _ in self.pairs)

    def fits(self, optimizer: torch.optim.Optimizer, names: Names) -> bool:
        return self._owners is names.owners and self._ids == _ids(optimizer)


def _ids(optimizer: torch.optim.Optimizer) -> list[int]:
    return [id(p) for group in optimizer.param_groups for p in group["params"]]


def is_small(tensor: torch.Tensor) -> bool:
    """True for a tensor that is looked at together with others of its kind."""
    return (
        tensor.is_cpu
        and type(tensor) in _PLAIN
        and 0 < tensor.numel() <= _SMALL
        and tensor.dtype in probe.DIRECT
        and tensor.layout is torch.strided
    )
