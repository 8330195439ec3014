"""The graded trainings under a monitor: silent faults by their symptom, loud ones at the step where they begin."""

from __future__ import annotations

import importlib
import pathlib
import sys
import warnings
from typing import Any

import pytest
import torch

import nanhunt

CASES = pathlib.Path(__file__).resolve().parents[1].parent / "shared" / "cases"
FILES = [*sorted((CASES / "silent").glob("*.py")), *sorted((CASES / "training").glob("*.py"))]

pytestmark = pytest.mark.skipif(not FILES, reason="the graded cases (../shared/cases) are not beside this checkout")


def _opened(path: pathlib.Path) -> Any:
    if str(CASES) not in sys.path:
        sys.path.insert(0, str(CASES))
    api = importlib.import_module("caseapi")
    (module,) = api.load_file(path)
    torch.manual_seed(0)
    return api.open_case(module)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_each_training_shows_its_symptom_at_its_step(path: pathlib.Path) -> None:
    run = _opened(path)
    expected = run.meta["expect"] or {"benign": True}
    with (
        warnings.catch_warnings(),
        nanhunt.Monitor(run.model, run.optimizer, on_symptom="record") as monitor,
    ):
        warnings.simplefilter("ignore")
        for i in run:
            run.step(i)
    course = monitor.course()
    assert monitor.errors == []
    if expected["benign"]:
        assert course.symptom == "none"
        return
    # "Vanishing update" is what one file calls gradients that were clipped to nothing.
    wanted = {"vanishing_update": "vanishing_gradient"}.get(expected.get("symptom"), expected.get("symptom"))
    frozen = expected["cause"] == "adam_second_moment_overflow"  # weights that stand still for ever, and no NaN
    assert course.symptom == (wanted or ("vanishing_gradient" if frozen else "nan_inf"))
    assert course.first_bad_step == expected["step"]
