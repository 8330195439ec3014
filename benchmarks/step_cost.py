"""What watching a training step costs: watched over unwatched, in interleaved runs of one process.

    python benchmarks/step_cost.py [--model large|tiny|both] [--rounds N] [--seconds S]

CPU time on one thread, medians with quartiles. The row `plain` is the same program against itself: its distance
from 1 is the noise of the machine. `looks` is how many tensors a step has looked at.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor, nn

import nanhunt


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm2, self.up, self.act, self.down = (
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.GELU(),
            nn.Linear(4 * width, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (t.view(batch, length, 4, -1).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        fed: Tensor = self.down(self.act(self.up(self.norm2(x))))
        return x + fed


class GPT(nn.Module):
    def __init__(self, layers: int, width: int, length: int, vocabulary: int = 1000) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(vocabulary, width), nn.Parameter(torch.zeros(length, width))
        self.blocks = nn.Sequential(*(Block(width) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(self.blocks(self.embed(tokens) + self.place)))
        return logits


MODELS = {"large": (6, 256, 8, 128), "tiny": (12, 64, 2, 16)}  # layers, width, batch, length


class Step:
    """One model, its optimizer, one batch."""

    def __init__(self, layers: int, width: int, batch: int, length: int) -> None:
        torch.manual_seed(0)
        self.model = GPT(layers, width, length)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-4)
        self.tokens, self.labels = torch.randint(0, 1000, (2, batch, length)).unbind()

    def __call__(self) -> None:
        loss = nn.functional.cross_entropy(self.model(self.tokens).flatten(0, 1), self.labels.flatten())
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()

    def hunted(self) -> None:
        nanhunt.hunt(self, model=self.model, optimizer=self.optimizer)


def timed(run: Callable[[], None], times: int) -> float:
    begin = time.process_time()
    for _ in range(times):
        run()
    return (time.process_time() - begin) / times


def ways(step: Step) -> dict[str, tuple[Callable[[], AbstractContextManager[Any]], Callable[[], None]]]:
    def watched(detail: str) -> Callable[[], AbstractContextManager[Any]]:
        return lambda: nanhunt.watch(step.model, step.optimizer, detail=detail)

    return {
        "plain": (nullcontext, step),
        "module": (watched("module"), step),
        "auto": (watched("auto"), step),
        "op": (watched("op"), step),
        "hunt": (nullcontext, step.hunted),
        "anomaly mode": (lambda: torch.autograd.set_detect_anomaly(True), step),
    }


def measure(name: str, rounds: int, seconds: float) -> list[list[object]]:
    step = Step(*MODELS[name])
    for _ in range(3):
        step()
    once = timed(step, 3)
    ratios: dict[str, list[float]] = {way: [] for way in ways(step)}
    looks: dict[str, object] = {}
    for _ in range(rounds):
        for way, (around, run) in ways(step).items():
            times = max(1, round(seconds / once / (8 if way == "op" else 1)))
            before = timed(step, times)
            with around() as hunt:
                during = timed(run, times)
                looks[way] = round(hunt.seen / times) if isinstance(hunt, nanhunt.Watch) else ""
            ratios[way].append(2 * during / (before + timed(step, times)))
    rows: list[list[object]] = []
    for way, found in ratios.items():
        low, middle, high = statistics.quantiles(found, n=4) if len(found) > 1 else found * 3
        rows.append([name, way, f"{middle:.2f}", f"{low:.2f} .. {high:.2f}", looks[way], f"{once * 1e3:.0f} ms"])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=[*MODELS, "both"], default="both")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=0.5, help="about how long one measurement takes")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    names = list(MODELS) if asked.model == "both" else [asked.model]
    rows = [row for name in names for row in measure(name, asked.rounds, asked.seconds)]
    print(tabulate(rows, headers=["model", "way", "over plain", "quartiles", "looks", "plain step"]))


if __name__ == "__main__":
    main()
