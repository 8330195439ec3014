"""A rule for custom operations and autograd.Functions: what autocast does not know of them.

From the AMP examples of torch ("autocast and custom autograd functions") and torch.library.register_autocast.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import torch
from torch.amp import autocast_mode
from torch.nn.modules import module as _nn_module

from .. import sites
from ..remarks import RISK, Sheet
from .grain import HALF, name_of
from .ops import FORWARD, Op

Tensor = torch.Tensor

_TORCHS = frozenset(
    "aten prim prims rngprims debugprims c10d _c10d_functional _c10d_functional_autograd _dtensor quantized "
    "quantized_decomposed profiler inductor onednn mkldnn mkl streams higher_order symm_mem".split()
)
_APPLY = torch.autograd.Function.apply.__func__.__code__  # type: ignore[attr-defined]
_AUTOCAST = autocast_mode.__file__
_MODULE = _nn_module.__file__


class Custom:
    """Looks at operations that are not torch's, and at what runs inside the forward of an autograd.Function."""

    def __init__(self, sheet: Sheet) -> None:
        self._sheet = sheet

    def before(self, op: Op) -> None:
        if op.phase != FORWARD or not op.depth:
            return
        if op.run.schema.name.split(".")[0] not in _TORCHS:
            self._custom_op(op)
        # Inside the forward of a Function no graph is recorded. Where none is recorded anyway, no backward will run.
        if op.graph and not torch.is_grad_enabled():
            self._function(op)

    def after(self, op: Op) -> None:
        """Nothing: what an op is given is known before it runs."""

    def finish(self) -> None:
        """Nothing is open."""

    def _custom_op(self, op: Op) -> None:
        dtypes = {t.dtype for t in op.floats}
        if len(dtypes) < 2 or not dtypes & set(HALF):
            return
        device = op.floats[0].device.type.upper()
        if _has_rule(op.run.func, f"Autocast{device}"):
            return
        self._sheet.add(
            "autocast_rule",
            op.place,
            f"{op.run.schema.name} is given {_listed(dtypes)} under autocast and has no rule for it: what it computes "
            "in is up to its kernel, which was written for one dtype.",
            "register one: torch.library.register_autocast(op, device_type, cast_inputs=torch.float32).",
            severity=RISK,
            at=op.at,
        )

    def _function(self, op: Op) -> None:
        """An autograd.Function whose own code mixes dtypes, or has autocast cast for it.

        Its backward runs without autocast, so what was cast in forward is not cast there (PyTorch's AMP examples:
        functions with several inputs, or with autocastable ops, need custom_fwd and custom_bwd).
        """
        frame = _function_frame()
        if frame is None:
            return
        cls, given = frame.f_locals.get("cls"), frame.f_locals.get("args") or ()
        if not isinstance(cls, type) or cls.__module__.startswith("torch."):
            return
        code = getattr(cls.forward, "__code__", None)  # type: ignore[attr-defined]
        if code is None or code.co_filename == _AUTOCAST:  # custom_fwd is around it
            return
        dtypes = {t.dtype for t in given if isinstance(t, Tensor) and t.is_floating_point()}
        cast = (
            op.base == "to_copy"
            and op.run.kwargs.get("dtype") in HALF
            and torch.float32 in {t.dtype for t in op.floats}
        )
        if not cast and (len(dtypes) < 2 or not dtypes & set(HALF)):
            return
        why = (
            f"autocast casts to {name_of(op.run.kwargs['dtype'])} inside its forward"
            if cast
            else f"it is given {_listed(dtypes)}"
        )
        self._sheet.add(
            "autocast_rule",
            op.place,
            f"{cls.__name__}, an autograd.Function, has no custom_fwd: {why}, and its backward runs outside of "
            "autocast, with other dtypes than its forward had.",
            "decorate forward with torch.amp.custom_fwd(device_type=..., cast_inputs=torch.float32) and backward with "
            "torch.amp.custom_bwd(device_type=...).",
            severity=RISK,
            at=sites.text(sites.user_site(frame)),
        )


def _listed(dtypes: set[torch.dtype]) -> str:
    return " and ".join(sorted(map(name_of, dtypes)))


def _has_rule(func: Any, key: str) -> bool:
    ask = getattr(torch._C, "_dispatch_has_kernel_for_dispatch_key", None)
    if ask is None:  # another torch: it cannot be asked, so nothing is said
        return True
    try:
        return bool(ask(func.name(), key))
    except RuntimeError:
        return True


def _function_frame() -> FrameType | None:
    """The frame of `Function.apply` whose forward runs this op itself, not through a module it calls."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _APPLY:
            return frame
        if frame.f_code.co_filename == _MODULE and frame.f_code.co_name == "_call_impl":
            return None
        frame = frame.f_back
    return None
