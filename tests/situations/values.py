"""Kinds of values that flow: empty, complex, packed, leaves, subclasses, graphs, keywords only."""

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import rnn

from .harness import Spans
from .models import Net, batch, mlp, situation, squared, step
from .outputs import Returns


@situation()
def no_input_module(watch: Spans) -> object:
    """A module without inputs that returns something computed from its parameter."""

    class Bank(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(4, 4))

        def forward(self) -> Tensor:
            return self.w.tanh()

    class Uses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bank = Bank()

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.bank()

    return step(watch, Uses(), batch())


@situation()
def returns_own_parameter(watch: Spans) -> object:
    """A module that returns its Parameter: hooks on that leaf must neither pile up nor stay."""

    class Owns(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(4, 4))
            self.register_buffer("b", torch.randn(4))

        def forward(self, bias: bool) -> Tensor:
            return self.b if bias else self.w

    class Uses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own = Owns()

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.own(False) + self.own(True)

    model = Uses()
    losses = [step(watch, model, batch())["loss"] for _ in range(3)]
    squared(model(batch())).backward()
    return {"model": model, "losses": losses}


@situation()
def returns_leaf_made_inside(watch: Spans) -> object:
    """A module that returns a fresh leaf which requires grad."""

    class Fresh(nn.Module):
        def forward(self) -> Tensor:
            self.made = torch.randn(3, requires_grad=True)
            return self.made

    model = Fresh()
    return step(watch, model, loss=lambda y: y.pow(2).sum())


@situation()
def bool_int_outputs(watch: Spans) -> object:
    """Outputs that are booleans and integers beside a floating one."""
    return step(
        watch, Returns(lambda y: (y > 0, y.argmax(-1), y.to(torch.int8), y)), batch(), loss=lambda o: squared(o[3])
    )


@situation()
def empty_and_0dim(watch: Spans) -> object:
    """Outputs with no element and with no dimension."""
    return step(watch, Returns(lambda y: (y[:0], y[:, :0], y.sum(), y)), batch(), loss=lambda o: o[2] + o[0].sum())


@situation()
def empty_batch(watch: Spans) -> object:
    """A batch of size zero goes through every layer."""
    return step(watch, Net(), batch(0, 4), loss=lambda y: y.sum())


@situation()
def complex_model(watch: Spans) -> object:
    """Complex weights and activations, conjugate views, a spectral convolution."""

    class Spectral(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(3, dtype=torch.complex64))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            y = torch.fft.rfft(x) * self.w
            return y, y.conj(), torch.fft.irfft(y.conj().imag * 1j + y, n=4)

    return step(watch, Spectral(), batch(), loss=lambda o: squared(o[2]) + o[1].abs().mean())


@situation()
def kwargs_only(watch: Spans) -> object:
    """A module called with keywords only."""

    class Kw(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(4, 4)

        def forward(self, *, x: Tensor, scale: float = 1.0, **rest: Any) -> dict[str, Tensor]:
            return {"y": self.lin(input=x) * scale, **rest}

    return step(watch, Kw(), x=batch(), scale=2.0, note="text", loss=lambda o: squared(o["y"]))


@situation()
def lstm_gru(watch: Spans) -> object:
    """LSTM, GRU and RNN over packed sequences and tensors, with cells and projections."""

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(4, 6, num_layers=2, bidirectional=True, batch_first=True, proj_size=3, dropout=0.1)
            self.gru, self.rnn = nn.GRU(6, 5, batch_first=True), nn.RNN(5, 4, nonlinearity="relu", batch_first=True)
            self.cell, self.gcell = nn.LSTMCell(4, 4), nn.GRUCell(4, 4)

        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            packed = rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
            y, (h, c) = self.lstm(packed)
            y, _ = self.gru(y)
            y, _ = self.rnn(y)
            y, _ = rnn.pad_packed_sequence(y, batch_first=True)
            h, c = self.cell(y[:, 0])
            return self.gcell(h, c) + y.mean(1)

    return step(watch, Recurrent(), batch(3, 6, 4), torch.tensor([6, 2, 4]))


@situation()
def output_kept_on_module(watch: Spans) -> object:
    """A module that keeps its last output, deep copies of it and a numpy view."""

    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(4, 4)
            self.last: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            self.last = self.lin(x)
            self.host = np.array(self.last.detach().numpy())
            return self.last + (0 if self.last is None else self.last.detach())

    return step(watch, Keeps(), batch())


@situation()
def tensor_subclass(watch: Spans) -> object:
    """A Tensor subclass with its own __torch_function__ that counts the calls."""

    class Counted(torch.Tensor):
        calls = 0

        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            Counted.calls += 1
            return super().__torch_function__(func, types, args, kwargs or {})

    Counted.calls = 0
    model = mlp(4, 8, 3)
    with watch(model):
        out = model(batch().as_subclass(Counted))
        loss = out.pow(2).sum()
        loss.backward()
    return {"model": model, "out": out.as_subclass(torch.Tensor), "kind": type(out).__name__, "calls": Counted.calls}


@situation()
def custom_objects_in(watch: Spans) -> object:
    """A graph-like batch object whose attributes hold the tensors."""

    class Graph:
        def __init__(self) -> None:
            self.x, self.edges = batch(), torch.tensor([[0, 1, 2], [1, 2, 3]])

    class Conv(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(4, 4)

        def forward(self, g: Graph) -> Graph:
            message = self.lin(g.x)[g.edges[0]]
            g.x = g.x.index_add(0, g.edges[1], message)
            return g

    return step(watch, nn.Sequential(Conv(), Conv()), Graph(), loss=lambda g: squared(g.x))
