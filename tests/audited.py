"""Faults planted for the audit: each with its place, what is said of it, and the same program without it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HALF, BF16, FULL = torch.float16, torch.bfloat16, torch.float32
OUTSIDE = "code outside the model"


@dataclass(frozen=True)
class Plant:
    """`build(True)` gives the arguments of `audit` for the sick program, `build(False)` for the sound one."""

    name: str
    rule: str
    place: str
    says: tuple[str, ...]
    build: Callable[[bool], dict[str, Any]]


PLANTS: list[Plant] = []


def plant(rule: str, place: str, *says: str) -> Callable[[Callable[[bool], dict[str, Any]]], None]:
    def take(build: Callable[[bool], dict[str, Any]]) -> None:
        PLANTS.append(Plant(build.__name__.strip("_"), rule, place, says, build))

    return take


class Does(nn.Module):
    """A module whose forward is a function."""

    def __init__(self, does: Callable[..., Tensor]) -> None:
        super().__init__()
        self.does = does

    def forward(self, *args: Tensor) -> Tensor:
        return self.does(*args)


class Net(nn.Module):
    """A layer, then what a test is about under `inner.part`, then a head that gives a loss."""

    def __init__(self, part: nn.Module, width: int = 8) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.inner = nn.ModuleDict({"part": part})
        self.head = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner["part"](self.first(x)).to(self.head.weight.dtype)).float().square().mean()


class Root(nn.Module):
    """`x / sqrt(mean(x ** 2) + eps)`, as people write it."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)


class RootNorm(Root):
    """The same under a name that says what it is."""


def net(does: Callable[..., Tensor] | nn.Module) -> Net:
    torch.manual_seed(0)
    return Net(does if isinstance(does, nn.Module) else Does(does))


def x(dtype: torch.dtype = FULL, *shape: int) -> Tensor:
    return torch.randn(*(shape or (4, 8)), generator=torch.Generator().manual_seed(1)).to(dtype)


def linear(dtype: torch.dtype = FULL) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(8, 8).to(dtype)


# --- eps ------------------------------------------------------------------------------------------


@plant("eps_lost", "inner.part", "1e-08", "full_like", "div")
def eps_in_place_of_small_numbers(sick: bool) -> dict[str, Any]:
    eps = 1e-8 if sick else 1e-3
    model = net(lambda h: h / torch.where(h.abs() < 1e-3, torch.full_like(h, eps), h)).half()
    return {"model": model, "example": x(HALF)}


@plant("eps_lost", "inner.part", "1e-12", "masked_fill", "div")
def eps_in_place_of_a_norm_of_zero(sick: bool) -> dict[str, Any]:
    def part(h: Tensor) -> Tensor:
        norm = h.norm(dim=-1, keepdim=True)
        return h / norm.masked_fill(norm == 0, 1e-12 if sick else 1.0)

    return {"model": net(part).half(), "example": x(HALF)}


@plant("eps_zero", "inner.part", "eps = 0", "0 / 0")
def layer_norm_without_eps(sick: bool) -> dict[str, Any]:
    return {"model": net(nn.LayerNorm(8, eps=0.0 if sick else 1e-5))}


@plant("eps_zero", "inner.part", "RootNorm", "eps = 0")
def own_norm_without_eps(sick: bool) -> dict[str, Any]:
    return {"model": net(RootNorm(0.0 if sick else 1e-6))}


@plant("eps_lost", "inner.part", "1e-12", "clamp_min", "float16", "div")
def normalize_in_half(sick: bool) -> dict[str, Any]:
    return {"model": net(lambda h: F.normalize(h, eps=1e-12 if sick else 1e-3)).half(), "example": x(HALF)}


@plant("eps_lost", "inner.part", "1e-08", "rsqrt")
def own_norm_in_half(sick: bool) -> dict[str, Any]:
    return {"model": net(Root(1e-8)).to(HALF if sick else BF16), "example": x(HALF if sick else BF16)}


@plant("eps_lost", "inner.part", "1e-08", "add", "div")
def quotient_under_autocast(sick: bool) -> dict[str, Any]:
    model = net(lambda h: h / (h.abs().amax(-1, keepdim=True) + 1e-8))
    return {"model": model, "example": x(), "autocast": HALF if sick else BF16}


@plant("eps_lost", "inner.part", "0.9999999", "clamp", "log")
def clamped_probability(sick: bool) -> dict[str, Any]:
    def entropy(h: Tensor) -> Tensor:
        p = torch.sigmoid(h if sick else h.float()).clamp(1e-7, 1 - 1e-7)
        q = 1 - p
        return torch.log(q)

    return {"model": net(entropy), "example": x(), "autocast": HALF}


@plant("eps_lost", "inner.part", "1.000000001", "float32")
def eps_beside_one(sick: bool) -> dict[str, Any]:
    return {"model": net(lambda h: h / ((1 + (1e-9 if sick else 1e-4)) - h)), "example": x()}


@plant("eps_lost", "inner.part", "1e-08", "clamp_min", "float16")
def cosine_similarity_in_half(sick: bool) -> dict[str, Any]:
    eps = 1e-8 if sick else 1e-3
    model = net(lambda h: h * F.cosine_similarity(h, h, dim=-1, eps=eps)[:, None]).half()
    return {"model": model, "example": x(HALF)}


@plant("eps_lost", "inner.part", "1e-12", "to_copy")
def eps_as_a_buffer(sick: bool) -> dict[str, Any]:
    small = torch.tensor(1e-12 if sick else 1e-3)
    return {"model": net(lambda h: h / torch.maximum(h.abs(), small.to(h.dtype))).half(), "example": x(HALF)}


@plant("eps_lost", "inner.part", "1 000 000", "65 504")
def layer_norm_of_half_weights(sick: bool) -> dict[str, Any]:
    return {"model": net(nn.LayerNorm(8, eps=1e-12 if sick else 1e-5)).half(), "example": x(HALF)}


@plant("eps_lost", "inner.part", "1e-09", "0 in float16")
def group_norm_seen_without_an_example(sick: bool) -> dict[str, Any]:
    return {"model": net(nn.GroupNorm(2, 8, eps=1e-9)).to(HALF if sick else BF16)}


@plant("eps_subnormal", "inner.part", "1e-06", "smallest normal", "65 504")
def quotient_with_a_small_eps(sick: bool) -> dict[str, Any]:
    return {"model": net(lambda h: h / (h.abs() + (1e-6 if sick else 1e-3))).half(), "example": x(HALF)}


@plant("eps_subnormal", "inner.part", "1e-07", "reciprocal")
def reciprocal_with_a_small_eps(sick: bool) -> dict[str, Any]:
    model = net(lambda h: h.abs().clamp_min(1e-7 if sick else 1e-3).reciprocal())
    return {"model": model, "example": x(), "autocast": HALF}


# --- masks and casts ------------------------------------------------------------------------------


@plant("mask_overflow", "inner.part", "-1e+09", "masked_fill", "65 504")
def masked_fill_that_torch_refuses(sick: bool) -> dict[str, Any]:
    return {"model": net(lambda h: h.masked_fill(h > 0, -1e9 if sick else -1e4)).half(), "example": x(HALF)}


@plant("mask_overflow", "inner.part", "-1e+09", "float16")
def where_with_a_constant(sick: bool) -> dict[str, Any]:
    model = net(lambda h: torch.where(h > 0, h, -1e9).softmax(-1))
    return {"model": model, "example": x(), "autocast": HALF if sick else BF16}


@plant("mask_overflow", "inner.part", "-1e+09", "mul")
def multiplied_mask(sick: bool) -> dict[str, Any]:
    model = net(lambda h: h + (1 - (h > 0).to(h.dtype)) * (-1e9 if sick else -1e4)).half()
    return {"model": model, "example": x(HALF)}


@plant("mask_overflow", "inner.part", "-1e+09", "cast")
def mask_cast_to_half(sick: bool) -> dict[str, Any]:
    mask = torch.full((8,), -1e9 if sick else -1e4)
    return {"model": net(lambda h: h + mask.to(h.dtype)).half(), "example": x(HALF)}


@plant("mask_sum", "inner.part", "-65 504", "rows")
def mask_added_to_low_scores(sick: bool) -> dict[str, Any]:
    low = torch.finfo(HALF).min
    model = net(lambda h: (h * 0 - (40 if sick else 1)) + torch.full_like(h, low))
    return {"model": model.half(), "example": x(HALF)}


@plant("mask_sum", "inner.part", "two masks", "float32")
def two_masks_added(sick: bool) -> dict[str, Any]:
    low = torch.finfo(FULL).min
    first, second = torch.zeros(8).fill_(low), torch.zeros(8).fill_(low if sick else 0)
    return {"model": net(lambda h: h + (first + second)), "example": x()}


@plant("cast_overflow", "inner.part", "float32 to float16", "65 504")
def cast_of_large_numbers(sick: bool) -> dict[str, Any]:
    return {"model": net(lambda h: (h * 1e6).to(HALF if sick else BF16)), "example": x()}


@plant("cast_overflow", "first", "65 504")
def input_too_large_for_autocast(sick: bool) -> dict[str, Any]:
    return {"model": net(lambda h: h), "example": x() * 1e6, "autocast": HALF if sick else BF16}


# --- numbers in weights and buffers ---------------------------------------------------------------


@plant("nonfinite", "inner.part.bias", "2 NaN of 8", "[1]")
def nan_in_a_parameter(sick: bool) -> dict[str, Any]:
    model = net(linear())
    if sick:
        model.inner["part"].bias.data[[1, 5]] = float("nan")
    return {"model": model}


@plant("nonfinite", "inner.part.running_var", "1 +Inf of 8")
def inf_in_a_running_variance(sick: bool) -> dict[str, Any]:
    model = net(nn.BatchNorm1d(8))
    if sick:
        model.inner["part"].running_var[3] = float("inf")
    return {"model": model}


@plant("nonfinite", "inner.part.running_var", "-0.5", "below zero")
def negative_running_variance(sick: bool) -> dict[str, Any]:
    model = net(nn.BatchNorm1d(8))
    model.inner["part"].running_var[3] = -0.5 if sick else 0.5
    return {"model": model}


@plant("nonfinite", "weight", "exp_avg_sq", "+inf")
def inf_in_optimizer_state(sick: bool) -> dict[str, Any]:
    model = linear()
    optimizer = torch.optim.AdamW(model.parameters())
    model(x()).sum().backward()
    optimizer.step()
    if sick:
        optimizer.state[model.weight]["exp_avg_sq"][0, 0] = float("inf")
    return {"model": model, "optimizer": optimizer}


@plant("uninitialised", "inner.part.weight", "subnormal", "torch.empty")
def memory_that_held_integers(sick: bool) -> dict[str, Any]:
    model = net(linear())
    if sick:
        bits = torch.randint(1, 1000, (8, 8), dtype=torch.int32)
        model.inner["part"].weight.data.copy_(bits.view(torch.float32))
    return {"model": model}


@plant("uninitialised", "inner.part.table", "e+3", "subnormal")
def memory_that_held_anything(sick: bool) -> dict[str, Any]:
    model = net(linear())
    torch.manual_seed(3)
    bits = torch.randint(0, 0x7F000000, (64,), dtype=torch.int32)
    model.inner["part"].register_buffer("table", bits.view(torch.float32) if sick else torch.randn(64))
    return {"model": model}


@plant("large", "inner.part.weight", "5e+07", "more than float16")
def weight_far_too_large(sick: bool) -> dict[str, Any]:
    model = net(linear())
    model.inner["part"].weight.data[2, 3] = 5e7 if sick else 5.0
    return {"model": model}


@plant("large", "inner.part.scale", "1e+20")
def buffer_far_too_large(sick: bool) -> dict[str, Any]:
    model = net(linear())
    model.inner["part"].register_buffer("scale", torch.tensor([1.0, 1e20 if sick else 1e3]))
    return {"model": model}


@plant("weight_overflow", "inner.part.weight", "100 000", "float16", "Inf")
def weight_too_large_for_autocast(sick: bool) -> dict[str, Any]:
    model = net(linear())
    model.inner["part"].weight.data[2, 3] = 1e5
    return {"model": model, "autocast": HALF if sick else BF16}


@plant("weight_overflow", "0.weight", "70 000", "infinite")
def kernel_too_large_in_a_step(sick: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(2, 2, 1), nn.ReLU())
    model[0].weight.data[0, 0, 0] = 7e4
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step() -> None:
        with torch.autocast("cpu", dtype=HALF if sick else BF16):
            model(torch.ones(2, 2, 3))

    return {"model": model, "optimizer": optimizer, "step": step}


@plant("weight_underflow", "inner.part.weight", "100%", "float16")
def weights_too_small_for_autocast(sick: bool) -> dict[str, Any]:
    model = net(linear())
    model.inner["part"].weight.data *= 1e-8 if sick else 1e-3
    return {"model": model, "autocast": HALF}


@plant("weight_underflow", "0.weight", "5.96e-08")
def kernel_too_small_under_open_autocast(sick: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 4, 3))
    model[0].weight.data *= 1e-9

    return {"model": model, "autocast": HALF if sick else BF16}


# --- updates --------------------------------------------------------------------------------------


@plant("half_weights", "", "bfloat16", "2.0e-03")
def sgd_on_bfloat16(sick: bool) -> dict[str, Any]:
    model = net(linear()).to(BF16 if sick else FULL)
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), 0.1)}


@plant("half_weights", "inner.part", "2 float16 parameters")
def one_layer_in_float16(sick: bool) -> dict[str, Any]:
    model = net(linear(HALF if sick else FULL))
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), 0.1)}


@plant("lost_updates", "", "1e-05", "bfloat16")
def rate_too_small_for_bfloat16(sick: bool) -> dict[str, Any]:
    model = net(linear()).bfloat16()
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), 1e-5 if sick else 1e-2)}


@plant("lost_updates", "inner.part", "1e-07", "float16")
def rate_too_small_for_one_layer(sick: bool) -> dict[str, Any]:
    model = net(linear(HALF))
    return {"model": model, "optimizer": torch.optim.NAdam(model.parameters(), 1e-7 if sick else 1e-2, eps=1e-3)}


@plant("lost_updates", "", "the traced step leaves 100%")
def sgd_that_moves_nothing(sick: bool) -> dict[str, Any]:
    model = linear(BF16)
    model.bias.data.fill_(1.0)
    optimizer = torch.optim.SGD(model.parameters(), 1e-6 if sick else 1.0)

    def step() -> None:
        optimizer.zero_grad()
        model(x(BF16)).float().square().mean().backward()
        optimizer.step()

    return {"model": model, "optimizer": optimizer, "step": step}


@plant("warmup", "", "goes to 0.01", "less than half")
def warmup_from_almost_nothing(sick: bool) -> dict[str, Any]:
    model = net(linear()).to(BF16 if sick else FULL)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=1e-4, total_iters=100)
    return {"model": model, "optimizer": optimizer}


@plant("warmup", "inner.part", "begins at lr 0")
def warmup_from_zero(sick: bool) -> dict[str, Any]:
    model = net(linear(HALF if sick else FULL))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, eps=1e-3)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 100))
    return {"model": model, "optimizer": optimizer}


@plant("weight_decay", "optimizer", "1.0e-05", "does nothing")
def decay_lost_in_bfloat16(sick: bool) -> dict[str, Any]:
    model = net(linear()).to(BF16 if sick else FULL)
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), 1e-3, weight_decay=0.01)}


@plant("weight_decay", "optimizer", "turns the sign")
def decay_larger_than_the_weight(sick: bool) -> dict[str, Any]:
    model = net(linear())
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), 0.5, weight_decay=4 if sick else 1e-3)}


@plant("weight_decay", "optimizer.param_groups[1]", "takes 20% of each weight")
def steep_decay_of_one_group(sick: bool) -> dict[str, Any]:
    model = net(linear())
    groups = [
        {"params": model.first.parameters()},
        {"params": model.head.parameters(), "weight_decay": 2.0 if sick else 1e-4},
    ]
    return {"model": model, "optimizer": torch.optim.SGD(groups, lr=0.1)}


@plant("optimizer_state", "", "beta2 = 0.999", "never falls")
def second_moment_that_never_falls(sick: bool) -> dict[str, Any]:
    model = net(linear()).bfloat16()
    return {
        "model": model,
        "optimizer": torch.optim.Adam(model.parameters(), 1e-2, betas=(0.9, 0.999 if sick else 0.9)),
    }


@plant("optimizer_state", "optimizer", "float32", "raises")
def state_of_another_dtype(sick: bool) -> dict[str, Any]:
    model = linear(BF16)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2, betas=(0.9, 0.9), fused=True)
    model(x(BF16)).sum().backward()
    optimizer.step()
    if sick:
        for state in optimizer.state.values():
            state["exp_avg_sq"] = state["exp_avg_sq"].float()
    return {"model": model, "optimizer": optimizer}


@plant("optimizer_state", "", "squares of gradients below", "float16")
def small_squares_in_float16(sick: bool) -> dict[str, Any]:
    model = net(linear()).to(HALF if sick else FULL)
    return {"model": model, "optimizer": torch.optim.RMSprop(model.parameters(), 1e-2, eps=1e-3)}


@plant("optimizer_eps", "optimizer", "1e-08", "is 0 in float16")
def adam_eps_lost_in_float16(sick: bool) -> dict[str, Any]:
    model = net(linear()).to(HALF if sick else FULL)
    return {"model": model, "optimizer": torch.optim.Adam(model.parameters(), 1e-2)}


@plant("optimizer_eps", "optimizer", "exactly 0", "0 / 0")
def adam_without_eps(sick: bool) -> dict[str, Any]:
    model = net(linear())
    return {"model": model, "optimizer": torch.optim.Adam(model.parameters(), 1e-2, eps=0.0 if sick else 1e-8)}


@plant("optimizer_eps", "optimizer", "1e-10")
def adagrad_found_in_the_step(sick: bool) -> dict[str, Any]:
    model = linear(HALF)

    def step() -> None:
        optimizer = torch.optim.Adagrad(model.parameters(), 1e-2, eps=1e-10 if sick else 1e-3)
        model(x(HALF)).float().sum().backward()
        optimizer.step()

    return {"model": model, "step": step}


@plant("optimizer_number", "optimizer", "lr", "nan")
def rate_that_is_no_number(sick: bool) -> dict[str, Any]:
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    optimizer.param_groups[0]["lr"] = float("nan") if sick else 0.2
    return {"model": model, "optimizer": optimizer}


@plant("optimizer_number", "optimizer", "weight_decay", "inf")
def decay_that_is_infinite(sick: bool) -> dict[str, Any]:
    model = linear()
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    optimizer.param_groups[0]["weight_decay"] = float("inf") if sick else 0.1
    return {"model": model, "optimizer": optimizer}


@plant("unfused_half", "optimizer", "foreach=True", "1/128")
def foreach_on_bfloat16(sick: bool) -> dict[str, Any]:
    model = net(linear()).bfloat16()
    options = {"foreach": True} if sick else {"fused": True}
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), 1e-2, **options)}


@plant("unfused_half", "optimizer", "1/1024", "SGD")
def momentum_on_float16(sick: bool) -> dict[str, Any]:
    model = net(linear()).half()
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), 1e-2, momentum=0.9 if sick else 0.0)}


# --- what runs in half ----------------------------------------------------------------------------


@plant("runs_in_half", "inner.part", "softmax", "bfloat16[4, 8]", "autocast")
def softmax_under_autocast(sick: bool) -> dict[str, Any]:
    dtype = None if sick else FULL
    model = net(lambda h: torch.softmax(h, -1, dtype=dtype).log())
    return {"model": model, "example": x(), "autocast": BF16}


@plant("runs_in_half", "inner.part", "softmax", "float16[8, 8]", "outside of autocast")
def attention_without_autocast(sick: bool) -> dict[str, Any]:
    def attend(h: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            h = h if sick else h.float()
            return (h @ h.t()).softmax(-1) @ h

    return {"model": net(attend), "example": x(FULL, 8, 8), "autocast": HALF}


@plant("runs_in_half", OUTSIDE, "loss", "float16", "65 504")
def loss_in_half(sick: bool) -> dict[str, Any]:
    model = linear(HALF)

    def step() -> None:
        out = model(x(HALF))
        F.mse_loss(out if sick else out.float(), torch.zeros(4, 8, dtype=HALF if sick else FULL)).backward()

    return {"model": model, "step": step}


@plant("runs_in_half", "inner.part", "layer_norm", "float16")
def norm_in_half(sick: bool) -> dict[str, Any]:
    model = net(nn.LayerNorm(8, elementwise_affine=not sick))
    return {"model": model, "example": x(), "autocast": HALF}


@plant("runs_in_half", "inner.part", "log_softmax", "autocast")
def region_without_autocast(sick: bool) -> dict[str, Any]:
    def scores(h: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return F.log_softmax(h if sick else h.float(), -1)

    return {"model": net(scores), "example": x(), "autocast": HALF}


@plant("upcast_undone", "inner.part", "float16", "65 504", "mm")
def gram_matrix_cast_up_in_vain(sick: bool) -> dict[str, Any]:
    def gram(h: Tensor) -> Tensor:
        f = h.float()
        if sick:
            return f @ f.t()
        with torch.autocast("cpu", enabled=False):
            return f @ f.t()

    return {"model": net(gram), "example": x(FULL, 8, 8), "autocast": HALF}


@plant("upcast_undone", "inner.part", "bfloat16", "bmm")
def scores_cast_up_in_vain(sick: bool) -> dict[str, Any]:
    def scores(h: Tensor) -> Tensor:
        q = h.reshape(1, 8, 8)
        q = q.float() if sick else q
        return torch.bmm(q, q.transpose(1, 2))[0]

    return {"model": net(scores), "example": x(FULL, 8, 8), "autocast": BF16}


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return a @ b

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        a, b = ctx.saved_tensors
        return (grad.float() @ b.float().t()).to(a.dtype), (a.float().t() @ grad.float()).to(b.dtype)


class _RuledProduct(_Product):
    forward = staticmethod(torch.amp.custom_fwd(_Product.forward, device_type="cpu", cast_inputs=torch.float32))
    backward = staticmethod(torch.amp.custom_bwd(_Product.backward, device_type="cpu"))


class _Calls(nn.Module):
    def __init__(self, function: Callable[..., Tensor], dtype: torch.dtype = FULL) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(8).to(dtype))
        self.function = function

    def forward(self, h: Tensor) -> Tensor:
        return self.function(h, self.weight)


@plant("autocast_rule", "inner.part", "_Product", "custom_fwd")
def function_without_custom_fwd(sick: bool) -> dict[str, Any]:
    function = _Product.apply if sick else _RuledProduct.apply
    return {"model": net(_Calls(function)), "example": x(), "autocast": BF16}


def _custom(name: str, *, ruled: bool) -> Callable[..., Tensor]:
    @torch.library.custom_op(f"nanhunt_audit::{name}", mutates_args=())
    def scaled(a: Tensor, b: Tensor) -> Tensor:
        return a.float() * b.float().sum()

    @scaled.register_fake
    def _(a: Tensor, b: Tensor) -> Tensor:
        return torch.empty_like(a, dtype=torch.float32)

    scaled.register_autograd(lambda ctx, grad: (grad.to(BF16) if not ruled else grad, None))
    if ruled:
        scaled.register_autocast("cpu", torch.float32)
    return scaled


_CUSTOM = {True: _custom("plain", ruled=False), False: _custom("ruled", ruled=True)}


@plant("autocast_rule", "inner.part", "nanhunt_audit.plain", "bfloat16 and float32")
def custom_op_without_a_rule(sick: bool) -> dict[str, Any]:
    return {"model": net(_Calls(_CUSTOM[sick])), "example": x(), "autocast": BF16}


# --- sums and single numbers ----------------------------------------------------------------------


@plant("half_sum", "inner.part", "index_add", "bfloat16", "300 terms")
def index_add_in_half(sick: bool) -> dict[str, Any]:
    def pool(h: Tensor) -> Tensor:
        index = torch.zeros(300, dtype=torch.long)
        return torch.zeros(1, 8, dtype=h.dtype if sick else FULL).index_add(0, index, h if sick else h.float())

    return {"model": net(pool), "example": x(FULL, 300, 8), "autocast": BF16}


@plant("half_sum", "inner.part", "a running sum", "256")
def running_sum_in_half(sick: bool) -> dict[str, Any]:
    def total(h: Tensor) -> Tensor:
        kept = torch.zeros(8, dtype=h.dtype if sick else FULL)
        for row in h.unbind():
            kept = kept + row
        return kept[None]

    return {"model": net(total), "example": x(FULL, 270, 8), "autocast": BF16}


@plant("half_sum", "0", "gradient of an embedding")
def embedding_gradient_in_half(sick: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(4, 8), nn.Linear(8, 1)).bfloat16()
    tokens = torch.zeros(1, 300, dtype=torch.long) if sick else torch.arange(300).remainder(4)[None]

    def step() -> None:
        model(tokens).float().mean().backward()

    return {"model": model, "step": step}


@plant("one_sample", "inner.part", "BatchNorm1d", "[1, 8]")
def batch_norm_with_a_batch_of_one(sick: bool) -> dict[str, Any]:
    return {"model": net(nn.BatchNorm1d(8)), "example": x(FULL, 1 if sick else 2, 8)}


@plant("one_sample", "1", "BatchNorm2d", "per channel")
def batch_norm_after_global_pooling(sick: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.BatchNorm2d(4))
    return {"model": model.train(sick), "example": torch.randn(1, 4, 5, 5)}


@plant("one_sample", OUTSIDE, "std over 1 number", "NaN")
def advantage_of_one_sample(sick: bool) -> dict[str, Any]:
    model = linear()

    def step() -> None:
        value = model(x())[: 1 if sick else 4, 0]
        ((value - value.mean()) / (value.std() + 1e-8)).sum().backward()

    return {"model": model, "step": step}


# --- the loss scale -------------------------------------------------------------------------------


def training(
    model: nn.Module, optimizer: torch.optim.Optimizer, scaler: Any, dtype: torch.dtype, *, between: Callable[[], Any]
) -> Callable[[], None]:
    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=dtype):
            out = model(x())
        scaler.scale(out.float().square().mean()).backward()
        between()
        scaler.step(optimizer)
        scaler.update()

    return step


@plant("scaler_unneeded", "scaler", "65 536", "bfloat16")
def scaler_for_bfloat16(sick: bool) -> dict[str, Any]:
    model, scaler = linear(), torch.amp.GradScaler("cpu")
    return {"model": model, "scaler": scaler, "autocast": BF16 if sick else HALF}


@plant("scaler_unneeded", "scaler", "nothing runs in float16")
def scaler_for_float32(sick: bool) -> dict[str, Any]:
    model, scaler = net(linear()), torch.amp.GradScaler("cpu", enabled=sick)
    return {"model": model, "scaler": scaler, "example": x()}


@plant("scaler_half_weights", "", "6 of the optimizer's parameters", "unscale")
def scaler_over_half_weights(sick: bool) -> dict[str, Any]:
    model = net(linear()).to(HALF if sick else FULL)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return {"model": model, "optimizer": optimizer, "scaler": torch.amp.GradScaler("cpu"), "autocast": HALF}


@plant("scaler_half_weights", "inner.part", "2 of the optimizer's parameters")
def scaler_over_one_half_layer(sick: bool) -> dict[str, Any]:
    model = net(linear(HALF if sick else FULL))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return {"model": model, "optimizer": optimizer, "scaler": torch.amp.GradScaler("cpu"), "autocast": HALF}


@plant("scaled_loss", OUTSIDE, "float16", "65 536", "262 144")
def half_loss_scaled(sick: bool) -> dict[str, Any]:
    model, scaler = linear(), torch.amp.GradScaler("cpu")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step() -> None:
        with torch.autocast("cpu", dtype=HALF):
            out = model(x()).sum() * 0 + 4
        scaler.scale(out if sick else out.float()).backward()
        scaler.step(optimizer)
        scaler.update()

    return {"model": model, "optimizer": optimizer, "scaler": scaler, "step": step}


@plant("scaled_loss", OUTSIDE, "skipped until the scale has fallen to 512")
def half_loss_with_a_scaler_of_the_step(sick: bool) -> dict[str, Any]:
    model = linear()

    def step() -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0 if sick else 512.0)
        with torch.autocast("cpu", dtype=HALF):
            out = model(x()).sum() * 0 + 100
        scaler.scale(out).backward()

    return {"model": model, "step": step}


@plant("clip_before_unscale", OUTSIDE, "65 536", "1.53e-05")
def norm_clipped_before_unscaling(sick: bool) -> dict[str, Any]:
    model, scaler = linear(), torch.amp.GradScaler("cpu")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def between() -> None:
        if not sick:
            scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    step = training(model, optimizer, scaler, HALF, between=between)
    return {"model": model, "optimizer": optimizer, "scaler": scaler, "step": step}


@plant("clip_before_unscale", OUTSIDE, "its limit of 0.5")
def value_clipped_before_unscaling(sick: bool) -> dict[str, Any]:
    model, scaler = linear(), torch.amp.GradScaler("cpu")
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)

    def between() -> None:
        if not sick:
            scaler.unscale_(optimizer)
        nn.utils.clip_grad_value_(model.parameters(), 0.5)

    return {"model": model, "step": training(model, optimizer, scaler, HALF, between=between)}


@plant("clip_before_unscale", OUTSIDE, "its limit of")
def clamped_by_hand_before_unscaling(sick: bool) -> dict[str, Any]:
    model, scaler = linear(), torch.amp.GradScaler("cpu")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def between() -> None:
        if not sick:
            scaler.unscale_(optimizer)
        for p in model.parameters():
            p.grad.clamp_(-1.0, 1.0)

    step = training(model, optimizer, scaler, HALF, between=between)
    return {"model": model, "optimizer": optimizer, "step": step}


def _direct(sick: bool, make: Callable[..., torch.optim.Optimizer], **options: Any) -> dict[str, Any]:
    model, scaler = linear(), torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer = make(model.parameters(), lr=0.1, **options)

    def step() -> None:
        with torch.autocast("cpu", dtype=HALF):
            out = model(x())
        scaler.scale(out.float().mean()).backward()
        if sick:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()

    return {"model": model, "optimizer": optimizer, "scaler": scaler, "step": step}


@plant("step_before_unscale", "optimizer", "SGD.step()", "1 024")
def direct_step_of_sgd(sick: bool) -> dict[str, Any]:
    return _direct(sick, torch.optim.SGD)


@plant("step_before_unscale", "optimizer", "weight_decay 0.1", "1 024")
def direct_step_of_adamw(sick: bool) -> dict[str, Any]:
    return _direct(sick, torch.optim.AdamW, weight_decay=0.1)
