"""Trainings with one planted fault each, by symptom: what a diagnosis has to tell, from when on, and how soon."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn import functional as F

from .healthy_runs import Letters
from .run_records import Opener
from .runs import SPLIT, Loop, accuracy, cancer, diabetes, digit_batches, digits, draws, letters, mlp, sick, wine


def _regress(loop: Loop, batches: Iterator[tuple[Tensor, ...]], steps: int) -> None:
    for rows, goal in itertools.islice(batches, steps):
        loop.step(lambda rows=rows, goal=goal: F.mse_loss(loop.model(rows).float(), goal.float()))


def _illness(batch: int = 64, unit: float = 1.0) -> Iterator[tuple[Tensor, ...]]:
    x, y = diabetes()
    return draws(x, ((y - y.mean()) / y.std())[:, None] * unit, batch=batch)


def _scale(optimizer: torch.optim.Optimizer, factor: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] *= factor


# --- loss explosion ------------------------------


@sick("loss_explosion", "growth", "from the first step, tenfold every few steps, ends in Inf", start=0, within=20)
def explosion_from_the_start(seed: int, opener: Opener) -> None:
    torch.manual_seed(seed)
    model = nn.Linear(10, 1)
    _regress(Loop(opener, model, torch.optim.SGD(model.parameters(), lr=0.9)), _illness(), 200)


@sick(
    "loss_explosion",
    "ends_in_nan",
    "rises for some steps, then NaN for good: the rise came first",
    start=120,
    within=15,
)
def explosion_to_nan(seed: int, opener: Opener) -> None:
    torch.manual_seed(seed)
    model = mlp(10, 64, 64, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    loop = Loop(opener, model, optimizer)
    batches = _illness()
    _regress(loop, batches, 120)
    _scale(optimizer, 60)
    _regress(loop, batches, 60)


@sick("loss_explosion", "level", "jumps to hundreds of times the level and stays there", start=120, within=20)
def explosion_stays_high(seed: int, opener: Opener) -> None:
    torch.manual_seed(seed)
    model = mlp(64, 64, 64, 10)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    loop, batches = Loop(opener, model, optimizer), digit_batches()
    loop.classify(batches, 120)
    _scale(optimizer, 1000)
    loop.classify(batches, 120)


@sick(
    "loss_explosion",
    "level",
    "Adam a thousand times too fast on a regression: up by 1e4, and there it stays",
    start=150,
    within=20,
)
def explosion_of_a_regression(seed: int, opener: Opener) -> None:
    torch.manual_seed(seed)
    model = mlp(10, 64, 64, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    loop, batches = Loop(opener, model, optimizer), _illness()
    _regress(loop, batches, 150)
    _scale(optimizer, 3000)
    _regress(loop, batches, 200)


@sick(
    "loss_explosion",
    "growth",
    "a recurrent net without clipping; the gradient norm leads the loss",
    start=100,
    within=30,
)
def explosion_of_a_recurrent_net(seed: int, opener: Opener) -> None:
    torch.manual_seed(seed)
    model = Letters(lambda width, hidden, batch_first: nn.RNN(width, hidden, nonlinearity="relu", batch_first=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    loop = Loop(opener, model, optimizer, clip=1.0)
    for step in range(180):
        if step == 100:
            loop.clip = None
            _scale(optimizer, 20)
        ids, goal = letters(16, 24)
        loop.step(lambda ids=ids, goal=goal: F.cross_entropy(model(ids).flatten(0, 1), goal.flatten()))


@sick(
    "loss_explosion",
    "warm_up",
    "learns at first, while lr still rises; then it is restless for a hundred steps, then explodes",
    start="rise",
    within=170,
    early=20,
)
def explosion_in_the_warmup(seed: int, opener: Opener) -> None:
    torch.manual_seed(seed)
    model = mlp(10, 64, 64, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.5)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 300))
    _regress(Loop(opener, model, optimizer, schedule=schedule), _illness(), 300)


@sick(
    "loss_explosion",
    "slow",
    "one direction grows by a few percent a step, over 300 steps",
    start="rise",
    within=120,
    early=60,
)
def explosion_slowly(seed: int, opener: Opener) -> None:
    torch.manual_seed(seed)
    x, y = wine()
    model = nn.Linear(13, 1)
    top = float(torch.linalg.eigvalsh(2 * x.T @ x / len(x))[-1])
    loop = Loop(opener, model, torch.optim.SGD(model.parameters(), lr=2.02 / top))
    _regress(loop, draws(x, y[:, None].float(), batch=len(x)), 400)


@sick(
    "loss_explosion",
    "growth",
    "float16: the scale falls too, but because the gradients have exploded",
    start=150,
    within=20,
)
def explosion_under_float16(seed: int, opener: Opener) -> None:
    torch.manual_seed(seed)
    model = mlp(64, 64, 64, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loop = Loop(opener, model, optimizer, scaler=GradScaler("cpu", init_scale=2.0**13), autocast=torch.float16)
    batches = digit_batches()
    loop.classify(batches, 150)
    _scale(optimizer, 200)
    loop.classify(batches, 80)


# --- vanishing gradient ------------------------------


@sick(
    "vanishing_gradient",
    "saturated",
    "fourteen sigmoids: the norm of all gradients is that of the last layer and looks well; most layers get nothing",
    also=("non_convergence",),
    start=0,
    within=200,
)
def vanishing_in_deep_sigmoids(seed: int, opener: Opener) -> None:
    torch.manual_seed(seed)
    model = mlp(64, *[32] * 14, 10, act=nn.Sigmoid)
    Loop(opener, model, torch.optim.SGD(model.parameters(), lr=0.1)).classify(digit_batches(), 300)


@sick(
    "vanishing_gradient",
    "saturated",
    "a sigmoid with a squared loss, pushed to its end by one bad step",
    start=120,
    within=60,
)
def vanishing_in_a_saturated_output(seed: int, opener: Opener) -> None:
    torch.manual_seed(seed)
    x, y = cancer()
    model = nn.Sequential(mlp(30, 16, 1), nn.Sigmoid())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    loop, batches = Loop(opener, model, optimizer), draws(x, y[:, None].float(), batch=32)
    _regress(loop, batches, 119)
    with torch.no_grad():
        model[0][-1].bias -= 80.0  # what a wild step does
    _regress(loop, batches, 200)


@sick(
    "vanishing_gradient",
    "under_scaled",
    "float16 autocast, no scaler, a sum divided by all tokens of an epoch: each gradient is 0",
    start=0,
    within=60,
)
def vanishing_float16_without_scale(seed: int, opener: Opener) -> None:
    torch.manual_seed(seed)
    model = mlp(64, 64, 64, 10)
    loop = Loop(opener, model, torch.optim.SGD(model.parameters(), lr=0.2 * 2**23), autocast=torch.float16)
    for x, y in itertools.islice(digit_batches(64), 200):
        loop.step(lambda x=x, y=y: F.cross_entropy(model(x).float(), y) / 2**23)


@sick(
    "vanishing_gradient",
    "under_scaled",
    "a scaler whose scale is 1 and grows too seldom: 97 of 100 gradient entries are 0, the norm is not quite",
    also=("non_convergence",),
    start=0,
    within=100,
)
def vanishing_at_scale_one(seed: int, opener: Opener) -> None:
    torch.manual_seed(seed)
    model = mlp(64, 64, 64, 64, 64, 10, act=nn.Tanh)
    scaler = GradScaler("cpu", init_scale=1.0, growth_interval=100_000)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    loop = Loop(opener, model, optimizer, scaler=scaler, autocast=torch.float16)
    for x, y in itertools.islice(digit_batches(64), 200):
        loop.step(lambda x=x, y=y: F.cross_entropy(model(x).float(), y) / 2**17)


@sick(
    "vanishing_gradient",
    "dead_activations",
    "one wild step kills every ReLU of a layer; the loss stands at chance",
    start=120,
    within=60,
)
def vanishing_through_dead_units(seed: int, opener: Opener) -> None:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 32), nn.ReLU(), nn.Linear(32, 10, bias=False))
    loop, batches = Loop(opener, model, torch.optim.SGD(model.parameters(), lr=0.2)), digit_batches()
    loop.classify(batches, 119)
    with torch.no_grad():
        model[2].bias -= 50.0
    loop.classify(batches, 200)


@sick(
    "vanishing_gradient",
    "dead_activations",
    "the same with a bias at the end, which alone has a gradient: the norm looks well",
    also=("non_convergence",),
    start=120,
    within=80,
)
def vanishing_but_for_a_bias(seed: int, opener: Opener) -> None:
    torch.manual_seed(seed)
    model = mlp(64, 48, 32, 10)
    loop, batches = Loop(opener, model, torch.optim.SGD(model.parameters(), lr=0.2)), digit_batches()
    loop.classify(batches, 119)
    with torch.no_grad():
        model[2].bias -= 50.0
    loop.classify(batches, 200)


@sick(
    "vanishing_gradient",
    "frozen",
    "float16 weights, a fixed loss scale that is not taken out again since Adam does not care: second moments overflow",
    also=("non_convergence",),
    start=0,
    within=100,
)
def vanishing_frozen_by_adam(seed: int, opener: Opener) -> None:
    torch.manual_seed(seed)
    model = mlp(64, 24, 10, act=nn.Tanh).half()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, betas=(0.9, 0.95), eps=1e-4)
    recorder = opener(model, optimizer)
    for x, y in itertools.islice(digit_batches(32, torch.float16), 200):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x).float(), y)
        (loss * 2.0**17).backward()
        recorder.gradients()
        optimizer.step()
        recorder.log(loss=loss)


@sick(
    "vanishing_gradient",
    "clipped_before_unscale",
    "gradient norm is fine, what the optimizer gets is 1/65536",
    also=("non_convergence",),
    start=0,
    within=60,
)
def vanishing_by_clipping_too_early(seed: int, opener: Opener) -> None:
    torch.manual_seed(seed)
    model = mlp(64, 48, 10)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), GradScaler("cpu", init_scale=2.0**14)
    recorder = opener(model, optimizer, scaler)
    for x, y in itertools.islice(digit_batches(), 200):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.cross_entropy(model(x).float(), y)
        scaler.scale(loss).backward()
        recorder.gradients()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        recorder.log(loss=loss)


@sick(
    "vanishing_gradient",
    "every_step_skipped",
    "what overflows is zeroed and the step skipped, each time: gradient norm 0, lr stands at the 0 of warm-up",
    also=("non_convergence",),
    start=0,
    within=60,
)
def vanishing_every_step_skipped(seed: int, opener: Opener) -> None:
    torch.manual_seed(seed)
    model = mlp(64, 48, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 20))
    recorder, scale = opener(model, optimizer), 2.0**30
    for x, y in itertools.islice(digit_batches(), 150):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.cross_entropy(model(x).float(), y)
        (loss * scale).backward()
        if all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters()):
            recorder.gradients()
            optimizer.step()
            schedule.step()
        else:  # as some libraries do it; and this one forgets to lower the scale
            optimizer.zero_grad(set_to_none=False)
            recorder.gradients()
        recorder.log(loss=loss)


# --- NaN and Inf ------------------------------


@sick(
    "nan_inf",
    "out_of_the_blue",
    "log of a probability that has become exactly 0 or 1, as the fit gets perfect",
    start="bad",
    within=0,
)
def nan_log_of_zero(seed: int, opener: Opener) -> None:
    torch.manual_seed(seed)
    x, y = cancer()
    model = mlp(30, 32, 1)
    loop = Loop(opener, model, torch.optim.Adam(model.parameters(), lr=4e-3))
    for rows, goal in itertools.islice(draws(x, y[:, None].float(), batch=64), 400):

        def loss_of(rows: Tensor = rows, goal: Tensor = goal) -> Tensor:
            p = model(rows).sigmoid()
            return -(goal * p.log() + (1 - goal) * (1 - p).log()).mean()

        loop.step(loss_of)


@sick(
    "nan_inf",
    "forward_overflow",
    "from step 150 on some batches are in a raw unit and overflow float16 in forward",
    start=150,
    within=1,
)
def nan_forward_overflow(seed: int, opener: Opener) -> None:
    torch.manual_seed(seed)
    model = mlp(64, 64, 10)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    loop = Loop(opener, model, optimizer, scaler=GradScaler("cpu", init_scale=2.0**12), autocast=torch.float16)
    for step, (x, y) in enumerate(itertools.islice(digit_batches(), 250)):
        raw = x * 60_000 if step >= 150 and step % 3 == 0 else x
        loop.step(lambda raw=raw, y=y: F.cross_entropy(model(raw), y))


@sick("nan_inf", "bad_sample", "one NaN in one batch; the weights are NaN from then on", start=130, within=0)
def nan_in_one_batch(seed: int, opener: Opener) -> None:
    torch.manual_seed(seed)
    model = mlp(64, 64, 10)
    loop = Loop(opener, model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    for step, (x, y) in enumerate(itertools.islice(digit_batches(), 180)):
        if step == 130:
            x = x.clone()
            x[3, 17] = math.nan
        loop.step(lambda x=x, y=y: F.cross_entropy(model(x), y))


@sick(
    "nan_inf",
    "bad_sample",
    "the NaN row comes once an epoch; the scaler skips the step, and all goes on",
    start=100,
    within=1,
)
def nan_once_an_epoch(seed: int, opener: Opener) -> None:
    torch.manual_seed(seed)
    model = mlp(64, 64, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loop = Loop(opener, model, optimizer, scaler=GradScaler("cpu", init_scale=2.0**10), autocast=torch.float16)
    for step, (x, y) in enumerate(itertools.islice(digit_batches(), 300)):
        if step % 50 == 0 and step >= 100:
            x = x.clone()
            x[5] = math.nan
        loop.step(lambda x=x, y=y: F.cross_entropy(model(x).float(), y))


class Trusting(torch.optim.SGD):
    """Steps in proportion to the weights, whatever the gradient's size, and nobody thought of a gradient of 0."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                p.grad *= p.norm() / p.grad.norm()
        return super().step(closure)


@sick(
    "nan_inf",
    "bad_update",
    "hinge loss exactly 0 on a batch: the trust ratio divides by 0, weights are NaN after a perfect step",
    start="bad",
    within=1,
)
def nan_from_the_optimizer(seed: int, opener: Opener) -> None:
    torch.manual_seed(seed)
    x, y = cancer()
    model = mlp(30, 32, 1)
    loop = Loop(opener, model, Trusting(model.parameters(), lr=4e-3))
    for rows, sign in itertools.islice(draws(x, (y * 2 - 1).float()[:, None], batch=64), 300):
        loop.step(lambda rows=rows, sign=sign: F.relu(1 - sign * model(rows)).mean())


@sick(
    "nan_inf",
    "scale_collapse",
    "sqrt at zero in a penalty: gradients are NaN at every scale; the loss stays finite, nothing is learnt",
    start=150,
    within=25,
)
def nan_gradients_at_every_scale(seed: int, opener: Opener) -> None:
    torch.manual_seed(seed)
    model = mlp(64, 64, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loop = Loop(opener, model, optimizer, scaler=GradScaler("cpu"), autocast=torch.float16)
    for step, (x, y) in enumerate(itertools.islice(digit_batches(), 220)):
        if step >= 150:
            x = torch.cat([x[:-1], x[:1]])  # the new shard has pairs of equal images

        def loss_of(x: Tensor = x, y: Tensor = y) -> Tensor:
            out = model(x).float()
            apart = (out[0] - out[-1]).square().sum().sqrt()
            return F.cross_entropy(out, y) - 1e-3 * apart

        loop.step(loss_of)


@sick(
    "nan_inf",
    "overflow_at_fixed_scale",
    "a scale that cannot fall: each gradient is Inf from the first step on, each step skipped",
    also=("vanishing_gradient", "non_convergence"),
    start=0,
    within=60,
)
def nan_scale_that_cannot_fall(seed: int, opener: Opener) -> None:
    torch.manual_seed(seed)
    model = mlp(64, 48, 10)
    scaler = GradScaler("cpu", init_scale=2.0**28, backoff_factor=0.999)
    loop = Loop(opener, model, torch.optim.SGD(model.parameters(), lr=0.1), scaler=scaler, autocast=torch.float16)
    loop.classify(digit_batches(), 200)


@sick(
    "nan_inf",
    "bad_gradient",
    "the root of an exact 0 in an extra term: the loss of that step is fine, that of the next is NaN",
    start=140,
    within=1,
)
def nan_in_backward(seed: int, opener: Opener) -> None:
    torch.manual_seed(seed)
    model = mlp(64, 64, 10)
    loop = Loop(opener, model, torch.optim.AdamW(model.parameters(), lr=2e-3))
    for step, (x, y) in enumerate(itertools.islice(digit_batches(), 200)):
        blank = torch.where(torch.arange(len(x))[:, None] == 0, 0.0, x) if step == 140 else x

        def loss_of(x: Tensor = blank, y: Tensor = y, step: int = step) -> Tensor:
            out = model(x)
            norm = (out - out.detach()).square().sum(-1).sqrt() if step == 140 else 0.0 * out.sum(-1)
            return F.cross_entropy(out, y) + norm.mean()

        loop.step(loss_of)


@sick("nan_inf", "bad_rate", "the schedule gives NaN after its last step: the weights go with it", start=150, within=1)
def nan_learning_rate(seed: int, opener: Opener) -> None:
    torch.manual_seed(seed)
    model = mlp(64, 64, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    # (1 - step / 149) ** 0.9 of a negative number is NaN where floats are not Python's.
    power = lambda step: float((1 - torch.tensor(step / 149.5)).pow(0.9))  # noqa: E731
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, power)
    Loop(opener, model, optimizer, schedule=schedule).classify(digit_batches(), 200)


@sick(
    "nan_inf",
    "bad_batch",
    "the last batch of an epoch holds one row, whose standard deviation is NaN",
    start=44,
    within=0,
)
def nan_of_a_lone_row(seed: int, opener: Opener) -> None:
    torch.manual_seed(seed)
    x, y = digits()
    model = mlp(64, 48, 10)
    loop = Loop(opener, model, torch.optim.Adam(model.parameters(), lr=2e-3))
    for _ in range(2):
        order = torch.randperm(44 * 32 + 1)
        for rows in order.split(32):

            def loss_of(rows: Tensor = rows) -> Tensor:
                out = model((x[rows] - x[rows].mean(0)) / (x[rows].std(0) + 0.1))
                return F.cross_entropy(out, y[rows])

            loop.step(loss_of)


# --- no convergence ------------------------------


@sick(
    "non_convergence",
    "lost_updates",
    "bfloat16 weights: nearly each update is under half an ulp; gradients are fine",
    start=0,
    within=400,
)
def stuck_bfloat16_weights(seed: int, opener: Opener) -> None:
    torch.manual_seed(seed)
    model = mlp(64, 64, 10).bfloat16()
    loop = Loop(opener, model, torch.optim.SGD(model.parameters(), lr=2e-3))
    loop.classify(digit_batches(dtype=torch.bfloat16), 600)


@sick("non_convergence", "lost_updates", "float16 weights with Adam at 1e-5: the same", start=0, within=250)
def stuck_float16_weights(seed: int, opener: Opener) -> None:
    torch.manual_seed(seed)
    model = mlp(64, 64, 10).half()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-6, eps=1e-4, weight_decay=0.0)
    Loop(opener, model, optimizer).classify(digit_batches(dtype=torch.float16), 300)


@sick("non_convergence", "lost_updates", "bfloat16 weights and moments, AdamW at 1e-5", start=0, within=400)
def stuck_bfloat16_adamw(seed: int, opener: Opener) -> None:
    torch.manual_seed(seed)
    model = mlp(64, 64, 10, act=nn.GELU).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, weight_decay=0.0)
    Loop(opener, model, optimizer).classify(digit_batches(dtype=torch.bfloat16), 500)


@sick("non_convergence", "no_rate", "warm-up by whole numbers: step // 1000 is 0 for the whole run", start=0, within=60)
def stuck_rate_zero(seed: int, opener: Opener) -> None:
    torch.manual_seed(seed)
    model = mlp(64, 64, 10)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step // 1000)
    Loop(opener, model, optimizer, schedule=schedule).classify(digit_batches(), 200)


@sick(
    "non_convergence",
    "small_rate",
    "lr 1e-9 in place of 1e-3: gradients are fine, weights move by 1e-10",
    start=0,
    within=200,
)
def stuck_rate_too_small(seed: int, opener: Opener) -> None:
    torch.manual_seed(seed)
    model = mlp(64, 64, 10)
    Loop(opener, model, torch.optim.SGD(model.parameters(), lr=1e-9, momentum=0.9)).classify(digit_batches(), 300)


@sick(
    "non_convergence",
    "no_rate",
    "the schedule was given epochs for steps: lr is 0 from step 40 on, while the loss is still high",
    start=40,
    within=200,
)
def stuck_schedule_over(seed: int, opener: Opener) -> None:
    torch.manual_seed(seed)
    model = mlp(64, 64, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / 40))
    Loop(opener, model, optimizer, schedule=schedule).classify(digit_batches(), 300)


@sick(
    "non_convergence",
    "frozen_parameters",
    "the optimizer was made before the head was replaced: it holds weights that nobody uses",
    also=("vanishing_gradient",),
    start=0,
    within=200,
)
def stuck_wrong_parameters(seed: int, opener: Opener) -> None:
    torch.manual_seed(seed)
    model = mlp(64, 64, 10)
    for p in model[0].parameters():
        p.requires_grad_(False)
    optimizer = torch.optim.Adam((p for p in model.parameters() if p.requires_grad), lr=1e-3)
    model[2] = nn.Linear(64, 10)
    Loop(opener, model, optimizer).classify(digit_batches(), 200)


@sick(
    "non_convergence",
    "clipped_to_nothing",
    "max_norm 1e-6 in place of 1: gradients are fine before clipping",
    also=("vanishing_gradient",),
    start=0,
    within=200,
)
def stuck_by_clipping(seed: int, opener: Opener) -> None:
    torch.manual_seed(seed)
    model = mlp(64, 64, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    Loop(opener, model, optimizer, clip=1e-6).classify(digit_batches(), 300)


# --- fluctuating metric ------------------------------


def _score(model: nn.Module, rows: slice | Tensor) -> dict[str, float]:
    x, y = digits()
    return {"accuracy": accuracy(model, x[rows], y[rows])}


@sick(
    "metric_fluctuation",
    "small_validation_set",
    "eight rows, drawn anew each time: the metric jumps by eighths, the loss is fine",
    start=0,
)
def fluctuating_small_validation(seed: int, opener: Opener) -> None:
    torch.manual_seed(seed)
    x, y = digits()
    wrong = torch.where(torch.rand(len(y)) < 0.3, torch.randint(10, y.shape), y)
    model = mlp(64, 48, 10)

    def metrics() -> dict[str, float]:
        rows = torch.randint(SPLIT, len(x), (8,))
        return {"accuracy": accuracy(model, x[rows], wrong[rows])}

    loop = Loop(opener, model, torch.optim.Adam(model.parameters(), lr=1e-3), metrics=metrics)
    loop.classify(draws(x[:SPLIT], y[:SPLIT], batch=32), 500)


@sick(
    "metric_fluctuation",
    "unstable_statistics",
    "batch norm on batches of four with momentum 0.9: training falls, evaluation jumps",
    start=0,
)
def fluctuating_batch_norm(seed: int, opener: Opener) -> None:
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Linear(64, 48),
        nn.BatchNorm1d(48, momentum=0.95),
        nn.ReLU(),
        nn.Linear(48, 48),
        nn.BatchNorm1d(48, momentum=0.95),
        nn.ReLU(),
        nn.Linear(48, 10),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    Loop(opener, model, optimizer, metrics=lambda: _score(model, slice(SPLIT, None))).classify(digit_batches(4), 500)


@sick(
    "metric_fluctuation",
    "rate_too_high",
    "lr six times higher from step 200 on: the loss gets by, the metric jumps",
    start=200,
)
def fluctuating_late_rate(seed: int, opener: Opener) -> None:
    torch.manual_seed(seed)
    model = mlp(64, 64, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)
    loop = Loop(opener, model, optimizer, metrics=lambda: _score(model, slice(SPLIT, None)))
    batches = digit_batches(14)
    loop.classify(batches, 200)
    _scale(optimizer, 6)
    loop.classify(batches, 400)


@sick("metric_fluctuation", "training_mode", "evaluation with dropout on, on 24 rows", start=0)
def fluctuating_with_dropout_on(seed: int, opener: Opener) -> None:
    torch.manual_seed(seed)
    x, y = digits()
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.85), nn.Linear(64, 10))

    def metrics() -> dict[str, float]:
        with torch.no_grad():
            right = (model(x[SPLIT : SPLIT + 24]).argmax(-1) == y[SPLIT : SPLIT + 24]).float().mean()
        return {"accuracy": float(right)}

    loop = Loop(opener, model, torch.optim.Adam(model.parameters(), lr=3e-3), metrics=metrics)
    loop.classify(digit_batches(), 500)


@sick(
    "metric_fluctuation",
    "scale_churn",
    "a scaler that doubles every three steps; what overflows is cut off and applied all the same",
    start=0,
)
def fluctuating_scale_churn(seed: int, opener: Opener) -> None:
    torch.manual_seed(seed)
    model = mlp(64, 64, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    scaler = GradScaler("cpu", init_scale=2.0**16, growth_interval=3, growth_factor=8.0, backoff_factor=0.25)
    recorder = opener(model, optimizer, scaler)
    for step, (x, y) in enumerate(itertools.islice(digit_batches(), 500)):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.cross_entropy(model(x).float(), y)
        scaler.scale(loss).backward()
        recorder.gradients()
        scaler.unscale_(optimizer)
        for p in model.parameters():
            if p.grad is not None and not p.grad.isfinite().all():
                p.grad.nan_to_num_(0.0, 1.0, -1.0)
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        scaler.update()
        recorder.log(loss=loss, **(_score(model, slice(SPLIT, None)) if step % 10 == 9 else {}))
