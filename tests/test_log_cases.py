"""The graded logs: the symptom of each, and its first bad step within the log's own spacing."""

from __future__ import annotations

import json
import pathlib

import pytest

import nanhunt
from nanhunt.logs.reading import read_log

LOGS = pathlib.Path(nanhunt.__file__).parents[2] / "shared" / "cases" / "logs"
CASES = sorted(path.stem for path in LOGS.glob("*.log"))

pytestmark = pytest.mark.skipif(not CASES, reason="the graded logs (../shared/cases/logs) are not here")


@pytest.mark.parametrize("name", CASES)
def test_the_symptom_and_its_first_step_are_found(name: str) -> None:
    want = json.loads((LOGS / f"{name}.expect.json").read_text())
    course = read_log(LOGS / f"{name}.log")
    assert course.symptom == want["symptom"]
    if want["first_bad_step"] is None:
        assert course.first_bad_step is None and course.first_bad_line == want["first_bad_line"]
    else:
        assert course.first_bad_step is not None
        # A log tells every so many steps only: what is bad first lies between two of its records.
        assert abs(course.first_bad_step - want["first_bad_step"]) < max(course.spacing or 1.0, 1.0)


@pytest.mark.parametrize("name", CASES)
def test_every_line_that_holds_a_loss_was_understood(name: str) -> None:
    course = read_log(LOGS / f"{name}.log")
    assert not [line for line in course.unknown if "loss" in line] and course.format != "unknown"
