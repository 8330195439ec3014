"""Front door: `hunt`, which runs one step, and once more at op level when it fails."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from . import ranks
from .capsule.catch import Catch, Target
from .compiled import dead, has_compiled
from .errors import NonFiniteError, UsageError, enabled
from .finding import Finding
from .leaves import leaves
from .options import capsule_options, trained_with
from .replay import Snapshot
from .report.files import MAX_MB
from .watcher import outer_watches
from .watching import watch

# Classes whose protocol between ranks has a state that a snapshot of parameters and buffers does not hold.
_SHARDED = {"FullyShardedDataParallel", "FSDPModule", "DeepSpeedEngine", "PipelineStage"}

# Of these no step dies because of a NaN.
_HOPELESS = (UsageError, StopIteration, MemoryError, ImportError, torch.OutOfMemoryError)


def hunt(
    step: Callable[..., Any],
    *args: Any,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    scaler: Any = None,
    restore: Iterable[Any] = (),
    capsule: str | os.PathLike[str] | None = None,
    max_mb: float = MAX_MB,
    slim: bool = False,
    **kwargs: Any,
) -> Finding | None:
    """Run `step(*args, **kwargs)` once, and name what makes the first NaN or Inf, if it makes one.

    The step runs under a watch of every module. When a fault is found, everything the step has consumed is put
    back, and the same step runs again, to its end, with every op watched; its finding has the op, the line and
    the operands. Either way model, optimizer, scaler, schedulers, batch and random numbers are afterwards, bit
    for bit, as one plain call of `step` would have left them; also when the step dies of the NaN it made.

    Args:
        step: forward, loss, backward, optimizer step: what belongs to one step. What it returns is looked at too.
        model: the module whose insides are watched.
        optimizer, scaler: found as they are used when not given.
        restore: what else the step changes: modules (an EMA copy, a discriminator), random generators, and
            anything with `state_dict()` and `load_state_dict()`.
        capsule: a folder, made when it is needed, for a capsule of the fault, which `nanhunt replay` runs again: the
            culprit's inputs as they were before it ran, the gradient that came back to it, the operands of the op.
            Where the op level names another culprit than the first run did, the step runs a third time for it.
        max_mb: megabytes that a capsule may have.
        slim: keep the failing samples alone, where each result depends on one sample.

    Returns:
        None for a healthy step. Else a `Finding`; its `context` tells under `"reproduced"` whether the second run
        has failed too, under `"second_run"` why there was none, under `"data"` that the step drew another batch
        for it, under `"exception"` what the step died of.

    Raises:
        UsageError: for arguments that do not fit, saying what would.
        Exception: what the step itself raises, when nothing bad was found in it, in the second run either.
    """
    watched_model = _checked(step, model, optimizer, scaler, restore)
    wanted = capsule_options(capsule, max_mb, slim)
    if not enabled():
        step(*args, **kwargs)
        return None
    return _Hunt(
        functools.partial(step, *args, **kwargs), watched_model, optimizer, scaler, tuple(restore), wanted
    ).run()


class _Run:
    """What one run of the step has shown."""

    def __init__(self) -> None:
        self.finding: Finding | None = None
        self.error: Exception | None = None  # that nothing explains: for the caller
        self.died: str | None = None  # of what the step died, in words
        self.batch: str | None = None  # hash of what the model was first called with
        self.step = 0  # in which the model was called last
        self.catch: Catch | None = None  # where a capsule was asked for


class _Hunt:
    def __init__(
        self,
        step: functools.partial[Any],
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        scaler: Any,
        restore: tuple[Any, ...],
        wanted: dict[str, Any],
    ) -> None:
        self._wanted = wanted  # of a capsule
        self._step, self._model, self._optimizer, self._scaler = step, model, optimizer, scaler
        self._together = ranks.together()
        self._compiled = has_compiled(model)
        self._eager = False  # in its first run too
        self._snapshot = Snapshot(model, optimizer, scaler, restore, args=step.args, kwargs=step.keywords)

    def run(self) -> Finding | None:
        with self._snapshot:
            first = self._once("module", self._stop)
        again, why_not = self._decide(first)
        if not again:
            if first.error is not None:
                raise first.error
            told = first.finding and self._told(first.finding, first, second_run=f"not run: {why_not}")
            return told and self._with_capsule(told, first)
        if first.error is not None:
            traceback.clear_frames(first.error.__traceback__)  # else the first run's tensors live on through the second
        self._snapshot.restore()
        second = self._once("op", "record", self._target(first.finding))
        if self._another(first.finding, second.finding):  # the culprit is known now
            self._snapshot.restore()
            third = self._once("op", "record", self._target(second.finding))
            second = third if third.finding is not None and third.catch is not None else second
        found = second.finding or first.finding
        if found is None:  # the step died of something else, or this rank only went along with another
            error = second.error or first.error
            if error is not None:
                raise error
            return None
        data = None
        if second.batch is None and first.batch is not None:
            data = "the step draws its own data, it seems: the second run did not call the model"
        elif second.batch != first.batch:
            data = "the step draws its own data: the second run had another batch"
        told = self._told(found, second, reproduced=second.finding is not None, data=data)
        return self._with_capsule(told, second if second.finding is not None else first)

    # --- the capsule ------------------------------------------------------------------------------

    def _target(self, finding: Finding | None) -> Target | None:
        """The call whose inputs a capsule wants."""
        if self._wanted["capsule"] is None or finding is None or finding.module is None or finding.call is None:
            return None
        return Target(path=finding.module, nth=finding.call, step=finding.step or 0)

    def _another(self, first: Finding | None, second: Finding | None) -> bool:
        """True when a capsule is wanted, and its inputs were taken of a module that is not the culprit."""
        wanted = self._target(second)
        return wanted is not None and wanted != self._target(first) and not self._together

    def _with_capsule(self, finding: Finding, run: _Run) -> Finding:
        if run.catch is None or finding.handled is not None:
            return finding
        from .capsule.writing import kept

        return kept(
            finding,
            run.catch.found or run.catch.parts(finding, None),
            self._wanted["capsule"],
            slim=self._wanted["slim"],
        )

    def _stop(self, finding: Finding) -> None:
        """Stop the first run where it stands, if there is a way back from there."""
        if not self._together and not self._snapshot.gaps():
            raise NonFiniteError(finding)

    def _decide(self, first: _Run) -> tuple[bool, str]:
        """Whether the step runs again, and why not. All ranks get the same answer."""
        if not self._together:
            if first.finding is None and (first.error is None or isinstance(first.error, _HOPELESS)):
                return False, "nothing was found"
            obstacle = self._obstacle()
            return obstacle is None, obstacle or ""
        word = self._obstacle() or first.died or ("clean" if first.finding is None else "fault")
        return ranks.agree(word)

    def _obstacle(self) -> str | None:
        """Why the state before the step cannot be had back."""
        if self._together:
            for module in self._model.modules():
                if {cls.__name__ for cls in type(module).__mro__} & _SHARDED:
                    return f"{type(module).__name__} spreads its parameters over the ranks"
        gaps = self._snapshot.gaps()
        if not gaps:
            return None
        some = ", ".join(gaps[:3]) + (", ..." if len(gaps) > 3 else "")
        return f"the step has written to {some} before a copy was taken: pass restore=(model,)"

    def _once(self, detail: str, on_hit: Any, target: Target | None = None) -> _Run:
        """Run the step under a watch. It may die of what it has made: a finding is then worth more than the error."""
        run = _Run()
        if self._wanted["capsule"] is not None:
            run.catch = Catch(most=int(self._wanted["max_mb"] * 1e6), ring=1 if detail == "op" else 0, target=target)
        with outer_watches(looking=detail != "op"):
            self._eager = self._eager or dead(self._model) is not None
            compiled = "eager" if self._eager else "error"
            watched = watch(
                self._model,
                self._optimizer,
                self._scaler,
                on_hit=on_hit,
                detail=detail,
                compiled=compiled,
                _catch=run.catch,
            )
            try:
                with watched:
                    value = self._step()
                    if inspect.isgenerator(value) or inspect.iscoroutine(value):
                        raise UsageError(
                            f"the step returned a {type(value).__name__}, so nothing has run yet: "
                            "give hunt a function that runs it"
                        )
                    watched.returned(_numbers(value, ""))
                    del value
            except Exception as error:
                run.finding = watched.finding
                if isinstance(error, NonFiniteError):
                    run.finding = run.finding or error.finding  # of a watch that the step itself has opened
                else:
                    run.died = f"{type(error).__name__}: {error}".split("\n")[0][:200]
                    run.error = error if run.finding is None else None
            else:
                run.finding = watched.finding
        run.batch, run.step = watched.first_batch_hash(), watched.step_of_last_call
        return run

    def _told(self, finding: Finding, run: _Run, **facts: Any) -> Finding:
        """The finding, with what the runs have shown."""
        context = {**finding.context, **{key: fact for key, fact in facts.items() if fact is not None}}
        if run.died is not None:
            context["exception"] = run.died
        if self._compiled and self._eager:
            context["compiled"] = (
                "the model was run eagerly: it was compiled before the hunt, and no check can be added to compiled code"
            )
        elif self._compiled and "reproduced" in facts:
            context["compiled"] = "found inside the compiled graph; the second run, which explains it, ran eagerly"
        if self._snapshot.notes:
            context["not_restored"] = self._snapshot.notes
        why = finding.why or ""
        if facts.get("reproduced") is False:
            because = (
                "it had another batch" if facts.get("data") else "it is not deterministic, or has a state of its own"
            )
            if self._compiled and not self._eager and not facts.get("data"):
                because = "it ran eagerly, and compiled code may round otherwise"
            why = f"{why} Not reproduced: run a second time, the step did not fail ({because}).".strip()
        step = finding.step
        if step is not None:  # what is read after the optimizer step still belongs to it
            step = min(step, run.step)
        return dataclasses.replace(finding, step=step, context=context, why=why or None)


# --- what a step returns --------------------------------------------------------------------------


def _numbers(value: Any, path: str, depth: int = 0) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors, arrays and floats in what a step returns."""
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, float):
        yield path, torch.tensor(value, dtype=torch.float64)
    elif depth < 4 and isinstance(value, Mapping):
        for key, item in value.items():
            yield from _numbers(item, f"{path}[{key!r}]", depth + 1)
    elif depth < 4 and isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            yield from _numbers(item, f"{path}[{i}]", depth + 1)
    elif hasattr(value, "__array__") and getattr(getattr(value, "dtype", None), "kind", "") == "f":
        yield path, torch.as_tensor(value.astype("float64"))
    else:
        for inner, tensor in leaves(value, deep=True):
            yield path + inner, tensor


# --- arguments ------------------------------------------------------------------------------------


def _checked(step: Any, model: Any, optimizer: Any, scaler: Any, restore: Any) -> nn.Module:
    if not callable(step):
        raise UsageError(
            f"hunt needs a function that runs one step, got a {type(step).__name__}: "
            "nanhunt.hunt(step, batch, model=model)"
        )
    if model is None:
        raise UsageError("hunt needs to know what to watch: nanhunt.hunt(step, batch, model=model)")
    if not isinstance(model, nn.Module):
        raise UsageError(f"model is a {type(model).__name__}: pass the torch.nn.Module that the step runs")
    trained_with(optimizer, scaler)
    if not isinstance(restore, (list, tuple, set, frozenset)):
        raise UsageError(f"restore is a {type(restore).__name__}: give a tuple of objects, such as restore=(ema,)")
    return model
