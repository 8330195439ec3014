"""How tensors lie in memory: nested, sparse, channels last, expanded, shared, lazy conjugates."""

import warnings
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from .harness import Spans
from .models import batch, conv_net, mlp, situation, squared, step
from .outputs import Returns


@situation()
def njt(watch: Spans) -> object:
    """Jagged nested tensors through linear layers, forward and backward."""
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    with watch(model):
        x = torch.nested.nested_tensor([batch(2, 4), batch(5, 4)], layout=torch.jagged)
        out = model(x)
        squared(out.values()).backward()
    return [model, out]


@situation()
def nested_strided(watch: Spans) -> object:
    """Nested tensors of the older, strided kind."""
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        x = torch.nested.nested_tensor([batch(2, 4), batch(5, 4)])
    with watch(model):
        out = model(x)
        out.to_padded_tensor(0.0).pow(2).mean().backward()
    return [model, out]


class _Sparse(nn.Module):
    def __init__(self, layout: str) -> None:
        super().__init__()
        self.w, self.layout = nn.Parameter(torch.randn(4, 4)), layout

    def forward(self, x: Tensor) -> Tensor:
        y = (x.relu() @ self.w).relu()
        return y.to_sparse() if self.layout == "coo" else y.detach().to_sparse_csr()


@situation()
def sparse_coo(watch: Spans) -> object:
    """A module that returns a sparse COO tensor, with a backward through it."""
    return step(watch, _Sparse("coo"), batch(), loss=lambda y: torch.sparse.sum(y))


@situation()
def sparse_csr_out(watch: Spans) -> object:
    """A module that returns a sparse CSR tensor, a second one that multiplies by it."""

    class Times(nn.Module):
        def forward(self, s: Tensor) -> Tensor:
            return s @ torch.ones(4, 3)

    model = nn.Sequential(_Sparse("csr"), Times())
    with warnings.catch_warnings(), watch(model):
        warnings.simplefilter("ignore")
        middle = model[0](batch())
        out = model[1](middle)
    return [model, middle, out]


@situation()
def sparse_input(watch: Spans) -> object:
    """A sparse adjacency matrix as input of a graph convolution, uncoalesced."""

    class Graph(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(4, 3)

        def forward(self, adj: Tensor, x: Tensor) -> Tensor:
            return torch.sparse.mm(adj, self.lin(x))

    adj = torch.sparse_coo_tensor([[0, 1, 1, 4, 1], [1, 0, 2, 4, 0]], [1.0, 2.0, 3.0, 4.0, 5.0], (5, 5))
    return step(watch, Graph(), adj, batch())


@situation()
def sparse_embedding_grad(watch: Spans) -> object:
    """Sparse gradients of embeddings, with SparseAdam, over two accumulated batches."""
    model = nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Flatten(0, 1))
    bag = nn.EmbeddingBag(9, 4, sparse=True, mode="sum")
    optimizer = torch.optim.SparseAdam([*model.parameters(), *bag.parameters()], 0.1)
    both = nn.ModuleList([model, bag])
    with watch(both):
        for _ in range(2):
            for ids in (torch.tensor([[1, 2, 2]]), torch.tensor([[0, 8, 1]])):
                (squared(model(ids)) + squared(bag(ids))).backward()
            grads = [p.grad.to_dense() for p in both.parameters()]
            optimizer.step()
            optimizer.zero_grad()
    return [list(both.parameters()), grads, optimizer]


@situation()
def channels_last(watch: Spans) -> object:
    """channels_last inputs and weights: strides must come out the same."""
    model = conv_net().to(memory_format=torch.channels_last)
    return step(watch, model, batch(2, 3, 14, 14).contiguous(memory_format=torch.channels_last))


@situation()
def odd_strides(watch: Spans) -> object:
    """Outputs that are expanded, transposed, diagonal, unfolded, offset, flipped, with stride 0."""

    def views(y: Tensor) -> list[Tensor]:
        return [
            y.t(),
            y[:, None].expand(5, 7, 4),
            y[1:, ::2],
            y.diagonal(),
            y.unfold(0, 2, 1),
            y.flip(0),
            y[0, 0].expand(3),
        ]

    model = Returns(views)
    return step(watch, model, batch(), loss=lambda o: torch.stack([squared(v) for v in o]).sum())


@situation()
def overlapping_memory(watch: Spans) -> object:
    """as_strided outputs whose elements share memory."""
    model = Returns(lambda y: (y, y.contiguous().as_strided((4, 6), (2, 1))))
    return step(watch, model, batch(), loss=lambda o: squared(o[1]))


@situation()
def lazy_views(watch: Spans) -> object:
    """Lazy conjugate and negative views as outputs, real and imaginary parts."""

    def lazy(y: Tensor) -> list[Tensor]:
        z = torch.complex(y, y * 2)
        return [z.conj(), z.conj().imag, torch._neg_view(y), z.mH, z.real]

    return step(watch, Returns(lazy), batch(), loss=lambda o: squared(o[1]) + squared(o[2]) + o[0].abs().sum())


@situation()
def shared_memory(watch: Spans) -> object:
    """Parameters in shared memory, inputs that are views of numpy arrays, read-only ones too."""
    model = mlp(4, 6, 3).share_memory()
    array = np.ones((5, 4), dtype=np.float32)
    made = step(watch, model, torch.from_numpy(array))
    return [made, array]


@situation()
def flat_parameters(watch: Spans) -> object:
    """Parameters that are views of one flat buffer, gradients preset to views as well."""
    model = mlp(4, 6, 3)
    flat = nn.utils.parameters_to_vector(model.parameters()).detach()
    nn.utils.vector_to_parameters(flat, model.parameters())
    grads, start = torch.zeros_like(flat), 0
    for p in model.parameters():
        p.grad = grads[start : start + p.numel()].view_as(p)
        start += p.numel()
    return [step(watch, model, batch()), flat, grads]


@situation()
def mkldnn_tensors(watch: Spans) -> object:
    """oneDNN's opaque layout between modules."""

    class To(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.to_mkldnn()

    class From(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.to_dense() * 2

    model = nn.Sequential(nn.Linear(4, 4), To(), From())
    if not torch.backends.mkldnn.is_available():
        model = nn.Sequential(nn.Linear(4, 4))
    with watch(model), torch.no_grad():
        return [model(batch())]


@situation()
def masked_tensor(watch: Spans) -> object:
    """MaskedTensor, a wrapper subclass, as a module's output."""
    from torch.masked import masked_tensor as wrap

    model = Returns(lambda y: (y, wrap(y.detach(), y.detach() > 0)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with watch(model):
            out, masked = model(batch())
            squared(out).backward()
    return [model, out, masked.get_data(), masked.get_mask()]


class Wrapper(torch.Tensor):
    """A wrapper subclass by __torch_dispatch__ that counts the operators it sees."""

    ops: ClassVar[list[str]] = []
    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> "Wrapper":
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, strides=inner.stride())
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        from torch.utils._pytree import tree_map

        cls.ops.append(str(func))
        plain, named = tree_map(lambda a: a.inner if isinstance(a, Wrapper) else a, (args, kwargs or {}))
        out = func(*plain, **named)
        return tree_map(lambda a: Wrapper(a) if isinstance(a, Tensor) else a, out)


@situation(sees=False)
def dispatch_subclass(watch: Spans) -> object:
    """A wrapper subclass flows through the model; its operators run once and in order, whatever else looks at it."""
    model = mlp(4, 6, 3)
    Wrapper.ops = []
    with watch(model):
        out = model(Wrapper(batch()))
    return [model, out.inner.detach(), [op for op in Wrapper.ops if op.split(".")[1] in ("addmm", "tanh", "t")]]


@situation()
def strided_batches(watch: Spans) -> object:
    """A non-contiguous, a zero-strided and a double batch one after the other."""
    model, outs = mlp(4, 6, 3), []
    with watch(model):
        for x in (batch(4, 5).t(), batch(1, 4).expand(5, 4), batch(10, 4)[::2]):
            out = model(x)
            squared(out).backward()
            outs.append(out)
    return [model, outs]
