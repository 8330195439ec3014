"""Attention: the fused fast paths that a hook can switch off, masks, caches."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .harness import Spans
from .models import batch, situation, squared, step


def _encoder(**options: Any) -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, **options)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=bool(options.pop("nested", True)) and not options)


@situation()
def mha_train(watch: Spans) -> object:
    """A transformer encoder in training, with dropout."""
    return step(watch, _encoder(), batch(3, 5, 8))


@situation()
def mha_fast_nograd(watch: Spans) -> object:
    """The fused encoder layer under no_grad."""
    model = _encoder().eval()
    with watch(model), torch.no_grad():
        out = model(batch(3, 5, 8))
    return [model, out]


@situation()
def mha_fast_inference(watch: Spans) -> object:
    """The fused encoder layer in inference mode, half precision beside it."""
    model = _encoder().eval()
    with watch(model), torch.inference_mode():
        out = model(batch(3, 5, 8))
    half = model.bfloat16()
    with watch(half), torch.inference_mode():
        other = half(batch(3, 5, 8).bfloat16())
    return [model, out, other]


@situation()
def mha_fast_padmask(watch: Spans) -> object:
    """The fast path turns a padding mask into nested tensors, which zeroes the padded rows."""
    model = _encoder().eval()
    mask = torch.tensor([[False] * 5, [False] * 3 + [True] * 2, [False] * 4 + [True]])
    with watch(model), torch.no_grad():
        out = model(batch(3, 5, 8), src_key_padding_mask=mask)
    return [model, out]


@situation()
def mha_fast_norm_first(watch: Spans) -> object:
    """norm_first with a padding mask, where the fused and the plain path differ in the last bits."""
    model = _encoder(norm_first=True).eval()
    mask = torch.tensor([[False] * 5, [False] * 3 + [True] * 2, [False] * 4 + [True]])
    with watch(model), torch.no_grad():
        out = model(batch(3, 5, 8), src_key_padding_mask=mask)
    return [model, out]


@situation()
def mha_only_fast(watch: Spans) -> object:
    """MultiheadAttention alone on its fast path, with and without weights."""
    model = nn.MultiheadAttention(8, 2, batch_first=True).eval()
    with watch(model), torch.no_grad():
        x = batch(3, 5, 8)
        outs = [model(x, x, x, need_weights=need) for need in (False, True)]
    return [model, outs]


@situation()
def transformer_masks(watch: Spans) -> object:
    """An encoder-decoder with causal masks of -inf, in training: legal infinities."""
    model = nn.Transformer(8, 2, 1, 1, 16, batch_first=True)
    mask = nn.Transformer.generate_square_subsequent_mask(5)
    return step(watch, model, batch(2, 5, 8), batch(2, 5, 8), tgt_mask=mask, tgt_is_causal=True)


class _Attention(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.qkv, self.out, self._options = nn.Linear(8, 24), nn.Linear(8, 8), options

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (2, 4)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, **self._options)
        return self.out(y.transpose(1, 2).flatten(-2))


@situation()
def sdpa_kernels(watch: Spans) -> object:
    """scaled_dot_product_attention on each CPU backend, causal, with dropout, in bfloat16."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    outs = []
    for backend in (SDPBackend.MATH, SDPBackend.FLASH_ATTENTION):
        with sdpa_kernel(backend):
            outs.append(step(watch, _Attention(is_causal=True), batch(2, 5, 8)))
            outs.append(step(watch, _Attention(is_causal=True).bfloat16(), batch(2, 5, 8).bfloat16()))
    outs.append(step(watch, _Attention(dropout_p=0.2), batch(2, 5, 8)))
    return outs


@situation()
def manual_masked_attention(watch: Spans) -> object:
    """Scores filled with -inf by a child module, soaked up by softmax: nothing to report."""

    class Mask(nn.Module):
        def forward(self, scores: Tensor) -> Tensor:
            return scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)

    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.mask, self.soft = nn.Linear(4, 4), nn.Linear(4, 4), Mask(), nn.Softmax(-1)

        def forward(self, x: Tensor) -> Tensor:
            return self.soft(self.mask(self.q(x) @ self.k(x).transpose(-1, -2))) @ x

    return step(watch, Attends(), batch(2, 5, 4))


@situation()
def top_k_filtered_logits(watch: Spans) -> object:
    """A sampler whose filter module fills logits with -inf, and which returns them: legal."""

    class Sampler(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(4, 9)

        def forward(self, x: Tensor) -> Tensor:
            logits = self.head(x)
            worst = logits.topk(3, dim=-1).values[..., -1:]
            return logits.masked_fill(logits < worst, -float("inf"))

    model, tokens = Sampler().eval(), []
    with watch(model), torch.no_grad():
        tokens += [torch.multinomial(model(batch()).softmax(-1), 1) for _ in range(3)]
    return [model, tokens]


@situation()
def guarded_branches(watch: Spans) -> object:
    """A module's NaN and Inf that a where, a clamp and nan_to_num keep from loss and gradients: absorbed."""

    class Ratio(nn.Module):
        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return a / b

    class Guarded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ratio, self.lin = Ratio(), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                weight = torch.nan_to_num(self.ratio(x.relu(), x.relu()), 1.0)
                top = self.ratio(torch.ones(4), torch.zeros(4)).clamp(max=5)
                keep = torch.where(weight > 0, weight, torch.zeros(()))
            return self.lin(x) * keep * top

    return step(watch, Guarded(), batch())


@situation()
def key_value_cache(watch: Spans) -> object:
    """Token by token with a growing cache that is written in place into preallocated memory."""

    class Cached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(4, 12)
            self.register_buffer("keys", torch.empty(8, 4).fill_(torch.nan), persistent=False)
            self.register_buffer("values", torch.zeros(8, 4), persistent=False)
            self.length = 0

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).chunk(3, -1)
            self.keys[self.length], self.values[self.length] = k, v
            self.length += 1
            keys, values = self.keys[: self.length], self.values[: self.length]
            return torch.softmax(keys @ q, 0) @ values

    model, x = Cached().eval(), batch(4)
    model.keys.zero_()
    with watch(model), torch.no_grad():
        for _ in range(6):
            x = model(x)
    return [model, x, squared(x)]
