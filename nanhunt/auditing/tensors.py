"""Rules for parameters and buffers as they stand: bad numbers, memory nobody wrote, what a format cannot hold.

From huggingface/transformers#18368 (torch.empty never filled), sharif-apu/BJDD_CVPR21#4 (running_var of released
weights holds Inf and NaN), and the largest number of the format that autocast casts to.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from .. import probe
from ..finding import TensorStats
from ..naming import Names
from ..numerics import fmt, headroom_bits
from ..remarks import RISK, Sheet
from .grain import form, name_of, sample

Tensor = torch.Tensor

# Initialisations give numbers near 1, and published weights stay in the hundreds.
_LARGE = 1e4
# A buffer may hold positions, frequencies, the lowest number of a format as a mask: large, but not large and positive.
_LARGE_BUFFER = 1e10
_LARGE_STATISTIC = 1e12
# Memory that held addresses or integers reads as numbers that are tiny (their high bits are zero) and huge by turns.
_HUGE, _TINY = 1e10, 1e-25
_TINY_SHARE = 0.1
_VANISHING = 0.1  # of the nonzero numbers of a weight

_STATISTICS = ("running_mean", "running_var")
_NORMS = (nn.modules.batchnorm._NormBase,)


def look(names: Names, sheet: Sheet, casts: frozenset[torch.dtype]) -> tuple[int, int]:
    """Judge every parameter and buffer, one at a time; `casts` are the dtypes autocast casts to.

    Returns:
        How many parameters and how many buffers there are.
    """
    seen: set[int] = set()
    unread: dict[str, int] = {}
    counts = [0, 0]
    parameters = [(name, names.by_path.get(owner), p, False) for name, owner, p in names.parameters()]
    buffers = [(name, module, module._buffers.get(short), True) for name, (module, short) in names.buffers.items()]
    for name, module, tensor, buffer in (*parameters, *buffers):
        if tensor is None or id(tensor) in seen:
            continue
        seen.add(id(tensor))
        counts[buffer] += 1
        if is_lazy(tensor) or tensor.device.type == "meta":
            why = "not made yet (lazy)" if is_lazy(tensor) else "on the meta device"
            unread[why] = unread.get(why, 0) + 1
        elif (numbers := probe.payload(tensor)) is not None:
            _judge(name, module, tensor, numbers, buffer, sheet, casts)
    for why, count in unread.items():
        sheet.unseen.append(f"the numbers of {count} parameters and buffers {why}")
    return counts[0], counts[1]


def _judge(
    name: str,
    module: nn.Module | None,
    tensor: Tensor,
    numbers: Tensor,
    buffer: bool,
    sheet: Sheet,
    casts: frozenset[torch.dtype],
) -> None:
    low, high = probe.limits(numbers)
    short = name.rpartition(".")[2]
    statistic = buffer and short in _STATISTICS and isinstance(module, _NORMS)
    if buffer and not statistic and short in getattr(module, "_non_persistent_buffers_set", ()):
        return  # a cache, which may be memory that is written to before it is read
    if probe.bad(low, high):
        _bad(name, tensor, buffer, statistic, sheet)
        return
    if statistic and short == "running_var" and low < 0:
        sheet.add(
            "nonfinite",
            name,
            f"{name} ({name_of(tensor.dtype)}) holds {fmt(low)}: a variance below zero, whose root is NaN in eval().",
            "reset the statistics with reset_running_stats(), or load a sound checkpoint.",
        )
    if _uninitialised(name, tensor, sheet):
        return
    size = max(abs(low), abs(high))
    told = not buffer and _outside(name, module, tensor, size, sheet, casts)
    if not told:
        _large(name, tensor, buffer, statistic, (low, high), sheet)


def _bad(name: str, tensor: Tensor, buffer: bool, statistic: bool, sheet: Sheet) -> None:
    row = probe.stats(tensor, "buffer" if buffer else "parameter", name)
    if buffer and not statistic and not row.nan:
        return  # an observer's range, a mask, a best score: an infinity that is meant
    reason = "an average over bad activations" if statistic else "torch.empty that nobody filled, a broken checkpoint"
    sheet.add(
        "nonfinite",
        name,
        f"{name} ({_notation(row)}) holds {_kinds(row)} of {fmt(row.numel)} numbers{_first(row)}, before any step.",
        f"fill it before training ({reason}, or an earlier bad step, leave this behind).",
    )


def _notation(row: TensorStats) -> str:
    return f"{row.dtype}{list(row.shape or ())}"


def _kinds(row: TensorStats) -> str:
    counts = ((row.nan, "NaN"), (row.pos_inf, "+Inf"), (row.neg_inf, "-Inf"))
    return ", ".join(f"{fmt(n)} {kind}" for n, kind in counts if n)


def _first(row: TensorStats) -> str:
    return f", first at {list(row.first_bad)}" if row.first_bad is not None else ""


def _uninitialised(name: str, tensor: Tensor, sheet: Sheet) -> bool:
    known = form(tensor.dtype)
    if known is None or known.smallest_normal > _TINY or not tensor.is_floating_point():
        return False  # float16 is too narrow for the signs of it
    some = sample(tensor)
    if some is None:
        return False
    sizes = some[some != 0].double().abs()
    if sizes.numel() < 2:
        return False
    subnormal = int((sizes < known.smallest_normal).sum())
    huge, tiny = int((sizes > _HUGE).sum()), int((sizes < _TINY).sum())
    if subnormal < _TINY_SHARE * sizes.numel() and not (huge and tiny):
        return False
    sheet.add(
        "uninitialised",
        name,
        f"{name} ({name_of(tensor.dtype)}{list(tensor.shape)}): its nonzero numbers go from {fmt(float(sizes.min()))} "
        f"to {fmt(float(sizes.max()))}, and {subnormal / sizes.numel():.0%} are subnormal. So reads memory that "
        "torch.empty gave and nobody wrote to, or a weight that has decayed to nothing.",
        "fill it in the constructor (nn.init), or check what was loaded into it.",
        severity=RISK,
    )
    return True


def _outside(
    name: str, module: nn.Module | None, tensor: Tensor, size: float, sheet: Sheet, casts: frozenset[torch.dtype]
) -> bool:
    """Weights that autocast casts down: of matrices and kernels, not of embeddings, norms and biases."""
    own = form(tensor.dtype)
    if tensor.dim() < 2 or own is None or isinstance(module, (nn.Embedding, nn.EmbeddingBag)) or tensor.is_complex():
        return False
    for dtype in casts:
        target = form(dtype)
        if target is None or target.bits >= own.bits:
            continue
        if size >= target.max * (1 + target.eps / 4):
            sheet.add(
                "weight_overflow",
                name,
                f"{name} ({name_of(tensor.dtype)}) holds {fmt(size)}: autocast casts it to {target.name}, which ends "
                f"at {fmt(target.max)}, and it becomes Inf.",
                "rescale it, run its module in float32 (torch.autocast(..., enabled=False)), or use bfloat16.",
            )
            return True
        some = sample(tensor)
        nonzero = some[some != 0] if some is not None else None
        if nonzero is not None and nonzero.numel():
            share = float((nonzero.to(dtype) == 0).double().mean())
            if share >= _VANISHING:
                sheet.add(
                    "weight_underflow",
                    name,
                    f"{name}: {share:.0%} of its nonzero numbers (the largest is {fmt(size)}) become 0 when autocast "
                    f"casts them to {target.name}, whose smallest is {fmt(target.smallest_subnormal)}.",
                    "fold a factor into the layer so that its weights are near 1, or use bfloat16.",
                    severity=RISK,
                )
    return False


def _large(name: str, tensor: Tensor, buffer: bool, statistic: bool, limits: tuple[float, float], sheet: Sheet) -> None:
    low, high = limits
    size = max(abs(low), abs(high))
    limit = _LARGE_STATISTIC if statistic else _LARGE_BUFFER if buffer else _LARGE
    if buffer and not statistic and high <= limit:  # a mask is large below zero only
        return
    if size < limit or not tensor.is_floating_point():
        return
    room = headroom_bits(size, "float16")
    holds = "" if room is None or room >= 0 else ", more than float16 can hold"
    sheet.add(
        "large",
        name,
        f"{name} ({name_of(tensor.dtype)}{list(tensor.shape)}) holds {fmt(size)}{holds}: "
        f"no usual initialisation gives such numbers ({fmt(limit)} and more count as large here).",
        "look at how it is made or loaded: a unit, an unscaled input, a checkpoint of a run that diverged.",
        severity=RISK,
    )
