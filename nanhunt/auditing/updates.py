"""Rules for updates in half precision: whether they change the weights at all.

From mlnomadpy/flaxchat#6, and from Micikevicius et al., Mixed Precision Training (2018), section 3.1: a float32 master
copy, because an update below half a step of the format is rounded away.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch.optim import Optimizer

from ..naming import Names
from ..numerics import fmt
from ..remarks import RISK, Sheet, common
from .grain import HALF, form, half_steps, name_of, sample, unmoved
from .groups import Part, parts

Tensor = torch.Tensor

_FUSED = ("Adam", "AdamW", "SGD", "Adagrad")  # torch's optimizers that have one kernel for the whole update
_LOST = 0.5  # of the weights of a part
_MASTERS = "keep the weights in float32 and let torch.autocast compute in half, or use an optimizer with float32 copies"


@dataclass(slots=True)
class Moved:
    """How many numbers of each parameter real updates could have moved, and how many stayed as they were."""

    counts: dict[str, tuple[int, int]] = field(default_factory=dict)
    _before: dict[str, tuple[Tensor, Tensor, Tensor]] = field(default_factory=dict)

    def before(self, optimizer: Optimizer, names: Names, place: str) -> None:
        """Note a sample of each half weight that has a gradient."""
        self._before.clear()
        for part in parts(optimizer, names, place):
            if part.dtype not in HALF or part.remedied or not part.number("lr"):
                continue
            for name, p in part.params:
                grad = p.grad
                if grad is None or grad.layout is not torch.strided:
                    continue
                if grad.stride() != p.stride():  # the same numbers of both are to be taken
                    grad = torch.empty_like(p).copy_(grad.detach())
                weights, grads = sample(p), sample(grad)
                if weights is not None and grads is not None and weights.shape == grads.shape:
                    self._before[name] = (p, weights, grads != 0)

    def after(self) -> None:
        """Count what the update has left as it was."""
        for name, (p, weights, given) in self._before.items():
            now = sample(p)
            if now is None or now.shape != weights.shape:
                continue
            had, stayed = self.counts.get(name, (0, 0))
            self.counts[name] = had + int(given.sum()), stayed + int((given & (now == weights)).sum())
        self._before.clear()


def look(part: Part, sheet: Sheet, moved: Moved) -> None:
    """Judge the updates of one part whose weights are half."""
    if part.dtype not in HALF or part.remedied:
        return
    known = form(part.dtype)
    assert known is not None
    if not _lost(part, sheet, moved):
        sheet.add(
            "half_weights",
            common(part.names),
            f"{part.kind} updates {len(part.params)} {known.name} parameters in place: what is below "
            f"{known.eps / 4:.1e} of a weight (half a step of {known.name}) is rounded away, and no float32 copy "
            "collects it.",
            f"{_MASTERS}.",
            severity=RISK,
            names=part.names,
        )
    if part.torchs and part.kind in _FUSED and not part.fused and not _plain_sgd(part):
        foreach = " with foreach=True" if part.group.get("foreach") else ""
        sheet.add(
            "unfused_half",
            part.place,
            f"{part.kind}{foreach} on {known.name} weights rounds the result of each of its operations to steps of "
            f"1/{round(1 / known.eps)}: the moments, their root, the quotient, the weight.",
            "fused=True computes the update in float32 and rounds once; with float32 weights nothing is rounded.",
            severity=RISK,
            names=part.names,
        )


def _plain_sgd(part: Part) -> bool:
    """One operation, so one rounding."""
    return part.kind == "SGD" and not part.number("momentum") and not part.number("weight_decay")


def _lost(part: Part, sheet: Sheet, moved: Moved) -> bool:
    """Whether most updates are lost, or will be during a warm-up; says so."""
    dtype, where = name_of(part.dtype), common(part.names)
    counts = {name: moved.counts[name] for name in part.names if name in moved.counts}
    if counts:  # a real update was seen, and settles it
        given, stayed = (sum(pair[i] for pair in counts.values()) for i in (0, 1))
        if not given or stayed < _LOST * given:
            return False
        sheet.add(
            "lost_updates",
            where,
            f"the traced step leaves {stayed / given:.0%} of the {dtype} weights that have a gradient as they were: "
            f"at lr {fmt(part.number('lr'))} the updates are below half a step of {dtype}.",
            f"{_MASTERS}.",
            names=sorted(counts, key=lambda name: -counts[name][1] / max(1, counts[name][0])),
        )
        return True
    if not part.adaptive or not part.peak:
        return False  # the size of an update is known from its gradient only
    shares, needed, largest = _judged(part)
    share = sum(shares.values()) / len(shares) if shares else 0.0
    rate = part.number("lr")
    if share >= _LOST:
        sheet.add(
            "lost_updates",
            where,
            f"lr {fmt(part.peak)} is about the size of each update of {part.kind}, and {share:.0%} of the {dtype} "
            f"weights do not change by that: half of them need {fmt(needed)} (the largest weight is {fmt(largest)}).",
            f"{_MASTERS}.",
            names=sorted(shares, key=lambda name: -shares[name]),
        )
        return True
    if rate is not None and rate < needed < part.peak:
        sheet.add(
            "warmup",
            where,
            f"the schedule begins at lr {fmt(rate)} and goes to {fmt(part.peak)}; below {fmt(needed)}, "
            f"{needed / part.peak:.0%} of that, an update changes less than half of the {dtype} weights: this part of "
            "the warm-up is for nothing, while the optimizer's moments already run.",
            f"{_MASTERS}; or begin the warm-up above {fmt(needed)}.",
            severity=RISK,
            names=sorted(shares, key=lambda name: -shares[name]),
        )
    return False


def _judged(part: Part) -> tuple[dict[str, float], float, float]:
    """The share of each parameter that an update of the peak rate leaves, the median half step, the largest weight."""
    shares: dict[str, float] = {}
    steps: list[Tensor] = []
    largest = 0.0
    for name, p in part.params:
        some = sample(p)
        if some is None or not bool((some != 0).any()):
            continue
        shares[name] = unmoved(some, part.peak)
        steps.append(half_steps(some).cpu())
        largest = max(largest, float(some.double().abs().max()))
    return shares, float(torch.cat(steps).median()) if steps else 0.0, largest
