"""Where the GPU script runs: the device, the time left, two clocks, and its two programs."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .models import GPT, Program, ResNet
from .pairs import Step


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run of this script: where, how large, and until when."""

    device: torch.device
    quick: bool
    end: float  # of time.monotonic()

    @property
    def left(self) -> float:
        return self.end - time.monotonic()

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def options(self) -> dict[str, Any]:
        """On a CPU the ranges are kept in slots as well, so that a rehearsal takes the accelerator's way."""
        return {} if self.cuda else {"_defer": True}

    def wait(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def wall(self, step: Step, times: int) -> float:
        """Seconds of the clock for one step, the device's work included."""
        self.wait()
        begin = time.perf_counter()
        for _ in range(times):
            step()
        self.wait()
        return (time.perf_counter() - begin) / times

    def events(self, step: Step, times: int) -> float:
        """Seconds between two events in the device's own queue, for one step; the clock where there are none."""
        if not self.cuda:
            return self.wall(step, times)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        self.wait()
        begin.record()
        for _ in range(times):
            step()
        end.record()
        self.wait()
        return float(begin.elapsed_time(end)) / 1e3 / times


# --- programs -------------------------------------------------------------------------------------


class Mixed(Program):
    """A training step under autocast; float16 with a loss scale."""

    def __init__(self, name: str, model: nn.Module, x: Tensor, labels: Tensor, dtype: torch.dtype, run: Run) -> None:
        key = "input_ids" if isinstance(model, GPT) else "pixel_values"
        super().__init__(name, model, {key: x}, labels, "blocks.0.*")
        self.dtype, self.device_type = dtype, run.device.type
        self.scaler = torch.amp.GradScaler(self.device_type, enabled=dtype is torch.float16)

    def train(self) -> None:
        assert self.optimizer is not None
        with torch.autocast(self.device_type, self.dtype):
            loss = self.loss()
        self.optimizer.zero_grad()
        self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.last = loss.detach()


def gpt2(run: Run) -> Mixed:
    """GPT-2's 124 million parameters, bfloat16 autocast, batch 8 x 1024."""
    torch.manual_seed(0)
    layers, width, heads, length, vocabulary, batch = (
        (2, 32, 2, 16, 100, 2) if run.quick else (12, 768, 12, 1024, 50257, 8)
    )
    model = GPT(layers, width, length, heads=heads, vocabulary=vocabulary)
    model.head = nn.Linear(width, vocabulary, bias=False)
    model.head.weight = model.embed.weight
    nn.init.normal_(model.embed.weight, std=0.02)
    model.to(run.device)
    x = torch.randint(vocabulary, (batch, length), device=run.device)
    return Mixed("gpt2", model, x, torch.randint_like(x, vocabulary), torch.bfloat16, run)


def resnet(run: Run) -> Mixed:
    """ResNet-50, float16 autocast with a loss scale, channels_last, batch 64 x 3 x 224 x 224."""
    torch.manual_seed(0)
    model = ResNet((1, 1), width=8, wide=4, classes=10) if run.quick else ResNet((3, 4, 6, 3), wide=4)
    model.to(run.device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    size, batch = (32, 2) if run.quick else (224, 64)
    x = torch.randn(batch, 3, size, size, device=run.device).to(memory_format=torch.channels_last)
    labels = torch.randint(10, (batch,), device=run.device)
    return Mixed("resnet", model, x, labels, torch.float16 if run.cuda else torch.bfloat16, run)


PROGRAMS: dict[str, Callable[[Run], Mixed]] = {"gpt2": gpt2, "resnet": resnet}
