"""What can go wrong, in words."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .finding import Finding
    from .symptoms.steps import Symptom


class NanhuntError(Exception):
    """Nanhunt was used in a way it cannot serve; the message says what to do instead."""


class UsageError(NanhuntError, ValueError):
    """A bad option, a model that is not a module, a closed watch used again, a file that is no finding."""


class NonFiniteError(FloatingPointError):
    """The deliberate stop: the step made a NaN or an Inf, and `finding` says where.

    The text is the report page, so an uncaught one tells the whole story in the traceback.
    """

    finding: Finding

    def __init__(self, finding: Finding) -> None:
        # torch rebuilds worker exceptions as `type(error)(text)` and falls back to RuntimeError(text) when
        # that fails; an error whose `.finding` is a piece of text would be worse than either.
        if not hasattr(finding, "to_dict"):
            raise TypeError(f"NonFiniteError takes a nanhunt.Finding, got {type(finding).__name__}")
        super().__init__(finding)
        self.finding = finding

    def __str__(self) -> str:
        return str(self.finding)


class NonFiniteWarning(RuntimeWarning):
    """What `on_hit="warn"` says, and what a watch could not look at."""


class SymptomError(RuntimeError):
    """What `Monitor(on_symptom="raise")` stops the training with; `symptom` says what is wrong with the run."""

    symptom: Symptom

    def __init__(self, symptom: Symptom) -> None:
        super().__init__(symptom)
        self.symptom = symptom

    def __str__(self) -> str:
        from .monitor.record import sentence  # the words are loaded when they are wanted

        return sentence(self.symptom)


class SymptomWarning(RuntimeWarning):
    """What a monitor says of a run, once for each symptom."""


def enabled() -> bool:
    """What the switch NANHUNT says: False turns every front door into a no-op."""
    value = os.environ.get("NANHUNT", "1")
    if value not in ("0", "1"):
        raise UsageError(f"NANHUNT={value!r} is not a legal value: use NANHUNT=1 (on, the default) or NANHUNT=0 (off)")
    return value == "1"
