"""One test as it runs: what watches it, what it opens itself, what was found."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from .errors import NonFiniteError, UsageError, enabled
from .finding import Finding
from .headroom import Shortage, close
from .pytest_reports import faults, file_name, same, shown
from .pytest_settings import Settings
from .ranges import Ranges, RangesChanged, compared, form_of, parsed, told, written
from .report.files import write_whole

if TYPE_CHECKING:
    from torch import nn

    from .meter import Meter
    from .precision.likeness import Likeness
    from .roots import Roots
    from .watcher import Watch


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a test stands: its file, its name in it, and the folder that messages are relative to."""

    file: Path
    test: str
    root: Path

    def ranges(self, name: str | None) -> Path:
        """The file of ranges of this test, beside it."""
        whole = self.test if name is None else f"{self.test}.{name}"
        return self.file.parent / "ranges" / self.file.stem / f"{file_name(whole)}.txt"

    def shown(self, path: Path) -> str:
        return shown(path, self.root)


class Trial:
    """One run of one test."""

    def __init__(self, settings: Settings, place: Place, *, watched: bool, update: bool) -> None:
        self.settings, self.place, self.update = settings, place, update
        self.asked, self.watched = watched, watched and enabled()
        self.only_warns = self.watched and settings.on_hit == "warn"
        self.hunting: Hunting | None = None  # what the fixture has given out
        self.failure: str | None = None  # of a test that passed by itself
        self.shortage: Shortage | None = None
        self._told: list[Finding] = []
        self._roots: Roots | None = None
        self._meter: Meter | None = None

    @contextmanager
    def running(self) -> Iterator[None]:
        """Around the test's own code.

        Raises:
            NonFiniteError: from inside, or when the last look at an unfinished step finds a fault.
        """
        with ExitStack() as stack:
            if self.settings.headroom_bits is not None and (self.watched or (self.hunting is not None and enabled())):
                from .meter import Meter

                self._meter = stack.enter_context(Meter())
            if self.watched:
                from .roots import Roots

                how = self.settings.on_hit or "raise"
                self._roots = stack.enter_context(Roots(on_hit=how, **self.settings.of_watch()))
            stack.push(self._leave)
            yield

    def _leave(self, *error: Any) -> None:
        if self.hunting is not None:  # a test may ask for the fixture while it runs
            self.hunting.leave(*error)

    def verdict(self) -> str | None:
        """Why a test that has passed has failed after all; None when it has not."""
        found = self._roots.finding if self._roots is not None else None
        bits = self.settings.headroom_bits
        if found is not None and not self.only_warns:
            self.failure = (
                f"{found.title()}\nThe test's own checks have passed; nanhunt watched the models that it called."
            )
        elif self._meter is not None and bits is not None:
            self.shortage = close(self._meter.peaks(), bits, self.settings.dtype, self.settings.allow or ())
            self.failure = self.shortage.title() if self.shortage is not None else None
        return self.failure

    def faults(self, error: BaseException | None) -> list[Finding]:
        """What was found in this test, with what its `error` bears, each fault once, and not those told before."""
        found: list[Finding] = []
        if isinstance(error, NonFiniteError):
            found.append(error.finding)
        elif isinstance(died_of := getattr(error, "nanhunt_finding", None), Finding):
            found.append(died_of)
        if self._roots is not None:
            found += self._roots.findings
        if self.hunting is not None:
            found += self.hunting.findings()
        new = [finding for finding in faults(found) if not any(same(finding, one) for one in self._told)]
        self._told += new
        return new

    def unwatched(self) -> list[str]:
        return self._roots.unwatched if self._roots is not None else []


class Hunting:
    """The fixture `nanhunt`: every public name of the package, with the settings of this test, and `check_ranges`."""

    def __init__(self, trial: Trial) -> None:
        self._trial = trial
        self._watches: list[Watch] = []
        self._hunted: list[Finding] = []
        self._checked: set[Path] = set()
        self.written: list[str] = []  # files of ranges

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module("nanhunt"), name)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *importlib.import_module("nanhunt").__all__})

    def watch(self, model: nn.Module, optimizer: Any = None, scaler: Any = None, **options: Any) -> Watch:
        """`nanhunt.watch` with the settings of this test; what is not closed is closed when the test ends."""
        from .watching import watch

        watched = watch(model, optimizer, scaler, **(self._trial.settings.of_watch() | options))
        self._watches.append(watched)
        return watched

    def hunt(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Finding | None:
        """`nanhunt.hunt`; when the test fails, what it has found is shown and saved with it."""
        from .hunter import hunt

        if self._trial.settings.capsule is not None:
            kwargs = {"capsule": self._trial.settings.capsule} | kwargs
        finding = hunt(step, *args, **kwargs)
        if finding is not None:
            self._hunted.append(finding)
        return finding

    def check_ranges(
        self,
        model: nn.Module,
        step: Callable[..., Any],
        *args: Any,
        dtype: Any = None,
        bits: float = 1.0,
        name: str | None = None,
        **kwargs: Any,
    ) -> Ranges | None:
        """Run `step(*args, **kwargs)` once, and hold the range of each module of `model` against a stored file.

        The file, `ranges/<test file>/<test>.txt` beside the test, has the largest |number| that each module gave
        out and got back in backward. `pytest --nanhunt-update` writes it; it is reviewed and committed like code.
        Seed the test: the same step must give nearly the same numbers on each run.

        Args:
            model: the module that the step runs.
            step: forward, and backward where gradients are to be held too.
            dtype: the dtype whose headroom counts; the setting `dtype` when not given, else float16.
            bits: by so many bits a module's headroom may shrink.
            name: tells several checks of one test apart.

        Returns:
            What was measured; None when nanhunt is switched off.

        Raises:
            RangesChanged: an AssertionError, when headroom has shrunk by more than `bits` or a number no longer
                fits, when modules are new or gone, or when no ranges are stored; it says what to do.
            NonFiniteError: when the step makes a NaN or an Inf.
            UsageError: for arguments that do not fit.
        """
        __tracebackhide__ = True
        form = form_of(dtype or self._trial.settings.dtype or "float16")
        if not callable(step):
            raise UsageError(f"check_ranges needs a function that runs one step, got a {type(step).__name__}")
        if isinstance(bits, bool) or not isinstance(bits, (int, float)) or not 0 <= bits < float("inf"):
            raise UsageError(f"bits={bits!r}: give the bits of headroom that may be lost, 0 or more, such as bits=1.0")
        file = self._trial.place.ranges(name)
        if file in self._checked:
            raise UsageError(f"this test has checked ranges under name={name!r} already: give each check its own name")
        self._checked.add(file)
        for folder in (file.parent.parent, file.parent):
            if folder.exists() and not folder.is_dir():
                shown = self._trial.place.shown(folder)
                raise UsageError(f"{shown} is a file, and ranges are stored in a folder of that name: move it away")
        if not enabled():
            step(*args, **kwargs)
            return None
        from .meter import Meter

        with self.watch(model), Meter(model) as meter:
            step(*args, **kwargs)
        now = Ranges(dtype=form.name, modules=meter.ranges())
        if not now.modules:
            raise UsageError("the step has not called the model, or no module of it gives out floating-point numbers")
        if self._trial.update:
            self._write(now, file)
        elif (failure := self._held(now, file, bits)) is not None:
            raise failure
        return now

    def assert_close_precision(self, model: nn.Module, step: Callable[..., Any], **options: Any) -> Likeness:
        """Fail when `step` computes with less precision than it should: `pytest_plugin.assert_close_precision`."""
        __tracebackhide__ = True
        from .pytest_precision import assert_close_precision

        return assert_close_precision(model, step, **options)

    def _write(self, now: Ranges, file: Path) -> None:
        old = file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""
        shown = self._trial.place.shown(file)
        try:
            before = parsed(old, shown)
        except UsageError:  # none yet, or a merge conflict: it is written anew
            before = None
        text = written(now, before)
        if text != old:
            try:
                write_whole(file, text)
            except OSError as error:
                raise UsageError(f"cannot write the ranges to {shown}: {error.strerror or error}") from None
            self.written.append(shown)

    def _held(self, now: Ranges, file: Path, bits: float) -> RangesChanged | None:
        shown = self._trial.place.shown(file)
        if not file.is_file():
            return RangesChanged(f"no ranges are stored in {shown}: run pytest --nanhunt-update and review the file")
        before = parsed(file.read_text(encoding="utf-8", errors="replace"), shown)
        if before.dtype != now.dtype:
            return RangesChanged(
                f"{shown} was written for {before.dtype}, and the test asks for {now.dtype}: "
                "run pytest --nanhunt-update and review the file"
            )
        comparison = compared(before, now, bits)
        return RangesChanged(told(comparison, shown), comparison) if comparison else None

    # --- the end of the test ------------------------------------------------------------------------

    def findings(self) -> list[Finding]:
        """What the watches and hunts of this test have found, faults or not."""
        return [finding for one in self._watches for finding in one.findings] + self._hunted

    def leave(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Close what is still open, the last one first; `error` is what the test died of, if it did."""
        stopped: Exception | None = None
        for one in reversed(self._watches):
            try:
                one.__exit__(kind, error, trace)
            except Exception as failure:
                stopped = stopped or failure
        if stopped is not None:
            raise stopped
