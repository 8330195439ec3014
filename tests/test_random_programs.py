"""Random programs: a planted op fault is named where it stands, and nobody is stopped in a healthy one.

A sample by default. `NANHUNT_RANDOM_PROGRAMS=500` takes as many of each kind; `python -m tests.programs 500` does
the same from consecutive seeds and prints the figures.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest

pytest.importorskip("hypothesis")

from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st

from . import programs

COUNT = int(os.environ.get("NANHUNT_RANDOM_PROGRAMS", "0"))
PLANTED, HEALTHY = COUNT or 40, COUNT or 16
pytestmark = pytest.mark.filterwarnings("ignore")
SEEDS = st.integers(0, 10**6)
STEADY = settings(  # the same programs in each run; a smaller seed is no smaller program
    derandomize=True, database=None, deadline=None, phases=(Phase.explicit, Phase.generate),
    suppress_health_check=list(HealthCheck),
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("programs"))


@settings(STEADY, max_examples=PLANTED)
@given(seed=SEEDS)
def test_a_planted_fault_is_named_by_step_phase_module_op_and_line(folder: str, seed: int) -> None:
    loaded = programs.attempt(seed, planted=True, folder=folder)
    assume(loaded is not None)
    assert loaded is not None
    assert programs.mistakes(loaded) == [], loaded.program.source


@settings(STEADY, max_examples=HEALTHY)
@given(seed=SEEDS)
def test_nobody_is_stopped_in_a_healthy_program(folder: str, seed: int) -> None:
    loaded = programs.attempt(seed, planted=False, folder=folder)
    assume(loaded is not None)
    assert loaded is not None
    assert programs.alarms(loaded) == [], loaded.program.source


# -- proofs that the programs are what they are meant to be, and that the judge can say no -----------------------


def test_every_kind_of_fault_is_drawn() -> None:
    faults = [programs.draw(seed, planted=True).fault for seed in range(1500)]
    assert set(faults) == {*programs.FAULTS, *programs.LOSSES, *programs.UPDATES}


def test_every_healthy_line_and_call_is_drawn() -> None:
    text = "".join(programs.draw(seed, planted=False).source for seed in range(300))
    missing = [line for line in (*programs.HEALTHY, *programs.HEALTHY_LOSSES) if line not in text]
    assert missing == []
    for call in programs.CALLS:
        assert call.split("{c}")[0] in text


def test_a_seed_always_gives_the_same_program() -> None:
    assert programs.draw(7, planted=True) == programs.draw(7, planted=True)
    assert programs.draw(7, planted=True).source != programs.draw(8, planted=True).source


def test_nearly_every_program_is_what_it_is_meant_to_be(tmp_path: Path) -> None:
    """Programs that are thrown away would make the figures look better than they are."""
    for planted in (True, False):
        kept = [programs.attempt(seed, planted=planted, folder=str(tmp_path)) is not None for seed in range(20)]
        assert sum(kept) >= 18


@pytest.mark.parametrize("wrong", ["module", "op", "line", "phase"])
def test_a_wrong_answer_is_seen(tmp_path: Path, wrong: str) -> None:
    """The judge of planted programs takes no answer for another."""
    loaded = next(programs.draws(1, planted=True, folder=str(tmp_path)))
    assert loaded.program.fault is not None
    assert programs.mistakes(loaded) == []
    fault = loaded.program.fault
    if wrong == "module":
        loaded.program.module = "elsewhere"
    elif wrong == "line":
        loaded.program.source = "\n" + loaded.program.source
    else:
        loaded.program.fault = dataclasses.replace(fault, **{wrong: "another"})
    assert [text.split(":")[0] for text in programs.mistakes(loaded)] == [wrong]


def test_a_fault_in_a_program_that_is_called_healthy_is_an_alarm(tmp_path: Path) -> None:
    """The judge of healthy programs does hear an alarm."""
    loaded = next(programs.draws(1, planted=True, folder=str(tmp_path)))
    assert [text.split(":")[0] for text in programs.alarms(loaded)] == ["module", "auto", "op"]
