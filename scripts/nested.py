"""Random nested models: what hypothesis draws, and the modules it draws them from."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from specimens import BATCH, LENGTH, VOCAB, WIDTH, Spec, Specimen
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Residual(nn.Module):
    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x)  # type: ignore[no-any-return]


class Parallel(nn.Module):
    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([branch(x) for branch in self.branches]).mean(0)


class InDict(Residual):
    """A block with a dict of outputs, of which one is never used."""

    def forward(self, x: Tensor) -> Any:
        hidden = self.body(x)
        return {"hidden": hidden, "size": hidden.detach().abs().mean()}


class InTuple(Residual):
    def forward(self, x: Tensor) -> Any:
        return x, [self.body(x), None]


class Pick(Residual):
    """The reader of a structured output."""

    def forward(self, x: Tensor) -> Tensor:
        out = self.body(x)
        return out["hidden"] if isinstance(out, dict) else out[1][0]  # type: ignore[no-any-return]


class Twice(Residual):
    """One module, called twice."""

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self.body(x))  # type: ignore[no-any-return]


class Stopped(Residual):
    """A branch that sends no gradient back."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x).detach()  # type: ignore[no-any-return]


class Discarded(Residual):
    """Runs its body for nothing and returns the tensor it was given."""

    def forward(self, x: Tensor) -> Tensor:
        self.body(x)
        return x


class Checkpointed(nn.Module):
    def __init__(self, body: nn.Module, *, reentrant: bool) -> None:
        super().__init__()
        self.body, self.reentrant = body, reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.body, x, use_reentrant=self.reentrant)  # type: ignore[no-any-return]


class Channels(Residual):
    """Runs a module that wants channels before positions: convolution, batch norm."""

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x.transpose(1, 2)).transpose(1, 2)  # type: ignore[no-any-return]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.rnn(x)[0]  # type: ignore[no-any-return]


class CausalAttention(nn.Module):
    """Attention in plain operations, with a mask of -inf."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.softmax = nn.Softmax(-1)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.q(x) @ self.k(x).transpose(1, 2) / WIDTH**0.5
        future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        return self.softmax(scores.masked_fill(future, float("-inf"))) @ self.v(x)  # type: ignore[no-any-return]


class TorchAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, dropout=0.1, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]  # type: ignore[no-any-return]


class Scaled(nn.Module):
    """Reads one buffer, and keeps a running mean in another."""

    scale: Tensor
    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.linspace(0.5, 1.5, WIDTH))
        self.register_buffer("seen", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.seen.mul_(0.9).add_(x.detach().mean((0, 1)), alpha=0.1)
        return x * self.scale


LEAVES: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "linear_relu": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True)),
    "normed": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH, bias=False)),
    "conv_relu": lambda: Channels(nn.Sequential(nn.Conv1d(WIDTH, WIDTH, 3, padding=1), nn.ReLU(inplace=True))),
    "batch_norm": lambda: Channels(nn.BatchNorm1d(WIDTH)),
    "layer_norm": lambda: nn.LayerNorm(WIDTH),
    "rms_norm": lambda: nn.RMSNorm(WIDTH),
    "gru": Recurrent,
    "attention": CausalAttention,
    "torch_attention": TorchAttention,
    "scaled": Scaled,
    "dropout": lambda: nn.Dropout(0.2),
    "gelu": nn.GELU,
    "tanh": nn.Tanh,
    "hardtanh": nn.Hardtanh,
    "softplus": nn.Softplus,
    "identity": nn.Identity,
}
WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "residual": Residual,
    "dict": lambda body: Pick(InDict(body)),
    "tuple": lambda body: Pick(InTuple(body)),
    "twice": Twice,
    "stopped": Stopped,
    "discarded": Discarded,
    "checkpoint": lambda body: Checkpointed(body, reentrant=False),
    "reentrant": lambda body: Checkpointed(body, reentrant=True),
}
CONTAINERS: dict[str, Callable[..., nn.Module]] = {"sequential": nn.Sequential, "parallel": Parallel}


def build(spec: Spec) -> nn.Module:
    """The module that a description stands for."""
    name, *children = spec
    make = LEAVES.get(name) or WRAPPERS.get(name) or CONTAINERS[name]
    return make(*map(build, children))


class Net(nn.Module):
    """Embedding, a drawn body, a head; the drawn form of the output decides who computes the loss."""

    def __init__(self, body: nn.Module, form: str) -> None:
        super().__init__()
        self.embed, self.body, self.head = (
            nn.Embedding(VOCAB, WIDTH),
            body,
            nn.Linear(WIDTH, VOCAB, bias=False),
        )
        self.form = form
        if "tied" in form:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor, labels: Tensor) -> Any:
        logits = self.head(self.body(self.embed(ids)))
        if "loss" in self.form:
            return F.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits
        return {"logits": logits} if "dict" in self.form else (logits,)


def _scalar_or_square(output: Any) -> Tensor:
    first: Tensor = output["logits"] if isinstance(output, dict) else output[0]
    return first if first.dim() == 0 else first.float().pow(2).mean()


def drawn(spec: Spec, name: str) -> Specimen:
    """A random nested model from its description ``(form, body)``."""
    torch.manual_seed(0)
    model = Net(build(spec[1]), spec[0])
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(VOCAB, (BATCH, LENGTH), generator=generator)
    batch = {"ids": ids, "labels": ids.roll(-1, 1)}
    return Specimen(name=name, model=model.train(), batch=batch, loss=_scalar_or_square)


def strategy() -> Any:
    """Descriptions of random nested models, as a hypothesis strategy."""
    from hypothesis import strategies as st

    leaf = st.sampled_from(sorted(LEAVES)).map(lambda name: (name,))

    def grow(inner: Any) -> Any:
        wrapped = st.tuples(st.sampled_from(sorted(WRAPPERS)), inner)
        several = st.tuples(st.sampled_from(sorted(CONTAINERS)), st.lists(inner, min_size=2, max_size=3))
        return wrapped | several.map(lambda pair: (pair[0], *pair[1]))

    form = st.sampled_from(("plain", "dict", "loss", "loss tied", "dict tied"))
    # Two levels on top of the recursive part, so that hypothesis' small first draws are not bare leaves.
    return st.tuples(form, grow(grow(st.recursive(leaf, grow, max_leaves=6))))


def draw(count: int, seed: int) -> list[Spec]:
    """``count`` different descriptions, the same ones for the same seed."""
    import hypothesis

    found: dict[Spec, None] = {}
    quiet = hypothesis.settings(
        max_examples=4 * count + 20,
        database=None,
        deadline=None,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )

    @hypothesis.seed(seed)
    @quiet
    @hypothesis.given(strategy())
    def collect(spec: Spec) -> None:
        found[spec] = None

    collect()
    specs = list(found)
    random.Random(seed).shuffle(specs)
    return specs[:count]
