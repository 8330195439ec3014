"""What one line of a log says of a step, before it is known which step that is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .names import Meaning, meaning
from .spellings import number


class Entry:
    """What one line, row or object says. What it does not say stays as the class has it.

    A plain class: millions are made, and filling twenty slots that stay empty would be half of the work.

    Attributes:
        step, epoch, epochs, batch, batches, base: the place in the run; `batch` of `batches` lies in its epoch, and the
            first epoch has the number `base` where the format says that.
        validation: it speaks of a validation set: `loss` and `scores` are metrics, and its batches are not the run's.
        summary: means over an epoch or a run, which repeat what other lines have said.
        skips: number of skipped iterations since the last line; `skips_so_far` counts them from the beginning.
        nans: number of iterations since the last line whose loss was not finite.
        silent: the format leaves out a loss that is not above zero, and so it did.
        event: a message, not a record.
    """

    line: int | None = None
    rank: float | None = None
    step: float | None = None
    epoch: float | None = None
    epochs: float | None = None
    batch: float | None = None
    batches: float | None = None
    base: int | None = None
    validation = False
    summary = False
    loss: float | None = None
    grad_norm: float | None = None
    clipped_norm: float | None = None
    loss_scale: float | None = None
    loss_scale_after: float | None = None
    skips: float | None = None
    skips_so_far: float | None = None
    nans: float | None = None
    silent = False
    event = False
    note: str | None = None
    losses: Mapping[str, float] = {}  # never changed in place, only replaced
    metrics: Mapping[str, float] = {}
    scores: Mapping[str, float] = {}
    lr: tuple[float, ...] = ()

    def trains(self) -> bool:
        """It says something about a training step."""
        return self.loss is not None or self.grad_norm is not None or bool(self.losses)

    def speaks(self) -> bool:
        """It says enough to be a record of a step."""
        if self.trains() or self.metrics or self.silent:
            return True
        if self.scores and (self.validation or self.step is not None or self.epoch is not None):
            return True
        placed = self.step is not None or self.batch is not None
        return placed and (self.loss_scale is not None or self.skips is not None or bool(self.lr))

    def places(self) -> bool:
        """It says where in the run we are, and nothing else."""
        return self.step is not None or self.epoch is not None


class Fields:
    """Which values of a line, a row or an object go where: decided once for all that look the same.

    Args:
        meanings: what each value means, in order, None for those of no use.
        validation: the line speaks of a validation set.
    """

    def __init__(self, meanings: list[Meaning | None], *, validation: bool = False, summary: bool = False) -> None:
        best: dict[str, int] = {}
        for found in meanings:
            if found and found.order < best.get(found.kind, 99):
                best[found.kind] = found.order
        self.validation = validation
        self.summary = summary or (best.get("loss", 0) >= 10 and "step" not in best and "batch" not in best)
        self.scalars: list[tuple[str, int]] = []
        self.lr: list[int] = []
        self.losses: list[tuple[str, int]] = []
        self.metrics: list[tuple[str, int]] = []
        self.scores: list[tuple[str, int]] = []
        taken: set[str] = set()
        named: set[str] = set()  # of two values by one name the first counts: the second is a mean of it
        for at, found in enumerate(meanings):
            if found is None or found.kind == "ignored":
                continue
            kind = found.kind
            if found.name in named:
                continue
            if found.name:
                named.add(found.name)
            if kind == "lr":
                self.lr.append(at)
            elif kind in ("losses", "metric", "score"):
                {"losses": self.losses, "metric": self.metrics, "score": self.scores}[kind].append((found.name, at))
            elif kind not in taken and found.order == best[kind]:
                taken.add(kind)
                self.scalars.append((kind, at))
            elif kind == "loss" and found.order < 10:
                self.losses.append((found.name, at))  # lm loss beside the total one, train_loss beside a mean of it
        has_loss = "loss" in taken or bool(self.losses)
        if has_loss and not validation:
            self.scores = []
        self.rich = bool(self.scalars or self.lr or self.losses or self.metrics or self.scores)

    def entry(self, values: list[float | None]) -> Entry:
        """The entry made from one line's values, None where one is missing."""
        made = Entry()
        for kind, at in self.scalars:
            value = values[at]
            if value is not None:
                setattr(made, kind, value)
        if self.losses:
            made.losses = {name: value for name, at in self.losses if (value := values[at]) is not None}
        if self.lr:
            made.lr = tuple(value for at in self.lr if (value := values[at]) is not None)
        if self.metrics:
            made.metrics = {name: value for name, at in self.metrics if (value := values[at]) is not None}
        if self.scores:
            made.scores = {name: value for name, at in self.scores if (value := values[at]) is not None}
        if self.validation:
            made.validation = True
        if self.summary:
            made.summary = True
        return made


def flat(data: Mapping[str, Any], *, prefix: str = "", depth: int = 0) -> dict[str, float | None]:
    """The numbers of a nested object, by the path to each one ("train/loss"); at most 2,000 of them, 6 levels deep."""
    found: dict[str, float | None] = {}
    for key, value in data.items():
        path = f"{prefix}{key}"
        if isinstance(value, bool):
            found[path] = float(value)
        elif isinstance(value, int | float):
            try:
                found[path] = float(value)
            except OverflowError:  # an integer of hundreds of digits
                continue
        elif isinstance(value, str):
            if len(value) < 80 and (spelled := number(value)) is not None:
                found[path] = spelled
        elif isinstance(value, Mapping) and depth < 6:
            found.update(flat(value, prefix=f"{path}/", depth=depth + 1))
        elif isinstance(value, list) and 0 < len(value) <= 8 and all(isinstance(v, int | float) for v in value):
            for at, item in enumerate(value):
                found[f"{path}/{at}"] = float(item)
        if len(found) > 2000:
            break
    return found


def meanings_of(keys: list[str]) -> list[Meaning | None]:
    """What each key of an object means; an unknown path is tried by its last two parts and its last one."""
    return [_path(key) for key in keys]


def _path(key: str) -> Meaning | None:
    found = meaning(key)
    parts = key.split("/")
    for keep in (2, 1):
        if found is None and len(parts) > keep:
            tail = meaning("/".join(parts[-keep:]))
            # Of a path only the plain quantities are taken by their last word: "hparams/loss" is rare, "a/b/loss" not.
            if tail is not None and tail.kind in ("step", "epoch", "loss", "lr", "loss_scale", "grad_norm"):
                found = tail
    return found
