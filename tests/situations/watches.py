"""Watches side by side, one in another, opened and closed at odd moments."""

import torch
from torch import Tensor, nn

from .harness import Spans
from .models import Block, Net, batch, mlp, situation, squared, step


@situation()
def two_models(watch: Spans) -> object:
    """Only one of two models that run together is watched, then both, one inside the other."""
    a, b = mlp(4, 4, 4), mlp(4, 4, 3)
    with watch(a):
        loss = squared(b(a(batch())))
        loss.backward()
    with watch(a), watch(b):
        other = squared(b(a(batch())))
        other.backward()
    return {"a": a, "b": b, "losses": [loss, other]}


@situation()
def nested_watches(watch: Spans) -> object:
    """The same model is watched twice, and a part of it once more; the inner ones close first, then out of order."""
    model = Net()
    with watch(model):
        with watch(model), watch(model.blocks):
            loss = squared(model(batch()))
            loss.backward()
        other = squared(model(batch()))
        other.backward()
    outer, inner = watch(model), watch(model.blocks[0])
    outer.__enter__()
    inner.__enter__()
    squared(model(batch())).backward()
    outer.__exit__(None, None, None)
    squared(model(batch())).backward()
    inner.__exit__(None, None, None)
    return {"model": model, "losses": [loss, other]}


@situation()
def watched_again_and_again(watch: Spans) -> object:
    """A watch around each of many steps."""
    model = Net()
    return {"model": model, "losses": [step(watch, model, batch())["loss"] for _ in range(25)]}


@situation()
def part_of_a_model(watch: Spans) -> object:
    """Only one block of a network is watched."""
    model = Net()
    with watch(model.blocks[1]):
        loss = squared(model(batch()))
        loss.backward()
    return {"model": model, "loss": loss}


@situation(sees=False)
def nothing_runs(watch: Spans) -> object:
    """The watch opens and closes around nothing, and around a model without parameters."""
    with watch(Net()), watch(nn.Identity()), watch(nn.Sequential()):
        pass
    return None


@situation()
def apply_and_iterate(watch: Spans) -> object:
    """The program walks, re-initialises, moves and switches the model while it is watched."""
    model = Net()
    with watch(model):
        model.apply(lambda m: m.reset_parameters() if hasattr(m, "reset_parameters") else None)
        names = [name for name, _ in model.named_modules()]
        model.eval().train().double().float().to("cpu").requires_grad_(True)
        model.blocks[0].eval()
        out = model(batch())
        squared(out).backward()
        text = str(model)
    return {"model": model, "names": names, "out": out, "text": text, "block": Block()}


@situation()
def watch_opened_inside_forward(watch: Spans) -> object:
    """A forward that opens a watch on a child, and one that closes the watch it runs under."""

    class Opens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = mlp(4, 4, 4), mlp(4, 4, 4)

        def forward(self, x: Tensor) -> Tensor:
            with watch(self.a):
                x = self.a(x)
            return self.b(x)

    class Closes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = mlp(4, 4, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = self.a(x)
            span.__exit__(None, None, None)
            return self.a(x)

    first = step(watch, Opens(), batch())
    second = Opens()
    squared(second(batch())).backward()
    closes = Closes()
    span = watch(closes)
    span.__enter__()
    squared(closes(batch())).backward()
    return [first["loss"], first["model"], second, closes]


@situation()
def watch_opened_inside_backward(watch: Spans) -> object:
    """A watch that is opened and closed by a tensor hook while a backward runs."""
    model, other = Net(), mlp(4, 6, 3)

    def look(grad: Tensor) -> None:
        with torch.enable_grad(), watch(other):
            squared(other(batch())).backward()

    with watch(model):
        out = model(batch())
        out.register_hook(look)
        squared(out).backward()
    return [model, other]
