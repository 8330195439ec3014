"""Logs in the shape of real programs, each with one trouble or none: the symptom, and where it began."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import nanhunt

LOGS = Path(__file__).parent / "logs"
EXPECTED = json.loads((LOGS / "expect.json").read_text())


def test_every_log_is_expected_something_of() -> None:
    assert {path.name for path in LOGS.iterdir()} == {*EXPECTED, "expect.json"}


@pytest.mark.parametrize("name", EXPECTED)
def test_the_symptom_of_a_log_is_told_from_where_it_began(name: str) -> None:
    course = nanhunt.read_log(LOGS / name)
    expected = EXPECTED[name]
    assert course.symptom == expected["symptom"], course.to_dict()["symptoms"]
    assert expected["first_bad_step"] is None or course.first_bad_step == expected["first_bad_step"]
