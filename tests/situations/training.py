"""Training loops: optimizers, accumulation, clipping, averages, adversaries, losses of all kinds."""

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import lr_scheduler, swa_utils

from .harness import Spans
from .models import Net, batch, conv_net, mlp, situation, squared, train

OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True),
    "adam_foreach": lambda p: torch.optim.Adam(p, 0.01, foreach=True),
    "adam_loop": lambda p: torch.optim.Adam(p, 0.01, foreach=False, amsgrad=True),
    "adamw_fused": lambda p: torch.optim.AdamW(p, 0.01, fused=True),
    "adafactor": lambda p: torch.optim.Adafactor(p, 0.01),
    "adagrad": lambda p: torch.optim.Adagrad(p, 0.01),
    "rmsprop_centered": lambda p: torch.optim.RMSprop(p, 0.01, centered=True),
    "rprop": lambda p: torch.optim.Rprop(p, 0.01),
    "asgd": lambda p: torch.optim.ASGD(p, 0.01),
    "nadam": lambda p: torch.optim.NAdam(p, 0.01),
}


def _optimizer(name: str) -> None:
    def run(watch: Spans) -> object:
        model = Net()
        return train(watch, model, OPTIMIZERS[name](model.parameters()))

    run.__name__ = f"optimizer_{name}"
    run.__doc__ = f"Three steps with {name}, which the watch finds by itself."
    situation()(run)


for _kind in OPTIMIZERS:
    _optimizer(_kind)


@situation()
def optimizer_handed_over(watch: Spans) -> object:
    """The optimizer is handed over, with two parameter groups."""
    model = Net()
    groups = [{"params": model.stem.parameters(), "lr": 0.01}, {"params": model.head.parameters()}]
    optimizer = torch.optim.AdamW(groups, 0.1)
    return train(watch, model, optimizer, hand_over=True)


@situation()
def lbfgs_closure(watch: Spans) -> object:
    """LBFGS calls its closure many times inside one step."""
    model, x = mlp(4, 5, 1), batch()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4, line_search_fn="strong_wolfe")
    losses = []
    with watch(model):
        for _ in range(2):

            def closure() -> Tensor:
                optimizer.zero_grad()
                loss = squared(model(x))
                loss.backward()
                losses.append(loss.item())
                return loss

            losses.append(optimizer.step(closure).item())
    return [model, optimizer, losses]


@situation()
def gradient_accumulation(watch: Spans) -> object:
    """Four batches to a step, clipping by norm and by value, a scheduler."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scheduler = lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=4)
    norms = []
    with watch(model):
        for _ in range(3):
            for _ in range(4):
                (squared(model(batch())) / 4).backward()
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5))
            nn.utils.clip_grad_value_(model.parameters(), 0.01)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad(set_to_none=False)
    return [model, optimizer, norms, scheduler.state_dict()["last_epoch"]]


@situation()
def grad_accum_hook_optimizer(watch: Spans) -> object:
    """The optimizer steps inside the backward, from the user's own post-accumulate hooks, and frees gradients."""
    model = Net()
    optimizers = {p: torch.optim.SGD([p], 0.1) for p in model.parameters()}

    def update(p: Tensor) -> None:
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(update)
    losses = []
    with watch(model):
        for _ in range(3):
            loss = squared(model(batch()))
            loss.backward()
            losses.append(loss)
    return [model, losses]


@situation()
def optimizer_hooks(watch: Spans) -> object:
    """The user's own step hooks, on the instance, run once per step."""
    model, log = Net(), []
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    optimizer.register_step_pre_hook(lambda o, a, k: log.append("pre") and None)
    optimizer.register_step_post_hook(lambda o, a, k: log.append("post"))
    optimizer.step = _counted(optimizer.step, log)
    made = train(watch, model, optimizer)
    return [made["losses"], model, log]


def _counted(function: Any, log: list[str]) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        log.append("step")
        return function(*args, **kwargs)

    return call


@situation()
def own_optimizer(watch: Spans) -> object:
    """An optimizer class of the user's, and a manual update under no_grad."""

    class Sign(torch.optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {"lr": 0.01})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for p in group["params"]:
                    p -= group["lr"] * p.grad.sign()

    model = Net()
    made = train(watch, model, Sign(model.parameters()))
    with watch(model):
        squared(model(batch())).backward()
        with torch.no_grad():
            for p in model.parameters():
                p.sub_(0.1 * p.grad)
                p.grad = None
        made["after"] = model(batch())
    return made


@situation()
def ema_weights(watch: Spans) -> object:
    """An exponential moving average by deep copy, updated and evaluated while watched."""
    model = conv_net()
    average = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with watch(model):
        for _ in range(3):
            squared(model(batch(2, 3, 14, 14))).backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                for a, b in zip(average.state_dict().values(), model.state_dict().values(), strict=True):
                    a.lerp_(b, 0.1) if a.is_floating_point() else a.copy_(b)
            out = average(batch(2, 3, 14, 14))
        fresh = copy.deepcopy(model)
        squared(fresh(batch(2, 3, 14, 14))).backward()
    return [model, average, out, fresh]


@situation()
def swa(watch: Spans) -> object:
    """Stochastic weight averaging with SWALR and a batch norm update."""
    model = conv_net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    average, scheduler = swa_utils.AveragedModel(model), swa_utils.SWALR(optimizer, 0.05)
    with watch(model), watch(average):
        for _ in range(3):
            squared(model(batch(2, 3, 14, 14))).backward()
            optimizer.step()
            optimizer.zero_grad()
            average.update_parameters(model)
            scheduler.step()
        swa_utils.update_bn([batch(2, 3, 14, 14) for _ in range(2)], average)
        out = average.eval()(batch(2, 3, 14, 14))
    return [model, average, optimizer, out]


@situation()
def gan(watch: Spans) -> object:
    """Generator and discriminator in one container, two optimizers, detached fakes."""
    nets = nn.ModuleDict({"g": mlp(3, 6, 4), "d": mlp(4, 6, 1)})
    og, od = (torch.optim.Adam(nets[k].parameters(), 0.01) for k in "gd")
    losses = []
    with watch(nets):
        for _ in range(3):
            fake = nets["g"](batch(5, 3))
            loss = F.softplus(-nets["d"](batch())).mean() + F.softplus(nets["d"](fake.detach())).mean()
            od.zero_grad()
            loss.backward()
            od.step()
            other = F.softplus(-nets["d"](fake)).mean()
            og.zero_grad()
            other.backward()
            og.step()
            losses += [loss, other]
    return [nets, losses, og, od]


@situation()
def distillation(watch: Spans) -> object:
    """A frozen teacher in eval mode, a student, a temperature."""
    pair = nn.ModuleDict({"teacher": Net().eval().requires_grad_(False), "student": Net(depth=1)})
    optimizer = torch.optim.SGD(pair["student"].parameters(), 0.1)
    with watch(pair):
        for _ in range(2):
            x = batch()
            with torch.no_grad():
                target = (pair["teacher"](x) / 2).softmax(-1)
            loss = F.kl_div((pair["student"](x) / 2).log_softmax(-1), target, reduction="batchmean")
            loss.backward()
            optimizer.step()
    return [pair, loss]


@situation()
def vae(watch: Spans) -> object:
    """Sampling by reparametrisation, two losses, a backward for each."""
    model = nn.ModuleDict({"enc": mlp(4, 6, 4), "dec": mlp(2, 6, 4)})
    with watch(model):
        x = batch()
        mean, log_var = model["enc"](x).chunk(2, -1)
        z = mean + torch.randn_like(mean) * (log_var / 2).exp()
        rec = F.mse_loss(model["dec"](z), x)
        kl = -0.5 * (1 + log_var - mean.pow(2) - log_var.exp()).mean()
        rec.backward(retain_graph=True)
        kl.backward()
    return [model, rec, kl]


@situation()
def policy_gradient(watch: Spans) -> object:
    """REINFORCE: actions sampled under no_grad, log probabilities of a second pass, host reads of rewards."""
    model = mlp(4, 6, 3)
    with watch(model):
        x = batch()
        with torch.no_grad():
            actions = torch.distributions.Categorical(logits=model(x)).sample()
        rewards = torch.tensor([float(a.item()) for a in actions])
        loss = -(torch.distributions.Categorical(logits=model(x)).log_prob(actions) * rewards).mean()
        loss.backward()
    return [model, actions, loss]


@situation()
def ctc_loss(watch: Spans) -> object:
    """CTC, whose internal second output is allowed to be garbage, with an impossible target zeroed."""
    model = nn.Sequential(nn.Linear(4, 6), nn.LogSoftmax(-1))
    criterion = nn.CTCLoss(zero_infinity=True)
    box = nn.ModuleList([model, criterion])
    with watch(box):
        logp = model(batch(7, 2, 4))
        loss = criterion(logp, torch.tensor([[1, 2, 3], [1, 1, 1]]), torch.tensor([7, 3]), torch.tensor([3, 3]))
        loss.backward()
    return [model, loss]


@situation()
def losses_as_modules(watch: Spans) -> object:
    """Criteria that are modules inside and outside the watched tree."""
    model = mlp(4, 6, 3)
    criteria = [nn.CrossEntropyLoss(label_smoothing=0.1), nn.MultiMarginLoss(), nn.NLLLoss()]
    target = torch.tensor([0, 1, 2, 0, 1])
    with watch(model):
        out = model(batch()).log_softmax(-1)
        loss = sum(criterion(out, target) for criterion in criteria)
        loss.backward()
    return [model, loss]


@situation()
def mixture_of_experts(watch: Spans) -> object:
    """Tokens are routed to experts, some of which get none."""

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(4, 5)
            self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(5))

        def forward(self, x: Tensor) -> Tensor:
            weights, chosen = self.gate(x).softmax(-1).max(-1)
            out = torch.zeros_like(x)
            for i, expert in enumerate(self.experts):
                rows = (chosen == i).nonzero().flatten()
                out = out.index_add(0, rows, expert(x[rows]) * weights[rows, None])
            return out

    model = Experts()
    return train(watch, model, torch.optim.Adam(model.parameters(), 0.01))


@situation()
def early_exit_by_value(watch: Spans) -> object:
    """Control flow on values: the program reads numbers and branches, with tensors it never uses."""
    model, path = Net(), []
    with watch(model):
        for _ in range(4):
            out = model(batch())
            path.append("high" if out.max() > 0.3 else "low")
            if bool((out > 0).any()):
                squared(out).backward()
            path.append(out.argmax(-1).tolist())
    return [model, path]


@situation()
def selected_steps(watch: Spans) -> object:
    """A watch that looks at some steps only, and at every second of them."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    first = train(watch, model, optimizer, steps=5, every=2)
    second = train(watch, model, optimizer, steps=1)
    with watch(model, steps=(2, 4)):
        for _ in range(6):
            optimizer.zero_grad()
            squared(model(batch())).backward()
            optimizer.step()
    return [first, second]


@situation()
def evaluation_between(watch: Spans) -> object:
    """Training and evaluation take turns inside one watch; metrics are gathered on the host."""
    model = conv_net()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    scores = []
    with watch(model):
        for _ in range(3):
            model.train()
            optimizer.zero_grad()
            loss = squared(model(batch(2, 3, 14, 14)))
            loss.backward()
            optimizer.step()
            model.eval()
            with torch.no_grad():
                scores.append(model(batch(2, 3, 14, 14)).mean().item())
    return [model, optimizer, scores]
