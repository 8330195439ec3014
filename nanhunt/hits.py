"""What becomes of a fault: raised, warned of, recorded, or handed to a callable."""

from __future__ import annotations

import fnmatch
import warnings
from collections.abc import Callable

from .errors import NonFiniteError, NonFiniteWarning
from .finding import Finding
from .options import OnHit, Options
from .verdict import Origin

KEPT = 100  # findings that are kept
_SAME = 3  # times that the same bad state is recorded or warned of


class Hits:
    """The findings of one watch.

    `inner` gives those of the watches that were entered later and cover modules of this one: of several that
    would raise, the innermost does.
    """

    def __init__(self, options: Options, inner: Callable[[], list[Hits]]) -> None:
        self.findings: list[Finding] = []
        self.first: Finding | None = None  # the first that is a fault
        self.on_hit: OnHit = options.on_hit
        self._times: dict[tuple[str | None, ...], int] = {}
        self.theirs: Exception | None = None  # what the user's own callable, or filter of warnings, has raised
        self._allow, self._kinds, self._inner = options.allow, options.kinds, inner

    def counts(self, origin: Origin) -> bool:
        """False for what the user allows."""
        known = origin.facts.get("op_level")
        if known is not None and known["module"] is not None:
            path = known["module"]
        else:
            path = origin.call.path if origin.call is not None else origin.owner or ""
        if any(fnmatch.fnmatchcase(path, pattern) for pattern in self._allow):
            return False
        return not origin.carried.isdisjoint(self._kinds)

    def keep(self, finding: Finding) -> None:
        if finding.handled is None and self.first is None:
            self.first = finding
        if len(self.findings) < KEPT:
            self.findings.append(finding)

    def act(self, finding: Finding) -> None:
        """Keep a fault, and do what was asked for.

        Raises:
            NonFiniteError: when `on_hit` is "raise".
            NonFiniteWarning: when `on_hit` is "warn" and the user's filters turn warnings into errors.
            Exception: whatever the user's callable raises.
        """
        if finding.phase == "state" and not callable(self.on_hit) and self.on_hit != "raise":
            key = (finding.phase, finding.module, finding.kind, finding.tensor, finding.op)
            self._times[key] = self._times.get(key, 0) + 1
            if self._times[key] > _SAME:
                return  # a poisoned weight shows in every later step
        self.keep(finding)
        inner = self._inner() if self.on_hit == "raise" else []
        if not any(one.on_hit == "raise" for one in inner):
            for one in inner:  # they will not get to see it
                one.keep(finding)
            self.pass_on(finding)

    def pass_on(self, finding: Finding) -> None:
        """Do what was asked for, with a fault of this rank or of another one that has stopped; raises as `act` does."""
        if callable(self.on_hit) or self.on_hit == "warn":
            try:
                (self.on_hit if callable(self.on_hit) else _warn)(finding)
            except Exception as theirs:
                self.theirs = theirs
                raise
        elif self.on_hit == "raise":
            raise NonFiniteError(finding)


def _warn(finding: Finding) -> None:
    file, _, line = (finding.line or "").rpartition(":")
    if line.isdigit():  # the place that matters, not the one in here
        warnings.warn_explicit(str(finding), NonFiniteWarning, file, int(line))
    else:
        warnings.warn(str(finding), NonFiniteWarning, stacklevel=3)
