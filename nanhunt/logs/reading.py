"""Log files into courses: one file, a folder, or the logs of several ranks of one run."""

from __future__ import annotations

import dataclasses
import heapq
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence

from ..errors import UsageError
from ..symptoms.course import Course
from ..symptoms.diagnosis import Diagnosis
from ..symptoms.steps import Step
from .boards import is_board
from .reader import Reader
from .source import Progress

_IN_NAME = re.compile(r"(?:rank|worker|gpu|proc|stdout|stderr|node)[-_.]?(\d+)", re.I)
_KEPT = 5
# What a folder may hold that is read for it, the best first.
_IN_FOLDER = ("metrics.csv", "trainer_state.json", "results.csv", "progress.csv", "log_history.json", "metrics.jsonl")


def read_log(path: str | os.PathLike[str], *, progress: Progress | None = None) -> Course:
    """Reads a training log and says what its run suffers from.

    Read are lines of names and numbers as people and programs print them, CSV and the like, JSON (lines or a document),
    transformers, fairseq, DeepSpeed, Megatron, detectron2, mmdet, Keras and others, messages of loss scalers, several
    of them mixed, and TensorBoard event files; plain or packed by gzip, bzip2 or xz; of any size, in bounded memory.

    Args:
        path: the file; "-" is standard input; a folder may be one of TensorBoard or Lightning.
        progress: is called with the bytes done and the bytes there are (None where unknown), about ten times a second.

    Returns:
        The course of the run: its symptoms, the first bad step, what was understood of the file.

    Raises:
        UsageError: when there is no such file, or it is of a kind that cannot be read.
    """
    name = os.fspath(path)
    return _course([Reader(name, _files(name), progress=progress)])


def read_ranks(paths: Sequence[str | os.PathLike[str]], *, progress: Progress | None = None) -> Course:
    """Reads several logs as those of the ranks of one run, merged by step number.

    Args:
        paths: one for each rank; a number in the name (`rank3.log`, `stderr_3`) is that of the rank, else the order is.
        progress: as for `read_log`, over all files together.

    Raises:
        UsageError: when one of them cannot be read, or there is none.
    """
    if not paths:
        raise UsageError("no log is given: read_ranks takes at least one file")
    names = [os.fspath(path) for path in paths]
    told = [found[-1] if (found := _IN_NAME.findall(os.path.basename(name))) else None for name in names]
    numbers = [int(t) for t in told if t is not None and len(t) < 7]
    ranks = numbers if len(set(numbers)) == len(names) else list(range(len(names)))
    together = _Together(len(names), progress)
    readers = [
        Reader(name, _files(name), rank=rank, progress=together.of(at))
        for at, (name, rank) in enumerate(zip(names, ranks))
    ]
    return _course(readers)


class _Together:
    """The progress of several files as one."""

    def __init__(self, files: int, progress: Progress | None) -> None:
        self._progress = progress
        self._done = [0] * files
        self._total: list[int | None] = [None] * files

    def of(self, at: int) -> Progress | None:
        """What the file of this number tells its progress to."""
        if self._progress is None:
            return None

        def tell(done: int, total: int | None) -> None:
            self._done[at], self._total[at] = done, total
            known = [size for size in self._total if size is not None]
            assert self._progress is not None
            self._progress(sum(self._done), sum(known) if len(known) == len(self._total) else None)

        return tell


def _files(path: str) -> list[str]:
    """The file, or those of a folder that are read for it."""
    if path == "-" or not os.path.isdir(path):
        return [path]
    inside = sorted(os.path.join(folder, name) for folder, _, names in os.walk(path) for name in names)
    boards = [name for name in inside if is_board(name, b"")]
    for wanted in _IN_FOLDER:
        if found := [name for name in inside if os.path.basename(name) == wanted]:
            if len(found) == 1 or wanted == "trainer_state.json":
                # Of several checkpoints the newest has the whole history.
                return [max(found, key=os.path.getmtime)]
            raise UsageError(
                f"{path} is a folder with {len(found)} files {wanted}: give one of them, such as {found[-1]}"
            )
    folders = {os.path.dirname(name) for name in boards}
    if len(folders) == 1:
        return boards
    if boards:
        raise UsageError(
            f"{path} is a folder with TensorBoard event files of {len(folders)} runs: give the folder of one of them, "
            f"such as {sorted(folders)[-1]}"
        )
    raise UsageError(f"{path} is a folder that holds no log by a known name: give the log file in it")


def _course(readers: list[Reader]) -> Course:
    diagnosis = Diagnosis()
    for step in _merged(readers):
        diagnosis.see(step)
    diagnosis.end()
    formats: Counter[str] = sum((reader.formats for reader in readers), Counter())
    readers[0].formats, own = formats, readers[0].formats
    name = readers[0].format()
    readers[0].formats = own
    several = len(readers) > 1
    course = diagnosis.course(
        source=", ".join(reader.name for reader in readers),
        format=name,
        lines=sum(reader.lines for reader in readers),
        understood=sum(reader.understood for reader in readers),
        unknown=tuple(line for reader in readers for line in reader.unknown)[:_KEPT],
        ranks=len(readers) if several else readers[0].ranks,
    )
    remarks = [f"{reader.name}: {said}" if several else said for reader in readers for said in reader.remarks()]
    return dataclasses.replace(course, remarks=(*course.remarks, *dict.fromkeys(remarks))) if remarks else course


def _merged(readers: list[Reader]) -> Iterator[Step]:
    """The steps of all readers, by their numbers; a message stays behind the step it follows."""
    if len(readers) == 1:
        return readers[0].steps()
    keyed = [_keyed(reader, at) for at, reader in enumerate(readers)]
    return (step for _, step in heapq.merge(*keyed, key=lambda pair: pair[0]))


def _keyed(reader: Reader, at: int) -> Iterator[tuple[tuple[int, int, int], Step]]:
    laps, last = 0, 0
    for step in reader.steps():
        if step.step is not None:
            if step.step < last:  # the run began anew
                laps += 1
            last = step.step
        yield (laps, last, at), step
