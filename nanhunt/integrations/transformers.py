"""A callback for the Trainer of transformers."""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch

try:
    import transformers
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
except ImportError as missing:
    raise ImportError(
        "nanhunt.integrations.transformers needs the transformers library: pip install 'nanhunt[transformers]'"
    ) from missing

from ..finding import Finding
from ..monitor.record import sentence
from ..ranks import together
from ..symptoms.steps import Symptom
from .span import Spanned


class NanHuntCallback(Spanned, TrainerCallback):  # type: ignore[misc, unused-ignore]
    """Watches the training steps of a `transformers.Trainer` and names what makes the first NaN or Inf.

        trainer = Trainer(model, arguments, train_dataset=data, callbacks=[NanHuntCallback(steps=(12_000, 12_100))])

    A fault is logged as an error (logger `nanhunt`) and put into `trainer.state.log_history`, because the Trainer
    leaves a NaN out of the losses that it logs. Evaluation is not watched, and neither is what runs between epochs;
    for that, use `nanhunt.watch` around `trainer.evaluate()`. No hook stands outside of the steps asked for, nor
    after the training, however it ends.

    Args:
        steps: `(a, b)`: watch only the steps a <= step < b, counted as `trainer.state.global_step` is when they
            begin, also after a resume. Nothing is hooked, and nothing costs anything, before and after.
        on_hit: `"raise"`: `NonFiniteError` leaves `trainer.train()`. `"stop"`: the page is printed and the training
            ends after this step, or before the next micro-batch, as if it were done; what the step's backward gave
            does not reach the weights, so they are as the step before has left them (unless the optimizer's own
            step was at fault). Several ranks agree on it, which takes a small collective a step. `"warn"`
            (`NonFiniteWarning`, once for each place) and `"record"` go on. A callable gets each `Finding` while the
            step still runs.
        detail: `"module"`, `"op"` or `"auto"`, as for `nanhunt.watch`.
        report: a folder for an HTML page and a JSON file of each fault, once for each place.
        monitor: True, a file for its record, or a dict with options of `nanhunt.Monitor`: record every step of the
            training in a few numbers, and say what is wrong with the run. Symptoms are logged as warnings (logger
            `nanhunt`) and put into `trainer.state.log_history`; validation metrics are taken in. See `monitor`.
        watch: False for the monitor alone.
        options: what else `nanhunt.watch` takes: `stop`, `kinds`, `allow`, `every`, `only`, `skip`, `backward`,
            `compiled`, `scaler`, `capsule`, `max_mb`, `slim`, `ring`.

    Raises:
        UsageError: for an option that does not exist, at once; when the training begins, for a pattern of `only` or
            `skip` that fits no module, and for a compiled model or `torch_compile=True` that will have run before
            the first step that is wanted, unless `compiled` says what to do.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> NanHuntCallback:
        made: NanHuntCallback = super().__new__(cls)
        _Leaving.stand(made)
        return made

    def close(self, error: BaseException | None = None) -> None:
        """Take all hooks off; done when the training ends or raises, and it may be done twice.

        A Trainer that overrides `train` and never calls the original has to call this itself when it raises.
        """
        try:
            self._span.close(error)
        finally:
            self._recording.close()

    # --- events of the Trainer ----------------------------------------------------------------------

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._span.open(kwargs.get("model"), compiled=bool(getattr(args, "torch_compile", False)))
        self._recording.open()

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        def tell(fault: Finding) -> None:
            history: list[Any] = state.log_history  # said to hold numbers only; all it must be is JSON
            history.append({"nanhunt": fault.title(), "step": fault.step})

        def tell_symptom(symptom: Symptom) -> None:
            history: list[Any] = state.log_history
            history.append({"nanhunt": sentence(symptom), "symptom": symptom.name, "step": symptom.step})

        autocast = "float16" if args.fp16 else "bfloat16" if args.bf16 else None
        optimizers = (kwargs.get("optimizer"),)
        self._recording.begin(
            kwargs["model"], optimizers, lambda: state.global_step, autocast=autocast, tell=tell_symptom
        )
        self._span.begin(kwargs["model"], kwargs.get("optimizer"), lambda: state.global_step, tell)

    def on_substep_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        # With several ranks all must stop at the same place, and agree on it where they meet anyhow.
        if self._span.struck and self._span.on_hit == "stop" and not together():
            control.should_training_stop = True

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        optimizer = kwargs.get("optimizer")
        # A GradScaler skips such a step by itself, and fails on one without gradients.
        if self._stops(args) and optimizer is not None and getattr(optimizer, "scaler", None) is None:
            optimizer.zero_grad()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._span.end()
        if self._stops(args):
            control.should_training_stop = True
        if control.should_evaluate:  # there is no event for the beginning of an evaluation
            self._span.close()

    def on_prediction_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._span.close()  # an evaluation that another callback has asked for

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._recording.metrics(kwargs.get("metrics") or {})

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._span.close()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.close()

    def _stops(self, args: TrainingArguments) -> bool:
        """True when the training is to stop because of this step, the same on all ranks."""
        if self._span.on_hit != "stop" or not self._span.inside:
            return False
        if not together():
            return self._span.struck
        flag = torch.tensor(float(self._span.struck), device=args.device)
        torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MAX)
        return bool(flag.item())


class _Leaving:
    """What stands around `Trainer.train` while a callback lives.

    The Trainer has no event for a training that ends by an exception, and hooks must come off there too.
    """

    trainer: Any = transformers.Trainer
    living = 0
    original: Any = None
    ours: Any = None

    @classmethod
    def stand(cls, callback: NanHuntCallback) -> None:
        if not cls.living:
            cls.original = cls.trainer.train
            cls.ours = cls.trainer.train = _closing(cls.original)
        cls.living += 1
        weakref.finalize(callback, cls.go).atexit = False

    @classmethod
    def go(cls) -> None:
        cls.living -= 1
        # Somebody may have put a wrapper of their own around ours: that one stays.
        if not cls.living and cls.trainer.train is cls.ours:
            cls.trainer.train = cls.original


def _closing(train: Any) -> Any:
    @functools.wraps(train)
    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return train(self, *args, **kwargs)
        except BaseException as error:
            for callback in self.callback_handler.callbacks:
                if isinstance(callback, NanHuntCallback):
                    callback.close(error)
            raise

    return watched
