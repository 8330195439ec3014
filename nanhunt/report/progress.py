"""How far a long reading has come: a bar on a terminal, nothing anywhere else."""

from __future__ import annotations

import shutil
import sys
import time
from types import TracebackType
from typing import TextIO

from ..numerics import fmt
from .lines import cells, clean, elide

_WAIT, _EVERY = 0.5, 0.1  # seconds: what is read sooner needs no bar, and a faster bar is no easier to read
_CELLS = 24


class Bar:
    """A bar that is told how many bytes are read; it shows when that takes long, and leaves the line empty.

    with Bar("train.log") as bar:
        bar(1_000_000, 4_000_000)
    """

    __slots__ = ("_began", "_last", "_name", "_shown", "_stream")

    def __init__(self, name: str, stream: TextIO | None = None) -> None:
        stream = sys.stderr if stream is None else stream
        self._stream = stream if stream is not None and getattr(stream, "isatty", bool)() else None
        self._name, self._shown = clean(name), False
        self._began = self._last = time.monotonic()

    def __call__(self, done: int, total: int | None) -> None:
        """So much of it is read; `total` None where nobody knows how much there is."""
        now = time.monotonic()
        if self._stream is None or now - self._began < _WAIT or (self._shown and now - self._last < _EVERY):
            return
        self._last, self._shown = now, True
        self._draw(self._line(done, total, now - self._began))

    def __enter__(self) -> Bar:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._shown:
            self._draw(" " * (_columns()), end="\r")

    def _line(self, done: int, total: int | None, seconds: float) -> str:
        read = f"{fmt(round(done / 1e6, 1))} MB"
        if total:
            part = min(max(done / total, 0.0), 1.0)
            bar = "#" * round(part * _CELLS)
            left = f", {seconds / part - seconds:.0f} s left" if part > 0.01 else ""
            read = f"[{bar:<{_CELLS}}] {100 * part:3.0f}%  {read} of {fmt(round(total / 1e6, 1))} MB{left}"
        name = elide(self._name, max(_columns() - cells(read) - 1, 8))
        return f"{name} {read}"

    def _draw(self, line: str, end: str = "") -> None:
        if self._stream is None:
            return
        try:
            print(f"\r{elide(line, _columns()):<{_columns()}}", end=end, file=self._stream, flush=True)
        except (OSError, ValueError):  # the terminal is gone, or can't show the name: the reading goes on
            self._stream = None


def _columns() -> int:
    # The last column stays free: a terminal may begin a new line after it.
    return max(shutil.get_terminal_size((80, 24)).columns - 1, 20)
