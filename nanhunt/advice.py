"""What to do about a cause: short, specific, most likely first."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from .numerics import fmt, format_of

if TYPE_CHECKING:
    from .evidence import Evidence
    from .finding import TensorStats

# Each line is filled with the numbers of the case; one for which a number is missing is left out.
_GENERAL: dict[str, tuple[str, ...]] = {
    "overflow": (
        "Compute it in {wide}, which holds {size}: x.to(torch.{wide}).",
        "Keep the operands of {op} small: normalise or clamp them before it.",
    ),
    "underflow": (
        "Compute this line in {wider}: x.to(torch.{wider}).",
        "else: Raise the eps to {eps} or more.",
        "else: Raise the eps, or compute this line in float32.",
    ),
    "zero_division": (
        "else: Keep the divisor away from 0: x / torch.where(d == 0, {eps}, d).",
        "else: Keep the divisor away from 0, or skip what is empty.",
    ),
    "domain": ("else: Clamp the argument of {op} into its domain before it, not the result after it.",),
    "inf_arithmetic": (
        "Make the Inf in {infinite} finite before {op}: x.nan_to_num(posinf=1e4, neginf=-1e4).",
        "Where the Inf is a mask, put it in last: masked_fill after {op}, not before it.",
        "else: Find the Inf that {op} was given, and make it finite before: x.nan_to_num(posinf=1e4, neginf=-1e4).",
    ),
    "masked_row": (
        "Unmask the rows that hold only -inf: x.masked_fill(x.isneginf().all({dim}, keepdim=True), 0).",
        "Or skip rows that are padding only; the first such row is {row}.",
        "else: Leave one position of every row unmasked, or skip rows that are padding only.",
    ),
    "empty_reduction": ("else: Skip batches in which nothing is left to average.",),
    "singular_gradient": ("else: Keep the argument away from that point before {op}, not after it.",),
    "bad_input": (
        "Drop or repair sample {sample} of the batch: its first bad number stands at {index}.",
        "else: Drop or repair the samples that hold NaN or Inf.",
        "Check batches as they are loaded: assert torch.isfinite(x).all().",
    ),
    "bad_parameter": (
        "Load a good checkpoint or initialise {name} anew: its first bad number stands at {index}.",
        "else: Load a good checkpoint or initialise the parameter anew.",
        "If training made it, watch the step before: the fault lies there.",
    ),
    "bad_buffer": (
        "Reset {name} (BatchNorm: reset_running_stats()) or load a good checkpoint.",
        "else: Reset the buffer or load a good checkpoint.",
        "If training made it, watch the step before: the fault lies there.",
    ),
    "uninitialised": ("Use torch.zeros for torch.empty, or write all of it before it is read.",),
    "literal": (
        "Give {op} a finite number where it was given {odd}.",
        "else: Give {op} a finite number.",
        "Where it is meant as a mask, use -inf, and let a softmax consume it.",
    ),
    "loss_scale": (
        "Lower the loss scale: the largest loss scale that fits here is {scale} (it was {was}).",
        "Let torch.amp.GradScaler find the scale, from init_scale={plain_scale}.",
        "else: Lower the loss scale, or let torch.amp.GradScaler find it.",
    ),
    "optimizer": (
        "Set the learning rate to a finite number: the update was given {odd}.",
        "else: Set the learning rate to a finite number.",
        "Look for 0 / 0 in the schedule, such as a warm-up over 0 steps: divide by max(1, steps).",
    ),
    "collective": ("Run the rank that sent it under nanhunt.watch: its own fault is named there.",),
    "unknown": ("Look at the operands in the table: one of them is at the end of its range, or at a special point.",),
}

_SPECIAL: dict[str, tuple[str, ...]] = {
    "count": ("Divide by count.clamp(min=1).", "Or skip what is empty: keep the rows with count > 0."),
    "constant": (
        "Replace the zeros of {divisor} by 1: torch.where({divisor} == 0, 1, {divisor}).",
        "Or leave out the columns that are constant: they carry nothing.",
    ),
    "divisor": (
        "Clamp the divisor, which is nowhere negative{nonnegative}: x / d.clamp(min={eps}).",
        "else: Keep the divisor away from 0: x / torch.where(d.abs() < {eps}, {eps}, d).",
    ),
    "root": ("Clamp before it: x.clamp(min={eps}).{op}().",),
    "signed": ("Keep it away from 0 before it: torch.where(x.abs() < {eps}, {eps}, x).{op}().",),
    "accumulate": (
        "Divide each loss by the number of micro-batches; here by {factor} or more.",
        "Or accumulate the gradients in {wide}.",
    ),
    "gradient": (
        "Divide the loss by {factor} before backward, and multiply the gradients by it in float32.",
        "else: Divide the loss by a power of two before backward, and multiply the gradients by it in float32.",
        "Or compute this layer in {wide}, which holds {size}.",
        "Clipping does not help: the gradient overflows before it could be clipped.",
    ),
    "where": ("Double where: x / torch.where(d == 0, 1, d), inside the torch.where that discards the result.",),
    "double": ("Double where: torch.where(ok, {op}(torch.where(ok, x, 1)), other).",),
    "sqrt": ("Clamp before the root: torch.sqrt(x.clamp(min={eps})).",),
    "rsqrt": ("Clamp before the root: torch.rsqrt(x.clamp(min={eps})).",),
    "norm": ("Put an eps inside the norm: (x * x).sum(-1).add({eps}).sqrt().",),
    "linalg_vector_norm": ("Put an eps inside the norm: (x * x).sum(-1).add({eps}).sqrt().",),
    "pow": ("Clamp the base before pow: x.clamp(min={eps}) ** y.",),
    "acos": ("Clamp to [-1 + {step}, 1 - {step}] before acos, not to [-1, 1].", "Or use torch.atan2(sin, cos)."),
    "asin": ("Clamp to [-1 + {step}, 1 - {step}] before asin, not to [-1, 1].", "Or use torch.atan2(sin, cos)."),
    "atanh": ("Clamp to [-1 + {step}, 1 - {step}] before atanh.",),
    "erfinv": ("Clamp to [-1 + {step}, 1 - {step}] before erfinv.",),
    "acosh": ("Clamp before acosh: torch.acosh(x.clamp(min=1 + {step})).",),
    "logit": ("Give logit an eps: torch.logit(x, eps={step}).",),
    "special_ndtri": ("Clamp to [{step}, 1 - {step}] before ndtri.",),
    "logsumexp": (
        "Give a row of -inf one finite number: x.masked_fill(x.isneginf().all(-1, keepdim=True), 0).",
        "And put -inf back after logsumexp with torch.where.",
    ),
    "std": ("Use correction=0: x.{op}(correction=0).", "Or skip batches of one."),
    "constant_std": ("Put an eps under the root: x.var(dim).add({eps}).sqrt().",),
    "mean": ("Skip it when nothing is left: x.mean() if x.numel() else x.sum().",),
    "loss": (
        "Sum and divide by the count: loss(..., reduction='sum') / (target != {ignored}).sum().clamp(min=1).",
        "Or skip the batch when no target is left: (target != {ignored}).any().",
        "else: Skip the loss when it is over nothing: loss if x.numel() else x.sum().",
    ),
    "log": (
        "Clamp before the logarithm: torch.{op}(x.clamp(min={log_eps})).",
        "Or take log-probabilities: log_softmax, logsigmoid, binary_cross_entropy_with_logits.",
    ),
    "exp": (
        "Clamp the argument, not the result: torch.{op}(x.clamp(max={exp_max})).",
        "Or subtract the largest first: torch.{op}(x - x.amax(-1, keepdim=True)).",
    ),
    "linalg": ("Add to the diagonal: A + {ridge} * torch.eye(n).", "Or compute it in float64."),
    "spectrum": ("Spread the diagonal: A + torch.diag({ridge} * torch.arange(n)).", "Or compute it in float64."),
    "origin": ("Keep off the origin: torch.where((x == 0) & (y == 0), 1, x) in place of x.",),
    "ctc": ("Use zero_infinity=True in ctc_loss.", "Or drop samples whose target is longer than their input."),
    "weight_norm": ("Give every row of the weight one number that is not 0: weight_v.normal_(0, 0.02).",),
    "variance": ("Reset {divisor}: reset_running_stats(); a variance is not negative.",),
    "eps": ("Use an eps of {lost_eps} or more: {lost_dtype} {lost_how}.",),
    "norm_eps": ("Give the norm an eps: eps=1e-5.",),
    "update": (
        "Give the optimizer eps={lost_eps} or more: {lost_dtype} {lost_how}.",
        "Or keep weights and optimizer state in float32.",
    ),
    "mask": (
        "Mask instead of adding: scores.masked_fill(~keep, torch.finfo(torch.{dtype}).min).",
        "Or use a mask of -1e4.",
    ),
    "cast": (
        "Keep it in {wide}, which holds {size}.",
        "Or multiply by 2**-{bits} before the cast.",
    ),
    "product": (
        "Multiply one operand by 2**-{bits} before {op}.",
        "Or compute it in {wide}, which holds {size}: x.to(torch.{wide}).",
    ),
    "sum": (
        "Sum in {wide}: x.{reduction}(dtype=torch.{wide}).",
        "else: Compute {op} in {wide}, which holds {size}: x.to(torch.{wide}).",
        "Or multiply by 2**-{bits} before {op}.",
    ),
    "squares": (
        "Compute {op} in {wider}: x.to(torch.{wider}).",
        "Or divide by the largest first: m = x.abs().amax(); {op} of x / m, and times m after it.",
    ),
}
_TAKE_DTYPE = ("sum", "nansum", "cumsum", "mean")  # reductions that can be told to work in another dtype
_EPS = {"float16": 1e-4, "bfloat16": 1e-6, "float32": 1e-6, "float64": 1e-12}
_WIDER = {"float16": "float32", "bfloat16": "float32", "float32": "float64"}
_ANGLE = {"bfloat16": 1e-2, "float16": 1e-3, "float32": 1e-6, "float64": 1e-12}  # what 1 - x still shows
_RIDGE = {"float64": 1e-8}


def of(cause: str, e: Evidence | None = None, *special: str) -> tuple[str, ...]:
    """The advice for a cause; `special` names the situation, the evidence gives the numbers."""
    numbers = _numbers(e) if e is not None else {"op": "this op"}
    lines = list(_autocast(cause, e)) if e is not None else []
    for word in special:
        lines += _filled(_SPECIAL.get(word, ()), numbers)
    if len(lines) < 2:
        lines += _filled(_GENERAL.get(cause, ()), numbers, bool(lines))
    if lines and lines[0].startswith("Or "):
        lines[0] = lines[0][3:4].upper() + lines[0][4:]
    return tuple(dict.fromkeys(lines))[:3]


def _filled(lines: tuple[str, ...], numbers: dict[str, str], others: bool = False) -> list[str]:
    """The lines for which all numbers are known; `else: ` marks one that stands only where none before it does."""
    found: list[str] = []
    for line in lines:
        if line.startswith("else: ") and (found or others):
            continue
        try:
            found.append(line.removeprefix("else: ").format_map(numbers))
        except KeyError:
            continue
    return found


def _autocast(cause: str, e: Evidence) -> list[str]:
    if e.autocast is None or cause not in ("overflow", "underflow", "zero_division", "domain"):
        return []
    device = next((t.device for t in e.tensors if t.device), "cpu").split(":")[0]
    way = f"Run {e.op} on x.float() under torch.autocast('{device}', enabled=False)"
    if e.given is None:
        return [f"{way}: x is {e.autocast} by then."]
    return [f"{way}: autocast ran it in {e.autocast}, given {e.given}."]


def _numbers(e: Evidence) -> dict[str, str]:
    """What the lines can be filled with."""
    found: dict[str, str] = {"op": e.forward or e.op}
    dtype = e.dtype or ""
    form = format_of(dtype)
    if form is not None:
        found |= {
            "dtype": dtype,
            "eps": short(_EPS.get(dtype, 1e-4)),
            "log_eps": short(_EPS.get(dtype, 1e-4)) if e.op != "log1p" else f"-1 + {short(_ANGLE.get(dtype, 1e-1))}",
            "step": short(_ANGLE.get(dtype, 1e-1)),
            "ridge": short(_RIDGE.get(dtype, 1e-4)),
            "exp_max": str(math.floor(math.log(form.max) / (math.log(2) if e.op == "exp2" else 1))),
        }
        if found["op"] in _TAKE_DTYPE:
            found["reduction"] = found["op"]
        if dtype in _WIDER:
            found["wider"] = _WIDER[dtype]
        found |= _size(e, form.max)
    return found | _lost(e) | _row(e) | _names(e)


def _size(e: Evidence, largest: float) -> dict[str, str]:
    """How large the result is, what holds it, and by which power of two it must be made smaller."""
    sizes = [abs(s) for s in (e.exact, e.magnitude) if s is not None and math.isfinite(s)]
    if not sizes or max(sizes) == 0:
        return {}
    size = max(sizes)
    found = {"size": fmt(size)}
    wide = next((w for w in ("float32", "float64") if (f := format_of(w)) is not None and size <= f.max), None)
    if wide is not None and wide != e.dtype:
        found["wide"] = wide
    bits = max(1, math.ceil(math.log2(size / largest) + 1e-3))  # a number just beyond the end would be rounded up to it
    found |= {"bits": str(bits), "factor": fmt(2**bits)}
    if e.loss_scale:
        safe = 2.0 ** math.floor(math.log2(largest * e.loss_scale / size))
        found |= {"scale": fmt(safe), "was": fmt(e.loss_scale), "plain_scale": f"{safe:.0f}"}
    return found


def _lost(e: Evidence) -> dict[str, str]:
    form = format_of(e.lost.dtype) if e.lost is not None else None
    if e.lost is None or form is None:
        return {}
    safe = form.eps if e.lost.becomes or e.lost.beside else max(form.smallest_normal, 1e-30)
    value = short(e.lost.value)
    how = f"rounds {value} to {short(e.lost.becomes)}"
    if e.lost.beside is not None:
        how = f"loses {value} beside {short(e.lost.beside)}"
    digits = 10.0 ** math.ceil(math.log10(safe))
    return {"lost_eps": short(digits), "lost_dtype": e.lost.dtype, "lost_how": how}


def _row(e: Evidence) -> dict[str, str]:
    if e.row is None:
        return {}
    found = {"dim": str(e.row.dims[0])} if len(e.row.dims) == 1 else {}
    if e.row.first is not None:
        found["row"] = str(list(e.row.first))
    return found


def _names(e: Evidence) -> dict[str, str]:
    found: dict[str, str] = {}
    if e.where:
        found |= {"index": str(list(e.where)), "sample": str(e.where[0])}
    odd = [(role, value) for role, value in e.scalars.items() if not math.isfinite(value)]
    if odd:
        found["odd"] = f"{odd[0][0]} = {fmt(odd[0][1])}"
    given = e.tensors if e.phase in ("input", "state") or not e.op else e.tensors[:-1]
    infinite = next((t for t in given if t.pos_inf or t.neg_inf), None)
    if infinite is not None:
        found["infinite"] = _called(infinite)
    elif odd and math.isinf(odd[0][1]):
        found["infinite"] = odd[0][0]
    if e.tensors and e.tensors[0].name:
        found["name"] = e.tensors[0].name
    named = next((t.name for t in reversed(e.tensors[:-1]) if t.name), None)
    if named is not None:
        found["divisor"] = named
    below = e.tensors[-2] if len(e.tensors) > 1 else None
    if below is not None and below.min is not None and below.min >= 0:
        found["nonnegative"] = ""
    if "ignore_index" in e.scalars:
        found["ignored"] = f"{e.scalars['ignore_index']:.0f}"
    return found


def _called(t: TensorStats) -> str:
    return t.name or t.role


def short(x: float) -> str:
    """`1e-4`, `0.9999999`: a number as people write it in code."""
    text = repr(int(x) if x == round(x) and abs(x) < 1e6 else x)
    if "e" in text or 0 < abs(x) < 1e-2:
        head, _, power = f"{x:e}".partition("e")
        head = head.rstrip("0").rstrip(".")
        return f"{head}e{int(power)}"
    return text
