"""Each graded case as a capsule: hunted here, replayed in a fresh process, the same fault again."""

from __future__ import annotations

import importlib
import json
import os
import pathlib
import subprocess
import sys
import warnings
from typing import Any

import pytest
import torch

import nanhunt

ROOT = pathlib.Path(__file__).resolve().parents[1]
CASES = ROOT.parent / "shared" / "cases"
FILES = sorted(CASES.glob("forward/*.py")) + sorted(CASES.glob("training/*.py"))
SLICES = 8  # fresh processes, each with its share of the capsules: importing torch takes longer than a replay

pytestmark = pytest.mark.skipif(not FILES, reason="the graded cases (../shared/cases) are not beside this checkout")

# Runs in a process of its own: capsule and case file in, what each replay said out.
REPLAYS = """
import contextlib, io, json, sys, warnings
import torch
from nanhunt import cli, factory, load_capsule
torch.set_num_threads(1)
warnings.simplefilter("ignore")
told = {}
for folder, case in json.loads(sys.argv[1]):
    capsule = load_capsule(folder)
    attempts = capsule.replay(factory.model_of(case + ":build"))
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = cli.main(["replay", folder, "--model", case + ":build"])
    sys.modules["nanhunt"] = None  # torch alone from here on
    try:
        with contextlib.redirect_stdout(said):
            exec(compile(open(folder + "/repro.py").read(), folder + "/repro.py", "exec"),
                 {"__name__": "__main__", "__file__": folder + "/repro.py"})
    except SystemExit as end:
        alone = end.code
    finally:
        del sys.modules["nanhunt"]
    told[case] = {
        "code": code, "alone": alone, "said": said.getvalue(),
        "attempts": [
            [a.how, a.same, a.finding and [getattr(a.finding, name) for name in ("phase", "module", "op", "kind")]]
            for a in attempts
        ],
    }
print(json.dumps(told))
"""


def _hunted(path: pathlib.Path, folder: pathlib.Path) -> nanhunt.Finding | None:
    """What hunt finds in a case, with a capsule of it."""
    sys.path.insert(0, str(CASES))
    try:
        caseapi = importlib.import_module("caseapi")
    finally:
        sys.path.remove(str(CASES))
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        case = caseapi.load_file(path)[0]
        run = caseapi.open_case(case)
        for i in run:
            finding = nanhunt.hunt(
                lambda i=i: run.step(i), model=run.model, optimizer=run.optimizer, capsule=folder / path.stem
            )
            if finding is not None and finding.handled is None:
                assert caseapi.expectation(case) is not None
                return finding
    assert caseapi.expectation(case) is None
    return None


@pytest.mark.parametrize("share", range(SLICES))
def test_every_case_replays_in_a_fresh_process(share: int, tmp_path: pathlib.Path) -> None:
    """By its module (phase, module, op, kind), by its op, by repro.py with torch alone; healthy cases write nothing."""
    found: dict[str, nanhunt.Finding] = {}
    for path in FILES[share::SLICES]:
        finding = _hunted(path, tmp_path)
        if finding is None:
            assert not (tmp_path / path.stem).exists()
        else:
            found[str(path)] = finding
    pairs = [[finding.context["capsule"], case] for case, finding in found.items()]
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", REPLAYS, json.dumps(pairs)]
    ran = subprocess.run(command, capture_output=True, text=True, env=env, timeout=300, check=False)
    assert ran.returncode == 0, ran.stderr
    told: dict[str, Any] = json.loads(ran.stdout)
    for case, finding in found.items():
        said = told[case]
        assert said["code"] == 0 and said["alone"] == 0, said
        hows = {how: (same, fields) for how, same, fields in said["attempts"]}
        assert all(same for same, _ in hows.values()), said
        if finding.module is not None and finding.op != "AccumulateGrad":  # which is no call of a module
            assert hows["module"][1] == [finding.phase, finding.module, finding.op, finding.kind]
        else:
            assert hows.keys() & {"op", "batch"}
