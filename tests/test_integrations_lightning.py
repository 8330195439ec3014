"""The callback for Lightning with the real Trainer, under both package names."""

from __future__ import annotations

import copy
import importlib
import logging
import pickle
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import nanhunt

from .faulty import Fault, standing

PACKAGES = ("lightning.pytorch", "pytorch_lightning")
pytest.importorskip("lightning")

from nanhunt.integrations.lightning import NanHuntCallback  # noqa: E402

EACH_PHASE = pytest.mark.parametrize("phase", ["forward", "backward"])


@pytest.fixture(params=PACKAGES)
def pl(request: pytest.FixtureRequest) -> Any:
    """One of the two packages."""
    pytest.importorskip(request.param.partition(".")[0])
    package = importlib.import_module(request.param)
    for name in (*PACKAGES, "lightning.fabric", "lightning_fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    return package


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Sums have one order, and the library is not to advise on workers and loggers."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", nanhunt.NonFiniteWarning)
        yield
    torch.set_num_threads(threads)


def data() -> Any:
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(12, 4, generator=generator), torch.randint(3, (12,), generator=generator)
    return DataLoader(TensorDataset(*rows), batch_size=2)


def module(pl: Any, fault: Fault | None = None) -> Any:
    """A LightningModule of two layers with dropout; what stands between them may fail."""

    class Lit(pl.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.encoder = nn.Sequential(nn.Linear(4, 8), fault or Fault(None, "forward"), nn.Dropout(0.1))
            self.head = nn.Linear(8, 3)

        def loss(self, batch: Any) -> Tensor:
            return F.cross_entropy(self.head(self.encoder(batch[0])), batch[1])

        def training_step(self, batch: Any, i: int) -> Tensor:
            return self.loss(batch)

        def validation_step(self, batch: Any, i: int) -> None:
            self.log("val", self.loss(batch))

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), 0.01)

    return Lit()


def trainer(
    pl: Any, folder: Path, *callbacks: Any, model: Any = None, fault: Fault | None = None, **options: Any
) -> Any:
    """A Trainer for 6 steps, 3 an epoch, each epoch with a validation."""
    settings = {
        "max_steps": 6,
        "limit_train_batches": 3,
        "default_root_dir": folder,
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_progress_bar": False,
        "enable_checkpointing": False,
        "enable_model_summary": False,
    }
    made = pl.Trainer(callbacks=list(callbacks), **{**settings, **options})
    if fault is not None:
        fault.attached(model, lambda: made.global_step)
    return made


def fit(pl: Any, folder: Path, *callbacks: Any, fault: Fault | None = None, model: Any = None, **options: Any) -> Any:
    """The trainer and the module after a training."""
    model = module(pl, fault) if model is None else model
    ckpt = options.pop("ckpt_path", None)
    made = trainer(pl, folder, *callbacks, model=model, fault=fault, **options)
    torch.manual_seed(2)
    made.fit(model, data(), data(), ckpt_path=ckpt)
    return made, model


def weights(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(map(torch.equal, one, other))


# --- what is found, and what becomes of it ------------------------------------------------------------


@EACH_PHASE
def test_raise_leaves_fit_with_the_trainers_step(pl: Any, phase: str, tmp_path: Path) -> None:
    """The module bears its name in the LightningModule; the weights are those of the last good step; no hook stays."""
    _, plain = fit(pl, tmp_path, max_steps=4)
    callback, fault = NanHuntCallback(), Fault(4, phase)
    model = module(pl, fault)
    with pytest.raises(nanhunt.NonFiniteError) as stop:
        fit(pl, tmp_path, callback, fault=fault, model=model)
    finding = stop.value.finding
    assert (finding.step, finding.phase, finding.module, finding.module_type) == (4, phase, "encoder.1", "Fault")
    assert callback.finding == finding and callback.findings == [finding]
    assert same(weights(model), weights(plain)) and standing(model) == 0


@EACH_PHASE
def test_stop_ends_the_training_as_if_it_were_done(
    pl: Any, phase: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """The page is printed once, the title is logged; the bad step does not reach the weights."""
    _, plain = fit(pl, tmp_path, max_steps=4)
    capsys.readouterr()
    callback = NanHuntCallback(on_hit="stop", report=tmp_path / "reports")
    with caplog.at_level(logging.ERROR, logger="nanhunt"):
        made, model = fit(pl, tmp_path, callback, fault=Fault(4, phase))
    assert made.global_step == 5 and made.should_stop
    finding = callback.finding
    assert finding is not None and (finding.step, finding.phase, finding.module) == (4, phase, "encoder.1")
    assert same(weights(model), weights(plain)) and standing(model) == 0
    assert capsys.readouterr().err.count(str(finding)) == 1
    said, *_ = [record.getMessage() for record in caplog.records if record.name == "nanhunt"]
    assert said == f"{finding.title()} (see {tmp_path / 'reports' / 'step4.html'})"
    assert nanhunt.Finding.from_json((tmp_path / "reports" / "step4.json").read_text()) == finding


@EACH_PHASE
def test_warn_record_and_a_callable_go_on(pl: Any, phase: str, tmp_path: Path) -> None:
    given: list[nanhunt.Finding] = []
    for on_hit in ("warn", "record", given.append):
        callback = NanHuntCallback(on_hit=on_hit)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", nanhunt.NonFiniteWarning)
            made, model = fit(pl, tmp_path, callback, fault=Fault(4, phase))
        assert made.global_step == 6 and standing(model) == 0
        first = callback.findings[0]
        assert first is callback.finding and (first.step, first.phase, first.module) == (4, phase, "encoder.1")
        assert [str(w.message) for w in caught].count(str(first)) == (on_hit == "warn")
    assert given == callback.findings


# --- what is watched ----------------------------------------------------------------------------------


def test_a_healthy_training_is_unchanged(pl: Any, tmp_path: Path) -> None:
    """With bfloat16, accumulation, clipping and validation the weights are the same bit for bit."""
    options = {
        "precision": "bf16-mixed",
        "accumulate_grad_batches": 2,
        "gradient_clip_val": 0.1,
        "num_sanity_val_steps": 1,
    }
    _, plain = fit(pl, tmp_path, **options)
    callback = NanHuntCallback()
    _, watched = fit(pl, tmp_path, callback, **options)
    assert same(weights(watched), weights(plain)) and callback.findings == []


@pytest.mark.parametrize("accumulate", [1, 3])
def test_no_hook_stands_outside_the_steps_asked_for(pl: Any, accumulate: int, tmp_path: Path) -> None:
    """Steps 2 and 3 are watched, before and after nothing is hooked; a fault at another step is not seen."""
    for at, seen in ((1, False), (2, True), (3, True), (4, False)):
        callback, fault = NanHuntCallback(steps=(2, 4), on_hit="record"), Fault(at, "backward")
        fit(pl, tmp_path, callback, fault=fault, accumulate_grad_batches=accumulate)
        hooked = {step: {hooks > 0 for s, t, hooks in fault.calls if s == step and t} for step in range(6)}
        assert hooked == {0: {False}, 1: {False}, 2: {True}, 3: {True}, 4: {False}, 5: {False}}
        born = [f.step for f in callback.findings if (f.phase, f.module) == ("backward", "encoder.1")]
        assert born == [at] * seen


def test_validation_and_the_sanity_check_are_not_watched(pl: Any, tmp_path: Path) -> None:
    """A NaN there ends no training: no hook stands in them, and the training is watched on."""
    for at in (0, 3):
        callback, fault = NanHuntCallback(), Fault(at, "forward", evaluation=True)
        made, _ = fit(pl, tmp_path, callback, fault=fault, num_sanity_val_steps=1)
        assert made.global_step == 6 and callback.findings == []
        for training in (True, False):
            assert {hooks > 0 for _, t, hooks in fault.calls if t is training} == {training}


def test_after_a_resume_steps_are_the_trainers(pl: Any, tmp_path: Path) -> None:
    """A fault at step 4 of a training that resumed at step 3 is at step 4, and so is what `steps` asks for."""
    made, _ = fit(pl, tmp_path, max_steps=3)
    made.save_checkpoint(tmp_path / "three.ckpt", weights_only=False)
    for steps in (None, (4, 5)):
        callback, fault = NanHuntCallback(steps=steps), Fault(4, "backward")
        with pytest.raises(nanhunt.NonFiniteError) as stop:
            fit(pl, tmp_path, callback, fault=fault, ckpt_path=str(tmp_path / "three.ckpt"))
        assert stop.value.finding.step == 4 and "step 4" in str(stop.value)
        trained = [(step, hooks > 0) for step, training, hooks in fault.calls if training]
        assert dict(trained) == {3: steps is None, 4: True}


@EACH_PHASE
def test_accumulation_and_bfloat16(pl: Any, phase: str, tmp_path: Path) -> None:
    """A fault in the first of three micro-batches ends the training before the weights move."""
    options = {"precision": "bf16-mixed", "accumulate_grad_batches": 3}
    _, plain = fit(pl, tmp_path, max_steps=2, **options)
    callback, fault = NanHuntCallback(on_hit="stop", detail="module"), Fault(2, phase)
    made, model = fit(pl, tmp_path, callback, fault=fault, **options)
    assert callback.finding is not None and (callback.finding.step, callback.finding.phase) == (2, phase)
    assert [step for step, training, _ in fault.calls if training] == [0, 0, 0, 1, 1, 1, 2]
    assert made.global_step == 2 and same(weights(model), weights(plain))


def test_float16_and_its_scaler(pl: Any, tmp_path: Path) -> None:
    """Calibration is no fault; where `stop` has found one, the step is the scaler's to skip."""
    precision = importlib.import_module(f"{pl.__name__}.plugins.precision")
    for scale, fault in ((2.0**40, None), (64.0, Fault(4, "backward"))):
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        plugin = precision.MixedPrecision("16-mixed", "cpu", scaler=scaler)
        callback = NanHuntCallback(on_hit="stop")
        made, model = fit(pl, tmp_path, callback, fault=fault, plugins=[plugin])
        if fault is None:
            assert made.global_step == 6 and callback.finding is None
            assert {f.handled for f in callback.findings} == {"loss_scale"}
        else:
            assert callback.finding is not None and (callback.finding.step, made.global_step) == (4, 5)
        assert all(p.isfinite().all() for p in model.parameters())


def test_manual_optimization_with_two_optimizers(pl: Any, tmp_path: Path) -> None:
    """Each optimizer's step is one of the trainer's: the fault is at the count that stood when it was made."""

    class Twin(type(module(pl))):  # type: ignore[misc]
        def __init__(self, fault: Fault) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.encoder[1] = fault

        def training_step(self, batch: Any, i: int) -> None:
            for optimizer in self.optimizers():
                optimizer.zero_grad()
                self.manual_backward(self.loss(batch))
                optimizer.step()

        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(part.parameters(), 0.01) for part in (self.encoder, self.head)]

    for at in (2, 3):
        callback, fault = NanHuntCallback(), Fault(at, "backward")
        model = Twin(fault)
        with pytest.raises(nanhunt.NonFiniteError) as stop:
            fit(pl, tmp_path, callback, fault=fault, model=model)
        assert (stop.value.finding.step, stop.value.finding.module) == (at, "encoder.1")
        assert standing(model) == 0


def test_patterns_are_those_of_the_module_that_is_trained(pl: Any, tmp_path: Path) -> None:
    """One that fits nothing is refused when the training begins, and not at the first step that is wanted."""
    callback = NanHuntCallback(only=("encoder",), on_hit="record")
    fit(pl, tmp_path, callback, fault=Fault(3, "forward"))
    assert callback.finding is not None and (callback.finding.module, callback.finding.step) == ("encoder.1", 3)
    fault = Fault(None, "forward")
    with pytest.raises(nanhunt.UsageError, match="skip: no module fits 'decoder'; there are 'encoder'"):
        fit(pl, tmp_path, NanHuntCallback(skip="decoder", steps=(1000, 1001)), fault=fault)
    assert not [step for step, training, _ in fault.calls if training]


def test_every_counts_the_trainers_steps(pl: Any, tmp_path: Path) -> None:
    """Of steps 1 to 5 each third of the training's own count, and no hook between them, whatever runs there."""
    callback, fault = NanHuntCallback(steps=(1, 6), every=3), Fault(None, "forward")
    fit(pl, tmp_path, callback, fault=fault)
    hooked = {step: hooks > 0 for step, training, hooks in fault.calls if training}
    assert hooked == {0: False, 1: False, 2: False, 3: True, 4: False, 5: False}


def test_a_compiled_module_is_refused_when_the_training_begins(pl: Any, tmp_path: Path) -> None:
    """Not at the first step that is wanted, hours later; with `compiled="eager"` it is watched."""
    fault = Fault(4, "backward")
    model = module(pl, fault)
    with pytest.raises(nanhunt.UsageError, match=r'NanHuntCallback\(compiled="eager"\)'):
        fit(pl, tmp_path, NanHuntCallback(steps=(4, 5)), model=torch.compile(model, backend="eager"))
    callback, eager = NanHuntCallback(compiled="eager"), torch.compile(module(pl, fault), backend="eager")
    with pytest.raises(nanhunt.NonFiniteError):
        fit(pl, tmp_path, callback, fault=fault, model=eager, limit_val_batches=0)
    assert callback.finding is not None and (callback.finding.step, callback.finding.module) == (4, "encoder.1")


# --- ways to end --------------------------------------------------------------------------------------


@pytest.mark.parametrize("failure", [RuntimeError("out of luck"), KeyboardInterrupt(), SystemExit(3)])
def test_no_hook_stays_when_fit_raises(pl: Any, failure: BaseException, tmp_path: Path) -> None:
    """An error, Ctrl-C or an exit inside a step; the callback serves again, and begins anew."""

    class Weary(type(module(pl))):  # type: ignore[misc]
        def training_step(self, batch: Any, i: int) -> Tensor:
            loss = super().training_step(batch, i)
            if self.trainer.global_step == 2:
                raise failure
            return loss

    callback, model = NanHuntCallback(), Weary()
    with pytest.raises((SystemExit, type(failure))):
        fit(pl, tmp_path, callback, model=model)
    assert standing(model) == 0
    with pytest.raises(nanhunt.NonFiniteError):
        fit(pl, tmp_path, callback, fault=Fault(1, "forward"))
    fit(pl, tmp_path, callback)
    assert callback.findings == [] and callback.finding is None


def test_an_error_that_the_nan_brings_about_carries_the_finding(pl: Any, tmp_path: Path) -> None:
    class Draw(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            torch.multinomial(x.abs().flatten() + 1, 1)
            return x

    callback, fault = NanHuntCallback(), Fault(4, "forward")
    model = module(pl, fault)
    model.encoder.append(Draw())
    with pytest.raises(RuntimeError, match="probability tensor contains") as death:
        fit(pl, tmp_path, callback, fault=fault, model=model)
    finding = death.value.nanhunt_finding  # type: ignore[attr-defined]
    assert finding == callback.finding and (finding.step, finding.module) == (4, "encoder.1")


def test_copies_take_along_the_options_and_no_watch(pl: Any, tmp_path: Path) -> None:
    """A callback can be copied while it watches, and pickled before a launcher starts other processes."""
    callback = NanHuntCallback(steps=[0, 5], on_hit="stop")  # type: ignore[arg-type]
    copies: list[NanHuntCallback] = [pickle.loads(pickle.dumps(callback))]

    class Copies(pl.Callback):  # type: ignore[misc, name-defined]
        def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
            if len(copies) == 1:
                copies.append(copy.deepcopy(callback))

    fit(pl, tmp_path, callback, Copies(), max_steps=2)
    assert len(copies) == 2 and callback.findings == []
    for one in copies:
        made, _ = fit(pl, tmp_path, one, fault=Fault(3, "backward"))
        assert one.finding is not None and one.finding.step == 3 and made.global_step == 4


# --- two packages -------------------------------------------------------------------------------------


def test_it_is_a_callback_of_the_package_that_is_used(pl: Any, tmp_path: Path) -> None:
    """An instance of its Callback, so that a Trainer takes it without a list around it."""
    callback = NanHuntCallback()
    assert isinstance(callback, pl.Callback)
    assert callback in pl.Trainer(callbacks=callback, logger=False, enable_checkpointing=False).callbacks


def test_only_packages_in_use_are_imported() -> None:
    """A program with one of them does not pay for the other; with both, one callback serves both."""
    pytest.importorskip("pytorch_lightning")
    code = """
import sys, pytorch_lightning
from nanhunt.integrations.lightning import NanHuntCallback
assert isinstance(NanHuntCallback(), pytorch_lightning.Callback) and "lightning" not in sys.modules
import lightning.pytorch
callback = NanHuntCallback()
assert isinstance(callback, pytorch_lightning.Callback) and isinstance(callback, lightning.pytorch.Callback)
assert isinstance(callback, NanHuntCallback) and pytorch_lightning.Callback is not lightning.pytorch.Callback
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
