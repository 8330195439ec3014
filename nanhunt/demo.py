"""A small real training that overflows, watched: what `python -m nanhunt demo` runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import numerics
from .errors import NonFiniteError
from .finding import Finding
from .watching import watch

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}

WIDTH, HEADS, BLOCKS, CONTEXT, BATCH = 48, 4, 2, 32, 8
STEPS, EVERY = 130, 10
_WARNING = 4  # bits of headroom that a cautious reader of the table would stop at
FIRST_RATE, GROWTH = 1e-3, 1.06  # a learning-rate sweep: each step 6 % up, until something gives

_OPENING = f"""\
A character model ({BLOCKS} transformer blocks, width {WIDTH}) learns Python's own help texts on the CPU,
in {{dtype}}, with AdamW{{scaling}}. Its learning rate goes up by {GROWTH - 1:.0%} a step, as in a
search for the highest usable one. nanhunt.watch runs along; nothing is planted.
"""

_FOUND = """\
How to read it
  One step before, the loss was still a number ({loss:.2f}). The headroom had told it {early} steps
  before: from step {warned} on, less than {bits} of the {all_bits} bits of float16 were left.
  The loss was lowest around step {best}, at a learning rate of {rate:.2g}: beyond it training only grew.

What to do next
  Is it the format or the training? The same run in another one:
      python -m nanhunt demo --dtype float32
  Keep the finding and read it again:
      python -m nanhunt demo --save finding.json
      python -m nanhunt show finding.json
"""

_CLEAN = """\
No NaN and no Inf in {steps} steps.
The largest activation was {peak}, and {dtype} holds up to {limit}{float16}.
{verdict}
"""

_DIVERGED = """\
Yet the loss went from {low:.2f} (around step {best}, learning rate {rate:.2g}) to {last:.1f}. So the
learning rate is at fault, and the format only decides how soon it shows as an Inf."""

_YOURS = """\
In your own loop (optimizer and scaler may be left out):
    import nanhunt
    with nanhunt.watch(model, optimizer, scaler):
        train(model, optimizer, scaler)  # your loop as it is; the first fault stops it with such a page
"""


class _Step(NamedTuple):
    rate: float
    loss: float
    largest: float


class SquaredReLU(nn.Module):
    """relu(x) ** 2, the activation of Primer: good for learning, and quick to grow."""

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x).square()


class FeedForward(nn.Module):
    """The widening half of a block; `largest` keeps the largest number it gave out."""

    largest: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.act = SquaredReLU()
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.act(self.up(x)))
        self.largest = out.detach().abs().amax()
        return out


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, HEADS, width // HEADS).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))  # type: ignore[no-any-return]


class Block(nn.Module):
    """Attention and feed-forward, each added to the residual stream."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.norm2, self.feed_forward = nn.LayerNorm(WIDTH), FeedForward()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.feed_forward(self.norm2(x))  # type: ignore[no-any-return]


class CharacterModel(nn.Module):
    """Characters in, a score for each next character out."""

    def __init__(self, characters: int) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(characters, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, characters)

    def forward(self, text: Tensor) -> Tensor:
        x = self.embed(text) + self.place(torch.arange(text.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]

    def largest(self) -> float:
        return max(float(block.feed_forward.largest) for block in self.blocks)  # type: ignore[union-attr, arg-type]


def corpus() -> str:
    """Half a million characters of English that come with Python."""
    from pydoc_data.topics import topics

    return "\n".join(topics[name] for name in sorted(topics))


def batches(data: Tensor, seed: int) -> Iterator[Tensor]:
    """Random windows of the text, one character longer than the context."""
    dice = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(data) - CONTEXT, (BATCH,), generator=dice).tolist()
        yield torch.stack([data[start : start + CONTEXT + 1] for start in starts])


def run(
    *, dtype: str = "float16", seed: int = 0, steps: int = STEPS, say: Callable[[str], None] = print
) -> Finding | None:
    """Train until the watch stops it or the steps are over; says what happens and what it means."""
    scaling = " and a GradScaler" if dtype == "float16" else ""
    say(_OPENING.format(dtype=f"{dtype} autocast" if dtype != "float32" else dtype, scaling=scaling))
    text = corpus()
    characters = sorted(set(text))
    index = {character: i for i, character in enumerate(characters)}
    data = torch.tensor([index[character] for character in text])
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        model = CharacterModel(len(characters))
    optimizer = torch.optim.AdamW(model.parameters(), lr=FIRST_RATE)
    scaler = torch.amp.GradScaler("cpu", enabled=dtype == "float16")

    say("  step  learning rate      loss  largest activation  float16 headroom")
    story: list[_Step] = []
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the same sums everywhere, and tensors this small gain nothing from more
    try:
        with watch(model, optimizer, scaler) as hunt:
            for step, window in zip(range(steps), batches(data, seed)):
                story.append(_train(model, optimizer, scaler, window, DTYPES[dtype]))
                if step % EVERY == 0:
                    say(_line(step, story[-1]))
        finding = hunt.finding
    except NonFiniteError as error:
        finding = error.finding
    finally:
        torch.set_num_threads(threads)

    say("" if finding is None else f"\n{finding}\n")
    say(_clean(story, dtype) if finding is None else _found(story))
    say(_YOURS)
    return finding


def _train(
    model: CharacterModel,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    window: Tensor,
    dtype: torch.dtype,
) -> _Step:
    """One step as any mixed-precision loop has it, then a higher learning rate for the next."""
    rate = float(optimizer.param_groups[0]["lr"])
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        logits = model(window[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), window[:, 1:].flatten())
    optimizer.zero_grad()
    scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
    scaler.step(optimizer)
    scaler.update()
    for group in optimizer.param_groups:
        group["lr"] = rate * GROWTH
    return _Step(rate, loss.item(), model.largest())


def _line(step: int, one: _Step) -> str:
    bits = numerics.headroom_bits(one.largest, "float16") if math.isfinite(one.largest) else None
    left = "none" if bits is None or bits < 0 else f"{bits:.1f} bits"
    return f"{step:6d}  {one.rate:13.4f}  {one.loss:8.3f}  {numerics.fmt(one.largest):>18}  {left:>16}"


def _found(story: list[_Step]) -> str:
    limit = numerics.FORMATS["float16"].max
    warned = next((n for n, one in enumerate(story) if one.largest > limit / 2**_WARNING), len(story))
    best = _best(story)
    return _FOUND.format(
        loss=story[-1].loss if story else math.nan,
        early=len(story) - warned,
        warned=warned,
        bits=_WARNING,
        all_bits=round(math.log2(limit)),
        best=best,
        rate=story[best].rate if story else math.nan,
    )


def _clean(story: list[_Step], dtype: str) -> str:
    peak = max((one.largest for one in story), default=0.0)
    small = numerics.FORMATS["float16"].max
    best = _best(story)
    low, last = (_level(story, best), _level(story, len(story) - 1)) if story else (math.nan, math.nan)
    diverged = last > 2 * low
    return _CLEAN.format(
        steps=len(story),
        peak=numerics.fmt(peak),
        dtype=dtype,
        limit=numerics.fmt(numerics.FORMATS[dtype].max),
        float16=f" (float16: {numerics.fmt(small)})" if dtype != "float16" else "",
        verdict=_DIVERGED.format(low=low, best=best, rate=story[best].rate, last=last) if diverged else "",
    )


def _level(story: list[_Step], at: int) -> float:
    """The loss around a step: the mean of it and the nine before."""
    window = story[max(0, at - 9) : at + 1]
    return sum(one.loss for one in window) / len(window)


def _best(story: list[_Step]) -> int:
    return min(range(len(story)), key=lambda at: _level(story, at), default=0)
