"""The monitor of somebody else's training: from its first step to its last, in the trainer's own numbers."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import nn

from ..errors import SymptomError, SymptomWarning
from ..monitor.front import Monitor
from ..monitor.record import ON_SYMPTOM, sentence
from ..monitor.terms import checked, options_of
from ..symptoms.steps import Symptom
from .span import bare

_log = logging.getLogger("nanhunt")
# What trainers put among their metrics, and is none.
_TIMES = ("epoch", "step", "_runtime", "_per_second", "_jit_compilation_time", "_model_preparation_time")


class Recording:
    """Makes a monitor when a training begins and takes it off when it ends, however it ends.

    A symptom is logged as a warning (logger `nanhunt`) and told to the trainer, whatever `on_symptom` asks for
    besides.

    Args:
        asked: None or False for no monitor; else True, a file for the record, or a dict with options of `Monitor`.

    Attributes:
        monitor: that of the training that runs, or of the last one.

    Raises:
        UsageError: for an option that does not exist, or a value that is not legal, before any training.
    """

    def __init__(self, asked: Any) -> None:
        self.monitor: Monitor | None = None
        self._running = False
        self._tell: Callable[[Symptom], object] = lambda symptom: None
        self._options = None if asked is None or asked is False else options_of(asked)
        if self._options is not None:
            given = {"every": 1, "sample": 1, "ring": 1, "on_symptom": "record", "hold": False, "hunt": False}
            given |= {name: value for name, value in self._options.items() if name in given}
            checked(nn.Module(), None, None, **given)

    def open(self) -> None:
        """A training begins; one that was left without a word is over."""
        self.close()
        self.monitor = None

    def begin(
        self,
        model: nn.Module,
        optimizers: Iterable[Any],
        now: Callable[[], int],
        *,
        autocast: str | None = None,
        tell: Callable[[Symptom], object] = lambda symptom: None,
    ) -> None:
        """A step begins.

        Args:
            model: what is trained.
            optimizers: those of the trainer, which a library may have wrapped.
            now: gives the trainer's count of steps that are done.
            autocast: dtype of the forward, where the trainer knows it.
            tell: gets each symptom.
        """
        if self._options is None or self._running:
            return
        self._tell, self._running = tell, True
        found = tuple(one for one in map(bare, optimizers) if one is not None)
        options = {**self._options, "on_symptom": self._symptom, "_number": now}
        self.monitor = Monitor(model, found, **options)
        self.monitor.forward_in(autocast)

    def batch(self, batch: Any) -> None:
        """What the next step is made of, where the trainer calls no module with it."""
        if self._running and self.monitor is not None:
            self.monitor.handed(batch)

    def metrics(self, metrics: Mapping[str, Any]) -> None:
        """Validation metrics of the trainer; what is no finite or bad number of one element is left out."""
        if not self._running or self.monitor is None:
            return
        numbers: dict[str, float] = {}
        for name, value in metrics.items():
            if any(name == word or name.endswith(word) for word in _TIMES) or isinstance(value, bool):
                continue
            try:
                numbers[str(name)] = float(value)
            except (TypeError, ValueError, RuntimeError):
                continue
        if numbers:
            self.monitor.log(metrics=numbers)

    def close(self) -> None:
        """The training is over. What was recorded stays."""
        if not self._running:
            return
        self._running = False
        assert self.monitor is not None
        try:
            self.monitor.remove()
        finally:
            self._tell = lambda symptom: None  # the trainer's own holds it

    def __getstate__(self) -> dict[str, Any]:
        """What a copy takes along: what was asked for."""
        return {"_options": self._options}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(None)  # type: ignore[misc]
        self._options = state["_options"]

    def _symptom(self, symptom: Symptom) -> None:
        _log.warning("%s", sentence(symptom))
        self._tell(symptom)
        assert self._options is not None
        wanted = self._options.get("on_symptom", "record")
        if wanted == "raise":
            raise SymptomError(symptom)
        if wanted == "warn":
            warnings.warn(sentence(symptom), SymptomWarning, stacklevel=2)
        elif wanted not in ON_SYMPTOM:
            wanted(symptom)
