"""The numbers at the birth, while the tensors are still in hand, and the record made of them."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from . import batches, coarse, finding, frames, listing, outline, probe, ranks, sites
from .finding import Finding, TensorStats
from .leaves import arguments, forward_parameters
from .naming import type_name
from .verdict import Call, Origin, Rec

if TYPE_CHECKING:
    from .capsule.catch import Catch
    from .judge import Judge
    from .observer import Observer

_ROWS = 8  # tensors of one role that are described
_REACHED = 50  # modules on the way of a bad value that a report names
_OFTEN = 3  # after so many absorbed births of one kind in one place, the full numbers are not taken again


class Scene:
    """Takes what a report needs at once: later the tensors are gone, or overwritten in place."""

    def __init__(self, observer: Observer, judge: Judge, *, detail: str) -> None:
        self.observer, self.judge, self.detail = observer, judge, detail
        self.step = 0
        self.eager = False  # a compiled model is run eagerly because of this watch
        self.optimizer: Any = None
        self.catch: Catch | None = None  # of what a capsule wants
        self.loss: float | None = None
        self._batch: batches.Picked = []
        self._first_batch: batches.Picked = []
        self.step_of_last_call = 0
        self._absorbed: dict[tuple[Any, ...], int] = {}
        self._cpu = True

    # --- the batch --------------------------------------------------------------------------------

    def batch(self, recs: list[Rec], args: Any, kwargs: Any) -> None:
        """Keep a sample of what the model is called with, enough for a hash (64 numbers a tensor, copied)."""
        self._batch = batches.pick(args, kwargs)
        self._first_batch = self._first_batch or self._batch
        self.step_of_last_call = self.step
        if self.catch is not None:
            self.catch.batch(args, kwargs, self.step, self._batch)
        if self.judge.ops is not None:
            scaler = self.judge.scaling.scaler
            scale = float(scaler.get_scale()) if scaler is not None else None
            model = self.observer.names.by_path.get(recs[0].takers[0].path) if recs and recs[0].takers else None
            self.judge.ops.begin(arguments(args, kwargs, model), scale)

    def batch_hash(self) -> str | None:
        """A short hash of the batch: shapes and up to 64 numbers of each tensor, by name."""
        return batches.digest(self._batch)

    def first_batch_hash(self) -> str | None:
        """The same of the first batch that this watch has seen."""
        return batches.digest(self._first_batch)

    # --- at the birth -----------------------------------------------------------------------------

    def find(self, rec: Rec, hand: Any) -> torch.Tensor | None:
        """The tensor a record belongs to, among those in hand."""
        if hand is None or isinstance(hand, torch.Tensor):
            return hand
        for _, tensor in probe.leaves(hand, deep=True):
            known = self.observer.known(tensor)
            if known is rec or (known is None and tensor.is_inference() and _shows(tensor, rec)):
                return tensor
        return None

    def take(self, origin: Origin, rec: Rec | None, tensor: Any, module: nn.Module | None, hand: Any) -> None:
        origin.step = max(0, self.step - bool(origin.facts.get("late")))  # what is done after a step belongs to it
        facts = origin.facts
        of = hand if isinstance(hand, Rec) else rec  # of a gradient, the record is of the tensor it belongs to
        facts["dtype"] = _dtype_name(of.dtype) if of is not None else None
        facts["order"] = self.observer.seen - self.observer.seen_before
        facts["trail"] = list(self.observer.trail)
        facts["site"] = self._site(origin, tensor is not None)
        facts["autocast"] = _autocast(tensor)
        facts["hash"] = self.batch_hash() if tensor is not None else None
        if rec is not None:
            facts["name"] = self._name(origin, rec, module)
        if self._absorbed.get(self._signature(origin), 0) >= _OFTEN:
            facts["tensors"] = _light(origin, rec)
            return
        if (
            self.detail == "auto"
            and hand is not None
            and origin.call is not None
            and origin.phase in ("forward", "state")
        ):
            self._run_again(origin, origin.call)
        if self.catch is not None and not origin.literal:
            self.catch.born(origin, self.observer, hand)
        with torch.no_grad():
            facts["tensors"] = tuple(self._describe(origin, rec, tensor, module, hand)) or _light(origin, rec)
        if origin.phase == "optimizer" and ranks.together() and coarse.spoilt(facts["tensors"]) is not None:
            facts.setdefault("handed", f"the all-reduce of the gradient of {origin.tensor.rpartition(' of ')[2]}")
            facts.setdefault("collective", {"dtype": facts["dtype"], "sent_absmax": facts.get("sent")})

    def _run_again(self, origin: Origin, call: Call) -> None:
        """Explain a birth on the spot: the culprit's own code once more, under the tracer."""
        from .rerun import Shadow, possible, rerun  # loads the op level, which a healthy run never needs

        if origin.literal or self._absorbed.get(self._signature(origin)):
            return  # a value that was harmless before: the program is not run twice for it
        ran = _running(call)
        if ran is None or not possible(ran[0], ran[1:], self.observer.calls):
            return
        shadow = Shadow(
            self.observer.names, origin.facts.get("before"), self.catch.op if self.catch is not None else None
        )
        self.observer.shadow = shadow
        try:
            known = rerun(shadow, ran[0], call, ran[1], ran[2])
        finally:
            self.observer.shadow = None
        # What the first run has written, running statistics for one, the second finds there already.
        if known is not None and known["phase"] == origin.phase:
            origin.facts["op_level"] = known
            origin.literal = known["literal"]

    def absorbed(self, origin: Origin) -> bool:
        """Count an origin that was no fault; True the first time for its kind and place."""
        key = self._signature(origin)
        self._absorbed[key] = self._absorbed.get(key, 0) + 1
        if len(self._absorbed) > 4096:
            self._absorbed.clear()
        return self._absorbed.get(key, 1) == 1

    def _signature(self, origin: Origin) -> tuple[Any, ...]:
        return origin.phase, origin.call.path if origin.call else None, origin.kinds, origin.tensor

    def _site(self, origin: Origin, live: bool) -> tuple[str, int] | None:
        if origin.phase == "backward":
            if origin.call is not None and origin.call.site is not None:
                return origin.call.site
            return sites.user_site() if origin.tensor.startswith("grad of") and live else None
        if origin.facts.get("before") is None and origin.call is not None and origin.call.site is not None:
            return origin.call.site
        return sites.user_site() if live and not (origin.phase == "optimizer" and self.optimizer is None) else None

    def _name(self, origin: Origin, rec: Rec, module: nn.Module | None) -> str:
        if origin.phase == "input":
            taker = rec.takers[0].path if rec.takers else ""
            return _input_name(rec.name, self.observer.names.by_path.get(taker, module))
        if origin.phase in ("state", "optimizer", "backward") or not isinstance(rec.name, tuple):
            return origin.tensor
        before = origin.facts.get("before")
        if before is not None:
            return f"input of {before.path}" if before.path else "input"
        what, path = rec.name
        return f"{what}{path}" if isinstance(what, str) else origin.tensor

    def _describe(
        self, origin: Origin, rec: Rec | None, tensor: Any, module: nn.Module | None, hand: Any
    ) -> Iterator[TensorStats]:
        name = origin.facts.get("name", origin.tensor)
        call = origin.call
        if origin.phase == "backward":
            if isinstance(tensor, torch.Tensor):
                yield probe.stats(tensor, "gradient", name)
            if call is not None and call.grad is not None:
                yield TensorStats(role="grad_output", name=f"into {call.path or 'the model'}", absmax=call.grad)
            yield from self._weights(call)
            return
        if origin.phase == "optimizer":
            if isinstance(tensor, torch.Tensor):
                yield probe.stats(tensor, "state" if name.startswith("optimizer state") else "weight", name)
            p = origin.facts.pop("parameter", None)
            if isinstance(p, torch.Tensor):
                if p is not tensor:
                    yield probe.stats(p, "weight", origin.tensor.rpartition(" of ")[2])
                if p.grad is not None:
                    yield probe.stats(p.grad, "gradient", "its gradient")
            return
        given: list[tuple[str, torch.Tensor]] = []
        ran = _running(call) if call is not None else None
        if call is not None and ran is not None:
            given = list(arguments(ran[1], ran[2], self.observer.names.by_path.get(call.path, ran[0])))
        for label, one in given[:_ROWS]:
            if one is not tensor and (one.is_floating_point() or one.is_complex()):
                yield probe.stats(one, "input", label)
        yield from self._weights(call, origin)
        if isinstance(tensor, torch.Tensor) and origin.phase != "state":
            yield probe.stats(tensor, "input" if origin.phase == "input" else "output", name)

    def _weights(self, call: Call | None, origin: Origin | None = None) -> Iterator[TensorStats]:
        names = self.observer.names
        module = names.by_path.get(call.path) if call is not None else None
        if module is None:
            return
        rows: list[tuple[str, torch.Tensor | None, str]] = [(n, p, "weight") for n, p in module._parameters.items()]
        rows += [(n, b, "buffer") for n, b in module._buffers.items()]
        if origin is not None and origin.phase == "state":
            owner = names.by_path.get(origin.tensor.rpartition(".")[0])
            short = origin.tensor.rpartition(".")[2]
            if owner is not None and owner is not module:
                role = "buffer" if short in owner._buffers else "weight"
                rows.insert(0, (origin.tensor, getattr(owner, short, None), role))
        for label, value, role in rows[:_ROWS]:
            if value is not None and (value.is_floating_point() or value.is_complex()):
                yield probe.stats(value, role, label)

    # --- the record -------------------------------------------------------------------------------

    def finding(self, origin: Origin) -> Finding:
        """The record of an origin: what the op level knows of it, else what the modules' ranges tell."""
        known = origin.facts.get("op_level")
        coarse_one = self._coarse(origin)
        if known is None:
            return self._pictured(coarse_one)
        context = {
            **coarse_one.context,
            "path": known["path"] or None,
            "ledger": known["ledger"],
            **known.get("notes", {}),
        }
        names = ("phase module module_type call op line source kind tensor cause why advice tensors").split()
        fields = {name: known[name] for name in names}
        fields["tensors"] = fields["tensors"] or coarse_one.tensors
        return self._pictured(dataclasses.replace(coarse_one, **fields, context=context))

    def _pictured(self, found: Finding) -> Finding:
        """With what a page draws and only a live program knows: the lines around the line, and the model."""
        types = {path: type_name(module) for path, module in self.observer.names.by_path.items()}
        pictures = {
            "source_context": listing.around(found.line, found.source),
            "modules": outline.outline(types, outline.lit(found)),
        }
        return dataclasses.replace(found, context=found.context | pictures)

    def _coarse(self, origin: Origin) -> Finding:
        facts, call = origin.facts, origin.call
        stats: tuple[TensorStats, ...] = facts.get("tensors") or ()
        dtype = facts.get("dtype")
        word = coarse.cause(origin, stats, dtype)
        line, text = sites.text(facts.get("site"))
        if call is None and origin.phase == "backward" and not origin.tensor.startswith("grad of"):
            line = text = None
        inside = call is not None and origin.phase not in ("input", "optimizer")
        return Finding(
            phase=origin.phase,
            step=origin.step,
            call=call.nth if inside and call is not None else None,
            rank=ranks.rank(),
            module=call.path if inside and call is not None else None,
            module_type=call.type_name if inside and call is not None else None,
            op=None,
            line=line,
            source=text,
            kind=origin.kind,
            tensor=facts.get("name", origin.tensor),
            cause=word,
            why=self._why(origin, stats, dtype),
            advice=tuple(coarse.advice(origin, word, dtype, call)),
            tensors=stats,
            trail=tuple(_trail(facts.get("trail") or [])),
            context=self._context(origin),
            handled=facts.get("handled"),
        )

    def _why(self, origin: Origin, stats: tuple[TensorStats, ...], dtype: str | None) -> str | None:
        why = coarse.why(origin, stats, dtype)
        if self.observer.partial and origin.phase in ("forward", "backward"):
            left_out = "Modules were left out by only= or skip=: one of them may have made it."
            why = f"{why} {left_out}" if why else left_out
        return why

    def _context(self, origin: Origin) -> dict[str, Any]:
        optimizer, scaler = self.optimizer, self.judge.scaling.scaler
        rates = [coarse.plain(g.get("lr")) for g in optimizer.param_groups] if optimizer is not None else []
        scale = origin.facts.get("loss_scale")
        if scale is None and scaler is not None:
            scale = float(scaler.get_scale())
        device = next((str(p.device) for p in self.observer.names.model.parameters()), "cpu")
        context: dict[str, Any] = {
            "autocast": origin.facts.get("autocast"),
            "loss_scale": scale,
            "lr": rates[0] if len(set(rates)) == 1 else rates or None,
            "grad_norm": self._grad_norm() if origin.phase in ("backward", "optimizer") else None,
            "batch_hash": origin.facts.get("hash"),
            "torch": torch.__version__,
            "device": device,
            "detail": "module" if origin.call is not None and origin.call.traced else self.detail,
            "not_seen": sorted(self.observer.blind) or None,
            "reached": self._reached(origin),
        }
        context |= self._among_ranks(origin)
        if origin.call is not None and self.observer.regions.hidden(origin.call):
            what = f"the modules inside {origin.call.path or 'the model'}: its code was compiled before the watch began"
            context["not_seen"] = [*(context["not_seen"] or ()), what]
        if self.eager:
            context["compiled"] = "the compiled model was run eagerly while it was watched"
        elif self.observer.regions.played:
            context["compiled"] = (
                "checked inside the compiled graph, module by module: nanhunt.hunt, or detail='op', runs the model "
                "eagerly and names the op"
            )
        return context

    def _among_ranks(self, origin: Origin) -> dict[str, Any]:
        """Which rank this is, and what tells the first of many ranks; nothing where a process trains alone."""
        place = ranks.place()
        facts = {key: origin.facts.get(key) for key in ("order", "handed", "collective")} if place else {}
        return {**place, **{key: value for key, value in facts.items() if value is not None}}

    def _reached(self, origin: Origin) -> tuple[str, ...] | None:
        """The modules that the value has come into, or out of, by now: from its birth to where it was noticed."""
        calls = self.observer.calls.last.values()
        paths = dict.fromkeys(call.path for call in calls if origin in call.own and call is not origin.call)
        return tuple(itertools.islice(paths, _REACHED)) or None

    def _grad_norm(self) -> float | None:
        """The norm over the parameters that have a gradient by now, as it stands (scaled, if it is scaled)."""
        grads = [probe.payload(p.grad) for p in self.observer.names.model.parameters() if p.grad is not None]
        with torch.no_grad():
            squares = [g.detach().double().square().sum().item() for g in grads if g is not None]
        return float(sum(squares) ** 0.5) if squares else None


def _running(call: Call) -> tuple[Any, tuple[Any, ...], dict[str, Any]] | None:
    """The module of a call that still runs, and what it was given."""
    return next((one for one in frames.running() if id(one[0]) == call.module_id), None)


def _shows(tensor: torch.Tensor, rec: Rec) -> bool:
    """Whether a tensor has the range of a record: inference tensors have nothing else to be known by."""
    numbers = probe.payload(tensor) if tensor.dtype is rec.dtype else None
    return numbers is not None and str(probe.limits(numbers)) == str((rec.lo, rec.hi))


def _trail(rows: list[tuple[Call, list[Rec], list[Rec]]]) -> Iterator[finding.Call]:
    for call, taken, given in rows:
        yield finding.Call(
            module=call.path,
            module_type=call.type_name,
            call=call.nth,
            phase="forward",
            absmax_in=max((r.absmax for r in taken), default=None),
            absmax_out=max((r.absmax for r in given), default=None),
        )


def _input_name(name: Any, module: Any) -> str:
    if not isinstance(name, tuple):
        return str(name)
    at, path = name
    if isinstance(at, int):
        names = forward_parameters(module)
        at = names[at] if at < len(names) else f"args[{at}]"
    return f"{at}{path}"


def _light(origin: Origin, rec: Rec | None) -> tuple[TensorStats, ...]:
    """The range alone: all there is once the tensor has gone."""
    if rec is None:
        return ()
    absmax = None if rec.bad else rec.absmax
    return (TensorStats(role="output", name=origin.tensor, dtype=_dtype_name(rec.dtype), absmax=absmax),)


def _dtype_name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _autocast(tensor: Any) -> str | None:
    device = tensor.device.type if isinstance(tensor, torch.Tensor) else "cpu"
    try:
        if torch.is_autocast_enabled(device):
            return str(torch.get_autocast_dtype(device)).removeprefix("torch.")
    except (RuntimeError, TypeError):
        pass
    return None
