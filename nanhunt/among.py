"""One watch among those of other ranks: what it tells them, when it stops for one of them, and the common verdict."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from . import ranks, tidings
from .errors import NonFiniteError
from .finding import PICTURES, Finding
from .hits import Hits

if TYPE_CHECKING:
    from .observer import Observer


class Among:
    """What a watch has to do with other ranks; nothing at all in a process that trains alone.

    Attributes:
        verdict: what all ranks say was first, once the watch is over; None where nobody has a fault.
    """

    def __init__(self, observer: Observer, hits: Hits, *, own: bool) -> None:
        self.verdict: Finding | None = None
        self._observer, self._hits, self._own = observer, hits, own
        self._tidings: tidings.Tidings | None = None

    def join(self) -> bool:
        """Begin to listen, once there is a process group: a watch may begin before that. True among several ranks."""
        if self._own and self._tidings is None:
            self.share(tidings.open_session())
        return ranks.together()

    def share(self, session: tidings.Tidings | None) -> None:
        """Take part in a session, which others may take part in as well."""
        if session is not None and self._tidings is None:
            self._tidings = session
            session.halts(self._halt)

    def tell(self, finding: Finding) -> None:
        """Let the others know of a fault, at once and without waiting."""
        if self._tidings is not None and finding.handled is None:
            self._tidings.tell(finding, stopping=self._hits.on_hit == "raise")

    # --- stopping for another rank ----------------------------------------------------------------

    def _halt(self, finding: Finding) -> bool:
        """Another rank has stopped. This one does at the next hook: not in the thread that hears of it."""
        if self._hits.on_hit in ("warn", "record"):
            return False
        self._observer.halt = finding
        return True

    def obey(self) -> None:
        """Stop, for another rank has.

        Raises:
            NonFiniteError: with the finding of that rank.
            Exception: what the user's callable raises, which was given it.
        """
        finding, self._observer.halt = self._observer.halt, None
        session = self._tidings
        if finding is None or session is None or session.obeyed:
            return
        session.obeyed = True
        self._hits.pass_on(finding)

    # --- the end ----------------------------------------------------------------------------------

    def settle(self, error: BaseException | None) -> NonFiniteError | None:
        """Wait for the common verdict, when there is a fault on any rank; `error` is what the program leaves by.

        Returns:
            The exception to leave by instead: this rank has failed, or ended, because another one has stopped.
        """
        session = self._tidings
        if session is None:
            return None
        mine = self._hits.first
        if isinstance(error, Exception):
            if mine is not None:
                session.tell(mine, stopping=True)
            elif tidings.broken_off(error):
                session.expect(2.0)
        verdict = session.settle()
        if verdict is None:
            return None
        if mine is not None and verdict.rank == mine.rank:
            pictures = {key: mine.context[key] for key in PICTURES if key in mine.context}
            verdict = dataclasses.replace(verdict, context={**pictures, **verdict.context})
        self.verdict = verdict
        if isinstance(error, NonFiniteError):
            _rewrite(error, verdict, mine)
            return None
        if session.stop is not None and self._hits.on_hit == "raise" and not session.obeyed:
            session.obeyed = True
            return NonFiniteError(verdict)
        return None

    def leave(self) -> None:
        if self._own and self._tidings is not None:
            self._tidings.leave()
            self._tidings = None
        self._own = False


def _rewrite(error: NonFiniteError, verdict: Finding, mine: Finding | None) -> None:
    """Have the exception bear the verdict; a trainer may count other steps than the watch does."""
    told = error.finding
    if mine is not None and told.rank == mine.rank and None not in (told.step, mine.step, verdict.step):
        verdict = dataclasses.replace(verdict, step=(verdict.step or 0) + (told.step or 0) - (mine.step or 0))
    error.finding = verdict
    error.args = (verdict,)
