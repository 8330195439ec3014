"""What a monitor does about an anomaly: the update held back, the batch hunted through, the full watch opened."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nanhunt
from nanhunt import Monitor, UsageError


class Exp(nn.Module):
    """Overflows for large input."""

    def forward(self, x: Tensor) -> Tensor:
        return x.exp()


GOOD, BAD = torch.full((3, 4), 0.1), torch.full((3, 4), 1e4)


def _model(*more: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), Exp(), *more, nn.Linear(4, 2))
    nn.init.constant_(model[0].weight, 0.1)
    return model


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda ps: torch.optim.SGD(ps, 0.01, momentum=0.9, weight_decay=0.1),
    "sgd fused": lambda ps: torch.optim.SGD(ps, 0.01, momentum=0.9, weight_decay=0.1, fused=True),
    "adamw": lambda ps: torch.optim.AdamW(ps, 0.01, weight_decay=0.1),
    "adam fused": lambda ps: torch.optim.Adam(ps, 0.01, fused=True),
    "adam loop": lambda ps: torch.optim.Adam(ps, 0.01, foreach=False, amsgrad=True),
    "rmsprop": lambda ps: torch.optim.RMSprop(ps, 0.01, centered=True, momentum=0.5),
    "adagrad": lambda ps: torch.optim.Adagrad(ps, 0.01, weight_decay=0.1),
    "adadelta": lambda ps: torch.optim.Adadelta(ps),
    "adamax": lambda ps: torch.optim.Adamax(ps),
    "nadam": lambda ps: torch.optim.NAdam(ps),
    "radam": lambda ps: torch.optim.RAdam(ps),
    "rprop": lambda ps: torch.optim.Rprop(ps),
    "asgd": lambda ps: torch.optim.ASGD(ps),
}


def _frozen(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    state = [t.clone() for per in optimizer.state.values() for t in per.values() if isinstance(t, Tensor)]
    return [*(p.detach().clone() for p in model.parameters()), *state]


def _stepper(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[Tensor], Tensor]:
    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[Tensor]) -> None:
    for x in batches:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_an_update_that_is_held_back_leaves_no_trace(make: Callable[[Any], torch.optim.Optimizer]) -> None:
    """Weights and optimizer state are those of a run that never saw the batch; the bad gradients stay to be read."""
    results = []
    for batches in ([GOOD, GOOD, BAD, GOOD], [GOOD, GOOD, GOOD]):
        model = _model()
        optimizer = make(model.parameters())
        with Monitor(model, optimizer, hold=True, on_symptom="record"):
            _train(model, optimizer, batches[:2])
            before = _frozen(model, optimizer)
            if len(batches) == 4:
                _train(model, optimizer, [BAD])
                assert all(map(torch.equal, before, _frozen(model, optimizer)))
                assert all(p.grad is not None for p in model.parameters())
                assert any(not bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None)
            _train(model, optimizer, [GOOD])
        results.append(_frozen(model, optimizer))
    assert all(map(torch.equal, *results))


def test_the_record_tells_that_it_was_held() -> None:
    """Skipped, with a note, counted in `held`, and the weights are still good."""
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    with Monitor(model, optimizer, hold=True, on_symptom="record") as monitor:
        _train(model, optimizer, [GOOD, BAD, GOOD])
    assert monitor.held == [1]
    assert [step.skipped for step in monitor.steps] == [None, True, None]
    held = monitor.steps[1]
    said = monitor.course().remarks
    assert "Held back: the update of step 1; the weights are as the step before left them." in said
    assert held.bad_weights == 0 and "held the update back" in (held.note or "") and held.worst is not None
    assert held.update_ratio is None and held.lost_updates is None


def test_a_bad_loss_with_good_gradients_is_held() -> None:
    """A NaN that is added to the loss reaches no gradient; the step is held all the same."""
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with Monitor(model, optimizer, hold=True, on_symptom="record") as monitor:
        before = _frozen(model, optimizer)
        (model(GOOD).mean() + torch.tensor(math.nan)).backward()
        optimizer.step()
    assert monitor.held == [0] and all(map(torch.equal, before, _frozen(model, optimizer)))


def test_weights_that_are_already_bad_are_not_held() -> None:
    """Nothing is left to be saved: the program goes its way, and the record says so."""
    model = _model()
    with torch.no_grad():
        model[0].bias[0] = math.nan
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with Monitor(model, optimizer, hold=True, on_symptom="record") as monitor:
        _train(model, optimizer, [GOOD])
    assert monitor.held == [] and "already bad" in (monitor.steps[0].note or "")
    assert not any("Held back" in remark for remark in monitor.course().remarks)


def test_a_grad_scaler_needs_no_holding() -> None:
    """Its skipped step is its own: nothing is counted as held, and its scale falls as always."""
    model = _model()
    optimizer, scaler = torch.optim.SGD(model.parameters(), 0.01), torch.amp.GradScaler("cpu", init_scale=4.0)
    with Monitor(model, optimizer, scaler, hold=True, on_symptom="record") as monitor:
        scaler.scale(model(BAD).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert monitor.held == [] and monitor.steps[0].skipped and scaler.get_scale() == 2.0


def test_an_optimizer_step_that_raises_gives_the_gradients_back() -> None:
    """Before the next backward they stand where they stood."""

    class Raising(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:  # type: ignore[override]
            raise KeyError

    model = _model()
    optimizer = Raising(model.parameters(), 0.01)
    monitor = Monitor(model, optimizer, hold=True, on_symptom="record")
    with pytest.raises(KeyError), monitor:
        _train(model, optimizer, [BAD])
    assert all(p.grad is not None for p in model.parameters())


def test_sharded_parameters_are_not_held() -> None:
    """Each rank would decide by its own part."""
    FSDPModule = type("FSDPModule", (nn.Linear,), {})
    with pytest.raises(UsageError, match="each rank would hold back by its own part"):
        Monitor(FSDPModule(2, 2), hold=True)


# --- run: the same batch at op level --------------------------------------------------------------------------


def test_the_held_batch_is_hunted_through() -> None:
    """Module, op and line; and the run goes on as one that skipped the batch, to the bit."""
    results = []
    for batches in ([GOOD, BAD, GOOD], [GOOD, GOOD]):
        model = _model(nn.Dropout(0.4))
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)

        step = _stepper(model, optimizer)
        torch.manual_seed(3)
        with Monitor(model, optimizer, hold=True, hunt=True, on_symptom="record") as monitor:
            for x in batches:
                state = torch.get_rng_state()
                loss = monitor.run(step, x, restore=(schedule,))
                if x is BAD:
                    torch.set_rng_state(state)
        assert isinstance(loss, Tensor) and not monitor.errors
        if len(batches) == 3:
            finding = monitor.finding
            assert finding is not None
            assert (finding.module, finding.op, finding.step, finding.kind) == ("1", "aten.exp.default", 1, "+inf")
            assert (finding.line or "").partition(":")[0].endswith("test_escalation.py")
            assert finding.context["reproduced"] is True
            assert len(monitor.steps) == 3 and monitor.held == [1]
        else:
            assert monitor.finding is None and monitor.held == []
        results.append(_frozen(model, optimizer))
    assert all(map(torch.equal, *results))


def test_random_numbers_go_on_after_a_hunt_as_without_it() -> None:
    """The hunt draws them again from where the step began, and puts them back."""
    drawn = []
    for hunt in (False, True):
        model = _model(nn.Dropout(0.4))
        optimizer = torch.optim.SGD(model.parameters(), 0.01)

        step = _stepper(model, optimizer)
        torch.manual_seed(3)
        with Monitor(model, optimizer, hold=True, hunt=hunt, on_symptom="record") as monitor:
            for x in (GOOD, BAD, GOOD):
                monitor.run(step, x) if hunt else step(x)
        assert (monitor.finding is not None) is hunt
        drawn.append([torch.rand(4), *_frozen(model, optimizer)])
    assert all(map(torch.equal, *drawn))


def test_run_wants_hold_and_hunt() -> None:
    """Without them it could not hunt anything."""
    with Monitor(nn.Linear(1, 1)) as monitor, pytest.raises(UsageError, match="hold=True, hunt=True"):
        monitor.run(print)


def test_what_the_step_raises_goes_through_run() -> None:
    """And leaves the monitor as it was."""

    def step() -> None:
        raise LookupError("mine")

    with Monitor(nn.Linear(1, 1), hold=True, hunt=True) as monitor, pytest.raises(LookupError, match="mine"):
        monitor.run(step)


# --- the full watch for the next steps -------------------------------------------------------------------------


class _Trained:
    """Trains one model, and keeps count of the hooks that stand during each step."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer
        self.hooks: list[int] = []

    def __call__(self, x: Tensor, spoil: bool = False) -> None:
        self.optimizer.zero_grad()
        loss = self.model(x).square().mean()
        self.hooks.append(len(torch.nn.modules.module._global_forward_hooks))
        (loss * math.nan if spoil else loss).backward()
        self.optimizer.step()


def test_the_full_watch_is_opened_for_the_next_steps() -> None:
    """A fault that comes back is found by it, with the monitor's step; it closes, and months before cost nothing."""
    model = _model()
    train = _Trained(model, torch.optim.SGD(model.parameters(), 0.01))
    with Monitor(model, train.optimizer, hold=True, hunt=2, on_symptom="record", sample=1000) as monitor:
        for i in range(14):
            train(BAD if i in (6, 7) else GOOD)
    finding = monitor.finding
    assert finding is not None and (finding.step, finding.module, finding.kind) == (7, "1", "+inf")
    assert "weights" not in finding.context
    assert monitor.held == [6, 7] and not monitor.errors
    assert train.hooks[:4] == [0] * 4 and train.hooks[-1] == 0


@pytest.mark.parametrize("defer", [False, True])
def test_an_anomaly_that_was_not_held_opens_the_watch(defer: bool) -> None:
    """The weights are bad by then: the watch shows where they are met, and it is said that only the past could tell."""
    model = _model()
    train = _Trained(model, torch.optim.SGD(model.parameters(), 0.01))
    with Monitor(model, train.optimizer, hunt=True, on_symptom="record", _defer=defer) as monitor:
        for i in range(12):
            train(GOOD, spoil=i == 4)
    finding = monitor.finding
    assert finding is not None and not monitor.errors
    assert finding.phase == "state" and 5 <= (finding.step or 0) <= 8
    assert "already bad" in finding.context["weights"]
    remarks = monitor.course().remarks
    assert any("only the past could tell" in remark for remark in remarks)
    assert f"Followed up at step {finding.step}: {finding.title()}." in remarks
    assert max(train.hooks[:4]) == 0 and max(train.hooks) > 0 and train.hooks[-1] == 0


def test_a_fault_that_does_not_come_back_is_not_found() -> None:
    """One bad batch, held back: the next steps are watched and healthy, and the watch is gone after them."""
    model = _model()
    train = _Trained(model, torch.optim.SGD(model.parameters(), 0.01))
    with Monitor(model, train.optimizer, hold=True, hunt=True, on_symptom="record") as monitor:
        for i in range(10):
            train(BAD if i == 4 else GOOD)
    assert monitor.finding is None and monitor.held == [4]
    assert train.hooks[-1] == 0


def test_calibration_of_a_loss_scale_is_no_anomaly() -> None:
    """Skipped steps while a scaler finds its scale open no watch and hold nothing."""
    model = _model()
    optimizer, scaler = torch.optim.SGD(model.parameters(), 0.01), torch.amp.GradScaler("cpu", init_scale=2.0**127)
    with Monitor(model, optimizer, scaler, hold=True, hunt=True, on_symptom="record") as monitor:
        for _ in range(20):
            optimizer.zero_grad()
            scaler.scale(model(GOOD).square().mean() * 8).backward()
            assert not torch.nn.modules.module._global_forward_hooks
            scaler.step(optimizer)
            scaler.update()
    assert any(step.skipped for step in monitor.steps)
    assert monitor.held == [] and monitor.findings == ()


def test_a_finding_is_warned_of() -> None:
    """Unless the monitor only records."""
    model = _model()
    train = _Trained(model, torch.optim.SGD(model.parameters(), 0.01))
    monitor = Monitor(model, train.optimizer, hunt=True, on_symptom=lambda symptom: None)
    with pytest.warns(nanhunt.NonFiniteWarning, match="followed the anomaly up"), monitor:
        for i in range(8):
            train(GOOD, spoil=i == 3)
