"""A capsule cut down to what still fails: the samples, and the rows of the weights, that it cannot do without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ..errors import UsageError
from ..leaves import leaves
from . import rebuild
from .bisecting import Pick, Trial, fewest
from .cargo import Cargo, Room
from .catch import Part, Parts
from .replaying import Capsule, load_capsule
from .running import kinds, own

Tensor = torch.Tensor

_KEPT = 4  # rows of a weight that are kept at most
_WIDER = 4
_GROUPS = 6  # sizes of dimensions of an op's operands that are tried


def slimmed(folder: Path, parts: Parts, *, max_mb: float) -> Parts:
    """The same fault with fewer numbers. Every cut is tried: what does not fail without it keeps it.

    A module of a class of the program's own is not run again here, and its call is left as it is.

    Args:
        folder: the whole capsule, as it was written.
        parts: what it was written from.
    """
    capsule = load_capsule(folder, max_mb=max_mb)
    room = Room(int(max_mb * 1e6))
    op = parts.op and (_op(capsule, parts.op, room) or parts.op)
    call = parts.call and (_call(capsule, parts.call, room) or parts.call)
    if op is not None and call is not None and "slim" in call.facts and op.cargo.size > _WIDER * call.cargo.size:
        op = None  # the module shows the fault with less
    return Parts(op=op, call=call, hashes=parts.hashes)


def _op(capsule: Capsule, part: Part, room: Room) -> Part | None:
    try:
        trial = Trial(capsule, None, None, how="op")
    except UsageError:  # an op that is not run by name
        return None
    if not trial.fails(()):
        return None
    pick = _samples(trial)
    args, kwargs = trial.taken(pick)[0]
    for size in sorted({n for _, t in leaves((args, kwargs)) for n in t.shape if n > 1}, reverse=True)[:_GROUPS]:
        needed = fewest(range(size), lambda some: trial.bad(_along(some, size, (args, kwargs))))  # noqa: B023
        args, kwargs = _along(needed, size, (args, kwargs))
    if not trial.bad((args, kwargs)):
        return None
    cargo = Cargo(room)
    cargo.add("args", args)
    cargo.add("kwargs", kwargs)
    return Part(cargo, {**part.facts, "slim": True})


def _call(capsule: Capsule, part: Part, room: Room) -> Part | None:
    """Of a module of torch.nn that calls no other, when its forward alone shows the fault."""
    if capsule.finding.phase not in ("forward", "state"):
        return None
    try:
        trial = Trial(capsule, None, None, how="module")
    except UsageError:  # a class of the program's own
        return None
    if not trial.fails(()):
        return None
    call, _ = trial.taken(_samples(trial))
    spec, state = capsule.described()
    spec, state, call = _rows(capsule, spec, state, call)
    cargo = Cargo(room)
    cargo.add("call", {"args": call[0], "kwargs": call[1]})
    cargo.add("state", state)
    cargo.add("build", spec)
    cargo.add("random", capsule.random())
    return Part(cargo, {**part.facts, "slim": True})


def _samples(trial: Trial) -> Pick:
    size = trial.size(0)
    if size is None:
        return ()
    return ((0, torch.tensor(fewest(range(size), lambda some: trial.fails(((0, torch.tensor(list(some))),))))),)


def _along(some: Any, size: int, value: Any) -> Any:
    """What stands at some indices, in every dimension of this size."""
    index = torch.tensor(list(some), dtype=torch.long)

    def part(t: Tensor) -> Tensor:
        for dim, there in enumerate(t.shape):
            if there == size:
                t = t.index_select(dim, index)
        return t

    return pytree.tree_map_only(Tensor, part, value)


def _rows(capsule: Capsule, spec: Any, state: dict[str, Tensor], call: Any) -> tuple[Any, dict[str, Tensor], Any]:
    """Of a linear map the outputs that are bad, of an embedding the rows that are read."""
    whole = spec, state, call
    kind, config = spec["type"], spec["config"]
    args, kwargs = own(call)
    if kind == "Linear":
        with torch.no_grad():
            made = rebuild.built(spec, own(state)).forward(*args, **kwargs)
        bad = (~torch.isfinite(made)).reshape(-1, made.shape[-1]).any(0).nonzero().flatten()[:_KEPT]
        state = {name: _part(t, bad) for name, t in state.items()}
        spec = {"type": kind, "config": {**config, "out_features": len(bad)}}
    elif kind == "Embedding" and len(args) == 1 and not kwargs and config["padding_idx"] is None:
        read, place = torch.unique(args[0], return_inverse=True)
        state = {"weight": _part(state["weight"], read)}
        spec = {"type": kind, "config": {**config, "num_embeddings": len(read)}}
        call = (place,), {}
    else:
        return whole
    try:
        with torch.no_grad():
            again = rebuild.built(spec, own(state)).forward(*own(call)[0], **own(call)[1])
    except Exception:  # under autocast, say
        return whole
    return (spec, state, call) if capsule.finding.kind in kinds(again) else whole


def _part(t: Tensor, rows: Tensor) -> Tensor:
    part = t.detach().index_select(0, rows)
    return nn.Parameter(part, requires_grad=t.requires_grad) if isinstance(t, nn.Parameter) else part
