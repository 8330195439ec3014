"""A rule for casts to float32 that autocast takes back at once.

From NVIDIA/apex#973: both operands of a bmm are float32, and still the product is done in float16.
"""

from __future__ import annotations

from typing import Any

import torch

from ..numerics import fmt
from ..remarks import RISK, Sheet
from .grain import HALF, form, name_of
from .ops import FORWARD, PRODUCTS, Marks, Op

Tensor = torch.Tensor


class Undone:
    """Follows what the program casts up, and looks whether a product gets it cast down again.

    `parameters`: names, by the address of the numbers.
    """

    def __init__(self, sheet: Sheet, parameters: dict[int, str]) -> None:
        self._sheet, self._parameters = sheet, parameters
        self._weights: Marks[bool] = Marks()  # copies of parameters that autocast has made
        self._raised: Marks[tuple[torch.dtype, str | None]] = Marks()  # cast up by the program: from what, and where
        self._undone: Marks[tuple[torch.dtype, str | None, Any]] = Marks()  # and down again: and at which line

    def before(self, op: Op) -> None:
        """Nothing: what is cast shows in what comes out."""

    def after(self, op: Op) -> None:
        if op.phase != FORWARD or not op.depth or op.run.schema.views:
            return
        marks: Marks[Any]
        source = op.run.args[0] if op.run.args else None
        if op.base == "to_copy" and isinstance(source, Tensor) and op.outs:
            out, at = op.outs[0], op.at[0]
            raised = self._raised.of(source)
            for marks in (self._raised, self._undone, self._weights):
                marks.clear(out)
            if source.data_ptr() in self._parameters:
                self._weights.put(out, True)
            elif source.dtype in HALF and out.dtype is torch.float32:
                self._raised.put(out, (source.dtype, at))
            elif raised is not None and out.dtype in HALF:
                self._undone.put(out, (*raised, op.site))
            return
        # A layer may cast its input to the dtype of its weights (T5 does), and leave the rest to autocast: only a
        # product of activations was meant to be one of float32.
        if op.base in PRODUCTS and not any(self._weights.of(t) for t in op.floats):
            for t in op.floats:
                undone = self._undone.of(t)
                if undone is not None and undone[2] == op.site:  # by autocast: on the line of the product itself
                    self._taken_back(op, t, undone[0], undone[1])
        for t in op.outs:
            for marks in (self._raised, self._undone, self._weights):
                marks.clear(t)

    def _taken_back(self, op: Op, t: Tensor, was: torch.dtype, line: str | None) -> None:
        known = form(t.dtype)
        assert known is not None
        where = f" ({line.rpartition('/')[2]})" if line is not None and line != op.at[0] else ""
        limit = f" and ends at {fmt(known.max)}" if t.dtype is torch.float16 else ""
        self._sheet.add(
            "upcast_undone",
            op.place,
            f"an operand of {op.base} was cast from {name_of(was)} to float32 on purpose{where}, and autocast casts "
            f"it back to {known.name} for this {op.base}, whose result has steps of {fmt(known.eps / 2)}{limit}.",
            f"put it into `with torch.autocast({t.device.type!r}, enabled=False):`; a cast alone is undone.",
            severity=RISK,
            at=op.at,
        )

    def finish(self) -> None:
        """Nothing is open."""
