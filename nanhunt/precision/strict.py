"""A run that really is float32: casts to less that the code makes by itself are left out."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

_WIDTH = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}  # bits of a significand
for _name, _bits in {"float8_e4m3fn": 4, "float8_e4m3fnuz": 4, "float8_e5m2": 3, "float8_e5m2fnuz": 3}.items():
    if hasattr(torch, _name):
        _WIDTH[getattr(torch, _name)] = _bits


class Strict(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Nothing is computed in a format with fewer digits than `floor`.

    A reference in which one module rounds in secret would round in both runs, and the comparison would miss it. So
    `x.half()`, `x.to(torch.bfloat16)`, `dtype=` of a factory and autocast's own casts give `floor` here, and what is
    lower by birth (a constant, a batch) is read in `floor`. A tensor that is written to keeps its dtype.
    """

    def __init__(self, floor: torch.dtype) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._floor = floor

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        with self:  # inference mode hands over ops that others have taken apart before, such as `to`
            whole = func.decompose(*args, **kwargs)
        if whole is not NotImplemented:
            return whole
        if func is torch.ops.aten._scaled_mm.default:  # takes float8 only, of which there is none here
            return self._product(*args, **kwargs)
        if self._below(kwargs.get("dtype")):
            kwargs["dtype"] = self._floor
        schema = func._schema
        aliases = any(a.alias_info is not None for a in schema.arguments)
        if not aliases:
            args, kwargs = pytree.tree_map_only(torch.Tensor, self._raised, (args, kwargs))
        elif schema.is_mutable:
            args = tuple(
                arg
                if i < len(schema.arguments) and schema.arguments[i].alias_info is not None
                else pytree.tree_map_only(torch.Tensor, self._raised, arg)
                for i, arg in enumerate(args)
            )
        return func(*args, **kwargs)

    def _product(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        by_a: torch.Tensor,
        by_b: torch.Tensor,
        bias: Any = None,
        *_: Any,
        **__: Any,
    ) -> torch.Tensor:
        """A scaled product as what it stands for; the scales are single numbers, or one for each row and column."""
        out = (a.to(self._floor) * by_a.to(self._floor)) @ (b.to(self._floor) * by_b.to(self._floor))
        return out if bias is None else out + bias.to(self._floor)

    def _below(self, dtype: Any) -> bool:
        return _WIDTH.get(dtype, 99) < _WIDTH[self._floor]

    def _raised(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self._floor) if self._below(tensor.dtype) else tensor


class Tape(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The random numbers of one run, for the others: those of another dtype or kernel would be other numbers.

    The first run records; after `rewind` each run draws as it would, and is given what was recorded. A fused kernel
    that keeps its draws to itself is let through.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._drawn: list[tuple[str, torch.Tensor]] = []
        self._at = -1  # recording
        self.lost = False  # a later run has drawn otherwise

    def rewind(self) -> None:
        self._at = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return out
        dropout = func is torch.ops.aten.native_dropout.default
        drawn = out[1] if dropout else out
        if not isinstance(drawn, torch.Tensor) or drawn.is_meta:
            return out
        before = self._next(str(func), drawn)
        if before is None:
            return out
        drawn.copy_(before)
        if not dropout:
            return out
        share = float(args[1])
        kept = 0.0 if share >= 1 else 1 / (1 - share)
        return args[0] * drawn * kept, drawn

    def _next(self, name: str, drawn: torch.Tensor) -> torch.Tensor | None:
        """What was recorded in this place; None while recording, and where the runs do not go together."""
        if self._at < 0:
            yes_or_no = "bernoulli" in name
            self._drawn.append((name, drawn.bool() if yes_or_no else drawn.clone()))
            return None
        known = self._drawn[self._at] if self._at < len(self._drawn) else ("", drawn)
        self._at += 1
        if known[0] != name or known[1].shape != drawn.shape:
            self.lost = True
            return None
        return known[1]


class Sums(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Tells `met(dtype, length, product)` of what adds up many numbers: matrix products, and reductions."""

    _PRODUCTS = frozenset(
        f"aten::{name}"
        for name in (
            "mm addmm bmm baddbmm addbmm mv addmv dot linear matmul convolution _convolution mkldnn_convolution "
            "_scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_for_cpu "
            "_scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention "
            "_scaled_dot_product_fused_attention_overrideable mkldnn_rnn_layer _cudnn_rnn _thnn_fused_lstm_cell"
        ).split()
    )

    # What adds up along a dimension and gives as many numbers as it reads.
    _ALONG = (
        "aten::_softmax",
        "aten::_log_softmax",
        "aten::native_",
        "aten::_native_batch_norm",
        "aten::_fused_rms_norm",
        "aten::cum",
        "aten::logcumsumexp",
    )

    def __init__(self, met: Callable[[torch.dtype, int, bool], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._met = met

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        first = out[0] if isinstance(out, (tuple, list)) and out else out
        if isinstance(first, torch.Tensor) and first.is_floating_point() and first.numel():
            read = [arg for arg in args if isinstance(arg, torch.Tensor)]
            if func._schema.name in self._PRODUCTS:
                self._met(first.dtype, _product_length(read, first), True)
            elif any(func._schema.name.startswith(name) for name in self._ALONG):
                self._met(first.dtype, first.shape[-1] if first.dim() else 1, False)
            elif (most := max((tensor.numel() for tensor in read), default=0)) > first.numel() and not any(
                argument.alias_info for argument in func._schema.arguments
            ):
                self._met(first.dtype, most // first.numel(), False)
        return out


def _product_length(read: list[torch.Tensor], out: torch.Tensor) -> int:
    """How many products go into a number: from what is read, twice, and what is given, as for (n, k) by (k, m)."""
    sizes = sorted((tensor.numel() for tensor in read), reverse=True)[:2]
    if len(sizes) < 2:
        return 1
    # n * k times k * m, by n * m, is k * k; a batch of products, and a convolution, come to less or more than that.
    return max(1, *(t.shape[-1] for t in read if t.dim()), math.isqrt(sizes[0] * sizes[1] // out.numel()))
