"""TensorBoard event files, read by the tensorboard package where it is installed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from ..errors import UsageError
from .entry import Entry, Fields
from .names import Meaning, meaning


def is_board(path: str, start: bytes) -> bool:
    """It is an event file, by its name or by the first record that every such file has."""
    return "tfevents" in os.path.basename(path) or b"brain.Event:" in start[:80]


class Board:
    """One event file, as entries.

    Args:
        path: the event file.

    Raises:
        UsageError: when the tensorboard package is missing.
    """

    def __init__(self, path: str) -> None:
        try:
            from tensorboard.backend.event_processing.event_file_loader import EventFileLoader  # type: ignore[import-untyped]
            from tensorboard.util import tensor_util  # type: ignore[import-untyped]
        except ImportError as error:
            raise UsageError(
                f"{path} is a TensorBoard event file, and reading it needs the tensorboard package ({error}): "
                "pip install tensorboard"
            ) from None
        self._array = tensor_util.make_ndarray
        self._loader = EventFileLoader(path)
        self._meanings: dict[str, Meaning | None] = {}
        self.records = 0
        self.scalars = 0
        self.broken: str | None = None

    def entries(self) -> Iterator[Entry]:
        """What each scalar says, in the order of the file: one for each step and tag."""
        events = iter(self._loader.Load())
        while True:
            try:
                event = next(events, None)
            except Exception as error:  # whatever a broken record makes the loader raise, what came before stays
                self.broken = f"{type(error).__name__}: {error}"
                return
            if event is None:
                return
            self.records += 1
            if not event.HasField("summary"):
                continue
            for value in event.summary.value:
                number = self._number(value)
                if number is None:
                    continue
                self.scalars += 1
                what = self._meaning(value.tag)
                if what is None or what.kind in ("ignored", "step", "batch"):
                    continue
                entry = Fields([what]).entry([number])
                if what.kind == "epoch" and not entry.speaks():
                    continue
                entry.step = float(event.step)
                yield entry

    def _meaning(self, tag: str) -> Meaning | None:
        if tag not in self._meanings:
            if len(self._meanings) > 50000:
                self._meanings.clear()
            self._meanings[tag] = meaning(tag) or meaning(tag.rpartition("/")[2])
        return self._meanings[tag]

    def _number(self, value: Any) -> float | None:
        if value.HasField("simple_value"):
            return float(value.simple_value)
        if not value.HasField("tensor"):
            return None
        try:
            array = self._array(value.tensor)
            return float(array) if array.ndim == 0 and array.dtype.kind in "fiu" else None
        except Exception:  # a tensor that is no scalar: an image, a text, a broken one
            return None
