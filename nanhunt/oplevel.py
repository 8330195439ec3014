"""The op level of a watch: the tracer, which must not see the watch's own looks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch

from . import internals
from .births import Birth
from .lineage import Keep
from .naming import Names
from .tracer import Tracer
from .verdict import Call, Origin


class _Tracer(Tracer):  # type: ignore[no-untyped-call]
    """A tracer that can be told to look away."""

    paused = 0
    used = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.paused:
            return func(*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)


def told(tracer: Tracer, birth: Birth, tensor: torch.Tensor | None = None) -> dict[str, Any]:
    """The fields of a `Finding` for a birth, with its way to the tensor where it was noticed, if there is one."""
    return {
        **tracer.explain(birth),
        "literal": birth.literal,
        "path": tracer.path(birth, tensor) if tensor is not None else [],
        "ledger": dict(tracer.counts),
        "kept": birth.kept,
    }


class OpLevel:
    """Runs a `Tracer` beside the hooks and answers for a bad tensor where it was born."""

    def __init__(
        self,
        names: Names,
        current_call: Callable[[], Call | None],
        on_host_read: Callable[[torch.Tensor, Birth], None],
        keep: Keep | None = None,
    ) -> None:
        self._make = functools.partial(
            _Tracer, names=names, current_call=current_call, on_host_read=on_host_read, keep=keep
        )
        self.tracer = self._make()
        self.failures: list[str] = []
        self._entered = False
        self._around: int | None = None  # modes of the program when the watch began

    def hidden(self, event: Callable[..., Any]) -> Callable[..., Any]:
        """The same event; what it does with tensors is not traced."""

        @functools.wraps(event)
        def quiet(*args: Any) -> Any:
            tracer = self.tracer
            tracer.paused += 1
            try:
                return event(*args)
            finally:
                tracer.paused -= 1

        return quiet

    def follow(self, on: bool) -> bool:
        """Trace from here on, or no more; a step that is not looked at costs nothing. True when it is traced now.

        Where the program has opened a mode since the watch began, ours would be taken off in its place.
        """
        modes = internals.dispatch_modes() - self._entered
        self._around = modes if self._around is None else self._around
        if on and not self._entered and modes <= self._around:
            if self.tracer.used:
                self.failures += self.tracer.failures
                self.tracer = self._make()  # what it knew of memory was true until it looked away
            self.tracer.used = True
            self.tracer.__enter__()
            self._entered = True
        elif not on:
            self.leave()
        return self._entered

    def leave(self) -> None:
        if self._entered:
            self._entered = False
            internals.take_mode_off(self.tracer)
            internals.eager.drop()

    def all_failures(self) -> list[str]:
        """What went wrong inside the tracers, in words."""
        return [*self.failures, *self.tracer.failures]

    def begin(self, inputs: Iterable[tuple[str, torch.Tensor]], loss_scale: float | None) -> None:
        """The model is called from outside: these are its inputs."""
        self.tracer.loss_scale = loss_scale
        for name, tensor in inputs:
            self.tracer.note_input(tensor, name)

    def died_of(self) -> Origin | None:
        """The birth behind what the op that has just raised was given."""
        birth = self.tracer.died_of()
        if birth is None:
            return None
        origin = Origin(birth.phase, birth.call, birth.kinds, birth.tensor)
        origin.facts["op_level"] = told(self.tracer, birth)
        return origin

    def fields(self, tensor: torch.Tensor, birth: Birth | None = None) -> dict[str, Any] | None:
        """The fields of a `Finding` for the birth behind a bad tensor; None when the tracer does not know it."""
        birth = birth or self.tracer.birth_of(tensor)
        return told(self.tracer, birth, tensor) if birth is not None else None
