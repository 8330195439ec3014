"""Small programs with one known fault each, for any device: what is made bad, where, and at which level it shows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A step, and what must be said of it: phase, module path and cause; `None` where nothing is asked.

    `make(device)` gives the model and a function that runs one step of it.
    """

    name: str
    make: Callable[[torch.device], tuple[nn.Module, Callable[[], None]]]
    phase: str
    module: str | None
    cause: str | None = None


class Two(nn.Module):
    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(self.first(x))
        return out


class Attend(nn.Module):
    """Attention of its own making: a row in which everything is masked has no softmax."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.query(x) @ x.transpose(-1, -2)
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
        mask[3] = True
        mixed: Tensor = scores.masked_fill(mask, float("-inf")).softmax(-1) @ x
        return mixed


class Length(nn.Module):
    """A norm written by hand: its derivative does not exist at 0."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        length: Tensor = self.inner(x).square().sum(-1).sqrt()
        return length


def _overflow(device: torch.device) -> tuple[nn.Module, Callable[[], None]]:
    first, second = nn.Linear(16, 16), nn.Linear(16, 16)
    nn.init.constant_(first.weight, 10.0)
    nn.init.constant_(second.weight, 300.0)
    model = Two(first, second).to(device, torch.float16)
    x = torch.full((4, 16), 10.0, device=device, dtype=torch.float16)
    return model, lambda: model(x).sum().backward()


def _masked_row(device: torch.device) -> tuple[nn.Module, Callable[[], None]]:
    model = Two(nn.Linear(16, 16), Attend(16)).to(device)
    x = torch.randn(2, 8, 16, device=device)
    return model, lambda: model(x).sum().backward()


def _root(device: torch.device) -> tuple[nn.Module, Callable[[], None]]:
    second = Length(16)
    nn.init.zeros_(second.inner.weight)
    nn.init.zeros_(second.inner.bias)
    model = Two(nn.Linear(16, 16), second).to(device)
    x = torch.randn(4, 16, device=device)
    return model, lambda: model(x).sum().backward()


def _batch(device: torch.device) -> tuple[nn.Module, Callable[[], None]]:
    model = Two(nn.Linear(16, 16), nn.Linear(16, 16)).to(device)
    x = torch.randn(4, 16, device=device)
    x[2, 3] = float("nan")
    return model, lambda: model(x).sum().backward()


def _weight(device: torch.device) -> tuple[nn.Module, Callable[[], None]]:
    second = nn.Linear(16, 16)
    nn.init.constant_(second.weight[1, 1], float("nan"))
    model = Two(nn.Linear(16, 16), second).to(device)
    x = torch.randn(4, 16, device=device)
    return model, lambda: model(x).sum().backward()


FAULTS = (
    Fault(name="float16 overflow in a Linear", make=_overflow, phase="forward", module="second", cause="overflow"),
    Fault(name="masked softmax row", make=_masked_row, phase="forward", module="second"),
    Fault(name="gradient of sqrt(0)", make=_root, phase="backward", module="second"),
    Fault(name="NaN in the batch", make=_batch, phase="input", module=None, cause="bad_input"),
    Fault(name="NaN in a weight", make=_weight, phase="state", module="second", cause="bad_parameter"),
)


def calibrating(device: torch.device, steps: int = 8) -> tuple[nn.Module, torch.amp.GradScaler, Callable[[], None]]:
    """A healthy training whose GradScaler starts far too high: skipped steps, and no fault.

    The step runs the whole calibration. `float16` autocast, so the loss scale overflows by itself.
    """
    torch.manual_seed(0)
    model = Two(nn.Linear(16, 64), nn.Linear(64, 4)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    scaler = torch.amp.GradScaler(device.type, init_scale=2.0**20)
    x, y = torch.randn(32, 16, device=device), torch.randint(4, (32,), device=device)

    def run() -> None:
        for _ in range(steps):
            with torch.autocast(device.type, torch.float16):
                loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            scaler.step(optimizer)
            scaler.update()

    return model, scaler, run
