"""What to do about a cause: short, specific, most likely first."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from .numerics import fmt, format_of

if TYPE_CHECKING:
    from .evidence import Evidence

_GENERAL: dict[str, tuple[str, ...]] = {
    "overflow": ("scale the operands down before this op, or normalise them",),
    "underflow": ("raise the eps", "compute this line in float32"),
    "zero_division": ("divide by x.clamp(min=eps), or skip what is empty",),
    "domain": ("keep the argument inside the domain with a clamp before this op",),
    "inf_arithmetic": ("find why the Inf is there; replace it (torch.where before this op) where it means nothing",),
    "masked_row": (
        "leave one position of every row unmasked, or skip rows that are padding only",
        "mask with a large negative number (torch.finfo(dtype).min / 2) and zero the row afterwards",
    ),
    "empty_reduction": ("skip batches in which nothing is left to average",),
    "singular_gradient": (
        "keep the argument away from that point before this op, not after it",
        "where some elements are discarded: double where, torch.where(ok, f(torch.where(ok, x, safe)), other)",
    ),
    "bad_input": ("look at the data: this sample holds NaN or Inf before any module runs",),
    "bad_parameter": ("look at the checkpoint or the initialisation; was it loaded, was it ever filled?",),
    "bad_buffer": ("look at the checkpoint, or reset the buffer (BatchNorm: reset_running_stats)",),
    "uninitialised": ("use torch.zeros, or write all of it before it is read",),
    "literal": ("if it is meant as a mask, make sure that nothing multiplies or averages it",),
    "loss_scale": ("lower the loss scale, or let torch.amp.GradScaler find it",),
    "optimizer": ("print the learning rate of this step; look for 0/0 in the schedule (zero warm-up steps)",),
    "collective": ("run the rank that sent it under watch: its own fault is named there",),
    "unknown": ("run the step again with detail='op'",),
}

_SPECIAL: dict[str, tuple[str, ...]] = {
    "count": ("divide by count.clamp(min=1)", "skip rows whose count is 0"),
    "constant": ("replace zeros in that buffer by 1 (a constant column carries nothing)", "add an eps to the divisor"),
    "divisor": ("add an eps inside: x / (d + eps), or d.clamp(min=eps)",),
    "accumulate": ("divide each loss by the number of micro-batches", "accumulate gradients in float32"),
    "gradient": ("clip gradients, or lower the learning rate if activations have grown", "keep this layer in float32"),
    "where": ("double where: replace the divisor by 1 where it is 0, before the division",),
    "sqrt": ("sqrt(x.clamp(min=eps))", "sqrt(x + eps)"),
    "norm": ("torch.linalg.vector_norm(x) + an eps inside the square: (x * x).sum(-1).add(eps).sqrt()",),
    "linalg_vector_norm": ("put an eps inside: (x * x).sum(-1).add(eps).sqrt()",),
    "pow": ("clamp the base to a small positive number first",),
    "acos": ("clamp to [-1 + 1e-6, 1 - 1e-6], not to [-1, 1]", "use atan2(sin, cos) for angles"),
    "asin": ("clamp to [-1 + 1e-6, 1 - 1e-6], not to [-1, 1]",),
    "atanh": ("clamp to [-1 + 1e-6, 1 - 1e-6] before atanh",),
    "logsumexp": ("replace rows that are all -inf before logsumexp; put -inf back after it",),
    "std": ("std(correction=0), or skip batches of one",),
    "mean": ("skip the reduction when its input is empty",),
    "loss": (
        "skip the batch when no target is left: (target != ignore_index).any()",
        "sum and divide by max(count, 1)",
    ),
    "log": ("log(x.clamp(min=eps))", "work with log-probabilities: log_softmax, logsigmoid, BCEWithLogitsLoss"),
    "exp": ("clamp the argument before exp, not the result after it", "subtract the maximum first"),
    "linalg": ("add a small multiple of the identity", "compute it in float64"),
    "ctc": ("CTCLoss(zero_infinity=True)", "drop samples whose target is longer than their input"),
    "weight_norm": ("do not start a weight-normed layer at zero",),
    "mask": (
        "use -inf with rows that keep one key, or a mask of about -1e4 in float16",
        "clamp scores + mask to finfo.min",
    ),
    "cast": ("scale before the cast", "keep it in float32 or bfloat16"),
    "product": ("scale one factor down first", "keep this layer in float32 or bfloat16"),
    "sum": ("use mean instead of sum, or sum in float32 (sum(dtype=torch.float32))",),
}


def of(cause: str, e: Evidence | None = None, *special: str) -> tuple[str, ...]:
    """The advice for a cause; `special` names the situation, the evidence gives the numbers."""
    lines: list[str] = list(_numbers(cause, e)) if e is not None else []
    for word in special:
        lines += _SPECIAL.get(word, ())
    if len(lines) < 2:
        lines += _GENERAL.get(cause, ())
    return tuple(dict.fromkeys(lines))[:4]


def _numbers(cause: str, e: Evidence) -> list[str]:
    form = format_of(e.dtype)
    lines = []
    if e.autocast is not None and cause == "overflow":
        lines.append(f"keep it in {e.given}: wrap this line in torch.autocast(device_type, enabled=False)")
    if cause == "underflow" and e.lost is not None:
        lost = format_of(e.lost.dtype)
        if lost is not None:
            safe = lost.eps if e.lost.becomes or e.lost.beside else lost.smallest_normal
            digits = 10.0 ** math.ceil(math.log10(safe))
            lines.append(f"an eps that survives {e.lost.dtype} here: {digits:.0e} or more; or compute it in float32")
    if cause == "loss_scale" and e.loss_scale and form is not None:
        size = max(abs(e.exact) if e.exact is not None and math.isfinite(e.exact) else 0.0, e.magnitude or 0.0)
        if size > 0:
            safe = 2.0 ** math.floor(math.log2(form.max * e.loss_scale / size))
            lines.append(f"the largest loss scale that fits here is {fmt(safe)} (it was {fmt(e.loss_scale)})")
    if cause == "overflow" and e.dtype == "float16" and e.autocast is None:
        lines.append("bfloat16 or float32 holds it")
    return lines
