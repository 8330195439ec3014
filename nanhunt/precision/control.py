"""Front door: `compare`, which runs one step with two precisions and names the module where they part."""

from __future__ import annotations

import contextlib
import functools
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from .. import hooks, ranks
from ..errors import UsageError, enabled
from ..options import made, trained_with
from ..replay import Snapshot
from .alike import form
from .alone import Alone, Yardstick, own_errors
from .boundaries import Boundaries, Key
from .figures import MULTIPLE, Call, Figures, Own, Parameter
from .likeness import Likeness
from .passes import Enough, First, Pass, Second
from .settings import Setting, parse, put_on
from .strict import Sums, Tape

_ROOM = 4 << 30


def compare(
    model: nn.Module,
    step: Callable[..., Any],
    *,
    a: Any = "float32",
    b: Any = "float16",
    batches: Iterable[Any] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    scaler: Any = None,
    restore: Iterable[Any] = (),
    own: bool = True,
    room: int = _ROOM,
) -> Likeness:
    """Run the same step with two precisions, and say where they part: a control run.

    Both runs see the same parameters, batch and random numbers. Each ends where an optimizer is about to move the
    model, and afterwards everything is as it was before, bit for bit: model, gradients, optimizer, scaler, random
    numbers. Then the model runs twice more, forward only, for what each module's own code loses: once with `b`, every
    module reading what it read in the first run; once with `a`, reading that rounded once to the formats of `b`. A
    module parts when its own error is more than 2.5 times what such rounding explains.

    Args:
        model: the module that the step calls.
        step: forward, and backward where gradients are to be compared; called with one of the `batches`, or with
            nothing. It must run the model by itself (`lambda batch: model(**batch)`), not a copy of it.
        a, b: what to compute in, the reference first: "float32", "float64", "float16" or "bfloat16" cast the model
            and what it is handed; "autocast:float16" opens autocast; "tf32", "no_tf32", "fp16_reduction",
            "bf16_reduction" (each with "no_") turn switches of torch.backends; "sdpa:math" (flash, efficient, cudnn)
            names a backend; "compiled" compiles the model, which is then compared as a whole; "as_is" changes
            nothing. Several are joined by commas: "float32,tf32". A `torch.dtype` or a second model may be given too.
            float32 and float64 are meant in earnest: where the code casts to less, autocast included, nothing is
            cast ("float32,casts" leaves such casts alone).
        batches: what to call the step with, one after the other, each from the same state.
        optimizer, scaler: what the step uses, as far as known; both are found as they are used. Gradients are
            compared without the loss scale that each run has used.
        restore: what else the step changes, as in `hunt`.
        own: False leaves the two further runs out: similarities only, no `first`.
        room: bytes of the host's memory for the numbers of the first run (4 GiB): inputs, outputs and gradients of
            every call of one batch. What no longer fits is compared by 65 536 numbers of each tensor, and its own
            error is not told. Beside these there are up to two more copies of the parameters meanwhile.

    Returns:
        A `Likeness`: `.first` is the path of the first module that parts, or None; `.agree` says that precision is
        not the cause.

    Raises:
        UsageError: for arguments that do not fit, for a step that does not call the model or calls it with another
            batch each time, for a model that has no numbers yet (lazy, or on the meta device), with a process group.
        Exception: what the step raises in the first run. What it raises in the second is told in `.died`.
    """
    setting_a, setting_b, handed = _checked(model, step, a, b, batches, optimizer, scaler, room)
    if not enabled():
        return Likeness(a=setting_a.label, b=setting_b.label, notes=("switched off by NANHUNT=0",))
    others = [one.model for one in (setting_a, setting_b) if one.model is not None and one.model is not model]
    control = _Control(model, step, setting_a, setting_b, scaler, own=own, room=room)
    leaves = [(p, p.grad) for one in (model, *others) for p in one.parameters()]
    tied = tuple(batch for batch in handed or ())
    snapshot = Snapshot(model, optimizer, scaler, (*restore, *others), args=tied)
    for at, batch in enumerate(handed if handed is not None else (_NONE,)):
        control.batch(at, batch, snapshot, leaves)
    return control.likeness(1 if handed is None else len(handed), snapshot.notes)


_NONE: Any = object()


class _Control:
    def __init__(
        self, model: nn.Module, step: Callable[..., Any], a: Setting, b: Setting, scaler: Any, *, own: bool, room: int
    ) -> None:
        self._model, self._step, self._a, self._b = model, step, a, b
        self._own, self._room = own, room
        self._kind = next((p.device.type for p in model.parameters()), "cpu")
        # GradScalers tell when they scale; of another class, only what it holds is known.
        foreign = scaler is not None and not isinstance(scaler, torch.amp.GradScaler) and hasattr(scaler, "get_scale")
        self._scale = float(scaler.get_scale()) if foreign else 1.0
        self._calls: list[Call] = []
        self._parameters: list[Parameter] = []
        self._outputs: list[Figures] = []
        self._parted: list[str] = []
        self._notes: list[str] = []
        self._died: str | None = None
        self._scales: dict[str, float] = {}
        self._whole = a.compiled or b.compiled

    def batch(self, at: int, batch: Any, snapshot: Snapshot, leaves: list[Any]) -> None:
        """All runs of one batch; everything is put back after each."""
        step = self._step if batch is _NONE else functools.partial(self._step, batch)
        run = functools.partial(self._run, step, snapshot, leaves)
        tape = Tape()
        first = First(self._room, self._scale)
        seen, error = run(self._a, first, tape)
        if error is not None:
            raise error
        if first.outermost and not any(first.kept.values()):
            raise UsageError(
                "the model was called and no tensor of it could be read, such as of a model on the meta device: give "
                "one that holds numbers"
            )
        if not first.outermost and seen is not None and seen.transformed:
            raise UsageError(
                "the step calls the model inside of torch.func transforms, or while a graph is traced, and nowhere "
                "else: nothing can be compared there; give a step that calls it plainly"
            )
        if not first.outermost:
            raise UsageError(
                "the step has not called the model: give the module that it calls itself, not one that wraps or copies "
                "it, or a step that takes one of the batches"
            )
        tape.rewind()
        second = Second(first, self._floor(), self._scale)
        _, error = run(self._b, second, tape)
        if error is not None and self._died is None:
            self._died = f"{type(error).__name__}: {error}".split("\n")[0][:300]
        if second.drawn:
            raise UsageError(
                "the step draws its own data: the second run called the model with another batch, so nothing can be "
                "told; draw it once and pass it, compare(model, step, batches=[batch]), with a step that takes it"
            )
        self._note(first, second, tape)
        owned: list[tuple[Key, Own]] = []
        if self._own and not (error is None and _identical(second)) and not second.strayed:
            owned = self._alone(first, run, tape)
        self._take(at, first, second, owned, seen)

    def _alone(self, first: First, run: Callable[..., Any], tape: Tape) -> list[tuple[Key, Own]]:
        """The error of each module's own code, in the order in which it was made."""
        alone = Alone(first, lambda: self._b.lower(self._kind))
        tape.rewind()
        run(self._b, alone, tape, Sums(alone.on_sum))  # what it dies of, the second run has died of
        limit = self._b.dtype or _main(alone)
        yardstick = Yardstick(first, alone, limit, carry=self._whole)
        tape.rewind()
        _, error = run(self._a, yardstick, tape)
        if error is not None:
            self._notes.append(f"what rounding explains could not be measured everywhere ({type(error).__name__})")
        return own_errors(alone, yardstick)

    def _run(
        self,
        step: Callable[[], Any],
        snapshot: Snapshot,
        leaves: list[Any],
        setting: Setting,
        one: Pass,
        tape: Tape,
        *modes: Any,
    ) -> tuple[Boundaries | None, Exception | None]:
        """One run of the step; what it has died of, if it has."""
        died: Exception | None = None
        boundaries = None
        try:
            for p, _ in leaves:
                p.grad = None
            with contextlib.ExitStack() as stack:
                stack.enter_context(put_on(setting, self._model, self._kind))
                inside = not setting.compiled and (isinstance(one, Yardstick) or not self._whole)
                boundaries = Boundaries(self._model, one, inside=inside)
                stack.enter_context(boundaries)
                attachment = hooks.Attachment(one, one)
                stack.callback(attachment.remove)
                stack.enter_context(snapshot)
                if not setting.compiled:
                    for mode in (tape, *modes):
                        stack.enter_context(mode)
                one.begin(boundaries, attachment)
                try:
                    step()
                except Enough:
                    pass
        except UsageError:
            raise
        except Exception as error:
            traceback.clear_frames(error.__traceback__)  # else the tensors of this run live on
            died = error
        finally:
            snapshot.restore()
        if boundaries is not None:
            self._notes += [f"not compared: {said}" for said in boundaries.failures]
        self._scales["a" if setting is self._a else "b"] = one.scale
        return boundaries, died

    # --- what the runs have shown ---------------------------------------------------------------------

    def _floor(self) -> str | None:
        """The lower format of the two settings, where they name it."""
        named = [d for one in (self._a, self._b) for d in (one.dtype, one.autocast) if d is not None]
        return max((form(d) for d in named), key=lambda one: one.eps).name if named else None

    def _note(self, first: First, second: Second, tape: Tape) -> None:
        if second.strayed:
            self._notes.append(
                "after its first call the model was handed other whole numbers in the two runs, such as tokens that it "
                "had chosen: what comes after is no longer alike, and no module's own error is told; compare one call"
            )
        if tape.lost:
            self._notes.append("the two runs drew random numbers in another order: dropout masks may differ")
        self._notes += second.unlike[:5]
        if first.references.sampled:
            n = first.references.sampled
            self._notes.append(f"{n} tensors did not fit into the room given and were compared by a sample")
        if self._whole:
            self._notes.append("a compiled model is compared as a whole: its modules cannot be looked into")

    def _take(
        self,
        at: int,
        first: First,
        second: Second,
        owned: list[tuple[Key, Own]],
        seen: Boundaries | None,
    ) -> None:
        by_call: dict[Key, list[Own]] = {}
        for owner, own in owned:
            by_call.setdefault(owner, []).append(own)
        for key in first.ended:
            figures = second.figures.get(key, [])
            errors = by_call.get(key, [])
            self._calls.append(
                Call(
                    module=key[0],
                    type=seen.types[key[0]] if seen is not None else "",
                    call=key[1],
                    batch=at,
                    input=_worst([one for one in figures if one.tensor.startswith("input")]),
                    output=_worst([one for one in figures if one.tensor.startswith("output")]),
                    gradient=_worst(second.gradients.get(key, [])),
                    own=max(errors, key=lambda own: own.times, default=None),
                )
            )
        order = dict.fromkeys(key[0] for key, own in owned if own.times > MULTIPLE)
        self._parted += [path for path in order if path not in self._parted]
        names = {} if seen is None else {name: owner for name, owner, _ in seen.names.parameters()}
        self._parameters += [
            Parameter(name=name, module=names.get(name, ""), batch=at, gradient=gradient)
            for name, gradient in second.parameters.items()
        ]
        outputs = [one for key in first.outermost for one in second.figures.get(key, [])]
        outputs = [one for one in outputs if one.tensor.startswith("output")]
        logits = [one for one in outputs if "logits" in one.tensor] or outputs
        told = _worst(logits)
        if told is not None:
            self._outputs.append(told)

    def likeness(self, batches: int, notes: Sequence[str]) -> Likeness:
        scales = {f"loss scale {name}": scale for name, scale in self._scales.items() if scale != 1.0}
        return Likeness(
            a=self._a.label,
            b=self._b.label,
            calls=tuple(self._calls),
            parameters=tuple(self._parameters),
            outputs=tuple(self._outputs),
            parted=tuple(self._parted),
            batches=batches,
            died=self._died,
            notes=tuple(dict.fromkeys((*self._notes, *notes))),
            context={"torch": torch.__version__, "device": self._kind, **scales},
        )


def _worst(figures: list[Figures]) -> Figures | None:
    return min(figures, key=lambda one: (not one.only_b, one.cosine, -one.error), default=None)


def _identical(second: Second) -> bool:
    told = [one for by_call in (second.figures, second.gradients) for rows in by_call.values() for one in rows]
    told += second.parameters.values()
    return not second.unlike and all(not (one.max_abs or one.only_a or one.only_b) for one in told)


def _main(alone: Alone) -> torch.dtype:
    """The dtype that most parameters had: one module that is kept lower does not speak for the model."""
    floats = [dtype for dtype in alone.weights.values() if dtype.is_floating_point]
    return Counter(floats).most_common(1)[0][0] if floats else torch.float32


def _checked(
    model: Any, step: Any, a: Any, b: Any, batches: Any, optimizer: Any, scaler: Any, room: Any
) -> tuple[Setting, Setting, list[Any] | None]:
    if not isinstance(model, nn.Module):
        raise UsageError(f"model is a {type(model).__name__}: pass the torch.nn.Module that the step runs")
    if not callable(step):
        raise UsageError(
            f"compare needs a function that runs one step, got a {type(step).__name__}: nanhunt.compare(model, step)"
        )
    trained_with(optimizer, scaler)
    made(model)
    if isinstance(model, torch.jit.ScriptModule):
        raise UsageError("the model is a ScriptModule, which nobody can look into: give the module it was made from")
    if isinstance(room, bool) or not isinstance(room, int) or room < 0:
        raise UsageError(f"room={room!r}: give the bytes of memory that the first run's numbers may take")
    handed = None
    if batches is not None:
        if isinstance(batches, (torch.Tensor, str, bytes, dict)) or not isinstance(batches, Iterable):
            raise UsageError(f"batches is a {type(batches).__name__}: give a list of batches, such as [batch]")
        handed = list(batches)
        if not handed:
            raise UsageError("batches is empty: give at least one, or leave it out")
    if ranks.together():
        raise UsageError("compare runs a step several times, on one rank: not with a process group")
    return parse(a, "a"), parse(b, "b"), handed
