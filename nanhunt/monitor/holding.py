"""An update held back: the gradients step aside while the optimizer looks for them."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from .gradients import norms, numbers_of


class Held:
    """Hides the gradients of an optimizer's parameters, so that its step finds nothing to do, and puts them back.

    Every optimizer of torch passes over a parameter without a gradient: neither the weight, nor its weight decay, nor
    its moments, nor its count of steps are touched. LBFGS takes it for a gradient of zero, and is never held.
    """

    def __init__(self) -> None:
        self._grads: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __bool__(self) -> bool:
        return bool(self._grads)

    def hide(self, optimizer: torch.optim.Optimizer) -> None:
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._grads.append((p, p.grad))
                    p.grad = None

    def restore(self) -> None:
        """Put them back where nobody has made others since."""
        grads, self._grads = self._grads, []
        for p, grad in grads:
            if p.grad is None:
                p.grad = grad


def bad_weights(params: Iterable[torch.Tensor]) -> int:
    """How many weights are NaN or infinite. Exact; reads the device."""
    found = [numbers for p in params if (numbers := numbers_of(p)) is not None]
    count = 0
    for which, made in norms(found):
        bad = made.isfinite().logical_not_().tolist()
        # a norm may overflow where no weight has
        count += sum(int(found[i].isfinite().logical_not_().sum()) for i, one in zip(which, bad) if one)
    return count
