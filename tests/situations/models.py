"""Small models and the plain training step that most situations vary."""

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .harness import Catalogue, Spans

situation = Catalogue()


class Block(nn.Module):
    """Residual block with a normalisation and a dropout."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.act = nn.GELU()
        self.drop = nn.Dropout(0.1)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.drop(self.act(self.up(self.norm(x)))))


class Net(nn.Module):
    """Embedding of a batch of vectors, some blocks, a head."""

    def __init__(self, width: int = 8, depth: int = 2, classes: int = 3) -> None:
        super().__init__()
        self.stem = nn.Linear(4, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def conv_net() -> nn.Sequential:
    """The convolution, batch norm, in-place ReLU pattern of every vision model."""
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1),
        nn.BatchNorm2d(6),
        nn.ReLU(inplace=True),
        nn.Conv2d(6, 4, 3, stride=2),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(36, 3),
    )


def mlp(*widths: int) -> nn.Sequential:
    """Linear layers with tanh between them."""
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(widths):
        layers += [nn.Linear(a, b), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def batch(*shape: int, grad: bool = False) -> Tensor:
    """Normal numbers of the given shape."""
    return torch.randn(*shape or (5, 4)).requires_grad_(grad)


def squared(out: Tensor) -> Tensor:
    """A loss that any real output has."""
    return out.float().pow(2).mean()


def step(
    watch: Spans, model: nn.Module, *args: Any, loss: Callable[[Any], Tensor] = squared, **kwargs: Any
) -> dict[str, object]:
    """One watched forward and backward."""
    with watch(model):
        out = model(*args, **kwargs)
        value = loss(out)
        value.backward()
    return {"model": model, "out": out, "loss": value, "args": args, "kwargs": kwargs}


def train(
    watch: Spans,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: int = 3,
    hand_over: bool = False,
    **options: Any,
) -> dict[str, object]:
    """Some watched training steps with an optimizer that is handed over or not."""
    losses = []
    with watch(model, optimizer if hand_over else None, **options):
        for _ in range(steps):
            optimizer.zero_grad()
            loss = squared(model(batch()))
            loss.backward()
            optimizer.step()
            losses.append(loss)
    return {"model": model, "optimizer": optimizer, "losses": losses}
