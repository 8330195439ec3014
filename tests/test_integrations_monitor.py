"""The monitor that goes along with a watch, and with the callbacks for both trainers."""

from __future__ import annotations

import copy
import logging
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import nanhunt
from nanhunt import Monitor, UsageError
from nanhunt.monitor.journal import read

from .faulty import Fault

# --- watch(monitor=...) ---------------------------------------------------------------------------------------


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 4) -> None:
    for i in range(steps):
        optimizer.zero_grad()
        model(torch.full((2, 3), float(i))).square().mean().backward()
        optimizer.step()


def _pair() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    return model, torch.optim.SGD(model.parameters(), 0.01)


def test_a_watch_brings_its_monitor_along(tmp_path: Path) -> None:
    """True, a file, or options; it begins and ends with the watch, and counts as the watch does."""
    path = tmp_path / "run.jsonl"
    for asked, recorded in ((True, 4), (path, 4), ({"every": 2, "log": str(tmp_path / "b.jsonl")}, 2)):
        model, optimizer = _pair()
        with nanhunt.watch(model, optimizer, monitor=asked) as hunt:
            _train(model, optimizer)
            assert isinstance(hunt.monitor, Monitor)
        assert len(hunt.monitor.steps) == recorded and hunt.step == 4 and not hunt.monitor.errors
        _train(model, optimizer)
        assert len(hunt.monitor.steps) == recorded
    assert [step.step for step in read(path)] == [0, 1, 2, 3]
    assert [step.step for step in read(tmp_path / "b.jsonl")] == [0, 2]


def test_without_being_asked_for_there_is_none() -> None:
    """And switched off there is one that records nothing."""
    model, optimizer = _pair()
    with nanhunt.watch(model, optimizer) as hunt:
        pass
    assert hunt.monitor is None


def test_switched_off_the_monitor_of_a_watch_records_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """NANHUNT=0: the attribute is there, so that the program's own lines run."""
    monkeypatch.setenv("NANHUNT", "0")
    model, optimizer = _pair()
    with nanhunt.watch(model, optimizer, monitor=True) as hunt:
        _train(model, optimizer)
    assert hunt.monitor is not None and hunt.monitor.steps == ()


@pytest.mark.parametrize(
    ("asked", "says"), [(3, "monitor=3: give True"), ({"evry": 2}, "'evry' is no option of Monitor: use every, sample")]
)
def test_a_bad_monitor_is_refused(asked: Any, says: str) -> None:
    """In words, with the legal options, and no hook stays."""
    before = len(torch.nn.modules.module._global_forward_hooks)
    with pytest.raises(UsageError, match=says):
        nanhunt.watch(nn.Linear(1, 1), monitor=asked)
    with pytest.raises(UsageError, match="every=0"):
        nanhunt.watch(nn.Linear(1, 1), monitor={"every": 0})
    assert len(torch.nn.modules.module._global_forward_hooks) == before


def test_the_fault_that_stops_the_watch_is_in_the_record() -> None:
    """The step that died stands in it, with its loss, under the finding's number."""
    model, optimizer = _pair()
    hunt = nanhunt.watch(model, optimizer, monitor={"on_symptom": "record"})
    with pytest.raises(nanhunt.NonFiniteError) as caught, hunt:
        _train(model, optimizer, 2)
        model(torch.full((2, 3), float("nan"))).square().mean().backward()
    assert hunt.monitor is not None and len(hunt.monitor.steps) == 2 == caught.value.finding.step


# --- transformers --------------------------------------------------------------------------------------------


@pytest.fixture
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def huggingface(one_thread: None) -> Any:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    from . import test_integrations

    test_integrations.hf.logging.set_verbosity(logging.CRITICAL)
    return test_integrations


def test_a_trainer_is_recorded_in_its_own_steps(huggingface: Any, tmp_path: Path) -> None:
    """Clipped norms, learning rates, validation metrics; results as without it, and no hook afterwards."""
    callback = huggingface.NanHuntCallback(monitor=tmp_path / "run.jsonl", watch=False)
    options: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 2, "max_grad_norm": 0.1}
    made = huggingface.trainer(tmp_path / "a", callback, **options)
    made.train()
    alone = huggingface.trainer(tmp_path / "b", **options)
    alone.train()
    assert huggingface.same(huggingface.weights(made.model), huggingface.weights(alone.model))
    monitor = callback.monitor
    assert monitor is not None and not monitor.errors
    assert (
        [step.step for step in monitor.steps] == list(range(6)) == [step.step for step in read(tmp_path / "run.jsonl")]
    )
    logged = [entry for entry in made.state.log_history if "grad_norm" in entry]
    for step, entry in zip(monitor.steps, logged, strict=True):
        assert step.grad_norm == pytest.approx(entry["grad_norm"], rel=1e-4)
        assert step.loss == pytest.approx(entry["loss"], abs=1e-3) and set(step.lr) == {1e-2}
        assert step.clipped_norm == pytest.approx(0.1, rel=1e-3) and step.batch is not None
    assert "eval_loss" in monitor.steps[1].metrics and "eval_runtime" not in monitor.steps[1].metrics
    assert not torch.nn.modules.module._global_forward_pre_hooks and callback.findings == []


def test_accumulation_in_a_trainer_is_one_step(huggingface: Any, tmp_path: Path) -> None:
    """Micro-batches make one record."""
    callback = huggingface.NanHuntCallback(monitor=True, watch=False)
    huggingface.trainer(tmp_path, callback, gradient_accumulation_steps=2).train()
    assert [step.step for step in callback.monitor.steps] == list(range(6))


def test_the_precision_of_a_trainer_is_in_the_record(huggingface: Any, tmp_path: Path) -> None:
    """Its autocast is not to be seen where the model is called."""
    callback = huggingface.NanHuntCallback(monitor=True, watch=False)
    huggingface.trainer(tmp_path, callback, bf16=True).train()
    assert {step.autocast for step in callback.monitor.steps} == {"bfloat16"}


def test_symptoms_go_to_the_log_and_the_history(
    huggingface: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With the trainer's step; beside the watch, which has the finding."""
    callback = huggingface.NanHuntCallback(monitor={"sample": 2}, on_hit="record")
    made = huggingface.trainer(tmp_path, callback, fault=Fault(3, "forward"))
    with caplog.at_level(logging.WARNING, logger="nanhunt"):
        made.train()
    assert callback.finding is not None and callback.finding.step == 3
    assert callback.monitor.symptoms[0].name == "nan_inf" and callback.monitor.symptoms[0].step == 3
    assert any("nan inf at step 3" in record.message for record in caplog.records)
    told = [entry for entry in made.state.log_history if entry.get("symptom") == "nan_inf"]
    assert [entry["step"] for entry in told] == [3]


def test_a_symptom_can_end_the_training_of_a_trainer(huggingface: Any, tmp_path: Path) -> None:
    """`on_symptom="raise"` leaves `trainer.train()`, and no hook stays."""
    callback = huggingface.NanHuntCallback(monitor={"on_symptom": "raise"}, watch=False)
    with pytest.raises(nanhunt.SymptomError, match="step 2"):
        huggingface.trainer(tmp_path, callback, fault=Fault(2, "forward")).train()
    assert not torch.nn.modules.module._global_forward_pre_hooks
    assert callback.monitor.steps[-1].step <= 3


def test_the_monitor_holds_a_bad_update_back_in_a_trainer(huggingface: Any, tmp_path: Path) -> None:
    """One bad step is left out, and the training goes on with good weights."""
    callback = huggingface.NanHuntCallback(monitor={"hold": True, "on_symptom": "record"}, watch=False)
    made = huggingface.trainer(tmp_path, callback, fault=Fault(2, "backward"))
    made.train()
    assert callback.monitor.held == [2]
    assert all(bool(p.isfinite().all()) for p in made.model.parameters())


def test_bad_options_are_refused_when_the_callback_is_made(huggingface: Any) -> None:
    """Before any training."""
    for asked, says in ((3, "monitor=3"), ({"x": 1}, "no option of Monitor"), ({"every": 0}, "every=0")):
        with pytest.raises(UsageError, match=says):
            huggingface.NanHuntCallback(monitor=asked)


def test_copies_of_a_callback_take_the_options_along(huggingface: Any, tmp_path: Path) -> None:
    """And no monitor of the original's."""
    callback = huggingface.NanHuntCallback(monitor={"sample": 7}, watch=False)
    huggingface.trainer(tmp_path, callback).train()
    for twin in (copy.deepcopy(callback), pickle.loads(pickle.dumps(callback))):
        assert twin.monitor is None and callback.monitor is not None
        huggingface.trainer(tmp_path, twin).train()
        assert len(twin.monitor.steps) == 6


# --- Lightning -----------------------------------------------------------------------------------------------


@pytest.fixture(params=["lightning.pytorch", "pytorch_lightning"])
def lightning(request: pytest.FixtureRequest, one_thread: None) -> tuple[Any, Any]:
    pl = pytest.importorskip(request.param)
    from . import test_integrations_lightning

    return pl, test_integrations_lightning


def test_a_lightning_training_is_recorded(lightning: tuple[Any, Any], tmp_path: Path) -> None:
    """Steps, norms before and after clipping, batches, validation metrics, without the sanity check's."""
    pl, there = lightning
    callback = there.NanHuntCallback(monitor={"log": tmp_path / "run.jsonl", "sample": 1}, watch=False)
    _, model = there.fit(pl, tmp_path / "a", callback, gradient_clip_val=0.05)
    _, plain = there.fit(pl, tmp_path / "b", gradient_clip_val=0.05)
    assert there.same(there.weights(model), there.weights(plain))
    monitor = callback.monitor
    assert not monitor.errors and [step.step for step in monitor.steps] == list(range(6))
    for step in monitor.steps:
        assert step.clipped_norm == pytest.approx(0.05, rel=1e-3) and step.grad_norm > 0.05
        assert step.loss is not None and step.lr == (0.01,) and step.batch is not None
        assert step.update_ratio is not None and step.update_ratio > 0
    assert ["val" in step.metrics for step in monitor.steps] == [False, False, True] * 2
    assert not torch.nn.modules.module._global_forward_pre_hooks


def test_a_lightning_symptom_reaches_the_loggers(
    lightning: tuple[Any, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As `nanhunt/nan_inf` with the step, and in the log."""
    pl, there = lightning
    callback = there.NanHuntCallback(monitor=True, watch=False)
    logger = pl.loggers.CSVLogger(tmp_path)
    with caplog.at_level(logging.WARNING, logger="nanhunt"):
        there.fit(pl, tmp_path, callback, fault=Fault(2, "forward"), logger=logger)
    assert any("nan inf at step 2" in record.message for record in caplog.records)
    assert (
        any("nanhunt/nan_inf" in entry for entry in logger.experiment.metrics)
        or "nanhunt/nan_inf" in (Path(logger.log_dir) / "metrics.csv").read_text()
    )


def test_a_bad_lightning_update_is_held_back(lightning: tuple[Any, Any], tmp_path: Path) -> None:
    """Its optimizer steps take a closure; the bad gradients are hidden before they are used."""
    pl, there = lightning
    callback = there.NanHuntCallback(monitor={"hold": True}, watch=False)
    _, model = there.fit(pl, tmp_path, callback, fault=Fault(3, "backward"))
    assert callback.monitor.held == [3]
    assert all(bool(p.isfinite().all()) for p in model.parameters())
