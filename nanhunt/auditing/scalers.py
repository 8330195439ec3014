"""Rules for a GradScaler: whether there is anything to scale.

From the documentation of torch.amp: gradient scaling is for float16 gradients that would be flushed to zero;
bfloat16 has the exponents of float32. GradScaler.unscale_ itself refuses float16 gradients.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer

from ..naming import Names
from ..numerics import fmt
from ..remarks import RISK, Line, Sheet, common
from .grain import form, name_of
from .groups import parts

Tensor = torch.Tensor


def look(
    scaler: Any,
    optimizers: list[tuple[str, Optimizer]],
    names: Names,
    sheet: Sheet,
    dtypes: frozenset[torch.dtype],
    *,
    seen: bool,
) -> None:
    """`dtypes`: what autocast casts to, and what has run; `seen`: whether that is all there is."""
    if not scaler.is_enabled():
        return
    half = [
        name
        for place, optimizer in optimizers
        for part in parts(optimizer, names, place)
        if part.dtype is torch.float16
        for name in part.names
    ]
    if half:
        sheet.add(
            "scaler_half_weights",
            common(half),
            f"{len(half)} of the optimizer's parameters are float16, and so are their gradients: scaler.unscale_() "
            "refuses them (ValueError: Attempting to unscale FP16 gradients).",
            "keep the weights in float32 and compute under torch.autocast.",
            names=half,
        )
    weights = {p.dtype for _, _, p in names.parameters()}
    if torch.float16 in dtypes | weights:
        return
    scale = fmt(float(scaler.get_scale()))
    if torch.bfloat16 in dtypes | weights:
        sheet.add(
            "scaler_unneeded",
            "scaler",
            f"the GradScaler (scale {scale}) runs with bfloat16, whose smallest number is 9.2e-41: no gradient "
            "vanishes that a scale would save, each step waits for the scaler's look at all gradients, and one that "
            "overflows because of the scale is skipped.",
            "leave the scaler out, or build it with enabled=False.",
            severity=RISK,
        )
    elif seen:
        sheet.add(
            "scaler_unneeded",
            "scaler",
            f"the GradScaler (scale {scale}) is enabled and nothing runs in float16: no gradient can vanish that it "
            "would save.",
            "leave the scaler out, or open torch.autocast(..., dtype=torch.float16) around the forward.",
            severity=RISK,
        )


def loss(scaler: Any, given: Any, sheet: Sheet, place: str, at: Line) -> None:
    """What `scaler.scale()` is given: a loss in float16 has 16 bits for itself and the scale."""
    if not isinstance(given, Tensor) or given.dtype is not torch.float16 or given.numel() != 1 or given.is_meta:
        return
    known = form(given.dtype)
    value, scale = abs(float(given.detach())), float(scaler.get_scale())
    if known is None or not value * scale > known.max:
        return
    sheet.add(
        "scaled_loss",
        place,
        f"the loss is {name_of(given.dtype)} ({fmt(value)}): times the scale of {fmt(scale)} it is "
        f"{fmt(value * scale)}, and float16 ends at {fmt(known.max)}: every step is skipped until the scale has "
        f"fallen to {fmt(2.0 ** int(torch.tensor(known.max / max(value, 1e-30)).log2()))}.",
        "compute the loss in float32: loss_fn(output.float(), target).",
        at=at,
    )
