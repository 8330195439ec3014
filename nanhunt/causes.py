"""Why a bad value was made: one word of a closed list, a sentence with the numbers, and what to do."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from . import advice
from .evidence_record import Evidence
from .numerics import Format, bits_over, fmt, format_of

# The closed list: every word a report can give, and what it says.
CAUSES: dict[str, str] = {
    "overflow": "a result from finite operands is larger than the dtype can hold",
    "underflow": "an eps, a probability or a product was rounded to zero, and that zero was divided by or logged",
    "zero_division": "a division by an exact zero: an empty count, a constant column, a zero norm",
    "domain": "log, sqrt, pow, acos, atanh ... of a number they are not defined for",
    "inf_arithmetic": "Inf - Inf, 0 * Inf or Inf / Inf: an Inf that was there became NaN",
    "masked_row": "softmax over a row in which everything is masked with -inf",
    "empty_reduction": "mean, std or a loss over nothing, or std over one number",
    "singular_gradient": "the forward value is fine, its derivative is not defined there: sqrt at 0, acos at 1",
    "bad_input": "the batch held NaN or Inf when it came in",
    "bad_parameter": "a parameter held NaN or Inf before the step",
    "bad_buffer": "a buffer held NaN or Inf before the step",
    "uninitialised": "memory that nobody had written was read",
    "literal": "a NaN or Inf that the program itself wrote down as a number",
    "loss_scale": "a gradient overflows with this loss scale and fits without it",
    "optimizer": "the update itself: a learning rate or another of its numbers is not finite",
    "collective": "it came from another process",
    "unknown": "nothing that is known fits",
}


@dataclass(frozen=True, slots=True)
class Verdict:
    cause: str
    why: str
    advice: tuple[str, ...]


# Ops by what can go wrong with them. Names are the schema's, without underscores at the ends.
_DIVIDES = {  # the operand that stands below the line
    "div": "other", "divide": "other", "true_divide": "other", "reciprocal": "self", "addcdiv": "tensor2",
    "rsqrt": "self", "remainder": "other", "fmod": "other", "floor_divide": "other",
}  # fmt: skip
_LOGS = {
    "log": 0.0,
    "log2": 0.0,
    "log10": 0.0,
    "log1p": -1.0,
    "xlogy": 0.0,
    "special_entr": 0.0,
    "lgamma": 0.0,
    "digamma": 0.0,
}
_DOMAINS = {
    "sqrt": (0.0, math.inf), "rsqrt": (0.0, math.inf), "acos": (-1.0, 1.0), "asin": (-1.0, 1.0),
    "atanh": (-1.0, 1.0), "acosh": (1.0, math.inf), "erfinv": (-1.0, 1.0), "logit": (0.0, 1.0),
    "special_ndtri": (0.0, 1.0),
}  # fmt: skip
_EXPONENTIALS = {"exp": math.e, "expm1": math.e, "exp2": 2.0, "sinh": math.e, "cosh": math.e}
_PRODUCTS = frozenset(
    "mm addmm bmm baddbmm mv addmv dot vdot matmul linear convolution mkldnn_convolution conv2d addbmm addr ger "
    "convolution_backward scaled_mm einsum mkldnn_rnn_layer".split()
)
_SUMS = frozenset(
    "sum mean cumsum nansum norm linalg_vector_norm var std var_mean std_mean prod cumprod logcumsumexp logsumexp "
    "avg_pool2d adaptive_avg_pool2d index_add scatter_add scatter_reduce foreach_norm dist cdist".split()
)
_SOFTMAX = frozenset(
    "softmax log_softmax safe_softmax masked_softmax softmax_backward_data log_softmax_backward_data".split()
)
_NORMS = frozenset(
    "native_layer_norm native_group_norm native_batch_norm batch_norm_impl fused_rms_norm rms_norm".split()
)
_LOSSES = frozenset(
    "nll_loss_forward nll_loss2d_forward nll_loss nll_loss2d mse_loss smooth_l1_loss huber_loss binary_cross_entropy "
    "binary_cross_entropy_with_logits cross_entropy_loss soft_margin_loss multi_margin_loss".split()
)
_AVERAGES = frozenset("mean std var std_mean var_mean nanmean native_dropout".split())
_LINALG = ("linalg_", "logdet", "slogdet", "det", "inverse", "cholesky", "eigh", "svd", "lu_", "triangular_solve")
_CASTS = frozenset("to_copy copy half autocast_to_reduced_precision convert_element_type".split())
_SINGULAR = {  # forward ops whose derivative is not defined everywhere, and where
    "sqrt": "0", "rsqrt": "0", "pow": "0", "norm": "the zero vector", "linalg_vector_norm": "the zero vector",
    "acos": "±1", "asin": "±1", "acosh": "1", "atanh": "±1", "atan2": "the origin", "hypot": "the origin",
    "logsumexp": "a row of -inf only", "logcumsumexp": "-inf", "log_softmax": "a row of -inf only",
    "softmax": "a row of -inf only", "std": "a constant input", "std_mean": "a constant input",
    "linalg_eigh": "equal eigenvalues", "linalg_eig": "equal eigenvalues", "linalg_svd": "equal singular values",
    "log": "0", "log2": "0", "log10": "0", "log1p": "-1", "xlogy": "0", "erfinv": "±1", "angle": "0",
    "linalg_matrix_norm": "the zero matrix", "cdist_forward": "equal points", "pdist_forward": "equal points",
    "weight_norm_interface": "a zero row", "logit": "0 or 1", "digamma": "0", "lgamma": "0", "linalg_qr": "a rank-deficient matrix",
    "linalg_cholesky_ex": "a singular matrix", "linalg_inv_ex": "a singular matrix", "linalg_det": "a singular matrix",
    "prod": "0", "cumprod": "0", "sinc": "0",
}  # fmt: skip


def explain(e: Evidence | None, cause: str | None, tensor: str, kind: str) -> Verdict:
    """The verdict on a birth. `cause` is set where the birth itself says it: a literal, a bad weight."""
    if e is None:
        return Verdict(cause or "unknown", f"{tensor} is {kind}; nothing more is known.", advice.of("unknown"))
    given = _GIVEN.get(cause or "")
    if given is not None:
        return given(e, cause or "", tensor)
    for rule in (_optimizer, _accumulated, _backward, _forward):
        verdict = rule(e)
        if verdict is not None:
            return verdict
    return Verdict("unknown", f"{_op(e)} gave {_many(e)} from {_operands(e)}.", advice.of("unknown"))


# --- phrases ---------------------------------------------------------------------------------------------------


def _op(e: Evidence) -> str:
    return f"the derivative of {e.forward}" if e.forward else e.op


def _many(e: Evidence) -> str:
    """`nan in 3 of 12 numbers, first at [0, 2]`."""
    kind = " and ".join(e.kinds)
    if e.bad is None or e.of is None:
        return kind
    if e.of == 1:
        return kind
    first = f", first at {list(e.where)}" if e.where is not None else ""
    return f"{kind} in {fmt(e.bad)} of {fmt(e.of)} numbers{first}"


def _operands(e: Evidence) -> str:
    parts = [f"{role} = {fmt(value)}" for role, value in e.at.items()]
    if not parts:
        parts = [f"{t.role} within {fmt(t.min)} .. {fmt(t.max)}" for t in e.tensors[:-1] if t.absmax is not None]
    return ", ".join(parts[:4]) or "its operands"


def _form(e: Evidence) -> Format | None:
    return format_of(e.dtype)


def _limit(e: Evidence) -> str:
    form = _form(e)
    return f"{e.dtype} ends at {fmt(form.max)}" if form is not None else f"{e.dtype} can't hold it"


def _would_be(e: Evidence) -> str:
    """`in float64 it would be 71 280, 0.12 bits over the 65 504 of float16`."""
    size = e.exact if e.exact is not None and math.isfinite(e.exact) else e.magnitude
    over = bits_over(size, e.dtype) if size is not None else None
    form = _form(e)
    if size is None or over is None or form is None:
        return _limit(e)
    if over <= 0:
        return f"the result, {fmt(size)}, would fit {e.dtype}, a step on the way to it does not"
    return f"the exact result is {fmt(size)}, {over:.2g} bits over the {fmt(form.max)} of {e.dtype}"


def _autocast(e: Evidence) -> str:
    if e.autocast is None:
        return ""
    return f" The operands are {e.given}; autocast computes this op in {e.autocast}."


def _lost(e: Evidence) -> str:
    lost = e.lost
    if lost is None:
        return ""
    at = f" ({lost.site[0].rsplit('/', 1)[-1]}:{lost.site[1]})" if lost.site is not None else ""
    if lost.value == 0:
        return f"{lost.op} has eps = 0"
    if lost.beside is not None:
        return f"the {fmt(lost.value)} given to {lost.op}{at} is swallowed beside {fmt(lost.beside)} in {lost.dtype}"
    shown = repr(lost.value) if lost.becomes else fmt(lost.value)
    return f"the {shown} given to {lost.op}{at} is {fmt(lost.becomes)} in {lost.dtype}"


def _verdict(cause: str, e: Evidence, why: str, *extra: str) -> Verdict:
    return Verdict(cause, why + _autocast(e), advice.of(cause, e, *extra))


def _has(e: Evidence, value: float) -> bool:
    """Whether an operand holds `value` behind the first bad number, or anywhere when that is not known."""
    return value in e.at.values()


def _largest(e: Evidence) -> float:
    sizes = [t.absmax for t in e.tensors[:-1] if t.absmax is not None]
    return max(sizes, default=0.0)


# --- what the birth itself says ------------------------------------------------------------------------------------


def _state(e: Evidence, cause: str, tensor: str) -> Verdict:
    what = {"bad_input": "the batch", "bad_parameter": "the parameter", "bad_buffer": "the buffer"}.get(cause, "")
    name = tensor if cause != "bad_input" or tensor != "batch" else "a tensor"
    of = f"{_many(e)}" if e.tensors else " and ".join(e.kinds)
    if cause == "bad_input":
        why = f"{name} that came in from outside held {of} already; no module is to blame."
    else:
        why = f"{what} {tensor} held {of} before the step; this op is the first to read it."
    return Verdict(cause, why, advice.of(cause, e))


def _unwritten(e: Evidence, cause: str, tensor: str) -> Verdict:
    why = f"memory from torch.empty was read before all of it was written: {_many(e)}."
    return Verdict(cause, why, advice.of(cause, e))


def _received(e: Evidence, cause: str, tensor: str) -> Verdict:
    return Verdict(cause, f"{_many(e)} came in from another process.", advice.of(cause, e))


def _written_down(e: Evidence, cause: str, tensor: str) -> Verdict:
    numbers = ", ".join(f"{k} = {fmt(v)}" for k, v in e.scalars.items() if not math.isfinite(v))
    return Verdict(cause, f"{e.op} was given {numbers or e.kinds[0]} as a number: {_many(e)}.", advice.of(cause, e))


_GIVEN: dict[str, Callable[[Evidence, str, str], Verdict]] = {
    "bad_input": _state, "bad_parameter": _state, "bad_buffer": _state, "uninitialised": _unwritten,
    "collective": _received, "literal": _written_down,
}  # fmt: skip


# --- optimizer and accumulation -------------------------------------------------------------------------------------


def _optimizer(e: Evidence) -> Verdict | None:
    if e.phase != "optimizer":
        return None
    odd = {role: value for role, value in e.scalars.items() if not math.isfinite(value)}
    if odd:
        given = ", ".join(f"{role} = {fmt(value)}" for role, value in odd.items())
        why = f"{e.op} of the update was given {given}: the learning rate, or a number made from it, is not finite."
        return _verdict("optimizer", e, why)
    return None


def _accumulated(e: Evidence) -> Verdict | None:
    if e.phase != "backward" or e.forward is not None or e.op != "add" or e.user_code:
        return None
    parts = " and ".join(fmt(v) for v in e.at.values()) or "finite parts"
    return _verdict(
        "overflow", e, f"each gradient is finite ({parts}), their sum is not: {_would_be(e)}.", "accumulate"
    )


# --- backward -------------------------------------------------------------------------------------------------------


def _backward(e: Evidence) -> Verdict | None:
    if e.phase != "backward" or e.forward is None:
        return None
    below = _DIVIDES.get(e.op)
    at = e.at.get(below) if below else None
    singular = at == 0 or (e.op == "pow" and e.at.get("self") == 0) or (e.op in _LOGS and _has(e, 0.0))
    singular = singular or (e.op in ("sub", "exp", "mul") and e.inherited and e.forward in _SINGULAR)
    singular = singular or (e.forward.startswith("linalg_") and not _too_large(e))
    if singular and e.forward in ("div", "reciprocal", "true_divide"):
        if "where" in e.absorbed_by or "masked_fill" in e.absorbed_by:
            return _verdict("singular_gradient", e, f"{_trap(e)} the divisor is 0 there: {_many(e)}.", "where")
        zeros = "0 / 0 was made in forward and thrown away there; " if e.absorbed_by else ""
        return _verdict(
            "zero_division", e, f"{zeros}the derivative of {e.forward} divides by the same zero: {_many(e)}."
        )
    if singular:
        point = _SINGULAR.get(e.forward, "this point")
        grad = "; the gradient that came back there is 0, and 0 * inf is NaN" if "nan" in e.kinds else ""
        trap = f" {_trap(e)}" if e.absorbed_by else ""
        lost = f" {_lost(e)}." if e.lost is not None else ""
        why = f"the derivative of {e.forward} is not defined at {point}{grad}: {_many(e)}.{trap}{lost}"
        return _verdict("singular_gradient", e, why, e.forward)
    if e.inherited and "nan" in e.kinds:
        return _verdict("inf_arithmetic", e, f"{_op(e)} met an Inf ({_operands(e)}): {_many(e)}.")
    if _finite_operands(e):
        if e.loss_scale and _fits_unscaled(e):
            why = (
                f"{_op(e)}: {_would_be(e)}. Without the loss scale of {fmt(e.loss_scale)} it would be "
                f"{fmt((e.exact or e.magnitude or 0) / e.loss_scale)}."
            )
            return _verdict("loss_scale", e, why)
        if "nan" not in e.kinds or _too_large(e) or e.op in _PRODUCTS:
            return _verdict("overflow", e, f"{_op(e)} left the range: {_would_be(e)} ({_many(e)}).", "gradient")
    return None


def _trap(e: Evidence) -> str:
    return f"{', '.join(e.absorbed_by[:2])} throws the value away in forward, but its gradient is still computed:"


def _finite_operands(e: Evidence) -> bool:
    return not e.inherited


def _fits_unscaled(e: Evidence) -> bool:
    size = e.exact if e.exact is not None and math.isfinite(e.exact) else e.magnitude
    form = _form(e)
    if size is None or form is None or not e.loss_scale:
        return False
    return max(abs(size), e.magnitude or 0.0) / e.loss_scale <= form.max


def _too_large(e: Evidence) -> bool:
    """Whether float64 gives a finite number that the dtype can't hold, or can't get to."""
    form = _form(e)
    size = e.exact if e.exact is not None and math.isfinite(e.exact) else e.magnitude
    if size is not None and form is not None:
        return abs(size) > form.max or _largest(e) ** 2 > form.max
    return e.exact is None and e.kinds[0] != "nan"


# --- forward (and the arithmetic of an update) ---------------------------------------------------------------------


def _forward(e: Evidence) -> Verdict | None:
    for rule in (_row_rule, _divided, _logged, _domain, _empty, _normed, _inf_rule, _exponential, _cast, _large, _last):
        verdict = rule(e)
        if verdict is not None:
            return verdict
    return None


def _row_rule(e: Evidence) -> Verdict | None:
    if e.row is None or "nan" not in e.kinds:
        return None
    if e.row.pos_inf and e.op in _SOFTMAX:
        return _verdict("inf_arithmetic", e, f"{e.op}: {fmt(e.row.pos_inf)} rows hold a +inf, and inf - inf is NaN.")
    if e.row.all_neg_inf:
        why = f"{e.op}: {fmt(e.row.all_neg_inf)} of {fmt(e.row.rows)} rows hold nothing but -inf ({e.row.length} numbers each): {_many(e)}."
        return _verdict("masked_row", e, why)
    return None


def _divided(e: Evidence) -> Verdict | None:
    role = _DIVIDES.get(e.op)
    if e.op == "pow" and e.at.get("self") == 0 and _exponent(e) < 0:
        role = "self"
    if role is None:
        return None
    below, above = e.at.get(role, e.scalars.get(role)), e.at.get("self", e.scalars.get("self"))
    if e.op == "addcdiv":
        above = e.at.get("tensor1")
    if below != 0:
        return None
    top = "1" if e.op in ("reciprocal", "rsqrt", "pow") else fmt(above)
    name = next((t.name for t in e.tensors if t.role == role and t.name), None)
    what = f"{top} / 0: {_many(e)}."
    if e.lost is not None:
        return _verdict("underflow", e, f"{what} The zero is an eps that was rounded away: {_lost(e)}.", "eps")
    if role in e.whole and _zeros(e, role) != _numel(e, role):
        return _verdict(
            "zero_division",
            e,
            f"{what} {_zeros_of(e, role, name)} and all are whole numbers: a count of nothing.",
            "count",
        )
    return _verdict("zero_division", e, f"{what} {_zeros_of(e, role, name)}.", "constant" if name else "divisor")


def _zeros(e: Evidence, role: str) -> int | None:
    return next((t.zero for t in e.tensors if t.role == role), None)


def _numel(e: Evidence, role: str) -> int | None:
    return next((t.numel for t in e.tensors if t.role == role), None)


def _zeros_of(e: Evidence, role: str, name: str | None) -> str:
    zeros, numel = _zeros(e, role), _numel(e, role)
    if zeros is None or numel is None:
        return f"The divisor{f' ({name})' if name else ''} is 0"
    return f"The divisor{f' ({name})' if name else ''} is 0 in {fmt(zeros)} of {fmt(numel)} places"


def _exponent(e: Evidence) -> float:
    return e.at.get("exponent", e.scalars.get("exponent", math.nan))


def _logged(e: Evidence) -> Verdict | None:
    if e.op not in _LOGS or e.op in ("lgamma", "digamma") and "nan" in e.kinds:
        return None
    edge = _LOGS[e.op]
    values = [v for v in e.at.values() if v <= edge]
    if not values:
        return None
    if values[0] == edge and e.lost is not None:
        return _verdict("underflow", e, f"{e.op} of {fmt(edge)}: {_many(e)}; {_lost(e)}.", "eps")
    word = (
        "negative" if values[0] < edge and edge == 0 else "not defined" if values[0] < edge else "exactly at the edge"
    )
    return _verdict("domain", e, f"{e.op} of {fmt(values[0])} ({word}): {_many(e)}.", "log")


def _domain(e: Evidence) -> Verdict | None:
    if e.op in _DOMAINS:
        lo, hi = _DOMAINS[e.op]
        value = e.at.get("self")
        if value is not None and (not lo <= value <= hi or (value in (lo, hi) and e.op not in ("sqrt", "rsqrt"))):
            beyond = min(abs(value - lo), abs(value - hi))
            edge = "exactly the edge" if beyond == 0 else f"{fmt(beyond)} outside"
            why = f"{e.op} of {fmt(value)}: it is defined from {fmt(lo)} to {fmt(hi)}, this is {edge} ({_many(e)})."
            return _verdict("domain", e, why, e.op)
    if e.op == "pow" and "nan" in e.kinds and (e.at.get("self") or 0) < 0:
        why = f"{fmt(e.at['self'])} to the power of {fmt(_exponent(e))} is not a real number: {_many(e)}."
        return _verdict("domain", e, why, "pow")
    if e.op.startswith(_LINALG) and not (e.inherited or _largest(e) > 1e18):
        return _verdict(
            "domain", e, f"{e.op} of a matrix that is singular or not what it needs to be: {_many(e)}.", "linalg"
        )
    if e.op.endswith("ctc_loss"):
        why = f"{e.op}: no alignment exists; a target (with the blanks between repeats) is longer than its input."
        return _verdict("domain", e, why, "ctc")
    return None


def _empty(e: Evidence) -> Verdict | None:
    if "nan" not in e.kinds or e.inherited:
        return None
    if e.op in _AVERAGES and e.count is not None and (e.count == 0 or (e.count == 1 and e.op != "mean")):
        why = f"{e.op} over {e.count} number{'' if e.count == 1 else 's'} is not defined"
        why += " (the unbiased form divides by n - 1 = 0)." if e.count == 1 else "."
        return _verdict("empty_reduction", e, why, "std" if e.count == 1 else "mean")
    if e.op in _AVERAGES and e.tensors and e.tensors[0].numel == 0:
        return _verdict("empty_reduction", e, f"{e.op} over no numbers is not defined.", "mean")
    if e.op in _LOSSES and _largest(e) < 1e30:
        why = f"{e.op} is an average over no elements: every target is ignored, or there are none."
        return _verdict("empty_reduction", e, why, "loss")
    return None


def _normed(e: Evidence) -> Verdict | None:
    if e.op == "weight_norm_interface" and not e.inherited:
        return _verdict("zero_division", e, f"g * v / ||v|| with a row of v that is zero: {_many(e)}.", "weight_norm")
    if e.op not in _NORMS or e.inherited or "nan" not in e.kinds:
        return None
    var = next((t for t in e.tensors if t.role == "running_var" and t.min is not None and t.min < 0), None)
    if var is not None and e.scalars.get("eps", 0.0) + (var.min or 0.0) < 0:
        return _verdict("domain", e, f"{e.op}: {var.name or 'running_var'} is negative ({fmt(var.min)}).", "sqrt")
    if _largest(e) > 1e18:
        return _verdict("overflow", e, f"{e.op}: the squares of {fmt(_largest(e))} leave {e.dtype}.")
    eps = fmt(e.scalars.get("eps", 0.0))
    return _verdict(
        "zero_division", e, f"{e.op} of a constant row: variance 0 and eps = {eps}, 0 / 0 ({_many(e)}).", "eps"
    )


def _inf_rule(e: Evidence) -> Verdict | None:
    if e.inherited and "nan" in e.kinds:
        return _verdict(
            "inf_arithmetic", e, f"{e.op} met an Inf ({_operands(e)}), and {_form_of_inf(e)} is NaN: {_many(e)}."
        )
    return None


def _form_of_inf(e: Evidence) -> str:
    if e.op in ("mul", "mm", "bmm", "addmm", "addcmul", "dot"):
        return "0 * inf" if _has(e, 0.0) or not e.at else "inf times what it met"
    return {"div": "inf / inf", "sub": "inf - inf", "add": "inf - inf"}.get(e.op, "what it makes of it")


def _exponential(e: Evidence) -> Verdict | None:
    base, form = _EXPONENTIALS.get(e.op), _form(e)
    if base is None or form is None:
        return None
    value, limit = e.at.get("self"), math.log(form.max) / math.log(base)
    why = f"{e.op} of {fmt(value)}: {e.dtype} holds {e.op}(x) up to x = {limit:.2f} ({_many(e)})."
    return _verdict("overflow", e, why, "exp")


def _cast(e: Evidence) -> Verdict | None:
    if e.op not in _CASTS:
        return None
    value = next(iter(e.at.values()), None)
    size = value if value is not None and math.isfinite(value) else e.magnitude
    over = bits_over(size, e.dtype) if size else None
    by = f", {over:.2g} bits" if over is not None and over > 0 else ""
    why = f"{fmt(size)} was cast to {e.dtype}, which ends at {fmt(_form(e).max if _form(e) else None)}{by}: {_many(e)}."
    return _verdict("overflow", e, why, "cast")


def _large(e: Evidence) -> Verdict | None:
    if e.inherited:
        return None
    if e.scaling:
        return _verdict("loss_scale", e, f"the loss times the loss scale left the range: {_would_be(e)}.")
    infinite = "nan" not in e.kinds
    if infinite or (e.op in _PRODUCTS | _SUMS and (_too_large(e) or e.exact is None)) or _too_large(e):
        what = "a sum on the way left the range" if not infinite else "left the range"
        return _verdict("overflow", e, f"{e.op} {what}: {_would_be(e)} ({_operands(e)}; {_many(e)}).", _family(e))
    return None


def _family(e: Evidence) -> str:
    return "product" if e.op in _PRODUCTS else "sum" if e.op in _SUMS else "mask" if _masks(e) else "range"


def _masks(e: Evidence) -> bool:
    """An add of the dtype's own lowest number: a mask made of finfo.min."""
    form = _form(e)
    return e.op in ("add", "sub") and form is not None and any(abs(v) >= 0.9 * form.max for v in e.at.values())


def _last(e: Evidence) -> Verdict | None:
    if e.inherited:
        return None
    if e.exact is not None and math.isfinite(e.exact):
        return _verdict(
            "underflow",
            e,
            f"{e.op}: float64 gives {fmt(e.exact)}; on the way {e.dtype} rounds to zero ({_many(e)}).",
            "eps",
        )
    if "nan" in e.kinds:
        return _verdict("domain", e, f"{e.op} is not defined for {_operands(e)}: {_many(e)}.")
    return None
