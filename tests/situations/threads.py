"""Threads, processes, loaders, deep stacks."""

import contextvars
import multiprocessing
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from .calls import Calls
from .harness import Spans
from .models import Net, batch, mlp, situation, squared, step


@situation()
def deep_model(watch: Spans) -> object:
    """235 nested modules run at the usual recursion limit, and so they must when watched."""

    class Level(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x) * 1.001

    model: nn.Module = nn.Linear(4, 4)
    for _ in range(235):
        model = Level(model)
    made: list[object] = []

    def run() -> None:
        with watch(model):
            out = model(batch())
            squared(out).backward()
        made.append(out)

    usual = sys.getrecursionlimit()
    sys.setrecursionlimit(1000)  # Inductor, in an earlier test, may have raised it for good
    try:
        _in_thread(run)
    finally:
        sys.setrecursionlimit(usual)
    return made, [p.grad for p in model.parameters()]


def _in_thread(run: Callable[[], object]) -> None:
    errors: list[BaseException] = []

    def guarded() -> None:
        try:
            run()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=guarded)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


@situation()
def threads_forward(watch: Spans) -> object:
    """Four threads run forward and backward of one model at a time of their own."""
    model = Net().eval()
    inputs = [batch() for _ in range(16)]

    def run(x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        out = model(x)
        return out, torch.autograd.grad(squared(out), list(model.parameters()))

    with watch(model), ThreadPoolExecutor(4) as pool:
        outs = list(pool.map(run, inputs))
    return {"model": model, "outs": outs}


@situation()
def backward_in_other_thread(watch: Spans) -> object:
    """Forward in one thread, backward in another, watch opened in a third."""
    model, made = Net(), {}
    with watch(model):
        _in_thread(lambda: made.update(loss=squared(model(batch()))))
        _in_thread(lambda: made["loss"].backward())
    return {"model": model, **made}


@situation()
def watch_in_thread(watch: Spans) -> object:
    """A whole watched step in a thread, while the main thread uses another model unwatched."""
    model, other, made = Net(), mlp(4, 4), {}
    _in_thread(lambda: made.update(step(watch, model, batch())))
    squared(other(batch())).backward()
    return made, other


@situation()
def context_variables(watch: Spans) -> object:
    """A forward that sets and reads context variables and runs a child in a copied context."""
    scale: contextvars.ContextVar[float] = contextvars.ContextVar("scale", default=1.0)

    def body(self: Any, x: Tensor) -> Tensor:
        token = scale.set(2.0)
        y = contextvars.copy_context().run(self.a, x) * scale.get()
        scale.reset(token)
        return y * scale.get()

    return step(watch, Calls(body, a=nn.Linear(4, 4)), batch())


class _Squares(Dataset[Tensor]):
    def __init__(self, model: nn.Module | None = None) -> None:
        self.model = model

    def __len__(self) -> int:
        return 6

    def __getitem__(self, i: int) -> Tensor:
        x = torch.full((4,), float(i)) + torch.rand(4)
        return x if self.model is None else self.model(x).detach()


@situation()
def fork_dataloader(watch: Spans) -> object:
    """A loader with a forked worker feeds the model while it is watched."""
    model, losses = mlp(4, 4, 3), []
    with watch(model):
        for x in DataLoader(_Squares(), batch_size=3, num_workers=1, multiprocessing_context="fork"):
            loss = squared(model(x))
            loss.backward()
            losses.append(loss)
    return {"model": model, "losses": losses}


@situation()
def fork_model_in_worker(watch: Spans) -> object:
    """The worker process runs the watched model itself."""
    model = mlp(4, 4, 3)
    with watch(model):
        loader = DataLoader(_Squares(model), batch_size=3, num_workers=1, multiprocessing_context="fork")
        features = list(loader)
        out = model(batch())
    return {"model": model, "features": features, "out": out}


def _child(model: nn.Module, x: Tensor, pipe: Any) -> None:
    loss = squared(model(x))
    loss.backward()
    pipe.send([p.grad.tolist() for p in model.parameters() if p.grad is not None])
    pipe.close()


@situation()
def forked_training(watch: Spans) -> object:
    """A process forked under watch trains on its own copy, and ends."""
    model, x = mlp(4, 4, 3), batch()
    context = multiprocessing.get_context("fork")
    with watch(model):
        model(x)
        here, there = context.Pipe()
        process = context.Process(target=_child, args=(model, x, there))
        process.start()
        grads = here.recv()
        process.join()
    return {"model": model, "grads": grads, "exit": process.exitcode}


@situation()
def data_parallel_cpu(watch: Spans) -> object:
    """DataParallel, which on a machine without GPU calls the module itself."""
    return step(watch, nn.DataParallel(Net()), batch())


@situation()
def loader_between_steps(watch: Spans) -> object:
    """A shuffling loader and an augmentation draw from the same generator as dropout."""
    data, model, losses = TensorDataset(batch(12, 4)), Net(), []
    with watch(model):
        for (x,) in DataLoader(data, batch_size=4, shuffle=True):
            loss = F.cross_entropy(model(x + torch.rand(())), torch.randint(3, (4,)))
            loss.backward()
            losses.append(loss)
    return {"model": model, "losses": losses}
