"""Rules for an optimizer as it is set: what its numbers become in the format of the weights and of its state.

From openai/CLIP#40 (Adam on float16 weights: NaN after one step), and from the arithmetic of torch.optim.Adam, whose
tensors have the dtype of the weight; the tests hold the claims against torch.
"""

from __future__ import annotations

import math

import torch

from .. import probe
from ..numerics import fmt
from ..remarks import FAULT, RISK, Sheet, common
from .grain import HALF, decay_lost, form, name_of, stored, usable_eps
from .groups import Part

Tensor = torch.Tensor

_STEEP = 0.1  # of a weight that one decay may take
_SQUARES = ("exp_avg_sq", "max_exp_avg_sq", "square_avg")


def look(part: Part, sheet: Sheet) -> None:
    """Judge the settings and the state of one part."""
    _numbers(part, sheet)
    _eps(part, sheet)
    _decay(part, sheet)
    _state(part, sheet)
    if part.dtype in HALF and not part.remedied:
        _second_moment(part, sheet)


def _numbers(part: Part, sheet: Sheet) -> None:
    for key in ("lr", "eps", "weight_decay"):
        value = part.number(key)
        if value is not None and (not math.isfinite(value) or value < 0):
            sheet.add(
                "optimizer_number",
                part.place,
                f"{key} of {part.kind} is {fmt(value)}: the update makes NaN, or drives the weights apart.",
                f"give a {key} that is finite and not below zero; a schedule may have computed this one.",
            )


def _eps(part: Part, sheet: Sheet) -> None:
    """Adam divides by sqrt(v) + eps: a sum in the format of the weights, or of float32 in a fused kernel."""
    eps, known = part.number("eps"), form(part.dtype)
    if eps is None or known is None or not math.isfinite(eps) or eps < 0:
        return
    if eps == 0:
        sheet.add(
            "optimizer_eps",
            part.place,
            f"eps of {part.kind} is 0: a weight whose gradient is exactly 0 (an embedding row that the batch does not "
            "use, a unit behind a dead ReLU) is updated by 0 / 0.",
            "use an eps of 1e-8 or more.",
            names=part.names,
        )
    elif part.dtype in HALF and not part.fused and eps < known.smallest_normal:
        kept = stored(eps, part.dtype)
        low = f"{fmt(kept)}, below its smallest normal number {fmt(known.smallest_normal)}"
        sheet.add(
            "optimizer_eps",
            part.place,
            f"eps {fmt(eps)} of {part.kind} is {low if kept else '0'} in {known.name}, in which "
            f"{len(part.params)} parameters are updated: where the mean of their squared gradients is 0 in it as well, "
            f"the update divides by {fmt(kept)}.",
            f"keep float32 weights and use autocast; else an eps of {usable_eps(part.dtype)} or more.",
            severity=RISK if kept else FAULT,
            names=part.names,
        )


def _decay(part: Part, sheet: Sheet) -> None:
    decay, rate = part.number("weight_decay"), part.peak
    if not decay or not rate or not math.isfinite(decay) or decay < 0:
        return
    taken = rate * decay
    if taken >= _STEEP and (part.decoupled or part.kind == "SGD"):
        turned = taken >= 1
        end = "turns the sign of each weight or sets it to 0" if turned else f"takes {taken:.0%} of each weight"
        sheet.add(
            "weight_decay",
            part.place,
            f"lr {fmt(rate)} times weight_decay {fmt(decay)} is {fmt(taken)}: each step {end}, whatever the gradient.",
            "lower weight_decay: what counts is its product with lr, 1e-6 to 1e-3 as a rule.",
            severity=FAULT if turned else RISK,
        )
    elif part.decoupled and part.dtype in HALF and not part.remedied and decay_lost(taken, part.dtype):
        known = form(part.dtype)
        assert known is not None
        sheet.add(
            "weight_decay",
            part.place,
            f"weight_decay {fmt(decay)} at lr {fmt(rate)} multiplies each weight by 1 - {taken:.1e}, and a "
            f"{known.name} number changes only by {known.eps / 4:.1e} of it or more: the decay does nothing.",
            "keep float32 weights; there the decay works as it is set.",
            severity=RISK,
            names=part.names,
        )


def _state(part: Part, sheet: Sheet) -> None:
    """What the optimizer keeps of earlier steps."""
    odd: dict[str, tuple[str, torch.dtype]] = {}
    for name, p in part.params:
        for key, value in part.optimizer.state.get(p, {}).items():
            if not isinstance(value, Tensor) or not value.is_floating_point() or key == "step":
                continue
            _bad(name, key, value, sheet)
            narrow = value.dtype is torch.float16 and p.dtype is not torch.float16 and key in _SQUARES
            if narrow or (part.torchs and value.dtype != p.dtype):
                odd.setdefault(key, (name, value.dtype))
    for key, (name, dtype) in odd.items():
        kept, own = name_of(dtype), name_of(part.dtype)
        if part.torchs:
            message = (
                f"{key} of {name} is {kept} and its weight {own}: {part.kind} of torch mixes no dtypes and raises."
            )
            fix = f"cast the state to {own}, as load_state_dict() does; with {own} weights nothing else is possible."
        else:
            message = f"{key} of {name} is {kept}: squares of gradients below {fmt(2.0**-12.5)} are 0 in it."
            fix = "keep second moments in float32 or bfloat16."
        sheet.add("optimizer_state", part.place, message, fix, names=part.names)


def _bad(name: str, key: str, value: Tensor, sheet: Sheet) -> None:
    kinds = probe.kinds(value)
    if kinds:
        sheet.add(
            "nonfinite",
            name,
            f"the optimizer's {key} of {name} ({name_of(value.dtype)}) holds {' and '.join(kinds)}: the update makes "
            "NaN of it, or freezes the weight.",
            "start the optimizer anew, or load the state of an earlier step.",
        )


def _second_moment(part: Part, sheet: Sheet) -> None:
    """A mean of squares that forgets slowly is rounded back to what it was; in float16 small squares are 0."""
    rate = part.decay_rate
    kept = part.dtype
    known = form(kept)
    if rate is None or known is None or not part.torchs or not 0 < rate < 1:
        return
    where, taken = common(part.names), 1 - rate
    if decay_lost(taken, kept):
        more = ""
        if kept is torch.float16:
            smallest = math.sqrt(known.smallest_subnormal / 2 / taken)
            more = f" Squares of gradients below {fmt(smallest)} never get into it: they are 0."
        sheet.add(
            "optimizer_state",
            where,
            f"{part.kind} keeps its mean of squares in {known.name}, as the weights are. With beta2 = {fmt(rate)} it "
            f"falls by {taken:.1e} of itself a step, and {known.name} cannot hold a change below {known.eps / 4:.1e}: "
            f"it never falls, and the updates shrink for good after one large gradient.{more}",
            f"keep float32 weights (and so float32 moments); else a beta2 of {fmt(1 - known.eps / 2)} or less.",
            names=part.names,
        )
    elif kept is torch.float16:
        smallest = math.sqrt(known.smallest_subnormal / 2 / taken)
        sheet.add(
            "optimizer_state",
            where,
            f"{part.kind} keeps its mean of squares in float16: with beta2 = {fmt(rate)} the squares of gradients "
            f"below {fmt(smallest)} are 0 in it, and those above {fmt(math.sqrt(known.max / taken))} are Inf.",
            "keep float32 weights, and so float32 moments.",
            names=part.names,
        )
