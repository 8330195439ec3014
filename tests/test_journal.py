"""The record as a file: whole lines whatever happens, gone on with, read back as it was."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nanhunt.errors import UsageError
from nanhunt.monitor import journal
from nanhunt.monitor.journal import Journal, of_rank, read
from nanhunt.symptoms.steps import Step


def _steps(*numbers: int) -> list[Step]:
    return [Step(step=n, loss=float(n), lr=(0.1, 0.2), metrics={"acc": 0.5}) for n in numbers]


def _write(path: Path, steps: list[Step]) -> Journal:
    made = Journal(path, {"model": "Net"})
    for step in steps:
        made.write(step)
    return made


def _same(read_back: Step, written: Step) -> bool:
    return {**read_back.to_dict(), "line": None} == {**written.to_dict(), "line": None}


def test_steps_come_back_as_they_were_written(tmp_path: Path) -> None:
    """Every field, NaN and infinities too; each with the line that it stands on."""
    steps = [*_steps(0, 1), Step(step=2, loss=float("nan"), grad_norm=float("inf"), skipped=True, note="ein Täxt\n2")]
    _write(tmp_path / "run.jsonl", steps).close()
    back = list(read(tmp_path / "run.jsonl"))
    assert [step.line for step in back] == [2, 3, 4]
    assert all(map(_same, back, steps))
    lines = (tmp_path / "run.jsonl").read_text().splitlines()
    assert json.loads(lines[0])["nanhunt_steps"] == 1 and json.loads(lines[0])["model"] == "Net"
    assert json.loads(lines[3])["loss"] == "nan"


def test_each_step_is_there_at_once(tmp_path: Path) -> None:
    """Nothing waits in a buffer: another process sees the line as soon as it is written."""
    running = _write(tmp_path / "run.jsonl", _steps(0))
    assert len((tmp_path / "run.jsonl").read_text().splitlines()) == 2
    running.close()


def test_a_killed_process_leaves_whole_lines(tmp_path: Path) -> None:
    """kill -9 in the middle of writing: every line but the last is a step, and the reader takes them all."""
    path = tmp_path / "run.jsonl"
    code = (
        "import sys\nfrom nanhunt.monitor.journal import Journal\nfrom nanhunt.symptoms.steps import Step\n"
        f"made = Journal({str(path)!r}, {{}})\n"
        "for n in range(10**9):\n    made.write(Step(step=n, loss=0.5, note='x' * 300))\n"
    )
    child = subprocess.Popen([sys.executable, "-c", code], env={**os.environ})
    end = time.monotonic() + 60
    while (not path.exists() or path.stat().st_size < 200_000) and time.monotonic() < end:
        time.sleep(0.01)
    child.send_signal(signal.SIGKILL)
    child.wait()
    lines = path.read_bytes().split(b"\n")
    assert all(json.loads(line) for line in lines[:-1])
    back = list(read(path))
    assert [step.step for step in back] == list(range(len(back))) and len(back) > 100


def test_a_torn_line_ends_where_the_next_run_begins(tmp_path: Path) -> None:
    """Resuming writes a new header, marked as such, on a line of its own; the torn line is left out."""
    path = tmp_path / "run.jsonl"
    _write(path, _steps(0, 1)).close()
    with open(path, "a") as file:
        file.write('{"step":2,"lo')
    _write(path, _steps(2, 3)).close()
    assert [step.step for step in read(path)] == [0, 1, 2, 3]
    marks = [line for line in path.read_text().splitlines() if '"resumed":true' in line]
    assert len(marks) == 1 and json.loads(marks[0])["nanhunt_steps"] == 1


def test_a_full_disk_ends_the_journal_and_not_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A short write and then an error: the failure is kept, later steps are dropped, what stands there can be read."""
    path = tmp_path / "run.jsonl"
    made = _write(path, _steps(0, 1))
    real, calls = os.write, []

    def full(file: int, data: bytes) -> int:
        calls.append(len(data))
        if len(calls) == 1:
            return real(file, data[:10])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(journal.os, "write", full)
    for step in _steps(2, 3, 4):
        made.write(step)
    monkeypatch.undo()
    assert len(calls) == 2 and made.failure is not None and made.failure.errno == errno.ENOSPC
    assert [step.step for step in read(path)] == [0, 1]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_device_that_is_full_is_no_error_of_the_program() -> None:
    """The very header does not fit: the journal says so in `failure`."""
    made = Journal("/dev/full", {})
    assert made.failure is not None
    made.write(Step(step=0))
    made.close()


def test_ranks_write_files_of_their_own() -> None:
    """PATH.rank3 beside PATH; a process that trains alone writes PATH."""
    assert of_rank("runs/a.jsonl", 3) == Path("runs/a.jsonl.rank3")
    assert of_rank("runs/a.jsonl", None) == Path("runs/a.jsonl")


def test_a_path_that_cannot_be_written_is_refused_at_once(tmp_path: Path) -> None:
    """A folder, a file in the way of a folder: the reason is told."""
    (tmp_path / "file").write_text("")
    for wrong in (tmp_path, tmp_path / "file" / "run.jsonl", "a\0b"):
        with pytest.raises(UsageError, match="cannot write the steps"):
            Journal(wrong, {})


def test_folders_are_made(tmp_path: Path) -> None:
    """A new folder in the path is no reason to fail."""
    _write(tmp_path / "a" / "b" / "run.jsonl", _steps(0)).close()
    assert len(list(read(tmp_path / "a" / "b" / "run.jsonl"))) == 1


@pytest.mark.parametrize("text", ["", "hello\n", '{"loss": 2}\n', '{"nanhunt_steps":99}\n{"step":0}\n'])
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    """No header, or one of another format."""
    (tmp_path / "x.jsonl").write_text(text)
    with pytest.raises(UsageError, match=r"x\.jsonl"):
        list(read(tmp_path / "x.jsonl"))


def test_writing_after_the_end_is_nothing(tmp_path: Path) -> None:
    """Closing twice and writing after it do no harm."""
    made = _write(tmp_path / "run.jsonl", _steps(0))
    made.close()
    made.close()
    made.write(Step(step=1))
    assert len(list(read(tmp_path / "run.jsonl"))) == 1
