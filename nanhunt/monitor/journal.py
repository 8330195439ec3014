"""The record of a run as a file: one JSON line a step, appended so that a kill leaves at most one torn line."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..errors import UsageError
from ..symptoms.steps import Step, plain

FORMAT = 1
MARK = "nanhunt_steps"  # the key by which a header is known


def of_rank(path: str | os.PathLike[str], rank: int | None) -> Path:
    """The file of one rank of several: `PATH.rank3`. None is a process that trains alone: `PATH` itself."""
    return Path(path) if rank is None else Path(f"{os.fspath(path)}.rank{rank}")


class Journal:
    """Appends steps to a file.

    Each line is handed to the operating system in one write, at once: a killed process (kill -9, out of memory)
    leaves whole lines, and the last one torn at most. Nothing is forced to the disk, so a machine that loses its
    power may lose the last seconds. A file that exists is gone on with, behind a header that says so; when the write
    fails (a disk that is full) the journal ends, and `failure` says why: training goes on.

    Raises:
        UsageError: when the file cannot be opened for writing, with the reason.
    """

    def __init__(self, path: str | os.PathLike[str], header: Mapping[str, Any]) -> None:
        self.path = Path(path)
        self.failure: OSError | None = None
        self._file = -1
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o666)
            resumed, torn = _state(self.path)
        except (OSError, ValueError) as error:
            self.close()
            reason = getattr(error, "strerror", None) or error
            raise UsageError(f"cannot write the steps to {os.fspath(path)!r}: {reason}") from None
        self._torn = torn
        self._line({MARK: FORMAT, **plain(dict(header)), **({"resumed": True} if resumed else {})})

    def write(self, step: Step) -> None:
        """Append one step; nothing at all once the journal has failed or was closed."""
        self._line(step.to_dict())

    def _line(self, data: Mapping[str, Any]) -> None:
        if self._file < 0:
            return
        text = json.dumps(data, allow_nan=False, separators=(",", ":"))
        line = text.encode("utf-8", errors="backslashreplace") + b"\n"
        if self._torn:  # what another process has left half-written ends here
            line, self._torn = b"\n" + line, False
        try:
            while line:  # a short write is what a disk that fills up gives first
                line = line[os.write(self._file, line) :]
        except OSError as error:
            self.failure = error
            self.close()

    def close(self) -> None:
        file, self._file = self._file, -1
        if file >= 0:
            with contextlib.suppress(OSError):
                os.close(file)


def _state(path: Path) -> tuple[bool, bool]:
    """Whether a file holds anything, and whether its last line is torn."""
    if not path.is_file():  # a pipe, /dev/stdout
        return False, False
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        if not size:
            return False, False
        file.seek(-1, os.SEEK_END)
        return True, file.read(1) != b"\n"


def is_journal(line: str) -> bool:
    """True for the first line of such a file."""
    return line.lstrip().startswith("{") and f'"{MARK}"' in line[:200]


def read(path: str | os.PathLike[str]) -> Iterator[Step]:
    """The steps of a journal, in the order of the file; torn lines are left out.

    Raises:
        UsageError: for a file that is none, or of a newer format.
        OSError: when it cannot be read.
    """
    with open(path, encoding="utf-8", errors="replace") as file:
        first = file.readline(1 << 20)
        if not is_journal(first):
            raise UsageError(f"{os.fspath(path)!r} holds no steps that nanhunt wrote: its first line is no header")
        _header(first, path)
        for number, line in enumerate(file, start=2):
            try:
                data = json.loads(line)
            except ValueError:
                continue  # torn
            if isinstance(data, dict) and MARK not in data:
                yield Step.from_dict({**data, "line": number})
            elif isinstance(data, dict):
                _header(line, path)


def _header(line: str, path: str | os.PathLike[str]) -> None:
    try:
        version = json.loads(line)[MARK]
    except (ValueError, KeyError):
        return  # the process died while it wrote its header
    if version != FORMAT:
        raise UsageError(f"{os.fspath(path)!r} was written by another version of nanhunt (format {version!r})")
