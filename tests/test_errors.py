"""What is raised says what to do, carries the finding, and survives being sent around."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor

import pytest

from nanhunt.errors import NanhuntError, NonFiniteError, UsageError, enabled
from nanhunt.finding import Finding

FOUND = Finding(phase="forward", step=3, module="fc", module_type="Linear", kind="nan", why="Because.")


def fail():
    raise NonFiniteError(FOUND)


def test_the_stop_is_a_floating_point_error_with_the_page_as_text():
    error = NonFiniteError(FOUND)
    assert isinstance(error, FloatingPointError)
    assert error.finding is FOUND
    assert str(error).splitlines()[0] == FOUND.title() == "fc (Linear) made the first nan, in forward, step 3"
    assert "Because." in str(error)
    assert "\x1b" not in str(error)


@pytest.mark.parametrize("carry", [lambda e: pickle.loads(pickle.dumps(e)), copy.copy, copy.deepcopy])
def test_the_stop_can_be_copied(carry):
    error = carry(NonFiniteError(FOUND))
    assert error.finding == FOUND
    assert str(error) == str(FOUND)


def test_the_stop_comes_back_from_a_worker_process():
    with ProcessPoolExecutor(1) as pool, pytest.raises(NonFiniteError) as caught:
        pool.submit(fail).result()
    assert caught.value.finding == FOUND


def test_the_stop_is_never_made_of_text():
    # torch's DataLoader rebuilds an error as type(error)(text) and takes RuntimeError(text) when that fails.
    with pytest.raises(TypeError, match=r"takes a nanhunt\.Finding, got str"):
        NonFiniteError("text")  # type: ignore[arg-type]


def test_misuse_is_a_value_error_too():
    assert issubclass(UsageError, NanhuntError)
    assert issubclass(UsageError, ValueError)
    assert not issubclass(NonFiniteError, NanhuntError)


@pytest.mark.parametrize(("value", "expected"), [(None, True), ("1", True), ("0", False)])
def test_the_switch(monkeypatch, value, expected):
    monkeypatch.delenv("NANHUNT", raising=False)
    if value is not None:
        monkeypatch.setenv("NANHUNT", value)
    assert enabled() is expected


@pytest.mark.parametrize("value", ["", "2", "yes", "off", " 1"])
def test_any_other_value_of_the_switch_is_an_error_that_names_the_legal_ones(monkeypatch, value):
    monkeypatch.setenv("NANHUNT", value)
    with pytest.raises(UsageError) as caught:
        enabled()
    assert str(caught.value) == (
        f"NANHUNT={value!r} is not a legal value: use NANHUNT=1 (on, the default) or NANHUNT=0 (off)"
    )


def _loads_torch(code):
    code += "\nimport sys; sys.exit('torch' in sys.modules)"
    return subprocess.run([sys.executable, "-c", code], check=False).returncode == 1


def test_records_and_pages_work_without_torch():
    assert not _loads_torch(
        "from nanhunt import errors, numerics, finding\nfrom nanhunt.report import files, text\n"
        "f = finding.Finding(phase='forward'); text.page(f); f.from_json(f.to_json())"
    )


def test_the_check_for_torch_can_fail():
    assert _loads_torch("import torch")
