"""A rule for what runs in half: softmax, norms and losses, which autocast computes in float32 where it knows them.

From the op reference of torch.amp: what CUDA autocast computes in float32.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..numerics import fmt
from ..remarks import RISK, Line, Sheet
from .grain import HALF, form
from .ops import FORWARD, PRODUCTS, Marks, Op

# What torch's autocast for CUDA computes in float32 (its op reference); the one for the CPU leaves softmax as it is.
_LOGS = frozenset("log_softmax logsumexp".split())
_SHARES = frozenset("softmax safe_softmax".split())
_LOSSES = frozenset(
    "nll_loss_forward nll_loss2d_forward mse_loss smooth_l1_loss huber_loss binary_cross_entropy ctc_loss "
    "binary_cross_entropy_with_logits soft_margin_loss multi_margin_loss multilabel_margin_loss_forward".split()
)
_NORMS = {"native_layer_norm": 2, "native_group_norm": 2}  # the output that holds their statistics
# What leaves shares what they are: a dropout, a mask, another layout.
_THROUGH = frozenset("mul div native_dropout to_copy clone where copy mean sum".split())


@dataclass(frozen=True, slots=True)
class _Said:
    place: str
    message: str
    at: Line


class Halves:
    """Looks at the dtype in which each of them runs. `trains`: a loss in half is told outside of autocast too.

    A softmax of half scores whose shares go into a product loses nothing by it: the product takes them in half anyway.
    So attention is told only where autocast was switched off around it, and others where no product takes the result.
    """

    def __init__(self, sheet: Sheet, *, trains: bool) -> None:
        self._sheet, self._trains = sheet, trains
        self._shares: Marks[_Said] = Marks()
        self._open: dict[_Said, None] = {}

    def before(self, op: Op) -> None:
        """Nothing: an op is judged with its result."""

    def after(self, op: Op) -> None:
        if op.phase != FORWARD:
            return
        self._follow(op)
        if op.depth or (self._trains and op.base in _LOSSES):
            self._half(op)

    def finish(self) -> None:
        """Tell of the softmax that no product has taken."""
        for said in self._open:
            self._tell(said)
        self._open.clear()

    def _follow(self, op: Op) -> None:
        marks = [mark for t in op.run.tensors if (mark := self._shares.of(t)) is not None]
        if op.base in PRODUCTS:
            for mark in marks:
                self._open.pop(mark, None)
        if op.run.schema.views:
            return
        for t in op.outs:
            if marks and op.base in _THROUGH:
                self._shares.put(t, marks[0])
            else:
                self._shares.clear(t)

    def _half(self, op: Op) -> None:
        first = next(iter(op.floats), None)
        if first is None or first.dtype not in HALF:
            return
        known = form(first.dtype)
        assert known is not None
        step = fmt(known.eps / 2)
        if op.base in _SHARES or op.base in _LOGS:
            what = op.base.removeprefix("safe_")
            why = f"each number is rounded to {step} of itself"
            if known.name == "float16" and op.base in _SHARES:
                why += f", and a share below {fmt(known.smallest_subnormal / 2)} is 0, whose log is -Inf"
        elif op.base in _LOSSES:
            what = f"the loss ({op.base.removesuffix('_forward')})"
            why = f"it is rounded to {step} of itself"
            if known.name == "float16":
                why += f", and Inf above {fmt(known.max)}: for mse_loss an error of {fmt(known.max**0.5)}"
        elif op.base in _NORMS and isinstance(op.out, tuple):
            if op.out[_NORMS[op.base]].dtype not in HALF:
                return  # the weights are float32, and so is all that matters
            what = op.base.removeprefix("native_")
            why = f"the mean and 1 / sqrt(var) that backward reads are rounded to {step} of themselves"
        else:
            return
        under = "under the present autocast" if op.depth == 1 else "outside of autocast"
        message = f"{what} of {known.name}{list(first.shape)} runs in {known.name} {under}: {why}."
        said = _Said(op.place, message, op.at)
        if op.base in _SHARES and op.depth == 1:
            self._open[said] = None
            for t in op.outs:
                self._shares.put(t, said)
        else:
            self._tell(said)

    def _tell(self, said: _Said) -> None:
        self._sheet.add(
            "runs_in_half",
            said.place,
            said.message,
            "give it float32: x.float(), or dtype=torch.float32 where it takes one.",
            severity=RISK,
            at=said.at,
        )
