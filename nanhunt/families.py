"""Ops by what can go wrong with them. Names are the schema's, without underscores at the ends."""

from __future__ import annotations

import math

# The operand that stands below the line.
DIVIDES = {
    "div": "other", "divide": "other", "true_divide": "other", "reciprocal": "self", "addcdiv": "tensor2",
    "rsqrt": "self", "remainder": "other", "fmod": "other", "floor_divide": "other",
}  # fmt: skip
# Where a logarithm ends.
LOGS = {"log": 0.0, "log2": 0.0, "log10": 0.0, "log1p": -1.0, "xlogy": 0.0, "lgamma": 0.0, "digamma": 0.0}
DOMAINS = {
    "sqrt": (0.0, math.inf), "rsqrt": (0.0, math.inf), "acos": (-1.0, 1.0), "asin": (-1.0, 1.0),
    "atanh": (-1.0, 1.0), "acosh": (1.0, math.inf), "erfinv": (-1.0, 1.0), "logit": (0.0, 1.0),
    "special_ndtri": (0.0, 1.0),
}  # fmt: skip
EXPONENTIALS = {"exp": math.e, "expm1": math.e, "exp2": 2.0, "sinh": math.e, "cosh": math.e}
PRODUCTS = frozenset(
    "mm addmm bmm baddbmm mv addmv dot vdot matmul linear convolution mkldnn_convolution conv2d addbmm addr ger "
    "convolution_backward scaled_mm mkldnn_rnn_layer mul addcmul cumprod prod".split()
)
SUMS = frozenset(
    "sum mean cumsum nansum norm linalg_vector_norm var std var_mean std_mean logcumsumexp logsumexp avg_pool2d "
    "adaptive_avg_pool2d index_add scatter_add scatter_reduce dist cdist cdist_forward".split()
)
SOFTMAX = frozenset("softmax log_softmax safe_softmax masked_softmax".split())
NORMS = frozenset("native_layer_norm native_group_norm native_batch_norm cudnn_batch_norm fused_rms_norm".split())
LOSSES = frozenset(
    "nll_loss_forward nll_loss2d_forward mse_loss smooth_l1_loss huber_loss binary_cross_entropy "
    "soft_margin_loss multi_margin_loss multilabel_margin_loss_forward".split()
)
AVERAGES = frozenset("mean nanmean std var std_mean var_mean".split())
LINALG = (
    "linalg_slogdet", "linalg_det", "linalg_inv", "linalg_solve", "linalg_cholesky", "linalg_eig", "linalg_svd",
    "linalg_lu", "linalg_qr", "linalg_pinv", "logdet", "slogdet", "inverse", "cholesky", "lu_", "triangular_solve",
)  # fmt: skip
CASTS = frozenset("to_copy copy".split())
# Forward ops whose derivative is not defined everywhere, and where not.
SINGULAR = {
    "sqrt": "at 0", "rsqrt": "at 0", "pow": "at 0", "norm": "at the zero vector",
    "linalg_vector_norm": "at the zero vector", "acos": "at -1 and 1", "asin": "at -1 and 1", "acosh": "at 1",
    "atanh": "at -1 and 1", "atan2": "at the origin", "hypot": "at the origin", "logsumexp": "for a row of -inf only",
    "logcumsumexp": "where all before is -inf", "log_softmax": "for a row of -inf only",
    "softmax": "for a row of -inf only", "std": "for a constant input", "std_mean": "for a constant input",
    "linalg_eigh": "for equal eigenvalues", "linalg_eig": "for equal eigenvalues",
    "linalg_svd": "for equal singular values", "log": "at 0", "log2": "at 0", "log10": "at 0", "log1p": "at -1",
    "xlogy": "at 0", "erfinv": "at -1 and 1", "angle": "at 0", "cdist_forward": "for equal points",
    "pdist_forward": "for equal points", "weight_norm_interface": "for a zero row", "logit": "at 0 and 1",
    "digamma": "at 0", "lgamma": "at 0", "linalg_qr": "for a matrix that is rank-deficient",
    "linalg_cholesky_ex": "for a singular matrix", "linalg_inv_ex": "for a singular matrix",
    "linalg_det": "for a singular matrix", "linalg_solve_ex": "for a singular matrix", "prod": "at 0",
}  # fmt: skip
# Ops that are meant to keep a bad value out.
GUARDS = frozenset(("where", "masked_fill"))
# Results that are zero because they were too small, not because a sum was empty.
VANISH = frozenset(("exp", "sigmoid", "softmax", "expm1"))
