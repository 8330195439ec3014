"""The graded cases beside the repository: real bugs rebuilt from public reports, each with its right answer.

They live in ../shared/cases, which a user's clone does not have: then these tests skip, and the project's
own (test_watch, test_plant, test_real_inputs) stand alone.
"""

from __future__ import annotations

import importlib
import pathlib
import sys
import warnings
from typing import Any

import pytest
import torch

import nanhunt
from nanhunt import cli

CASES = pathlib.Path(__file__).resolve().parents[1].parent / "shared" / "cases"
FILES = sorted(CASES.glob("forward/*.py")) + sorted(CASES.glob("training/*.py"))

# At a module's boundary an infinity that turned into NaN inside is a NaN already: the op level sees it.
KIND_ONLY_INSIDE = {
    "05_opt_mask_plus_negative_score",
    "29_focal_loss_log_of_zero",
    "31_atanh_at_the_border",
    "07_acos_clamp",
    "11_wgan_gp_double_backward",
    "23_amp_eps_rounds_away",
}

pytestmark = pytest.mark.skipif(not FILES, reason="the graded cases (../shared/cases) are not beside this checkout")


def _grader() -> tuple[Any, Any]:
    sys.path.insert(0, str(CASES))
    try:
        return importlib.import_module("caseapi"), importlib.import_module("score")
    finally:
        sys.path.remove(str(CASES))


def _locate(run: Any, **options: Any) -> nanhunt.Finding | None:
    watch = nanhunt.watch(run.model, optimizer=run.optimizer, **options)
    try:
        with watch:
            for i in run:
                run.step(i)
    except nanhunt.NonFiniteError:
        pass
    except Exception:
        if watch.finding is None:
            raise
    assert watch.errors == []
    return watch.finding


def _case(path: pathlib.Path) -> tuple[Any, Any, Any, Any]:
    caseapi, score = _grader()
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mod = caseapi.load_file(path)[0]
        return caseapi, score, caseapi.expectation(mod), caseapi.open_case(mod)


@pytest.mark.parametrize("defer", [False, True], ids=["at_once", "deferred"])
@pytest.mark.parametrize("path", FILES, ids=lambda p: f"{p.parent.name}/{p.stem}")
def test_module_level(path: pathlib.Path, defer: bool) -> None:
    """Phase and module are right, and the kind as far as a module's boundary shows it; healthy programs run on.

    Deferred is the accelerators' way: ranges wait in slots and are read once a phase.
    """
    _, score, expect, run = _case(path)
    finding = _locate(run, detail="module", _defer=defer)
    if expect is None:
        assert finding is None, finding
        return
    assert finding is not None
    fields = score.grade(expect, finding.to_dict())
    assert fields["phase"] is not False, finding.title()
    assert fields["module"] is not False, finding.title()
    if path.stem not in KIND_ONLY_INSIDE:
        assert fields["kind"] is not False, finding.title()


@pytest.mark.parametrize("path", FILES, ids=lambda p: f"{p.parent.name}/{p.stem}")
def test_every_finding_can_be_shown(path: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """As a page for a terminal, as one for a browser, as JSON and back, through the command line."""
    _, _, expect, run = _case(path)
    finding = _locate(run, on_hit="record", detail="auto")
    if expect is None:
        assert finding is None
        return
    assert finding is not None
    file = tmp_path / "finding.json"
    file.write_text(finding.to_json())
    assert cli.main(["show", str(file)]) == 1
    assert cli.main(["show", "--json", str(file)]) == 1
    assert cli.main(["show", "--html", str(file)]) == 1
    page = (tmp_path / "finding.html").read_text()
    assert "<svg" in page and len(page) < 500_000
    assert nanhunt.Finding.from_json(file.read_text()) == finding
    assert all(isinstance(value, float) for value in finding.scalars().values())
