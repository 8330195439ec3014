"""Trainings in which nothing is wrong, each odd in another way: nobody may be alarmed by them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn import functional as F

from .run_records import Opener
from .runs import (
    SPLIT,
    Loop,
    accuracy,
    cancer,
    diabetes,
    digit_batches,
    digits,
    draws,
    healthy,
    letters,
    mlp,
    photo,
    wine,
)


def _validation(model: nn.Module) -> Callable[[], dict[str, float]]:
    x, y = digits()
    return lambda: {"accuracy": accuracy(model, x[SPLIT:], y[SPLIT:])}


def _conv(*, norm: bool = False) -> nn.Sequential:
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        nn.Conv2d(1, 8, 3, padding=1),
        nn.BatchNorm2d(8) if norm else nn.Identity(),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(256, 10),
    )


# --- optimizers and schedules ------------------------------


@healthy("plain; metric rises, then hovers within its own noise")
def digits_mlp_momentum(seed: int, opener: Opener) -> None:
    torch.manual_seed(seed)
    model = mlp(64, 64, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    Loop(opener, model, optimizer, metrics=_validation(model)).classify(digit_batches(32), 300)


@healthy("loss falls over three decades, gradients with it, lr falls to 0 at the end")
def digits_conv_cosine(seed: int, opener: Opener) -> None:
    torch.manual_seed(seed)
    model = _conv(norm=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 250)
    Loop(opener, model, optimizer, schedule=schedule, metrics=_validation(model)).classify(digit_batches(64), 250)


@healthy("loss and gradient fall to 2e-7 because all is learnt, and stay there for long: no vanishing gradient")
def wine_logistic_to_zero(seed: int, opener: Opener) -> None:
    torch.manual_seed(seed)
    x, y = wine()
    model = nn.Linear(13, 3)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)
    recorder = opener(model, optimizer)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        recorder.gradients()
        return loss

    for _ in range(150):
        recorder.log(loss=optimizer.step(closure))


@healthy("LBFGS in float64 comes to the minimum: gradient 1e-7 and less, loss constant to the last bit, no update")
def wine_lbfgs(seed: int, opener: Opener) -> None:
    torch.manual_seed(seed)
    x, y = wine()
    model = nn.Linear(13, 3).double()
    optimizer = torch.optim.LBFGS(model.parameters(), line_search_fn="strong_wolfe", max_iter=4)
    recorder = opener(model, optimizer)

    def closure() -> Tensor:
        optimizer.zero_grad()
        penalty = 1e-2 * sum(p.square().sum() for p in model.parameters())
        loss = F.cross_entropy(model(x.double()), y) + penalty
        loss.backward()
        recorder.gradients()
        return loss

    for _ in range(60):
        recorder.log(loss=optimizer.step(closure))


@healthy("lr jumps up at each restart, and the loss with it")
def digits_warm_restarts(seed: int, opener: Opener) -> None:
    torch.manual_seed(seed)
    model = mlp(64, 48, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 60)
    Loop(opener, model, optimizer, schedule=schedule, metrics=_validation(model)).classify(digit_batches(24), 300)


@healthy("one cycle: the loss rises a little in the middle, where lr is highest")
def digits_one_cycle(seed: int, opener: Opener) -> None:
    torch.manual_seed(seed)
    model = mlp(64, 64, 32, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.3, total_steps=300)
    Loop(opener, model, optimizer, schedule=schedule, metrics=_validation(model)).classify(digit_batches(32), 300)


@healthy("lr falls to a hundredth in steps; after that the loss stands")
def cancer_step_decay(seed: int, opener: Opener) -> None:
    torch.manual_seed(seed)
    x, y = cancer()
    model = mlp(30, 16, 2, act=nn.Tanh)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [100, 200], gamma=0.1)
    loop = Loop(
        opener, model, optimizer, schedule=schedule, metrics=lambda: {"accuracy": accuracy(model, x[400:], y[400:])}
    )
    loop.classify(draws(x[:400], y[:400], batch=16), 300)


@healthy("lr range test: nothing moves at first, and it ends as the loss turns up")
def digits_lr_range_test(seed: int, opener: Opener) -> None:
    torch.manual_seed(seed)
    model = mlp(64, 64, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 1.06)
    loop, batches, smooth, best = Loop(opener, model, optimizer, schedule=schedule), digit_batches(64), 2.4, math.inf
    for x, y in batches:
        smooth = 0.8 * smooth + 0.2 * loop.step(lambda x=x, y=y: F.cross_entropy(model(x), y))
        best = min(best, smooth)
        if smooth > 1.05 * best or loop.number == 400:
            break


@healthy("one row a step: the loss goes from 1e-6 to 8 between neighbours")
def digits_batch_of_one(seed: int, opener: Opener) -> None:
    torch.manual_seed(seed)
    model = mlp(64, 32, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    Loop(opener, model, optimizer, metrics=_validation(model), every=50).classify(digit_batches(1), 700)


@healthy("gradients of four micro-batches; Adagrad's steps shrink")
def digits_accumulation_adagrad(seed: int, opener: Opener) -> None:
    torch.manual_seed(seed)
    model = mlp(64, 64, 10, act=nn.GELU)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.02)
    Loop(opener, model, optimizer, micro=4, metrics=_validation(model)).classify(digit_batches(16), 200)


# --- objectives ------------------------------


@healthy("negative log-likelihood: the loss crosses zero and goes on falling below it")
def cancer_gaussian_nll(seed: int, opener: Opener) -> None:
    torch.manual_seed(seed)
    x, _ = cancer()
    x, target = x[:, 1:], x[:, :1] * 0.3  # radius from the other columns: nearly exact
    model = mlp(29, 32, 2, act=nn.Tanh)
    loop = Loop(opener, model, torch.optim.Adam(model.parameters(), lr=5e-3), clip=5.0)
    for rows, goal in draws(x, target, batch=64):
        if loop.number == 350:
            break

        def loss_of(rows: Tensor = rows, goal: Tensor = goal) -> Tensor:
            out = model(rows)
            return F.gaussian_nll_loss(out[:, :1], goal, F.softplus(out[:, 1:]) + 1e-3)

        loop.step(loss_of)


@healthy("target in its own unit: loss 29000 at first, 3000 at last")
def diabetes_raw_target(seed: int, opener: Opener) -> None:
    torch.manual_seed(seed)
    x, y = diabetes()
    model = mlp(10, 32, 1)
    loop = Loop(opener, model, torch.optim.Adam(model.parameters(), lr=3e-2))
    for rows, goal in draws(x, y[:, None], batch=32):
        if loop.number == 300:
            break
        loop.step(lambda rows=rows, goal=goal: F.mse_loss(model(rows), goal))


@healthy("target of 1e-5: the loss is 1e-10 and gradients 1e-6 from the start, in float32, and Adam learns")
def diabetes_tiny_unit(seed: int, opener: Opener) -> None:
    torch.manual_seed(seed)
    x, y = diabetes()
    goal_of = (y[:, None] - y.mean()) / y.std() * 1e-5
    model = nn.Linear(10, 1)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    loop = Loop(opener, model, torch.optim.Adam(model.parameters(), lr=1e-7, eps=1e-12))
    for rows, goal in draws(x, goal_of, batch=64):
        if loop.number == 300:
            break
        loop.step(lambda rows=rows, goal=goal: F.mse_loss(model(rows), goal))


@healthy("hinge loss: exactly zero, and the gradient with it, on many a batch")
def cancer_hinge_zero(seed: int, opener: Opener) -> None:
    torch.manual_seed(seed)
    x, y = cancer()
    model = mlp(30, 32, 1)
    loop = Loop(opener, model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    for rows, sign in draws(x, (y * 2 - 1).float()[:, None], batch=16):
        if loop.number == 400:
            break
        loop.step(lambda rows=rows, sign=sign: F.relu(1 - sign * model(rows)).mean())


@healthy("a variational autoencoder: the loss is a sum over pixels; falls, then stands for long")
def digits_vae(seed: int, opener: Opener) -> None:
    torch.manual_seed(seed)
    encoder, decoder = mlp(64, 48, 16), mlp(8, 48, 64)
    model = nn.ModuleDict({"encoder": encoder, "decoder": decoder})
    loop = Loop(opener, model, torch.optim.Adam(model.parameters(), lr=3e-3))
    for x, _ in digit_batches(64):
        if loop.number == 300:
            break

        def loss_of(x: Tensor = x) -> Tensor:
            mean, logvar = encoder(x).chunk(2, -1)
            seen = decoder(mean + torch.randn_like(mean) * (logvar / 2).exp())
            apart = -0.5 * (1 + logvar - mean**2 - logvar.exp()).sum(-1).mean()
            return F.binary_cross_entropy_with_logits(seen, x, reduction="none").sum(-1).mean() + apart

        loop.step(loss_of)


def _gan(seed: int, opener: Opener, told: str) -> None:
    torch.manual_seed(seed)
    maker, judge = mlp(16, 64, 64), mlp(64, 64, 1, act=nn.LeakyReLU)
    nets = {"maker": maker, "judge": judge}
    opts = {name: torch.optim.Adam(net.parameters(), lr=2e-3, betas=(0.5, 0.9)) for name, net in nets.items()}
    recorder = opener(nets[told], opts[told])
    for step, (x, _) in enumerate(digit_batches(64)):
        if step == 300:
            break
        fake = maker(torch.randn(64, 16)).sigmoid()
        loss = {"judge": F.softplus(-judge(x)).mean() + F.softplus(judge(fake.detach())).mean()}
        opts["judge"].zero_grad()
        loss["judge"].backward()
        if told == "judge":
            recorder.gradients()
        opts["judge"].step()
        loss["maker"] = F.softplus(-judge(fake)).mean()
        opts["maker"].zero_grad()
        loss["maker"].backward()
        if told == "maker":
            recorder.gradients()
        opts["maker"].step()
        recorder.log(loss=loss[told])


@healthy("the generator's loss rises and swings as the other one gets better")
def gan_generator(seed: int, opener: Opener) -> None:
    _gan(seed, opener, "maker")


@healthy("the discriminator's loss swings, sometimes near zero")
def gan_discriminator(seed: int, opener: Opener) -> None:
    _gan(seed, opener, "judge")


@healthy("contrastive: starts at ln(128), falls slowly")
def digits_contrastive(seed: int, opener: Opener) -> None:
    torch.manual_seed(seed)
    model = mlp(64, 64, 32)
    loop = Loop(opener, model, torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1))
    for x, _ in digit_batches(128):
        if loop.number == 250:
            break

        def loss_of(x: Tensor = x) -> Tensor:
            one, two = (F.normalize(model(x + 0.15 * torch.randn_like(x)), dim=-1) for _ in range(2))
            return F.cross_entropy(one @ two.T / 0.1, torch.arange(len(x)))

        loop.step(loss_of)


@healthy("CTC: from 30 at the start to a long plateau where only blanks are said, then down")
def digits_ctc(seed: int, opener: Opener) -> None:
    torch.manual_seed(seed)
    x, y = digits()
    lstm, head = nn.GRU(8, 48, batch_first=True, bidirectional=True), nn.Linear(96, 11)
    model = nn.ModuleDict({"lstm": lstm, "head": head})
    loop = Loop(opener, model, torch.optim.Adam(model.parameters(), lr=1e-2), clip=5.0)
    for _ in range(160):
        rows = torch.randint(SPLIT, (24, 3))
        columns = x[rows].view(24, 3, 8, 8).transpose(2, 3).reshape(24, 24, 8)

        def loss_of(columns: Tensor = columns, goal: Tensor = y[rows] + 1) -> Tensor:
            said = head(lstm(columns)[0]).log_softmax(-1).transpose(0, 1)
            return F.ctc_loss(said, goal, torch.full((24,), 24), torch.full((24,), 3))

        loop.step(loss_of)


@healthy("policy gradient: the loss is noise around zero of both signs and says nothing; the reward rises")
def digits_policy_gradient(seed: int, opener: Opener) -> None:
    torch.manual_seed(seed)
    model = mlp(64, 64, 10)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    recorder, baseline = opener(model, optimizer), 0.1
    for step, (x, y) in enumerate(digit_batches(32)):
        if step == 400:
            break
        chosen = torch.distributions.Categorical(logits=model(x))
        action = chosen.sample()
        reward = (action == y).float()
        loss = -(chosen.log_prob(action) * (reward - baseline)).mean() - 0.01 * chosen.entropy().mean()
        optimizer.zero_grad()
        loss.backward()
        recorder.gradients()
        optimizer.step()
        baseline = 0.95 * baseline + 0.05 * float(reward.mean())
        recorder.log(loss=loss, **({"reward": float(reward.mean())} if step % 10 == 9 else {}))


@healthy("noise prediction: the loss falls in a few steps and is then flat and noisy for the rest of the run")
def photo_diffusion(seed: int, opener: Opener) -> None:
    torch.manual_seed(seed)
    model = mlp(65, 96, 96, 64, act=nn.SiLU)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loop = Loop(opener, model, optimizer, clip=1.0, schedule=_warmup(optimizer, 50))
    for _ in range(400):
        top, left = torch.randint(419, (32,)), torch.randint(632, (32,))
        rows = torch.stack([photo()[0, a : a + 8, b : b + 8] for a, b in zip(top, left)]).flatten(1)
        time, noise = torch.rand(32, 1), torch.randn(32, 64)
        angle = time * math.pi / 2
        seen = torch.cat([rows * angle.cos() + noise * angle.sin(), time], -1)
        loop.step(lambda seen=seen, noise=noise: F.mse_loss(model(seen), noise))


# --- sequence models and precision ------------------------------


class Letters(nn.Module):
    """Next character by a recurrent net."""

    def __init__(self, cell: type[nn.Module], width: int = 64) -> None:
        super().__init__()
        self.embed, self.cell, self.head = nn.Embedding(64, 24), cell(24, width, batch_first=True), nn.Linear(width, 64)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.cell(self.embed(ids))[0])


class Transformer(nn.Module):
    """Next character by a block of causal attention."""

    def __init__(self, width: int = 32, layers: int = 1, length: int = 32) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(64, width), nn.Embedding(length, width)
        block = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, layers, enable_nested_tensor=False)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 64)

    def forward(self, ids: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        hidden = self.embed(ids) + self.place(torch.arange(ids.shape[1]))
        return self.head(self.norm(self.blocks(hidden, mask=mask, is_causal=True)))


def _warmup(optimizer: torch.optim.Optimizer, steps: int, total: int | None = None) -> Any:
    def factor(step: int) -> float:
        if step < steps:
            return step / steps
        return 0.5 * (1 + math.cos(math.pi * min(1.0, (step - steps) / total))) if total else 1.0

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def _language(loop: Loop, steps: int, batch: int = 12, length: int = 20) -> None:
    for _ in range(steps):
        ids, goal = letters(batch, length)
        loop.step(lambda ids=ids, goal=goal: F.cross_entropy(loop.model(ids).float().flatten(0, 1), goal.flatten()))


@healthy("gradients of a recurrent net, clipped at most steps")
def letters_lstm_clipped(seed: int, opener: Opener) -> None:
    torch.manual_seed(seed)
    model = Letters(nn.LSTM)
    _language(Loop(opener, model, torch.optim.Adam(model.parameters(), lr=1e-2), clip=0.25), 200)


@healthy("RMSprop on a GRU, no clipping: the gradient norm varies tenfold")
def letters_gru_rmsprop(seed: int, opener: Opener) -> None:
    torch.manual_seed(seed)
    model = Letters(nn.GRU)
    _language(Loop(opener, model, torch.optim.RMSprop(model.parameters(), lr=5e-3)), 160)


@healthy("bfloat16 autocast; lr is 0 at the first step and 0 again at the last")
def letters_transformer_bfloat16(seed: int, opener: Opener) -> None:
    torch.manual_seed(seed)
    model = Transformer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    schedule = _warmup(optimizer, 30, 170)
    _language(Loop(opener, model, optimizer, autocast=torch.bfloat16, clip=1.0, schedule=schedule), 200)


@healthy("float16 autocast: a start scale far too large, some ten skipped steps, then growth and rare back-off")
def digits_float16_calibration(seed: int, opener: Opener) -> None:
    torch.manual_seed(seed)
    model = mlp(64, 64, 64, 10)
    scaler = GradScaler("cpu", init_scale=2.0**26, growth_interval=25)
    loop = Loop(
        opener,
        model,
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        scaler=scaler,
        autocast=torch.float16,
        metrics=_validation(model),
    )
    loop.classify(digit_batches(32), 300)


@healthy("float16 autocast of a transformer with Adam: scale up every 15 steps until it must back off again and again")
def letters_transformer_float16(seed: int, opener: Opener) -> None:
    torch.manual_seed(seed)
    model = Transformer()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    scaler = GradScaler("cpu", init_scale=2.0**16, growth_interval=15)
    loop = Loop(
        opener, model, optimizer, scaler=scaler, autocast=torch.float16, clip=1.0, schedule=_warmup(optimizer, 20)
    )
    _language(loop, 160)


@healthy("float16 with a scale that stays at 65536 all the time, and gradients that are fine")
def cancer_float16_flat_scale(seed: int, opener: Opener) -> None:
    torch.manual_seed(seed)
    x, y = cancer()
    model = mlp(30, 32, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    loop = Loop(opener, model, optimizer, scaler=GradScaler("cpu"), autocast=torch.float16)
    loop.classify(draws(x, y, batch=64), 250)


@healthy("weights in bfloat16, lr large enough: a good part of the updates is rounded away, and it learns all the same")
def digits_bfloat16_weights(seed: int, opener: Opener) -> None:
    torch.manual_seed(seed)
    model = mlp(64, 64, 10).bfloat16()
    x, y = digits()
    loop = Loop(opener, model, torch.optim.SGD(model.parameters(), lr=0.5))
    loop.classify(draws(x[:SPLIT].bfloat16(), y[:SPLIT], batch=32), 250)


@healthy("float16 autocast at scale 1: nine of ten gradients are subnormal, and it learns as float32 does")
def digits_autoencoder_subnormal(seed: int, opener: Opener) -> None:
    torch.manual_seed(seed)
    model = mlp(64, 48, 32, 16, 32, 48, 64, act=nn.Tanh)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    scaler = GradScaler("cpu", init_scale=1.0, growth_interval=100_000)
    loop = Loop(opener, model, optimizer, scaler=scaler, autocast=torch.float16)
    for x, _ in digit_batches(256):
        if loop.number == 200:
            break
        loop.step(lambda x=x: F.mse_loss(model(x).float(), x))


@healthy("weights and moments in float16, eps 1e-4: learns as it should, whatever the dtypes are")
def digits_float16_state(seed: int, opener: Opener) -> None:
    torch.manual_seed(seed)
    x, y = digits()
    model = mlp(64, 48, 10, act=nn.Tanh).half()
    loop = Loop(opener, model, torch.optim.Adam(model.parameters(), lr=1e-3, eps=1e-4))
    loop.classify(draws(x[:SPLIT].half(), y[:SPLIT], batch=32), 400)


@healthy("weights and moments in bfloat16, lr 1e-3: half of the updates are lost, and it learns")
def digits_bfloat16_state(seed: int, opener: Opener) -> None:
    torch.manual_seed(seed)
    x, y = digits()
    model = mlp(64, 48, 10).bfloat16()
    loop = Loop(opener, model, torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0))
    loop.classify(draws(x[:SPLIT].bfloat16(), y[:SPLIT], batch=32), 400)


@healthy("float64, Nesterov momentum, weight decay: the gradient norm stays at a level that is not zero")
def diabetes_float64_nesterov(seed: int, opener: Opener) -> None:
    torch.manual_seed(seed)
    x, y = diabetes()
    goal = ((y - y.mean()) / y.std())[:, None].double()
    model = mlp(10, 16, 1, act=nn.Tanh).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, nesterov=True, weight_decay=1e-3)
    loop = Loop(opener, model, optimizer)
    for rows, want in draws(x.double(), goal, batch=32):
        if loop.number == 300:
            break
        loop.step(lambda rows=rows, want=want: F.mse_loss(model(rows), want))


# --- what happens to a run ------------------------------


@healthy("fine-tuning of what is already learnt: loss flat from the first step to the last, updates of 1e-5")
def digits_finetune_converged(seed: int, opener: Opener) -> None:
    torch.manual_seed(seed)
    x, y = digits()
    model = nn.Sequential(*mlp(64, 64, 10), nn.Dropout(0.1))
    warm = torch.optim.Adam(model.parameters(), lr=1e-2)
    for rows, goal in draws(x, y, batch=128):
        warm.zero_grad()
        loss = F.cross_entropy(model(rows), goal, label_smoothing=0.1)
        loss.backward()
        warm.step()
        if loss < 0.75:
            break
    loop = Loop(opener, model, torch.optim.AdamW(model.parameters(), lr=1e-5), metrics=_validation(model))
    for rows, goal in draws(x[:SPLIT], y[:SPLIT], batch=64):
        if loop.number == 250:
            break
        loop.step(lambda rows=rows, goal=goal: F.cross_entropy(model(rows), goal, label_smoothing=0.1))


@healthy("head only: the backbone has no gradient, most modules never move")
def digits_frozen_backbone(seed: int, opener: Opener) -> None:
    torch.manual_seed(seed)
    model = _conv()
    for p in list(model.parameters())[:-2]:
        p.requires_grad_(False)
    Loop(opener, model, torch.optim.Adam(model.parameters(), lr=5e-3), metrics=_validation(model)).classify(
        digit_batches(32), 200
    )


@healthy("a table of embeddings: 99 of 100 gradient entries are zero at every step")
def letters_embedding_bag(seed: int, opener: Opener) -> None:
    torch.manual_seed(seed)
    bag, head = nn.EmbeddingBag(4096, 16), nn.Linear(16, 64)
    model = nn.Sequential(bag, head)
    loop = Loop(opener, model, torch.optim.Adam(model.parameters(), lr=2e-2))
    for _ in range(250):
        ids, _ = letters(16, 4)
        pairs = ids[:, :-1][:, :2] * 64 + ids[:, 1:3]
        loop.step(lambda pairs=pairs, goal=ids[:, 3]: F.cross_entropy(model(pairs), goal))


@healthy("dropout and one label in four wrong: the loss comes to a high level and stays; no more can be had")
def digits_label_noise(seed: int, opener: Opener) -> None:
    torch.manual_seed(seed)
    x, y = digits()
    wrong = torch.where(torch.rand(len(y)) < 0.25, torch.randint(10, y.shape), y)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.5), nn.Linear(64, 10))
    loop = Loop(opener, model, torch.optim.AdamW(model.parameters(), lr=3e-3), metrics=_validation(model))
    loop.classify(draws(x[:SPLIT], wrong[:SPLIT], batch=32), 350)


@healthy("the task changes at step 150: the loss jumps from 0.05 to 8, and is learnt again")
def digits_task_switch(seed: int, opener: Opener) -> None:
    torch.manual_seed(seed)
    x, y = digits()
    model = mlp(64, 64, 10)
    loop = Loop(opener, model, torch.optim.Adam(model.parameters(), lr=3e-3))
    loop.classify(draws(x[y < 5], y[y < 5], batch=32), 150)
    loop.classify(draws(x[y >= 5], y[y >= 5], batch=32), 200)


@healthy("harder data, twice: each time the loss steps up and falls again")
def digits_curriculum(seed: int, opener: Opener) -> None:
    torch.manual_seed(seed)
    x, y = digits()
    model = mlp(64, 64, 10)
    loop = Loop(opener, model, torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9), clip=2.0)
    for noise in (0.0, 0.4, 0.8):
        loop.classify(draws(x + noise * torch.randn_like(x), y, batch=32), 120)


@healthy("one positive in eighty, weighted by fifty: rare losses of thirty times the usual")
def cancer_imbalance(seed: int, opener: Opener) -> None:
    torch.manual_seed(seed)
    x, y = cancer()
    rows = torch.cat([(y == 1).nonzero()[:, 0], (y == 0).nonzero()[:5, 0]])
    x, y = x[rows], y[rows]
    flipped = torch.rand(len(y)) < 0.01
    y = torch.where(flipped, 1 - y, y)
    model = mlp(30, 16, 2)
    loop = Loop(opener, model, torch.optim.Adam(model.parameters(), lr=2e-3))
    for rows, goal in draws(x, y, batch=8):
        if loop.number == 400:
            break
        loop.step(
            lambda rows=rows, goal=goal: F.cross_entropy(
                model(rows), goal, weight=torch.tensor([50.0, 1.0]), reduction="none"
            ).mean()
        )


@healthy("three batches in a wrong unit with wrong labels: loss times 500 for one step, gradient clipped")
def digits_recovered_spikes(seed: int, opener: Opener) -> None:
    torch.manual_seed(seed)
    model = mlp(64, 64, 10)
    loop = Loop(opener, model, torch.optim.Adam(model.parameters(), lr=2e-3), clip=1.0)
    spikes = set((torch.randperm(150)[:3] + 150).tolist())
    for x, y in digit_batches(32):
        if loop.number == 340:
            break
        if loop.number in spikes:
            x, y = x * 16, y.roll(1)
        loop.step(lambda x=x, y=y: F.cross_entropy(model(x), y))


@healthy("odd or even, of the sum of two digits: chance level for long, then a drop")
def digits_late_insight(seed: int, opener: Opener) -> None:
    torch.manual_seed(seed)
    x, y = digits()
    model = mlp(128, 128, 64, 2)
    loop = Loop(opener, model, torch.optim.SGD(model.parameters(), lr=0.08, momentum=0.8))
    for _ in range(900):
        a, b = torch.randint(200, (2, 64))
        loop.step(lambda a=a, b=b: F.cross_entropy(model(torch.cat([x[a], x[b]], -1)), (y[a] + y[b]) % 2))


@healthy("stopped at 150, resumed from a checkpoint of 120: 30 step numbers come twice")
def digits_resumed(seed: int, opener: Opener) -> None:
    torch.manual_seed(seed)
    model = mlp(64, 64, 10)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    loop = Loop(opener, model, optimizer, metrics=_validation(model))
    loop.classify(digit_batches(32), 120)
    kept = {k: v.clone() for k, v in model.state_dict().items()}
    loop.classify(digit_batches(32), 30)
    model = mlp(64, 64, 10)
    model.load_state_dict(kept)
    fresh = torch.optim.Adam(model.parameters(), lr=2e-3)  # and the moments were not saved
    Loop(opener, model, fresh, metrics=_validation(model), first=120).classify(digit_batches(32), 130)


@healthy("two tasks in turn, one of them with a loss a thousand times that of the other")
def two_tasks_in_turn(seed: int, opener: Opener) -> None:
    torch.manual_seed(seed)
    (x, y), (u, v) = wine(), diabetes()
    left, right = mlp(13, 24, 3), mlp(10, 24, 1)
    model = nn.ModuleDict({"left": left, "right": right})
    loop = Loop(opener, model, torch.optim.Adam(model.parameters(), lr=1e-2))
    for (a, b), (c, d) in zip(draws(x, y, batch=16), draws(u, v[:, None], batch=16)):
        if loop.number >= 300:
            break
        loop.step(lambda a=a, b=b: F.cross_entropy(left(a), b))
        loop.step(lambda c=c, d=d: F.mse_loss(right(c), d))


@healthy("overfitting: the validation loss turns up and rises for long, with a trend, while accuracy stands")
def digits_overfit(seed: int, opener: Opener) -> None:
    torch.manual_seed(seed)
    x, y = digits()
    model = mlp(64, 128, 10)
    noisy = torch.where(torch.rand(100) < 0.2, torch.randint(10, (100,)), y[:100])

    def metrics() -> dict[str, float]:
        with torch.no_grad():
            loss = float(F.cross_entropy(model(x[SPLIT:]), y[SPLIT:]))
        return {"val_loss": loss, "accuracy": accuracy(model, x[SPLIT:], y[SPLIT:])}

    loop = Loop(opener, model, torch.optim.Adam(model.parameters(), lr=5e-3), metrics=metrics)
    loop.classify(draws(x[:100], noisy, batch=20), 400)
