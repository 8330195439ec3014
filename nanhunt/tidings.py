"""What ranks tell each other of their faults: through the store they met in, by threads, never by a collective."""

from __future__ import annotations

import itertools
import json
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import torch

from . import ranks
from .consensus import consent
from .finding import PICTURES, Finding

PATIENCE = 5.0  # seconds that a rank waits for the words of the others, once there is a fault
GRACE = 10.0  # seconds that a rank may wait in a collective which the rank that has stopped will never join
_CALL = 5.0  # seconds for one answer of the store
_LINGER = 2.0  # seconds that the rank with the store stays for the others to read
_FOREVER = timedelta(days=365)
_LARGE = 64_000  # bytes of a finding that is sent with its pictures

_nth = itertools.count()
# Stores, and connections of ours to them that nobody uses at the moment. The program's store is its own to let go.
_lines: list[tuple[weakref.ref[Any], Any]] = []


class Tidings:
    """One session: what is told while a watch runs, or all those of a program under the launcher.

    Ranks open their sessions in the same order, as they call collectives in the same order. While nothing is found,
    one thread of each rank waits in the store for a word, and nothing is sent. The rank that has a fault writes it
    down and wakes all; `settle` then makes one verdict of what all have said.

    Attributes:
        stop: the finding of another rank that has stopped because of it; None while none has.
        woken: True once any rank has had a fault.
        speaker: which rank prints the verdict, once there is one.
    """

    def __init__(self, store: Any, rank: int, world: int) -> None:
        self._store, self._room = weakref.ref(store), f"nanhunt/session/{next(_nth)}/"
        self.rank, self.world = rank, world
        self.stop: Finding | None = None
        self.speaker: int | None = None
        self.woken = self.obeyed = False
        self._told = self._stopping = self._closing = False
        self._gone = False  # the store, with the process that kept it: from then on each rank is on its own
        self._halts: list[Callable[[Finding], bool]] = []
        self._main = threading.get_ident()
        self._teller: threading.Thread | None = None
        self._decided: tuple[Finding | None] | None = None
        self._line, self._client = _connected(store), _connected(store)
        self._client.set_timeout(timedelta(seconds=_CALL))
        self._listener = threading.Thread(target=self._listen, args=(self._line,), daemon=True, name="nanhunt tidings")
        self._listener.start()

    # --- telling ----------------------------------------------------------------------------------

    def tell(self, finding: Finding, *, stopping: bool) -> None:
        """Let the other ranks know of a fault of this one; returns at once, so that a hook may call it.

        Only the first fault of a session is told, and that the rank stops because of it.
        """
        if self._told and (self._stopping or not stopping):
            return
        self._told, self._stopping = True, self._stopping or stopping
        before = self._teller
        # Not a daemon: python waits for it at its end, so that a rank that dies of this still tells why.
        teller = threading.Thread(target=self._post, args=(finding, stopping, before), name="nanhunt teller")
        try:
            teller.start()
        except RuntimeError:  # python is at its end, or there is no room for a thread
            return
        self._teller = teller

    def _post(self, finding: Finding, stopping: bool, before: threading.Thread | None) -> None:
        try:
            if before is not None:
                before.join(_CALL)
            store = self._client
            store.set(self._key("fault", self.rank), _packed(finding))
            others = list(range(self.world))
            if stopping:
                store.set(self._room + "stopped", str(self.rank))
                _set_all(store, [self._key("stop", rank) for rank in others])
            # Whoever is first wakes all; should it be killed over that, the next one does.
            waker = store.compare_set(self._room + "waker", "", str(self.rank)).decode() == str(self.rank)
            if not waker and _comes(store, [self._key("wake", self.rank)], time.monotonic() + 1.0):
                return
            _set_all(store, [self._key("wake", rank) for rank in others])
        except Exception:
            self._gone = True

    # --- hearing ----------------------------------------------------------------------------------

    def halts(self, halt: Callable[[Finding], bool]) -> None:
        """Have `halt` called, in another thread, when another rank stops; True from it: this one will, too."""
        self._halts.append(halt)
        if self.stop is not None:
            halt(self.stop)

    def expect(self, seconds: float) -> None:
        """A collective has failed: if that is because another rank has stopped, its word comes any moment."""
        deadline = time.monotonic() + seconds
        while self.stop is None and self._listener.is_alive() and time.monotonic() < deadline:
            time.sleep(0.02)

    def _listen(self, store: Any) -> None:
        try:
            store.wait([self._key("wake", self.rank)], _FOREVER)
            if self._closing:
                return
            self.woken = True
            store.set(self._key("here", self.rank), "1")
            store.wait([self._key("stop", self.rank)], _FOREVER)
            if self._closing:
                return
            who = int(store.get(self._room + "stopped"))
            if who == self.rank:
                return
            self.stop = Finding.from_json(store.get(self._key("fault", who)))
            obeys = [halt(self.stop) for halt in self._halts]
        except Exception:
            self._gone = True
            return
        if any(obeys):
            self._stand_by()

    def _stand_by(self) -> None:
        """See that this rank comes out of a collective which the rank that has stopped will never join."""
        waits: Any = None
        since = time.monotonic()
        aborted = False
        while not (self._closing or self.obeyed):
            time.sleep(0.25)
            now = _collective_of(self._main)
            if now is None or now != waits:
                waits, since = now, time.monotonic()
            elif time.monotonic() - since > GRACE:
                if aborted:  # gloo does not let go of a collective before the other process has gone
                    print(f"{self.stop}\n\nnanhunt [rank{self.rank}]: {_ENDED}", file=sys.stderr, flush=True)
                    os._exit(1)
                aborted, since = True, time.monotonic() - GRACE / 2
                _abort()

    # --- the verdict ------------------------------------------------------------------------------

    def settle(self, patience: float | None = None) -> Finding | None:
        """The verdict over all ranks, the same on each that asks; None when there is no fault anywhere.

        It waits for the words of the others, `patience` seconds at most, so call it where no other rank waits for
        this one: never in a hook.
        """
        if self._decided is not None:
            return self._decided[0]
        if not self._told and not self.woken:
            return None
        patience = PATIENCE if patience is None else patience
        try:
            if self._teller is not None:
                self._teller.join(patience)
            if not self._gone:
                self._decided = (self._settled(self._client, time.monotonic() + patience),)
        except Exception:
            self._gone = True
        if self._gone:  # what was heard before that is all there is
            self._decided = (self.stop,)
        return self._decided[0] if self._decided is not None else None

    def _settled(self, store: Any, deadline: float) -> Finding | None:
        store.set(self._key("here", self.rank), "1")
        store.set(self._key("final", self.rank), "1")
        decision = self._room + "decision"
        clerk = store.compare_set(self._room + "clerk", "", str(self.rank)).decode()
        if clerk == str(self.rank) or not _comes(store, [decision], deadline + 1.0):
            said = store.compare_set(decision, "", self._gathered(store, deadline))
        else:
            said = store.get(decision)
        told = json.loads(said)
        store.set(self._key("read", self.rank), "1")
        if self.rank == 0:  # whose process keeps the store, as a rule: it does not end before the others have read
            _comes(store, [self._key("read", rank) for rank in told["here"]], time.monotonic() + _LINGER)
        self.speaker = told["speaker"]
        return Finding.from_dict(told["verdict"]) if told["verdict"] is not None else None

    def _gathered(self, store: Any, deadline: float) -> str:
        """One verdict of what all ranks have said until now, or say before the deadline."""
        everybody = range(self.world)
        _comes(store, [self._key("here", rank) for rank in everybody], deadline)
        read: dict[int, Finding] = {}
        self._read(store, read)
        said = consent({rank: [finding] for rank, finding in read.items()}, world=self.world)
        first = said.verdict
        made = first is not None and first.context.get("ranks", {}).get("first") is not None
        if not made or not store.check([self._room + "stopped"]):
            # Whoever else has a fault is about to tell it, or leaves its watch without; not so where a rank that has
            # made it stops: the others may wait for it in a collective.
            _comes(store, [self._key("final", rank) for rank in everybody], deadline)
            self._read(store, read)
        here = [rank for rank in everybody if rank in read or store.check([self._key("here", rank)])]
        words = {rank: [read[rank]] if rank in read else [] for rank in here}
        verdict = consent(words, world=self.world).verdict
        speaker = verdict.rank if verdict is not None and verdict.rank in here else self.rank
        written = verdict.to_dict() if verdict is not None else None
        return json.dumps({"verdict": written, "speaker": speaker, "here": here})

    def _read(self, store: Any, read: dict[int, Finding]) -> None:
        for rank in range(self.world):
            if rank not in read and store.check([self._key("fault", rank)]):
                read[rank] = Finding.from_json(store.get(self._key("fault", rank)))

    # --- life -------------------------------------------------------------------------------------

    def leave(self) -> None:
        """The session is over, and with it the thread that listens. Whoever has a fault later need not wait for us."""
        self._closing = True
        self._halts.clear()
        try:
            if self._listener.is_alive() and not self._gone:
                _set_all(self._client, [self._key(what, self.rank) for what in ("here", "final", "wake", "stop")])
        except Exception:
            pass
        self._listener.join(_CALL)
        if not self._listener.is_alive():
            _lines.extend((self._store, line) for line in (self._line, self._client))

    def _key(self, what: str, rank: int) -> str:
        return f"{self._room}{what}/{rank}"


_ENDED = "this rank waited in a collective that the rank which has stopped will not join, so the process ends here"


def open_session() -> Tidings | None:
    """A new session; None where this process trains alone, or its store cannot be used beside the program."""
    if not ranks.together():
        return None
    try:
        store = ranks.store()
        if store is None or not hasattr(store, "clone"):
            return None
        return Tidings(store, ranks.rank() or 0, torch.distributed.get_world_size())
    except Exception:  # a store that cannot be cloned: each rank is on its own
        return None


def broken_off(error: BaseException) -> bool:
    """True for the failure of a collective: the process at its other end may have stopped."""
    if isinstance(error, getattr(torch.distributed, "DistError", ())):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error) for word in ("gloo", "NCCL", "process group"))


def _connected(store: Any) -> Any:
    """A connection of our own: that of the program is held for as long as it waits for anything.

    It is made while the process that keeps the store is there. A new one, once that has gone, would be waited for
    as long as torch waits for a job to begin.
    """
    _lines[:] = [one for one in _lines if one[0]() is store]
    return _lines.pop()[1] if _lines else store.clone()


def _packed(finding: Finding) -> str:
    text = finding.to_json()
    if len(text) <= _LARGE:
        return text
    context = {key: value for key, value in finding.context.items() if key not in PICTURES}
    return Finding.from_dict({**finding.to_dict(), "context": context}).to_json()


def _set_all(store: Any, keys: list[str]) -> None:
    try:
        store.multi_set(keys, ["1"] * len(keys))
    except (RuntimeError, NotImplementedError):  # a store without it
        for key in keys:
            store.set(key, "1")


def _comes(store: Any, keys: Iterable[str], deadline: float) -> bool:
    """Ask until all keys are there, or the time is over. A wait with a limit would have torch complain at its end."""
    wanted, pause = list(keys), 0.005
    while not store.check(wanted):
        if time.monotonic() > deadline:
            return False
        time.sleep(pause)
        pause = min(2 * pause, 0.25)
    return True


def _collective_of(thread: int) -> tuple[int, int] | None:
    """Where the thread stands, when that is inside a collective or a backward, which may wait in one."""
    frame = sys._current_frames().get(thread)
    if frame is None:
        return None
    name = frame.f_globals.get("__name__", "")
    if name.startswith("torch.distributed") or name in ("torch.autograd.graph", "torch.autograd", "torch._ops"):
        return id(frame), frame.f_lasti
    return None


def _abort() -> None:
    """Break off what the process group does: NCCL then lets go of the collective that waits."""
    abort = getattr(torch.distributed.distributed_c10d, "_abort_process_group", None)
    try:
        if abort is not None and torch.distributed.get_backend() != "gloo":
            abort()
    except Exception:
        pass
