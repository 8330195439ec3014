"""Snapshot: everything a step consumes is put back in place and bit for bit, and no more is copied than is needed."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from nanhunt import replay
from nanhunt.errors import UsageError
from nanhunt.replay import Snapshot

from .hunted import bits

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.float8_e5m2, torch.bool]


@pytest.fixture(autouse=True)
def no_model_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The models here stand for large ones."""
    monkeypatch.setattr(replay, "_SMALL", 0)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


def around(model: nn.Module, step: Callable[[], object], **options: Any) -> Snapshot:
    """Take, run, put back."""
    snapshot = Snapshot(model, **options)
    with snapshot:
        step()
    snapshot.restore()
    return snapshot


def backward(model: nn.Module) -> None:
    model(torch.ones(3, 4) * torch.arange(3).unsqueeze(1)).sum().backward()


def test_copies_of_a_step_without_an_optimizer() -> None:
    """Forward and backward write to no parameter, so none is copied: three buffers, no gradient, the batch."""
    model = net()
    snapshot = Snapshot(model, args=(torch.ones(3, 4),))
    with snapshot:
        backward(model)
    assert dict(snapshot.copied) == {"buffer": 3, "gradient": 0, "argument": 1}
    assert snapshot.gaps() == []


def test_copies_of_a_step_with_an_optimizer() -> None:
    """With an optimizer step every parameter is copied once, and what state there is, however often it steps."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    backward(model)
    optimizer.step()
    snapshot = Snapshot(model, args=(torch.ones(3, 4),))
    with snapshot:
        for _ in range(3):
            backward(model)
            optimizer.step()
    assert dict(snapshot.copied) == {"buffer": 3, "gradient": 6, "argument": 1, "parameter": 6, "optimizer state": 18}
    assert snapshot.found == ["AdamW"]


def test_a_small_model_is_copied_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to a megabyte of parameters, a copy is as cheap as looking whether one is needed."""
    monkeypatch.setattr(replay, "_SMALL", 1 << 20)
    model = net()
    snapshot = Snapshot(model)
    assert snapshot.copied["parameter"] == 6
    with snapshot, torch.no_grad():
        model[0].weight.mul_(2)
    assert snapshot.gaps() == []


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_buffers_to_the_bit(dtype: torch.dtype) -> None:
    """Every bit pattern comes back: payloads of NaN, negative zero, subnormal numbers."""
    patterns = torch.arange(256, dtype=torch.uint8).repeat(16)
    if dtype is torch.bool:
        patterns = patterns % 2
    else:
        patterns = torch.cat([patterns, torch.randint(0, 256, (4096,), dtype=torch.uint8)])
    model = nn.Module()
    model.register_buffer("b", patterns.clone().view(dtype))
    around(model, lambda: model.b.view(torch.uint8).zero_())
    assert torch.equal(model.b.view(torch.uint8), patterns)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.zeros(1, 3).expand(5, 3),
        lambda: torch.arange(9.0).as_strided((4, 4), (1, 1)),
        lambda: torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last),
        lambda: torch.ones(6)[::2],
        lambda: torch.ones(0, 3),
        lambda: torch.tensor(2.0),
        lambda: torch.eye(3).to_sparse(),
        lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
        lambda: torch.ones(3, device="meta"),
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    ],
    ids=[
        "expanded",
        "overlapping",
        "channels_last",
        "strided",
        "empty",
        "scalar",
        "sparse",
        "quantised",
        "meta",
        "nested",
    ],
)
def test_odd_buffers(make: Callable[[], Tensor]) -> None:
    """Whatever the layout, the buffer is the same object with the same numbers, and nothing raises."""
    model = nn.Module()
    model.register_buffer("b", make())
    buffer, where = model.b, make()

    def step() -> None:
        if buffer.is_quantized:
            buffer.copy_(torch.zeros(buffer.shape))
        elif buffer.layout is torch.strided and not buffer.is_nested and buffer.numel() > 1:
            buffer[0].fill_(7)
        else:
            buffer.mul_(3)

    around(model, step)
    assert model.b is buffer
    if buffer.layout is torch.strided and not buffer.is_nested:
        assert buffer.stride() == where.stride()
    if buffer.device.type != "meta":
        for one, other in zip(_parts(buffer), _parts(where), strict=True):
            assert torch.equal(one, other)


def _parts(tensor: Tensor) -> list[Tensor]:
    if tensor.is_nested:
        return list(tensor.unbind())
    return [tensor.to_dense() if tensor.is_sparse else tensor]


def test_structure() -> None:
    """Buffers that were replaced, added or removed, new modules, new attributes, swapped parameters: as before."""
    model = net()
    model.count, model.log, model.cache = 0, [1], {"a": torch.ones(2)}
    before = bits(model.state_dict())
    weight, mean, log = model[0].weight, model[1].running_mean, model.log
    pointer = weight.data_ptr()

    def step() -> None:
        model[1].running_mean = torch.full((4,), 9.0)
        model[1].running_var = None
        model.register_buffer("extra", torch.ones(1))
        model.append(nn.Linear(1, 1))
        model.fresh = torch.ones(3)
        model.count += 1
        model.log.append(2)
        model.cache["a"].zero_()
        model.cache["b"] = 1
        model[0].weight.data = torch.zeros(4, 4)
        model[2].weight = nn.Parameter(torch.zeros(1, 4))
        model[0].register_forward_hook(lambda m, a, o: None)
        del model[2].bias

    snapshot = around(model, step)
    assert bits(model.state_dict()) == before
    assert (model[0].weight, model[1].running_mean, model.log) == (weight, mean, log) or model[1].running_mean is mean
    assert weight.data_ptr() == pointer
    assert (model.count, model.log, list(model.cache), model.cache["a"].tolist()) == (0, [1], ["a"], [1, 1])
    assert len(model) == 3
    assert not hasattr(model, "fresh")
    assert not model[0]._forward_hooks
    assert snapshot.gaps() == []


def test_flags() -> None:
    """Modes and requires_grad flags, of each module and parameter on its own."""
    model = net()
    model[1].eval()
    model[2].bias.requires_grad_(False)

    def step() -> None:
        model.train()
        model.requires_grad_(True)
        model[0].weight.requires_grad_(False)

    around(model, step)
    assert [m.training for m in model.modules()] == [True, True, False, True]
    assert [p.requires_grad for p in model.parameters()] == [True] * 5 + [False]


def test_gradients() -> None:
    """None stays None; a gradient that is there is put back into itself, so views of it hold; a dropped one returns."""
    model = net()
    bucket = torch.arange(20.0)
    model[0].weight.grad = bucket[:16].view(4, 4)
    model[0].bias.grad = bucket[16:]
    grad = model[0].weight.grad

    def step() -> None:
        model[0].bias.grad = None
        backward(model)

    around(model, step)
    assert model[0].weight.grad is grad
    assert bucket[:16].tolist() == list(range(16))
    assert model[0].bias.grad is not None
    assert model[0].bias.grad.tolist() == [16, 17, 18, 19]
    assert model[2].weight.grad is None


def test_sparse_gradient() -> None:
    """A sparse gradient comes back sparse, and a step from none to one back to none."""
    model = nn.Sequential(nn.Embedding(5, 2, sparse=True))

    def step() -> None:
        model(torch.tensor([1, 1, 3])).sum().backward()

    around(model, step)
    assert model[0].weight.grad is None
    step()
    before = model[0].weight.grad.to_dense().clone()
    around(model, step)
    assert model[0].weight.grad.is_sparse
    assert torch.equal(model[0].weight.grad.to_dense(), before)


def test_tied_parameters() -> None:
    """A parameter with two names is copied once and stays one."""
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    model[1].weight = model[0].weight
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    before = bits(model[0].weight)

    def step() -> None:
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()

    snapshot = around(model, step)
    assert snapshot.copied["parameter"] == 1
    assert model[1].weight is model[0].weight
    assert bits(model[0].weight) == before


def test_random_numbers() -> None:
    """The generators of torch, numpy and python, and those that a module keeps for itself."""
    model = net()
    model.own = torch.Generator().manual_seed(5)
    model.dice = random.Random(5)
    model.numbers = np.random.default_rng(5)
    torch.randn(1)

    def draw() -> list[float]:
        return [
            torch.randn(1).item(),
            random.gauss(0, 1),
            float(np.random.randn()),
            torch.rand(1, generator=model.own).item(),
            model.dice.random(),
            model.numbers.random(),
        ]

    drawn: list[float] = []
    around(model, lambda: drawn.extend(draw()))
    assert draw() == drawn


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1),
    "adam with a tensor rate": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.1), amsgrad=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "rmsprop": lambda p: torch.optim.RMSprop(p, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p),
    "adafactor": lambda p: torch.optim.Adafactor(p),
    "lbfgs": lambda p: torch.optim.LBFGS(p, max_iter=3),
}


@pytest.mark.parametrize("steps", [0, 2], ids=["first step", "third step"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(name: str, steps: int) -> None:
    """State that was there is as it was, in the same tensors; state that was not there is gone."""
    model = net()
    optimizer = OPTIMIZERS[name](model.parameters())

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(torch.eye(4)).pow(2).sum()
        loss.backward()
        return loss

    def step() -> None:
        closure()
        optimizer.step(closure)  # type: ignore[arg-type]
        optimizer.param_groups[0]["lr"] = 3.0
        optimizer.param_groups[0]["new"] = 1

    for _ in range(steps):
        optimizer.step(closure)  # type: ignore[arg-type]
    before = bits([optimizer.state_dict(), model.state_dict()])
    tensors = [v.data_ptr() for s in optimizer.state.values() for v in s.values() if isinstance(v, Tensor)]
    around(model, step, optimizer=optimizer)
    assert bits([optimizer.state_dict(), model.state_dict()]) == before
    assert tensors == [v.data_ptr() for s in optimizer.state.values() for v in s.values() if isinstance(v, Tensor)]


lr = torch.optim.lr_scheduler
SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "step": lambda o: lr.StepLR(o, 1),
    "cosine": lambda o: lr.CosineAnnealingLR(o, 10),
    "one cycle": lambda o: lr.OneCycleLR(o, 1.0, total_steps=20),
    "plateau": lambda o: lr.ReduceLROnPlateau(o, patience=0),
    "sequence": lambda o: lr.SequentialLR(o, [lr.ConstantLR(o), lr.ExponentialLR(o, 0.5)], [1]),
    "chain": lambda o: lr.ChainedScheduler([lr.ConstantLR(o), lr.ExponentialLR(o, 0.5)]),
}


@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.*")
@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_are_found(name: str) -> None:
    """A scheduler that steps inside is put back, and the rates it has set, though nobody has handed it over."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = SCHEDULERS[name](optimizer)

    def step() -> None:
        for i in range(3):
            scheduler.step(float(i)) if name == "plateau" else scheduler.step()

    def state() -> Any:
        rows = [scheduler, *getattr(scheduler, "_schedulers", ())]
        return bits(
            [[{k: v for k, v in vars(s).items() if k != "optimizer"} for s in rows], optimizer.param_groups[0]["lr"]]
        )

    before = state()
    step()
    assert state() != before
    before = state()
    snapshot = around(model, step)
    assert state() == before
    assert type(scheduler).__name__ in snapshot.found


@pytest.mark.parametrize("used", [False, True], ids=["first use", "in use"])
def test_scalers_are_found(used: bool) -> None:
    """A scaler is put back: a scale that it had not made yet is not there again."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", growth_interval=1)

    def step() -> None:
        scaler.scale(model(torch.ones(2, 4)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()

    if used:
        step()
    before = bits([vars(scaler), model.state_dict()])
    snapshot = around(model, step)
    assert bits([vars(scaler), model.state_dict()]) == before
    assert "GradScaler" in snapshot.found


def test_gaps() -> None:
    """What was written by hand before a copy was taken is told by name, through `.data` too."""
    model = net()
    snapshot = Snapshot(model)
    with snapshot:
        model[0].weight.data.mul_(2)
        with torch.no_grad():
            model[2].bias.add_(1)
    assert snapshot.gaps() == ["2.bias", "0.weight"]


def test_gaps_outlive_a_later_copy() -> None:
    """A copy taken after the hand-written change does not hide it; what is written after the copy is no gap."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    snapshot = Snapshot(model)
    with snapshot:
        model[0].weight.data.mul_(2)
        optimizer.step()
        model[2].weight.data.clamp_(-0.01, 0.01)
    assert snapshot.gaps() == ["0.weight"]


def test_frozen_parameters_are_copied_unless_they_outweigh() -> None:
    """A target network is moved by hand after the optimizer step and has a copy; a frozen backbone has none."""
    for width, copied in ((4, 4), (400, 2)):
        model = nn.ModuleDict({"head": nn.Linear(4, 4), "frozen": nn.Linear(width, 4)})
        model["frozen"].requires_grad_(False)
        optimizer = torch.optim.SGD(model["head"].parameters(), lr=0.1)
        snapshot = around(model, optimizer.step)
        assert snapshot.copied["parameter"] == copied


def test_a_copy_that_fails_is_a_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Out of memory in a copy: the user's step goes on, and there is no way back."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    snapshot = Snapshot(model)

    def fail(held: Any) -> None:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr("nanhunt.kept.Held.take", fail)
    with snapshot:
        optimizer.step()
    assert snapshot.gaps() == ["SGD (OutOfMemoryError: out of memory)"]


def test_parameters_of_another_model() -> None:
    """An optimizer that moves more than the model's parameters: they are put back, and what may be missing is said."""
    model, other = net(), net()
    optimizer = torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.1)
    before = bits(other.state_dict())

    def step() -> None:
        other(torch.eye(4)).sum().backward()
        optimizer.step()

    snapshot = around(model, step)
    assert bits(dict(other.named_parameters())) == [row for row in before if row[0] in dict(other.named_parameters())]
    assert snapshot.notes == [
        "6 parameters that SGD moves are not the model's: pass the module they belong to in restore="
    ]


def test_restore_takes_what_has_a_state() -> None:
    """Anything else is refused, in words."""
    with pytest.raises(UsageError, match=r"restore holds a int, which has no state_dict\(\) and load_state_dict\(\)"):
        Snapshot(net(), restore=(3,))


def test_scripted_modules() -> None:
    """A scripted module's attributes cannot be read like others: its buffers and parameters come back."""
    model = nn.Sequential(torch.jit.script(nn.BatchNorm1d(3)))
    before = bits(model.state_dict())
    around(model, lambda: model(torch.ones(4, 3)))
    assert bits(model.state_dict()) == before
