"""What a module's ranges alone say of the cause: the words used where no op is known."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from . import numerics
from .finding import TensorStats
from .verdict import Call, Origin

_SMALL = ("float16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
_NEAR = 256.0


def cause(origin: Origin, stats: Sequence[TensorStats], dtype: str | None) -> str:
    """One word of the closed list, as far as ranges can tell; `unknown` where they can not."""
    if origin.facts.get("handed"):
        return "collective"
    if origin.phase == "input":
        return "bad_input"
    if origin.phase == "state":
        return "bad_buffer" if origin.facts.get("what") == "buffer" else "bad_parameter"
    if origin.facts.get("scaled"):
        return "loss_scale"
    if origin.phase == "optimizer":
        if spoilt(stats):
            return "collective" if origin.facts.get("together") else "unknown"
        return "overflow" if "nan" not in origin.kinds and _largest(stats, "gradient") > 1e15 else "optimizer"
    if origin.literal:
        return "literal"
    if "nan" in origin.kinds:
        return "unknown"
    limit = numerics.format_of(dtype or "float32")
    largest = [s.absmax or 0.0 for s in stats]
    inputs = max((s.absmax or 0.0 for s in stats if s.role == "input"), default=0.0)
    weights = max((s.absmax or 0.0 for s in stats if s.role == "weight"), default=0.0)
    if limit is None:
        return "unknown"
    # Near the limit, or a product of what came in that comes near it: else it may be a division by zero as well.
    near = limit.max / _NEAR if dtype in _SMALL else math.sqrt(limit.max)
    return "overflow" if max([*largest, inputs * weights], default=0.0) > near else "unknown"


def why(origin: Origin, stats: Sequence[TensorStats], dtype: str | None) -> str | None:
    """One or two sentences with the numbers that are known."""
    bad = next(
        (s for s in stats if s.role in ("output", "gradient", "input", "weight", "buffer", "state") and s.first_bad),
        None,
    )
    said = []
    if bad is not None:
        said.append(
            f"{_count(bad)} of {numerics.fmt(bad.numel)} values of {bad.name or bad.role}, "
            f"first at {list(bad.first_bad or ())}"
        )
    if origin.facts.get("handed") and origin.phase != "optimizer":
        said.append(_came(origin.facts["handed"], origin.facts.get("collective") or {}))
    elif origin.phase == "input":
        said.append("it was so before the model was called")
    elif origin.phase == "state":
        said.append("it was so before the step began")
    elif origin.phase == "optimizer":
        rates = origin.facts.get("rates") or []
        wrong = [r for r in rates if isinstance(r, float) and not math.isfinite(r)]
        gradient = spoilt(stats)
        if wrong:
            said.append(f"the learning rate is {wrong[0]}")
        elif gradient is not None:
            said.append(
                f"its gradient held {_count(gradient)} when the step began, although backward had given finite ones"
            )
        elif origin.facts.get("late"):
            said.append("it was written after the optimizer step, before the model ran again")
        else:
            said.append("every gradient that backward gave was finite")
    else:
        inputs = [s.absmax for s in stats if s.role == "input" and s.absmax is not None]
        weights = [s.absmax for s in stats if s.role == "weight" and s.absmax is not None]
        given = []
        if inputs:
            given.append(f"input |x| up to {numerics.fmt(max(inputs))}")
        if weights:
            given.append(f"weight up to {numerics.fmt(max(weights))}")
        if given:
            said.append(", ".join(given) + " (all finite)")
        limit = numerics.format_of(dtype) if dtype else None
        if limit is not None and "nan" not in origin.kinds and dtype in _SMALL:
            said.append(f"{dtype} ends at {numerics.fmt(limit.max)}")
    if origin.facts.get("loss_scale") is not None:
        said.append(f"the loss scale was {numerics.fmt(origin.facts['loss_scale'])}")
    if not said:
        return None
    return "; ".join(said) + "."


def _came(handed: str, passage: dict[str, Any]) -> str:
    """By which way it came from another process, or out of a buffer that nobody has filled."""
    if passage.get("unwritten"):
        return f"it stood in the receive buffer of {handed} before, and nobody has written there"
    sent = passage.get("sent_absmax")
    given = f"; what this rank had given was finite, |x| up to {numerics.fmt(sent)}" if sent is not None else ""
    return f"it came out of {handed}{given}"


def advice(origin: Origin, word: str, dtype: str | None, call: Call | None) -> list[str]:
    """Short actions, most likely first."""
    where = f"`{call.path}`" if call is not None and call.path else "this code"
    if word == "bad_input":
        return [
            "Look at this sample in the data set: where was it divided, logged or left empty?",
            "Check each batch with torch.isfinite before the model.",
        ]
    if word in ("bad_parameter", "bad_buffer"):
        return [
            "Look at the checkpoint or the initialisation: a tensor that torch.empty made and nobody filled looks so.",
            "If training made it, watch the step before: the fault lies there.",
        ]
    if word == "loss_scale":
        return ["Let torch.amp.GradScaler find the scale: start lower, for instance at 2**16."]
    if word == "overflow" and dtype in _SMALL and origin.phase == "forward":
        return [
            f"Run {where} in float32 or bfloat16: torch.autocast(device, enabled=False) around it, x.float() into it.",
            "Scale the values down where they grow: see the trail.",
        ]
    if word == "overflow" and origin.phase == "backward":
        return [
            "Lower the loss scale, or let torch.amp.GradScaler skip such steps.",
            "Clip the gradient (after unscale_).",
        ]
    if word == "overflow":
        return [
            "Clip the gradient or lower the learning rate: the numbers were growing before this.",
            "Watch a few earlier steps: the trail shows where they grow.",
        ]
    if word == "collective":
        return [
            "Look at what the other ranks have found: the all-reduce hands on what one of them has made.",
            "If none has: look at what is done to gradients between backward and the update (clipping, averaging).",
        ]
    if origin.phase == "optimizer" and word == "unknown":
        return [
            "Look at what is done to gradients between backward and the update: clipping by a norm that is zero or not "
            "finite, unscaling, averaging, a division.",
        ]
    if word == "optimizer":
        return [
            "Keep weights and optimizer state in float32; give eps a value that the dtype can hold.",
            "Check the learning rate that the scheduler gives.",
        ]
    return [
        f'Run this step once more with nanhunt.watch(..., detail="op"): it names the op in {where} and its operands.'
    ]


def spoilt(stats: Sequence[TensorStats]) -> TensorStats | None:
    """The gradient of an update, if it was bad when the update began: backward gave a finite one."""
    return next((s for s in stats if s.role == "gradient" and s.first_bad), None)


def _largest(stats: Sequence[TensorStats], role: str) -> float:
    return max((s.absmax or 0.0 for s in stats if s.role == role), default=0.0)


def _count(s: TensorStats) -> str:
    counts = ((s.nan, "NaN"), (s.pos_inf, "+inf"), (s.neg_inf, "-inf"))
    return ", ".join(f"{n} {word}" for n, word in counts if n)


def plain(value: Any) -> float | None:
    """A number for the record, or None."""
    return float(value) if isinstance(value, (int, float)) else None
