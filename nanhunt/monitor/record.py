"""The record of a run as it grows: the newest steps, their file, and what they say of the run."""

from __future__ import annotations

import copy
import os
import warnings
from collections import deque
from collections.abc import Callable, Iterable

from ..errors import NonFiniteWarning, SymptomError, SymptomWarning
from ..symptoms.course import Course
from ..symptoms.diagnosis import Diagnosis
from ..symptoms.steps import Step, Symptom
from .journal import Journal

OnSymptom = str | Callable[[Symptom], object]

ON_SYMPTOM = ("warn", "record", "raise")


class Record:
    """Takes one step after the other; each symptom is told once.

    Attributes:
        steps: the newest ones, the newest last.
        last: number of the newest one.
        theirs: what the program's own callable, or filter of warnings, has raised, or the deliberate stop.
    """

    def __init__(self, *, ring: int, on_symptom: OnSymptom, journal: Journal | None) -> None:
        self.steps: deque[Step] = deque(maxlen=ring)
        self.last: int | None = None
        self.theirs: Exception | None = None
        self._diagnosis = Diagnosis()
        self._on_symptom, self._journal = on_symptom, journal
        self._told: set[tuple[str, int | None, str]] = set()
        self._ended = False

    @property
    def symptoms(self) -> tuple[Symptom, ...]:
        return tuple(self._diagnosis.symptoms)

    def add(self, step: Step) -> None:
        """Take one step.

        Raises:
            SymptomError: when `on_symptom` is "raise", and it shows a symptom.
            Exception: what the program's own callable raises.
        """
        self.last = step.step if step.step is not None else self.last
        self.steps.append(step)
        if self._journal is not None:
            self._journal.write(step)
        self._tell(self._diagnosis.see(step))

    def end(self) -> None:
        """No more steps come. Raises what `add` does."""
        if self._ended:
            return
        self._ended = True
        if self._journal is not None:
            self._journal.close()
        self._tell(self._diagnosis.end())

    def course(self, source: str) -> Course:
        """The diagnosis so far, as if this were the end; the run may go on."""
        diagnosis = self._diagnosis
        if not self._ended:
            diagnosis = copy.deepcopy(diagnosis)
            diagnosis.end()
        return diagnosis.course(source=source, format="live")

    def complain(self, stacklevel: int) -> None:
        """Say so when the file could not be written to its end."""
        if self._journal is not None and self._journal.failure is not None:
            warnings.warn(
                f"nanhunt could not go on writing {os.fspath(self._journal.path)!r}: {self._journal.failure}. "
                "The steps up to there are in it, and training was not touched.",
                NonFiniteWarning,
                stacklevel=stacklevel + 1,
            )

    def _tell(self, symptoms: Iterable[Symptom]) -> None:
        for symptom in symptoms:
            key = symptom.name, symptom.step, symptom.form
            if key in self._told:
                continue
            self._told.add(key)
            try:
                if self._on_symptom == "warn":
                    warnings.warn(sentence(symptom), SymptomWarning, stacklevel=2)
                elif self._on_symptom == "raise":
                    raise SymptomError(symptom)
                elif callable(self._on_symptom):
                    self._on_symptom(symptom)
            except Exception as theirs:
                self.theirs = theirs
                raise


def sentence(symptom: Symptom) -> str:
    """A symptom in a line: what, where, why, and the first thing to do."""
    where = f" at step {symptom.step}" if symptom.step is not None else ""
    what = symptom.name.replace("_", " ")
    advice = f" First: {symptom.advice[0]}" if symptom.advice else ""
    return f"{what}{where} ({symptom.confidence}): {symptom.cause}{advice}"
