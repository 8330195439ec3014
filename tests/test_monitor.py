"""What a monitor records of a step, field by field, against plain computations."""

from __future__ import annotations

import contextlib
import json
import math
import pickle
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import nanhunt
from nanhunt import Monitor, UsageError
from nanhunt.monitor.journal import read
from nanhunt.symptoms.steps import Step

DEFER = pytest.mark.parametrize("defer", [False, True], ids=["at once", "as on a device"])


def _model(*, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 3)).to(dtype)


def _batch(seed: int = 0, *, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(seed)
    return torch.randn(16, 6, generator=made).to(dtype), torch.randint(3, (16,), generator=made)


def _loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]).float(), batch[1])


def _norm(model: nn.Module) -> float:
    return math.sqrt(sum(float(p.grad.double().abs().square().sum()) for p in model.parameters() if p.grad is not None))


def _train(
    model: nn.Module, optimizer: torch.optim.Optimizer, scaler: Any = None, *, steps: int = 4, clip: str = ""
) -> Iterator[dict[str, float]]:
    """A plain loop; yields what each of its steps had, worked out beside it."""
    for i in range(steps):
        optimizer.zero_grad()
        loss = _loss(model, _batch(i))
        known: dict[str, Any] = {"loss": loss.item(), "lr": tuple(g["lr"] for g in optimizer.param_groups)}
        if scaler is None:
            loss.backward()
            known["grad_norm"] = _norm(model)
            if clip:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
                known["clipped_norm"] = _norm(model)
            optimizer.step()
        else:
            known["loss_scale"] = scaler.get_scale()
            scaler.scale(loss).backward()
            known["grad_norm"] = _norm(model) / scaler.get_scale()
            if clip == "before":
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
                known["clipped_norm"] = _norm(model) / scaler.get_scale()
            if clip in ("after", "none"):
                scaler.unscale_(optimizer)
            if clip == "after":
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
                known["clipped_norm"] = _norm(model)
            scaler.step(optimizer)
            scaler.update()
            known["loss_scale_after"] = scaler.get_scale()
        yield known


def _agrees(step: Step, known: dict[str, Any]) -> None:
    for name, value in known.items():
        assert getattr(step, name) == pytest.approx(value, rel=1e-5), name


# --- loss, norm, learning rate, loss scale ------------------------------------------------------------


@DEFER
@pytest.mark.parametrize("clip", ["", "after"])
def test_a_plain_loop(clip: str, defer: bool) -> None:
    """Loss, norm before and after clipping, and learning rate are those of each step, under its own number."""
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with Monitor(model, optimizer, _defer=defer) as monitor:
        known = list(_train(model, optimizer, clip=clip))
    assert [step.step for step in monitor.steps] == [0, 1, 2, 3] and not monitor.errors
    for step, expected in zip(monitor.steps, known, strict=True):
        _agrees(step, expected)
        assert step.skipped is None and step.loss_scale is None
        assert step.clipped_scaled is (False if clip else None)


@DEFER
@pytest.mark.parametrize("clip", ["", "none", "after", "before"])
@pytest.mark.parametrize("handed", [False, True])
def test_a_scaled_loop(clip: str, handed: bool, defer: bool) -> None:
    """No number has the loss scale in it, whoever unscales, and whether optimizer and scaler were handed over."""
    model = _model()
    optimizer, scaler = torch.optim.AdamW(model.parameters(), 1e-2), torch.amp.GradScaler("cpu", init_scale=1024.0)
    given = (optimizer, scaler) if handed else ()
    with Monitor(model, *given, on_symptom="record", _defer=defer) as monitor:
        known = list(_train(model, optimizer, scaler, clip=clip))
    assert len(monitor.steps) == 4 and not monitor.errors
    for step, expected in zip(monitor.steps, known, strict=True):
        _agrees(step, expected)
        assert step.skipped is False
    assert ("before scaler.unscale_" in (monitor.steps[-1].note or "")) is (clip == "before")
    assert monitor.steps[-1].clipped_scaled is {"before": True, "after": False}.get(clip)


def test_clipping_before_unscale_is_seen_in_the_norm() -> None:
    """What the optimizer gets is max_norm divided by the loss scale."""
    model = _model()
    optimizer, scaler = torch.optim.SGD(model.parameters(), 0.1), torch.amp.GradScaler("cpu", init_scale=65536.0)
    with Monitor(model, optimizer, scaler, on_symptom="record") as monitor:
        list(_train(model, optimizer, scaler, clip="before"))
    assert monitor.steps[-1].clipped_norm == pytest.approx(0.05 / 65536, rel=1e-3)
    assert monitor.steps[-1].grad_norm > 0.01


@DEFER
def test_a_skipped_step(defer: bool) -> None:
    """It is a step, with the scale that overflowed, what became of it, and the parameter whose gradient is bad."""
    model = _model()
    optimizer, scaler = torch.optim.SGD(model.parameters(), 0.1), torch.amp.GradScaler("cpu", init_scale=512.0)
    with Monitor(model, optimizer, scaler, on_symptom="record", _defer=defer) as monitor:
        for i in range(3):
            optimizer.zero_grad()
            scaler.scale(_loss(model, _batch(i))).backward()
            if i == 1:
                model[0].bias.grad[3] = math.inf
            scaler.step(optimizer)
            scaler.update()
    assert [step.skipped for step in monitor.steps] == [False, True, False]
    bad = monitor.steps[1]
    assert bad.grad_norm == math.inf and bad.worst == "0.bias" and math.isfinite(bad.loss)
    assert (bad.loss_scale, bad.loss_scale_after, monitor.steps[2].loss_scale) == (512.0, 256.0, 256.0)


def test_a_scaler_that_is_switched_off_is_none() -> None:
    """With enabled=False the step ends with the optimizer, and there is no scale."""
    model = _model()
    optimizer, scaler = torch.optim.SGD(model.parameters(), 0.1), torch.amp.GradScaler("cpu", enabled=False)
    with Monitor(model, optimizer, scaler) as monitor:
        for i in range(2):
            optimizer.zero_grad()
            scaler.scale(_loss(model, _batch(i))).backward()
            scaler.step(optimizer)
            scaler.update()
    assert [step.loss_scale for step in monitor.steps] == [None, None]
    assert [step.step for step in monitor.steps] == [0, 1]


@pytest.mark.parametrize("scaled", [False, True])
def test_accumulation_is_one_step_with_the_mean_of_the_losses(scaled: bool) -> None:
    """Three backwards and one optimizer step: one record, the norm of the sum."""
    model = _model()
    optimizer, scaler = torch.optim.SGD(model.parameters(), 0.1), torch.amp.GradScaler("cpu", enabled=scaled)
    with Monitor(model) as monitor:
        for _ in range(2):
            optimizer.zero_grad()
            losses = []
            for i in range(3):
                loss = _loss(model, _batch(i))
                losses.append(loss.item())
                scaler.scale(loss).backward()
            norm = _norm(model) / (scaler.get_scale() if scaled else 1.0)
            scaler.step(optimizer)
            scaler.update()
    assert len(monitor.steps) == 2
    _agrees(monitor.steps[-1], {"loss": sum(losses) / 3, "grad_norm": norm})


def test_a_loss_divided_after_scaling_is_unscaled_by_the_scale() -> None:
    """(scaler.scale(loss) / 4).backward(): the scaler's output is not what backward begins on."""
    model = _model()
    optimizer, scaler = torch.optim.SGD(model.parameters(), 0.1), torch.amp.GradScaler("cpu", init_scale=256.0)
    with Monitor(model, optimizer, scaler) as monitor:
        loss = _loss(model, _batch())
        (scaler.scale(loss) / 4).backward()
        scaler.step(optimizer)
        scaler.update()
    assert monitor.steps[0].loss == pytest.approx(loss.item() / 4, rel=1e-6)


def test_two_optimizers_of_one_iteration_are_one_step() -> None:
    """Both groups' learning rates, the norm of all gradients."""
    model = _model()
    one, two = torch.optim.SGD(model[0].parameters(), 0.1), torch.optim.Adam(model[2].parameters(), 0.01)
    with Monitor(model, (one, two)) as monitor:
        for i in range(3):
            one.zero_grad(), two.zero_grad()
            _loss(model, _batch(i)).backward()
            norm = _norm(model)
            one.step()
            two.step()
    assert [step.step for step in monitor.steps] == [0, 1, 2]
    _agrees(monitor.steps[-1], {"grad_norm": norm, "lr": (0.1, 0.01)})


def test_two_optimizers_with_backwards_of_their_own_are_two_steps() -> None:
    """As a GAN trains: each backward and step is a record."""
    model = _model()
    one, two = torch.optim.SGD(model[0].parameters(), 0.1), torch.optim.SGD(model[2].parameters(), 0.01)
    with Monitor(model) as monitor:
        for i in range(2):
            for optimizer in (one, two):
                model.zero_grad()
                _loss(model, _batch(i)).backward()
                optimizer.step()
    assert [step.lr for step in monitor.steps] == [(0.1,), (0.01,)] * 2


def test_backwards_whose_gradients_are_thrown_away_are_no_part_of_a_step() -> None:
    """A GAN's generator goes back through the discriminator, whose gradients are then dropped."""
    maker, judge = nn.Linear(3, 6), _model()
    one, two = torch.optim.SGD(maker.parameters(), 0.1), torch.optim.SGD(judge.parameters(), 0.1)
    losses = []
    with Monitor(judge, two) as monitor:
        for i in range(4):
            two.zero_grad()
            loss = _loss(judge, _batch(i))
            loss.backward()
            losses.append(float(loss.detach()))
            two.step()
            one.zero_grad()
            (1000 * judge(maker(torch.ones(2, 3))).square().mean()).backward()
            one.step()
    assert [step.loss for step in monitor.steps][:4] == pytest.approx(losses)


def test_lbfgs_is_a_step_with_the_loss_it_began_with() -> None:
    """The closure runs several backwards; the first loss is where the step stood, the norm that of its end."""
    model = _model()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)
    losses: list[float] = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = _loss(model, _batch())
        losses.append(loss.item())
        loss.backward()
        return loss

    with Monitor(model, optimizer) as monitor:
        optimizer.step(closure)
        first = losses[0]
        optimizer.step(closure)
        norm = _norm(model)
    assert len(monitor.steps) == 2 and len(losses) > 4
    assert monitor.steps[0].loss == pytest.approx(first)
    assert monitor.steps[1].grad_norm == pytest.approx(norm, rel=1e-5)


@pytest.mark.parametrize("hold", [False, True])
def test_a_closure_of_one_backward_is_an_ordinary_step(hold: bool) -> None:
    """As trainers call it: norm before clipping, the update's ratio, and a bad one can be held back."""
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)

    def closure(i: int) -> Tensor:
        optimizer.zero_grad()
        loss = _loss(model, _batch(i)) * (math.nan if i == 2 else 1.0)
        loss.backward()
        norms.append(_norm(model))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        return loss

    norms: list[float] = []
    with Monitor(model, optimizer, sample=1, hold=hold, on_symptom="record") as monitor:
        for i in range(3):
            before = [p.detach().clone() for p in model.parameters()]
            optimizer.step(lambda i=i: closure(i))
            if i == 0:
                moved = sum(float((p - b).square().sum()) for p, b in zip(model.parameters(), before))
                ratio = math.sqrt(moved / sum(float(b.square().sum()) for b in before))
    first = monitor.steps[0]
    _agrees(first, {"grad_norm": norms[0], "clipped_norm": 0.01, "update_ratio": ratio, "lost_updates": 0.0})
    assert monitor.held == ([2] if hold else [])
    assert all(bool(p.isfinite().all()) for p in model.parameters()) is hold


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd foreach": lambda ps: torch.optim.SGD(ps, 0.1, momentum=0.9, foreach=True),
    "sgd fused": lambda ps: torch.optim.SGD(ps, 0.1, fused=True),
    "adam fused": lambda ps: torch.optim.Adam(ps, 0.01, fused=True),
    "adam loop": lambda ps: torch.optim.Adam(ps, 0.01, foreach=False),
    "adamw capturable lr": lambda ps: torch.optim.AdamW(ps, torch.tensor(0.01)),
    "rmsprop": lambda ps: torch.optim.RMSprop(ps, 0.01),
    "groups": lambda ps: torch.optim.SGD([{"params": [p], "lr": 0.1 * i} for i, p in enumerate(ps)], 0.1),
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
@pytest.mark.parametrize("scaled", [False, True])
def test_every_kind_of_optimizer(make: Callable[[Any], torch.optim.Optimizer], scaled: bool) -> None:
    """Fused ones unscale inside their step, and skip on the device: the record is the same."""
    model = _model()
    optimizer = make(list(model.parameters()))
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0) if scaled else None
    with Monitor(model, optimizer, scaler) as monitor:
        known = list(_train(model, optimizer, scaler))
    assert not monitor.errors and len(monitor.steps) == 4
    for step, expected in zip(monitor.steps, known, strict=True):
        _agrees(step, {**expected, "lr": tuple(map(float, expected["lr"]))})


def test_a_fused_optimizer_that_skips_on_its_own() -> None:
    """It is called with the scaler's verdict, so that only the norm tells that nothing moved."""
    model = _model()
    optimizer = torch.optim.Adam(model.parameters(), 0.01, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    with Monitor(model, optimizer, scaler, on_symptom="record") as monitor:
        for i in range(2):
            optimizer.zero_grad()
            scaler.scale(_loss(model, _batch(i))).backward()
            if i:
                model[2].weight.grad[0, 0] = math.nan
            scaler.step(optimizer)
            scaler.update()
    assert [step.skipped for step in monitor.steps] == [False, True]
    assert monitor.steps[1].lost_updates is None


# --- what gradients may look like -----------------------------------------------------------------------


class _Odd(nn.Module):
    """Sparse and complex gradients, a shared weight, a frozen one, one that is never used, an empty one."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 4, sparse=True)
        self.turn = nn.Parameter(torch.ones(4, dtype=torch.complex64) * (0.5 + 0.25j))
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.frozen = nn.Parameter(torch.ones(4), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(3))
        self.empty = nn.Parameter(torch.ones(0))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens) * self.frozen
        x = self.second(self.first((x * self.turn).abs()))
        return x.square().mean() + self.empty.sum()


def test_odd_gradients() -> None:
    """Uncoalesced sparse ones are summed first, complex ones count by magnitude, None is none."""
    torch.manual_seed(0)
    model = _Odd()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    tokens = torch.tensor([[1, 1, 2], [2, 2, 7]])
    with Monitor(model, optimizer) as monitor:
        for _ in range(2):
            optimizer.zero_grad()
            model(tokens).backward()
            dense = [
                p.grad.to_dense() if p.grad.is_sparse else p.grad for p in model.parameters() if p.grad is not None
            ]
            norm = math.sqrt(sum(float(g.abs().double().square().sum()) for g in dense))
            layout = model.table.weight.grad.is_coalesced()
            optimizer.step()
    assert not monitor.errors and not layout
    assert monitor.steps[-1].grad_norm == pytest.approx(norm, rel=1e-5)
    assert monitor.steps[-1].worst in dict(model.named_parameters())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_halves_are_added_up_in_float32(dtype: torch.dtype) -> None:
    """A norm whose square does not fit into float16 is right to float32's precision; float64 to its own."""
    model = nn.Linear(300, 300, bias=False).to(dtype)
    model.weight.grad = torch.full_like(model.weight, 3.0)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    with Monitor(model, optimizer) as monitor:
        optimizer.step()
    assert monitor.steps[0].grad_norm == pytest.approx(900.0, rel=1e-12 if dtype is torch.float64 else 1e-5)
    assert monitor.steps[0].dtypes == (str(dtype).removeprefix("torch."),)


def test_finite_gradients_whose_squares_are_not() -> None:
    """A norm of 1e22 is a number, and no infinity."""
    model = nn.Linear(4, 4, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    with Monitor(model, optimizer, on_symptom="record") as monitor:
        model.weight.grad = torch.full_like(model.weight, 1e22)
        optimizer.step()
    assert monitor.steps[0].grad_norm == pytest.approx(4e22, rel=1e-6)


def test_channels_last_and_expanded_gradients() -> None:
    """Any memory format gives the same record, and keeps its own."""
    torch.manual_seed(0)
    model = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with Monitor(model, optimizer, sample=1) as monitor:
        model(torch.randn(2, 3, 8, 8)).sum().backward()
        model.bias.grad = torch.ones(()).expand(8)
        norm, strides = _norm(model), model.weight.grad.stride()
        optimizer.step()
    assert model.weight.grad.stride() == strides and model.bias.grad.stride() == (0,)
    step = monitor.steps[0]
    assert step.grad_norm == pytest.approx(norm, rel=1e-5) and step.lost_updates == 0.0 and not monitor.errors


def test_meta_and_fake_tensors_are_left_alone() -> None:
    """There is nothing to read: a record without numbers, and no error."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    for around in (torch.device("meta"), FakeTensorMode()):
        with around:
            model = nn.Linear(3, 2)
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            with Monitor(model, optimizer) as monitor:
                model(torch.ones(1, 3)).sum().backward()
                optimizer.step()
        assert not monitor.errors
        assert [step.grad_norm for step in monitor.steps] == [None]


def test_master_weights_that_the_model_does_not_hold() -> None:
    """An optimizer over float32 copies of half weights is the one that was handed over: its weights count."""
    model = _model(dtype=torch.bfloat16)
    masters = [p.detach().float().requires_grad_() for p in model.parameters()]
    optimizer = torch.optim.SGD(masters, 1e-3)
    with Monitor(model, optimizer, sample=1) as monitor:
        _loss(model, _batch(dtype=torch.bfloat16)).backward()
        for master, p in zip(masters, model.parameters()):
            master.grad = p.grad.float()
        optimizer.step()
    step = monitor.steps[0]
    assert step.dtypes == ("float32",) and step.lost_updates == 0.0 and step.worst.startswith("param_groups[0]")


# --- the sampled numbers --------------------------------------------------------------------------------


@DEFER
def test_the_update_ratio_is_that_of_the_norms(defer: bool) -> None:
    """Small tensors are taken whole: the ratio is exact, also of large ones up to the sample's error."""
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    before = [p.detach().clone() for p in model.parameters()]
    with Monitor(model, optimizer, sample=1, _defer=defer) as monitor:
        list(_train(model, optimizer, steps=1))
    moved = math.sqrt(sum(float((p - b).double().square().sum()) for p, b in zip(model.parameters(), before)))
    length = math.sqrt(sum(float(b.double().square().sum()) for b in before))
    step = monitor.steps[0]
    assert step.update_ratio == pytest.approx(moved / length, rel=1e-5)
    assert step.lost_updates == 0.0 and step.bad_weights == 0 and step.faint == 0.0


def test_lost_updates_of_bfloat16_weights() -> None:
    """Steps below half an ulp of the weights move nothing; the share is that of all weights with a gradient."""
    model = nn.Linear(40, 30, bias=False).bfloat16()
    nn.init.ones_(model.weight)
    with torch.no_grad():
        model.weight[:10] = 1e-3
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    with Monitor(model, optimizer, sample=1) as monitor:
        model.weight.grad = torch.ones_like(model.weight)
        model.weight.grad[20:25] = 0.0
        before = model.weight.detach().clone()
        optimizer.step()
        still = ((model.weight == before) & (model.weight.grad != 0)).sum() / (model.weight.grad != 0).sum()
    assert float(still) == pytest.approx(15 / 25)
    assert monitor.steps[0].lost_updates == pytest.approx(float(still), abs=0.05)
    assert monitor.steps[0].zero_grads == pytest.approx(5 / 30, abs=0.04)


def test_a_warm_up_from_zero_loses_no_updates() -> None:
    """Where the learning rate is 0 nothing is meant to move."""
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    with Monitor(model, optimizer, sample=1) as monitor:
        list(_train(model, optimizer, steps=1))
    assert monitor.steps[0].lost_updates is None and monitor.steps[0].lr == (0.0,)


def test_small_gradients_are_those_below_the_smallest_normal_of_the_lower_format() -> None:
    """Under float16 autocast a float32 gradient was computed in float16, times the loss scale."""
    model = nn.Linear(8, 8, bias=False)
    optimizer, scaler = torch.optim.SGD(model.parameters(), 0.1), torch.amp.GradScaler("cpu", init_scale=16.0)
    with Monitor(model, optimizer, scaler, sample=1, on_symptom="record") as monitor:
        for _ in range(2):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                loss = model(torch.ones(1, 8)).float().sum()
            scaler.scale(loss).backward()
            with torch.no_grad():
                model.weight.grad[:2] = 1e-6 * 16  # times the scale: 1.6e-5, below 6.1e-5
                model.weight.grad[2:4] = 1e-5 * 16
                model.weight.grad[4] = 0.0
            scaler.step(optimizer)
            scaler.update()
    step = monitor.steps[-1]
    assert step.autocast == "float16"
    assert step.small_grads == pytest.approx(2 / 7) and step.zero_grads == pytest.approx(1 / 8)


def test_the_window_names_the_first_to_overflow() -> None:
    """The largest gradient, without the scale, decides what the largest safe scale is."""
    model = nn.Linear(8, 8)
    optimizer, scaler = torch.optim.SGD(model.parameters(), 0.1), torch.amp.GradScaler("cpu", init_scale=2.0**20)
    with Monitor(model, optimizer, scaler, sample=1, on_symptom="record") as monitor:
        assert monitor.scale_window() is None
        with torch.autocast("cpu", torch.float16):
            loss = model(torch.ones(1, 8)).float().sum()
        scaler.scale(loss * 1e-3).backward()
        model.bias.grad[0] = 2.0 * 2.0**20
        scaler.step(optimizer)
        scaler.update()
        found = monitor.scale_window()
    assert found is not None and found.dtype == "float16"
    assert (found.high, found.current, found.largest) == (2.0**14, 2.0**20, "bias")
    assert found.fits is False and "bias is the first to overflow" in str(found)
    assert "bias is the first to overflow" in (monitor.course().scale or "")


def test_frozen_second_moments() -> None:
    """An infinite second moment is found wherever it stands, and makes no NaN."""
    model = nn.Linear(100, 100)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    with Monitor(model, optimizer, sample=1, on_symptom="record") as monitor:
        for i in range(2):
            optimizer.zero_grad()
            model(torch.ones(1, 100)).sum().backward()
            optimizer.step()
            if not i:
                optimizer.state[model.weight]["exp_avg_sq"][17, 23] = math.inf
    assert monitor.steps[0].frozen == 0.0
    assert monitor.steps[1].frozen == pytest.approx(1 / 10_100)
    assert monitor.steps[1].state_dtypes == ("float32",)


def test_dead_activations() -> None:
    """A ReLU whose output was nothing but zeros is named; one that is alive is not."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU())
    nn.init.constant_(model[2].bias, -100.0)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    with Monitor(model, optimizer, sample=1, on_symptom="record") as monitor:
        model(torch.randn(8, 4)).sum().backward()
        optimizer.step()
    assert monitor.steps[0].dead == ("3",)


def test_bad_weights_are_counted_in_the_step_of_an_anomaly() -> None:
    """Weights that a NaN loss has poisoned: all of them, in that very step, sampled or not."""
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with Monitor(model, optimizer, sample=1000, on_symptom="record") as monitor:
        for i in range(6):
            optimizer.zero_grad()
            loss = _loss(model, _batch(i))
            (loss * math.nan if i == 4 else loss).backward()
            optimizer.step()
    count = sum(p.numel() for p in model.parameters())
    assert monitor.steps[4].bad_weights == count and math.isnan(monitor.steps[4].loss)
    assert monitor.steps[3].bad_weights is None
    assert monitor.steps[0].bad_weights == 0
    assert any(symptom.name == "nan_inf" and symptom.step == 4 for symptom in monitor.symptoms)


def test_faint_layers() -> None:
    """Layers that nothing comes back to, while the whole norm looks well."""
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with Monitor(model, optimizer, sample=1, on_symptom="record") as monitor:
        _loss(model, _batch()).backward()
        model[0].weight.grad.mul_(1e-9)
        optimizer.step()
    total = sum(p.numel() for p in model.parameters())
    assert monitor.steps[0].faint == pytest.approx(model[0].weight.numel() / total)


# --- batch, numbers, `every`, log ------------------------------------------------------------------------


def test_the_batch_hash_is_that_of_a_finding() -> None:
    """The same batch has the same hash in the record and in the finding of a watch."""
    model = nn.Linear(2, 2)
    x = torch.tensor([[math.nan, 1.0]])
    with nanhunt.watch(model, on_hit="record") as hunt:
        model(x).sum().backward()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with Monitor(model, optimizer, on_symptom="record") as monitor:
        model(x).sum().backward()
        optimizer.step()
    assert hunt.finding is not None
    assert monitor.steps[0].batch == hunt.finding.context["batch_hash"]


@DEFER
def test_different_batches_have_different_hashes(defer: bool) -> None:
    """And an evaluation between the steps is nobody's batch."""
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with Monitor(model, optimizer, _defer=defer) as monitor:
        for i in (0, 1, 0):
            with torch.no_grad():
                model(_batch(9)[0])
            optimizer.zero_grad()
            _loss(model, _batch(i)).backward()
            optimizer.step()
    one, two, three = (step.batch for step in monitor.steps)
    assert one == three != two and one is not None


def test_every_nth_step() -> None:
    """Only those are recorded, under their own numbers, and the others cost no look."""
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with Monitor(model, optimizer, every=3) as monitor:
        known = list(_train(model, optimizer, steps=8))
    assert [step.step for step in monitor.steps] == [0, 3, 6]
    for step in monitor.steps:
        _agrees(step, known[step.step])


def test_a_nan_between_two_recorded_steps() -> None:
    """With every=n the diagnosis has the last good step and the first bad one, and the birth lies between."""
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with Monitor(model, optimizer, every=5, on_symptom="record") as monitor:
        for i in range(21):
            optimizer.zero_grad()
            loss = _loss(model, _batch(i))
            (loss * math.nan if i == 12 else loss).backward()
            optimizer.step()
    found = next(symptom for symptom in monitor.symptoms if symptom.name == "nan_inf")
    assert found.before is not None and found.before.step == 10 and found.step == 15


def test_the_ring_keeps_the_newest() -> None:
    """And the diagnosis has seen them all."""
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with Monitor(model, optimizer, ring=3) as monitor:
        list(_train(model, optimizer, steps=8))
    assert [step.step for step in monitor.steps] == [5, 6, 7]
    assert monitor.course().records == 8


def test_what_is_logged_joins_the_step_that_has_just_ended() -> None:
    """Metrics, notes and the program's own numbers, until the next backward."""
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with Monitor(model, optimizer) as monitor:
        for i, _ in enumerate(_train(model, optimizer, steps=3)):
            monitor.log(step=100 + i, accuracy=torch.tensor(0.5 + i / 10), note="epoch end")
    assert [step.step for step in monitor.steps] == [100, 101, 102]
    assert [step.metrics["accuracy"] for step in monitor.steps] == pytest.approx([0.5, 0.6, 0.7])
    assert monitor.steps[0].note == "epoch end" and monitor.steps[0].grad_norm is not None


def test_metrics_after_the_record_was_read_are_a_record_of_their_own() -> None:
    """Under the number of the step they belong to."""
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with Monitor(model, optimizer) as monitor:
        list(_train(model, optimizer, steps=2))
        assert len(monitor.steps) == 2
        monitor.log(accuracy=0.5)
    assert [(step.step, dict(step.metrics)) for step in monitor.steps] == [(0, {}), (1, {}), (1, {"accuracy": 0.5})]


def test_what_is_not_known_is_not_logged() -> None:
    """A metric that is None was not measured, and a call that tells nothing is no record."""
    with Monitor(nn.Linear(1, 1)) as monitor:
        monitor.log()
        monitor.log(accuracy=None, metrics={"bleu": None})
        assert monitor.steps == ()
        monitor.log(step=np.int64(7), loss=1.0, accuracy=None, note=5)  # type: ignore[arg-type]
    (step,) = monitor.steps
    assert (step.step, step.loss, step.metrics, step.note) == (7, 1.0, {}, "5") and type(step.step) is int


def test_a_loop_that_only_logs() -> None:
    """Nothing of torch's is used: each loss is a step, and the symptoms come from what is told."""
    monitor = Monitor(nn.Linear(1, 1), on_symptom="record")
    for i in range(30):
        monitor.log(loss=2.0 if i < 20 else math.nan, grad_norm=1.0, lr=0.1, loss_scale=1024.0)
        if i == 5:
            monitor.log(accuracy=0.25)
    monitor.remove()
    assert [step.step for step in monitor.steps] == [*range(6), 5, *range(6, 30)]
    assert [symptom.name for symptom in monitor.symptoms][:1] == ["nan_inf"] and monitor.symptoms[0].step == 20


def test_a_loop_without_an_optimizer() -> None:
    """Updates by hand: a step ends when the next backward finds the gradients gone or zeroed."""
    for zero in (lambda p: setattr(p, "grad", None), lambda p: p.grad.zero_()):
        model = _model()
        with Monitor(model) as monitor:
            norms = []
            for i in range(3):
                _loss(model, _batch(i)).backward()
                norms.append(_norm(model))
                with torch.no_grad():
                    for p in model.parameters():
                        p -= 0.1 * p.grad
                        zero(p)
        assert [step.grad_norm for step in monitor.steps] == pytest.approx(norms, rel=1e-5)


def test_a_gradient_penalty_is_no_loss() -> None:
    """autograd.grad inside the loss fills no .grad: the loss is what backward began on."""
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with Monitor(model, optimizer) as monitor:
        for _ in range(2):
            optimizer.zero_grad()
            x = torch.ones(4, 3, requires_grad=True)
            out = model(x).square().sum()
            (grad,) = torch.autograd.grad(out, x, create_graph=True)
            loss = grad.square().sum()
            loss.backward()
            optimizer.step()
    assert monitor.steps[-1].loss == pytest.approx(float(loss)) and len(monitor.steps) == 2


def test_another_model_is_not_recorded() -> None:
    """Its backward begins no step of ours, and its optimizer ends none."""
    model, other = _model(), _model()
    mine, theirs = torch.optim.SGD(model.parameters(), 0.1), torch.optim.SGD(other.parameters(), 0.5)
    with Monitor(model) as monitor:
        losses = []
        for i in range(3):
            for net, optimizer in ((model, mine), (other, theirs)):
                optimizer.zero_grad()
                loss = _loss(net, _batch(i))
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
    assert [step.loss for step in monitor.steps] == pytest.approx(losses[::2])
    assert {step.lr for step in monitor.steps} == {(0.1,)}


def test_the_step_an_exception_ends_is_recorded() -> None:
    """What was known of it by then stands in the record, and the exception goes on."""
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(KeyError), Monitor(model, optimizer) as monitor:
        list(_train(model, optimizer, steps=2))
        loss = _loss(model, _batch())
        loss.backward()
        raise KeyError
    assert len(monitor.steps) == 3 and monitor.steps[-1].loss == pytest.approx(float(loss))


# --- compiled models, several ranks ------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["compiled before", "compiled after", "wrapped"])
def test_a_compiled_model_is_recorded_and_stays_one_graph(when: str) -> None:
    """Loss and norms as ever; the graphs are those of a run without a monitor, also once it is gone."""
    from torch._dynamo.testing import CompileCounterWithBackend

    model = _model()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def train() -> list[float]:
        norms = []
        for i in range(3):
            optimizer.zero_grad()
            _loss(compiled, _batch(i)).backward()
            norms.append(_norm(model))
            optimizer.step()
        return norms

    if when == "compiled before":
        train()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that there are global hooks on modules
        with Monitor(compiled if when == "wrapped" else model, optimizer, sample=1) as monitor:
            norms = train()
        train()
    assert [step.grad_norm for step in monitor.steps] == pytest.approx(norms, rel=1e-5)
    assert all(step.loss is not None for step in monitor.steps) and not monitor.errors
    assert counter.frame_count <= (1 if when == "wrapped" else 2)


def _rank(rank: int, folder: str) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    model = torch.nn.parallel.DistributedDataParallel(_model())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with Monitor(model, optimizer, log=f"{folder}/run.jsonl", sample=1) as monitor:
        for i in range(3 + rank):  # one rank makes a record more: nobody waits for the other
            optimizer.zero_grad()
            with model.no_sync() if i == 3 else contextlib.nullcontext():
                _loss(model, _batch(2 * i + rank)).backward()
            optimizer.step()
    assert not monitor.errors
    torch.distributed.destroy_process_group()


def test_each_rank_writes_its_own_file(tmp_path: Path) -> None:
    """Norms are those after the all-reduce, losses each rank's own, and there is no collective of ours."""
    torch.multiprocessing.spawn(_rank, (str(tmp_path),), nprocs=2)
    ranks = [list(read(tmp_path / f"run.jsonl.rank{rank}")) for rank in range(2)]
    assert [len(steps) for steps in ranks] == [3, 4]
    assert [step.rank for step in ranks[1]] == [1] * 4
    for one, other in zip(*ranks):
        assert one.grad_norm == other.grad_norm and one.loss != other.loss and one.batch != other.batch


# --- file, symptoms, page, front door ---------------------------------------------------------------------


def test_the_file_holds_what_the_ring_holds(tmp_path: Path) -> None:
    """A header with what was recorded how, then a line a step."""
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with Monitor(model, optimizer, log=tmp_path / "run.jsonl", every=2) as monitor:
        list(_train(model, optimizer, steps=5))
    header = json.loads((tmp_path / "run.jsonl").read_text().splitlines()[0])
    assert header["model"] == "Sequential" and header["every"] == 2 and header["nanhunt"] == nanhunt.__version__
    back = [{**step.to_dict(), "line": None} for step in read(tmp_path / "run.jsonl")]
    assert back == [{**step.to_dict(), "line": None} for step in monitor.steps]


def _poisoned(monitor: Monitor, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for i in range(6):
        optimizer.zero_grad()
        loss = _loss(model, _batch(i))
        (loss * math.nan if i == 3 else loss).backward()
        optimizer.step()


def test_a_symptom_is_warned_of_once() -> None:
    """With its step, its cause and what to do first."""
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.warns(nanhunt.SymptomWarning) as said, Monitor(model, optimizer) as monitor:
        _poisoned(monitor, model, optimizer)
    texts = [str(one.message) for one in said if "nan inf" in str(one.message)]
    assert len(texts) == 1 and "at step 3" in texts[0] and "First:" in texts[0]


def test_a_symptom_can_stop_the_training() -> None:
    """`on_symptom="raise"`: the error carries the symptom, leaves the loop, and the hooks come off."""
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    monitor = Monitor(model, optimizer, on_symptom="raise")
    with pytest.raises(nanhunt.SymptomError, match="nan inf at step 3") as caught, monitor:
        _poisoned(monitor, model, optimizer)
    assert caught.value.symptom.name == "nan_inf"
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    assert len(monitor.steps) <= 5


def test_a_callable_gets_each_symptom_and_may_raise() -> None:
    """What it raises is the program's own, and not counted as a failure of ours."""
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    got = []
    with Monitor(model, optimizer, on_symptom=got.append) as monitor:
        _poisoned(monitor, model, optimizer)
    assert got[0].name == "nan_inf" and tuple(got) == monitor.symptoms

    def angry(symptom: object) -> None:
        raise LookupError("mine")

    with pytest.raises(LookupError, match="mine"), Monitor(model, optimizer, on_symptom=angry) as monitor:
        _poisoned(monitor, model, optimizer)
    assert not monitor.errors


def test_the_course_of_a_running_monitor() -> None:
    """Judged as if this were the end, and the run goes on."""
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with Monitor(model, optimizer) as monitor:
        list(_train(model, optimizer, steps=3))
        first = monitor.course()
        list(_train(model, optimizer, steps=3))
    assert (first.records, monitor.course().records) == (3, 6)
    assert first.format == "live" and "loss" in first.curves


def test_switched_off(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """NANHUNT=0: no hook, no record, no file, and every call is harmless."""
    monkeypatch.setenv("NANHUNT", "0")
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with Monitor(model, optimizer, log=tmp_path / "x.jsonl") as monitor:
        list(_train(model, optimizer))
        monitor.log(loss=1.0)
        assert monitor.run(lambda x: x + 1, 2) == 3
    assert monitor.steps == () and not (tmp_path / "x.jsonl").exists()


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"optimizer": 3}, "optimizer is a int"),
        ({"scaler": 3}, "scaler is a int"),
        ({"every": 0}, "every=0: give a whole number"),
        ({"sample": 1.5}, "sample=1.5"),
        ({"ring": True}, "ring=True"),
        ({"on_symptom": "shout"}, "use one of 'warn', 'record', 'raise'"),
        ({"hold": 1}, "hold=1: give True or False"),
        ({"hunt": "yes"}, "hunt='yes'"),
        ({"log": "/"}, "cannot write the steps to '/'"),
    ],
)
def test_bad_options_are_refused_in_words(wrong: dict[str, Any], says: str) -> None:
    """At once, and with the legal values; no hook is left."""
    with pytest.raises(UsageError) as caught:
        Monitor(nn.Linear(1, 1), **wrong)
    assert says in str(caught.value)
    with pytest.raises(UsageError, match=r"pass the model itself"):
        Monitor("model")  # type: ignore[arg-type]


def test_what_is_logged_must_be_a_number() -> None:
    """A tensor of many, or a text, is refused with its name; a removed monitor takes nothing."""
    with Monitor(nn.Linear(1, 1)) as monitor:
        for wrong in (torch.ones(2), "high", [1.0]):
            with pytest.raises(UsageError, match=r"log\(accuracy=...\) takes a number"):
                monitor.log(accuracy=wrong)
        for step in (1.5, math.nan):
            with pytest.raises(UsageError, match=r"give the number of the step, a whole one"):
                monitor.log(step=step, loss=1.0)  # type: ignore[arg-type]
        with pytest.raises(UsageError, match=r"log\(metrics=...\) takes a dict"):
            monitor.log(metrics=[0.5])  # type: ignore[arg-type]
        assert monitor.steps == ()
    with pytest.raises(UsageError, match="was removed"):
        monitor.log(loss=1.0)
    with pytest.raises(UsageError, match="was removed"), monitor:
        pass


def test_beside_a_watch_both_see_the_same_steps() -> None:
    """The numbers of the records are those of the watch's findings."""
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        hunt = stack.enter_context(nanhunt.watch(model, optimizer, on_hit="record"))
        monitor = stack.enter_context(Monitor(model, optimizer))
        _poisoned(monitor, model, optimizer)
    assert hunt.finding is not None and hunt.finding.step == 3
    assert next(step.step for step in monitor.steps if step.bad()) == 3
