"""The callback for transformers with the real Trainer and a tiny GPT-2; what the integrations cost to import."""

from __future__ import annotations

import copy
import gc
import inspect
import json
import logging
import pickle
import subprocess
import sys
import warnings
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nanhunt

from .faulty import Fault, standing

hf = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from nanhunt.integrations.transformers import NanHuntCallback  # noqa: E402

PLACE = "transformer.h.0.mlp.act.1"
EACH_PHASE = pytest.mark.parametrize("phase", ["forward", "backward"])


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """One thread, so that sums have one order; and none of what the library prints."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    hf.logging.set_verbosity(logging.CRITICAL)
    yield
    torch.set_num_threads(threads)


def gpt2(fault: Fault | None = None) -> Any:
    """A GPT-2 with 1 block and 8 numbers a token; its activation may fail."""
    torch.manual_seed(0)
    config = hf.GPT2Config(vocab_size=31, n_embd=8, n_layer=1, n_head=2, n_positions=8, loss_type="ForCausalLM")
    config.bos_token_id = config.eos_token_id = None
    model = hf.GPT2LMHeadModel(config)
    model.transformer.h[0].mlp.act = nn.Sequential(model.transformer.h[0].mlp.act, fault or Fault(None, "forward"))
    return model


def tokens(rows: int = 16) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [{"input_ids": row, "labels": row} for row in torch.randint(3, 31, (rows, 6), generator=generator)]


def trainer(
    folder: Path,
    *callbacks: Any,
    fault: Fault | None = None,
    kind: Any = None,
    collate: Any = None,
    model: Any = None,
    **options: Any,
) -> Any:
    """A Trainer for 6 steps with a constant rate; dropout is on."""
    fault = fault or Fault(None, "forward")
    model = model or gpt2(fault)
    settings = {
        "max_steps": 6,
        "per_device_train_batch_size": 2,
        "lr_scheduler_type": "constant",
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
        "disable_tqdm": True,
        "use_cpu": True,
        "report_to": [],
        "dataloader_pin_memory": False,
    }
    arguments = hf.TrainingArguments(str(folder), **{**settings, **options})
    made = (kind or hf.Trainer)(
        model,
        arguments,
        train_dataset=tokens(),
        eval_dataset=tokens(4),
        callbacks=list(callbacks),
        data_collator=collate,
    )
    made.remove_callback(hf.PrinterCallback)
    fault.attached(model, lambda: made.state.global_step)
    return made


def weights(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(map(torch.equal, one, other))


# --- what is found, and what becomes of it ------------------------------------------------------------


@EACH_PHASE
def test_raise_leaves_train_with_the_trainers_step(phase: str, tmp_path: Path) -> None:
    """The module is named as in the user's model, the weights are as the last good step left them, no hook stays."""
    callback = NanHuntCallback()
    plain = trainer(tmp_path, max_steps=3)
    plain.train()
    watched = trainer(tmp_path, callback, fault=Fault(3, phase))
    before = standing(watched.model)
    with pytest.raises(nanhunt.NonFiniteError) as stop:
        watched.train()
    finding = stop.value.finding
    assert (finding.step, finding.phase, finding.module, finding.module_type) == (3, phase, PLACE, "Fault")
    assert callback.finding == finding and callback.findings == [finding]
    assert standing(watched.model) == before == 0
    assert same(weights(watched.model), weights(plain.model))


@EACH_PHASE
def test_stop_ends_the_training_as_if_it_were_done(
    phase: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """It is told on stderr, in the log and in the trainer's history; the bad step does not reach the weights."""
    callback = NanHuntCallback(on_hit="stop")
    plain = trainer(tmp_path, max_steps=3)
    plain.train()
    capsys.readouterr()
    watched = trainer(tmp_path, callback, fault=Fault(3, phase))
    with caplog.at_level(logging.ERROR, logger="nanhunt"):
        watched.train()
    assert watched.state.global_step == 4 and watched.control.should_training_stop
    finding = callback.finding
    assert finding is not None and (finding.step, finding.phase, finding.module) == (3, phase, PLACE)
    assert same(weights(watched.model), weights(plain.model))
    assert capsys.readouterr().err.count(str(finding)) == 1
    assert [record.getMessage() for record in caplog.records if record.name == "nanhunt"] == [finding.title()]
    assert {"nanhunt": finding.title(), "step": 3} in watched.state.log_history
    assert standing(watched.model) == 0


def test_the_loss_that_the_trainer_logs_hides_the_fault_and_the_callback_does_not(tmp_path: Path) -> None:
    """With the Trainer's own filter on, all logged losses are finite; the finding is in the same history."""
    watched = trainer(tmp_path, NanHuntCallback(on_hit="record"), fault=Fault(3, "forward"))
    watched.train()
    losses = [entry["loss"] for entry in watched.state.log_history if "loss" in entry]
    assert len(losses) == 6 and all(torch.tensor(losses).isfinite())
    told = [entry["nanhunt"] for entry in watched.state.log_history if "nanhunt" in entry]
    assert told[0].startswith(f"{PLACE} (Fault) made the first +inf")
    json.dumps(watched.state.log_history)


@EACH_PHASE
def test_warn_record_and_a_callable_go_on(phase: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All six steps are made; a warning is the page, once for each place; a callable gets every finding."""
    given: list[nanhunt.Finding] = []
    for on_hit in ("warn", "record", given.append):
        callback = NanHuntCallback(on_hit=on_hit)
        watched = trainer(tmp_path, callback, fault=Fault(3, phase))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            watched.train()
        assert watched.state.global_step == 6 and standing(watched.model) == 0
        first = callback.findings[0]
        assert first is callback.finding and (first.step, first.phase, first.module) == (3, phase, PLACE)
        pages = [str(w.message) for w in caught if issubclass(w.category, nanhunt.NonFiniteWarning)]
        assert pages.count(str(first)) == (on_hit == "warn") and len(pages) == len(set(pages))
        later = {f.phase for f in callback.findings[1:]}
        assert later == {"state"}, "after it, the weights are bad, and that is what is said"
    assert given == callback.findings
    assert "made the first" not in capsys.readouterr().err.replace(callback.findings[0].title(), "", 1)


def test_what_a_callable_raises_leaves_train(tmp_path: Path) -> None:
    """The user's own exception is not swallowed, and hooks come off."""

    def refuse(finding: nanhunt.Finding) -> None:
        raise KeyError(finding.module)

    watched = trainer(tmp_path, NanHuntCallback(on_hit=refuse), fault=Fault(1, "forward"))
    with pytest.raises(KeyError, match=r"mlp\.act\.1"):
        watched.train()
    assert standing(watched.model) == 0


def test_a_report_is_written_for_each_place(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A page and the JSON, named after the step; a second run in the same folder replaces neither."""
    callback = NanHuntCallback(on_hit="stop", report=tmp_path / "deep" / "reports")
    for run in range(2):
        caplog.clear()
        trainer(tmp_path, callback, fault=Fault(3, "forward")).train()
        stem = tmp_path / "deep" / "reports" / f"step3{'-2' * run}"
        assert nanhunt.Finding.from_json(stem.with_suffix(".json").read_text()) == callback.finding
        assert PLACE in stem.with_suffix(".html").read_text()
        assert str(stem.with_suffix(".html")) in caplog.text
    assert len(list(stem.parent.iterdir())) == 4


def test_a_capsule_bears_the_step_of_the_trainer(tmp_path: Path) -> None:
    """In its name, in its finding and beside the hashes of its batches; the watch began to count at step 2."""
    callback = NanHuntCallback(steps=(2, 9), on_hit="stop", capsule=tmp_path / "faults", ring=2)
    trainer(tmp_path, callback, fault=Fault(3, "forward")).train()
    assert callback.finding is not None and callback.finding.step == 3
    (folder,) = (tmp_path / "faults").iterdir()
    capsule = nanhunt.load_capsule(folder)
    assert folder.name.startswith("step3.") and callback.finding.context["capsule"] == str(folder)
    assert capsule.finding.step == 3 and [one["step"] for one in capsule.hashes] == [2, 3]


def test_a_report_that_cannot_be_written_ends_no_training(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    callback = NanHuntCallback(on_hit="record", report=tmp_path / "reports")
    (tmp_path / "reports").write_text("in the way by now")
    watched = trainer(tmp_path / "out", callback, fault=Fault(3, "forward"))
    watched.train()
    assert watched.state.global_step == 6 and callback.finding is not None
    assert "could not be written" in caplog.text


# --- what is watched ----------------------------------------------------------------------------------


def test_a_healthy_training_is_unchanged(tmp_path: Path) -> None:
    """With clipping, accumulation, evaluation and bfloat16 the weights are the same bit for bit."""
    results = []
    for callbacks in ([], [NanHuntCallback()]):
        made = trainer(
            tmp_path, *callbacks, bf16=True, gradient_accumulation_steps=2, eval_strategy="steps", eval_steps=2
        )
        made.train()
        results.append(weights(made.model))
    assert same(*results) and callbacks[0].findings == []


@pytest.mark.parametrize("accumulate", [1, 2])
def test_no_hook_stands_outside_the_steps_asked_for(accumulate: int, tmp_path: Path) -> None:
    """Steps 2 and 3 are watched, before and after nothing is hooked; a fault at another step is not seen."""
    after: dict[int, int] = {}

    class Counts(hf.TrainerCallback):  # type: ignore[misc, name-defined]
        def on_step_end(self, args: Any, state: Any, control: Any, model: Any, **kwargs: Any) -> None:
            after[state.global_step - 1] = standing(model)

    for at, seen in ((1, False), (2, True), (3, True), (4, False)):
        callback, fault = NanHuntCallback(steps=(2, 4), on_hit="record"), Fault(at, "backward")
        watched = trainer(tmp_path, callback, Counts(), fault=fault, gradient_accumulation_steps=accumulate)
        watched.train()
        hooked = {step: {hooks > 0 for s, _, hooks in fault.calls if s == step} for step in range(6)}
        assert hooked == {0: {False}, 1: {False}, 2: {True}, 3: {True}, 4: {False}, 5: {False}}
        assert [step for step, hooks in after.items() if hooks] == [2], "after the last one they are off at once"
        born = [f.step for f in callback.findings if (f.phase, f.module) == ("backward", PLACE)]
        assert born == [at] * seen


def test_the_hook_count_sees_hooks(tmp_path: Path) -> None:
    """Guards the tests that find none: it grows with a watch, and with one hook of anybody's."""
    model = gpt2()
    with nanhunt.watch(model):
        assert standing(model) > 5
    handle = model.lm_head.register_forward_hook(lambda m, a, o: None)
    assert standing(model) == 1
    handle.remove()
    assert standing(model) == 0


def test_after_a_resume_steps_are_the_trainers(tmp_path: Path) -> None:
    """A fault at step 3 of a training that resumed at step 2 is at step 3, and so is what `steps` asks for."""
    trainer(tmp_path, save_strategy="steps", save_steps=2, max_steps=2).train()
    for steps in (None, (3, 5)):
        callback, fault = NanHuntCallback(steps=steps), Fault(3, "backward")
        resumed = trainer(tmp_path, callback, fault=fault)
        with pytest.raises(nanhunt.NonFiniteError) as stop:
            resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
        assert stop.value.finding.step == 3 and "step 3" in str(stop.value)
        assert {step for step, *_ in fault.calls} == {2, 3}
        assert all((hooks > 0) == (steps is None or step == 3) for step, _, hooks in fault.calls)


def test_a_fault_in_a_micro_batch_stops_before_the_weights_move(tmp_path: Path) -> None:
    """With accumulation over 3 batches, a fault in the first of step 1 ends the training there."""
    plain = trainer(tmp_path, max_steps=1, gradient_accumulation_steps=3)
    plain.train()
    fault = Fault(1, "forward")
    callback = NanHuntCallback(on_hit="stop", detail="module")
    watched = trainer(tmp_path, callback, fault=fault, gradient_accumulation_steps=3)
    watched.train()
    assert callback.finding is not None and callback.finding.step == 1
    assert [step for step, *_ in fault.calls] == [0, 0, 0, 1]
    assert watched.state.global_step == 1 and same(weights(watched.model), weights(plain.model))


@pytest.mark.parametrize("strategy", ["steps", "epoch"])
def test_evaluation_is_not_watched(strategy: str, tmp_path: Path) -> None:
    """A NaN in an evaluation ends no training: no hook stands in it, and the training is watched on after it."""
    callback, fault = NanHuntCallback(), Fault(4 if strategy == "steps" else 8, "forward", evaluation=True)
    watched = trainer(tmp_path, callback, fault=fault, max_steps=10, eval_strategy=strategy, eval_steps=2)
    watched.train()
    assert watched.state.global_step == 10 and callback.findings == []
    assert {training: {hooks > 0 for _, t, hooks in fault.calls if t is training} for training in (True, False)} == {
        True: {True},
        False: {False},
    }


def test_an_evaluation_that_another_callback_asks_for_is_left_after_its_first_batch(tmp_path: Path) -> None:
    """Nobody says beforehand that it begins."""

    class Asks(hf.TrainerCallback):  # type: ignore[misc, name-defined]
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_evaluate = state.global_step == 2

    fault = Fault(None, "forward")
    trainer(tmp_path, NanHuntCallback(), Asks(), fault=fault, per_device_eval_batch_size=1).train()
    assert [hooks > 0 for _, training, hooks in fault.calls if not training] == [True, False, False, False]


def test_a_scaler_decides_about_the_steps_that_it_may_skip(tmp_path: Path) -> None:
    """Calibration is no fault; where `stop` has found one, the step is the scaler's to skip, and it does not fail."""
    for phase, step in ((None, None), ("backward", 3)):
        callback = NanHuntCallback(on_hit="stop")
        fault = Fault(step, phase or "forward")
        watched = trainer(tmp_path, callback, fault=fault, bf16=True, max_grad_norm=0.0, max_steps=12)
        scale = 2.0**126 if phase is None else 1024.0
        watched.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=10**6)
        watched.train()
        assert all(p.isfinite().all() for p in watched.model.parameters())
        if phase is None:
            assert watched.accelerator.scaler.get_scale() < scale and watched.state.global_step == 12
            assert callback.finding is None and {f.handled for f in callback.findings} == {"loss_scale"}
            assert all(f.step in range(12) for f in callback.findings)
        else:
            assert callback.finding is not None and (callback.finding.step, watched.state.global_step) == (3, 4)


@pytest.mark.parametrize("detail", ["module", "op"])
def test_detail_is_the_watchs(detail: str, tmp_path: Path) -> None:
    """At op level the operation of a backward fault is named, and no dispatch mode stays on."""
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    callback = NanHuntCallback(steps=(3, 4), detail=detail, on_hit="record")
    trainer(tmp_path, callback, fault=Fault(3, "backward")).train()
    assert callback.finding is not None and callback.finding.module == PLACE
    assert callback.finding.op == ("aten.sqrt.default" if detail == "op" else None)
    assert _get_current_dispatch_mode_stack() == []


# --- ways to end --------------------------------------------------------------------------------------


class Weary(hf.Trainer):  # type: ignore[misc, name-defined]
    """A Trainer with a loss of its own, which gives up at step 2."""

    failure: BaseException = RuntimeError("out of luck")

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        if self.state.global_step == 2:
            raise self.failure
        return super().compute_loss(*args, **kwargs)


def collate(rows: list[dict[str, Tensor]], count: list[int]) -> dict[str, Tensor]:
    count[0] += 1
    if count[0] == 3:
        raise OSError("the disk is gone")
    return {key: torch.stack([row[key] for row in rows]) for key in rows[0]}


@pytest.mark.parametrize("failure", [RuntimeError("out of luck"), KeyboardInterrupt(), SystemExit(3)])
def test_no_hook_stays_when_train_raises(failure: BaseException, tmp_path: Path) -> None:
    """An error, Ctrl-C or an exit inside a step, and one in the data between steps; the callback serves again."""
    callback = NanHuntCallback()
    watched = trainer(tmp_path, callback, kind=type("Trainer", (Weary,), {"failure": failure}))
    with pytest.raises(type(failure)):
        watched.train()
    assert standing(watched.model) == 0
    count = [0]
    watched = trainer(tmp_path, callback, collate=lambda rows: collate(rows, count))
    with pytest.raises(OSError, match="disk"):
        watched.train()
    assert standing(watched.model) == 0
    watched = trainer(tmp_path, callback, fault=Fault(1, "forward"))
    with pytest.raises(nanhunt.NonFiniteError):
        watched.train()
    assert callback.findings == [callback.finding] and standing(watched.model) == 0


def test_a_callback_that_is_used_again_begins_anew(tmp_path: Path) -> None:
    """A training that stopped leaves no word for the next one, with the same trainer or another."""
    callback = NanHuntCallback(on_hit="stop")
    first = trainer(tmp_path, callback, fault=Fault(1, "forward"))
    first.train()
    assert callback.finding is not None and first.state.global_step == 2
    again = trainer(tmp_path, callback)
    again.train()
    assert callback.findings == [] and again.state.global_step == 6
    first.train()
    assert callback.findings != [] and first.state.global_step == 2


def test_a_batch_size_that_is_searched_for_starts_the_watch_again(tmp_path: Path) -> None:
    """`auto_find_batch_size` begins the training once more after running out of memory, without ending it first."""

    class Small(Weary):
        def compute_loss(self, model: Any, inputs: Any, **kwargs: Any) -> Any:
            if self.state.global_step == 2 and len(inputs["input_ids"]) > 2:
                raise RuntimeError("CUDA out of memory. Tried to allocate 3 GiB")
            return hf.Trainer.compute_loss(self, model, inputs, **kwargs)

    callback = NanHuntCallback()
    watched = trainer(
        tmp_path,
        callback,
        kind=Small,
        fault=Fault(4, "backward"),
        auto_find_batch_size=True,
        per_device_train_batch_size=4,
    )
    with pytest.raises(nanhunt.NonFiniteError) as stop:
        watched.train()
    assert stop.value.finding.step == 4 and standing(watched.model) == 0


def test_an_error_that_the_nan_brings_about_carries_the_finding(tmp_path: Path) -> None:
    """A program that dies of a NaN before anybody has proved harm: the error says where it was made, and when."""

    class Draw(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            torch.multinomial(x.abs().flatten() + 1, 1)
            return x

    callback, fault = NanHuntCallback(steps=(2, 5)), Fault(3, "forward")
    model = gpt2(fault)
    model.transformer.h[0].mlp.act.append(Draw())
    watched = trainer(tmp_path, callback, fault=fault, model=model)
    with pytest.raises(RuntimeError, match="probability tensor contains") as death:
        watched.train()
    finding = death.value.nanhunt_finding  # type: ignore[attr-defined]
    assert finding == callback.finding and (finding.step, finding.module) == (3, PLACE)
    assert getattr(death.value, "__notes__", [f"nanhunt: {finding}"]) == [f"nanhunt: {finding}"]
    assert standing(watched.model) == 0


def test_copies_take_along_the_options_and_no_watch(tmp_path: Path) -> None:
    """A callback can be copied and pickled while it watches, as searches over hyperparameters do."""
    copies: list[NanHuntCallback] = []

    class Copies(hf.TrainerCallback):  # type: ignore[misc, name-defined]
        def on_substep_end(self, *args: Any, **kwargs: Any) -> None:
            copies.extend([copy.deepcopy(callback), pickle.loads(pickle.dumps(callback))])

    callback = NanHuntCallback(steps=(0, 5), on_hit="stop", kinds=("nan",))
    trainer(tmp_path, callback, Copies(), max_steps=1, gradient_accumulation_steps=2).train()
    assert len(copies) == 2
    for one in copies:
        watched = trainer(tmp_path, one, fault=Fault(3, "backward"))
        watched.train()
        assert one.finding is not None and one.finding.step == 3 and watched.state.global_step == 4
    assert callback.finding is None


def test_a_callback_holds_no_model_after_the_training(tmp_path: Path) -> None:
    """Neither the model nor the trainer lives on in one that is kept for its findings."""
    callback = NanHuntCallback(on_hit="stop")
    watched = trainer(tmp_path, callback, fault=Fault(1, "backward"))
    watched.train()
    model, state = weakref.ref(watched.model), weakref.ref(watched.state)
    del watched
    gc.collect()
    assert callback.finding is not None and model() is None and state() is None


def test_the_trainer_itself_is_left_as_it_was(tmp_path: Path) -> None:
    """What stands around `Trainer.train` goes with the last callback."""
    code = """
import gc, transformers
plain = transformers.Trainer.train
from nanhunt.integrations.transformers import NanHuntCallback
assert transformers.Trainer.train is plain
one, two = NanHuntCallback(), NanHuntCallback()
assert transformers.Trainer.train.__wrapped__ is plain
del one; gc.collect()
assert transformers.Trainer.train.__wrapped__ is plain
del two; gc.collect()
assert transformers.Trainer.train is plain
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr


# --- what is refused, and what an import costs ---------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"on_hit": "explode"}, "'raise', 'stop', 'warn', 'record' or a callable"),
        ({"steps": (5, 2)}, "0 <= first < end"),
        ({"detail": "atoms"}, "'auto', 'module', 'op'"),
        ({"kinds": ("nil",)}, "'nan', '+inf', '-inf'"),
        ({"report": __file__}, "is a file: name a folder"),
    ],
)
def test_a_bad_option_is_refused_before_any_training(options: dict[str, Any], words: str) -> None:
    with pytest.raises(nanhunt.UsageError, match=words.replace("+", r"\+")):
        NanHuntCallback(**options)
    with pytest.raises(
        nanhunt.UsageError, match="'sensitivity' is no option here: use steps, on_hit, detail, report, "
    ):
        NanHuntCallback(sensitivity=1)
    with pytest.raises(nanhunt.UsageError, match=r"the optimizer is the trainer's, .* leave optimizer= out"):
        NanHuntCallback(optimizer=None)


def test_every_option_of_watch_is_one_of_the_callback() -> None:
    told = {name for name in inspect.signature(nanhunt.watch).parameters if not name.startswith("_")}
    names = told - {"model", "optimizer"}
    with pytest.raises(nanhunt.UsageError) as refused:
        NanHuntCallback(colour=1)
    assert set(str(refused.value).rpartition("use ")[2].split(", ")) == names | {"report", "watch"}


@pytest.mark.parametrize("options", [{"only": ("transformer.h.*",)}, {"skip": "lm_head"}, {"backward": False}])
def test_patterns_are_those_of_the_model_that_is_trained(tmp_path: Path, options: dict[str, Any]) -> None:
    callback = NanHuntCallback(on_hit="record", **options)
    trainer(tmp_path, callback, fault=Fault(3, "forward")).train()
    assert callback.finding is not None and callback.finding.module == PLACE


def test_a_pattern_that_fits_nothing_is_refused_before_the_first_step(tmp_path: Path) -> None:
    """Also where the first step that is wanted is far away."""
    watched = trainer(tmp_path, NanHuntCallback(only=("net.*",), steps=(1000, 1001)))
    with pytest.raises(nanhunt.UsageError, match=r"only: no module fits 'net\.\*'; there are 'transformer'"):
        watched.train()
    assert watched.state.global_step == 0


@pytest.mark.filterwarnings("ignore:Using .torch.compile:UserWarning")
def test_a_compiled_training_is_refused_with_the_way_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It will have run before the steps that are wanted, and the Trainer compiles behind the model's back."""
    for name in ("BACKEND", "MODE"):  # the library sets them for good
        monkeypatch.setenv(f"ACCELERATE_DYNAMO_{name}", "no" if name == "BACKEND" else "default")
    compiled = {"torch_compile": True, "torch_compile_backend": "eager"}
    with pytest.raises(nanhunt.UsageError, match='NanHuntCallback\\(compiled="eager"\\)'):
        trainer(tmp_path, NanHuntCallback(steps=(3, 5)), **compiled).train()
    callback = NanHuntCallback(compiled="eager", steps=(3, 5))
    with pytest.raises(nanhunt.NonFiniteError):
        trainer(tmp_path, callback, fault=Fault(4, "backward"), **compiled).train()
    assert callback.finding is not None and (callback.finding.step, callback.finding.module) == (4, PLACE)


def test_switched_off_it_hooks_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NANHUNT", "0")
    callback, fault = NanHuntCallback(), Fault(3, "forward")
    trainer(tmp_path, callback, fault=fault).train()
    assert {hooks for *_, hooks in fault.calls} == {0} and callback.findings == []


@pytest.mark.parametrize("library", ["transformers", "lightning"])
def test_a_missing_library_is_named_with_its_extra(library: str) -> None:
    """And the package of integrations alone loads neither a library nor torch."""
    code = (
        "import sys, nanhunt.integrations; heavy = {'torch', 'transformers', 'lightning'} & set(sys.modules); "
        "assert not heavy, heavy; "
        "sys.modules.update(dict.fromkeys(('transformers', 'lightning', 'pytorch_lightning'))); "
        f"import nanhunt.integrations.{library}"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.returncode == 1
    assert f"ImportError: nanhunt.integrations.{library} needs the {library} library: " in ran.stderr
    assert f"pip install 'nanhunt[{library}]'" in ran.stderr
