"""Why a bad value was made: one word of a closed list, a sentence with the numbers, and what to do."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from . import advice, forward_rules, phrases, update_rules
from .evidence import Evidence
from .numerics import fmt

# The closed list: every word a report can give, and what it says.
CAUSES: dict[str, str] = {
    "overflow": "a result from finite operands is larger than the dtype can hold",
    "underflow": "an eps or a product was rounded to zero, and that zero was divided by or logged",
    "zero_division": "a division by an exact zero: an empty count, a constant column, a zero norm",
    "domain": "log, sqrt, pow, acos, atanh ... of a number they are not defined for",
    "inf_arithmetic": "Inf - Inf, 0 * Inf or Inf / Inf: an Inf that was there became NaN",
    "masked_row": "softmax over a row in which everything is masked with -inf",
    "empty_reduction": "mean, std or a loss over nothing, or std over one number",
    "singular_gradient": "the forward value is fine, its derivative is not defined there: sqrt at 0, acos at 1",
    "bad_input": "the batch held NaN or Inf when it came in",
    "bad_parameter": "a parameter held NaN or Inf before the step",
    "bad_buffer": "a buffer or a piece of optimizer state held NaN or Inf before the step",
    "uninitialised": "memory that nobody had written was read",
    "literal": "a NaN or Inf that the program itself wrote down as a number",
    "loss_scale": "it overflows with this loss scale and fits without it",
    "optimizer": "the update itself: a learning rate or another of its numbers is not finite",
    "collective": "it came from another process",
    "unknown": "nothing that is known fits",
}


@dataclass(frozen=True, slots=True)
class Verdict:
    cause: str
    why: str
    advice: tuple[str, ...]


def explain(e: Evidence | None, cause: str | None, tensor: str, kind: str) -> Verdict:
    """The verdict on a birth. `cause` is set where the birth itself says it: a literal, a bad weight."""
    if e is None:
        word = cause or "unknown"
        return Verdict(word, f"{tensor} is {kind}: {CAUSES[word]}.", advice.of(word))
    given = _GIVEN.get(cause or "")
    if given is not None:
        return given(e, cause or "", tensor)
    for rule in (*update_rules.RULES, *forward_rules.RULES):
        found = rule(e)
        if found is not None:
            why = found.why + phrases.trap(e) + phrases.autocast(e)
            if not why.startswith(e.op.removesuffix("_forward")):  # names of ops stay as they are written
                why = why[:1].upper() + why[1:]
            return Verdict(found.cause, why, advice.of(found.cause, e, *found.special))
    why = f"{phrases.op(e)} gave {phrases.many(e)} from {phrases.operands(e)}."
    return Verdict("unknown", why, advice.of("unknown"))


# --- what the birth itself says ------------------------------------------------------------------------------------


def _stood(e: Evidence, cause: str, tensor: str) -> Verdict:
    if cause == "bad_input":
        name = "A tensor of the batch" if tensor == "batch" else tensor
        why = f"{name} held {phrases.many(e)} when it came in; no module is to blame."
    else:
        what = "parameter" if cause == "bad_parameter" else "buffer"
        why = f"The {what} {tensor} held {phrases.many(e)} before this step; this op is the first to read it."
    return Verdict(cause, why, advice.of(cause, e))


def _unwritten(e: Evidence, cause: str, tensor: str) -> Verdict:
    why = f"Memory from torch.empty was read before all of it was written: {phrases.many(e)}."
    return Verdict(cause, why, advice.of(cause, e))


def _received(e: Evidence, cause: str, tensor: str) -> Verdict:
    return Verdict(cause, f"What came in from another process held {phrases.many(e)}.", advice.of(cause, e))


def _written_down(e: Evidence, cause: str, tensor: str) -> Verdict:
    numbers = ", ".join(f"{k} = {fmt(v)}" for k, v in e.scalars.items() if not math.isfinite(v))
    why = f"{e.op} was given {numbers or e.kinds[0]} as a number: {phrases.many(e)}."
    return Verdict(cause, why, advice.of(cause, e))


_GIVEN: dict[str, Callable[[Evidence, str, str], Verdict]] = {
    "bad_input": _stood, "bad_parameter": _stood, "bad_buffer": _stood, "uninitialised": _unwritten,
    "collective": _received, "literal": _written_down,
}  # fmt: skip
