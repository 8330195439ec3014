"""A callback for the Trainer of Lightning, under both of its package names."""

from __future__ import annotations

import importlib
import sys
from importlib.util import find_spec
from typing import Any

from ..symptoms.steps import Symptom
from .span import Spanned

# The package that is imported -> the one that must be installed. They are the same code twice over, and the classes
# of one are strangers to the other.
_PACKAGES = {"lightning.pytorch": "lightning", "pytorch_lightning": "pytorch_lightning"}

_AUTOCAST = {"16-mixed": "float16", "bf16-mixed": "bfloat16"}

if not any(find_spec(installed) for installed in _PACKAGES.values()):
    raise ImportError("nanhunt.integrations.lightning needs the lightning library: pip install 'nanhunt[lightning]'")


class _Events(Spanned):
    """What is done at the events of a Trainer; `NanHuntCallback` has Lightning's `Callback` classes beside it."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        # Of torch.compile(module) the Trainer takes the module, with compiled methods on it, and this mark.
        self._span.open(pl_module, compiled=getattr(pl_module, "_compiler_ctx", None) is not None)
        self._recording.open()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        optimizers = trainer.optimizers

        def tell(symptom: Symptom) -> None:
            for logger in trainer.loggers:
                logger.log_metrics({f"nanhunt/{symptom.name}": 1.0}, step=trainer.global_step)

        autocast = _AUTOCAST.get(str(trainer.precision))
        self._recording.begin(pl_module, optimizers, lambda: trainer.global_step, autocast=autocast, tell=tell)
        self._recording.batch(batch)
        self._span.begin(pl_module, optimizers[0] if len(optimizers) == 1 else None, lambda: trainer.global_step)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        # A GradScaler skips such a step by itself, and may fail on one without gradients.
        if self._stops(trainer) and getattr(trainer, "scaler", None) is None:
            optimizer.zero_grad()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._span.end()
        if self._stops(trainer):
            trainer.should_stop = True

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self._span.close()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if not trainer.sanity_checking:
            self._recording.metrics(trainer.callback_metrics)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self._span.close()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._close(exception)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._close()

    def _close(self, error: BaseException | None = None) -> None:
        try:
            self._span.close(error)
        finally:
            self._recording.close()

    def _stops(self, trainer: Any) -> bool:
        """True when the training is to stop because of this step, the same on all ranks."""
        if self._span.on_hit != "stop" or not self._span.inside:
            return False
        return bool(trainer.strategy.reduce_boolean_decision(self._span.struck, all=False))


class NanHuntCallback(_Events):
    """Watches the training steps of a Lightning `Trainer` and names what makes the first NaN or Inf.

        trainer = Trainer(callbacks=[NanHuntCallback(steps=(12_000, 12_100))])

    It fits `lightning.pytorch` and `pytorch_lightning`: it is a `Callback` of each that is imported by the time it is
    made. Modules bear the names of `LightningModule.named_modules()`. A fault is logged as an error (logger
    `nanhunt`). Validation, the sanity check and what runs between epochs are not watched; for that, use
    `nanhunt.watch` around `trainer.validate()`. No hook stands outside of the steps asked for, nor after the
    training, however it ends.

    Args:
        steps: `(a, b)`: watch only the steps a <= step < b, counted as `trainer.global_step` is when they begin,
            also after a resume. Nothing is hooked, and nothing costs anything, before and after.
        on_hit: `"raise"`: `NonFiniteError` leaves `trainer.fit()`. `"stop"`: the page is printed and
            `trainer.should_stop` is set; what the step's backward gave does not reach the weights, so they are as
            the step before has left them (unless the optimizer's own step was at fault). Several ranks agree on it,
            which takes a small collective a step. `"warn"` (`NonFiniteWarning`, once for each place) and `"record"`
            go on. A callable gets each `Finding` while the step still runs.
        detail: `"module"`, `"op"` or `"auto"`, as for `nanhunt.watch`.
        report: a folder for an HTML page and a JSON file of each fault, once for each place.
        monitor: True, a file for its record, or a dict with options of `nanhunt.Monitor`: record every step of the
            training in a few numbers, and say what is wrong with the run. Symptoms are logged as warnings (logger
            `nanhunt`), and as `nanhunt/NAME` to the trainer's loggers; validation metrics are taken in. See `monitor`.
        watch: False for the monitor alone.
        options: what else `nanhunt.watch` takes: `stop`, `kinds`, `allow`, `every`, `only`, `skip`, `backward`,
            `compiled`, `scaler`, `capsule`, `max_mb`, `slim`, `ring`.

    Raises:
        UsageError: for an option that does not exist, at once; when the training begins, for a pattern of `only` or
            `skip` that fits no module, and for a compiled module that will have run before the first step that is
            wanted, unless `compiled` says what to do.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> NanHuntCallback:
        _join()
        return super().__new__(cls)


def _join() -> None:
    """Make `NanHuntCallback` a `Callback` of each package that is in use; where none is yet, of the first installed.

    Both packages may be installed where one is used, and the other takes seconds to import.
    """
    used = [name for name in _PACKAGES if sys.modules.get(name) is not None]
    if not used:
        used = [next(name for name, installed in _PACKAGES.items() if find_spec(installed))]
    for name in used:
        base = importlib.import_module(name).Callback
        if base not in NanHuntCallback.__mro__:
            NanHuntCallback.__bases__ = (*NanHuntCallback.__bases__, base)
