"""What training runs are made of: their list, the data, and one optimizer step in the usual order."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn import functional as F
from torch.optim import Optimizer

from nanhunt.symptoms.steps import Step

from .run_records import Opener

SPLIT = 1400  # rows of the digits to train on; the other 397 are for validation


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One training, and what a diagnosis of its record has to say.

    Attributes:
        name: of the function.
        train: takes a seed and an `Opener`.
        tempts: what is peculiar about it; of a healthy run, which false alarm it invites.
        symptom: the right one of `nanhunt.symptoms.steps.SYMPTOMS`, or "none".
        also: other names that are not wrong either.
        form: what is wrong, finer than the symptom.
        start: the step in which the fault was planted; "bad": the first one with a NaN or Inf in it; "rise": the last
            one at which the loss, smoothed, was near its minimum before it came to three times that.
        within: at the latest so many steps after it is told; None: at the end of the run.
        early: it may be dated back by so many steps, where the beginning has no sharp edge.
    """

    name: str
    train: Callable[[int, Opener], None]
    tempts: str
    symptom: str = "none"
    also: tuple[str, ...] = ()
    form: str = ""
    start: int | str = 0
    within: int | None = None
    early: int = 1


def begins(run: Run, steps: Sequence[Step]) -> int:
    """The number of the step in which the fault of `run` begins, told from the whole of its record."""
    if isinstance(run.start, int):
        return run.start
    if run.start == "bad":
        return next(int(step.step or 0) for step in steps if step.bad())
    losses = [step.loss if step.loss is not None else math.inf for step in steps]
    smooth = [statistics.median(losses[max(0, i - 4) : i + 5]) for i in range(len(losses))]
    least = math.inf
    for i, value in enumerate(smooth):
        least = min(least, value)
        if not value < 3 * least:
            return max(k for k in range(i) if smooth[k] <= 1.2 * least)
    raise AssertionError("the loss does not rise")


HEALTHY: dict[str, Run] = {}
SICK: dict[str, Run] = {}


def healthy(tempts: str) -> Callable[[Callable[[int, Opener], None]], Callable[[int, Opener], None]]:
    """Lists a run in which nothing is wrong."""

    def listed(train: Callable[[int, Opener], None]) -> Callable[[int, Opener], None]:
        HEALTHY[train.__name__] = Run(name=train.__name__, train=train, tempts=tempts)
        return train

    return listed


def sick(
    symptom: str, form: str, tempts: str, **told: Any
) -> Callable[[Callable[[int, Opener], None]], Callable[[int, Opener], None]]:
    """Lists a run with a fault; `told` are the other fields of `Run`."""

    def listed(train: Callable[[int, Opener], None]) -> Callable[[int, Opener], None]:
        SICK[train.__name__] = Run(name=train.__name__, train=train, tempts=tempts, symptom=symptom, form=form, **told)
        return train

    return listed


# --- data that are there without a network ------------------------------


def _table(name: str, *, targets: torch.dtype) -> tuple[Tensor, Tensor]:
    from sklearn import datasets

    x, y = getattr(datasets, f"load_{name}")(return_X_y=True)
    return torch.from_numpy(x).float(), torch.from_numpy(y).to(targets)


@functools.cache
def digits() -> tuple[Tensor, Tensor]:
    """1797 images of digits, [1797, 64] in 0..1, and which digit it is."""
    x, y = _table("digits", targets=torch.long)
    mixed = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    return x[mixed] / 16, y[mixed]


def _mixed_table(name: str, targets: torch.dtype) -> tuple[Tensor, Tensor]:
    x, y = _table(name, targets=targets)
    mixed = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    return ((x - x.mean(0)) / x.std(0))[mixed], y[mixed]


@functools.cache
def cancer() -> tuple[Tensor, Tensor]:
    """569 rows of 30 columns, standardised, and 0 or 1."""
    return _mixed_table("breast_cancer", torch.long)


@functools.cache
def wine() -> tuple[Tensor, Tensor]:
    """178 rows of 13 columns, standardised, and one of 3 sorts."""
    return _mixed_table("wine", torch.long)


@functools.cache
def diabetes() -> tuple[Tensor, Tensor]:
    """442 rows of 10 columns, standardised, and how the illness went on, 25 to 346."""
    return _mixed_table("diabetes", torch.float32)


@functools.cache
def text() -> Tensor:
    """Python's own language reference as numbers below 64, one for each character."""
    from pydoc_data import topics

    raw = "".join(topics.topics.values())[:400_000].lower()
    kept = "\n abcdefghijklmnopqrstuvwxyz0123456789.,:;()[]{}'\"`*_-=+/<>|#@!"[:63]
    table = {c: i + 1 for i, c in enumerate(kept)}
    return torch.tensor([table.get(c, 0) for c in raw])


def letters(batch: int, length: int) -> tuple[Tensor, Tensor]:
    """Stretches of `text` and the character that follows each: both [batch, length]."""
    at = torch.randint(len(text()) - length - 1, (batch, 1)) + torch.arange(length + 1)
    rows = text()[at]
    return rows[:, :-1], rows[:, 1:]


@functools.cache
def photo() -> Tensor:
    """Two photos, grey, in -1..1: [2, 427, 640]."""
    from sklearn import datasets

    images = torch.stack([torch.tensor(image) for image in datasets.load_sample_images().images])
    return images.float().mean(-1) / 127.5 - 1


def draws(x: Tensor, *others: Tensor, batch: int) -> Iterator[tuple[Tensor, ...]]:
    """Batches without end, each row once an epoch, in an order that torch's seed decides."""
    while True:
        order = torch.randperm(len(x))
        for rows in order[: len(x) // batch * batch].view(-1, batch):
            yield tuple(t[rows] for t in (x, *others))


def digit_batches(batch: int = 32, dtype: torch.dtype = torch.float32) -> Iterator[tuple[Tensor, ...]]:
    """Batches of the digits to train on."""
    x, y = digits()
    return draws(x[:SPLIT].to(dtype), y[:SPLIT], batch=batch)


def mlp(*widths: int, act: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    """Linear layers of these widths with `act` between them."""
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(widths):
        layers += [nn.Linear(a, b), act()]
    return nn.Sequential(*layers[:-1])


def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """Share of rows that the model, in eval mode, gets right; it is handed back in the mode it was in."""
    mode = model.training
    model.eval()
    with torch.no_grad():
        right = (model(x).argmax(-1) == y).float().mean()
    model.train(mode)
    return float(right)


# --- one step ------------------------------


class Loop:
    """Optimizer steps in the order everybody writes: backward, unscale, clip, step, schedule.

    Args:
        autocast: dtype of the forward's autocast region; None: no region.
        clip: largest 2-norm of the gradients.
        schedule: has a `step()`, called after each step that was not skipped.
        metrics: asked for validation metrics after each `every`-th step.
        micro: number of micro-batches whose gradients are summed up.
    """

    def __init__(
        self,
        opener: Opener,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        scaler: GradScaler | None = None,
        autocast: torch.dtype | None = None,
        clip: float | None = None,
        schedule: Any = None,
        metrics: Callable[[], dict[str, float]] | None = None,
        every: int = 10,
        micro: int = 1,
        first: int = 0,
    ) -> None:
        self.recorder = opener(model, optimizer, scaler, first=first)
        self.model, self.optimizer, self.scaler = model, optimizer, scaler or GradScaler("cpu", enabled=False)
        self.autocast, self.clip, self.schedule, self.micro = autocast, clip, schedule, micro
        self.metrics, self.every, self.number = metrics, every, first

    def region(self) -> contextlib.AbstractContextManager[Any]:
        """The autocast region, or none."""
        return torch.autocast("cpu", dtype=self.autocast) if self.autocast else contextlib.nullcontext()

    def step(self, loss_of: Callable[[], Tensor]) -> float:
        """One step on what `loss_of` gives; the loss is handed back as a number."""
        self.optimizer.zero_grad()
        total = 0.0
        for _ in range(self.micro):
            with self.region():
                loss = loss_of() / self.micro
            self.scaler.scale(loss).backward()
            total += float(loss.detach())
        self.recorder.gradients()
        if self.clip is not None:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.scaler.step(self.optimizer)
        before = self.scaler.get_scale()
        self.scaler.update()
        if self.schedule is not None and self.scaler.get_scale() >= before:
            self.schedule.step()
        self.over(total)
        return total

    def over(self, loss: float) -> None:
        """Logs the step, with the metrics when it is their turn."""
        self.number += 1
        due = self.metrics is not None and self.number % self.every == 0
        self.recorder.log(loss=loss, **(self.metrics() if due and self.metrics else {}))

    def classify(self, batches: Iterator[tuple[Tensor, ...]], steps: int) -> None:
        """So many steps of classification with cross-entropy."""
        for _ in range(steps):

            def loss_of() -> Tensor:
                x, y = next(batches)
                return F.cross_entropy(self.model(x).float(), y)

            self.step(loss_of)
