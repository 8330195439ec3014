"""Real trainings: nothing is said of healthy ones, and of each sick one what is wrong, from when on, soon enough."""

from __future__ import annotations

import functools
import importlib.util
import math
from collections.abc import Iterable

import pytest
import torch
from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer

import nanhunt
from nanhunt.symptoms.diagnosis import Diagnosis
from nanhunt.symptoms.steps import SYMPTOMS, Step

from . import healthy_runs, sick_runs  # noqa: F401  each lists its runs
from .run_records import PlainRecorder, Recorder, recording
from .runs import HEALTHY, SICK, Run, begins

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("sklearn") is None, reason="the data of the runs are scikit-learn's"),
    pytest.mark.filterwarnings("ignore:std\\(\\). degrees of freedom"),
]


def _diagnosed(steps: Iterable[Step]) -> Diagnosis:
    diagnosis = Diagnosis()
    for step in steps:
        diagnosis.see(step)
    diagnosis.end()
    return diagnosis


@functools.cache
def _history(name: str, seed: int) -> tuple[Step, ...]:
    return tuple(recording((HEALTHY | SICK)[name].train, seed))


def _judge(run: Run, steps: tuple[Step, ...]) -> None:
    diagnosis = _diagnosed(steps)
    told = [(s.name, s.form, s.step, s.seen, s.cause) for s in diagnosis.symptoms]
    assert told, f"nothing was told of {run.form}"
    first = diagnosis.symptoms[0]
    assert first.name in (run.symptom, *run.also), told
    start, last = begins(run, steps), int(steps[-1].step or 0)
    latest = last if run.within is None else min(last, start + run.within)
    assert first.step is not None and start - run.early <= first.step <= latest, (start, told)
    # What only the whole run shows has no step at which it was seen, or the last one.
    seen = last if first.seen is None else first.seen
    assert seen <= latest, (start, latest, told)
    assert first.cause and first.advice and first.evidence


# --- by the plain record ------------------------------


@pytest.mark.parametrize("seed", [0, 3])
@pytest.mark.parametrize("name", HEALTHY)
def test_of_a_healthy_run_no_symptom_is_told(name: str, seed: int) -> None:
    symptoms = _diagnosed(_history(name, seed)).symptoms
    assert [(s.name, s.form, s.step, s.cause) for s in symptoms] == [], HEALTHY[name].tempts


@pytest.mark.parametrize("seed", [0, 3])
@pytest.mark.parametrize("name", SICK)
def test_a_sick_run_is_told_by_its_symptom_and_its_step_and_soon_enough(name: str, seed: int) -> None:
    _judge(SICK[name], _history(name, seed))


def test_each_symptom_has_at_least_five_runs_and_health_has_two_dozen() -> None:
    by_name = {name: sum(run.symptom == name for run in SICK.values()) for name in SYMPTOMS}
    assert min(by_name.values()) >= 5, by_name
    assert len(HEALTHY) >= 24


def test_a_run_is_not_told_before_its_fault_begins() -> None:
    for name, run in SICK.items():
        if run.start and run.start != "rise":
            steps = _history(name, 0)
            start = begins(run, steps)
            early = [step for step in steps if (step.step or 0) < start - run.early]
            diagnosis = Diagnosis()
            for step in early:
                assert diagnosis.see(step) == [], name


# --- the faults are what they are said to be ------------------------------


@pytest.mark.parametrize("name", ["vanishing_float16_without_scale", "vanishing_at_scale_one"])
def test_the_under_scaled_runs_learn_when_nothing_is_rounded(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rounded = _history(name, 0)
    plain_region = torch.autocast("cpu", enabled=False)
    monkeypatch.setattr("tests.runs.Loop.region", lambda loop: plain_region)
    exact = recording(SICK[name].train, 0)
    assert (exact[-1].loss or 0) < 0.5 * (exact[0].loss or 0)
    assert (rounded[-1].loss or 0) > 0.9 * (rounded[0].loss or 0)


@pytest.mark.parametrize("name", ["stuck_bfloat16_weights", "stuck_bfloat16_adamw"])
def test_the_runs_that_lose_their_updates_fall_in_float32(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lossy = _history(name, 0)
    monkeypatch.setattr(nn.Module, "bfloat16", lambda module: module)
    monkeypatch.setattr(torch, "bfloat16", torch.float32)
    exact = recording(SICK[name].train, 0)

    def fall(steps: Iterable[Step]) -> float:
        losses = [step.loss or 0.0 for step in steps]
        return sum(losses[:50]) / 50 - sum(losses[-50:]) / 50

    assert fall(exact) > 0.02 and fall(exact) > 5 * abs(fall(lossy))
    lost = [step.lost_updates for step in lossy if step.lost_updates is not None]
    assert min(lost) > 0.9


# --- the record itself ------------------------------


class Silent:
    """Notes the losses, and nothing else."""

    def __init__(self, *_: object, **__: object) -> None:
        self.steps: list[Step] = []

    def gradients(self) -> None: ...

    def log(self, *, loss: torch.Tensor | float, **metrics: float) -> None:
        self.steps.append(Step(step=len(self.steps), loss=float(loss)))

    def close(self) -> None: ...


@pytest.mark.parametrize("name", ["digits_conv_cosine", "digits_float16_calibration", "wine_lbfgs"])
def test_the_plain_recorder_changes_no_result_and_leaves_no_hook(name: str) -> None:
    opened: list[Silent] = []

    def silent(*args: object, **kwargs: object) -> Recorder:
        opened.append(Silent())
        return opened[-1]

    before = torch.get_rng_state()
    HEALTHY[name].train(0, silent)
    torch.set_rng_state(before)
    assert [step.loss for step in opened[0].steps] == [step.loss for step in _history(name, 0)]


def test_the_plain_record_of_one_step_is_what_can_be_worked_out_by_hand() -> None:
    model = nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[3.0, 4.0]]))
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.5), GradScaler("cpu", init_scale=8.0)
    recorder = PlainRecorder(model, optimizer, scaler, every=1)
    for value in (1.0, math.inf):
        optimizer.zero_grad()
        loss = model(torch.tensor([[value, 0.0]])).sum()
        scaler.scale(loss).backward()
        recorder.gradients()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        scaler.step(optimizer)
        scaler.update()
        recorder.log(loss=loss.detach(), accuracy=0.5)
    recorder.close()
    good, bad = recorder.steps
    assert (good.loss, good.grad_norm, good.lr, good.loss_scale, good.skipped) == (3.0, 1.0, (0.5,), 8.0, False)
    assert good.clipped_norm == pytest.approx(0.25, rel=1e-5)
    assert good.update_ratio == pytest.approx(0.125 / 5, rel=1e-5)
    assert (good.zero_grads, good.small_grads, good.lost_updates, good.bad_weights) == (0.5, 0.0, 0.0, 0)
    assert (bad.loss, bad.skipped, bad.loss_scale, bad.loss_scale_after) == (math.inf, True, 8.0, 4.0)
    assert bad.grad_norm == math.inf and bad.clipped_norm is None and bad.update_ratio is None
    assert good.metrics == {"accuracy": 0.5} and good.batch != bad.batch
    assert not model._forward_hooks and not model._forward_pre_hooks


# --- by the monitor ------------------------------

MONITORED = (
    "digits_mlp_momentum digits_float16_calibration letters_transformer_bfloat16 wine_lbfgs "
    "digits_accumulation_adagrad digits_bfloat16_state cancer_hinge_zero gan_generator digits_resumed "
    "digits_frozen_backbone explosion_to_nan explosion_under_float16 vanishing_through_dead_units "
    "vanishing_frozen_by_adam vanishing_by_clipping_too_early vanishing_at_scale_one vanishing_in_deep_sigmoids "
    "nan_in_one_batch nan_gradients_at_every_scale stuck_bfloat16_weights stuck_rate_zero stuck_wrong_parameters"
).split()


class Both:
    """The plain recorder and `nanhunt.Monitor` on one run; the monitor is told the loss, the number, the metrics."""

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, scaler: GradScaler | None = None, *, first: int = 0
    ) -> None:
        self.plain = PlainRecorder(model, optimizer, scaler, first=first)
        self.monitor = nanhunt.Monitor(model, optimizer, scaler, sample=10, on_symptom="record")

    def gradients(self) -> None:
        self.plain.gradients()

    def log(self, *, loss: torch.Tensor | float, **metrics: float) -> None:
        self.monitor.log(step=self.plain.number, loss=loss, **metrics)
        self.plain.log(loss=loss, **metrics)

    def close(self) -> None:
        self.plain.close()
        self.monitor.remove()
        assert self.monitor.errors == []

    @property
    def steps(self) -> Iterable[Step]:
        return self.monitor.steps


@functools.cache
def _monitored(name: str) -> tuple[tuple[Step, ...], tuple[Step, ...]]:
    """One run by both: what the plain recorder has of it, and what the monitor has."""
    opened: list[Both] = []

    def both(model: nn.Module, optimizer: Optimizer, scaler: GradScaler | None = None, *, first: int = 0) -> Both:
        for earlier in opened:  # a run that is resumed has ended before
            earlier.close()
        opened.append(Both(model, optimizer, scaler, first=first))
        return opened[-1]

    state = torch.get_rng_state()
    (HEALTHY | SICK)[name].train(0, both)
    torch.set_rng_state(state)
    opened[-1].close()
    plain = tuple(step for recorder in opened for step in recorder.plain.steps)
    return plain, tuple(step for recorder in opened for step in recorder.steps)


def _same(left: float | None, right: float | None, *, rel: float, least: float = 0.0) -> bool:
    if left is None or right is None:
        return left is right
    if not (math.isfinite(left) and math.isfinite(right)):
        return math.isfinite(left) == math.isfinite(right)
    return math.isclose(left, right, rel_tol=rel, abs_tol=least)


@pytest.mark.parametrize("name", MONITORED)
def test_what_the_monitor_records_is_what_plain_code_records(name: str) -> None:
    plain, seen = _monitored(name)
    assert [step.loss for step in plain] == pytest.approx(
        [step.loss for step in _history(name, 0)], rel=0, abs=0, nan_ok=True
    ), "the monitor changes the run"
    assert [step.step for step in seen] == [step.step for step in plain]
    for want, got in zip(plain, seen):
        assert _same(want.loss, got.loss, rel=1e-6), (want, got)
        # The monitor's norms are in float32 and of a loss scale that is a power of two; squares below 1e-38 are lost.
        assert _same(want.grad_norm or None, got.grad_norm or None, rel=1e-4), (want, got)
        assert (want.lr, want.loss_scale, want.loss_scale_after) == (got.lr, got.loss_scale, got.loss_scale_after)
        assert bool(want.skipped) == bool(got.skipped), (want, got)
        assert (want.metrics, want.autocast) == (got.metrics, got.autocast)
        assert got.dtypes in ((), want.dtypes) and got.state_dtypes in ((), want.state_dtypes), (want, got)
        if want.bad() and want.worst is not None and got.worst is not None:
            assert want.worst == got.worst, (want, got)
        if got.clipped_norm is not None and want.clipped_norm is not None:
            assert _same(want.clipped_norm, got.clipped_norm, rel=1e-3), (want, got)


@pytest.mark.parametrize("name", ["digits_mlp_momentum", "letters_transformer_bfloat16", "cancer_hinge_zero"])
def test_batches_that_differ_have_hashes_that_differ_and_equal_ones_the_same(name: str) -> None:
    plain, seen = _monitored(name)
    pairs = {(want.batch, got.batch) for want, got in zip(plain, seen)}
    assert len(pairs) == len({want for want, _ in pairs}) == len({got for _, got in pairs}) > 100


@pytest.mark.parametrize("name", MONITORED)
def test_what_the_monitor_samples_is_near_to_what_all_the_numbers_give(name: str) -> None:
    near = 0
    for want, got in zip(*_monitored(name)):
        if not want.bad() and not got.bad():
            if want.zero_grads is not None and got.zero_grads is not None:
                # A layer without bias is silent only because the one before it is: the monitor leaves it out.
                assert set(got.dead) <= set(want.dead) and bool(got.dead) == bool(want.dead), (want, got)
            for field, least in (
                ("zero_grads", 0.2),
                ("small_grads", 0.2),
                ("lost_updates", 0.2),
                ("frozen", 0.2),
                ("faint", 1e-6),
            ):
                one, other = getattr(want, field), getattr(got, field)
                if one is not None and other is not None:
                    near += 1
                    assert abs(one - other) <= least, (field, want, got)
            if want.update_ratio is not None and got.update_ratio is not None:
                near += 1
                # Where hardly a weight moves, a sample holds few of those that do.
                ratio = (got.update_ratio + 1e-15) / (want.update_ratio + 1e-15)
                assert 1 / 4 < ratio < 4, (want, got)
    assert near >= 5 or name == "stuck_wrong_parameters", "nothing was compared"


# Its program mends gradients between unscale_ and clipping, where the monitor measures them.
@pytest.mark.parametrize("name", [*MONITORED, "fluctuating_scale_churn"])
def test_the_monitor_s_own_record_leads_to_the_same_verdict(name: str) -> None:
    seen = _monitored(name)[1]
    if name in SICK:
        _judge(SICK[name], seen)
    else:
        assert [(s.name, s.form, s.step) for s in _diagnosed(seen).symptoms] == []
