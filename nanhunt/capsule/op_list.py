"""The operations that a replay runs by name: arithmetic on the numbers it is given, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ..errors import UsageError

# Left out on purpose: what opens files (from_file), lays views over memory (as_strided, set_, resize_), sizes its
# result by a number alone (full, arange, repeat_interleave), or trusts indices and saved shapes that it is given
# (index_put, the backward of embeddings, pools and norms). Those run in repro.py, a program to be read first.
_OPS = frozenset(
    """
    _cdist_forward _convolution _foreach_abs _foreach_add _foreach_addcdiv _foreach_addcmul
    _foreach_clamp_max _foreach_clamp_min _foreach_div _foreach_exp _foreach_lerp _foreach_log _foreach_maximum
    _foreach_minimum _foreach_mul _foreach_neg _foreach_norm _foreach_pow _foreach_reciprocal _foreach_rsqrt
    _foreach_sqrt _foreach_sub _fused_rms_norm _linalg_det _linalg_eigh _linalg_slogdet _linalg_solve_ex _linalg_svd
    _log_softmax _log_softmax_backward_data _native_batch_norm_legit _pdist_forward _safe_softmax
    _scaled_dot_product_attention_math _scaled_dot_product_flash_attention_for_cpu _softmax
    _softmax_backward_data _to_copy abs acos acosh add addcdiv addcmul addmm addmv addr amax
    amin aminmax asin asinh atan atan2 atanh baddbmm binary_cross_entropy binary_cross_entropy_backward
    binary_cross_entropy_with_logits bmm ceil celu clamp clamp_max clamp_min complex convolution copysign cos cosh
    cross cumprod cumsum deg2rad digamma dist div dot elu elu_backward embedding erf erfc erfinv exp exp2 expm1
    float_power floor floor_divide fmax fmin fmod frac gelu gelu_backward glu glu_backward hardsigmoid
    hardsigmoid_backward hardswish hardswish_backward hardtanh hardtanh_backward huber_loss huber_loss_backward
    hypot i0 index_select inverse kl_div ldexp leaky_relu leaky_relu_backward lerp lgamma linalg_cholesky_ex
    linalg_cross linalg_det linalg_eigh linalg_inv linalg_inv_ex linalg_qr linalg_solve_triangular
    linalg_vector_norm log log10 log1p log2 log_sigmoid_backward log_sigmoid_forward log_softmax logaddexp
    logaddexp2 logcumsumexp logit logit_backward logsumexp matmul max mean median min mish mish_backward
    mkldnn_convolution mm mse_loss mse_loss_backward mul mv nan_to_num nansum native_batch_norm native_group_norm
    native_layer_norm neg nll_loss2d_forward nll_loss_forward norm polar polygamma pow prod rad2deg reciprocal relu
    remainder rms_norm round rsqrt rsub scaled_dot_product_attention sigmoid sigmoid_backward sign silu
    silu_backward sin sinc sinh smooth_l1_loss smooth_l1_loss_backward soft_margin_loss softmax softplus
    softplus_backward softshrink special_entr special_erfcx special_i0e special_i1 special_log_ndtr special_ndtri
    special_xlog1py special_zeta sqrt square std std_mean sub sum tan tanh tanh_backward threshold
    threshold_backward true_divide trunc var var_mean view_as_real where xlogy
    """.split()
)


def op_of(name: Any) -> Any:
    """The op of a name that may come from anybody, such as `aten.div.Tensor`.

    Raises:
        UsageError: for one that is not on the list.
    """
    parts = name.split(".") if isinstance(name, str) else []
    base = parts[1] if len(parts) == 3 and parts[0] == "aten" else ""
    if base not in _OPS and base.removesuffix("_") not in _OPS:
        raise UsageError(
            f"{str(name)[:80]!r} is not among the operations that a replay runs by name: python repro.py runs it, "
            "which is a program, to be read before it is run"
        )
    packet = getattr(torch.ops.aten, base, None)
    overload = parts[2]
    if packet is None or overload not in packet.overloads() or overload.endswith("out") or overload == "out":
        raise UsageError(f"this torch ({torch.__version__}) has no operation {name!r}")
    func = getattr(packet, overload)
    if not any("Tensor" in str(one.type) for one in func._schema.arguments):  # remainder of two ints: SIGFPE
        raise UsageError(f"{name!r} works on no tensor")
    return func


def check(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Refuse operands that a kernel would take on trust, and read memory that is not theirs.

    Raises:
        UsageError: for sizes that do not fit together, and for a number where a dtype is wanted.
    """
    given = dict(zip((one.name for one in func._schema.arguments), args)) | dict(kwargs)
    for name, kind in _WORDS.items():
        for key, value in given.items():
            if key.endswith(name) and not isinstance(value, (kind, type(None))):
                raise UsageError(f"{func} takes a {kind.__name__} as {key}, and not {str(value)[:40]!r}")
    fits = _FITS.get(func._schema.name.removeprefix("aten::").removesuffix("_"))
    if fits is not None and not fits(given):
        raise UsageError(f"the operands of {func} do not fit together")


def _norm(given: Mapping[str, Any]) -> bool:
    """A batch norm reads as many numbers of each weight as its input has channels."""
    channels = given["input"].shape[1:2]
    names = ("weight", "bias", "running_mean", "running_var")
    mean, var = (given.get(name) for name in names[2:])
    return (
        len(channels) == 1
        and all(given.get(name) is None or given[name].shape == channels for name in names)
        and (mean is None) == (var is None)
        and (mean is not None or given.get("training") is True)
    )


def _alike(given: Mapping[str, Any]) -> bool:
    grad, output = given["grad_output"], given["output"]
    return bool(grad.shape == output.shape and grad.dtype is output.dtype)


def _attention(given: Mapping[str, Any]) -> bool:
    query, key, value, mask = (given.get(name) for name in ("query", "key", "value", "attn_mask"))
    assert query is not None and key is not None and value is not None
    if not (query.dim() == key.dim() == 4 and key.shape == value.shape and query.dtype is key.dtype is value.dtype):
        return False
    (batch, heads, long, width), (_, _, wide, _) = query.shape, key.shape
    fits = key.shape == (batch, heads, wide, width)
    if mask is None or not fits:
        return bool(fits)
    sizes = mask.shape[:-2]
    return mask.shape[-2:] == (long, wide) and (not sizes or (len(sizes) == 2 and _spread(sizes, (batch, heads))))


def _spread(sizes: Sequence[int], to: Sequence[int]) -> bool:
    return all(one in (1, there) for one, there in zip(sizes, to))


_WORDS = {"dtype": torch.dtype, "memory_format": torch.memory_format, "layout": torch.layout, "device": torch.device}
# Found by running each op of the list on operands that end where memory may not be read.
_FITS: dict[str, Callable[[Mapping[str, Any]], bool]] = {
    "native_batch_norm": _norm,
    "_native_batch_norm_legit": _norm,
    "_softmax_backward_data": _alike,
    "_log_softmax_backward_data": _alike,
    "_scaled_dot_product_flash_attention_for_cpu": _attention,
}
