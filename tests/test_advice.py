# ruff: noqa: E501  a table of cases reads better in long rows
"""Advice is followed to the letter: what it says is applied, with its numbers, and the same step is finite."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import nanhunt
from nanhunt import advice
from nanhunt.causes import CAUSES
from nanhunt.evidence import Evidence

nan, inf = math.nan, math.inf
pytestmark = pytest.mark.filterwarnings("ignore:.*degrees of freedom.*")


def f16(*numbers: float) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float16)


def f32(*numbers: float) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float32)


def bf16(*numbers: float) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.bfloat16)


class Code(nn.Module):
    """A model whose forward is the function it is given; `w` is 1 and trained."""

    def __init__(self, code: Callable[..., Any], dtype: torch.dtype, buffers: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones((), dtype=dtype))
        for name, value in buffers.items():
            self.register_buffer(name, value.clone())
        self.code = code

    def forward(self, x: torch.Tensor) -> Any:
        return self.code(self, x)


@dataclass
class Case:
    """`bad(m, x)` fails with `cause`; `good` is what one line of the advice says; `uses` is the number in it."""

    cause: str
    bad: Callable[..., Any]
    good: Callable[..., Any]
    x: torch.Tensor
    uses: str
    phase: str = "forward"
    autocast: torch.dtype | None = None
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    good_x: torch.Tensor | None = None
    good_buffers: dict[str, torch.Tensor] | None = None
    scale: tuple[float, float] = (1.0, 1.0)  # of the loss: before, and as advised


def step(
    code: Callable[..., Any], x: torch.Tensor, buffers: dict[str, torch.Tensor], autocast: Any, scale: float
) -> Any:
    """One watched step: what was found, and all numbers that came out of it."""
    torch.manual_seed(0)
    dtype = x.dtype if x.is_floating_point() else torch.float32
    model = Code(code, dtype, buffers)
    with nanhunt.watch(model, detail="op", on_hit="record") as hunt:
        with torch.autocast("cpu", dtype=autocast or torch.bfloat16, enabled=autocast is not None):
            out = model(x)
        loss = out if out.dim() == 0 else out.sum()
        if loss.requires_grad:
            (loss if scale == 1.0 else loss.float() * scale).backward()
    assert hunt.errors == []
    values = [out.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]
    return hunt.finding, values


def shown(text: str) -> str:
    return re.sub(r"\(\w+\.py:\d+\)", "(file.py:N)", text)


def plain_normalize(m: Code, x: torch.Tensor) -> torch.Tensor:
    return F.normalize(x * m.w, dim=-1)


def log_of_one_minus(eps: float) -> Callable[..., torch.Tensor]:
    return lambda m, x: torch.log(1 - (x * m.w).sigmoid().clamp(eps, 1 - eps))


def root_where(inner: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., torch.Tensor]:
    def code(m: Code, x: torch.Tensor) -> torch.Tensor:
        y = x * m.w
        return torch.where(y > 0, inner(y), y)

    return code


def wide_softmax(m: Code, x: torch.Tensor) -> torch.Tensor:
    return (x * m.w).softmax(-1)


def unmasked(x: torch.Tensor) -> torch.Tensor:
    return x.masked_fill(x.isneginf().all(-1, keepdim=True), 0)


def outside(code: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Under `torch.autocast('cpu', enabled=False)`, in float32."""

    def run(m: Code, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            return code(m, x.float())

    return run


def ctc(**options: Any) -> Callable[..., torch.Tensor]:
    return lambda m, x: F.ctc_loss(
        (x * m.w).log_softmax(-1), torch.tensor([[1, 1, 2, 2]]), torch.tensor([3]), torch.tensor([4]), **options
    )


class SendBack(torch.autograd.Function):
    """Hands a gradient of the given size back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, size: float) -> torch.Tensor:
        ctx.size = size
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad * ctx.size, None


ones, zeros = torch.ones, torch.zeros
CASES: dict[str, Case] = {
    # -- overflow
    "exp-float32": Case("overflow", lambda m, x: torch.exp(x * m.w), lambda m, x: torch.exp((x * m.w).clamp(max=88)), f32(1, 95), "88"),
    "exp-float16": Case("overflow", lambda m, x: torch.exp(x * m.w), lambda m, x: torch.exp((x * m.w).clamp(max=11)), f16(1, 12), "max=11"),
    "exp-softmax-by-hand": Case("overflow", lambda m, x: torch.exp(x * m.w), lambda m, x: torch.exp(x * m.w - (x * m.w).amax(-1, keepdim=True)), f32(1, 95), "x.amax(-1, keepdim=True)"),
    "exp-where": Case("overflow", lambda m, x: torch.where(x < 50, torch.exp(x * m.w), 0.0), lambda m, x: torch.where(x < 50, torch.exp((x * m.w).clamp(max=88)), 0.0), f32(1, 95), "max=88"),
    "mul-float16": Case("overflow", lambda m, x: (x * m.w) * 400, lambda m, x: (x * m.w * 2**-1) * 400, f16(200, 1), "2**-1 "),
    "mm-float16": Case("overflow", lambda m, x: (x * m.w) @ x.T, lambda m, x: (x * m.w * 2**-4) @ x.T, f16(700, 700).reshape(1, 2), "2**-4 "),
    "mm-in-float32": Case("overflow", lambda m, x: (x * m.w) @ x.T * 1e-4, lambda m, x: (x * m.w).float() @ x.T.float() * 1e-4, f16(700, 700).reshape(1, 2), "torch.float32"),
    "mm-autocast": Case("overflow", lambda m, x: (x * m.w) @ x.T, outside(lambda m, x: (x * m.w) @ x.T), f32(300, 300).reshape(1, 2), "torch.autocast('cpu', enabled=False)", autocast=torch.float16),
    "exp-autocast": Case("overflow", lambda m, x: torch.exp(F.linear(x * m.w, m.k)) * 1e-4, lambda m, x: outside(lambda m, y: torch.exp(y) * 1e-4)(m, F.linear(x * m.w, m.k)), f32(15, 1).reshape(2, 1), "x is float16 by then", autocast=torch.float16, buffers={"k": ones(1, 1)}),
    "sum-float16": Case("overflow", lambda m, x: (x * m.w).sum() * 1e-3, lambda m, x: (x * m.w).sum(dtype=torch.float32) * 1e-3, torch.full((64,), 2e3).half(), "float32"),
    "square-float32": Case("overflow", lambda m, x: (x * m.w) ** 2 * 1e-9, lambda m, x: (x * m.w).double() ** 2 * 1e-9, f32(1e20), "float64"),
    "norm-float16": Case("overflow", lambda m, x: torch.linalg.vector_norm(x * m.w) * 1e-3, lambda m, x: torch.linalg.vector_norm((x * m.w).float()) * 1e-3, f16(6e4, 6e4), "float32"),
    "cast-float16": Case("overflow", lambda m, x: (x * m.w).half(), lambda m, x: (x * m.w * 2**-2).half(), f32(2e5), "2**-2 "),
    "mask-float16": Case("overflow", lambda m, x: (x * m.w + torch.tensor([-65504.0, -65504.0]).half()).softmax(-1), lambda m, x: (x * m.w).masked_fill(torch.tensor([True, True]), torch.finfo(torch.float16).min).softmax(-1), f16(-100, -100), "torch.finfo(torch.float16).min"),
    "gradient-float16": Case("overflow", lambda m, x: ((x * m.w).float() * 6e4).half().float() * 6e4, lambda m, x: ((x * m.w).float() * 6e4).half().float() * 6e4, f16(1), "65 536", phase="backward", scale=(1.0, 1.0 / 65536)),
    # -- underflow
    "normalize-float16": Case("underflow", plain_normalize, lambda m, x: F.normalize(x * m.w, dim=-1, eps=1e-4), f16(0, 0), "1e-4"),
    "log-clamp-float16": Case("underflow", log_of_one_minus(1e-7), log_of_one_minus(1e-3), f16(20), "1e-3"),
    "quotient-float16": Case("underflow", lambda m, x: x / (x * m.w + 1e-10), lambda m, x: x / (x * m.w + 1e-4), f16(0, 1), "1e-4"),
    "quotient-bfloat16": Case("underflow", lambda m, x: torch.log(1 + 1e-4 - (x * m.w)), lambda m, x: torch.log(1.01 - (x * m.w)), bf16(1, 0.5), "0.01"),
    # -- zero_division
    "count": Case("zero_division", lambda m, x: x.sum(1) * m.w / m.n, lambda m, x: x.sum(1) * m.w / m.n.clamp(min=1), zeros(3, 2), "clamp(min=1)", buffers={"n": f32(3, 0, 1)}),
    "constant-column": Case("zero_division", lambda m, x: (x * m.w) / m.std, lambda m, x: (x * m.w) / torch.where(m.std == 0, 1, m.std), ones(2, 3), "torch.where(std == 0, 1, std)", buffers={"std": f32(0.5, 0.0, 0.1)}),
    "divisor": Case("zero_division", lambda m, x: x / (x * m.w * 0.5), lambda m, x: x / (x * m.w * 0.5).clamp(min=1e-6), f32(0, 1.5), "1e-6"),
    "divisor-signed": Case("zero_division", lambda m, x: 1 / (x * m.w * 0.5), lambda m, x: (lambda d: torch.where(d.abs() < 1e-6, 1e-6, d))(x * m.w * 0.5).reciprocal(), f32(0, -1.5), "1e-6"),
    "rsqrt-float16": Case("zero_division", lambda m, x: (x * m.w).rsqrt(), lambda m, x: (x * m.w).clamp(min=1e-4).rsqrt(), f16(0, 4.5), "1e-4"),
    "rsqrt-float32": Case("zero_division", lambda m, x: (x * m.w).rsqrt(), lambda m, x: (x * m.w).clamp(min=1e-6).rsqrt(), f32(0, 4.5), "1e-6"),
    "layer-norm-eps-0": Case("zero_division", lambda m, x: F.layer_norm(x * m.w, (4,), eps=0.0), lambda m, x: F.layer_norm(x * m.w, (4,), eps=1e-5), ones(2, 4), "1e-5"),
    # -- domain
    "log": Case("domain", lambda m, x: torch.log(x * m.w), lambda m, x: torch.log((x * m.w).clamp(min=1e-6)), f32(0, 1), "1e-6"),
    "log-float16": Case("domain", lambda m, x: torch.log(x * m.w), lambda m, x: torch.log((x * m.w).clamp(min=1e-4)), f16(-1, 1), "1e-4"),
    "log1p": Case("domain", lambda m, x: torch.log1p(x * m.w), lambda m, x: torch.log1p((x * m.w).clamp(min=-1 + 1e-6)), f32(-1, 1), "-1 + 1e-6"),
    "sqrt": Case("domain", lambda m, x: torch.sqrt(x * m.w), lambda m, x: torch.sqrt((x * m.w).clamp(min=1e-6)), f32(-0.25, 1), "1e-6"),
    "acos": Case("domain", lambda m, x: torch.acos(x * m.w), lambda m, x: torch.acos((x * m.w).clamp(-1 + 1e-6, 1 - 1e-6)), f32(1.5, 0), "1e-6"),
    "atanh-float16": Case("domain", lambda m, x: torch.atanh(x * m.w), lambda m, x: torch.atanh((x * m.w).clamp(-1 + 1e-3, 1 - 1e-3)), f16(1, 0), "1e-3"),
    "acosh": Case("domain", lambda m, x: torch.acosh(x * m.w), lambda m, x: torch.acosh((x * m.w).clamp(min=1 + 1e-6)), f32(0.5, 2), "1e-6"),
    "logit": Case("domain", lambda m, x: torch.logit(x * m.w), lambda m, x: torch.logit(x * m.w, eps=1e-6), f32(1, 0.5), "1e-6"),
    "pow": Case("domain", lambda m, x: (x * m.w) ** 0.5, lambda m, x: (x * m.w).clamp(min=1e-6) ** 0.5, f32(-2), "1e-6"),
    "logdet": Case("domain", lambda m, x: torch.logdet(x * m.w), lambda m, x: torch.logdet(x * m.w + 1e-4 * torch.eye(2)), ones(2, 2), "1e-4"),
    "ctc": Case("domain", ctc(), ctc(zero_infinity=True), zeros(3, 1, 5), "zero_infinity=True"),
    "negative-variance": Case("domain", lambda m, x: F.batch_norm(x * m.w, m.mean, m.var), lambda m, x: F.batch_norm(x * m.w, m.mean, m.var), ones(2, 3), "var", buffers={"mean": zeros(3), "var": f32(1, -1, 1)}, good_buffers={"mean": zeros(3), "var": ones(3)}),
    # -- inf_arithmetic
    "zero-times-inf": Case("inf_arithmetic", lambda m, x: x * m.w * m.mask, lambda m, x: x * m.w * m.mask.nan_to_num(posinf=1e4, neginf=-1e4), f32(0, 1), "mask", buffers={"mask": f32(-inf, 1)}),
    "inf-minus-inf": Case("inf_arithmetic", lambda m, x: x * m.w - m.top, lambda m, x: x.nan_to_num(posinf=1e4, neginf=-1e4) * m.w - m.top, f32(inf, 1), "posinf=1e4", buffers={"top": f32(inf, 1)}, good_buffers={"top": f32(1e4, 1)}),
    "mask-after": Case("inf_arithmetic", lambda m, x: (x * m.w).masked_fill(x == 0, -inf) * x, lambda m, x: (x * m.w * x).masked_fill(x == 0, -inf).softmax(-1), f32(0, 1), "after mul, not before it"),
    # -- masked_row
    "masked-row": Case("masked_row", lambda m, x: (x * m.w).masked_fill(x > 0, -inf).softmax(-1), lambda m, x: unmasked((x * m.w).masked_fill(x > 0, -inf)).softmax(-1), torch.tensor([[0.0, 1.0], [1.0, 1.0]]), "the first such row is [1]"),
    "masked-row-float16": Case("masked_row", lambda m, x: (x * m.w).masked_fill(x > 0, -inf).log_softmax(-1).exp(), lambda m, x: (x * m.w).masked_fill(x > 0, -inf)[:1].softmax(-1), torch.tensor([[0.0, 1.0], [1.0, 1.0]]).half(), "skip rows that are padding only"),
    # -- empty_reduction
    "std-of-one": Case("empty_reduction", lambda m, x: (x * m.w).std(), lambda m, x: (x * m.w).std(correction=0), ones(1), "correction=0"),
    "var-of-one": Case("empty_reduction", lambda m, x: (x * m.w).var(0), lambda m, x: (x * m.w).var(0, correction=0), ones(1, 3), "x.var(correction=0)"),
    "mean-of-none": Case("empty_reduction", lambda m, x: (x * m.w)[x > 2].mean(), lambda m, x: (lambda y: y.mean() if y.numel() else y.sum())((x * m.w)[x > 2]), ones(3), "x.mean() if x.numel() else x.sum()"),
    "all-ignored": Case("empty_reduction", lambda m, x: F.cross_entropy(x * m.w, torch.tensor([-100, -100])), lambda m, x: F.cross_entropy(x * m.w, torch.tensor([-100, -100]), reduction="sum") / (torch.tensor([-100, -100]) != -100).sum().clamp(min=1), ones(2, 3), "-100"),
    "mse-of-none": Case("empty_reduction", lambda m, x: F.mse_loss((x * m.w)[x > 2], x[x > 2]), lambda m, x: (lambda y: F.mse_loss(y, x[x > 2]) if y.numel() else y.sum())((x * m.w)[x > 2]), ones(3), "loss if x.numel() else x.sum()"),
    # -- singular_gradient
    "sqrt-at-0": Case("singular_gradient", lambda m, x: torch.sqrt(x * m.w), lambda m, x: torch.sqrt((x * m.w).clamp(min=1e-6)), f32(0, 1), "1e-6", phase="backward"),
    "sqrt-at-0-float16": Case("singular_gradient", lambda m, x: torch.sqrt(x * m.w), lambda m, x: torch.sqrt((x * m.w).clamp(min=1e-4)), f16(0, 1), "1e-4", phase="backward"),
    "sqrt-where": Case("singular_gradient", root_where(torch.sqrt), root_where(lambda y: torch.sqrt(y.clamp(min=1e-6))), f32(0, 1), "1e-6", phase="backward"),
    "acos-at-1": Case("singular_gradient", lambda m, x: torch.acos(x * m.w), lambda m, x: torch.acos((x * m.w).clamp(-1 + 1e-6, 1 - 1e-6)), f32(1, 0), "1e-6", phase="backward"),
    "pow-at-0": Case("singular_gradient", lambda m, x: (x * m.w) ** 0.5, lambda m, x: (x * m.w).clamp(min=1e-6) ** 0.5, f32(0, 1), "1e-6", phase="backward"),
    "division-where": Case("singular_gradient", lambda m, x: torch.where(x > 0, x / (x * m.w), 0.0), lambda m, x: torch.where(x > 0, x / torch.where(x * m.w == 0, 1, x * m.w), 0.0), f32(0, 1), "torch.where(d == 0, 1, d)", phase="backward"),
    "eigenvalues": Case("singular_gradient", lambda m, x: torch.linalg.eigh(x * m.w)[1], lambda m, x: torch.linalg.eigh(x * m.w + torch.diag(1e-4 * torch.arange(2)))[1], torch.eye(2), "1e-4", phase="backward"),
    "hypot": Case("singular_gradient", lambda m, x: torch.hypot(x * m.w, x * m.w), lambda m, x: torch.hypot(torch.where(x == 0, 1, x * m.w), x * m.w), f32(0, 1), "torch.where((x == 0) & (y == 0), 1, x)", phase="backward"),
    # -- what came in
    "bad-input": Case("bad_input", lambda m, x: x * m.w, lambda m, x: x * m.w, torch.tensor([[1.0], [nan], [2.0]]), "sample 1 ", phase="input", good_x=torch.tensor([[1.0], [2.0]])),
    "bad-input-float16": Case("bad_input", lambda m, x: x * m.w, lambda m, x: x * m.w, f16(1, 2, nan), "sample 2 ", phase="input", good_x=f16(1, 2)),
    "bad-buffer": Case("bad_buffer", lambda m, x: x * m.w - m.mean, lambda m, x: x * m.w - m.mean, ones(2), "Reset mean", phase="state", buffers={"mean": f32(0, nan)}, good_buffers={"mean": zeros(2)}),
    "bad-buffer-bfloat16": Case("bad_buffer", lambda m, x: x * m.w - m.mean, lambda m, x: x * m.w - m.mean, ones(2).bfloat16(), "Reset mean", phase="state", buffers={"mean": bf16(0, nan)}, good_buffers={"mean": bf16(0, 0)}),
    # -- literal
    "nan-fill": Case("literal", lambda m, x: (x * m.w).masked_fill(x > 0, nan), lambda m, x: (x * m.w).masked_fill(x > 0, 0.0), ones(2), "value = nan"),
    "nan-factor": Case("literal", lambda m, x: x * m.w * nan, lambda m, x: x * m.w * 1.0, ones(2).half(), "other = nan"),
    # -- loss_scale
    "loss-scale": Case("loss_scale", lambda m, x: (x * m.w).float(), lambda m, x: (x * m.w).float(), f16(1), "32 768", phase="backward", scale=(2.0**18, 2.0**15)),
    "loss-scale-small": Case("loss_scale", lambda m, x: (x * m.w).float() * 1000, lambda m, x: (x * m.w).float() * 1000, f16(1), "init_scale=64", phase="backward", scale=(2.0**10, 64.0)),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_advice_that_is_followed_cures_the_step(name: str) -> None:
    """The cause is found, its advice holds the number that the cure uses, and the cured step is finite."""
    case = CASES[name]
    found, _ = step(case.bad, case.x, case.buffers, case.autocast, case.scale[0])
    assert found is not None
    assert (found.cause, found.phase) == (case.cause, case.phase), found.why
    assert case.uses in " ".join(found.advice), found.advice
    x = case.x if case.good_x is None else case.good_x
    buffers = case.buffers if case.good_buffers is None else case.good_buffers
    again, values = step(case.good, x, buffers, case.autocast, case.scale[1])
    assert again is None, str(again)
    if name != "mask-after":
        assert all(bool(torch.isfinite(v).all()) for v in values), values


# -- what a step of one module can't show -----------------------------------------------------------------------


def train(
    model: nn.Module,
    x: torch.Tensor,
    optimizer: torch.optim.Optimizer,
    *,
    before: Any = None,
    micro: int = 1,
    divide: float = 1.0,
) -> Any:
    """A whole training step, of one or more micro-batches."""
    with nanhunt.watch(model, optimizer, detail="op", on_hit="record") as hunt:
        for _ in range(micro):
            (model(x).float().sum() / divide).backward()
        if before is not None:
            before()
        optimizer.step()
    assert hunt.errors == []
    return hunt.finding


def linear(dtype: torch.dtype = torch.float32, bad: tuple[int, int] | None = None) -> nn.Linear:
    torch.manual_seed(0)
    model = nn.Linear(2, 2).to(dtype)
    if bad is not None:
        with torch.no_grad():
            model.weight[bad] = nan
    return model


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> Callable[[], None]:
    return lambda: optimizer.param_groups[0].__setitem__("lr", rate)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_parameter_that_is_initialised_anew(dtype: torch.dtype) -> None:
    model, x = linear(dtype, bad=(1, 0)), ones(1, 2, dtype=dtype)
    found = train(model, x, torch.optim.SGD(model.parameters(), 0.1))
    assert found.cause == "bad_parameter"
    assert found.advice == (
        "Load a good checkpoint or initialise weight anew: its first bad number stands at [1, 0].",
        "If training made it, watch the step before: the fault lies there.",
    )
    again = linear(dtype, bad=(1, 0))
    again.reset_parameters()
    assert train(again, x, torch.optim.SGD(again.parameters(), 0.1)) is None


@pytest.mark.parametrize(("rate", "shows"), [(nan, "nan"), (inf, "inf")])
def test_a_learning_rate_that_is_made_finite(rate: float, shows: str) -> None:
    model, x = linear(), ones(1, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    found = train(model, x, optimizer, before=set_rate(optimizer, rate))
    assert (found.cause, found.phase) == ("optimizer", "optimizer")
    assert found.advice[0].startswith("Set the learning rate to a finite number: the update was given alpha = ")
    assert shows in found.advice[0]
    assert found.advice[1] == "Look for 0 / 0 in the schedule, such as a warm-up over 0 steps: divide by max(1, steps)."
    again = linear()
    optimizer = torch.optim.SGD(again.parameters(), 0.1)
    assert train(again, x, optimizer, before=set_rate(optimizer, 0.1)) is None


@pytest.mark.parametrize("adam", [torch.optim.Adam, torch.optim.AdamW])
def test_an_eps_of_the_optimizer_that_float16_holds(adam: Any) -> None:
    """Where no gradient came, 0 / (0 + eps) is NaN once eps is 0."""
    x = f16(1, 0).reshape(1, 2)
    model = linear(torch.float16)
    found = train(model, x, adam(model.parameters(), 0.01, foreach=False))
    assert (found.cause, found.phase) == ("underflow", "optimizer")
    assert found.advice == (
        "Give the optimizer eps=1e-4 or more: float16 rounds 1e-8 to 0.",
        "Or keep weights and optimizer state in float32.",
    )
    again = linear(torch.float16)
    assert train(again, x, adam(again.parameters(), 0.01, foreach=False, eps=1e-4)) is None
    wide = linear()
    assert train(wide, x.float(), adam(wide.parameters(), 0.01, foreach=False)) is None


@pytest.mark.parametrize("micro", [2, 4])
def test_losses_that_are_divided_by_the_number_of_micro_batches(micro: int) -> None:
    model, x = linear(torch.float16), f16(4e4, 1).reshape(1, 2)
    with torch.no_grad():
        model.weight.fill_(0.1)
    found = train(model, x, torch.optim.SGD(model.parameters(), 1e-5), micro=micro)
    assert (found.op, found.cause) == ("AccumulateGrad", "overflow")
    assert found.advice == (
        "Divide each loss by the number of micro-batches; here by 2 or more.",
        "Or accumulate the gradients in float32.",
    )
    again = linear(torch.float16)
    assert train(again, x, torch.optim.SGD(again.parameters(), 1e-5), micro=micro, divide=micro) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_that_is_written_before_it_is_read(dtype: torch.dtype) -> None:
    def run(make: Callable[..., torch.Tensor]) -> Any:
        model = linear(dtype)
        with nanhunt.watch(model, detail="op", on_hit="record") as hunt:
            fresh = make(1, 2, dtype=dtype)
            if make is torch.empty:  # what may stand in it
                fresh.untyped_storage().copy_(torch.full((1, 2), nan, dtype=dtype).untyped_storage())
            model(fresh * 1).sum().backward()
        return hunt.finding

    found = run(torch.empty)
    assert found.cause == "uninitialised"
    assert found.advice == ("Use torch.zeros for torch.empty, or write all of it before it is read.",)
    assert run(torch.zeros) is None


# -- the texts --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_texts(name: str) -> None:
    """Why and advice, word for word."""
    case = CASES[name]
    found, _ = step(case.bad, case.x, case.buffers, case.autocast, case.scale[0])
    assert found is not None
    assert (shown(found.why), found.advice) == TEXTS[name]


def test_every_cause_has_two_cures_that_were_tried() -> None:
    """Except for what another process sent, and for what nobody understands."""
    elsewhere = {"bad_parameter", "optimizer", "uninitialised", "collective", "unknown"}  # in tests of their own
    count = {word: sum(case.cause == word for case in CASES.values()) for word in CAUSES}
    assert {word for word, n in count.items() if n < 2} == elsewhere


LINES = [line for lines in (*advice._GENERAL.values(), *advice._SPECIAL.values()) for line in lines]


@pytest.mark.parametrize("line", LINES)
def test_every_line_is_a_short_sentence(line: str) -> None:
    text = re.sub(r"\{\w+\}", "1e-6", line.removeprefix("else: "))
    assert len(text) <= 110
    assert text[0].isupper() or text.startswith("1e-6")
    assert text.endswith(".")


def test_a_line_without_its_number_is_left_out() -> None:
    """No number is made up, and no line ends up with a hole."""
    e = Evidence(op="mm", phase="forward", kinds=("+inf",))
    for word in CAUSES:
        for special in advice._SPECIAL:
            for lines in (advice.of(word), advice.of(word, e), advice.of(word, e, special)):
                assert 1 <= len(lines) <= 3
                assert not any("{" in line or "None" in line or line.startswith(("else", "or ")) for line in lines)
                assert not lines[0].startswith("Or ")


TEXTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "exp-float32": (
        "exp of 95: float32 holds exp(x) up to x = 88.72 (+inf in 1 of 2 numbers, first at [1]).",
        (
            "Clamp the argument, not the result: torch.exp(x.clamp(max=88)).",
            "Or subtract the largest first: torch.exp(x - x.amax(-1, keepdim=True)).",
        ),
    ),
    "exp-float16": (
        "exp of 12: float16 holds exp(x) up to x = 11.09 (+inf in 1 of 2 numbers, first at [1]).",
        (
            "Clamp the argument, not the result: torch.exp(x.clamp(max=11)).",
            "Or subtract the largest first: torch.exp(x - x.amax(-1, keepdim=True)).",
        ),
    ),
    "exp-softmax-by-hand": (
        "exp of 95: float32 holds exp(x) up to x = 88.72 (+inf in 1 of 2 numbers, first at [1]).",
        (
            "Clamp the argument, not the result: torch.exp(x.clamp(max=88)).",
            "Or subtract the largest first: torch.exp(x - x.amax(-1, keepdim=True)).",
        ),
    ),
    "exp-where": (
        "exp of 95: float32 holds exp(x) up to x = 88.72 (+inf in 1 of 2 numbers, first at [1]). In forward the value is thrown away by where; its gradient is computed all the same.",
        (
            "Clamp the argument, not the result: torch.exp(x.clamp(max=88)).",
            "Or subtract the largest first: torch.exp(x - x.amax(-1, keepdim=True)).",
        ),
    ),
    "mul-float16": (
        "mul left the range: the exact result is 80 000, 0.29 bits over the 65 504 of float16 (self = 200; +inf in 1 of 2 numbers, first at [0]).",
        (
            "Multiply one operand by 2**-1 before mul.",
            "Or compute it in float32, which holds 80 000: x.to(torch.float32).",
        ),
    ),
    "mm-float16": (
        "mm left the range: the exact result is 980 000, 3.9 bits over the 65 504 of float16 (self within 700 .. 700, x within 700 .. 700; +inf).",
        (
            "Multiply one operand by 2**-4 before mm.",
            "Or compute it in float32, which holds 980 000: x.to(torch.float32).",
        ),
    ),
    "mm-in-float32": (
        "mm left the range: the exact result is 980 000, 3.9 bits over the 65 504 of float16 (self within 700 .. 700, x within 700 .. 700; +inf).",
        (
            "Multiply one operand by 2**-4 before mm.",
            "Or compute it in float32, which holds 980 000: x.to(torch.float32).",
        ),
    ),
    "mm-autocast": (
        "mm left the range: the exact result is 180 000, 1.5 bits over the 65 504 of float16 (self within 300 .. 300, mat2 within 300 .. 300; +inf). The operands are float32; autocast computes this op in float16.",
        (
            "Run mm on x.float() under torch.autocast('cpu', enabled=False): autocast ran it in float16, given float32.",
            "Multiply one operand by 2**-2 before mm.",
            "Or compute it in float32, which holds 180 000: x.to(torch.float32).",
        ),
    ),
    "exp-autocast": (
        "exp of 15: float16 holds exp(x) up to x = 11.09 (+inf in 1 of 2 numbers, first at [0, 0]). Autocast is on, and the operands are float16 by now.",
        (
            "Run exp on x.float() under torch.autocast('cpu', enabled=False): x is float16 by then.",
            "Clamp the argument, not the result: torch.exp(x.clamp(max=11)).",
            "Or subtract the largest first: torch.exp(x - x.amax(-1, keepdim=True)).",
        ),
    ),
    "sum-float16": (
        "sum left the range: the exact result is 128 000, 0.97 bits over the 65 504 of float16 (self within 2 000 .. 2 000; +inf).",
        (
            "Sum in float32: x.sum(dtype=torch.float32).",
            "Or multiply by 2**-1 before sum.",
        ),
    ),
    "square-float32": (
        "pow left the range: the exact result is 1e+40, 4.9 bits over the 3.4e+38 of float32 (self = 1e+20; +inf).",
        (
            "Compute it in float64, which holds 1e+40: x.to(torch.float64).",
            "Keep the operands of pow small: normalise or clamp them before it.",
        ),
    ),
    "norm-float16": (
        "linalg_vector_norm left the range: the exact result is 84 853, 0.37 bits over the 65 504 of float16 (self within 60 000 .. 60 000; +inf).",
        (
            "Compute linalg_vector_norm in float32: x.to(torch.float32).",
            "Or divide by the largest first: m = x.abs().amax(); linalg_vector_norm of x / m, and times m after it.",
        ),
    ),
    "cast-float16": (
        "200 000 was cast to float16, which ends at 65 504, 1.6 bits below: +inf.",
        (
            "Keep it in float32, which holds 200 000.",
            "Or multiply by 2**-2 before the cast.",
        ),
    ),
    "mask-float16": (
        "add left the range: the exact result is -65 604, 0.0022 bits over the 65 504 of float16 (self = -100, other = -65 504; -inf in 2 of 2 numbers, first at [0]).",
        (
            "Mask instead of adding: scores.masked_fill(~keep, torch.finfo(torch.float16).min).",
            "Or use a mask of -1e4.",
        ),
    ),
    "gradient-float16": (
        "The derivative of to_copy left the range: the exact result is 3.6e+09, 16 bits over the 65 504 of float16 (+inf).",
        (
            "Divide the loss by 65 536 before backward, and multiply the gradients by it in float32.",
            "Or compute this layer in float32, which holds 3.6e+09.",
            "Clipping does not help: the gradient overflows before it could be clipped.",
        ),
    ),
    "normalize-float16": (
        "0 / 0: nan in 2 of 2 numbers, first at [0]. The zero is an eps that was rounded away: the 1e-12 given to clamp_min (file.py:N) is 0 in float16.",
        (
            "Use an eps of 1e-4 or more: float16 rounds 1e-12 to 0.",
            "Compute this line in float32: x.to(torch.float32).",
        ),
    ),
    "log-clamp-float16": (
        "log of 0: -inf; the 0.9999999 given to clamp (file.py:N) is 1 in float16.",
        (
            "Use an eps of 1e-3 or more: float16 rounds 0.9999999 to 1.",
            "Compute this line in float32: x.to(torch.float32).",
        ),
    ),
    "quotient-float16": (
        "0 / 0: nan in 1 of 2 numbers, first at [0]. The zero is an eps that was rounded away: the 1e-10 given to add (file.py:N) is 0 in float16.",
        (
            "Use an eps of 1e-4 or more: float16 rounds 1e-10 to 0.",
            "Compute this line in float32: x.to(torch.float32).",
        ),
    ),
    "quotient-bfloat16": (
        "log of 0: -inf in 1 of 2 numbers, first at [0]; the 1.0001 given to rsub (file.py:N) is 1 in bfloat16.",
        (
            "Use an eps of 0.01 or more: bfloat16 rounds 1.0001 to 1.",
            "Compute this line in float32: x.to(torch.float32).",
        ),
    ),
    "count": (
        "0 / 0: nan in 1 of 3 numbers, first at [1]. The divisor (n) is 0 in 1 of 3 places and all are whole numbers: a count of nothing.",
        (
            "Divide by count.clamp(min=1).",
            "Or skip what is empty: keep the rows with count > 0.",
        ),
    ),
    "constant-column": (
        "1 / 0: +inf in 2 of 6 numbers, first at [0, 1]. The divisor (std) is 0 in 1 of 3 places.",
        (
            "Replace the zeros of std by 1: torch.where(std == 0, 1, std).",
            "Or leave out the columns that are constant: they carry nothing.",
        ),
    ),
    "divisor": (
        "0 / 0: nan in 1 of 2 numbers, first at [0]. The divisor is 0 in 1 of 2 places.",
        ("Clamp the divisor, which is nowhere negative: x / d.clamp(min=1e-6).",),
    ),
    "divisor-signed": (
        "1 / 0: +inf in 1 of 2 numbers, first at [0]. The divisor is 0 in 1 of 2 places.",
        ("Keep it away from 0 before it: torch.where(x.abs() < 1e-6, 1e-6, x).reciprocal().",),
    ),
    "rsqrt-float16": (
        "1 / 0: +inf in 1 of 2 numbers, first at [0]. The divisor is 0 in 1 of 2 places.",
        ("Clamp before it: x.clamp(min=1e-4).rsqrt().",),
    ),
    "rsqrt-float32": (
        "1 / 0: +inf in 1 of 2 numbers, first at [0]. The divisor is 0 in 1 of 2 places.",
        ("Clamp before it: x.clamp(min=1e-6).rsqrt().",),
    ),
    "layer-norm-eps-0": (
        "native_layer_norm of a constant row: variance 0, eps = 0: 0 / 0 (nan in 8 of 8 numbers, first at [0, 0]).",
        ("Give the norm an eps: eps=1e-5.",),
    ),
    "log": (
        "log of 0: -inf in 1 of 2 numbers, first at [0].",
        (
            "Clamp before the logarithm: torch.log(x.clamp(min=1e-6)).",
            "Or take log-probabilities: log_softmax, logsigmoid, binary_cross_entropy_with_logits.",
        ),
    ),
    "log-float16": (
        "log of -1 is not defined: nan in 1 of 2 numbers, first at [0].",
        (
            "Clamp before the logarithm: torch.log(x.clamp(min=1e-4)).",
            "Or take log-probabilities: log_softmax, logsigmoid, binary_cross_entropy_with_logits.",
        ),
    ),
    "log1p": (
        "log1p of -1: -inf in 1 of 2 numbers, first at [0].",
        (
            "Clamp before the logarithm: torch.log1p(x.clamp(min=-1 + 1e-6)).",
            "Or take log-probabilities: log_softmax, logsigmoid, binary_cross_entropy_with_logits.",
        ),
    ),
    "sqrt": (
        "sqrt of -0.25: it is defined from 0 on, this is 0.25 outside (nan in 1 of 2 numbers, first at [0]).",
        ("Clamp before the root: torch.sqrt(x.clamp(min=1e-6)).",),
    ),
    "acos": (
        "acos of 1.5: it is defined from -1 to 1, this is 0.5 outside (nan in 1 of 2 numbers, first at [0]).",
        (
            "Clamp to [-1 + 1e-6, 1 - 1e-6] before acos, not to [-1, 1].",
            "Or use torch.atan2(sin, cos).",
        ),
    ),
    "atanh-float16": (
        "atanh of 1: it is defined from -1 to 1, this is exactly at the edge (+inf in 1 of 2 numbers, first at [0]).",
        ("Clamp to [-1 + 1e-3, 1 - 1e-3] before atanh.",),
    ),
    "acosh": (
        "acosh of 0.5: it is defined from 1 on, this is 0.5 outside (nan in 1 of 2 numbers, first at [0]).",
        ("Clamp before acosh: torch.acosh(x.clamp(min=1 + 1e-6)).",),
    ),
    "logit": (
        "logit of 1: it is defined from 0 to 1, this is exactly at the edge (+inf in 1 of 2 numbers, first at [0]).",
        ("Give logit an eps: torch.logit(x, eps=1e-6).",),
    ),
    "pow": (
        "-2 to the power of 0.5 is not a real number: nan.",
        ("Clamp the base before pow: x.clamp(min=1e-6) ** y.",),
    ),
    "logdet": (
        "linalg_slogdet of a matrix that is singular, or not of the kind it needs: -inf.",
        (
            "Add to the diagonal: A + 1e-4 * torch.eye(n).",
            "Or compute it in float64.",
        ),
    ),
    "ctc": (
        "ctc_loss: no alignment exists; a target (with the blanks between repeats) is longer than its input.",
        (
            "Use zero_infinity=True in ctc_loss.",
            "Or drop samples whose target is longer than their input.",
        ),
    ),
    "negative-variance": (
        "native_batch_norm: var is negative (-1).",
        ("Reset var: reset_running_stats(); a variance is not negative.",),
    ),
    "zero-times-inf": (
        "mul met an Inf (self = 0, other = -inf), and 0 * inf is NaN: nan in 1 of 2 numbers, first at [0].",
        (
            "Make the Inf in mask finite before mul: x.nan_to_num(posinf=1e4, neginf=-1e4).",
            "Where the Inf is a mask, put it in last: masked_fill after mul, not before it.",
        ),
    ),
    "inf-minus-inf": (
        "sub met an Inf (self = inf, other = inf), and inf - inf is NaN: nan in 1 of 2 numbers, first at [0].",
        (
            "Make the Inf in self finite before sub: x.nan_to_num(posinf=1e4, neginf=-1e4).",
            "Where the Inf is a mask, put it in last: masked_fill after sub, not before it.",
        ),
    ),
    "mask-after": (
        "mul met an Inf (self = -inf, other = 0), and 0 * inf is NaN: nan in 1 of 2 numbers, first at [0].",
        (
            "Make the Inf in self finite before mul: x.nan_to_num(posinf=1e4, neginf=-1e4).",
            "Where the Inf is a mask, put it in last: masked_fill after mul, not before it.",
        ),
    ),
    "masked-row": (
        "softmax: 1 of 2 rows hold nothing but -inf (2 numbers each): nan in 2 of 4 numbers, first at [1, 0].",
        (
            "Unmask the rows that hold only -inf: x.masked_fill(x.isneginf().all(-1, keepdim=True), 0).",
            "Or skip rows that are padding only; the first such row is [1].",
        ),
    ),
    "masked-row-float16": (
        "log_softmax: 1 of 2 rows hold nothing but -inf (2 numbers each): nan in 2 of 4 numbers, first at [1, 0].",
        (
            "Unmask the rows that hold only -inf: x.masked_fill(x.isneginf().all(-1, keepdim=True), 0).",
            "Or skip rows that are padding only; the first such row is [1].",
        ),
    ),
    "std-of-one": (
        "std over one number is not defined (the unbiased form divides by n - 1 = 0).",
        (
            "Use correction=0: x.std(correction=0).",
            "Or skip batches of one.",
        ),
    ),
    "var-of-one": (
        "var over one number is not defined (the unbiased form divides by n - 1 = 0).",
        (
            "Use correction=0: x.var(correction=0).",
            "Or skip batches of one.",
        ),
    ),
    "mean-of-none": (
        "mean over no numbers is not defined.",
        ("Skip it when nothing is left: x.mean() if x.numel() else x.sum().",),
    ),
    "all-ignored": (
        "nll_loss averages over no elements: every target is ignored, or there are none.",
        (
            "Sum and divide by the count: loss(..., reduction='sum') / (target != -100).sum().clamp(min=1).",
            "Or skip the batch when no target is left: (target != -100).any().",
        ),
    ),
    "mse-of-none": (
        "mse_loss averages over no elements: every target is ignored, or there are none.",
        ("Skip the loss when it is over nothing: loss if x.numel() else x.sum().",),
    ),
    "sqrt-at-0": (
        "The derivative of sqrt is not defined at 0: +inf in 1 of 2 numbers, first at [0].",
        ("Clamp before the root: torch.sqrt(x.clamp(min=1e-6)).",),
    ),
    "sqrt-at-0-float16": (
        "The derivative of sqrt is not defined at 0: +inf in 1 of 2 numbers, first at [0].",
        ("Clamp before the root: torch.sqrt(x.clamp(min=1e-4)).",),
    ),
    "sqrt-where": (
        "The derivative of sqrt is not defined at 0: nan in 1 of 2 numbers, first at [0]. The gradient that came back there is 0, and 0 * inf is NaN.",
        ("Clamp before the root: torch.sqrt(x.clamp(min=1e-6)).",),
    ),
    "acos-at-1": (
        "The derivative of acos is not defined at -1 and 1: +inf in 1 of 2 numbers, first at [0].",
        (
            "Clamp to [-1 + 1e-6, 1 - 1e-6] before acos, not to [-1, 1].",
            "Or use torch.atan2(sin, cos).",
        ),
    ),
    "pow-at-0": (
        "The derivative of pow is not defined at 0: +inf in 1 of 2 numbers, first at [0].",
        ("Clamp the base before pow: x.clamp(min=1e-6) ** y.",),
    ),
    "division-where": (
        "The divisor is 0 there: nan in 1 of 2 numbers, first at [0]. In forward the value is thrown away by where; its gradient is computed all the same.",
        ("Double where: x / torch.where(d == 0, 1, d), inside the torch.where that discards the result.",),
    ),
    "eigenvalues": (
        "The derivative of linalg_eigh is not defined for equal eigenvalues: nan in 2 of 4 numbers, first at [0, 1]. The gradient that came back there is 0, and 0 * inf is NaN.",
        (
            "Spread the diagonal: A + torch.diag(1e-4 * torch.arange(n)).",
            "Or compute it in float64.",
        ),
    ),
    "hypot": (
        "The derivative of hypot is not defined at the origin: nan in 1 of 2 numbers, first at [0]. The gradient that came back there is 0, and 0 * inf is NaN.",
        ("Keep off the origin: torch.where((x == 0) & (y == 0), 1, x) in place of x.",),
    ),
    "bad-input": (
        "x held nan in 1 of 3 numbers, first at [1, 0] when it came in; no module is to blame.",
        (
            "Drop or repair sample 1 of the batch: its first bad number stands at [1, 0].",
            "Check batches as they are loaded: assert torch.isfinite(x).all().",
        ),
    ),
    "bad-input-float16": (
        "x held nan in 1 of 3 numbers, first at [2] when it came in; no module is to blame.",
        (
            "Drop or repair sample 2 of the batch: its first bad number stands at [2].",
            "Check batches as they are loaded: assert torch.isfinite(x).all().",
        ),
    ),
    "bad-buffer": (
        "The buffer mean held nan in 1 of 2 numbers, first at [1] before this step; this op is the first to read it.",
        (
            "Reset mean (BatchNorm: reset_running_stats()) or load a good checkpoint.",
            "If training made it, watch the step before: the fault lies there.",
        ),
    ),
    "bad-buffer-bfloat16": (
        "The buffer mean held nan in 1 of 2 numbers, first at [1] before this step; this op is the first to read it.",
        (
            "Reset mean (BatchNorm: reset_running_stats()) or load a good checkpoint.",
            "If training made it, watch the step before: the fault lies there.",
        ),
    ),
    "nan-fill": (
        "masked_fill was given value = nan as a number: nan in 2 of 2 numbers, first at [0].",
        (
            "Give masked_fill a finite number where it was given value = nan.",
            "Where it is meant as a mask, use -inf, and let a softmax consume it.",
        ),
    ),
    "nan-factor": (
        "mul was given other = nan as a number: nan in 2 of 2 numbers, first at [0].",
        (
            "Give mul a finite number where it was given other = nan.",
            "Where it is meant as a mask, use -inf, and let a softmax consume it.",
        ),
    ),
    "loss-scale": (
        "The derivative of to_copy: the exact result is 262 144, 2 bits over the 65 504 of float16. Without the loss scale of 262 144 it would be 1.",
        (
            "Lower the loss scale: the largest loss scale that fits here is 32 768 (it was 262 144).",
            "Let torch.amp.GradScaler find the scale, from init_scale=32768.",
        ),
    ),
    "loss-scale-small": (
        "The derivative of to_copy: the exact result is 1 024 000, 4 bits over the 65 504 of float16. Without the loss scale of 1 024 it would be 1 000.",
        (
            "Lower the loss scale: the largest loss scale that fits here is 64 (it was 1 024).",
            "Let torch.amp.GradScaler find the scale, from init_scale=64.",
        ),
    ),
}
