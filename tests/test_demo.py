"""The demo: a real overflow, found and explained, the same every time, and gone in a wider format."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from nanhunt import Finding, cli, demo
from nanhunt.report.files import read_findings

Told = tuple[Finding | None, list[str]]


@pytest.fixture(scope="module")
def told() -> Told:
    """One run of the demo: its finding, and every line it said."""
    said: list[str] = []
    threads = torch.get_num_threads()
    before = torch.random.get_rng_state()
    found = demo.run(say=said.append)
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.random.get_rng_state(), before), "the caller's random numbers are left alone"
    return found, "\n".join(said).splitlines()


def table(lines: list[str]) -> list[tuple[int, float, float, float, str]]:
    """(step, learning rate, loss, largest activation, headroom) of each line of progress."""
    rows = []
    for line in lines:
        if re.match(r" *\d+  +\d\.\d{4}  ", line):
            step, rate, loss, rest = line.split(maxsplit=3)
            largest, headroom = re.split(r"  +", rest)
            rows.append((int(step), float(rate), float(loss), float(largest.replace(" ", "")), headroom))
    return rows


def test_the_demo_ends_in_an_overflow_of_float16_inside_the_model(told: Told) -> None:
    found, _ = told
    assert found is not None
    assert (found.phase, found.kind, found.handled) == ("forward", found.kind, None)
    assert found.kind in ("+inf", "-inf")
    assert found.cause == "overflow"
    assert found.module is not None and re.fullmatch(r"blocks\.\d\.feed_forward(\.\w+)?", found.module)
    assert found.context["autocast"] == "float16"


def test_the_overflow_comes_from_training_and_not_from_a_planted_value(told: Told) -> None:
    found, _ = told
    assert found is not None
    assert found.step is not None and found.step > 20
    given = [row for row in found.tensors if row.role != "output"]
    assert given and all(row.nan == row.pos_inf == row.neg_inf == 0 for row in given)
    limit = torch.finfo(torch.float16).max
    assert all(row.absmax is not None and row.absmax < limit for row in given)


def test_the_headroom_is_seen_shrinking_before_the_stop(told: Told) -> None:
    found, lines = told
    rows = table(lines)
    assert found is not None and found.step is not None
    assert [row[0] for row in rows] == list(range(0, found.step, demo.EVERY))
    largest = [row[3] for row in rows]
    assert largest == sorted(largest) and largest[-1] > 1000 * largest[0]
    for _, _, loss, peak, headroom in rows:
        assert math.isfinite(loss)
        assert headroom == f"{math.log2(65504 / peak):.1f} bits"


def test_it_learns_before_it_breaks(told: Told) -> None:
    losses = [row[2] for row in table(told[1])]
    assert min(losses) < losses[0] - 1


def test_it_prints_the_page_and_then_what_to_do(told: Told) -> None:
    found, lines = told
    text = "\n".join(lines)
    assert str(found) in text
    after = text.partition(str(found))[2]
    for line in (
        "What to do next",
        "    import nanhunt",
        "    with nanhunt.watch(model, optimizer, scaler):",
    ):
        assert line in after.splitlines()
    assert all(len(line) <= 110 for line in lines)


def test_the_numbers_it_explains_are_those_of_its_table(told: Told) -> None:
    _, lines = told
    text = "\n".join(lines)
    warned = int(re.search(r"from step (\d+) on", text)[1])  # type: ignore[index]
    for step, _, _, largest, _ in table(lines):
        assert (largest > 65504 / 16) == (step >= warned)


def test_the_page_shows_the_line_of_the_demo(told: Told) -> None:
    found, _ = told
    assert found is not None
    assert found.line is not None and re.search(r"demo\.py:\d+$", found.line)
    assert found.source == "out: Tensor = self.down(self.act(self.up(x)))"


def test_in_float32_the_same_training_has_no_finding_and_diverges_all_the_same() -> None:
    said: list[str] = []
    assert demo.run(dtype="float32", say=said.append) is None
    text = "\n".join(said)
    assert f"No NaN and no Inf in {demo.STEPS} steps." in text
    peak = float(re.search(r"largest activation was (\S+),", text)[1])  # type: ignore[index]
    assert peak > 65504, "float16 could not have held it"
    assert "the\nlearning rate is at fault" in text
    assert "    import nanhunt" in text.splitlines()


def test_a_sound_stretch_of_the_same_training_has_no_finding() -> None:
    said: list[str] = []
    assert demo.run(steps=30, say=said.append) is None
    assert "No NaN and no Inf in 30 steps." in "\n".join(said)
    assert "at fault" not in "\n".join(said)


def test_the_command_ends_with_0_and_finds_the_same_in_another_process(tmp_path: Path, told: Told) -> None:
    path = tmp_path / "kept" / "finding.json"
    root = str(Path(cli.__file__).parent.parent)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}
    env.pop("NANHUNT", None)
    began = time.perf_counter()
    ended = subprocess.run(
        [sys.executable, "-m", "nanhunt", "demo", "--save", str(path)],
        env=env,
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert time.perf_counter() - began < 60
    [found] = read_findings(path)
    assert str(found) in ended.stdout
    assert table(ended.stdout.splitlines()) == table(told[1])
    assert told[0] is not None
    elsewhere = {**told[0].context, "path": found.context["path"]}  # holds the file that the demo runs from
    assert replace(found, line=None, source=None) == replace(told[0], line=None, source=None, context=elsewhere)
    assert ended.stdout.splitlines()[-1] == f"saved in {path}"
    assert cli.main(["show", str(path)]) == 1
