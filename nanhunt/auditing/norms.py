"""Rules for norms as they are built: the eps they divide by."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..naming import Names, type_name
from ..numerics import fmt
from ..remarks import RISK, Line, Sheet
from .grain import HALF, form, name_of, stored, usable_eps

_NORMS: tuple[type[nn.Module], ...] = (
    nn.LayerNorm,
    nn.GroupNorm,
    nn.modules.batchnorm._NormBase,
    *((nn.RMSNorm,) if hasattr(nn, "RMSNorm") else ()),
)
_EPS = ("eps", "variance_epsilon", "epsilon", "layer_norm_eps")


def look(names: Names, sheet: Sheet) -> None:
    """An eps of zero, in torch's norms and in any module whose name ends with Norm; one that half weights lose."""
    for path, module in names.by_path.items():
        eps = _eps_of(module)
        if eps is None:
            continue
        if not eps > 0:
            sheet.add(
                "eps_zero",
                path,
                f"{type_name(module)} has eps = {fmt(eps)}: a constant row, whose variance is 0, gives 0 / 0, and the "
                "derivative of its root is infinite.",
                "give it an eps, such as 1e-5.",
            )
        elif isinstance(module, _NORMS):
            weight = getattr(module, "weight", None)
            if isinstance(weight, torch.Tensor) and weight.dtype in HALF:
                saved_in_half(sheet, path, type_name(module), eps, weight.dtype)


def _eps_of(module: nn.Module) -> float | None:
    if not isinstance(module, _NORMS) and not type(module).__name__.endswith("Norm"):
        return None
    for name in _EPS:
        value: Any = vars(module).get(name)
        if isinstance(value, float) or (isinstance(value, int) and not isinstance(value, bool)):
            return float(value)
    return None


def saved_in_half(
    sheet: Sheet,
    place: str,
    what: str,
    eps: float,
    dtype: torch.dtype,
    at: Line = (None, None),
) -> None:
    """A norm whose numbers are all half: torch adds the eps in float32, and keeps 1 / sqrt(var + eps) in half.

    Measured on the CPU (torch 2.13): with float16 weights and eps 1e-12 the saved factor is Inf, and so the gradient
    of a constant row is NaN. With float32 weights the factor is float32.
    """
    known = form(dtype)
    if known is None or not eps > 0:
        return
    factor = eps**-0.5
    if factor > known.max:
        sheet.add(
            "eps_lost",
            place,
            f"{what} with eps {fmt(eps)} in {name_of(dtype)}: for a constant row it keeps 1 / sqrt(eps) = "
            f"{fmt(factor)} for backward, and {name_of(dtype)} ends at {fmt(known.max)}: the gradient is NaN.",
            f"use an eps of {usable_eps(dtype)} or more, or keep the weights of this norm in float32.",
            at=at,
        )
    elif stored(eps, dtype) == 0:
        sheet.add(
            "eps_lost",
            place,
            f"{what} with eps {fmt(eps)} on {name_of(dtype)} weights: the eps is 0 in {name_of(dtype)}. torch's own "
            "kernel adds it in float32, an exported or fused one need not.",
            f"use an eps of {usable_eps(dtype)} or more, or keep the weights of this norm in float32.",
            severity=RISK,
            at=at,
        )
