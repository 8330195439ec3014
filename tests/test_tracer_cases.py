"""The op level alone on the graded cases beside the repository."""

from __future__ import annotations

import importlib
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from .op_runner import Runner, text_of

nan, inf = math.nan, math.inf
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
CASES = Path(__file__).resolve().parents[2] / "shared" / "cases"

# --- the graded cases ----------------------------------------------------------------------------------------------


def _cases() -> list[Any]:
    files = sorted(p for folder in ("forward", "training") for p in (CASES / folder).glob("*.py"))
    if not files:
        skip = pytest.mark.skip(reason=f"the graded cases are not at {CASES.name} beside the repository")
        return [pytest.param(None, marks=skip)]
    return [pytest.param(p, id=f"{p.parent.name}-{p.stem}") for p in files]


@pytest.mark.parametrize("path", _cases())
def test_graded_case(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Phase, module, op, kind, line and cause are right; healthy programs are left alone."""
    monkeypatch.syspath_prepend(str(CASES))
    caseapi, score = importlib.import_module("caseapi"), importlib.import_module("score")
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    (case,) = caseapi.load_file(path)
    torch.manual_seed(0)
    run = caseapi.open_case(case)
    runner = Runner(run.model, run.optimizer)
    found = None
    for i in run:
        found = runner.run(lambda: run.step(i))  # noqa: B023
        if found:
            break
    assert runner.tracer.failures == []
    expected = caseapi.expectation(case)
    if expected is None:
        assert found is None
        return
    assert found is not None
    grades = score.grade(expected, found)
    assert all(grade is not False for grade in grades.values()), (grades, text_of(found))
    words = score.CAUSES.get(expected.get("cause"))
    assert words is None or found["cause"] in words
