"""In-place operations on what modules take and return."""

from typing import Any

import torch
from torch import Tensor, nn

from .harness import Spans
from .models import Net, batch, conv_net, mlp, situation, squared, step


@situation()
def baseline(watch: Spans) -> object:
    """A residual network, forward and backward."""
    return step(watch, Net(), batch())


@situation()
def baseline_input_grad(watch: Spans) -> object:
    """The input is a leaf that wants a gradient and must keep no hook."""
    return step(watch, Net(), batch(grad=True))


@situation()
def inplace_relu_conv(watch: Spans) -> object:
    """Convolutions followed by in-place ReLU, which overwrites their outputs."""
    return step(watch, conv_net(), batch(2, 3, 14, 14))


class _Adder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        y += self.b(x)
        y *= 2
        return y


@situation()
def inplace_add_by_caller(watch: Spans) -> object:
    """The caller adds in place to a module's output."""
    return step(watch, _Adder(), batch())


class _SliceWriter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        y[:, 1:3] = self.b(x)
        y[0].mul_(3)
        return y


@situation()
def inplace_slice_of_output(watch: Spans) -> object:
    """The caller assigns to a slice of a module's output."""
    return step(watch, _SliceWriter(), batch())


class _InputWriter(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(2).add_(1)


@situation()
def inplace_on_input_inside(watch: Spans) -> object:
    """A module overwrites its own input, which is another module's output."""
    return step(watch, nn.Sequential(nn.Linear(4, 4), _InputWriter(), nn.Linear(4, 4)), batch())


@situation()
def inplace_on_batch(watch: Spans) -> object:
    """The root overwrites the batch itself."""
    return step(watch, nn.Sequential(_InputWriter(), nn.Linear(4, 4)), batch())


class _View(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.view(-1, 2, 2).transpose(1, 2)


@situation()
def output_is_view_of_input(watch: Spans) -> object:
    """A module returns a view of what it was given."""
    return step(watch, nn.Sequential(nn.Linear(4, 4), _View(), nn.Linear(2, 2)), batch(grad=True))


@situation()
def output_is_input(watch: Spans) -> object:
    """Identity and Dropout in eval mode return the very tensor they were given."""
    return step(
        watch, nn.Sequential(nn.Identity(), nn.Linear(4, 4), nn.Identity(), nn.Dropout(0.5).eval()), batch(grad=True)
    )


class _Chunks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 8)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.a(x).chunk(2, dim=-1)
        return value.mul(gate.sigmoid())


class _UnsafeChunks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.act = nn.Linear(4, 8), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        first = y[:, :4]
        first.mul_(2)
        return self.act(first) + y[:, 4:].sigmoid()


@situation()
def chunk_then_inplace(watch: Spans) -> object:
    """A slice of an output is changed in place and goes through an in-place module."""
    return step(watch, nn.Sequential(_Chunks(), _UnsafeChunks()), batch())


@situation()
def inplace_dropout_and_activations(watch: Spans) -> object:
    """In-place dropout, ELU, hardtanh, SiLU, leaky ReLU one after the other."""
    acts = [nn.Dropout(0.3, inplace=True), nn.ELU(inplace=True), nn.Hardtanh(inplace=True)]
    acts += [nn.SiLU(inplace=True), nn.LeakyReLU(0.1, inplace=True)]
    layers: list[nn.Module] = []
    for act in acts:
        layers += [nn.Linear(4, 4), act]
    return step(watch, nn.Sequential(*layers), batch())


class _Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


class _DoubleModule(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return _Double.apply(x)


@situation()
def custom_function_mark_dirty(watch: Spans) -> object:
    """A custom Function that marks its input dirty."""
    return step(watch, nn.Sequential(nn.Linear(4, 4), _DoubleModule(), nn.Linear(4, 2)), batch())


class _Scratch(nn.Module):
    """Returns the same buffer each time, overwritten by the next call."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scratch", torch.zeros(5, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.scratch.copy_(x)


@situation()
def output_is_reused_buffer(watch: Spans) -> object:
    """A module returns its own buffer, which its next call overwrites."""
    model = nn.Sequential(_Scratch(), nn.Linear(4, 4))
    with watch(model), torch.no_grad():
        first = model[0](batch())
        kept = first.clone()
        second = model(batch())
    return {"model": model, "first": first, "kept": kept, "second": second}


@situation()
def out_data_rewritten(watch: Spans) -> object:
    """The caller writes through .data of an output and of a parameter, behind autograd's back."""
    model = mlp(4, 8, 3)
    with watch(model):
        hidden = model[0](batch())
        hidden.data.mul_(0.5)
        loss = squared(model[2](model[1](hidden)))
        loss.backward()
        model[0].weight.data.add_(1)
    return {"model": model, "hidden": hidden, "loss": loss}


@situation()
def output_resized_by_caller(watch: Spans) -> object:
    """The caller resizes and refills an output under no_grad."""
    model = nn.Linear(4, 4)
    with watch(model), torch.no_grad():
        out = model(batch())
        out.resize_(2, 2).fill_(1)
        other = model(batch())
        other.set_(torch.ones(3))
    return {"out": out, "other": other}


class _Scatter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        out = torch.zeros(5, 4)
        out.index_add_(0, torch.tensor([0, 0, 1, 2, 4]), self.a(x))
        out[out > 1] = 0.5
        out.masked_fill_(out.isnan(), 0)
        return out


@situation()
def inplace_scatter(watch: Spans) -> object:
    """index_add_, masked assignment and masked_fill_ on a tensor that then requires grad."""
    return step(watch, nn.Sequential(_Scatter(), nn.Linear(4, 4)), batch())


@situation()
def inplace_on_unbind_raises(watch: Spans) -> object:
    """An illegal in-place operation on an unbind view raises torch's own error, word for word."""
    model = nn.Linear(4, 4)
    error: Exception | None = None
    with watch(model):
        first, *_ = model(batch()).unbind(0)
        try:
            first.mul_(2)
        except RuntimeError as caught:
            error = caught
    return {"error": error}


@situation()
def modified_after_save_raises(watch: Spans) -> object:
    """A saved output that was changed in place raises in backward with the same version numbers."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Sigmoid())
    error: Exception | None = None
    with watch(model):
        out = model(batch())
        out.mul_(2)
        try:
            out.sum().backward()
        except RuntimeError as caught:
            error = caught
    return {"error": error, "out": out, "model": model}
