"""When a step begins and when it is over, told from what the program does; each one is filled into a draft."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import torch
from torch import nn

from .. import batches, hooks, internals, probe, ranks
from ..compiled import has_compiled
from ..naming import Names
from .draft import Draft
from .holding import Held, bad_weights
from .updates import state_dtypes

Tensor = torch.Tensor

_FIRST = 3  # recorded steps that are sampled at the start
_KINDS = (nn.ReLU, nn.ReLU6, nn.Threshold)  # modules that may be dead: their output is constant zero
_MOST = 64  # such modules that are looked at
_LARGE = 2.0**32  # a loss scale that float32 may have no room for, squared; where nothing is in float16 it just grows
_MARKED = 4  # gradients by which it is seen that those of the last backward were thrown away


class Told(Protocol):
    """Whom the drafts go to."""

    def called(self) -> None:
        """The model is called for the next step."""

    def begins(self) -> None:
        """A step begins."""

    def turned(self, draft: Draft) -> None:
        """A step has ended; its draft may still be added to."""

    def done(self, draft: Draft) -> None:
        """Nothing more will be added to this draft."""


class Pace:
    """Follows one model's training, whatever shape its loop has.

    A step begins with a backward. It ends with the optimizer's step, or where a GradScaler is used with the scaler's
    update; other optimizers that step before the next backward belong to it. An optimizer that is handed a closure
    runs the backwards inside its step. Without any optimizer a step ends when a backward finds the gradients of the
    one before replaced, zeroed or gone.

    Attributes:
        step: number of the step that runs, or of the next one.
        seen: whether anything of a training was seen.
        holds: whether bad updates are held back.
        scale: the loss scale, as far as it is known without waiting.
        autocast: dtype that the forward runs in, where whoever follows knows it better.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Iterable[torch.optim.Optimizer],
        scaler: Any,
        told: Told,
        *,
        guarded: Callable[..., Any],
        every: int,
        sample: int,
        hold: bool,
        number: Callable[[], int] | None,
        pack: bool,
    ) -> None:
        self.names = Names(model)
        self._told, self._guarded = told, guarded
        self._every, self._sample, self.holds, self._pack = every, sample, hold, pack
        self._number = number
        self._handed = weakref.WeakSet(optimizers)
        self._concerns: weakref.WeakKeyDictionary[torch.optim.Optimizer, bool] = weakref.WeakKeyDictionary()
        self._scaler = scaler
        self.step = self._recorded = self._depth = 0
        self.seen = False
        self.autocast: str | None = None
        self.scale = 1.0
        self.aside = False  # somebody else runs the step: everything that would move a weight is held back
        self.draft: Draft | None = None
        self._held = Held()
        self._ran = self._root_called = False
        self._calls: tuple[batches.Picked, str | None] = [], None
        self._dead: list[tuple[str, Tensor]] = []
        self._scaled: dict[int, Tensor] = {}  # id of a scaled loss -> the loss
        self._scaling: Any = None  # the scaler that has multiplied the loss of this step
        self._marks: list[tuple[Tensor, int, int]] = []
        self._closing: torch.optim.Optimizer | None = None  # that runs a closure which ends with the backward
        parameters = list(model.parameters())
        self._device = parameters[0].device.type if parameters else "cpu"
        self._casts = torch.amp.is_autocast_available(self._device)
        compiled = has_compiled(model)
        self._kinds = not compiled and 0 < sum(isinstance(m, _KINDS) for m in model.modules()) <= _MOST
        self._following = hooks.Following(self, None if compiled else model, self._on_call)

    def remove(self) -> None:
        self._following.remove()
        self._held.restore()
        self.close()
        self._calls, self._dead, self._scaled = ([], None), [], {}
        self._scaling, self._marks, self._closing = None, [], None
        self.names.forget()

    # --- events -----------------------------------------------------------------------------------

    def _on_call(self, args: Any, kwargs: Any) -> None:
        if torch.is_grad_enabled() and internals.graph_task() == -1:
            self._guarded(self.called, args, kwargs)

    def on_backward_begin(self, roots: tuple[Any, ...], create_graph: bool) -> None:
        self._depth += 1
        if self._depth == 1 and internals.graph_task() == -1:
            self._guarded(self._backward_begins, roots)

    def on_backward_end(self, given: tuple[Any, ...], grads: Any, ok: bool) -> None:
        self._depth -= 1
        if not self._depth and internals.graph_task() == -1:
            self._guarded(self._backward_ended, grads)

    def on_optimizer(self, optimizer: torch.optim.Optimizer, after: bool, closure: bool) -> None:
        if self._concerned(optimizer):
            self._guarded(self._stepped if after else self._steps, optimizer, closure)

    def on_scaler(self, scaler: Any, what: str, before: Any, after: Any) -> None:
        if (self._scaler is None or self._scaler is scaler) and scaler.is_enabled():
            self._guarded(self._scaler_event, scaler, what, before, after)

    def on_clip(self, parameters: list[Tensor], max_norm: float, total_norm: Any) -> None:
        if self.draft is not None and not self.draft.over and not self.aside:
            self._guarded(self._clip, self.draft, parameters, max_norm, total_norm)

    # --- the model and its loss ---------------------------------------------------------------------

    def called(self, args: Any, kwargs: Any) -> None:
        """The model is called with what belongs to the next step, or to the one that is being accumulated."""
        if self.aside or internals.off_limits():
            return
        self._ran = self._root_called = True
        if self.draft is not None and not self.draft.over:
            return  # a later micro-batch
        self._told.called()
        if self._wanted(self.next()):
            dtype = None
            if self._casts and torch.is_autocast_enabled(self._device):
                dtype = str(torch.get_autocast_dtype(self._device)).removeprefix("torch.")
            self._calls = batches.pick(args, kwargs), dtype
            if self._kinds and self._sampled():
                self._following.outputs(_KINDS, self._on_output)

    def _on_output(self, module: nn.Module, out: Any) -> None:
        if id(module) in self.names.modules and type(out) is Tensor and len(self._dead) < _MOST:
            self._guarded(self._output, module, out)

    def _output(self, module: nn.Module, out: Tensor) -> None:
        numbers = probe.payload(out) if out.requires_grad and not internals.off_limits() else None
        if numbers is not None:
            self._dead.append((self.names.modules[id(module)][0], numbers.detach().any().logical_not_()))

    def _backward_begins(self, roots: tuple[Any, ...]) -> None:
        self._following.no_outputs()
        if self.aside or internals.off_limits() or (self._root_called and not self._ran):
            return  # the last: another model's
        self._held.restore()
        if self.draft is not None and not self.draft.over and self._begun_anew():
            self._end(self.draft)
        draft = self._open()
        if draft.backwards and not draft.closure and any(p.grad is None for p, _, _ in self._marks):
            draft.forget_backwards()  # a GAN's discriminator, after the generator's turn; a batch that was given up
        draft.backwards += 1
        draft.scaler = self._scaling or draft.scaler
        if not draft.wanted:
            return
        for root in roots:
            if isinstance(root, Tensor) and root.numel() == 1 and root.is_floating_point() and not root.is_meta:
                loss = self._scaled.pop(id(root), None)
                draft.loss(root if loss is None else loss, scaled=loss is None and draft.scaler is not None)

    def _backward_ended(self, grads: Any) -> None:
        draft = self.draft
        if draft is None or self.aside:
            return
        if isinstance(grads, tuple) and any(isinstance(grad, Tensor) for grad in grads):
            draft.forget_loss()  # of autograd.grad: it fills no .grad
        elif self._closing is not None:
            self._before(draft, self._closing)
        else:
            self._marks = [
                (p, id(grad), grad._version)
                for p, _ in zip(self._with_gradient(), range(_MARKED))
                if (grad := p.grad) is not None
            ]
            if draft.wanted and not self._handed and not any(self._concerns.values()):
                draft.gradients.forget()
                draft.gradients.take(self._with_gradient(), self.name, scaled=draft.scaler is not None)

    def _with_gradient(self) -> Iterator[Tensor]:
        return (p for _, _, p in self.names.parameters() if p.grad is not None)

    def _begun_anew(self) -> bool:
        """In a loop without any optimizer: the gradients of the last backward are no longer what they were."""
        if self._handed or any(self._concerns.values()):
            return False
        return any(p.grad is None or (id(p.grad), p.grad._version) != (i, v) for p, i, v in self._marks)

    # --- the optimizer, the scaler, the clipping ------------------------------------------------------

    def _concerned(self, optimizer: torch.optim.Optimizer) -> bool:
        known = self._concerns.get(optimizer)
        if known is None:
            params = [p for group in optimizer.param_groups for p in group["params"]]
            known = optimizer in self._handed or any(id(p) in self.names.owners for p in params)
            if not known and self.names.refresh():
                known = any(id(p) in self.names.owners for p in params)
            self._concerns[optimizer] = known
        return known

    def _steps(self, optimizer: torch.optim.Optimizer, closure: bool) -> None:
        if self.aside:
            self._held.hide(optimizer)
            return
        draft = self.draft
        if draft is None or (draft.over and (closure or id(optimizer) in draft.stepped)):
            draft = self._open()
        draft.over = False
        draft.closure = closure
        if draft.wanted:
            draft.before_update(optimizer, self.name)
        if closure:  # the gradients that stand there are old
            self._closing = None if isinstance(optimizer, torch.optim.LBFGS) else optimizer
        else:
            self._before(draft, optimizer)

    def _before(self, draft: Draft, optimizer: torch.optim.Optimizer) -> None:
        """The gradients stand, and the weights are about to move."""
        self._gradients(draft, optimizer)
        if self.holds and draft.wanted and draft.bad_now(losses=not ranks.together()):
            self._hold_back(draft, optimizer)

    def _hold_back(self, draft: Draft, optimizer: torch.optim.Optimizer) -> None:
        if bad_weights(_params(optimizer)):
            draft.note("the weights are already bad: holding the update back would save nothing")
            return
        self._held.hide(optimizer)
        draft.held = True
        draft.note("nanhunt held the update back: the weights are as the step before has left them")

    def _stepped(self, optimizer: torch.optim.Optimizer, closure: bool) -> None:
        if self.aside:
            self._held.restore()
            return
        self._closing = None
        draft = self.draft
        if draft is None:
            return
        if closure:
            self._gradients(draft, optimizer)
        if draft.wanted:
            draft.after_update(optimizer, self.name)
        self._held.restore()
        draft.stepped.append(id(optimizer))
        if draft.sampled and "dtypes" not in draft.given:
            draft.given["dtypes"] = _dtypes(p.dtype for g in optimizer.param_groups for p in g["params"])
            draft.given["state_dtypes"] = _dtypes(state_dtypes(optimizer))
        if draft.scaler is None:  # else the step ends when the scaler is updated
            self._end(draft)

    def _gradients(self, draft: Draft, optimizer: torch.optim.Optimizer) -> None:
        """What the optimizer is about to be given."""
        if not draft.wanted:
            return
        draft.rates(optimizer)
        self._loss_scale(draft)
        scaled = draft.scaler is not None and id(optimizer) not in draft.unscaled
        self._measure(draft, _params(optimizer), scaled=scaled)

    def _measure(self, draft: Draft, params: Iterable[Tensor], *, scaled: bool) -> None:
        draft.gradients.take(params, self.name, scaled=scaled, wide=scaled and self.scale > _LARGE)

    def _loss_scale(self, draft: Draft) -> None:
        if draft.scaler is not None and not draft.scale_taken:
            scale = _scale(draft.scaler)
            if not isinstance(scale, Tensor) or scale.is_cpu:
                self.scale = float(scale)
            draft.scale("scale", scale)
            draft.scale_taken = True

    def _scaler_event(self, scaler: Any, what: str, given: Any, out: Any) -> None:
        if what == "scale":
            self._scaling = scaler
            for loss, scaled in zip(*map(_flat, (given, out))):
                if loss.numel() == 1:
                    self._scaled[id(scaled)] = loss.detach()
            return
        draft = self.draft
        if draft is None or self.aside:
            return
        if what == "unscale_" and isinstance(given, torch.optim.Optimizer):
            draft.unscaled.add(id(given))
        elif what == "step:before" and isinstance(given, torch.optim.Optimizer) and self._concerned(given):
            draft.tried.append(id(given))
            draft.fused = draft.fused or bool(getattr(given, "_step_supports_amp_scaling", False))
            self._gradients(draft, given)
        elif what == "update:before" and draft.scaler is scaler and draft.wanted:
            self._loss_scale(draft)
        elif what == "update" and draft.scaler is scaler:
            if draft.wanted:
                draft.scale("scale_after", _scale(scaler))
            self._end(draft)

    def _clip(self, draft: Draft, parameters: list[Tensor], max_norm: float, total_norm: Any) -> None:
        if not draft.wanted:
            return
        self._loss_scale(draft)
        clipped = set(map(id, parameters))
        still_scaled = draft.scaler is not None
        for optimizer in [one for one, known in self._concerns.items() if known] or list(self._handed):
            owned = _params(optimizer)
            scaled = still_scaled and id(optimizer) not in draft.unscaled
            if any(id(p) in clipped for p in owned):
                self._measure(draft, owned, scaled=scaled)
                draft.clip((p for p in owned if id(p) in clipped), max_norm, total_norm, scaled=scaled)
                clipped.difference_update(map(id, owned))
        rest = [p for p in parameters if id(p) in clipped and id(p) in self.names.owners]
        if rest:  # of an optimizer that has not been seen yet
            scaled = still_scaled and not draft.unscaled
            self._measure(draft, rest, scaled=scaled)
            draft.clip(rest, max_norm, total_norm, scaled=scaled)

    def devices(self) -> set[torch.device]:
        """Where the parameters are."""
        return {p.device for _, _, p in self.names.parameters()}

    def name(self, p: Tensor) -> str:
        owners = self.names.owners.get(id(p))
        if owners:
            return owners[0][0]
        for optimizer in self._concerns:
            for i, group in enumerate(optimizer.param_groups):
                for j, one in enumerate(group["params"]):
                    if one is p:
                        return f"param_groups[{i}]['params'][{j}]"
        return "a parameter"

    # --- drafts -------------------------------------------------------------------------------------

    def next(self) -> int:
        """The number of the step that runs, or of the next one."""
        return self._number() if self._number is not None else self.step

    def _wanted(self, number: int) -> bool:
        return number % self._every == 0

    def _sampled(self) -> bool:
        return self._recorded < _FIRST or self._recorded % self._sample == 0

    def _open(self) -> Draft:
        """The draft of the step that runs."""
        if self.draft is not None and not self.draft.over:
            return self.draft
        self.close()
        self.seen = True
        self._told.begins()
        number = self.next()
        wanted = self._wanted(number)
        self.draft = draft = Draft(number, wanted=wanted, sampled=wanted and self._sampled(), pack=self._pack)
        if wanted:
            batch, autocast = self._calls
            draft.take_batch(batch)
            autocast = self.autocast or autocast
            if autocast is not None:
                draft.given["autocast"] = autocast
            draft.outputs(self._dead)
        self._calls, self._dead = ([], None), []
        return draft

    def _end(self, draft: Draft) -> None:
        draft.over = True
        if draft.counted:
            return  # of another optimizer, which belongs to the same step
        draft.counted = True
        self._recorded += draft.wanted
        self.step += 1
        self._ran, self._scaling, self._marks = False, None, []
        self._scaled.clear()
        self._told.turned(draft)

    def close(self, *, running: bool = True) -> None:
        """Nothing more is to be added to the draft there is; `running` is for one that has not ended, too."""
        draft = self.draft
        if draft is None or not (draft.over or running):
            return
        self.draft = None
        if not draft.counted:
            self._recorded += draft.wanted
            self.step += 1
        self._told.done(draft)


def _params(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    groups = optimizer.param_groups
    return groups[0]["params"] if len(groups) == 1 else [p for group in groups for p in group["params"]]


def _dtypes(found: Iterable[torch.dtype]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(str(dtype).removeprefix("torch.") for dtype in found))


def _flat(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [one for part in value for one in _flat(part)] if isinstance(value, (list, tuple)) else []


def _scale(scaler: Any) -> Any:
    """The scaler's own tensor, which costs no wait; else the number it tells."""
    own = getattr(scaler, "_scale", None)
    return own if isinstance(own, Tensor) else scaler.get_scale()
