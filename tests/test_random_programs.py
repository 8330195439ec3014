"""Random programs: a planted op fault is named where it stands, and nobody is stopped in a healthy one.

A sample by default. `NANHUNT_RANDOM_PROGRAMS=500` takes as many of each kind; `python -m tests.programs 500` does
the same from consecutive seeds and prints the figures.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("hypothesis")

import torch
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

import nanhunt

from . import programs

COUNT = int(os.environ.get("NANHUNT_RANDOM_PROGRAMS", "0"))
PLANTED, HEALTHY = COUNT or 24, COUNT or 8
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
        kept = [programs.attempt(seed, planted=planted, folder=str(tmp_path)) is not None for seed in range(10)]
        assert sum(kept) >= 9


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


# -- slips that programs like these have shown --------------------------------------------------------------------


class BadGrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * 0 / torch.zeros_like(grad)


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.Tanh())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return BadGrad.apply(self.inner(x))


class Again(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.body, self.reentrant = Outer(), reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.body, x, use_reentrant=self.reentrant)


def found_in(model: nn.Module, step: Any) -> Any:
    with nanhunt.watch(model, detail="op", on_hit="record") as hunt:
        step()
    assert hunt.errors == []
    return hunt.finding


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_function_of_the_users_inside_a_checkpoint_belongs_to_who_calls_it(reentrant: bool) -> None:
    """The recomputation runs its forward without grad, yet it makes a node: not one of the child before it."""
    model = nn.Sequential(nn.Linear(4, 4), Again(reentrant), nn.Linear(4, 4))
    found = found_in(model, lambda: model(torch.randn(2, 4)).sum().backward())
    assert (found.phase, found.module, found.op) == ("backward", "1.body", "aten.div.Tensor")


def test_zeros_that_autograd_never_writes_down_are_no_failure() -> None:
    """The derivative of a derivative may be handed a tensor of zeros that has no memory."""
    model, x = nn.Linear(4, 4), torch.randn(2, 4, requires_grad=True)

    def step() -> None:
        out = torch.sqrt(-model(x).abs() - 1)
        torch.autograd.grad(out.sum(), x, create_graph=True)[0].norm().backward()

    found = found_in(model, step)
    assert (found.op, found.cause) == ("aten.sqrt.default", "domain")


class Hooked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.child = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.child(x)
        x.register_hook(lambda grad: grad * 0 / (grad * 0))
        return x.tanh()


def test_a_hook_belongs_to_the_module_whose_forward_it_is_written_in() -> None:
    """It runs in the node of the child that made the tensor, which has nothing to do with it."""
    model = nn.Sequential(Hooked(), nn.Linear(4, 4))
    found = found_in(model, lambda: model(torch.randn(2, 4)).sum().backward())
    assert (found.phase, found.module, found.op) == ("backward", "0", "aten.div.Tensor")
    assert "register_hook" in found.source


class Given(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.register_hook(lambda grad: grad * 0 / (grad * 0))
        return x.tanh()


def test_a_hook_on_what_a_module_was_given_is_its_own_too() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Given(), nn.Linear(4, 4))
    found = found_in(model, lambda: model(torch.randn(2, 4)).sum().backward())
    assert (found.phase, found.module, found.module_type) == ("backward", "1", "Given")


CYCLES = """
import gc, threading
from nanhunt import sites

class Cycle:
    def __init__(self):
        self.me, self.local = self, threading.local()
        self.local.x = 1

gc.set_threshold(1)
for _ in range(300):
    Cycle()
    sites._all_stacks()
"""


def test_looking_at_all_threads_does_not_wait_for_itself() -> None:
    """Up to Python 3.11, a collection inside sys._current_frames that frees a thread-local never ends."""
    subprocess.run([sys.executable, "-c", CYCLES], check=True, timeout=60)
