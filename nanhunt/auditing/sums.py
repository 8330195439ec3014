"""Rules for sums that are kept in half while they grow, and for a mean over a single number."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .. import frames
from ..naming import type_name
from ..numerics import fmt
from ..remarks import RISK, Line, Sheet
from .grain import HALF, form
from .ops import BACKWARD, FORWARD, Marks, Op

Tensor = torch.Tensor

_NORMS = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)
_SPREADS = frozenset("std var std_mean var_mean".split())


def switches(device: str, dtypes: frozenset[torch.dtype], sheet: Sheet) -> None:
    """The switch that lets matrix products of float16 add up in float16 on a GPU (torch 2.7 and later)."""
    switch = "allow_fp16_accumulation"
    matmul = torch.backends.cuda.matmul
    if device != "cuda" or torch.float16 not in dtypes or not getattr(matmul, switch, False):
        return
    sheet.add(
        "half_sum",
        f"torch.backends.cuda.matmul.{switch}",
        "matrix products of float16 add up in float16: once a sum is 2 048 times a term, the term does not change it, "
        "and a sum above 65 504 is Inf even where the terms that follow would bring it back.",
        f"torch.backends.cuda.matmul.{switch} = False, as torch has it by default.",
        severity=RISK,
    )


class Sums:
    """Sums with as many terms as make a term vanish beside them.

    Measured (torch 2.13, CPU): index_add, index_put with accumulate and the gradient of an embedding add in the format
    of their result, and stop at 256 in bfloat16 and 2 048 in float16 when each term is 1. sum, mean, cumsum,
    scatter_add, norms and matrix products add in float32 and round once.
    """

    def __init__(self, sheet: Sheet) -> None:
        self._sheet = sheet
        self._running: Marks[tuple[Any, int]] = Marks()  # the line of a running sum, and its terms so far
        self._lookups: Marks[tuple[str, Line]] = Marks()  # on indices: which embedding they were looked up in

    def before(self, op: Op) -> None:
        if op.phase == FORWARD and op.base in _SPREADS:
            self._spread(op)

    def finish(self) -> None:
        """Nothing is open."""

    def after(self, op: Op) -> None:
        out = op.outs[0] if op.outs else None
        if out is None or out.dtype not in HALF:
            return
        args = op.run.args
        if op.base == "embedding_dense_backward" and op.phase == BACKWARD:
            where = self._lookups.of(args[1])
            self._most(op, args[1], "the gradient of an embedding", without=args[3], where=where)
        elif op.phase != FORWARD:
            return
        elif op.base == "embedding":
            self._lookups.put(args[1], (op.place, op.at))
        elif op.base == "index_add":
            self._most(op, args[2], "index_add")
        elif op.base == "index_put" and len(args) > 3 and args[3] is True:
            indices = [index for index in args[1] if isinstance(index, Tensor)]
            if len(indices) == 1:
                self._most(op, indices[0], "index_put with accumulate=True")
        elif op.base == "add":
            self._grows(op, out)

    def _most(
        self, op: Op, index: Any, what: str, without: int | None = None, where: tuple[str, Line] | None = None
    ) -> None:
        """The place to which most terms are added."""
        if not isinstance(index, Tensor) or index.is_floating_point() or index.is_meta or not index.numel():
            return
        flat = index.reshape(-1)
        if without is not None and without >= 0:
            flat = flat[flat != without]
        if flat.numel():
            _, counts = torch.unique(flat, return_counts=True)
            self._long(op, int(counts.max()), what, where)

    def _grows(self, op: Op, out: Tensor) -> None:
        """`total = total + x`, again and again on one line."""
        first = op.run.args[0] if op.run.args else None
        mark = self._running.of(first)
        site = (op.site, op.place)
        count = mark[1] + 1 if mark is not None and mark[0] == site else 1
        self._running.put(out, (site, count))
        known = form(out.dtype)
        if known is not None and count == round(2 / known.eps):
            self._long(op, count, "a running sum")

    def _long(self, op: Op, terms: int, what: str, where: tuple[str, Line] | None = None) -> None:
        known = form(op.outs[0].dtype)
        assert known is not None
        limit = round(2 / known.eps)
        if terms < limit:
            return
        place, at = where or (op.place, op.at)
        self._sheet.add(
            "half_sum",
            place,
            f"{what} adds {fmt(terms)} terms or more in {known.name}: once the sum is {fmt(limit)} times a term, the "
            "term is below half a step and no longer changes it.",
            "keep the sum in float32 and cast the result.",
            severity=RISK,
            at=at,
        )

    # --- a single number --------------------------------------------------------------------------

    def called(self, module: nn.Module, args: tuple[Any, ...], place: str) -> None:
        """A norm that is about to take its statistics from what it is given."""
        if not isinstance(module, _NORMS):
            return
        x = args[0] if args else frames.call_kwargs().get("input")
        if not isinstance(x, Tensor) or x.dim() < 2 or not (module.training or module.running_mean is None):
            return
        per = "instance" if isinstance(module, nn.modules.instancenorm._InstanceNorm) else "channel"
        channels = x.shape[1] * (x.shape[0] if per == "instance" else 1)
        if not channels or x.numel() != channels:
            return
        mode = "train()" if module.training else "eval() without running statistics"
        self._sheet.add(
            "one_sample",
            place,
            f"{type_name(module)} in {mode} is given {list(x.shape)}: one number per {per}, so the variance is 0 and "
            "the result is its bias alone; torch refuses it (Expected more than 1 value).",
            "use a batch of 2 or more (drop_last=True), eval() with running statistics, or GroupNorm or LayerNorm.",
        )

    def _spread(self, op: Op) -> None:
        """An unbiased standard deviation divides by n - 1."""
        t = op.run.args[0]
        if not isinstance(t, Tensor) or not t.numel():
            return
        dims = op.run.args[1] if len(op.run.args) > 1 else op.run.kwargs.get("dim")
        given = op.run.kwargs.get("correction")
        correction = 1 if given is None else given
        count = t.numel()
        if isinstance(dims, (list, tuple)) and dims:
            count = 1
            for d in dims:
                count *= t.shape[d]
        if correction < count or correction == 0:
            return
        self._sheet.add(
            "one_sample",
            op.place,
            f"{op.base} over {count} number{'s' if count != 1 else ''} with correction {fmt(correction)} divides by "
            f"{fmt(max(0, count - correction))}: the result is NaN.",
            "use a batch of 2 or more (drop_last=True), or correction=0.",
            at=op.at,
        )
