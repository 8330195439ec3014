"""How settings go together: closures, windows at op level, stopping at the birth, what is allowed, spoilt gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import nanhunt
from nanhunt import outline

LEVELS = ("module", "auto", "op")


class _Exp(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.exp()


class _Root(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x * 0.0).sqrt()


def _model(middle: type[nn.Module] = _Exp) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), middle(), nn.Linear(4, 2))


GOOD, BAD = torch.full((3, 4), 0.1), torch.full((3, 4), 1e4)


# --- closures -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("detail", LEVELS)
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.LBFGS])
def test_gradients_that_a_closure_is_about_to_clear_are_not_of_this_step(kind: Any, detail: str) -> None:
    model = _model()
    optimizer = kind(model.parameters(), lr=1e-3)
    for p in model.parameters():
        p.grad = torch.full_like(p, torch.nan)  # of a batch whose step was skipped

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(GOOD).square().mean()
        loss.backward()
        return loss

    with nanhunt.watch(model, optimizer, detail=detail) as hunt:
        optimizer.step(closure)
    assert hunt.findings == [] and hunt.step == 1


@pytest.mark.parametrize("detail", LEVELS)
def test_a_fault_inside_a_closure_is_found(detail: str) -> None:
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(BAD).square().mean()
        loss.backward()
        return loss

    with nanhunt.watch(model, optimizer, detail=detail, on_hit="record") as hunt:
        optimizer.step(closure)
    assert hunt.finding is not None and hunt.finding.module == "1"


# --- windows at op level ----------------------------------------------------------------------------------


def _modes() -> int:
    return int(torch._C._len_torch_dispatch_stack())


def test_op_level_traces_the_steps_that_are_wanted_and_no_others() -> None:
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    seen = []
    with nanhunt.watch(model, optimizer, detail="op", steps=(2, 4)):
        for _ in range(6):
            seen.append(_modes())
            model(GOOD).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert seen == [0, 0, 1, 1, 0, 0] and _modes() == 0


@pytest.mark.parametrize(("first", "end"), [(0, 2), (1, 4)])
def test_op_level_explains_a_fault_inside_its_window(first: int, end: int) -> None:
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with nanhunt.watch(model, optimizer, detail="op", steps=(first, end), on_hit="record") as hunt:
        for step in range(4):
            model(BAD if step == 1 else GOOD).square().mean().backward()
            optimizer.zero_grad()
            optimizer.step()
    found = hunt.finding
    assert found is not None and (found.step, found.module, found.op) == (1, "1", "aten.exp.default")


def test_a_fault_outside_the_window_of_op_level_is_bad_state_inside() -> None:
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with nanhunt.watch(model, optimizer, detail="op", every=3, on_hit="record") as hunt:
        for step in range(5):
            model(BAD if step == 1 else GOOD).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    found = hunt.finding
    assert found is not None and (found.phase, found.step) == ("state", 3)


class _Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_a_mode_of_the_program_that_is_open_between_steps_is_not_taken_off_in_the_place_of_ours() -> None:
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with nanhunt.watch(model, optimizer, detail="op", every=2):
        for _ in range(4):
            model(GOOD).square().mean().backward()
            with _Mode():
                optimizer.step()
            optimizer.zero_grad()
    assert _modes() == 0


# --- stop="first" -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("middle", "phase", "op"), [(_Exp, "forward", "exp"), (_Root, "backward", "sqrt")])
def test_at_op_level_the_birth_at_which_it_stops_is_explained(middle: Any, phase: str, op: str) -> None:
    model = _model(middle)
    with nanhunt.watch(model, detail="op", stop="first", on_hit="record") as hunt:
        model(BAD if phase == "forward" else GOOD).square().mean().backward()
    found = hunt.finding
    assert found is not None
    assert (found.phase, found.module, found.op) == (phase, "1", f"aten.{op}.default")


# --- allow --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("detail", LEVELS)
@pytest.mark.parametrize("stop", ["confirmed", "first"])
def test_what_comes_of_an_allowed_value_is_no_fault_either(detail: str, stop: str) -> None:
    model = _model()
    with nanhunt.watch(model, detail=detail, stop=stop, allow=("1",), on_hit="record") as hunt:
        for _ in range(2):
            model(BAD).square().mean().backward()
            model.zero_grad()
    assert hunt.finding is None


@pytest.mark.parametrize("detail", LEVELS)
def test_another_modules_own_fault_counts_beside_an_allowed_one(detail: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), _Exp(), nn.Linear(4, 4), _Exp())
    with nanhunt.watch(model, detail=detail, allow=("1",), on_hit="record") as hunt, torch.no_grad():
        model[3](BAD)
    assert hunt.finding is not None and hunt.finding.module == "3"


# --- between backward and the update --------------------------------------------------------------------------


def test_a_gradient_that_is_spoilt_after_backward_is_not_laid_to_the_optimizer() -> None:
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with nanhunt.watch(model, optimizer, on_hit="record") as hunt:
        for step in range(2):
            model(GOOD).square().mean().backward()
            if step == 1:
                for p in model.parameters():
                    p.grad /= 0.0  # as clipping by a norm of zero does
            optimizer.step()
            optimizer.zero_grad()
    found = hunt.finding
    assert found is not None and (found.phase, found.step, found.cause) == ("optimizer", 1, "unknown")
    assert found.title().startswith("a gradient went bad between backward and the update")
    assert "its gradient held" in str(found.why) and "clipping" in found.advice[0]


def test_where_modules_were_left_out_the_reason_says_so() -> None:
    model = _model()
    with nanhunt.watch(model, skip=("1",), on_hit="record", detail="module") as hunt:
        model(BAD).square().mean().backward()
    assert hunt.finding is not None
    assert "Modules were left out by only= or skip=" in str(hunt.finding.why)


def test_a_finding_tells_which_modules_the_value_came_through() -> None:
    """Below op level too: the model on the page is lit from the culprit to where it was noticed."""
    model = nn.Sequential(_model(), nn.Sequential(nn.Linear(2, 2)))
    with nanhunt.watch(model, on_hit="record", detail="module") as hunt:
        model(BAD)
    assert hunt.finding is not None and hunt.finding.module == "0.1"
    assert hunt.finding.context["reached"] == ("", "0", "0.2", "1", "1.0")
    parts = outline.lit(nanhunt.Finding.from_json(hunt.finding.to_json()))
    assert parts == {"": "noticed", "0": "way", "0.1": "made", "0.2": "way", "1": "way", "1.0": "way"}
